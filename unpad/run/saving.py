"""Checkpoints that a thread of each process writes while training goes on, one at a time."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from unpad.errors import LostProcessError
from unpad.machine import available_memory, peak_memory, process_memory
from unpad.processes.group import Group
from unpad.run.checkpoint import State, copied

Work = Callable[..., Any]
COPIES = 3  # of the tensors: the one that is written, and two while it becomes the bytes of a file


def _nothing(*_: object) -> None:
    """Do nothing."""


class Saving:
    """A checkpoint that is being written. All processes make it, and end it, at the same point.

    Its tensors are copied first, and training goes on while a thread writes the copy. Where a process lacks the memory
    for that, all write before training goes on.

    Args:
        state: what this process writes; without tensors, it writes nothing.
        write: writes the state, sends nothing, and returns a JSON value.
        end: completes the checkpoint in the leading process, given the values of all.
        drop: deletes in the leading process what an error leaves.
        sharing: processes that write in the memory of one host.

    Attributes:
        written: the value of `write` in this process.
        in_background: whether training may go on meanwhile.

    Raises:
        NonFiniteError: a weight is NaN or infinite; nothing is written.
    """

    def __init__(
        self, group: Group, state: State, write: Work, end: Work = _nothing, drop: Work = _nothing, sharing: int = 1
    ) -> None:
        self.written = Future[Any]()
        self._group, self._end, self._drop = group, end, drop
        with self._dropping(), group.together() as talk:
            copy = copied(state) if has_room(state, sharing) else None
            talk.own = copy is not None
        self.in_background = all(talk.told)
        if copy is not None and self.in_background:
            threading.Thread(target=self._run, args=(write, copy), name="unpad-saving", daemon=True).start()
        else:
            self._run(write, state)

    def _run(self, write: Work, state: State) -> None:
        try:
            self.written.set_result(write(state))
        except BaseException as error:
            self.written.set_exception(error)

    def finish(self) -> None:
        """Wait until the checkpoint is complete: collective.

        Raises:
            UnpadError: it could not be written; the older checkpoints are untouched.
            LostProcessError: a process is gone; written files keep a temporary name, and the next run deletes them.
        """
        with self._dropping():
            with self._group.together() as talk, self._group.at_length():
                talk.own = self.written.result()
            with self._group.together(), self._group.at_length():
                if self._group.leads:
                    self._end(talk.told)

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except LostProcessError:
            raise  # another process may still be writing
        except BaseException:
            if self._group.leads:
                self._drop()
            raise


def has_room(state: State, sharing: int = 1) -> bool:
    """True if the copies of a state, in so many processes that share memory, fit beside the largest step so far."""
    num_bytes = sum(tensor.nbytes for tensor in state.tensors.values())
    step = max(peak_memory() - process_memory(), 0)
    return not num_bytes or sharing * (COPIES * num_bytes + step) <= available_memory()


class Saver:
    """The checkpoint of a run that is being written, if any; `begin` and `finish` are collective."""

    def __init__(self) -> None:
        self._being: tuple[Saving, Work] | None = None

    @property
    def has_written(self) -> bool:
        """True if this process has written its part of a checkpoint that is not finished yet."""
        return self._being is not None and self._being[0].written.done()

    def begin(self, saving: Saving, tell: Work) -> None:
        """Let a checkpoint be written while training goes on; the one before is finished.

        Args:
            tell: is called once it is complete.
        """
        self._being = saving, tell
        if not saving.in_background:
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            UnpadError: as of `Saving.finish`.
        """
        if self._being is not None:
            (saving, tell), self._being = self._being, None
            saving.finish()
            tell()

    def __enter__(self) -> None:
        """Begin a block that, if it ends with an error, which is the one to report, waits for this process's thread."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._being is not None and kind is not None and issubclass(kind, Exception):
            self._being[0].written.exception()
