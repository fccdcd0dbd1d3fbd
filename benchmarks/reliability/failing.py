"""System calls that fail, one in every run: it ends with an error of its own, and a resume has the usual bytes."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.reliability.calls import Calls
from benchmarks.reliability.kinds import KINDS, command
from benchmarks.reliability.oracle import LostError
from benchmarks.reliability.victim import Ended, call, digests, unlike

ERRORS = ("EIO", "ENOSPC", "EROFS", "EACCES", "ESTALE", "EDQUOT", "EMFILE", "EINTR")
CODES = {0, 2, 3, 4, 6}  # nothing worse than unread; recipe, data, checkpoint or disk named
# Calls that do not fail in ways that a program could answer.
LEFT_ALONE = ("close", "fstat")


@dataclass(frozen=True)
class Failing:
    """Runs of a kind in which calls can be made to fail.

    Args:
        expected: `digests` of the run in which none fails; names: its calls, in order.
    """

    kind: str
    folder: Path
    recipe: Path
    expected: dict[str, str]
    names: list[str]

    def attempt(self, number: int, error: str) -> Ended:
        """Let one call of a new run fail, go on with the run, and compare it.

        Args:
            number: of the call, from 0.

        Raises:
            LostError: the run ended without an error of its own, does not go on, or becomes another one.
        """
        place, errors = self.folder / "failing", self.folder / "errors"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()

        def one_fails(name: str, path: str, seen: int) -> None:
            if seen == number:
                raise OSError(getattr(errno, error), os.strerror(getattr(errno, error)), path)

        first = _run(self, place, one_fails, resume=False)
        where = f"{self.kind}, call {number} ({self.names[number]}), {error}"
        if first.is_unforeseen or first.code not in CODES:
            raise LostError(f"{where}: ended with {first.code}: {first.error[-1500:]}")
        again = call(command(self.recipe, place / "run", resume=True), place / "cache", errors)
        if again.code:
            raise LostError(
                f"{where}: ended with {first.code}, and does not go on, {again.code}: {again.error[-1500:]}"
            )
        if differing := unlike(digests(place / "run"), self.expected):
            raise LostError(f"{where}: differs in {', '.join(differing)}")
        return first


def failing(kind: str, folder: Path) -> Failing:
    """Run a kind undisturbed, and count its calls."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "calm").mkdir(parents=True)
    recipe, log = KINDS[kind](folder / "data"), folder / "names"
    found = Failing(kind, folder, recipe, {}, [])
    with log.open("w", encoding="utf-8", buffering=1) as names:
        ended = _run(found, folder / "calm", lambda name, path, seen: print(name, path, file=names), resume=False)
    assert ended.code == 0, ended.error
    return Failing(kind, folder, recipe, digests(folder / "calm" / "run"), log.read_text(encoding="utf-8").splitlines())


def _run(found: Failing, place: Path, seen: Callable[[str, str, int], None], *, resume: bool) -> Ended:
    num = 0

    def before(name: str, path: str, args: tuple[Any, ...]) -> None:
        nonlocal num
        if name not in LEFT_ALONE:
            num += 1
            seen(name, path, num - 1)

    arguments = command(found.recipe, place / "run", resume=resume)
    return call(arguments, place / "cache", found.folder / "errors", Calls(place, before).install)
