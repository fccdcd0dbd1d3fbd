"""Processes that share targets out among themselves, and what they have done, as a file that adds up over runs.

Time goes to targets evenly: each turn of some seconds is for the target that has had the least. A run that is killed
loses the seconds since the file was last written, and its next run begins with the cases that are not in it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import selectors
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.fuzz.target import Builder
from tests.helpers.fuzz.worker import Limits, Process, run_cases, signature_of, start, tell_ending, try_again

TURN_SECONDS = 8.0
SAVE_SECONDS = 2.0

ROOT = Path(__file__).parents[3]


@dataclass
class Total:
    """What was done with one target. Its next case has the number `next`."""

    next: int = 0
    cases: int = 0
    refused: int = 0
    failed: int = 0
    seconds: float = 0.0
    slowest: float = 0.0  # seconds of processor time of one case
    memory: int = 0  # most bytes in use

    def add(self, said: Mapping[str, Any]) -> None:
        """Count a message of `worker.run_cases`."""
        self.next = max(self.next, said["next"])
        for name in ("cases", "refused", "failed", "seconds"):
            setattr(self, name, getattr(self, name) + said[name])
        for name in ("slowest", "memory"):
            setattr(self, name, max(getattr(self, name), said[name]))


@dataclass
class Totals:
    """What all runs have done: by target, and the runs themselves by commit, day and processor."""

    targets: dict[str, Total] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Totals:
        """Read a file of `write`; nothing done where there is none."""
        if not path.is_file():
            return cls()
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls({name: Total(**total) for name, total in found["targets"].items()}, found["runs"])

    def write(self, path: Path) -> None:
        """Replace the file, which is whole at every moment."""
        lines = [
            f"  {json.dumps(name)}: {json.dumps(_rounded(asdict(one)))}" for name, one in sorted(self.targets.items())
        ]
        runs = [f"  {json.dumps(_rounded(run), ensure_ascii=False)}" for run in self.runs]
        text = '{\n "targets": {\n' + ",\n".join(lines) + '\n },\n "runs": [\n' + ",\n".join(runs) + "\n ]\n}\n"
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, path)

    @property
    def num_cases(self) -> int:
        return sum(total.cases for total in self.targets.values())


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}


@dataclass(frozen=True)
class Plan:
    """What a run is to do.

    Args:
        cases: end when the totals have so many; seconds: end after so long.
        workers: processes at a time.
        found: folder for findings, one file each.
        state: file of the totals.
        origin: commit, date, processor of the run, for its entry in the totals.
    """

    cases: int
    seconds: float
    workers: int
    found: Path
    state: Path
    origin: dict[str, Any]
    turn_seconds: float = TURN_SECONDS
    limits: Limits = field(default_factory=Limits)


def fuzz(
    plan: Plan, builders: Mapping[str, Builder], report: Callable[[str], None], known: Iterable[str] = ()
) -> tuple[Totals, list[Path]]:
    """Run cases until the plan is done.

    Args:
        known: signatures of findings that are kept and open, which are not kept again.

    Returns:
        The totals, and the files of findings that this run added.
    """
    plan.found.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(plan.found, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # two runs would overwrite each other's totals
        return _Crew(plan, builders, report, set(known)).run()
    except BlockingIOError:
        raise SystemExit(f"another run is at work in {plan.found}") from None
    finally:
        os.close(descriptor)


def open_findings(folder: Path, builders: Mapping[str, Builder], limits: Limits) -> list[str]:
    """Signatures of kept findings that still fail, each tried in a process of its own."""
    still: dict[str, None] = {}
    by_target: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        by_target.setdefault(found["target"], []).append(found)
    for name, kept in by_target.items():
        if name not in builders:
            continue
        place = Path(tempfile.mkdtemp(prefix="unpad-fuzz-", dir=_memory_folder()))
        process = start(name, try_again(builders[name], place, kept, limits), place)
        while (said := process.read()) is not None:
            still |= dict.fromkeys(message["open"] for message in said if "open" in message)
        process.end()
        shutil.rmtree(place, ignore_errors=True)
    return list(still)


class _Crew:
    def __init__(
        self, plan: Plan, builders: Mapping[str, Builder], report: Callable[[str], None], known: set[str]
    ) -> None:
        self.plan, self.builders, self.report, self.known = plan, builders, report, known
        self.totals = Totals.read(plan.state)
        for name in builders:
            self.totals.targets.setdefault(name, Total())
        same = (run for run in self.totals.runs if {name: run.get(name) for name in plan.origin} == plan.origin)
        self.entry = next(same, None) or {**plan.origin, "cases": 0, "seconds": 0.0}
        if self.entry not in self.totals.runs:
            self.totals.runs.append(self.entry)
        self.running: dict[int, tuple[Process, bool]] = {}  # by descriptor; whether it tells an ending
        self.endings: list[tuple[str, int, str]] = []
        self.new: list[Path] = []
        self.selector = selectors.DefaultSelector()
        self.root = Path(tempfile.mkdtemp(prefix="unpad-fuzz-", dir=_memory_folder()))
        self.began = self.saved = time.monotonic()

    def run(self) -> tuple[Totals, list[Path]]:
        try:
            while True:
                while len(self.running) < self.plan.workers and self._start():
                    pass
                if not self.running:
                    return self.totals, self.new
                for key, _ in self.selector.select(SAVE_SECONDS):
                    self._listen(key.fd)
                if time.monotonic() - self.saved > SAVE_SECONDS:
                    self._save()
        finally:
            self._save()
            shutil.rmtree(self.root, ignore_errors=True)

    def _save(self) -> None:
        self.totals.write(self.plan.state)
        self.saved = time.monotonic()

    def _start(self) -> bool:
        """Start a process, for an ending to keep or for a turn; False when nothing is left to begin."""
        folder = Path(tempfile.mkdtemp(dir=self.root))
        if self.endings:
            name, seed, why = self.endings.pop()
            work, tells = tell_ending(name, self.builders[name], folder, seed, why), True
        else:
            left = self.plan.cases - self.totals.num_cases
            seconds = min(self.plan.turn_seconds, self.began + self.plan.seconds - time.monotonic())
            busy = {process.name for process, _ in self.running.values()}
            free = [name for name in self.builders if name not in busy]
            if left <= 0 or seconds <= 0 or not free:
                return False
            name = min(free, key=lambda one: self.totals.targets[one].seconds)
            first = self.totals.targets[name].next
            work, tells = run_cases(name, self.builders[name], folder, first, seconds, left, self.plan.limits), False
        process = start(name, work, folder)
        self.running[process.output] = process, tells
        self.selector.register(process.output, selectors.EVENT_READ)
        return True

    def _listen(self, descriptor: int) -> None:
        process, tells = self.running[descriptor]
        said = process.read()
        if said is not None:
            process.heard = time.monotonic()
            for message in said:
                self._take(process.name, message)
            return
        self.selector.unregister(descriptor)
        del self.running[descriptor]
        seed, why = process.seed, process.end()
        shutil.rmtree(process.folder, ignore_errors=True)
        if why and not tells:
            self._lost(process, seed, why)

    def _take(self, name: str, message: dict[str, Any]) -> None:
        if "found" in message:
            self._keep(message["found"])
        elif "broken" in message:
            raise RuntimeError(f"the target {name} cannot run:\n{message['broken']}")
        else:
            self.totals.targets[name].add(message)
            self.entry["cases"] += message["cases"]
            self.entry["seconds"] += message["seconds"]

    def _lost(self, process: Process, seed: int, why: str) -> None:
        """Count the cases of a process that a case has ended, and see to it that the first of its kind is kept."""
        total, name = self.totals.targets[process.name], process.name
        cases, seconds = max(seed + 1 - total.next, 0), time.monotonic() - process.heard
        said = dict.fromkeys(("refused", "slowest", "memory"), 0)
        total.add({**said, "next": seed + 1, "cases": cases, "failed": 1, "seconds": seconds})
        self.entry["cases"] += cases
        self.entry["seconds"] += seconds
        self.report(f"{name}: case {seed} ended its process: {why}")
        if (signature := signature_of(name, why)) not in self.known:
            self.known.add(signature)
            self.endings.append((name, seed, why))

    def _keep(self, found: dict[str, Any]) -> None:
        """Keep a finding, unless one of its signature is kept and open."""
        if found["signature"] in self.known and not found["ended"]:
            return
        self.known.add(found["signature"])
        found["detail"] = found["detail"].replace(f"{ROOT}/", "")
        digest = hashlib.sha256(f"{found['signature']} {found['seed']}".encode()).hexdigest()[:8]
        path = self.plan.found / f"{found['target']}-{digest}.json"
        self.plan.found.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        self.new.append(path)
        self.report(
            f"{found['target']}: case {found['seed']}: {found['signature']}: {found['detail']}\n  kept as {path}"
        )


def _memory_folder() -> str | None:
    """A place for folders in memory, where the system has one."""
    place = Path("/dev/shm")
    with suppress(OSError):
        if place.is_dir() and os.access(place, os.W_OK):
            return str(place)
    return None
