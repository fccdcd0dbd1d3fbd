"""Files of a run read back: rows, log entries, and columns to draw."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unpad import storage
from unpad.errors import RecipeError, SourceError
from unpad.recipes.recipe import Recipe
from unpad.run.folder import run_recipe

Array = NDArray[np.float64]
METRICS, TIMING, LOG, RECIPE = "metrics.jsonl", "timing.jsonl", "log.jsonl", "recipe.yaml"
OLD_LOG = "events.jsonl"  # the log of runs of earlier versions


def read_rows(path: Path, fits: Callable[[dict[str, Any]], bool] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON lines file. A last line without a newline is still being written and is skipped.

    Args:
        fits: whether an object has the fields of this file.

    Raises:
        SourceError: the file is missing, or a line is not such an object; names file:line.
    """
    number = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                number += 1
                if not line.endswith("\n"):
                    return
                row = json.loads(line)
                if not isinstance(row, dict) or not (fits is None or fits(row)):
                    raise ValueError("not an object, or without its fields")
                yield row
    except FileNotFoundError:
        raise SourceError(
            f"there is no {path.name}",
            where=str(path.parent),
            fix="name a run directory that has trained; see `unpad runs`",
        ) from None
    except (ValueError, RecursionError):
        raise SourceError(
            "this line is damaged",
            where=f"{path}:{number}",
            fix="correct it from a backup, or delete the line; what is missing is named by the page and by a resume",
        ) from None


def load_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl`, with "inf" and "nan", which JSON cannot hold as numbers, turned into floats.

    Raises:
        SourceError: the file is missing or damaged.
    """
    return [
        {
            key: float(value) if value in ("inf", "-inf", "nan") and key != "stage" else value
            for key, value in row.items()
        }
        for row in read_rows(folder / METRICS, is_metric)
    ]


# Numbers of a step's row, and of its time.
STEP_NUMBERS = ("step", "loss", "lr", "grad_norm", "tokens", "targets", "padded_tokens", "skipped")
TIME_NUMBERS = ("step", "seconds", "waited", "tokens_per_second", "memory_bytes")


def is_metric(row: dict[str, Any]) -> bool:
    """True if an object has the fields of a row of `metrics.jsonl` that its readers need."""
    if type(row.get("step")) is not int or not all(isinstance(row.get(name), str) for name in ("kind", "stage")):
        return False
    if row["kind"] == "train":
        return "epoch" in row and _has_numbers(row, STEP_NUMBERS)
    if row["kind"] == "epoch":
        return True
    values = isinstance(row.get("values"), dict)
    return values and (row["kind"] != "eval" or {"epoch", "loss", "perplexity", "targets", "best"} <= row.keys())


def is_timing(row: dict[str, Any]) -> bool:
    """True if an object has the fields of a row of `timing.jsonl` that its readers need."""
    return type(row.get("step")) is int and _has_numbers(row, TIME_NUMBERS)


def _is_entry(row: dict[str, Any]) -> bool:
    """True if an object has the time and the kind of an entry of the log."""
    try:
        datetime.fromisoformat(row["time"])
    except (KeyError, TypeError, ValueError):
        return False
    return isinstance(row.get("kind"), str)


def _has_numbers(row: dict[str, Any], names: Sequence[str]) -> bool:
    return all(isinstance(row.get(name), int | float) or row.get(name) in ("inf", "-inf", "nan") for name in names)


def missing_steps(steps: Iterable[int], last: int) -> list[tuple[int, int]]:
    """Runs of steps from 1 to `last` that are not among `steps`, each as (first, last)."""
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
    more = f" and {len(gaps) - 5:,} more gaps" if len(gaps) > 5 else ""
    return f"{file} lacks steps {', '.join(shown[:5])}{more}: they were trained, and their rows are lost"


def log_file(folder: Path) -> Path:
    """Path of a run's log; a run of an earlier version keeps its old name, so that no entry moves or is lost."""
    old = folder / OLD_LOG
    return old if old.is_file() else folder / LOG


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Entries of a run's log, each with `time` and `kind`.

    Raises:
        SourceError: the file is missing or damaged.
    """
    return list(read_rows(log_file(folder), _is_entry))


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
        """Sentences on steps that were trained and whose rows are missing."""
        last = int(self.last["step"])
        columns = ((METRICS, self.steps["step"]), (TIMING, self.timing["step"]))
        return [said for file, at in columns if (said := describe_gaps(file, missing_steps(at.astype(int), last)))]


def read_history(folder: Path) -> RunHistory:
    """Read a run directory.

    Raises:
        SourceError: a file is missing or damaged, or no step has been taken yet.
    """
    steps: dict[str, list[float]] = {name: [] for name in STEP_NUMBERS}
    evaluations: list[dict[str, Any]] = []
    readings: dict[str, list[dict[str, Any]]] = {}
    stage_starts: list[tuple[str, int]] = []
    last: dict[str, Any] = {}
    for row in read_rows(folder / METRICS, is_metric):
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
        raise SourceError(
            "this run has not taken a step yet", where=str(folder), fix="train first, then look at the report"
        )
    timing: dict[str, list[float]] = {name: [] for name in TIME_NUMBERS}
    timing["peak_bytes"] = []
    for row in read_rows(folder / TIMING, is_timing):
        for name, values in timing.items():  # runs of earlier versions have no peak
            values.append(float(row.get(name, row["memory_bytes"])))
    recipe = folder / RECIPE
    return RunHistory(
        steps={name: np.array(values) for name, values in steps.items()},
        stage_starts=stage_starts,
        last=last,
        evaluations=evaluations,
        readings=readings,
        timing={name: np.array(values) for name, values in timing.items()},
        log=read_log(folder),
        recipe=_read_recipe(folder),
        recipe_text=recipe.read_text(encoding="utf-8") if recipe.is_file() else "",
    )


def _read_recipe(folder: Path) -> Recipe | None:
    try:
        return run_recipe(folder)
    except RecipeError:
        return None  # a run of another loop or version has another recipe, or none


ENDINGS = ("finished", "stopped")


def run_state(folder: Path, log: list[dict[str, Any]]) -> str:
    """running, killed, or the ending that the log names; a run holds run.lock for as long as its process lives."""
    last = next((e["kind"] for e in reversed(log) if e["kind"] in (*ENDINGS, "started", "resumed")), "")
    if last in ENDINGS:
        return last
    try:
        with (folder / storage.LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "running"
    except FileNotFoundError:
        pass
    return "killed"
