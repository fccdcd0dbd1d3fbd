"""What the rounds of `speed.py` must reach, by kind of processor, and the verdict on them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import exp, log, sqrt
from statistics import fmean, stdev
from typing import Any

import peers
from groups import Groups
from measure import Spread, spread

OURS, TORCH_KERNELS, PRODUCTS = "ours", "ours, torch kernels", "our products alone"
ALONE = "one at a time, torch"  # what a loop over examples is without this package: torch's kernels, fp32
MEMORY_GATE = 0.7  # of the Trainer's peak at equal tokens per step
# Kinds of processor: kernels and precision, and for what was fixed on one processor that one.
AVX2, AVX512_BF16, AMX = "AVX2, fp32", "AVX-512 BF16", "AVX-512 BF16 with AMX"
EPYC = "AVX-512 BF16, AMD family 26"
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # 97.5 %, of 1 to 10 degrees


@dataclass(frozen=True)
class Gate:
    """What must hold, and what is wanted.

    Args:
        side: measured side.
        others: what it is compared with, the fastest of those that were measured; none is the share of the ceiling.
        gate: the lower quartile of the rounds must reach it.
        goal: None where there is none.
        at_most: the upper quartile must not pass the gate instead.
    """

    what: str
    side: str
    others: tuple[str, ...]
    gate: float
    goal: float | None = None
    at_most: bool = False


def defaults(gate: float, goal: float | None = None) -> Gate:
    return Gate("against the peer's defaults", OURS, (peers.DEFAULTS,), gate, goal)


def best(gate: float, goal: float | None = None) -> Gate:
    return Gate("against the peer's best", OURS, (peers.BEST, peers.EQUAL), gate, goal)


def alone(gate: float, goal: float | None = None) -> Gate:
    return Gate("against one at a time", OURS, (ALONE,), gate, goal)


def share(gate: float, goal: float | None = None) -> Gate:
    return Gate("share of the ceiling", OURS, (), gate, goal)


def kernels(gate: float) -> Gate:
    return Gate("against our torch kernels", OURS, (TORCH_KERNELS,), gate)


def torch_path(gate: float) -> Gate:
    return Gate("torch kernels against the peer's defaults", TORCH_KERNELS, (peers.DEFAULTS,), gate)


def products(gate: float) -> Gate:
    return Gate("step over products alone", PRODUCTS, (OURS,), gate, at_most=True)


GATES: dict[str, dict[str, list[Gate]]] = {
    EPYC: {
        "W1": [products(1.32), defaults(10, 12), best(3.6, 4.5), alone(20, 25), share(0.72, 0.75), torch_path(5)],
        "W2": [defaults(10, 15), best(1.8, 2.3), alone(5.6, 8), share(0.80, 0.85), torch_path(6)],
        "W3": [defaults(13, 20), best(2.6, 3), alone(4, 5), share(0.66, 0.75)],
        "chat": [products(1.32), defaults(7.2), best(2.6), alone(10.5), share(0.65)],
    },
    AVX512_BF16: {"W1": [products(1.32)], "chat": [products(1.32)]},
    # Of a prototype (docs/internals/log.md); products alone are torch's, some of them at a third of the ceiling.
    AMX: {"W1": [products(1.85)], "W3": [products(3.2)], "chat": [products(2.0)]},
    AVX2: {
        "W1": [products(1.15), best(1.25), kernels(1.2)],
        "W2": [products(1.2), kernels(1.2)],
        "W3": [products(1.35), best(1.15), kernels(1.3)],
        "chat": [products(1.15), best(1.2), kernels(1.2)],
    },
}


def kind_of(target: str | None, precision: str, processor: str) -> str | None:
    """The kind of processor whose gates apply; None where none were set.

    Args:
        target: set of instructions of the kernels, a key of `library.TARGETS`; None without kernels.
        precision: of our side.
        processor: with family and model, as `processor.full_processor_name` names it.
    """
    if target == "avx2" and precision == "fp32":
        return AVX2
    if target == "avx512_amx" and precision == "bf16":
        return AMX
    if target != "avx512_bf16":
        return None
    fixed_here = precision == "bf16" and processor.startswith("AMD") and "(family 26," in processor
    return EPYC if fixed_here else AVX512_BF16


def interval(values: list[float]) -> Spread:
    """Median, and a 95 % interval of the typical value: Student's t of the logarithms, which few rounds make wide."""
    if len(values) < 2:
        return Spread(values[0], 0.0, float("inf"))
    logs = [log(value) for value in values]
    half = STUDENT[min(len(values) - 1, len(STUDENT)) - 1] * stdev(logs) / sqrt(len(values))
    middle = fmean(logs)
    return Spread(spread(values).median, exp(middle - half), exp(middle + half))


def judge(gate: Gate, groups: Groups, quick: bool = False) -> dict[str, Any] | None:
    """Compare the rounds with a gate; None if the sides were not measured together.

    Args:
        quick: the verdict is that of the interval, or that it is too wide for one; else the quartile decides.
    """
    measured = [other for other in gate.others if groups.ratios(gate.side, other)]
    if gate.others and not measured:
        return None
    fastest = min(measured, key=lambda other: spread(groups.ratios(gate.side, other)).median, default=None)
    values, bound = compare(groups, gate.side, fastest), compare(groups, PRODUCTS, fastest)
    if not values:
        return None
    found = interval(values) if quick else spread(values)
    reached = found.high <= gate.gate if gate.at_most else found.low >= gate.gate
    missed = found.low > gate.gate if gate.at_most else found.high < gate.gate
    return {
        **asdict(gate),
        "other": fastest,
        "values": values,
        **asdict(found),
        "met": reached,
        "resolved": not quick or reached or missed,
        "of_goal": None if gate.goal is None else found.median / gate.goal,
        "products_alone": spread(bound).median if bound and gate.side == OURS else None,
    }


def compare(groups: Groups, side: str, other: str | None) -> list[float]:
    """Ratios of the rounds to another side, or shares of the ceiling without one; none of a side not measured."""
    return groups.shares(side) if other is None else groups.ratios(side, other)


def judge_memory(sides: dict[str, Any]) -> dict[str, Any] | None:
    """Our peak against the peer's at our tokens per step: the whole process, and what training added to it.

    Args:
        sides: with `peak_bytes` and `base_bytes` where they were measured.
    """
    if any("peak_bytes" not in sides.get(name, {}) for name in (OURS, peers.EQUAL)):
        return None
    mine, theirs = sides[OURS], sides[peers.EQUAL]
    added = (mine["peak_bytes"] - mine["base_bytes"]) / (theirs["peak_bytes"] - theirs["base_bytes"])
    whole = mine["peak_bytes"] / theirs["peak_bytes"]
    return {"whole": whole, "added": added, "gate": MEMORY_GATE, "met": whole <= MEMORY_GATE}
