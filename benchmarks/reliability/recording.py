"""Recordings of runs: undisturbed, or killed before an operation and resumed."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reliability.disk_model import Disk, Operation
from benchmarks.reliability.faults import Fault, write_small
from benchmarks.reliability.kinds import KINDS, command
from benchmarks.reliability.oracle import LostError
from benchmarks.reliability.recorder import Recorder, read_log, tree_of
from benchmarks.reliability.victim import call, digests, unlike
from tests.helpers.processes import in_child
from unpad.run.folder import RECIPE
from unpad.run.report.history import read_history

RUN, CACHE = "runs/run", "home/cache"  # in the recorded folder: names in one would be flushed together


@dataclass(frozen=True)
class Recording:
    """Operations of a run.

    Args:
        recipe: what was run.
        begin: operations of the process that was killed; 0 if none was.
        expected: `digests` of the run.
        end: the disk after all operations.
    """

    kind: str
    recipe: Path
    operations: list[Operation]
    begin: int
    expected: dict[str, str]
    end: Disk

    def resume(self, root: Path) -> None:
        """Go on with the run from what is in `root`, and compare it with the recorded one.

        Raises:
            LostError: it does not go on, or becomes another one.
        """
        going_on = command(self.recipe, root / RUN, resume=True)
        ended = call(going_on, root / CACHE, root.parent / "errors")
        if ended.code:
            raise LostError(f"the run does not go on, code {ended.code}: {ended.error[-400:]}")
        if differing := unlike(digests(root / RUN), self.expected):
            raise LostError(f"a resumed run differs in {', '.join(differing)}")
        for recipe in (root / RUN).rglob(RECIPE):
            read_history(recipe.parent)  # as its page does


def record_small(folder: Path, fault: Fault | None = None) -> Recording:
    """Record the functions of storage by themselves."""
    root, log = folder / "root", folder / "operations"
    root.mkdir(parents=True)

    def work() -> None:
        if fault:
            fault.plant()
        Recorder(root, log).install()
        write_small(root)

    assert in_child(work) == 0
    return _recording("small", folder, folder, 0)


def record(
    kind: str, folder: Path, kill_at: int | None = None, prepare: Callable[[], object] | None = None
) -> Recording:
    """Record a run of a kind.

    Args:
        folder: for its data, and for everything else; emptied.
        kill_at: number of the operation before which a first process is killed, which a second one follows.
        prepare: called in the processes before they begin, such as to plant a fault.

    Raises:
        LostError: the run failed, or the recorder missed what it wrote.
    """
    shutil.rmtree(folder, ignore_errors=True)
    root, log, errors = folder / "root", folder / "operations", folder / "errors"
    root.mkdir(parents=True)
    recipe, begin = KINDS[kind](folder / "data"), 0

    def run(at: int | None) -> int:
        def begin_to_record() -> None:
            if prepare:
                prepare()
            Recorder(root, log, at).install()

        resume = at is None and kill_at is not None
        ended = call(command(recipe, root / RUN, resume=resume), root / CACHE, errors, begin_to_record)
        if ended.code not in (0, -signal.SIGKILL):
            raise LostError(f"the recorded run ended with {ended.code}: {ended.error[-2000:]}")
        return ended.code

    if kill_at is not None and run(kill_at):
        begin = len(list(read_log(log)))
    run(None)
    return _recording(kind, folder, recipe, begin)


def _recording(kind: str, folder: Path, recipe: Path, begin: int) -> Recording:
    operations, end = list(read_log(folder / "operations")), Disk()
    for operation in operations:
        end.apply(operation)
    missed = unlike(end.tree(), tree_of(folder / "root"))  # type: ignore[arg-type]
    if missed:
        raise LostError(f"the recorder missed {', '.join(missed[:5])}")
    return Recording(kind, recipe, operations, begin, digests(folder / "root" / RUN), end)
