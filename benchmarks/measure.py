"""Fair measurement of rates: sides take turns in one process, round after round, with a ceiling from the same time.

A machine that slows down or speeds up then does so for every side, and comparisons use the ratio within a round.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from unpad.machine import full_processor_name
from unpad.terminal.progress import counted

CEILING_SIZE = 4096  # rows, columns and depth, at most, of the product that measures the machine's limit
CEILING_SECONDS = 0.25  # seconds that one such product takes at most
CEILING_REPEATS = 3
SMALLEST_CEILING = 256
MIN_ROUNDS = 2  # regardless of time: a single round has no spread
COMING_BACK = 0.3  # untimed work at the beginning of a turn, as a share of its seconds


class Work(NamedTuple):
    """Work of one step: real tokens, never padding, and the operations those tokens need."""

    tokens: int
    operations: int


class TimedTurn(NamedTuple):
    """Work of one side in one round."""

    steps: int
    tokens: int
    operations: int
    seconds: float

    @property
    def rate(self) -> float:
        """Real tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Contender:
    """One way to do the work.

    Args:
        step: runs one whole step: waits for data, computes, updates the weights. It returns when the step is done.
        cycle: a turn holds a multiple of `cycle` steps; for a side with a repeating pattern of cheap and expensive
            steps, so that every round has both.
    """

    step: Callable[[], Work]
    cycle: int = 1

    def turn(self, seconds: float, min_steps: int = 1, untimed: float = 0.0) -> TimedTurn:
        """Work until `seconds` are over, `min_steps` are done and the cycle is complete.

        Args:
            untimed: seconds of work before that; a side with a cycle goes without, as its turns are long.
        """
        began = time.perf_counter()
        while self.cycle == 1 and time.perf_counter() - began < untimed:
            self.step()
        steps = tokens = operations = 0
        began = time.perf_counter()
        while steps < min_steps or steps % self.cycle or time.perf_counter() - began < seconds:
            work = self.step()
            tokens, operations, steps = tokens + work.tokens, operations + work.operations, steps + 1
        return TimedTurn(steps, tokens, operations, time.perf_counter() - began)

    def warm(self, seconds: float) -> float:
        """Work untimed until `seconds` are over, one step at least; return the seconds of the last step."""
        began = last = time.perf_counter()
        while True:
            self.step()
            now = time.perf_counter()
            if now - began >= seconds:
                return now - last
            last = now


class TakesTurns(Protocol):
    """A `Side`, or its proxy in another process."""

    def turn(self, seconds: float, min_steps: int = 1, untimed: float = 0.0) -> TimedTurn: ...


@dataclass(frozen=True)
class Spread:
    """Median and quartiles over the rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Rounds:
    """All turns.

    Args:
        turns: for every side its turns, one per round.
        ceilings: operations per second of the reference product before every round and after the last,
            (rounds + 1,); empty when it was not measured.
    """

    turns: dict[str, list[TimedTurn]]
    ceilings: list[float]

    def rates(self, name: str) -> list[float]:
        """Real tokens per second of a side, one per round."""
        return [turn.rate for turn in self.turns[name]]

    def ratios(self, name: str, other: str) -> list[float]:
        """Speed relative to another side, one ratio per round."""
        return [mine / theirs for mine, theirs in zip(self.rates(name), self.rates(other), strict=True)]

    def shares(self, name: str) -> list[float]:
        """Operations per second of a side over the best ceiling of the whole run, one per round."""
        ceiling = max(self.ceilings)
        return [turn.operations / turn.seconds / ceiling for turn in self.turns[name]]


def spread(values: Sequence[float]) -> Spread:
    low, median, high = np.percentile(values, [25, 50, 75])
    return Spread(float(median), float(low), float(high))


def measure_rounds(
    sides: Mapping[str, TakesTurns],
    rounds: int,
    seconds: float,
    *,
    min_steps: int = 1,
    warm_steps: int = 2,
    warm_seconds: float = 0.0,
    ceiling: Callable[[], float] | None = None,
    limit_seconds: float | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Rounds:
    """Measure all sides in turn, forwards and backwards by turns; every side goes on where its last turn ended.

    Each turn begins with untimed work: other sides have filled the caches, and within one process the heap and the
    matrix library's prepared products; this cost comes from taking turns, not from a side.

    Args:
        seconds, min_steps: as `turn`.
        warm_steps, warm_seconds: untimed work of every side before the first round: first products of every shape,
            optimizer state.
        ceiling: measures the machine's limit, in operations per second; called before every round and at the end.
        limit_seconds: no round after the second begins if it would probably end later than this after the start.
        report: called with one line about each round.
    """
    turns: dict[str, list[TimedTurn]] = {name: [] for name in sides}
    ceilings: list[float] = []
    for side in sides.values():
        side.turn(warm_seconds, warm_steps)
    began = time.perf_counter()
    for number in counted(range(rounds), "measuring speed", rounds, "rounds"):
        names = list(sides)[:: 1 if number % 2 == 0 else -1]
        if ceiling is not None:
            ceilings.append(ceiling())
        for name in names:
            turns[name].append(sides[name].turn(seconds, min_steps, seconds * COMING_BACK))
            report(f"round {number + 1}: {name}: {turns[name][-1].rate:,.0f} tokens/s, {turns[name][-1].steps} steps")
        done, passed = number + 1, time.perf_counter() - began
        if limit_seconds is not None and done >= MIN_ROUNDS and passed * (done + 1) / done > limit_seconds:
            break
    if ceiling is not None:
        ceilings.append(ceiling())
    return Rounds(turns, ceilings)


def ceiling_size(
    dtype: torch.dtype,
    device: torch.device | None = None,
    largest: int = CEILING_SIZE,
    seconds: float = CEILING_SECONDS,
) -> int:
    """Rows of the product for `matrix_ceiling`: the largest power of two up to `largest` that takes at most `seconds`
    here. On a processor without products of the dtype, a product of 4,096 cubed takes minutes.
    """
    size = min(largest, SMALLEST_CEILING)
    while 2 * size <= largest and 8 * 2 * size**3 / matrix_ceiling(dtype, device, size) <= seconds:
        size *= 2
    return size


def matrix_ceiling(dtype: torch.dtype, device: torch.device | None = None, size: int = CEILING_SIZE) -> float:
    """Operations per second of a square matrix product, the best of a few."""
    a = torch.full((size, size), 0.5, dtype=dtype, device=device)
    b, out = a.t().contiguous(), torch.empty_like(a)
    best = float("inf")
    for _ in range(CEILING_REPEATS):
        _wait(a.device)
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        _wait(a.device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def load_average() -> float | None:
    """Runnable processes, mean of the last minute; None where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def describe_machine(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Processor, cores, memory, load, and versions; nothing that names the machine or its users.

    Args:
        packages: to list with their versions besides Python and torch; the version of one that is not installed is
            None.
    """
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "processor": full_processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load": load_average(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": {name: _version(name) for name in packages},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
