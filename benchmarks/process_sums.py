"""Cost of exact sums of gradients on one process: the part `sums` of `processes.py`.

The packaged model trains on updates of four micro-batches, once with autograd adding gradients in fp32 and once with
`ExactSum`; both train a model of their own on the same batches and take turns. One thread, processor time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from gates import interval
from measure import describe_machine
from process_updates import Sums, Trained, load, prepare

from unpad.nn.native import library
from unpad.processes.group import ALONE
from unpad.training.memory import keep_freed_memory

MICROS = 4
TURNS, QUICK_TURNS = 15, 9
LIMIT = 1.05  # of the processor time of fast sums
SIDES: tuple[Sums, Sums] = ("fast", "exact")


@dataclass(frozen=True)
class Case:
    """A size of micro-batches, in tokens, with the kernels and the precision that compute it."""

    micro: int
    native: bool
    precision: str
    updates: int  # per turn

    @property
    def name(self) -> str:
        kernels = "native kernels" if self.native else "torch's kernels"
        return f"{MICROS} x {self.micro:,}, {kernels}, {self.precision}"


CASES = (Case(256, False, "fp32", 6), Case(2048, True, "fp32", 1), Case(256, True, "fp32", 6))


def measure(case: Case, turns: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Ratios of the processor time of exact sums to that of fast ones, one per turn."""
    torch.set_num_threads(1)
    keep_freed_memory()
    with nullcontext() if case.native else library.switched_off():
        setup, size = prepare(case.precision), MICROS * case.micro
        updates = load(setup, ALONE, update=size, micro=case.micro, num_updates=case.updates, num_micros=MICROS)
        sides = {name: Trained(setup, name) for name in SIDES}
        for side in sides.values():
            side.turn(updates)
            side.turn(updates)
        seconds: dict[str, list[float]] = {name: [] for name in SIDES}
        for turn in range(turns):
            for name in SIDES if turn % 2 == 0 else SIDES[::-1]:
                sides[name].update(updates[-1])  # untimed: the other side has filled the caches
                seconds[name].append(sides[name].turn(updates).processor / len(updates))
            say(f"{case.name}: turn {turn + 1} of {turns}, {seconds['exact'][-1] / seconds['fast'][-1]:.3f}")
    ratios = [exact / fast for exact, fast in zip(seconds["exact"], seconds["fast"], strict=True)]
    found = interval(ratios)
    return {
        **asdict(case),
        "name": case.name,
        "parameters": sum(p.numel() for p in setup.model.parameters()),
        "tokens": sum(update.tokens for update in updates) / len(updates),
        "milliseconds": {name: 1e3 * median(values) for name, values in seconds.items()},
        "ratios": ratios,
        "median": found.median,
        "low": found.low,
        "high": found.high,
        "met": found.high <= LIMIT,
        "machine": describe_machine() | {"kernels": library.describe() if case.native else "torch kernels"},
    }


def run(quick: bool, say: Callable[[str], None], save: Callable[[dict[str, Any]], None]) -> None:
    """Measure every case, and save after each."""
    found = list[dict[str, Any]]()
    for case in CASES:
        if case.native and not library.enabled():
            say(f"{case.name}: left out, {library.describe()}")
            continue
        found.append(measure(case, QUICK_TURNS if quick else TURNS, say))
        save({"cases": found})


def markdown(results: dict[str, Any]) -> list[str]:
    """The section of `processes.md`."""
    cases, (fast, exact) = results["cases"], SIDES
    lines = [
        "## Cost of exact sums",
        "",
        f"`--sums`: processor time of an update of zh_chat, {cases[0]['parameters']:,} numbers, on one process",
        f"with one thread, in {MICROS} micro-batches. Exact sums over those of autograd in fp32, both sides in turn,",
        f"{len(cases[0]['ratios'])} turns; a 95 % interval of the typical ratio. Limit of the first two: {LIMIT}.",
        "",
        "| tokens per micro-batch | kernels | fast, ms | exact, ms | ratio | interval | load |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        kernels = f"{'native' if case['native'] else 'torch'}, {case['precision']}"
        took = " | ".join(f"{case['milliseconds'][name]:.1f}" for name in (fast, exact))
        ratio = f"{case['median']:.3f} | {case['low']:.3f} to {case['high']:.3f} | {case['machine']['load']:.1f}"
        lines.append(f"| {case['micro']:,} | {kernels} | {took} | {ratio} |")
    machine = cases[-1]["machine"]
    return [*lines, "", f"{machine['processor']}, torch {machine['torch']}, {machine['kernels']}."]
