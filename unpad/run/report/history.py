"""What a run's own files say about it, read back: rows, and columns to draw."""

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
from unpad.errors import SourceError

Array = NDArray[np.float64]


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON lines file. A last line without its newline is still being written, and left out.

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
        for row in read_rows(folder / "metrics.jsonl")
    ]


@dataclass(frozen=True)
class RunHistory:
    """A run as columns: one array entry per step, in the order of the files."""

    train: dict[str, Array]
    stage_starts: list[tuple[str, int]]  # name, index of the stage's first step in `train`
    last: dict[str, Any]
    evals: list[dict[str, Any]]
    timing: dict[str, Array]
    events: list[dict[str, Any]]
    recipe: str
    latent: list[dict[str, Any]]  # readings of a model's latent


def read_history(folder: Path) -> RunHistory:
    """Read a run directory.

    Raises:
        SourceError: a file is missing or damaged, or no step has been taken yet.
    """
    columns = ("step", "loss", "lr", "grad_norm", "tokens", "targets", "padded_tokens", "skipped")
    train: dict[str, list[float]] = {name: [] for name in columns}
    evals: list[dict[str, Any]] = []
    latent: list[dict[str, Any]] = []
    stage_starts: list[tuple[str, int]] = []
    last: dict[str, Any] = {}
    for row in read_rows(folder / "metrics.jsonl"):
        if row["kind"] == "train":
            if row["stage"] != last.get("stage"):
                stage_starts.append((row["stage"], len(train["step"])))
            for name in columns:
                train[name].append(float(row[name]))
            last = row
        elif row["kind"] == "eval":
            evals.append(row)
        elif row["kind"] == "latent":
            latent.append(row)
    if not last:
        raise SourceError(
            "this run has not taken a step yet", where=str(folder), fix="train first, then look at the report"
        )
    timing: dict[str, list[float]] = {
        "step": [],
        "seconds": [],
        "waited": [],
        "tokens_per_second": [],
        "memory_bytes": [],
    }
    for row in read_rows(folder / "timing.jsonl"):
        for name, values in timing.items():
            values.append(float(row[name]))
    recipe = folder / "recipe.yaml"
    return RunHistory(
        {name: np.array(values) for name, values in train.items()},
        stage_starts,
        last,
        evals,
        {name: np.array(values) for name, values in timing.items()},
        list(read_rows(folder / "events.jsonl")),
        recipe.read_text(encoding="utf-8") if recipe.is_file() else "",
        latent,
    )


ENDINGS = ("finished", "stopped")


def run_state(folder: Path, events: list[dict[str, Any]]) -> str:
    """running, killed, or how the run said it ended; a run holds run.lock for as long as its process lives."""
    last = next((e["kind"] for e in reversed(events) if e["kind"] in (*ENDINGS, "started", "resumed")), "")
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
