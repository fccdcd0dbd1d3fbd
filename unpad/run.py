"""A run directory: find it, open it, list what has run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unpad import checkpoint
from unpad.data import Data, family_of, open_data
from unpad.data.text import TOKENIZER
from unpad.errors import CheckpointError, RecipeError, SourceError, UnpadError, nearest
from unpad.generate import complete, stream
from unpad.history import read_rows
from unpad.models import build_model, model_config
from unpad.objective import Objective
from unpad.recipe import Recipe
from unpad.recipe_file import load_recipe
from unpad.recipe_training import Generate
from unpad.report import run_state
from unpad.section import checked
from unpad.sources.example import Turn
from unpad.step import Precision, choose_precision
from unpad.tokens.encode import encode_prompt
from unpad.tokens.tokenizer import Tokenizer, load_tokenizer

RUNS = Path("runs")
RECIPE, COMMAND = "recipe.yaml", "run.json"


@dataclass(frozen=True)
class LoadedRun:
    """A trained model with everything needed to use it.

    Args:
        files: what the run kept of its data, by name, such as its tokenizer.
        fingerprint: of the data it was trained on.
    """

    folder: Path
    recipe: Recipe
    model: Any
    files: dict[str, bytes]
    step: int
    fingerprint: str

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The run's own tokenizer.

        Raises:
            RecipeError: the run is not one of texts.
        """
        if TOKENIZER not in self.files:
            what, fix = family_of(self.recipe).NO_TEXT
            raise RecipeError(what, where=str(self.folder), fix=fix.format(run=self.folder))
        return load_tokenizer(self.files[TOKENIZER])

    def generate(self, prompts: Sequence[str], **settings: Any) -> list[str]:
        """Continue plain texts, or answer questions when the run was trained on conversations.

        Args:
            prompts: one text each; their lengths may differ, and each gets what it would get alone.
            settings: fields of the recipe's `generate` section, such as temperature=0.8.

        Raises:
            RecipeError: a setting is unknown or out of range, or `prompts` is one string.
        """
        if isinstance(prompts, str):
            raise RecipeError("prompts is one string", fix="give a list of prompts")
        chosen = checked(Generate, {**self.recipe.generate.model_dump(), **settings})
        ids = [self.prompt_ids(prompt) for prompt in prompts]
        precision = generation_precision(chosen)
        return [completion.text for completion in complete(self.model, self.tokenizer, ids, chosen, precision)]

    def prompt_ids(self, prompt: str) -> list[int]:
        """Encode one prompt exactly as training encoded its kind."""
        if self.recipe.data.chat:
            return encode_prompt([Turn("user", prompt)], self.tokenizer, self.recipe.data.template)
        return [self.tokenizer.bos_id, *self.tokenizer.encode_batch([prompt])[0]]

    def data(self) -> Data:
        """The data of the run, read as it was for training.

        Raises:
            SourceError: a file changed since; what was held out may have been trained on.
        """
        data = open_data(self.recipe, self.files)
        if data.fingerprint() != self.fingerprint:
            raise SourceError(
                "the data changed since this run was trained, so what it held out is not known any more",
                where=str(self.folder),
                fix="put the files back, or train again",
            )
        return data

    def stream(self, prompt: str, **settings: Any) -> Iterator[str]:
        """Yield the continuation of one prompt as it is made, whole characters only."""
        chosen = checked(Generate, {**self.recipe.generate.model_dump(), **settings})
        return stream(self.model, self.tokenizer, self.prompt_ids(prompt), chosen, generation_precision(chosen))


def generation_precision(settings: Generate) -> Precision:
    """What products of generation run in: bf16 decodes three times as fast where the processor has it."""
    return choose_precision(settings.precision, torch.device("cpu"))[0]


def find_run(name: str | Path) -> Path:
    """Find a run by directory or by its name under runs/.

    Raises:
        RecipeError: there is none.
    """
    for folder in (Path(name), RUNS / name):
        if (folder / RECIPE).is_file():
            return folder
    known = [folder.name for folder in list_runs()]
    fix = nearest(str(name), known) if known else "train one first: unpad train zh_chat"
    raise RecipeError(f'there is no run "{name}"', where=f"neither {name} nor {RUNS / name} holds a {RECIPE}", fix=fix)


def list_runs(root: Path = RUNS) -> list[Path]:
    """Run directories under `root`, newest first."""
    folders = [path.parent for path in root.glob(f"*/{RECIPE}")]
    return sorted(folders, key=lambda folder: (folder / RECIPE).stat().st_mtime, reverse=True)


def read_command(folder: Path) -> dict[str, Any]:
    """The recipe name and overrides that started the run."""
    try:
        command: dict[str, Any] = json.loads((folder / COMMAND).read_text(encoding="utf-8"))
        return command
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{COMMAND} cannot be read: {error}", where=str(folder), fix="copy it from a backup"
        ) from None


def open_files(recipe: Recipe, folder: Path) -> dict[str, bytes]:
    """What a run kept of its data, by name.

    Args:
        recipe: of a run of the same kind; its model says which files there are.
    """
    files = {}
    for name in family_of(recipe).FILES:
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{name} is missing", where=str(folder), fix="the run ended before it began; train again"
            )
        files[name] = (folder / name).read_bytes()
    return files


def newest_weights(folder: Path) -> tuple[dict[str, Tensor], checkpoint.State]:
    """The best weights by held-out value, or the newest where nothing was held out; also their checkpoint."""
    checkpoints = folder / "checkpoints"
    if (checkpoints / "best").exists() or (checkpoints / ".old-best").exists():
        state = checkpoint.load(checkpoints / "best", ["model.*"])
    else:
        loaded = checkpoint.load_newest(checkpoints)
        if loaded is None:
            raise CheckpointError(
                "the run has no checkpoint yet", where=str(checkpoints), fix="let it train for longer"
            )
        state = loaded[0]
    weights = {k.removeprefix("model."): v for k, v in state.tensors.items() if k.startswith("model.")}
    return weights, state


def load(name: str | Path, overrides: Sequence[str] = ()) -> LoadedRun:
    """Open a run's best model, ready to use.

    Args:
        name: run directory, or its name under runs/.
        overrides: recipe fields to change, such as model.context_method=ntk model.context_factor=4.
    """
    folder = find_run(name)
    recipe = load_recipe(str(folder / RECIPE), list(overrides))
    config, files = model_config(recipe.model), open_files(recipe, folder)
    model = build_model(config, family_of(recipe).num_outputs(files))
    last = recipe.for_stage(recipe.stages[-1]) if recipe.stages else recipe
    Objective.of(model, last.losses).tell(model)
    weights, state = newest_weights(folder)
    put_weights(model, weights, str(folder))
    return LoadedRun(folder, recipe, model.eval(), files, state.step, state.values["data"])


def put_weights(
    model: torch.nn.Module, weights: dict[str, Tensor], where: str, additions: Sequence[str] = ()
) -> list[str]:
    """Load weights that must fit the model name for name and shape for shape.

    Args:
        additions: name patterns (fnmatch) of parameters that may be missing, and then stay as they are in the model.

    Returns:
        The names of those.

    Raises:
        CheckpointError: names the first parameter that does not fit.
    """
    own = model.state_dict()
    fresh = [name for name in own if name not in weights and any(fnmatch(name, pattern) for pattern in additions)]
    expected = {name: tuple(p.shape) for name, p in own.items() if name not in fresh}
    found = {name: tuple(p.shape) for name, p in weights.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise CheckpointError(
                f"parameter {name}: {found.get(name, 'missing')} there, {expected.get(name, 'missing')} in the model",
                where=where,
                fix="use the model section and the tokenizer that these weights were trained with",
            )
    model.load_state_dict({**{name: own[name] for name in fresh}, **weights})
    return fresh


def describe_runs() -> list[str]:
    """One line per run under runs/, newest first."""
    lines = []
    for folder in list_runs():
        try:
            saved = read_command(folder)
            command = " ".join([saved["recipe"], *saved["overrides"]])
            state = run_state(folder, list(read_rows(folder / "events.jsonl")))
        except UnpadError as error:
            state, command = "damaged", error.what
        lines.append(f"{folder.name:<24}{state:<10}{command}")
    return lines or ["nothing has run here yet; start with: unpad train zh_chat"]


def what_next(folder: Path) -> list[str]:
    """What to type after training."""
    name = folder.name if folder.parent.resolve() == RUNS.resolve() else str(folder)
    recipe = load_recipe(str(folder / RECIPE))
    use = family_of(recipe).next_command(recipe, name)
    return [f"next:  {use}", f"       unpad eval {name}", f"       unpad report {name}"]
