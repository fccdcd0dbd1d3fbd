"""A peer's best setting is the fastest of those that were tried, in the time that there was."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from unpad.trials.bench.measure import Work

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def tuning(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("tuning")
    for script in BENCHMARKS.glob("*.py"):
        sys.modules.pop(script.stem, None)


class _Peer:
    """A side whose steps of 100 tokens take the seconds that a table has for its setting."""

    def __init__(self, seconds: dict[tuple[bool, int], float], bf16: bool, log: list[tuple[bool, int]]) -> None:
        self.seconds, self.bf16, self.log, self.now = seconds, bf16, log, 0.0

    def set_batches(self, size: int, grouped: bool, strata: int = 8) -> None:
        self.batches = sys.modules["batches"].Batches([1, 2] * 400, size, grouped, strata)

    def step(self) -> Work:
        self.log.append((self.bf16, self.batches.size))
        CLOCK[0] += self.seconds[self.bf16, self.batches.size]
        return Work(100, 0)


CLOCK = [0.0]


def _tune(
    module: Any, fast: bool, seconds: dict[tuple[bool, int], float], budget: float, precision: str = "auto"
) -> tuple[Any, dict[str, float | None], list[tuple[bool, int]]]:
    log: list[tuple[bool, int]] = []
    sizes = list(dict.fromkeys(size for _, size in seconds))
    module.bf16_here = lambda: fast
    side, rates = module.tune(
        lambda bf16: _Peer(seconds, bf16, log), module.Tuning(precision, budget, sizes), clock=lambda: CLOCK[0]
    )
    return side, rates, log


def test_the_fastest_of_both_precisions_and_all_sizes_is_chosen(tuning: Any) -> None:
    seconds = {(False, 8): 1.0, (False, 16): 0.8, (True, 8): 1.2, (True, 16): 0.9}
    side, rates, _ = _tune(tuning, True, seconds, 1000)
    assert (side.bf16, side.batches.size, side.batches.strata) == (False, 16, 8)
    assert rates == {"bf16, 8": 100 / 1.2, "bf16, 16": 100 / 0.9, "fp32, 8": 100.0, "fp32, 16": 125.0} or all(
        rate == pytest.approx(expected)
        for rate, expected in zip(rates.values(), (100 / 1.2, 100 / 0.9, 100, 125), strict=True)
    )
    faster = seconds | {(True, 8): 0.1}
    assert _tune(tuning, True, faster, 1000)[0].bf16, "the side is made again in the better precision"


def test_bf16_is_not_tried_where_its_products_are_slower(tuning: Any) -> None:
    seconds = {(False, 8): 1.0, (True, 8): 0.1}
    side, rates, log = _tune(tuning, False, seconds, 1000)
    assert not side.bf16
    assert list(rates) == ["fp32, 8"]
    assert not any(bf16 for bf16, _ in log)
    assert _tune(tuning, False, seconds, 1000, precision="bf16")[0].bf16, "unless it was asked for"


def test_a_candidate_that_is_seen_slow_does_not_run_a_cycle(tuning: Any) -> None:
    seconds = {(False, 8): 1.0, (False, 16): 2.5, (False, 32): 0.1}
    side, rates, log = _tune(tuning, False, seconds, 1000)
    assert side.batches.size == 8
    assert rates == {"fp32, 8": 100.0, "fp32, 16": None, "fp32, 32": None}
    assert log.count((False, 8)) == 1 + 8
    assert log.count((False, 16)) == 1 + 1, "one untimed step and one that tells"
    assert (False, 32) not in log, "larger ones pad more"
    log = _tune(tuning, False, seconds | {(False, 16): 6.0}, 1000)[2]
    assert log.count((False, 16)) == 1, "the first step tells already"


def test_tuning_ends_with_its_time_and_slow_steps_shorten_the_cycle(tuning: Any) -> None:
    seconds = {(False, size): 10.0 for size in (8, 16, 32, 64)}
    side, rates, log = _tune(tuning, False, seconds, 60)
    assert side.batches.size == 8
    assert [rate is not None for rate in rates.values()] == [True, True, False, False]
    assert len(log) == 2 * (1 + 2), "a cycle of two steps instead of eight"


def test_bf16_products_are_compared_by_measurement(tuning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for low, full, expected in ((22.0, 160.0, False), (900.0, 300.0, True)):
        rates = {torch.bfloat16: low, torch.float32: full}
        monkeypatch.setattr(tuning, "matrix_ceiling", lambda dtype, size, rates=rates: rates[dtype])
        tuning.bf16_here.cache_clear()
        assert tuning.bf16_here() == expected
    tuning.bf16_here.cache_clear()


def test_a_turn_begins_with_a_whole_cycle(tuning: Any) -> None:
    batches = sys.modules["batches"].Batches([1, 2, 3, 4] * 100, 8, True, strata=4)
    for _ in range(5):
        next(batches)
    batches.begin_cycle()
    assert batches._given == 8
    batches.begin_cycle()
    assert batches._given == 8
    assert batches.cycle == 4
    batches.longest_next()
    assert len(next(batches)) == 8
    batches.begin_cycle()
    assert (batches._given, len(batches._rest) % 4) == (8, 0), "the batch of the longest belongs to no cycle"
