"""A peer's best setting on this machine: precision and batch size, measured within a given time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Protocol, TypeVar

import torch
from batches import STRATA, Batches
from measure import Work, matrix_ceiling

BATCH_SIZES = (8, 16, 32, 64)
SLOW = 0.5  # of the best rate: a candidate that is seen below it is not measured any longer
SLOW_FIRST = 0.2  # the same for its first step, which also prepares
FEWEST_STRATA = 2  # steps of a measurement: one of short sequences and one of long ones
PRODUCT_SIZE, PRODUCT_TURNS = 512, 3


class Tunable(Protocol):
    """A side whose batches can be changed."""

    bf16: bool
    batches: Batches

    def set_batches(self, size: int, grouped: bool, strata: int = STRATA) -> None: ...

    def step(self) -> Work: ...


Side = TypeVar("Side", bound=Tunable)


@lru_cache(maxsize=1)
def bf16_here() -> bool:
    """True where a product in bf16 takes less time than in fp32, by measurement: where it is emulated it takes more."""
    dtypes = (torch.bfloat16, torch.float32)
    turns = [[matrix_ceiling(dtype, size=PRODUCT_SIZE) for dtype in dtypes] for _ in range(PRODUCT_TURNS)]
    low, full = (max(rates) for rates in zip(*turns, strict=True))
    return bool(low > full)


@dataclass(frozen=True)
class Tuning:
    """What tuning may try.

    Args:
        precision: auto tries both, and bf16 only where its products are faster.
        seconds: after which no further candidate is begun; the first is measured however long it takes.
        sizes: of batches.
    """

    precision: str = "auto"
    seconds: float = 90.0
    sizes: Sequence[int] = BATCH_SIZES

    def settings(self) -> list[bool]:
        """Precisions to try as values of `bf16`, the one with the faster products first."""
        if self.precision != "auto":
            return [self.precision == "bf16"]
        return [True, False] if bf16_here() else [False]


def tune(
    make: Callable[[bool], Side], tuning: Tuning, clock: Callable[[], float] = time.perf_counter
) -> tuple[Side, dict[str, float | None]]:
    """Make a side, with batches of like lengths, in the precision and with the batch size that are fastest.

    Args:
        make: makes one that computes in bf16, or in fp32.

    Returns:
        The side, and tokens per second of every candidate, None of one that was given up or not begun.
    """
    rates: dict[tuple[bool, int], float | None] = dict.fromkeys(product(tuning.settings(), tuning.sizes))
    end, best, made = clock() + tuning.seconds, 0.0, None
    for bf16 in tuning.settings():
        made = None
        gc.collect()  # one at a time: each has weights and optimizer state
        made = make(bf16)
        for number, size in enumerate(tuning.sizes):
            if best and clock() >= end:
                break
            left = len(tuning.sizes) - number + len(tuning.sizes) * (bf16 != tuning.settings()[-1])
            rate = rates[bf16, size] = _rate(made, size, best, (end - clock()) / left, clock)
            best = max(best, rate or 0.0)
            if rate is None:  # larger ones pad more and are slower still
                break
    winner = max((key for key, rate in rates.items() if rate is not None), key=lambda key: rates[key] or 0.0)
    if made is None or made.bf16 != winner[0]:
        made = None
        gc.collect()
        made = make(winner[0])
    made.set_batches(winner[1], grouped=True)
    return made, {f"{'bf16' if bf16 else 'fp32'}, {size}": rate for (bf16, size), rate in rates.items()}


def _rate(side: Tunable, size: int, best: float, seconds: float, clock: Callable[[], float]) -> float | None:
    """Tokens per second over batches of this size, as many as fit into `seconds`; None as soon as it is seen slow."""
    side.set_batches(size, grouped=True)
    began = clock()
    rate = side.step().tokens / (took := clock() - began)
    if rate < SLOW_FIRST * best:
        return None
    side.set_batches(size, grouped=True, strata=fitting_strata(took, seconds))
    tokens, began = 0, clock()
    for _ in range(side.batches.cycle):
        tokens += side.step().tokens
        rate = tokens / (clock() - began)
        if rate < SLOW * best:
            return None
    return rate


def fitting_strata(step_seconds: float, seconds: float) -> int:
    """Steps of a cycle that take about `seconds`: STRATA if they fit, else a half of it or a quarter."""
    strata = STRATA
    while strata > FEWEST_STRATA and strata * step_seconds > seconds:
        strata //= 2
    return strata
