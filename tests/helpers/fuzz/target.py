"""A reader of outside bytes under test, and the judgement of one case: a result, an error of the user, or a finding."""

import random
import sys
import traceback
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import unpad
from unpad.errors import UnpadError

PACKAGE = Path(unpad.__file__).parent
LONGEST_LINE = 2000  # characters; a longer one would push the reason out of the window


class WrongError(Exception):
    """A promise of a reader that a case breaks, such as rows that are neither used nor bad."""


@dataclass(frozen=True)
class Target:
    """A reader and its cases.

    Args:
        make: draws the bytes of a case.
        run: reads them. It may return, or raise one of `errors`.
        errors: kinds of error that are right for these bytes.
    """

    make: Callable[[random.Random], bytes]
    run: Callable[[bytes], object]
    errors: tuple[type[UnpadError], ...]


Builder = Callable[[Path], Target]  # given an empty folder of its own


@dataclass(frozen=True)
class Verdict:
    """Outcome of a case: whether the bytes were refused, and the finding if there is one.

    Args:
        signature: equal for cases with one cause; "" where the reader kept its promises.
        detail: last line of the traceback.
    """

    refused: bool
    signature: str = ""
    detail: str = ""


def read_at(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Puts the bytes of a case at `path` and reads it."""

    def run(data: bytes) -> None:
        path.write_bytes(data)
        read(path)

    return run


def has_control(text: str) -> bool:
    """True for a text that could move a terminal's cursor or change its colours."""
    return any(unicodedata.category(one) == "Cc" for one in text)


def random_of(name: str, seed: int) -> random.Random:
    """The generator that alone decides a case."""
    return random.Random(f"{name}/{seed}")


def judge(target: Target, data: bytes) -> Verdict:
    """Run one case."""
    ignored: list[sys.UnraisableHookArgs] = []
    hook, sys.unraisablehook = sys.unraisablehook, ignored.append
    try:
        verdict = _judge(target, data)
    finally:
        sys.unraisablehook = hook
    if ignored and not verdict.signature:
        name = getattr(ignored[0].object, "__qualname__", "")
        what = f"{ignored[0].exc_type.__name__} that nothing can catch, in {name}"
        return Verdict(verdict.refused, what, str(ignored[0].exc_value)[:300])
    return verdict


def _judge(target: Target, data: bytes) -> Verdict:
    try:
        target.run(data)
    except UnpadError as error:
        return _judge_message(target, error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of Rust code is no Exception
        detail = _plain(f"{type(error).__name__}: {error}"[:300])
        if isinstance(error, WrongError):
            return Verdict(False, f"broken promise: {error.args[0]}", detail)
        return Verdict(False, f"{type(error).__name__} in {_place(error)}", detail)
    return Verdict(False)


def _judge_message(target: Target, error: UnpadError) -> Verdict:
    said, kind = str(error), type(error).__name__
    if not isinstance(error, target.errors):
        expected = " or ".join(one.__name__ for one in target.errors)
        return Verdict(True, f"{kind} in place of {expected} from {_place(error)}", _plain(said[:300]))
    if max(map(len, said.split("\n"))) > LONGEST_LINE:
        return Verdict(
            True, f"endless message in the {kind} of {_place(error)}", _plain(f"{len(said)} characters: {said[:200]}")
        )
    return Verdict(True)


def _plain(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _place(error: BaseException) -> str:
    """Function of the package in which an error arose; no line, so that a signature outlives edits."""
    frames = [(Path(frame.filename), frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    inside = [f"{file.relative_to(PACKAGE).as_posix()}:{name}" for file, name in frames if file.is_relative_to(PACKAGE)]
    return inside[-1] if inside else "the target itself"
