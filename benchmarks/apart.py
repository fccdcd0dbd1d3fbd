"""A side of a comparison in a process of its own, where its users have it too: its own heap, caches and threads.

In one process with eleven others the sides of W1 were 11 to 18 % slower than alone (docs/internals/log.md).
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

from measure import Contender, TimedTurn

from unpad.machine import peak_memory, process_memory, restart_peak
from unpad.training.memory import return_freed_memory


class Memory(NamedTuple):
    """Bytes of a whole process: between turns, and the most in its last turn or while the side was made."""

    resting: int
    peak: int


class Made(Protocol):
    """What the process makes."""

    @property
    def side(self) -> Contender: ...

    def warm(self, seconds: float) -> None:
        """Work untimed, before the first turn."""
        ...

    def longest_next(self) -> None:
        """Let the next step be one that needs the most memory."""
        ...

    def describe(self) -> dict[str, Any]:
        """What the table says of it, once all turns are over."""
        ...


class Apart:
    """A process that makes a side and works only in its turns; between them it holds as little memory as it can.

    It begins to import at once; `build` waits until the side is there.

    Args:
        make: a function of a module, called in the process.
        arguments: of it; they are pickled.
    """

    def __init__(self, make: Callable[..., Made], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def build(self, warm_seconds: float = 0.0) -> Memory:
        """Make the side and let it work untimed.

        Raises:
            Exception: what making it raised.
            MemoryError: the process is gone.
        """
        self._ask("build")
        self._ask("warm", warm_seconds)
        memory: Memory = self._ask("memory")
        return memory

    def turn(self, seconds: float, min_steps: int = 1, untimed: float = 0.0) -> TimedTurn:
        """As `Contender.turn`."""
        turn: TimedTurn = self._ask("turn", seconds, min_steps, untimed)
        return turn

    def peak(self, seconds: float, min_steps: int) -> int:
        """Most bytes of the process in a turn that begins with the batch that needs the most memory."""
        self._ask("longest_next")
        self._ask("turn", seconds, min_steps, 0.0)
        memory: Memory = self._ask("memory")
        return memory.peak

    def describe(self) -> dict[str, Any]:
        description: dict[str, Any] = self._ask("describe")
        return description

    def close(self) -> None:
        self._pipe.close()
        self._process.join()

    def _ask(self, *question: Any) -> Any:
        try:
            self._pipe.send(question)
            answer, error = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise MemoryError("the process of a side was ended from outside: measure fewer sides at once") from None
        if error is not None:
            raise error
        return answer


def _serve(pipe: Connection, make: Callable[..., Made], arguments: tuple[Any, ...]) -> None:
    made: Made | None = None
    while True:
        try:
            what, *details = pipe.recv()
        except EOFError:  # closed
            return
        answer, error = None, None
        try:
            if what == "build":
                restart_peak()
                made = make(*arguments)
            else:
                assert made is not None, "build first"
                answer = _answer(made, what, details)
        except Exception as raised:
            traceback.print_exc()
            error = raised
        return_freed_memory()
        pipe.send((answer, error))


def _answer(made: Made, what: str, details: list[Any]) -> Any:
    if what == "memory":
        return Memory(process_memory(), peak_memory())
    if what == "turn":
        restart_peak()
        return made.side.turn(*details)
    return getattr(made, what)(*details)  # warm, longest_next or describe
