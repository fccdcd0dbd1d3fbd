"""Processes of a group as threads of this process that take turns, so that tests of several cost milliseconds.

One thread runs at a time, from one message to the next: the generator of random numbers, which threads share, is of the
one that runs. A group that real processes would make hang fails at once instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from unpad.errors import LostProcessError
from unpad.processes.group import Group

T = TypeVar("T")


class DivergenceError(AssertionError):
    """Processes that would hang: they send different kinds of messages, or one ends while another waits for it."""


class _Table:
    """Messages of all processes, and whose turn it is."""

    def __init__(self, size: int) -> None:
        self.size, self.turn = size, 0
        self.changed = threading.Condition()
        self.sent: list[dict[int, tuple[str, Any]]] = []  # by number of the message, of every rank
        self.over: dict[int, BaseException | None] = {}

    def pass_on(self, rank: int) -> None:
        left = [(rank + step) % self.size for step in range(1, self.size + 1)]
        self.turn = next((one for one in left if one not in self.over), -1)
        self.changed.notify_all()

    def wait(self, rank: int) -> None:
        self.changed.wait_for(lambda: self.turn == rank)


@dataclass(frozen=True)
class InTurn(Group):
    """One process of a group in which threads take turns."""

    table: _Table = field(default_factory=lambda: _Table(1))
    num_sent: list[int] = field(default_factory=lambda: [0])

    def _put(self, kind: str, value: Any) -> int:
        """Send, and return the number of the message."""
        number = self.num_sent[0]
        self.num_sent[0] += 1
        with self.table.changed:
            if number == len(self.table.sent):
                self.table.sent.append({})
            self.table.sent[number][self.rank] = (kind, value)
        return number

    def _get(self, number: int) -> list[Any]:
        """Wait for the message of this number of every process."""
        table, sent = self.table, self.table.sent[number]
        with table.changed:
            while any(rank not in sent and rank not in table.over for rank in range(self.size)):
                table.pass_on(self.rank)
                table.wait(self.rank)
        kind, value = sent[self.rank]
        for rank in range(self.size):
            if rank not in sent:
                if table.over[rank] is None and not (
                    isinstance(value, bytes) and value[0]
                ):  # no error, which may be late
                    raise DivergenceError(f"process {rank} has ended, process {self.rank} waits for its {kind}")
                raise LostProcessError(f"process {rank} is gone")
        kinds = [sent[rank][0] for rank in range(self.size)]
        if len(set(kinds)) > 1:
            raise DivergenceError(f"message {number} is of different kinds: {kinds}")
        return [sent[rank][1] for rank in range(self.size)]

    def _send(self, data: bytes) -> list[bytes]:
        return self._get(self._put("message", data))

    @contextmanager
    def _at_length(self) -> Iterator[None]:
        yield  # no thread that tells the others of long work, as they have their turn after it

    def add(self, values: Tensor) -> None:
        self.add_later(values)()

    def add_later(self, values: Tensor) -> Callable[[], None]:
        number = self._put(f"sum of {values.numel()}", values.clone())

        def wait() -> None:
            parts = self._get(number)
            values.copy_(torch.stack(parts[::-1]).sum(0))  # another order than that of the ranks

        return wait


def in_turns(size: int, work: Callable[[Group], T]) -> list[T]:
    """Do `work` in `size` processes, and return its results by rank.

    Raises:
        BaseException: that of the lowest rank that had one, other than LostProcessError where there is another.
    """
    outcomes = outcomes_in_turns(size, work)
    errors = [one for one in outcomes if isinstance(one, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, LostProcessError)):
        raise error
    return [one for one in outcomes if not isinstance(one, BaseException)]


def outcomes_in_turns(size: int, work: Callable[[Group], T]) -> list[T | BaseException]:
    """Do `work` in `size` processes, and return the result or the exception of each."""
    table = _Table(size)
    results: dict[int, T] = {}

    def run(rank: int) -> None:
        error: BaseException | None = None
        try:
            with table.changed:
                table.wait(rank)
            results[rank] = work(InTurn(rank, size, rank, None, table))
        except BaseException as raised:
            error = raised
        with table.changed:
            table.over[rank] = error
            table.pass_on(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not any(thread.is_alive() for thread in threads), "a process waits for ever"
    found: list[T | BaseException] = []
    for rank in range(size):
        error = table.over[rank]
        found.append(results[rank] if error is None else error)
    return found
