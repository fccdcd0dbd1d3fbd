"""Gates of the speed benchmark read as they are meant, and those of another processor do not apply."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure import Rounds, TimedTurn

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def gates() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("gates")
        for script in BENCHMARKS.glob("*.py"):
            sys.modules.pop(script.stem, None)


def _groups(gates: Any, *groups: dict[str, tuple[int, ...]], ceilings: tuple[float, ...] = (80.0, 100.0)) -> Any:
    """Groups of sides with these rates in their rounds."""
    rounds = [
        Rounds({name: [TimedTurn(1, r, r, 1.0) for r in rates] for name, rates in group.items()}, list(ceilings))
        for group in groups
    ]
    return gates.Groups("ours", rounds, {})


def test_a_gate_takes_the_lower_quartile_and_the_fastest_peer(gates):
    result = _groups(gates, {"ours": (40, 40, 40, 20, 40), "a": (5,) * 5, "b": (10,) * 5})
    judged = gates.judge(gates.Gate("x", "ours", ("a", "b"), 3.9, 8.0), result)
    assert judged["other"] == "b"
    assert judged["values"] == [4.0, 4.0, 4.0, 2.0, 4.0]
    assert judged["low"] == 4.0
    assert judged["met"]
    assert judged["of_goal"] == 0.5
    assert not gates.judge(gates.Gate("x", "ours", ("b",), 4.1), result)["met"]
    assert gates.judge(gates.Gate("x", "ours", (), 0.4), result)["values"] == [0.4, 0.4, 0.4, 0.2, 0.4]
    assert gates.judge(gates.Gate("x", "ours", ("missing",), 1.0), result) is None
    assert gates.judge(gates.Gate("x", "ours", ("missing", "b"), 1.0), result)["other"] == "b"


def test_a_gate_that_is_a_limit_takes_the_upper_quartile(gates):
    result = _groups(gates, {"ours": (10, 10, 10, 10, 10), gates.PRODUCTS: (11, 12, 13, 14, 15)})
    judged = gates.judge(gates.products(1.4), result)
    assert judged["values"] == [1.1, 1.2, 1.3, 1.4, 1.5]
    assert judged["met"], "the upper quartile is 1.4"
    assert not gates.judge(gates.products(1.39), result)["met"]


def test_ratios_are_those_within_a_group_and_the_fastest_peer_is_found_over_groups(gates):
    result = _groups(gates, {"ours": (40, 40), "a": (20, 20)}, {"ours": (20, 20), "b": (15, 15)}, ceilings=(50.0,))
    assert result.ratios("ours", "b") == [20 / 15, 20 / 15]
    assert result.ratios("a", "b") == [], "never together"
    assert result.shares("b") == [0.3, 0.3]
    judged = gates.judge(gates.Gate("x", "ours", ("a", "b"), 1.0), result)
    assert judged["other"] == "b", "though its tokens per second are fewer than those of a"
    assert gates.judge(gates.Gate("x", "a", ("b",), 1.0), result) is None


def test_a_quick_verdict_needs_an_interval_on_one_side_of_the_gate(gates):
    result = _groups(gates, {"ours": (100, 110, 105, 108), "a": (10, 10, 10, 10)})

    def judged(gate: float) -> tuple[bool, bool]:
        row = gates.judge(gates.Gate("x", "ours", ("a",), gate), result, quick=True)
        return row["met"], row["resolved"]

    assert judged(9.0) == (True, True)
    assert judged(10.5) == (False, False)
    assert judged(12.0) == (False, True)
    limit = gates.judge(gates.Gate("x", "ours", ("a",), 9.0, at_most=True), result, quick=True)
    assert (limit["met"], limit["resolved"]) == (False, True)
    one = _groups(gates, {"ours": (100,), "a": (1,)})
    assert not gates.judge(gates.Gate("x", "ours", ("a",), 9.0), one, quick=True)["resolved"], "one round says nothing"


def test_an_interval_is_students_and_wide_for_few_rounds(gates):
    found = gates.interval([1.0, 4.0])
    assert found.low == pytest.approx(2 / 4**6.353, rel=1e-3), "exp(mean - 12.706 sd / sqrt(2)) of the logarithms"
    assert found.low * found.high == pytest.approx(4.0)
    assert gates.interval([2.0] * 12) == gates.Spread(2.0, pytest.approx(2.0), pytest.approx(2.0))


@pytest.mark.parametrize(
    ("target", "precision", "processor", "kind"),
    [
        ("avx512_bf16", "bf16", "AMD EPYC (family 26, model 2)", "AVX-512 BF16, AMD family 26"),
        ("avx512_bf16", "fp32", "AMD EPYC (family 26, model 2)", "AVX-512 BF16"),
        ("avx512_bf16", "bf16", "AMD EPYC (family 25, model 17)", "AVX-512 BF16"),
        ("avx512_bf16", "fp32", "Intel(R) Xeon(R) (family 6, model 207)", "AVX-512 BF16"),
        ("avx2", "fp32", "AMD EPYC (family 26, model 2)", "AVX2, fp32"),
        ("avx2", "bf16", "AMD EPYC (family 26, model 2)", None),
        ("avx512", "fp32", "Intel(R) Xeon(R) (family 6, model 85)", None),
        ("avx512_amx", "bf16", "Intel Xeon (family 6, model 207)", "AVX-512 BF16 with AMX"),
        ("avx512_amx", "fp32", "Intel Xeon (family 6, model 207)", None),
        (None, "fp32", "AMD EPYC (family 26, model 2)", None),
    ],
)
def test_the_kind_of_a_processor_follows_from_kernels_and_precision(gates, target, precision, processor, kind):
    assert gates.kind_of(target, precision, processor) == kind


def test_gates_differ_by_kind(gates):
    def gate(kind: str, workload: str, what: str) -> float | None:
        return next((gate.gate for gate in gates.GATES[kind][workload] if gate.what == what), None)

    assert [gate(kind, "W1", "step over products alone") for kind in gates.GATES] == [1.32, 1.32, 1.85, 1.15]
    assert [gate(kind, "W1", "against the peer's best") for kind in gates.GATES] == [3.6, None, None, 1.25]
    assert [gate(kind, "chat", "share of the ceiling") for kind in gates.GATES] == [0.65, None, None, None]


def test_memory_is_compared_where_both_sides_were_measured(gates):
    sides = {"ours": {"peak_bytes": 5, "base_bytes": 3}, "peer, our tokens per step": {"peak_bytes": 10}}
    sides["peer, our tokens per step"]["base_bytes"] = 2
    assert gates.judge_memory(sides) == {"whole": 0.5, "added": 0.25, "gate": 0.7, "met": True}
    assert gates.judge_memory({"ours": sides["ours"]}) is None
