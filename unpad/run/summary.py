"""Summary of runs: state, date, steps, loss and size, from their files, for `unpad runs` and `unpad compare`."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unpad.errors import RunFileError, SourceError, UnpadError
from unpad.run.folder import COMMAND, FAMILY, IMPORT, MADE_BY, list_runs, read_command, runs_below
from unpad.run.report.history import METRICS, metric_fault, parse_row, read_log, run_state
from unpad.run.report.svg import short
from unpad.storage.reading import opened, read_lines
from unpad.terminal.table import cells, columns, wrapped

NAME_CELLS = 20
HEAD = f"{'run':<20} {'state':<9} {'started':<16} {'step':>9} {'held out':>9} {'size':>9}"


@dataclass(frozen=True)
class RunSummary:
    """Outcome of a run.

    Args:
        started: ISO time of its first entry in the log; empty without a log.
        step: last step in its metrics; 0 before the first.
        heldout: best held-out loss of the newest stage, nats per target; None without an evaluation.
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
        lines = [line for folder in list_runs() for line in summarize(folder).lines()]
    else:
        named = ((folder, str(folder.relative_to(root))) for folder in runs_below(root))
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
        saved = read_command(folder)
        log = _made_log(folder, saved)
        step, heldout = _progress(folder / METRICS)
    except UnpadError as error:
        place = error.where.removeprefix(f"{folder}/")
        what = f"{place}: {error.what}" if ":" in place else error.what
        return RunSummary(folder.name, "damaged", "", 0, None, size, what)
    command = saved.get(MADE_BY) or shlex.join(["unpad", "train", saved["recipe"], *saved["overrides"]])
    command += f"  # {saved[FAMILY]}" if FAMILY in saved else ""
    started = log[0]["time"] if log else ""
    return RunSummary(folder.name, _made(saved) or run_state(folder, log), started, step, heldout, size, command)


def _made(saved: Mapping[str, Any]) -> str:
    """State of a run that was not trained, such as an import; "" for a trained run."""
    command = saved.get(MADE_BY, "")
    return "" if not command else "imported" if command.startswith(IMPORT) else "merged"


def _made_log(folder: Path, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The log of a run. In early versions imports logged no time."""
    if _made(saved) != "imported":
        return read_log(folder)
    try:
        return read_log(folder)
    except RunFileError:
        return [{"time": datetime.fromtimestamp((folder / COMMAND).stat().st_mtime, UTC).isoformat()}]


def _size(path: Path) -> int:
    """Bytes of a file; 0 for anything else, and for a file that was deleted meanwhile."""
    try:
        status = path.lstat()
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _progress(path: Path) -> tuple[int, float | None]:
    """Last step, and the best held-out loss of the newest stage. Most lines are not parsed: there may be millions."""
    last, best, stage = b"", None, None
    if not os.path.exists(path):
        return 0, None
    with opened(path, SourceError) as lines:
        for line in read_lines(lines):
            if not line.endswith(b"\n"):
                break
            last = line
            if b'"kind": "eval"' in line:
                row = _row(line)
                if row and (row["best"] or row["stage"] != stage):
                    stage, best = row["stage"], row["loss"]
    row = _row(last)
    return (row["step"] if row else 0), None if best is None else float(best)


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        return parse_row(line, METRICS, metric_fault)
    except SourceError:
        return None
