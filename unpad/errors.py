"""Exceptions that a user can cause, each with its exit code.

An error is three lines: what was wrong, where, and what to do. `unpad.cli.main` prints them and exits with
`exit_code`. Any other exception is a bug, and shows its traceback with exit code 1. Verbs that find something out end
with a code of their own, without an exception, when they found it wrong. docs/run_directory.md lists all codes.
"""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, ClassVar

UNFORESEEN = 1  # an exception that is none of these: a fault of the program
PLEASE_REPORT = "this is a fault of unpad: please report it with the lines above, the command and `unpad --version`"
NOT_PROVED = 12  # a line of a certificate fails, or nothing can be proved
DOCTOR_FOUND_TROUBLE = 15  # `unpad doctor`
REPLAY_DIFFERS = 16  # `unpad replay`: a step computed again has other bits
LONGEST_LINE = 1500  # characters of a line of an error


class UnpadError(Exception):
    """Error of a user: what was wrong, where it is, what to do.

    Args:
        what: one sentence that names the actual and the expected value.
        where: file:line, recipe key, step or directory; empty when the error has no place.
        fix: the user's next step.
        details: further lines of what was wrong, such as one per row.
    """

    exit_code: ClassVar[int] = UNFORESEEN  # of this class alone; every kind below has its own
    is_agreed = False  # whether all processes of a run raise it

    def __init__(self, what: str, *, where: str = "", fix: str = "", details: Sequence[str] = ()) -> None:
        super().__init__(what)
        self.summary, self.where, self.fix, self.details = what, where, fix, tuple(details)

    @property
    def what(self) -> str:
        """The sentence and its details."""
        return "\n".join([self.summary, *self.details])

    @property
    def lines(self) -> list[str]:
        """The error line by line; a line break inside of one is part of a name or a message. A long line, such as a
        name of thousands of letters, loses its middle."""
        lines = [f"{type(self).__name__}: {self.summary}", *self.details]
        if self.where:
            lines.append(f"  at: {self.where}")
        if self.fix:
            lines.append(f"  do: {self.fix}")
        return [one if len(one) <= LONGEST_LINE else f"{one[:1000]} … {one[-400:]}" for one in lines]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def to_json(self) -> dict[str, Any]:
        """JSON values by which another process raises the error: its kind, of those of this file, and its texts."""
        kind = next(kind for kind in type(self).__mro__ if kind.__module__ == __name__)
        texts = {"what": self.summary, "where": self.where, "fix": self.fix, "details": list(self.details)}
        return {"kind": kind.__name__, **texts}

    @staticmethod
    def from_json(told: dict[str, Any]) -> "UnpadError":
        """The error of `to_json`."""
        error: UnpadError = globals()[told["kind"]](
            told["what"], where=told["where"], fix=told["fix"], details=told["details"]
        )
        return error


class ProofError(UnpadError):
    """A batch cannot be proved: it is padded, or has no targets. A failed line of a certificate is not an error."""

    exit_code = NOT_PROVED


class LostProcessError(UnpadError):
    """Another process of the run is gone, or silent for longer than the time limit."""

    exit_code = 10


class CollapseError(UnpadError):
    """A model stopped using its latent, under a recipe that stops the run then."""

    exit_code = 11


class RecipeError(UnpadError):
    """The recipe or the command line asks for something impossible."""

    exit_code = 2


class PlanError(RecipeError):
    """The plan settings do not fit the lengths."""


class SourceError(UnpadError):
    """A data file is missing, unreadable or has unusable rows."""

    exit_code = 3


class RunFileError(SourceError):
    """A file of a run other than its checkpoints is missing or damaged."""

    exit_code = 4


class CheckpointError(UnpadError):
    """A checkpoint is missing or damaged."""

    exit_code = 4


class ForeignCheckpointError(CheckpointError):
    """A checkpoint in the directory of a run is another run's."""


class RunInUseError(UnpadError):
    """Another process is writing to the run directory."""

    exit_code = 5


class DiskError(UnpadError):
    """The disk is full or refuses to write."""

    exit_code = 6


class NonFiniteError(UnpadError):
    """A loss or gradient is NaN or infinite."""

    exit_code = 7


class OutOfMemoryError(UnpadError):
    """The work does not fit into memory.

    Attributes:
        seq_ids: sequences of the corpus that do not fit by themselves.
    """

    exit_code = 8
    seq_ids: Sequence[int] = ()


class ResumeError(UnpadError):
    """A run cannot be resumed with a changed recipe or changed data."""

    exit_code = 9


class UnlikeProcessesError(ResumeError):
    """The processes of a run have different data, code, weights or machines, so that they cannot share its updates."""

    is_agreed = True  # found by all, from what each has told


class Signalled(UnpadError):  # noqa: N818 - requested by the user, not a fault
    """A signal ended the work, after saving; its number is the exit code less 128."""

    name: ClassVar[str]


class Interrupted(Signalled):
    """Ctrl-C, after saving."""

    exit_code, name = 130, "Ctrl-C"


class Terminated(Signalled):
    """SIGTERM, after saving."""

    exit_code, name = 143, "SIGTERM"


class HungUp(Signalled):
    """SIGHUP, as of a closed terminal, after saving."""

    exit_code, name = 129, "SIGHUP"


HANGUP = HungUp.exit_code - 128  # SIGHUP, which Windows lacks
SIGNALS: dict[int, type[Signalled]] = {
    kind.exit_code - 128: kind
    for kind in (HungUp, Interrupted, Terminated)
    if kind.exit_code - 128 in signal.valid_signals()
}


class Stopped(UnpadError):  # noqa: N818
    """The caller of `train` ended the run after an evaluation."""

    exit_code = 13


MOST_NAMES = 40  # of a hint


def nearest(name: str, known: list[str], cutoff: float = 0.5) -> str:
    """Return a hint: the known names closest to `name`, or the first of all when none is close.

    Args:
        cutoff: least likeness of a close name, from 0 to 1.
    """
    close = get_close_matches(name, known, n=3, cutoff=cutoff)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    if not known:
        return "there is none to choose from"
    more = f" and {len(known) - MOST_NAMES} more" if len(known) > MOST_NAMES else ""
    return "known: " + ", ".join(sorted(known)[:MOST_NAMES]) + more


# Parts of messages of torch and of C++ about memory; the last two are of sizes that no address reaches.
_MEMORY_MESSAGES = (
    *("can't allocate memory", "not enough memory", "out of memory", "bad_alloc"),
    *("Storage size calculation overflowed", "multiplication overflow", "can't start new thread"),
)
_NO_PRIMITIVE = "could not create a primitive"  # of oneDNN; "... a primitive descriptor" is of what it does not support


def is_memory_error(error: BaseException) -> bool:
    """True if an exception is one for lack of memory: torch has no type of its own for it on the processor."""
    if isinstance(error, ImportError):  # of a library that does not fit
        return "failed to map segment" in str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and (str(error) == _NO_PRIMITIVE or any(message in str(error) for message in _MEMORY_MESSAGES))
    )


@contextmanager
def needs_memory(what: str, fix: str) -> Iterator[None]:
    """Convert an error for lack of memory.

    Args:
        what: the thing that does not fit, as the beginning of a sentence; fix: the setting to lower.

    Raises:
        OutOfMemoryError: the work inside ran out of memory.
    """
    try:
        yield
    except (ImportError, MemoryError, RuntimeError) as error:
        if not is_memory_error(error):
            raise
        reason = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
        raise OutOfMemoryError(f"{what} does not fit into memory: {reason}", fix=fix) from error
