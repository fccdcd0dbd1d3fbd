"""Processes of a group as threads of this process that take turns, so that tests of several cost milliseconds.

One thread runs at a time, from one message to the next, and finds the generator of random numbers as it left it. A
group that real processes would make hang fails at once instead.
"""

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
    """Processes that would hang: they wait for different things, or one ends while another waits for it."""


class _Table:
    """Messages of all processes, and whose turn it is."""

    def __init__(self, size: int) -> None:
        self.size, self.turn, self.num_events = size, 0, 0
        self.changed = threading.Condition()
        self.sent: dict[tuple[str, int], dict[int, Any]] = {}  # by channel and number, of every rank
        self.over: dict[int, BaseException | None] = {}

    def pass_on(self, rank: int) -> None:
        left = [(rank + step) % self.size for step in range(1, self.size + 1)]
        self.turn = next((one for one in left if one not in self.over), -1)
        self.changed.notify_all()

    def wait(self, rank: int) -> None:
        self.changed.wait_for(lambda: self.turn == rank)


@dataclass(frozen=True)
class InTurn(Group):
    """One process of a group in which threads take turns. Messages and sums have a channel each, as in a group."""

    table: _Table = field(default_factory=lambda: _Table(1))
    num_sent: dict[str, int] = field(default_factory=lambda: {"message": 0, "sum": 0})

    def _put(self, channel: str, value: Any) -> int:
        """Send, and return the number of the message in its channel."""
        number = self.num_sent[channel]
        self.num_sent[channel] += 1
        with self.table.changed:
            self.table.sent.setdefault((channel, number), {})[self.rank] = value
            self.table.num_events += 1
        return number

    def _get(self, channel: str, number: int) -> list[Any]:
        """Wait for the message of this number of every process."""
        table, sent = self.table, self.table.sent[channel, number]
        with table.changed:
            while any(rank not in sent and rank not in table.over for rank in range(self.size)):
                before, generator = table.num_events, torch.get_rng_state()
                table.pass_on(self.rank)
                table.wait(self.rank)
                torch.set_rng_state(generator)
                if table.num_events == before:
                    raise DivergenceError(f"all processes wait; process {self.rank} for the {channel} {number}")
        for rank in range(self.size):
            if rank not in sent:
                tells_error = channel == "message" and sent[self.rank][0]  # to those who still run
                if table.over[rank] is None and not tells_error:
                    raise DivergenceError(f"process {rank} has ended, process {self.rank} waits for its {channel}")
                raise LostProcessError(f"process {rank} is gone")
        return [sent[rank] for rank in range(self.size)]

    def _send(self, data: bytes) -> list[bytes]:
        return self._get("message", self._put("message", data))

    @contextmanager
    def at_length(self) -> Iterator[None]:
        yield  # no thread that tells the others of long work, as they have their turn after it

    def add(self, values: Tensor) -> None:
        self.add_later(values)()

    def add_later(self, values: Tensor) -> Callable[[], None]:
        number = self._put("sum", values.clone())

        def wait() -> None:
            parts = self._get("sum", number)
            if len({part.shape for part in parts}) > 1:
                raise DivergenceError(f"sum {number} is of tensors of different shapes")
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
            results[rank] = work(InTurn(rank, size, rank, table=table))
        except BaseException as raised:
            error = raised
        with table.changed:
            table.over[rank] = error
            table.num_events += 1
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
