"""Clocks: the steady one never goes back, the date is right, and on the disk (apart: one check of the drill a file)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from unpad.drill.findings import attempt, finding
from unpad.terminal.finding import Finding

JUMP = 1.0  # seconds that the date may gain or lose during a drill
SKEW = 2.0  # seconds between the times of files and the date; file systems keep whole seconds, some two
READINGS = 20_000
BUILT = Path(__file__).parents[1]  # folder of the package, to read its age


@dataclass
class Clock:
    """Both clocks at the beginning of the drill, and the largest step back between two readings."""

    steady: float = field(default_factory=lambda: time.monotonic())
    date: float = field(default_factory=lambda: time.time())
    back: float = 0.0

    def read(self) -> None:
        """Read the steady clock many times, and note steps back."""
        last = self.steady
        for _ in range(READINGS):
            now = time.monotonic()
            self.back = max(self.back, last - now)
            last = now

    def findings(self, folder: Path, run: Path | None) -> Iterator[Finding]:
        """Findings on the clocks since the drill began.

        Args:
            folder: on the disk in question; run: its files must not be from the future.
        """
        self.read()
        yield self._steady()
        yield attempt("date", lambda: self._date(folder, run), "the times of files cannot be read here")

    def _steady(self) -> Finding:
        passed = time.monotonic() - self.steady
        if self.back > 0 or passed < 0:
            told = f"it went back by {max(self.back, -passed):.3f} s"
            return finding(
                "steady clock", "fault", told, "time limits between processes may fail: mend the machine's clock"
            )
        return finding("steady clock", "ok", f"{READINGS:,} readings, none back", "time limits hold")

    def _date(self, folder: Path, run: Path | None) -> Finding:
        jump = (time.time() - self.date) - (time.monotonic() - self.steady)
        skew = _file_time(folder) - time.time()
        newest, owner = _newest(run)
        behind = newest - time.time()
        shown = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        orders = "dates of runs and logs are wrong: set the clock (timedatectl)"
        if behind > SKEW:
            return finding("date", "warning", f"{shown}, {_span(behind)} before {owner}", orders)
        if abs(jump) > JUMP:
            return finding("date", "warning", f"it jumped by {jump:+.1f} s during the drill", orders)
        if abs(skew) > SKEW:
            told = f"files of this disk are {_span(abs(skew))} {'ahead' if skew > 0 else 'behind'}"
            return finding("date", "warning", told, "dates of runs and logs differ: set the server's clock or this one")
        return finding("date", "ok", f"{shown}, no jump; files {skew:+.2f} s", "after all files of run and package")


def _file_time(folder: Path) -> float:
    """Time stamp of a file that is written now, minus the time of writing."""
    path = folder / "time"
    path.write_bytes(b"x")
    return path.stat().st_mtime


def _newest(run: Path | None) -> tuple[float, str]:
    """Time of the newest file of the run and the package, and its name."""
    newest, owner = 0.0, "the package"
    for folder, name in ((BUILT, "the package"), (run, "the run's newest file")):
        for path in () if folder is None else folder.rglob("*"):
            with suppress(OSError):
                if (modified := os.lstat(path).st_mtime) > newest:
                    newest, owner = modified, name
    return newest, owner


def _span(seconds: float) -> str:
    """A time span in words."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"
