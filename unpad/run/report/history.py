"""Files of a run read back: rows, log entries, and columns to draw."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unpad import storage
from unpad.errors import RecipeError, SourceError
from unpad.recipes.file import load_recipe
from unpad.recipes.recipe import Recipe

Array = NDArray[np.float64]
METRICS, TIMING, LOG, RECIPE = "metrics.jsonl", "timing.jsonl", "log.jsonl", "recipe.yaml"
OLD_LOG = "events.jsonl"  # the log of runs of earlier versions


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON lines file. A last line without a newline is still being written and is skipped.

    Raises:
        SourceError: the file is missing, or a line is not a JSON object; names file:line.
    """
    number = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                number += 1
                if not line.endswith("\n"):
                    return
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("not an object")
                yield row
    except FileNotFoundError:
        raise SourceError(
            f"there is no {path.name}",
            where=str(path.parent),
            fix="name a run directory that has trained; see `unpad runs`",
        ) from None
    except ValueError:
        raise SourceError(
            "this line is damaged",
            where=f"{path}:{number}",
            fix="resume the run, which rewrites its files, or delete the line",
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
        for row in read_rows(folder / METRICS)
    ]


def log_file(folder: Path) -> Path:
    """Path of a run's log; a run of an earlier version keeps its old name, so that no entry moves or is lost."""
    old = folder / OLD_LOG
    return old if old.is_file() else folder / LOG


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Entries of a run's log, each with `time` and `kind`.

    Raises:
        SourceError: the file is missing or damaged.
    """
    return list(read_rows(log_file(folder)))


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


def read_history(folder: Path) -> RunHistory:
    """Read a run directory.

    Raises:
        SourceError: a file is missing or damaged, or no step has been taken yet.
    """
    columns = ("step", "loss", "lr", "grad_norm", "tokens", "targets", "padded_tokens", "skipped")
    steps: dict[str, list[float]] = {name: [] for name in columns}
    evaluations: list[dict[str, Any]] = []
    readings: dict[str, list[dict[str, Any]]] = {}
    stage_starts: list[tuple[str, int]] = []
    last: dict[str, Any] = {}
    for row in read_rows(folder / METRICS):
        if row["kind"] == "train":
            if row["stage"] != last.get("stage"):
                stage_starts.append((row["stage"], len(steps["step"])))
            for name in columns:
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
    times = ("step", "seconds", "waited", "tokens_per_second", "memory_bytes")
    timing: dict[str, list[float]] = {name: [] for name in times}
    for row in read_rows(folder / TIMING):
        for name, values in timing.items():
            values.append(float(row[name]))
    recipe = folder / RECIPE
    return RunHistory(
        steps={name: np.array(values) for name, values in steps.items()},
        stage_starts=stage_starts,
        last=last,
        evaluations=evaluations,
        readings=readings,
        timing={name: np.array(values) for name, values in timing.items()},
        log=read_log(folder),
        recipe=_read_recipe(recipe),
        recipe_text=recipe.read_text(encoding="utf-8") if recipe.is_file() else "",
    )


def _read_recipe(path: Path) -> Recipe | None:
    try:
        return load_recipe(str(path))
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
