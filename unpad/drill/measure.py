"""Needs of a recipe, measured by another process, and the resulting findings: memory, disk space, equal bits."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path

from unpad.drill.child import started
from unpad.drill.findings import finding
from unpad.drill.mounts import Needs, check_permissions, check_room, size_text
from unpad.drill.probe import Read, Repeated, Stepped, probe
from unpad.errors import OutOfMemoryError
from unpad.machine.memory import MemoryLimit
from unpad.processes.children import Child
from unpad.terminal.finding import Finding

NEARLY = 0.8  # of the free memory


def check_memory(needed: int, how: str, limit: MemoryLimit, unknown: str = "") -> Finding:
    """Compare the memory needs of a run with the available memory.

    Args:
        needed: bytes of the whole process.
        how: source of the number, such as "a step".
        unknown: why a step was not measured; a fitting recipe is then still a warning.
    """
    measured = f"{size_text(needed)} for {how}, {size_text(limit.num_bytes)} {limit.reason}"
    if needed > limit.num_bytes:
        return finding(
            "memory", "fault", measured, "it does not fit: lower plan.tokens_per_micro, or the model's sizes"
        )
    if unknown:
        return finding("memory", "warning", measured, f"a step was not measured: {unknown}; raise --minutes")
    if needed > NEARLY * limit.num_bytes:
        return finding("memory", "warning", measured, "little is left for other programs: lower plan.tokens_per_micro")
    return finding("memory", "ok", measured, "it fits")


OPEN_FILES = 32  # for a step that could not be measured
ENDS = 10.0  # seconds for a process to end after closing its pipe


@dataclass
class Probed:
    """Messages of the other process; None for missing ones, with the reason in `why`.

    Args:
        limit: free memory before it began.
        failed: whether it ended by itself before sending everything.
    """

    limit: MemoryLimit
    read: Read | None = None
    stepped: Stepped | None = None
    repeated: Repeated | None = None
    why: str = ""
    failed: bool = False

    @property
    def fits(self) -> bool:
        """True unless a measurement shows that the recipe does not fit into memory."""
        needed = 0 if self.read is None else self.read.least_memory
        return not self.failed and max(needed, self.stepped.peak_bytes if self.stepped else 0) <= self.limit.num_bytes

    @property
    def repeats(self) -> bool:
        """True unless repeated steps were seen to have different bits on this machine."""
        return self.repeated is None or len(set(self.repeated.digests)) == 1

    def needs(self, keep: int) -> Needs | None:
        """Disk needs of its runs; None if the data was not read."""
        if self.read is None:
            return None
        step = self.stepped
        checkpoint = step.checkpoint_bytes if step else self.read.checkpoint_bytes
        weights = self.read.weights_bytes
        return Needs(
            checkpoint_bytes=checkpoint,
            weights_bytes=weights,
            largest_file=max(weights, checkpoint - weights),
            keep=keep,
            bests=len(self.read.stages),
            steps=self.read.steps,
            open_files=step.open_files if step else OPEN_FILES,
        )


def measure(recipe: Path, folder: Path, limit: MemoryLimit, seconds: float) -> Probed:
    """Read the data and take steps in another process, within a time limit in seconds.

    Raises:
        UnpadError: the recipe or its data cannot be trained.
    """
    found, until = Probed(limit), time.monotonic() + seconds
    here, there = Pipe()
    with here, started(folder, probe, recipe, there) as child:
        there.close()
        while found.repeated is None:
            if not here.poll(max(until - time.monotonic(), 0)):
                found.why = f"it took longer than {seconds:.0f} s"
                break
            try:
                told = here.recv()
            except (EOFError, ConnectionError):
                found.why, found.failed = _ending(child, has_read=found.read is not None), True
                break
            if isinstance(told, Read):
                found.read = told
                if not found.fits:
                    break
                here.send(True)
            elif isinstance(told, Stepped):
                found.stepped = told
            else:
                found.repeated = told
    return found


def _ending(child: Child, *, has_read: bool) -> str:
    """Reason why the process ended; a user error before any step is raised."""
    code, error = child.wait(ENDS), child.user_error()
    if error is not None and not (has_read and isinstance(error, OutOfMemoryError)):
        raise error
    if code == -signal.SIGKILL:
        return "the system killed it, most likely for lack of memory"
    return child.last_words() or f"it ended with exit code {code}"


def judge(measured: Probed, folder: Path, keep: int, used_bytes: int) -> Iterator[Finding]:
    """Findings that depend on the recipe.

    Args:
        folder: on the disk in question; keep: checkpoints that the recipe keeps.
        used_bytes: already used by the run.
    """
    yield check_permissions(folder, private=measured.read is not None and measured.read.private)
    needs = measured.needs(keep)
    if needs is None:
        yield finding("space", "warning", f"not known: {measured.why}", "raise --minutes, or cut the data")
    else:
        yield from check_room(folder, needs, used_bytes)
    yield _memory(measured)
    yield _alike(measured)


def _memory(measured: Probed) -> Finding:
    read, stepped = measured.read, measured.stepped
    if measured.failed and stepped is None:
        return finding(
            "memory", "fault", measured.why, "a first step fails: lower plan.tokens_per_micro or the model's sizes"
        )
    if stepped is not None:
        how = f"a step and a checkpoint, {size_text(stepped.predicted_bytes)} predicted"
        return check_memory(stepped.peak_bytes, how, measured.limit)
    if read is None:
        return finding("memory", "warning", f"not known: {measured.why}", "raise --minutes, or cut the data")
    return check_memory(read.least_memory, "weights and optimizer", measured.limit, measured.why)


def _alike(measured: Probed) -> Finding:
    found = measured.repeated
    if found is None:
        return finding("same step", "warning", f"not compared: {measured.why or 'no memory'}", "raise --minutes")
    num, kinds = len(found.digests), len(set(found.digests))
    if kinds == 1:
        return finding("same step", "ok", f"taken {num} times, equal bits", "memory and threads compute alike")
    told = f"taken {num} times, {kinds} results"
    if found.device != "cpu":
        return finding("same step", "warning", told, "this device adds in any order: a resumed run may differ in bits")
    return finding("same step", "fault", told, "memory or processor errs: run memtest86+, undo overclocking")
