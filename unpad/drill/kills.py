"""Kills of a real training: killed at random instants and resumed, it ends with the bytes of an undisturbed run."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from unpad.drill.child import started
from unpad.drill.findings import finding
from unpad.drill.train import train_here
from unpad.errors import Terminated, UnpadError
from unpad.processes.children import Child
from unpad.run.folder import CHECKPOINTS, without_id
from unpad.terminal.finding import Finding
from unpad.terminal.progress import ProgressBar, progress
from unpad.terminal.table import number_of

Train = Callable[[Path, Path], object]  # (recipe, folder) -> begins a run there, or continues it

POLL = 0.01
AT_START = 0.2  # share of kills before the first step
PART = 0.4  # largest part of an undisturbed run between two kills
HANGS = 10.0  # multiple of the time of an undisturbed run; and the minimum
LEAST_WAIT = 60.0
METRICS = ("metrics.jsonl", "metrics.csv")


@dataclass(frozen=True)
class Calm:
    """An undisturbed run: its folder, its duration, and the time until its first step."""

    folder: Path
    seconds: float
    start_seconds: float
    code: int | None
    last_words: str
    error: UnpadError | None


@dataclass
class Tally:
    """Kills so far, and the faults that they revealed."""

    kills: int = 0
    stops: int = 0  # by SIGTERM
    runs: int = 0  # that finished and were compared
    most_repeated: int = 0  # steps that were repeated after a resume
    faults: list[str] = field(default_factory=list)


def undisturbed(recipe: Path, folder: Path, seconds: float, train: Train = train_here) -> Calm:
    """Train without a kill, for at most `seconds`; `code` is None if it took longer."""
    began = time.perf_counter()
    place = folder / "calm"
    with started(folder, train, recipe, place) as child:
        _begun(child, place, seconds)
        start = time.perf_counter() - began
        code = child.wait(seconds - start)
        return Calm(place, time.perf_counter() - began, start, code, child.last_words(), child.user_error())


@dataclass(frozen=True)
class KillPlan:
    """Kills to make.

    Args:
        recipe: file of the recipe; folder: of its runs; calm: its undisturbed run.
        until: `time.monotonic` after which no kill begins; a run in progress is completed.
        most: largest number of stops over all runs.
        exact: whether a resumed run must have equal bytes; otherwise it must only have every step once.
        train: trains a recipe in a folder, or continues its run.
    """

    recipe: Path
    folder: Path
    calm: Calm
    until: float
    most: int
    exact: bool = True
    train: Train = train_here
    draw: random.Random = field(default_factory=random.Random)

    @property
    def patience(self) -> float:
        """Seconds after which a process counts as hanging."""
        return max(HANGS * self.calm.seconds, LEAST_WAIT)

    def goes_on(self, tally: Tally) -> bool:
        """True if there is time for another kill and the rest of its run."""
        ends = time.monotonic() + self.calm.start_seconds + self.calm.seconds
        return tally.kills + tally.stops < self.most and ends < self.until

    def seconds(self, *, at_start: bool) -> float:
        """A random time to train for."""
        whole = self.calm.start_seconds if at_start else PART * (self.calm.seconds - self.calm.start_seconds)
        return self.draw.uniform(0, max(whole, POLL))


def kill_and_compare(plan: KillPlan) -> Tally:
    """Repeatedly kill and resume runs of a recipe; compare each finished one with the undisturbed run."""
    tally = Tally()
    with progress("killing and resuming", None, "kills") as bar:
        while True:
            place = plan.folder / f"run-{tally.runs}"
            _one_run(place, plan, tally, bar)
            tally.runs += 1
            shutil.rmtree(place, ignore_errors=True)
            if tally.faults or not plan.goes_on(tally):
                return tally


def _one_run(place: Path, plan: KillPlan, tally: Tally, bar: ProgressBar) -> None:
    """Begin a run, stop it at random until it ends, and compare it."""
    known = reached = 0  # resumes, and the last step before them
    while True:
        code = _one_process(place, plan, tally)
        bar.done = tally.kills + tally.stops
        bar.advance(0)
        begins = _begins(place)
        if len(begins) > known:
            tally.most_repeated = max(tally.most_repeated, reached - begins[-1])
        known, reached = len(begins), max(_steps(place), default=0)
        faults = [_lost(place), _not_saved(place) if code == Terminated.exit_code else ""]
        if code == 0:
            faults.append(difference(place, plan.calm.folder) if plan.exact else unlike_steps(place, plan.calm.folder))
        tally.faults += [fault for fault in faults if fault]
        if code == 0 or tally.faults:
            return


def _one_process(place: Path, plan: KillPlan, tally: Tally) -> int | None:
    """Begin or continue a run, stop it if there is time, and return the exit code."""
    stops = plan.goes_on(tally)
    with started(plan.folder, plan.train, plan.recipe, place) as child:
        code = _stopped(child, place, plan, tally) if stops else child.wait(plan.patience)
        if code is None:
            tally.faults.append(f"a resume did not end within {plan.patience:.0f} s")
        elif code != 0 and not (stops and code in (-signal.SIGKILL, -signal.SIGTERM, Terminated.exit_code)):
            tally.faults.append(f"a resume ended with exit code {code}: {child.last_words()}")
        return code


def _stopped(child: Child, place: Path, plan: KillPlan, tally: Tally) -> int | None:
    """Let a process train for a random time, then stop it unless it ended by itself; return its exit code."""
    by_signal = tally.stops == 0 and tally.kills > 0
    at_start = not by_signal and plan.draw.random() < AT_START
    if not at_start and not _begun(child, place, plan.patience):
        return child.wait(0)
    if (code := child.wait(plan.seconds(at_start=at_start))) is not None:
        return code
    if by_signal:
        child.signal(signal.SIGTERM)
        code = child.wait(plan.patience)
        tally.stops += code == Terminated.exit_code
        tally.kills += code == -signal.SIGTERM  # after its last step it saves no more
        return code
    code = child.kill()
    tally.kills += code == -signal.SIGKILL
    return code


def _begun(child: Child, place: Path, seconds: float) -> bool:
    """Wait for the first step in the metrics of a process; False if it ended before, or took longer.

    A resume truncates the metrics before it logs this.
    """
    metrics, log = place / METRICS[0], place / "log.jsonl"
    before, known, until = _size(log), -1, time.monotonic() + seconds
    while time.monotonic() < until:
        if known < 0 and _size(log) > before:
            known = _size(metrics)
        if 0 <= known < _size(metrics):
            return True
        if child.wait(POLL) is not None:
            return False
    return False


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


# --------------------------------------------------------------------------- what a run left


def _rows(path: Path) -> Iterator[dict[str, object]]:
    """Complete lines of a log."""
    with suppress(OSError):
        for line in path.read_text("utf-8", "replace").splitlines():
            with suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row


def _begins(folder: Path) -> list[int]:
    """Steps at which the run was resumed, in order."""
    entries = ((row.get("kind"), row.get("step")) for row in _rows(folder / "log.jsonl"))
    return [step for kind, step in entries if kind == "resumed" and isinstance(step, int)]


def _steps(folder: Path) -> list[int]:
    """Steps of the metrics."""
    return [step for row in _rows(folder / METRICS[0]) if isinstance(step := row.get("step"), int)]


def _lost(folder: Path) -> str:
    """Fault of a resume that began before an already saved checkpoint; "" without one."""
    saved = 0
    for row in _rows(folder / "log.jsonl"):
        kind, step = row.get("kind"), row.get("step")
        if kind == "checkpoint" and isinstance(step, int):
            saved = step
        elif kind == "resumed" and isinstance(step, int) and step < saved:
            return f"the checkpoint of step {saved} was saved, and lost: a resume began at step {step}"
    return ""


def _not_saved(folder: Path) -> str:
    """Fault of a run that did not save its last step after SIGTERM; "" if it did."""
    last, newest = max(_steps(folder), default=0), newest_checkpoint(folder)
    if newest is None or newest.name != f"step-{last:08d}":
        return f"SIGTERM at step {last} left {newest.name if newest else 'no checkpoint'}"
    return ""


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the last step."""
    return max((folder / CHECKPOINTS).glob("step-*"), default=None, key=lambda path: path.name)


def unlike_steps(folder: Path, expected: Path) -> str:
    """Fault of a run if the steps in its metrics differ from another's; "" if they are equal."""
    return "" if _steps(folder) == _steps(expected) else "the metrics lack steps, or have some twice"


def difference(folder: Path, expected: Path) -> str:
    """The first difference in bytes between two runs: metrics, best weights, newest checkpoint; "" without one.

    The random id of a run is left out."""
    for name in METRICS:
        one, other = ((place / name).read_bytes().splitlines() for place in (folder, expected))
        if one != other:
            equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
            return f"{name} differs from line {equal + 1} on"
    bests = sorted(path.name for path in (expected / CHECKPOINTS).glob("best*"))
    newest = [newest_checkpoint(place) for place in (folder, expected)]
    pairs = [(folder / CHECKPOINTS / name, expected / CHECKPOINTS / name) for name in bests]
    if newest[0] is not None and newest[1] is not None:
        pairs.append((newest[0], newest[1]))
    for one_folder, other_folder in pairs:
        for path in sorted(other_folder.iterdir()):
            here = one_folder / path.name
            if not here.is_file() or without_id(here) != without_id(path):
                return f"{one_folder.name}/{path.name} {'differs' if here.is_file() else 'is missing'}"
    return ""


def check_kills(tally: Tally, steps: int, *, exact: bool = True) -> Finding:
    """The finding on the kills; `exact` as in the plan."""
    runs = f"{number_of(tally.runs, 'runs')} of {number_of(steps, 'steps')}"
    counted = f"{number_of(tally.kills, 'kills')}, {tally.stops} SIGTERM in {runs}"
    if tally.faults:
        told = f"{counted}: {tally.faults[0]}"
        return finding("kill, resume", "fault", told, "a resumed run is another run here")
    if tally.kills == 0:
        return finding("kill, resume", "warning", "no time for a kill", "raise --minutes")
    cost = f"steps that a kill cost: at most {tally.most_repeated}"
    return finding("kill, resume", "ok", f"{counted}: every {'byte equal' if exact else 'step once'}", cost)
