"""Runs in a list and side by side: their summaries, differences of recipes, results and curves."""

import json
import os
import shlex
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from rich.cells import cell_len

from unpad.errors import RecipeError, RunFileError, SourceError, UnpadError
from unpad.recipes.recipe import Recipe, differences
from unpad.run import folder as run_folder
from unpad.run.report.history import METRICS, RunHistory, metric_fault, parse_row, read_history, read_log, run_state
from unpad.run.report.samples import newest_evaluation, old_notes, weights_step, written
from unpad.run.report.section import PageSection, document, table
from unpad.run.report.svg import WIDE, Axes, Curve, plot, running_mean
from unpad.storage import write_atomic
from unpad.storage.reading import opened, read_lines, read_shaped
from unpad.terminal.table import cells, columns, short, span, text_table, wrapped

NAME_CELLS = 20
HEAD = f"{'run':<20} {'state':<9} {'started':<16} {'step':>9} {'held out':>9} {'size':>9}"


@dataclass(frozen=True)
class RunSummary:
    """Outcome of a run.

    Args:
        started: ISO time of its first entry in the log; empty without a log.
        step: last step in its metrics; 0 before the first.
        heldout: held-out loss of the weights in use, or else the best of the newest stage, nats per target; None
            without an evaluation.
        num_bytes: size of all its files.
    """

    name: str
    state: str
    started: str
    step: int
    heldout: float | None
    num_bytes: int
    command: str

    def lines(self) -> list[str]:
        """The run and its command; a name longer than its column gets its own line."""
        date = self.started[:16].replace("T", " ")
        loss = "-" if self.heldout is None else f"{self.heldout:.4f}"
        size = f"{short(self.num_bytes)}B"
        narrow = columns() < len(HEAD)  # the name has no column
        alone = narrow or cells(self.name) > NAME_CELLS
        name = " " * NAME_CELLS if alone else self.name + " " * (NAME_CELLS - cells(self.name))
        first = f"{'' if narrow else f'{name} '}{self.state:<9} {date:<16} {self.step:>9,} {loss:>9} {size:>9}"
        return [*([self.name] if alone else []), first, *wrapped(self.command, indent=2)]


def describe_runs(root: Path | None = None) -> list[str]:
    """A head line and two lines per run, newest first.

    Args:
        root: a run, or a folder with runs at any depth, which are named by their paths in it; default runs/.

    Raises:
        RecipeError: `root` is no folder.
    """
    if root is None:
        lines = [line for folder in run_folder.list_runs() for line in summarize(folder).lines()]
    else:
        named = ((folder, str(folder.relative_to(root))) for folder in run_folder.runs_below(root))
        summaries = [replace(summarize(folder), name=folder.name if name == "." else name) for folder, name in named]
        lines = [line for summary in summaries for line in summary.lines()]
    head = HEAD if columns() >= len(HEAD) else HEAD[NAME_CELLS + 1 :]
    if lines:
        return [head, *lines]
    return ["nothing has run here yet; start with: unpad train zh_chat" if root is None else f"no runs in {root}"]


def summarize(folder: Path) -> RunSummary:
    """Summarize a run; a run with unreadable files is "damaged", and its command says why."""
    size = sum(map(_size, folder.rglob("*")))
    try:
        saved = run_folder.read_command(folder)
        log = _made_log(folder, saved)
        step, heldout = _progress(folder)
    except UnpadError as error:
        place = error.where.removeprefix(f"{folder}/")
        what = f"{place}: {error.what}" if ":" in place else error.what
        return RunSummary(folder.name, "damaged", "", 0, None, size, what)
    command = saved.get(run_folder.MADE_BY) or shlex.join(["unpad", "train", saved["recipe"], *saved["overrides"]])
    command += f"  # {saved[run_folder.FAMILY]}" if run_folder.FAMILY in saved else ""
    started = log[0]["time"] if log else ""
    return RunSummary(folder.name, _made(saved) or run_state(folder, log), started, step, heldout, size, command)


def _made(saved: Mapping[str, Any]) -> str:
    """State of a run that was not trained, such as an import; "" for a trained run."""
    command = saved.get(run_folder.MADE_BY, "")
    return "" if not command else "imported" if command.startswith(run_folder.IMPORT) else "merged"


def _made_log(folder: Path, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The log of a run. In early versions imports logged no time."""
    try:
        return read_log(folder)
    except RunFileError:
        if _made(saved) != "imported":
            raise
        return [{"time": datetime.fromtimestamp((folder / run_folder.COMMAND).stat().st_mtime, UTC).isoformat()}]


def _size(path: Path) -> int:
    """Bytes of a file; 0 for anything else, and for a file that was deleted meanwhile."""
    try:
        status = path.lstat()
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _progress(folder: Path) -> tuple[int, float | None]:
    """Last step, and the held-out loss of the weights in use, or else the best of the newest stage.

    Most lines are not parsed: there may be millions.
    """
    path, used = folder / METRICS, weights_step(folder)
    last, check = b"", dict[str, Any]()
    if not os.path.exists(path):
        return 0, None
    with opened(path, SourceError) as lines:
        for line in read_lines(lines):
            if not line.endswith(b"\n"):
                break
            last = line
            if b'"kind": "eval"' in line and (row := _row(line)):
                is_first = row["stage"] != check.get("stage")
                if is_first or row["step"] == used or (row["best"] and check["step"] != used):
                    check = row
    row, loss = _row(last), check.get("loss")
    return (row["step"] if row else 0), None if loss is None else float(loss)


def _row(line: bytes) -> dict[str, Any] | None:
    with suppress(SourceError):
        return parse_row(line, METRICS, metric_fault)
    return None


WIDEST = 24  # columns of a cell
COLOURS = ("#2563eb", "#c2570c", "#15803d", "#9333ea", "#b42318", "#0e7490", "#a16207", "#6b7280")
ENVIRONMENT = ("precision", "device", "threads", "kernels", "processor", "torch")


@dataclass(frozen=True)
class Comparison:
    """Runs side by side. A table is {name of a row: a cell per run}.

    Args:
        recipes: the fields in which they differ.
        measures: results and speed.
        notes: why some measures cannot be compared.
    """

    names: list[str]
    recipes: dict[str, list[str]]
    measures: dict[str, list[str]]
    notes: list[str]

    def lines(self) -> list[str]:
        """Both tables as text of at most 80 columns; runs that do not fit side by side follow below."""
        recipes = self.recipes or {"no field differs": [""] * len(self.names)}
        lines = [*_lines("recipe", self.names, recipes), "", *_lines("reached", self.names, self.measures)]
        return [*lines, "", *self.notes] if self.notes else lines

    def to_json(self) -> dict[str, Any]:
        return {"runs": self.names, "recipes": self.recipes, "measures": self.measures, "notes": self.notes}


def compare(runs: Sequence[str], out: Path) -> Comparison:
    """Compare runs and write a page with their curves.

    Args:
        runs: two or more directories, or names under runs/.
        out: the HTML file to write.

    Raises:
        RecipeError: a run does not exist, or there are fewer than two.
        SourceError: a run's files are missing or damaged, or it has not taken a step.
        DiskError: the page cannot be written.
    """
    if len(runs) < 2:
        raise RecipeError("one run cannot be compared", where="unpad compare", fix="name two or more; see `unpad runs`")
    folders = [run_folder.find_run(run) for run in runs]
    histories = [read_history(folder) for folder in folders]
    recipes = [run_folder.run_recipe(folder) for folder in folders]
    names, measures, notes = _names(folders), _measures(folders, histories), _notes(folders, histories, recipes)
    if _tokenizers_differ(folders):
        notes.append("their tokenizers differ, so losses per token do not compare: see the bits per character")
        measures = dict(sorted(measures.items(), key=lambda row: "bits" not in row[0]))
    comparison = Comparison(names, _differences(recipes), measures, notes)
    write_atomic(out, _page(comparison, histories))
    return comparison


def _names(folders: list[Path]) -> list[str]:
    """Names of the folders; their paths if names are not unique."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def _differences(recipes: list[Recipe]) -> dict[str, list[str]]:
    changed = [differences(recipes[0], other) for other in recipes[1:]]
    keys = sorted({key for change in changed for key in change})
    table = {}
    for key in keys:
        first = next(change[key][0] for change in changed if key in change)
        values = [first, *(change[key][1] if key in change else first for change in changed)]
        table[key] = ["-" if value is None else _text(value) for value in values]
    return table


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _measures(folders: list[Path], histories: list[RunHistory]) -> dict[str, list[str]]:
    columns = [_measures_of(folder, history) for folder, history in zip(folders, histories, strict=True)]
    names = list(dict.fromkeys(name for column in columns for name in column))
    table = {name: [column.get(name, "-") for column in columns] for name in names}
    same = [name for name in ENVIRONMENT if len(set(table.get(name, [""]))) == 1]
    return {name: cells for name, cells in table.items() if name not in same}


def _measures_of(folder: Path, run: RunHistory) -> dict[str, str]:
    steps, timing = run.steps, run.timing
    best, busy = run.best_check, float(timing["seconds"].sum())
    recent = slice(-max(len(steps["loss"]) // 20, 1), None)
    column = {
        "state": run_state(folder, run.log),
        "steps": f"{run.last['step']:,}",
        "real tokens": short(float(steps["tokens"].sum())),
        "training loss, newest": f"{float(np.nanmean(steps['loss'][recent])):.4f}",
    }
    if best is not None:
        column |= {"held-out loss, best check": f"{float(best['loss']):.4f}", "at step": f"{best['step']:,}"}
        column |= {f"{name.replace('_', ' ')} there": written(value) for name, value in best["values"].items()}
    evaluation = newest_evaluation(folder)
    for name, metric in (evaluation or {"metrics": {}})["metrics"].items():
        part = f" ({metric['part']})" if metric["part"] else ""
        column[f"eval {name}{part}"] = written(metric["value"])
    if busy:
        column |= {
            "tokens per second": short(float(np.median(timing["tokens_per_second"]))),
            "time in steps": span(busy),
            "peak memory, GB": f"{float(timing['peak_bytes'].max()) / 1e9:.2f}",
        }
    column["padding"] = run.pad_share or "-"
    environment: dict[str, Any] = next((entry for entry in reversed(run.log) if entry["kind"] == "environment"), {})
    return column | {name: str(environment[name]) for name in ENVIRONMENT if name in environment}


def _notes(folders: list[Path], histories: list[RunHistory], recipes: list[Recipe]) -> list[str]:
    each = zip(folders, histories, strict=True)
    notes = [f"{folder.name}: {gap}" for folder, run in each for gap in (*run.gaps, *old_notes(folder))]
    data = [_fingerprint(folder) for folder in folders]
    # The fingerprint is of tokens: with other tokenizers only the recipes tell.
    telling = not _tokenizers_differ(folders) or len({(repr(one.data), one.train.seed) for one in recipes}) > 1
    if len({each for each in data if each}) > 1 and telling:
        notes.append("their data or its split differs: held-out losses are not of the same examples")
    return notes


def _tokenizers_differ(folders: list[Path]) -> bool:
    return len({path.read_bytes() for folder in folders if (path := folder / "tokenizer.json").exists()}) > 1


def _fingerprint(folder: Path) -> str:
    """Fingerprint of the data of a run, from its newest checkpoint; empty without one."""
    states = [path for path in folder.glob(f"{run_folder.CHECKPOINTS}/*/state.json") if os.path.exists(path)]
    for state in sorted(states, key=lambda path: path.stat().st_mtime, reverse=True):
        with suppress(UnpadError, LookupError, TypeError):
            return str(read_shaped(state, dict[str, Any])["values"]["data"])
    return ""


# --------------------------------------------------------------------------- text


def _lines(title: str, names: list[str], table: dict[str, list[str]]) -> list[str]:
    """A table of text; runs that do not fit side by side follow below."""
    rows = [[name, *map(_short, row)] for name, row in table.items()]
    return text_table([title, *map(_short, names)], rows)


def _short(text: str) -> str:
    """The end of a text, at most WIDEST columns, which distinguishes runs and paths."""
    while cell_len(text) > WIDEST:
        text = "…" + text[2:]
    return text


# --------------------------------------------------------------------------- page


def _page(comparison: Comparison, histories: list[RunHistory]) -> str:
    colours = [COLOURS[index % len(COLOURS)] for index in range(len(histories))]
    style = "".join(
        f"path.run{i}{{stroke:{colour};stroke-width:1.8}}circle.run{i}{{fill:{colour}}}i.run{i}{{color:{colour}}}"
        for i, colour in enumerate(colours)
    )
    held, training, rates, speed = list[Curve](), list[Curve](), list[Curve](), list[Curve]()
    for index, (name, run) in enumerate(zip(comparison.names, histories, strict=True)):
        css, step, width = f"run{index}", run.steps["step"], max(1, len(run.steps["step"]) // 50) | 1
        rows = [row for row in run.evaluations if row["loss"] is not None]
        if rows:
            points = np.array([row["step"] for row in rows], float), np.array([float(row["loss"]) for row in rows])
            held.append(Curve(css, [points], name, dots=len(rows) <= 60))
        training.append(Curve(css, [(step, running_mean(run.steps["loss"], run.steps["targets"], width))], name))
        rates.append(Curve(css, [(step, run.steps["lr"])], name))
        at, seen = run.timing["step"], run.timing["tokens_per_second"]
        if len(at):
            speed.append(Curve(css, [(at, running_mean(seen, np.ones(len(at)), width))], name))
    figures = [
        plot("Held-out loss", held, Axes("nats per target", WIDE)),
        plot("Training loss", training, Axes("nats per target, running mean", WIDE)),
        plot("Learning rate", rates, Axes(zero=True)),
        plot("Speed", speed, Axes("real tokens per second", zero=True)),
    ]
    notes = "".join(f"<p class=gap>{escape(note)}</p>" for note in comparison.notes)
    title = escape(", ".join(comparison.names))
    body = f"""<header><h1>{title}</h1></header>
{notes}<div class=plots>{"".join(figures)}</div>
{_table("Where the recipes differ", comparison.names, comparison.recipes)}
{_table("What they reached", comparison.names, comparison.measures)}
"""
    return document(title, style, body)


def _table(title: str, names: list[str], rows: dict[str, list[str]]) -> str:
    cells = [(name, *row) for name, row in rows.items()] or [("in no field", *("" for _ in names))]
    return PageSection(title, table=table(("", *names), cells)).html()
