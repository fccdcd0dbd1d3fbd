"""Time of every operator of a training step on one thread and on more, and which of them do not become faster.

    python benchmarks/operators.py W1 chat [--threads 1 2] [--rounds 25] [--precision fp32]

The same step again and again, the numbers of threads in turn, taken apart by torch's profiler. Of every call the least
time counts over the rounds, so that other work on the machine shows little: the columns add up to a step that nothing
disturbed. "python" is what no operator accounts for. With OMP_WAIT_POLICY=PASSIVE threads sleep between operators, and
waking them for each one shows as operators that gain nothing.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from workloads import Ours, workload

from unpad.batching.batch import RaggedBatch
from unpad.models.contract import WEIGHTS
from unpad.nn.native import library
from unpad.training.memory import keep_freed_memory
from unpad.training.step import train_step
from unpad.trials.bench.measure import describe_machine

HERE = Path(__file__).parent
PRODUCTS = ("aten::mm", "aten::addmm")
PYTHON = "python"
WARM_STEPS = 6
SHOWN = 0.001  # of the products' time, the least that has a row


class Call(NamedTuple):
    """An operator that ran, with the milliseconds spent in it and not in the operators that it called."""

    name: str
    milliseconds: float


def profiled_step(ours: Ours, micros: list[RaggedBatch]) -> list[Call]:
    """The calls of one step in order, and the time outside of them as the last."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, torch.profiler.record_function(PYTHON):
        take_step(ours, micros)
    events = sorted(profiler.events() or [], key=lambda event: (event.time_range.start, -event.time_range.end))
    return [Call(event.name, event.self_cpu_time_total / 1000) for event in events]


def take_step(ours: Ours, micros: list[RaggedBatch]) -> None:
    torch.manual_seed(0)  # of dropout
    clip = ours.workload.optim.clip
    train_step(ours.model, micros, ours.optimizer, weights=WEIGHTS, precision=ours.precision, clip=clip)


def least_times(rounds: Sequence[Sequence[Call]]) -> dict[str, float]:
    """Milliseconds by operator, each call at its least over the rounds, which have the same calls in the same order."""
    names = [call.name for call in rounds[0]]
    assert all([call.name for call in calls] == names for calls in rounds), "rounds differ in their calls"
    least = np.array([[call.milliseconds for call in calls] for calls in rounds]).min(0)
    total: defaultdict[str, float] = defaultdict(float)
    for name, milliseconds in zip(names, least.tolist(), strict=True):
        total[name] += milliseconds
    return dict(total)


def table(times: dict[int, dict[str, float]]) -> list[str]:
    """Rows of Markdown, one for each operator; times are milliseconds by operator, by number of threads."""
    few, many = min(times), max(times)
    products = {n: sum(times[n].get(name, 0.0) for name in PRODUCTS) for n in times}
    lines = ["| operator | " + " | ".join(f"threads: {n}, ms | of products" for n in times) + " | ratio |"]
    lines.append("|---" * (2 * len(times) + 2) + "|")
    named = {"a step": {n: sum(times[n].values()) for n in times}, "products": products}
    rest = sorted(set(times[many]) - set(PRODUCTS), key=lambda name: -times[many][name])
    named |= {name: {n: times[n][name] for n in times} for name in rest}
    for name, row in named.items():
        if row[many] >= SHOWN * products[many]:
            cells = [f"{row[n]:.2f} | {row[n] / products[n]:.1%}" for n in times]
            lines.append(f"| {name} | {' | '.join(cells)} | {row[many] / max(row[few], 1e-9):.2f} |")
    return lines


def measure(name: str, options: argparse.Namespace) -> list[str]:
    """The table of one workload."""
    ours = Ours(workload(name, options.data), precision=options.precision)
    for _ in range(WARM_STEPS):
        ours.step()
    micros = ours.next_micros()
    rounds: dict[int, list[list[Call]]] = {threads: [] for threads in options.threads}
    for _ in range(options.rounds):
        for threads, calls in rounds.items():
            torch.set_num_threads(threads)
            take_step(ours, micros)
            calls.append(profiled_step(ours, micros))
    return [f"## {name}, {ours.precision}", "", *table({n: least_times(calls) for n, calls in rounds.items()}), ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--precision", default="auto", choices=["auto", "fp32", "bf16"])
    parser.add_argument("--data", type=Path, default=HERE / "../../shared/data", help="folder with zh/, for corpora")
    options = parser.parse_args()
    keep_freed_memory()
    machine = describe_machine()
    policy = os.environ.get("OMP_WAIT_POLICY", "as by default")
    print(
        f"{machine['cores']} cores of {machine['processor']}, load {machine['load']:.1f} before; {library.describe()}; "
        f"threads wait {policy}; torch {machine['torch']}.\n"
    )
    for name in options.names:
        print("\n".join(measure(name, options)), flush=True)


if __name__ == "__main__":
    main()
