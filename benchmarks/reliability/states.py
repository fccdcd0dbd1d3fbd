"""States that a power cut can leave of a recording, put into a folder one after the other and judged."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.reliability.disk_model import MODES, Acknowledged, Disk, Operation, Tree
from benchmarks.reliability.oracle import LostError, Oracle


@dataclass
class Found:
    """What came of many states.

    Args:
        examined: states that were built; distinct: those among them that no other one equalled.
        faults: the first state of every kind of fault, and its sentence.
    """

    examined: int = 0
    distinct: int = 0
    faults: dict[str, str] = field(default_factory=dict)


class Place:
    """A folder that takes one state after the other; only what differs is written."""

    def __init__(self, root: Path) -> None:
        self.root, self._tree = root, dict[str, bytes | None]()
        root.mkdir(parents=True)

    def take(self, tree: Tree) -> None:
        for path in sorted(self._tree.keys() - tree.keys(), reverse=True):  # what is in a folder before the folder
            self._remove(path)
        for path, content in sorted(tree.items()):
            if path in self._tree and self._tree[path] == content:
                continue
            if path in self._tree and (self._tree[path] is None) != (content is None):
                self._remove(path)
            if content is None:
                (self.root / path).mkdir(exist_ok=True)
            else:
                (self.root / path).write_bytes(content)
        self._tree = tree

    def copy(self) -> Path:
        """A copy, which may be changed."""
        copy = self.root.with_name("copy")
        shutil.rmtree(copy, ignore_errors=True)
        return Path(shutil.copytree(self.root, copy))

    def _remove(self, path: str) -> None:
        place = self.root / path
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)


def examine(
    operations: Sequence[Operation],
    oracle: Oracle,
    place: Place,
    passes_at: Callable[[int], Iterable[int]],
    *,
    begin: int = 0,
    seen: set[int] | None = None,
    resume: Callable[[Place], None] = lambda place: None,
) -> Found:
    """Cut the power after every operation, and judge what may be left.

    Args:
        passes_at: by the number of operations done the passes wanted there. A pass is a way to lose contents and one to
            lose names, and a seed for what is left to chance.
        begin: the power is not cut before as many operations.
        seen: keys of states that need no second look; grows.
        resume: called for every state without a fault; raises LostError as the judge does.

    Returns:
        Numbers of states, and faults.
    """
    disk, found, seen = Disk(), Found(), set() if seen is None else seen
    for done in range(len(operations) + 1):
        if done:
            disk.apply(operations[done - 1])
        for number in passes_at(done) if done >= begin else ():
            contents, names = MODES[number % len(MODES)]
            tree, files = disk.after_power_cut(contents, names, random.Random(f"{number} {done}"))
            found.examined += 1
            key = _key(tree, disk.acknowledged)
            if key in seen:
                continue
            seen.add(key)
            found.distinct += 1
            place.take(tree)
            try:
                oracle.judge(place.root, tree, files, disk.acknowledged)
                resume(place)
            except LostError as error:
                last = operations[done - 1] if done else ("nothing",)
                where = f"after {done} operations, {last[0]} the last, contents {contents}, names {names}: {error}"
                found.faults.setdefault(error.kind, where)
    return found


def _key(tree: Tree, acknowledged: Acknowledged) -> int:
    """Equal for equal states, of which the same is expected."""
    return hash((tuple(sorted(acknowledged.items())), tuple(sorted(tree.items()))))
