"""Rates are counted work over the clock's time, and every side gets its turn in every round."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from unpad.trials.bench.measure import (
    Contender,
    Rounds,
    TimedTurn,
    Work,
    ceiling_size,
    describe_machine,
    matrix_ceiling,
    measure_rounds,
    spread,
)


def test_a_turn_counts_all_work_and_ends_with_its_cycle() -> None:
    numbers = count(1)
    side = Contender(lambda: Work(next(numbers), 10), cycle=4)
    done = side.turn(seconds=0.0, min_steps=5)
    assert done.steps == 8
    assert done.tokens == sum(range(1, 9))
    assert done.operations == 80


def test_a_turn_lasts_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("unpad.trials.bench.measure.time.perf_counter", lambda: clock[0])

    def step() -> Work:
        clock[0] += 0.25
        return Work(5, 1)

    done = Contender(step).turn(seconds=0.9)
    assert (done.steps, done.seconds) == (4, 1.0)
    assert done.rate == done.tokens / done.seconds == 20.0


def test_a_turn_begins_with_work_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, clock = count(), [0.0]
    monkeypatch.setattr("unpad.trials.bench.measure.time.perf_counter", lambda: clock[0])

    def step() -> Work:
        clock[0] += 0.001
        return Work(next(numbers), 1)

    assert Contender(step).turn(0.0, untimed=0.0035)[:2] == (1, 4), "steps 0 to 3 are untimed"
    assert Contender(step, cycle=2).turn(0.0, untimed=0.0035)[:2] == (2, 5 + 6), "a cycle goes without"


def test_rounds_interleave_sides_and_the_ceiling() -> None:
    calls: list[str] = []

    def side(name: str) -> Contender:
        def step() -> Work:
            calls.append(name)
            return Work(1, 1)

        return Contender(step)

    def ceiling() -> float:
        calls.append("ceiling")
        return float(len(calls))

    sides = {"a": side("a"), "b": side("b")}
    result = measure_rounds(sides, 2, 0.0, warm_steps=1, ceiling=ceiling)
    assert calls == ["a", "b", "ceiling", "a", "b", "ceiling", "b", "a", "ceiling"]
    assert result.ceilings == [3.0, 6.0, 9.0]
    assert [len(turns) for turns in result.turns.values()] == [2, 2]


def test_ratios_are_taken_within_a_round_and_shares_of_the_best_ceiling() -> None:
    turns = {
        "fast": [TimedTurn(1, 40, 100, 1.0), TimedTurn(1, 10, 25, 1.0)],
        "slow": [TimedTurn(1, 10, 20, 1.0), TimedTurn(1, 5, 10, 1.0)],
    }
    result = Rounds(turns, [100.0, 200.0, 50.0])
    assert result.ratios("fast", "slow") == [4.0, 2.0]
    assert result.shares("fast") == [0.5, 0.125]
    assert spread([1.0, 2.0, 3.0]) == spread([3.0, 1.0, 2.0])
    assert (spread([1.0, 2.0, 3.0]).low, spread([1.0, 2.0, 3.0]).median) == (1.5, 2.0)


def test_the_ceiling_is_the_products_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 2.0, 10.0, 11.0, 20.0, 24.0])  # the three products take 2, 1 and 4 seconds
    monkeypatch.setattr("unpad.trials.bench.measure.time.perf_counter", lambda: next(ticks))
    assert matrix_ceiling(torch.float32, size=16) == 2 * 16**3 / 1.0


def test_the_description_names_no_machine() -> None:
    import platform
    from importlib.metadata import version

    described = describe_machine(["torch", "no-such-package"])
    assert described["packages"] == {"torch": version("torch"), "no-such-package": None}
    assert described["memory_gib"] > 0
    assert platform.node() not in str(described)


@pytest.mark.parametrize(("rate", "size"), [(2e13, 4096), (3e11, 2048), (1.6e11, 2048), (2e10, 1024), (1e8, 256)])
def test_the_product_of_the_ceiling_fits_into_its_time(monkeypatch: pytest.MonkeyPatch, rate: float, size: int) -> None:
    measured: list[int] = []

    def ceiling(dtype: torch.dtype, device: torch.device | None, size: int) -> float:
        measured.append(size)
        return rate

    monkeypatch.setattr("unpad.trials.bench.measure.matrix_ceiling", ceiling)
    assert ceiling_size(torch.float32, seconds=0.25) == size
    assert max(measured) <= size, "none that takes longer is tried"
    assert ceiling_size(torch.float32, largest=16) == 16


def test_rounds_end_with_their_time_but_not_before_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("unpad.trials.bench.measure.time.perf_counter", lambda: clock[0])

    def step() -> Work:
        clock[0] += 1.0
        return Work(1, 1)

    def rounds(limit: float | None) -> int:
        sides = {"a": Contender(step), "b": Contender(step)}
        return len(measure_rounds(sides, 9, 0.0, warm_steps=0, limit_seconds=limit).turns["a"])

    assert rounds(None) == 9
    assert rounds(11.0) == 5, "of two seconds each; the sixth would end at 12"
    assert rounds(0.5) == 2


def test_warming_up_returns_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lasts = [0.0], iter([5.0, 1.0, 2.0])
    monkeypatch.setattr("unpad.trials.bench.measure.time.perf_counter", lambda: clock[0])

    def step() -> Work:
        clock[0] += next(lasts)
        return Work(1, 1)

    side = Contender(step, cycle=8)
    assert side.warm(5.5) == 1.0
    assert side.warm(0.0) == 2.0, "one step at least"
