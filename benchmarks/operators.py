"""Time of every operator of a training step on one thread and on more, and which of them do not become faster.

    python benchmarks/operators.py W1 chat [--threads 1 2] [--rounds 25] [--precision fp32] [--clock processor]

The same step again and again, the numbers of threads in turn, taken apart by torch's profiler. Of every call the least
time counts over the rounds, so that other work on the machine shows little: the columns add up to a step that nothing
disturbed. "python" is what no operator accounts for. With OMP_WAIT_POLICY=PASSIVE threads sleep between operators, and
waking them for each one shows as operators that gain nothing.

`--clock processor` is for machines that other work keeps busy: processor time of one thread, of every call the median.
Operators are then those below autograd, each with all that it calls.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import thread_time_ns
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
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


def timed_step(ours: Ours, micros: list[RaggedBatch]) -> list[Call]:
    """As `profiled_step` in processor time of this thread; a step without clocks in it gives the time outside."""
    started = thread_time_ns()
    take_step(ours, micros)
    whole = (thread_time_ns() - started) / 1e6
    with Clocks() as clocks:
        take_step(ours, micros)
    return [*clocks.calls, Call(PYTHON, whole - sum(call.milliseconds for call in clocks.calls))]


class Clocks(TorchDispatchMode):
    """Takes the processor time of every call below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        started = thread_time_ns()
        result = func(*args, **(kwargs or {}))
        self.calls.append(Call(func.name().split(".")[0], (thread_time_ns() - started) / 1e6))
        return result


def times_by_operator(rounds: Sequence[Sequence[Call]], of: Callable[[list[float]], float]) -> dict[str, float]:
    """Milliseconds by operator: the sum of its first call, its second and so on, each `of` its times in the rounds.

    Rounds differ in their calls where only some clip or leave targets out, and calls that start together change places.
    A call counts if half of the rounds have it.
    """
    times: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for calls in rounds:
        places: Counter[str] = Counter()
        for call in calls:
            times[call.name, places[call.name]].append(call.milliseconds)
            places[call.name] += 1
    total: defaultdict[str, float] = defaultdict(float)
    for (name, _), taken in times.items():
        if 2 * len(taken) >= len(rounds):
            total[name] += of(taken)
    return dict(total)


def table(times: dict[int, dict[str, float]]) -> list[str]:
    """Rows of Markdown, one for each operator; times are milliseconds by operator, by number of threads."""
    few, many = min(times), max(times)
    products = {n: sum(times[n].get(name, 0.0) for name in PRODUCTS) for n in times}
    lines = ["| operator | " + " | ".join(f"threads: {n}, ms | of products" for n in times) + " | ratio |"]
    lines.append("|---" * (2 * len(times) + 2) + "|")
    named = {"a step": {n: sum(times[n].values()) for n in times}, "products": products}
    rest = sorted(set(times[many]) - set(PRODUCTS), key=lambda name: -times[many][name])
    named |= {name: {n: times[n].get(name, 0.0) for n in times} for name in rest}
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
    step, of = CLOCKS[options.clock]
    rounds: dict[int, list[list[Call]]] = {threads: [] for threads in options.threads}
    for _ in range(options.rounds):
        for threads, calls in rounds.items():
            torch.set_num_threads(threads)
            take_step(ours, micros)
            calls.append(step(ours, micros))
    times = {n: times_by_operator(calls, of) for n, calls in rounds.items()}
    return [f"## {name}, {ours.precision}", "", *table(times), ""]


# Takes a step apart, and the time of a call that counts: other work makes wall time longer only, so the least of it.
CLOCKS: dict[str, tuple[Callable[[Ours, list[RaggedBatch]], list[Call]], Callable[[list[float]], float]]] = {
    "wall": (profiled_step, min),
    "processor": (timed_step, median),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--threads", type=int, nargs="+", help="default: 1, with wall time also all")
    parser.add_argument("--clock", default="wall", choices=list(CLOCKS))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--precision", default="auto", choices=["auto", "fp32", "bf16"])
    parser.add_argument("--data", type=Path, default=HERE / "../../shared/data", help="folder with zh/, for corpora")
    options = parser.parse_args()
    is_wall = options.clock == "wall"
    options.threads = options.threads or ([1, torch.get_num_threads()] if is_wall else [1])
    if not is_wall and options.threads != [1]:
        parser.error("processor time is of one thread: leave out --threads, or use --clock wall")
    keep_freed_memory()
    machine = describe_machine()
    policy = os.environ.get("OMP_WAIT_POLICY", "as by default")
    print(
        f"{machine['cores']} cores of {machine['processor']}, load {machine['load']:.1f} before; {library.describe()}; "
        f"threads wait {policy}; torch {machine['torch']}; {options.clock} time.\n"
    )
    for name in options.names:
        print("\n".join(measure(name, options)), flush=True)


if __name__ == "__main__":
    main()
