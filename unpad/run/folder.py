"""Run directories: find one, list them, choose a free one, and match one with its checkpoints."""

import os
import secrets
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from unpad.errors import MOST_NAMES, CheckpointError, ForeignCheckpointError, RecipeError, nearest
from unpad.processes.worker import refuse_under_torchrun
from unpad.recipes.file import SUFFIXES, load_recipe, recipe_names
from unpad.recipes.recipe import Recipe
from unpad.recipes.section import kept_paths
from unpad.run import upgrade
from unpad.storage.paths import refuse_format, user_path
from unpad.storage.reading import read_shaped
from unpad.terminal.printing import resume_run

RUNS = Path("runs")
KEPT = "hf"  # small files of the model's original Hugging Face folder
RECIPE, COMMAND, CHECKPOINTS, METRICS = "recipe.yaml", "run.json", "checkpoints", "metrics.jsonl"
DEEPEST = 3  # levels below a listed folder in which runs are found
RUN_ID = "id"  # in COMMAND
MADE_BY = "made_by"  # in COMMAND: the command that created a run without training, which cannot be resumed
FAMILY = "family"  # in COMMAND: architecture of an imported model
IMPORT = "unpad import"


def find_run(run: str | Path) -> Path:
    """Find a run by its directory, or by its name under runs/.

    Raises:
        RecipeError: there is none.
    """
    if (found := _run_of(run)) is not None:
        return found
    for folder in _places(run):
        holds_run(folder)
    known = [folder.name for folder in list_runs()]
    fix = nearest(str(run), known) if known else "train one first: unpad train zh_chat"
    raise RecipeError(f'there is no run "{run}"', where=f"neither {run} nor {RUNS / run} holds a {RECIPE}", fix=fix)


def _places(run: str | Path) -> tuple[Path, Path]:
    named = user_path(run)
    return named, RUNS / named


def _run_of(run: str | Path) -> Path | None:
    """The run at a path, or of a name under runs/; None if there is none."""
    return next((folder for folder in _places(run) if (folder / RECIPE).is_file()), None)


def as_run(name: str) -> Path | None:
    """The run with a name that may also be a recipe's; None for a recipe: packaged recipes take precedence.

    Raises:
        RecipeError: no run or recipe has this name.
    """
    if name in recipe_names() or name.endswith(SUFFIXES):
        return None
    if (found := _run_of(name)) is not None or "/" in name:
        return found
    fix = nearest(name, [*recipe_names(), *(folder.name for folder in list_runs())])
    raise RecipeError(f'there is no run and no recipe "{name}"', fix=fix)


def run_recipe(folder: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load the recipe that a run keeps.

    Raises:
        RecipeError: it is missing, or no recipe of this version.
    """
    with kept_paths():
        return upgrade.split_rule(load_recipe(str(folder / RECIPE), list(overrides), parse=upgrade.parse_recipe))


def holds_run(folder: Path) -> bool:
    """Return whether a directory holds a run, rather than nothing of one. A run that was killed before its recipe was
    written has neither checkpoints nor metrics, and counts as nothing.

    Raises:
        RecipeError: it holds a run that lost its recipe.
    """
    if (folder / RECIPE).is_file():
        return True
    if left := [name for name in (CHECKPOINTS, METRICS) if (folder / name).exists()]:
        what = f"the directory holds {' and '.join(left)} of a run, and no {RECIPE}"
        raise RecipeError(what, where=str(folder), fix=f"copy its {RECIPE} back, or choose another directory")
    return False


def refuse_run(folder: Path, fix: str = "choose another --out") -> None:
    """Refuse to write a run into the directory of another.

    Raises:
        RecipeError: it holds a run, or what is left of one, or its name is that of a file.
    """
    refuse_format(folder)
    if holds_run(folder):
        raise RecipeError("the directory holds a run already", where=str(folder), fix=fix)


def refuse_new_run(folder: Path) -> None:
    """`refuse_run`, with the command that continues the run."""
    refuse_run(folder, f"continue it with {resume_run(folder)}, or choose another --out")


@dataclass(frozen=True)
class Start:
    """What a training begins or continues: the named recipe, or None for the run's own, the run, and the overrides."""

    recipe: str | None
    folder: Path
    overrides: list[str]

    @classmethod
    def of(cls, name: str | None, overrides: Sequence[str], out: Path | None, *, resume: bool) -> "Start":
        """What the words of a command name.

        Args:
            name: first word of the command: a recipe, for a new run in `out` or the next free folder. With `resume`: a
                recipe, for its newest run or the run in `out`; a run; or an override, for the run in `out`.

        Raises:
            RecipeError: there is no such run, none is named, or two are.
        """
        is_run = name is not None and resume and _run_of(name) is not None
        is_recipe = name is not None and (name in recipe_names() or name.endswith(SUFFIXES))
        if name is not None and (not resume or (is_recipe and not ("/" in name and is_run))):
            return cls(name, out or free_folder(name, resume=resume), list(overrides))
        if not resume:
            fix = "name one, as in unpad train zh_chat; unpad recipes lists them"
            raise RecipeError("no recipe is named", fix=fix)
        if name is None or ("=" in name and not is_run):
            words = [*([name] if name else []), *overrides]
            if out is None:
                known = [folder.name for folder in list_runs()]
                runs = f"; known: {', '.join(known[:MOST_NAMES])}" if known else ""
                fix = f"name it: {shlex.join(['unpad', 'train', '--resume', 'RUN', *words])}{runs}"
                raise RecipeError("no run is named to resume", where="--resume", fix=fix)
            return cls(None, find_run(out), words)
        run = find_run(name)
        if out is not None and out.resolve() != run.resolve():
            raise RecipeError(f"two runs are named: {run} and {out}", where="--resume", fix="leave out --out")
        return cls(None, run, list(overrides))


def list_runs(root: Path = RUNS) -> list[Path]:
    """Run directories under `root`, newest first; if runs/ has none, those in the working directory, which may be runs/
    itself."""
    folders = [path.parent for path in root.glob(f"*/{RECIPE}")]
    if not folders and root == RUNS:
        folders = [path.parent for path in Path().glob(f"*/{RECIPE}") if (path.parent / COMMAND).is_file()]
    return sorted(folders, key=lambda folder: _changed(folder / RECIPE), reverse=True)


def runs_below(root: Path) -> list[Path]:
    """Run directories in a folder and below it, newest first; the folder may be a run itself.

    Hidden folders, links and anything deeper than `DEEPEST` are skipped: the folder may be a whole disk.

    Raises:
        RecipeError: it is no folder.
    """
    if not root.is_dir():
        raise RecipeError(f"there is no directory {root}", where="unpad runs", fix="name one that holds runs")
    runs = []
    for folder, inner, files in os.walk(root):
        if RECIPE in files and (COMMAND in files or CHECKPOINTS in inner):
            runs.append(Path(folder))
            inner.clear()
        is_deepest = len(Path(folder).relative_to(root).parts) == DEEPEST
        inner[:] = [] if is_deepest else [name for name in inner if not name.startswith(".")]
    return sorted(runs, key=lambda run: _changed(run / RECIPE), reverse=True)


def _changed(path: Path) -> float:
    """Modification time; 0 for a missing file or a broken link."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


class _Command(TypedDict):
    recipe: str
    overrides: list[str]
    precision: NotRequired[str | None]
    made_by: NotRequired[str]
    id: NotRequired[str]
    family: NotRequired[str]
    folder: NotRequired[str]


def read_command(folder: Path) -> dict[str, Any]:
    """Read `run.json`: the recipe and overrides at the start of a run, its precision, and the folder of its paths.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    return upgrade.command(read_shaped(folder / COMMAND, _Command, fix="copy it from a backup"))


def made_by(folder: Path) -> str:
    """The command that created a run without training; "" for a trained run, or if its file does not say."""
    with suppress(CheckpointError):
        return str(read_command(folder).get(MADE_BY) or "")
    return ""


def free_folder(recipe: str, resume: bool) -> Path:
    """The next free runs/<recipe>-<n>, or the newest run of the recipe when resuming.

    Raises:
        RecipeError: there is no run to resume, or several processes would each choose a folder.
    """
    what = "processes that train together would each choose a run directory"
    refuse_under_torchrun(what, where="--out", fix="name one with --out, which all of them can reach")
    stem = Path(recipe).stem
    taken = {
        int(p.name.removeprefix(stem + "-")): p
        for p in RUNS.glob(f"{stem}-*")
        if p.name.removeprefix(stem + "-").isdigit()
    }
    if not resume:
        return RUNS / f"{stem}-{max(taken, default=0) + 1}"
    started = [number for number in sorted(taken) if holds_run(taken[number])]
    if not started:
        raise RecipeError(f"there is no run of {stem} to resume", where=str(RUNS), fix="name its directory with --out")
    return taken[max(started)]


OF_RUN = "run"  # among the values of a checkpoint's state
STATE = "state.json"


def run_id(folder: Path) -> str:
    """Id of a run; "" for one that was not trained by this version, and for a folder without `run.json`."""
    with suppress(CheckpointError):
        return str(read_command(folder)[RUN_ID])
    return ""


def new_id() -> str:
    """A unique id, independent of data and seeds."""
    return secrets.token_hex(8)


def refuse_foreign(path: Path, values: dict[str, Any]) -> None:
    """Refuse a checkpoint in the directory of a run that did not write it.

    Args:
        path: the checkpoint, such as RUN/checkpoints/best; values: of its state.

    Raises:
        ForeignCheckpointError: both runs have an id, and these differ.
    """
    folder, wrote = path.parent.parent, values.get(OF_RUN, "")
    mine = run_id(folder) if wrote and path.parent.name == CHECKPOINTS else ""
    if mine and wrote != mine:
        raise ForeignCheckpointError(
            f"{path.name} is a checkpoint of the run {str(wrote)[:40]}, and this is the run {mine[:40]}, by {COMMAND}",
            where=str(path),
            fix="move it back to its own run, or away; to begin with its weights, start a run with train.init_from=RUN",
        )
