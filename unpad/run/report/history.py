"""Files of a run read back: rows, log entries, and columns to draw."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NotRequired

import numpy as np
from annotated_types import Len
from numpy.typing import NDArray
from pydantic import AfterValidator
from typing_extensions import TypedDict

from unpad import storage
from unpad.errors import RecipeError, RunFileError, UnpadError
from unpad.recipes.recipe import Recipe
from unpad.run import upgrade
from unpad.run.folder import made_by, run_recipe
from unpad.storage.disk import NO_WAIT, take_lock
from unpad.storage.reading import Count, Finite, Number, misfit, opened, read_file, read_lines
from unpad.storage.strict_json import strict_value
from unpad.terminal.table import number_of

Array = NDArray[np.float64]
METRICS, TIMING, LOG, RECIPE = "metrics.jsonl", "timing.jsonl", "log.jsonl", "recipe.yaml"


def read_rows(path: Path, fault: Callable[[dict[str, Any]], str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON lines file. A last line without a newline is still being written and is skipped.

    Args:
        fault: reason why an object is no row of this file, "" for one that is.

    Raises:
        RunFileError: the file is missing or cannot be read, or a line is not such an object; names file:line and field.
    """
    if not os.path.exists(path):
        fix = "name a run directory that has trained; see `unpad runs`"
        raise RunFileError(f"there is no {path.name}", where=str(path.parent), fix=fix)
    with opened(path, RunFileError, "put the file back from a copy") as file:
        for number, line in enumerate(read_lines(file), start=1):
            if not line.endswith(b"\n"):
                return
            yield parse_row(line, f"{path}:{number}", fault)


def parse_row(line: bytes, where: str, fault: Callable[[dict[str, Any]], str] | None = None) -> dict[str, Any]:
    """Parse a line of a JSON lines file; see `read_rows`."""
    try:
        row = strict_value(line)
        reason = "it is no object" if not isinstance(row, dict) else fault(row) if fault else ""
    except ValueError as error:
        reason = str(error)
    if reason:
        fix = "correct it from a backup, or delete the line; what is missing is named by the page and by a resume"
        raise RunFileError(f"this line is damaged: {reason}", where=where, fix=fix)
    return row


def load_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl`, with "inf" and "nan", which JSON cannot hold as numbers, turned into floats.

    Raises:
        RunFileError: the file is missing or damaged.
    """
    rows = []
    for row in read_rows(folder / METRICS, metric_fault):
        named = {key: float(value) for key, value in row.items() if value in ("inf", "-inf", "nan") and key != "stage"}
        rows.append(row | named)
    return rows


# Numbers of a step's row, and of its time.
STEP_NUMBERS = ("step", "loss", "lr", "grad_norm", "tokens", "targets", "padded_tokens", "skipped")
TIME_NUMBERS = ("step", "seconds", "waited", "tokens_per_second", "memory_bytes")


class _Row(TypedDict):
    step: Count
    stage: str
    kind: str


class _StepRow(_Row):
    epoch: Count
    loss: Number
    lr: Number
    grad_norm: Number
    tokens: Finite
    targets: Finite
    padded_tokens: Finite
    skipped: bool | Finite


class _EvaluationRow(_Row):
    epoch: Count | None
    loss: Number | None
    perplexity: Number | None
    targets: Count
    best: bool
    values: dict[str, Number | None]


class _ReadingRow(_Row):
    values: dict[str, Any]


class _TimeRow(TypedDict):
    step: Count
    seconds: Finite
    waited: Finite
    tokens_per_second: Finite
    memory_bytes: Finite
    peak_bytes: Finite


def _is_time(text: str) -> str:
    datetime.fromisoformat(text)
    return text


class _Entry(TypedDict):
    time: Annotated[str, AfterValidator(_is_time)]
    kind: str
    message: NotRequired[str]


class _ResumedEntry(_Entry):
    step: Count
    changed: dict[str, Annotated[list[Any], Len(2, 2)]]


class _Timer(TypedDict):
    name: str
    seconds: Finite
    share: Finite


class _TimersEntry(_Entry):
    rows: list[_Timer]
    after_step: Count | None
    step: Count | None


_ENTRIES: dict[str, Any] = {"timers": _TimersEntry, "resumed": _ResumedEntry}
_ROWS = {"train": _StepRow, "eval": _EvaluationRow, "epoch": _Row}


def metric_fault(row: dict[str, Any]) -> str:
    """Reason why an object is no row of `metrics.jsonl`, by the fields that its readers need; "" for one that is."""
    kind = row.get("kind")
    return misfit(row, _ROWS.get(kind, _ReadingRow) if isinstance(kind, str) else _Row)


def timing_fault(row: dict[str, Any]) -> str:
    """Reason why an object is no row of `timing.jsonl`; "" for one that is."""
    return misfit(upgrade.time_row(row), _TimeRow)


def entry_fault(row: dict[str, Any]) -> str:
    """Reason why an object is no entry of the log; "" for one that is."""
    kind = row.get("kind")
    return misfit(upgrade.entry(row), _ENTRIES.get(kind, _Entry) if isinstance(kind, str) else _Entry)


def missing_steps(steps: Iterable[int], last: int) -> list[tuple[int, int]]:
    """Ranges of steps from 1 to `last` that are missing in `steps`, each as (first, last)."""
    known, gaps, expected = sorted({step for step in steps if step <= last}), list[tuple[int, int]](), 1
    for step in [*known, last + 1]:
        if step > expected:
            gaps.append((expected, step - 1))
        expected = step + 1
    return gaps


def describe_gaps(file: str, gaps: list[tuple[int, int]]) -> str:
    """Sentence on the steps that a file lacks; empty without a gap."""
    if not gaps:
        return ""
    shown = [f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in gaps]
    more = f" and {number_of(len(gaps) - 5, 'more gaps')}" if len(gaps) > 5 else ""
    return f"{file} lacks steps {', '.join(shown[:5])}{more}: they were trained, and their rows are lost"


def log_file(folder: Path) -> Path:
    """Path of a run's log."""
    old = folder / upgrade.OLD_LOG  # which keeps its name, so that no entry moves or is lost
    return old if old.is_file() else folder / LOG


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Entries of a run's log, each with `time` and `kind`.

    Raises:
        RunFileError: the file is missing or damaged.
    """
    return [upgrade.entry(row) for row in read_rows(log_file(folder), entry_fault)]


def chance(num_targets: int) -> float:
    """Nats of a held-out loss that so many targets move by chance."""
    return float(0.2 / np.sqrt(max(num_targets, 1)))


@dataclass(frozen=True)
class RunHistory:
    """A run as columns: one array entry per step, in the order of the files.

    Args:
        steps: columns of the steps.
        stage_starts: name of each stage, and index of its first step in `steps`.
        last: row of the last step.
        evaluations: rows of evaluations.
        readings: rows of other kinds, such as readings of a watch, by kind.
        timing: columns of the steps' times.
        log: entries of the log.
        recipe: None if the file is missing or not a recipe of this version.
        recipe_text: the file as it is; empty where it is missing.
    """

    steps: dict[str, Array]
    stage_starts: list[tuple[str, int]]
    last: dict[str, Any]
    evaluations: list[dict[str, Any]]
    readings: dict[str, list[dict[str, Any]]]
    timing: dict[str, Array]
    log: list[dict[str, Any]]
    recipe: Recipe | None
    recipe_text: str

    @property
    def gaps(self) -> list[str]:
        """Sentences on trained steps with missing rows."""
        last = int(self.last["step"])
        columns = ((METRICS, self.steps["step"]), (TIMING, self.timing["step"]))
        return [said for file, at in columns if (said := describe_gaps(file, missing_steps(at.astype(int), last)))]

    @property
    def checks(self) -> list[dict[str, Any]]:
        """Rows of the newest stage's evaluations that have a loss."""
        return [row for row in self.evaluations if row["stage"] == self.last["stage"] and row["loss"] is not None]

    @property
    def best_check(self) -> dict[str, Any] | None:
        """The one of the lowest loss."""
        return min(self.checks, key=lambda row: float(row["loss"]), default=None)

    def check_of(self, weights: int | None) -> dict[str, Any] | None:
        """The one of the weights of a step, or else the best."""
        return next((row for row in reversed(self.checks) if row["step"] == weights), self.best_check)

    @property
    def pad_share(self) -> str:
        """Share of the computed cells that were padding, as text; "" if none was computed."""
        cells = float(self.steps["padded_tokens"].sum())
        return f"{1 - float(self.steps['tokens'].sum()) / cells:.1%}" if cells else ""


def read_history(folder: Path) -> RunHistory:
    """Read a run directory.

    Raises:
        RunFileError: a file is missing or damaged, or no step has been taken yet.
    """
    steps: dict[str, list[float]] = {name: [] for name in STEP_NUMBERS}
    evaluations: list[dict[str, Any]] = []
    readings: dict[str, list[dict[str, Any]]] = {}
    stage_starts: list[tuple[str, int]] = []
    last: dict[str, Any] = {}
    _refuse_untrained(folder)
    for row in read_rows(folder / METRICS, metric_fault):
        if row["kind"] == "train":
            if row["stage"] != last.get("stage"):
                stage_starts.append((row["stage"], len(steps["step"])))
            for name in STEP_NUMBERS:
                steps[name].append(float(row[name]))
            last = row
        elif row["kind"] == "eval":
            evaluations.append(row)
        elif row["kind"] != "epoch":
            readings.setdefault(row["kind"], []).append(row)
    if not last:
        fix = "train first, then look at the report"
        raise RunFileError("this run has not taken a step yet", where=str(folder), fix=fix)
    timing: dict[str, list[float]] = {name: [] for name in (*TIME_NUMBERS, "peak_bytes")}
    for row in map(upgrade.time_row, read_rows(folder / TIMING, timing_fault)):
        for name, values in timing.items():
            values.append(float(row[name]))
    return RunHistory(
        steps={name: np.array(values) for name, values in steps.items()},
        stage_starts=stage_starts,
        last=last,
        evaluations=evaluations,
        readings=readings,
        timing={name: np.array(values) for name, values in timing.items()},
        log=read_log(folder),
        recipe=_read_recipe(folder),
        recipe_text=_recipe_text(folder),
    )


def _refuse_untrained(folder: Path) -> None:
    if not os.path.exists(folder / METRICS) and (command := made_by(folder)):
        fix = f"train from it, and name the new run: unpad train {folder / RECIPE} data.KIND=FILE --out runs/NEW"
        raise RunFileError(f'"{command}" made this run, which has no steps', where=str(folder), fix=fix)


def _read_recipe(folder: Path) -> Recipe | None:
    with suppress(RecipeError):
        return run_recipe(folder)
    return None  # a run of another loop or version has another recipe, or none


def _recipe_text(folder: Path) -> str:
    with suppress(UnpadError):
        return read_file(folder / RECIPE).decode("utf-8", "replace")
    return ""


ENDINGS = ("finished", "stopped")


def run_state(folder: Path, log: list[dict[str, Any]]) -> str:
    """running, killed, or the ending in the log, where train.max_minutes stops; a running process holds run.lock."""
    kinds = [e["kind"] for e in reversed(log) if e["kind"] in (*ENDINGS, "started", "resumed", "time_limit")]
    if kinds[:1] and kinds[0] in ENDINGS:
        return "stopped" if kinds[1:2] == ["time_limit"] else kinds[0]
    try:
        descriptor = os.open(folder / storage.LOCK, os.O_RDONLY | NO_WAIT)
    except OSError:
        return "killed"  # it never began, or the file system has no locks
    try:
        take_lock(descriptor, shared=True)
    except BlockingIOError:
        return "running"
    except OSError:
        pass  # a file system without locks
    finally:
        os.close(descriptor)
    return "killed"
