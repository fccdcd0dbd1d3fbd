"""Patients per second of training: a batch at once, a padded batch, and a loop over patients and their sets.

    OMP_NUM_THREADS=1 python benchmarks/patients.py                about ten minutes on 2 quiet cores
    python benchmarks/patients.py --rounds 1 --patients 4 --sizes 1 4 --out /tmp/try.md

All sides train one model of the same weights with the same objective, optimizer and draws of dropout and latents:
forward, backward, update, at rate 0. Before anything is timed their losses and gradients are held against each other.
Loading and padding a batch are not timed. Sides and batch sizes take turns in one process, and a turn is the same
patients for all of them, new ones in every round, so that no side has seen its shapes before.
The recipe is benchmarks/clinical.yaml where its tables are, else the packaged `events` of simulated patients.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Contender, Rounds, Spread, Work, describe_machine, measure_rounds, spread
from padded_patients import Customary, Padded

from unpad.batching.batch import RaggedBatch
from unpad.batching.layout import build_layout
from unpad.batching.plan import Micro
from unpad.data.family import open_data
from unpad.data.sources.split import Split
from unpad.machine import peak_memory, process_memory, restart_peak
from unpad.models import build_model, model_config
from unpad.models.contract import Trainable
from unpad.models.objective import Objective
from unpad.models.set_sequence.event_sets import EventSets
from unpad.models.set_sequence.model import SetSequence
from unpad.nn.native import library
from unpad.nn.product_speed import choose_precision
from unpad.recipes.file import load_recipe
from unpad.recipes.recipe import Recipe
from unpad.storage import write_atomic
from unpad.training.memory import return_freed_memory
from unpad.training.optim import make_optimizer, set_rate
from unpad.training.step import accumulate, train_step

HERE = Path(__file__).parent
OURS, PADDED, LOOP = "unpad", "padded", "loop"
GATES = {1: 1.0, 4: 2.5, 8: 4.0, 16: 6.0}  # batch size -> times as fast as the loop, at least
LONG, LONG_BOUND = 20_000, 1300  # events of a patient; MiB that tests/models/set_sequence/test_long_histories.py allows
MIB = 1 << 20
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}  # of every loss, and of gradients beside their norm


@dataclass(frozen=True)
class Bench:
    """What all sides share.

    Args:
        weights: of the terms of the loss, after all ramps.
        patients: all that take part, one flat batch.
    """

    recipe: Recipe
    model: SetSequence
    weights: dict[str, float]
    optimizer: torch.optim.AdamW
    patients: RaggedBatch


def prepare(recipe: Recipe, num_patients: int) -> Bench:
    """A model with fresh weights and so many training patients in random order, from the beginning again if need be."""
    data: Any = open_data(recipe, None)
    torch.manual_seed(0)
    model = build_model(model_config(recipe.model), data.num_outputs)
    assert isinstance(model, SetSequence)
    optimizer = make_optimizer(model, recipe.optim)
    set_rate(optimizer, 0.0)
    order = np.random.default_rng(0).permutation(np.flatnonzero(data.table.split == Split.TRAIN))
    chosen = np.resize(order, num_patients)
    begins = np.zeros_like(chosen)
    patients = data.load(Micro(chosen, begins, data.table.positions[chosen], begins, pad_to=0, fill_to=0))
    return Bench(recipe, model, Objective.of(model, recipe.losses).final(model), optimizer, patients)


def long_patient(patients: RaggedBatch, num_events: int) -> RaggedBatch:
    """The sets of many patients as those of one of at least `num_events` events."""
    counts = patients.layout.lengths()
    index = np.resize(np.arange(len(counts)), -(-num_events // max(1, int(counts.float().mean()))) + 1)
    whole = patients.select(index.tolist())
    first = whole.select([0])
    sets = whole.require(EventSets)
    times, history = sets.times.sort().values, build_layout(np.array([sets.num_sets]))
    durations, cause = first.require(EventSets).durations, first.require(EventSets).cause
    sets = replace(sets, history=history, times=times, durations=durations, cause=cause)
    layout = build_layout(np.array([whole.total_tokens]))
    tokens = {name: getattr(whole, name) for name in ("input_ids", "labels", "loss_mask", "target_index")}
    return replace(first, layout=layout, position_ids=torch.arange(whole.total_tokens), parts=(sets,), **tokens)


# --------------------------------------------------------------------------- the sides

Ready = tuple[Trainable, list[RaggedBatch]]


def ready(way: str, model: SetSequence, batch: RaggedBatch) -> Ready:
    """One update of a side: what computes losses, and the micro-batches that gradients are accumulated over."""
    if way == OURS:
        return model, [batch]
    if way == PADDED:
        return Padded(model, batch), [batch]
    return Customary(model), [batch.select([seq]) for seq in range(batch.num_seqs)]


def update(bench: Bench, one: Ready, precision: str) -> None:
    train_step(
        one[0], one[1], bench.optimizer, weights=bench.weights, precision=precision, clip=bench.recipe.optim.clip
    )


def side(bench: Bench, way: str, size: int, batches: Sequence[RaggedBatch], precision: str, turns: int) -> Contender:
    """Train on one batch after the other; `turns` turns go through all of them."""
    updates: Iterator[Ready] = cycle([ready(way, bench.model, batch) for batch in batches])

    def step() -> Work:
        update(bench, next(updates), precision)
        return Work(size, 0)

    return Contender(step, cycle=len(batches) // turns)


def disagreement(model: SetSequence, weights: dict[str, float], batch: RaggedBatch, way: str) -> float:
    """Largest relative difference of a side from ours, in any term of the loss and any parameter's gradient.

    A gradient of zero, as of the queries of a single key, is held to a small share of the largest.
    """

    def outcome(name: str) -> dict[str, torch.Tensor]:
        model.zero_grad()
        sums, counts = accumulate(*ready(name, model, batch), weights, "fp32")
        found = {term: value / max(counts[term], 1) for term, value in sums.items()}
        named = model.named_parameters()  # a loop over no sets leaves parameters out, where ours have gradients of 0
        return found | {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named}

    ours, theirs = outcome(OURS), outcome(way)
    model.zero_grad()
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    least = 1e-5 * max(value.norm() for value in ours.values())
    return max(float((theirs[n] - ours[n]).norm() / ours[n].norm().clamp_min(least)) for n in ours)


def check(bench: Bench, batch: RaggedBatch) -> str:
    """Hold the sides against each other with nothing drawn; what was found, for the page."""
    found = []
    for dtype, tolerance in TOLERANCES.items():
        model = copy.deepcopy(bench.model).to(dtype).eval()
        worst = max(disagreement(model, bench.weights, batch, way) for way in (PADDED, LOOP))
        assert worst < tolerance, f"the sides differ by {worst:.1e} in {dtype}"
        found.append(f"{worst:.0e} in {'fp64' if dtype == torch.float64 else 'fp32'}")
    return " and ".join(found)


# --------------------------------------------------------------------------- measuring


def measure(bench: Bench, precision: str, options: argparse.Namespace) -> Rounds:
    """Rates in patients per second of all sides and sizes, named "side size"."""
    turns = options.rounds + 1  # the first one warms up
    sides: dict[str, Contender] = {}
    for size in options.sizes:
        batches = [
            bench.patients.select(range(first, first + size)) for first in range(0, turns * options.patients, size)
        ]
        sides |= {f"{way} {size}": side(bench, way, size, batches, precision, turns) for way in (OURS, PADDED, LOOP)}
    bench.model.train()
    return measure_rounds(sides, options.rounds, 0.0, warm_steps=1, report=_tell)


def _tell(line: str) -> None:
    print(line.replace("tokens/s", "patients/s"), file=sys.stderr)


def cost(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds that some work takes, and MiB that it adds to the process at its peak."""
    return_freed_memory()
    restart_peak()
    before, began = process_memory(), time.perf_counter()
    work()
    return time.perf_counter() - began, (peak_memory() - before) / MIB


def _times(one: Spread) -> str:
    return f"{one.median:.2f} ({one.low:.2f} to {one.high:.2f})"


def table(result: Rounds, sizes: Sequence[int]) -> list[str]:
    lines = [
        f"| batch | {OURS}, patients/s | quartiles | {PADDED} | {LOOP} | times as fast as {PADDED} "
        f"| times as fast as {LOOP} | wanted | {OURS} beside its own batch of {sizes[0]} |",
        "|---" * 9 + "|",
    ]
    for size in sizes:
        ours, padded, loop = (spread(result.rates(f"{way} {size}")) for way in (OURS, PADDED, LOOP))
        name = f"{OURS} {size}"
        gain = spread(result.ratios(name, f"{LOOP} {size}"))
        wanted = f"{GATES[size]:g}: {'reached' if gain.median >= GATES[size] else 'MISSED'}" if size in GATES else ""
        cells = [
            str(size),
            f"{ours.median:.1f}",
            f"{ours.low:.1f} to {ours.high:.1f}",
            f"{padded.median:.1f}",
            f"{loop.median:.1f}",
            _times(spread(result.ratios(name, f"{PADDED} {size}"))),
            _times(gain),
            wanted,
            f"{spread(result.ratios(name, f'{OURS} {sizes[0]}')).median:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def memory(bench: Bench, size: int, precision: str) -> str:
    """What one update of the largest batch takes on every side."""
    batch = bench.patients.select(range(size))
    found = []
    for way in (OURS, PADDED, LOOP):
        one = ready(way, bench.model, batch)
        found.append(f"{way} {cost(lambda one=one: update(bench, one, precision))[1]:,.0f} MiB")  # type: ignore[misc]
    return f"What an update of {size} patients adds to the process at its peak: {', '.join(found)}."


def describe(bench: Bench, words: str, agreed: str) -> list[str]:
    machine, events, lengths = describe_machine(), bench.patients.require(EventSets), bench.patients.layout.lengths()
    assert events is not None
    parameters = sum(p.numel() for p in bench.model.parameters())
    return [
        "# Patients per second of training",
        "",
        f"    python benchmarks/patients.py {words}".rstrip(),
        "",
        f"Machine: {machine['cores']} cores of {machine['processor']}, load {machine['load']:.1f} before; "
        f"{machine['threads']} threads; {library.describe()};",
        f"torch {machine['torch']}. {parameters:,} parameters. {bench.patients.num_seqs:,} patients of "
        f"{events.num_sets / len(lengths):.1f} sets and {lengths.float().mean():.1f} events, the longest of "
        f"{int(lengths.max())}.",
        "",
        f"`{OURS}` computes all events of a batch as one flat run. `{PADDED}` computes the same model on rectangles of",
        f"(batch, sets, members) with masks. `{LOOP}` computes one set at a time through encoder and decoder and one",
        "patient at a time through the history, without padding or masks, and adds gradients up over the batch.",
        f"Losses and gradients of the three differ by at most {agreed}, relative to their norm.",
        "Medians, and quartiles in brackets; ratios are of the rounds' own. Every round is new patients, the same for",
        "all sides. The tables are measured one after the other: rates compare within one, not between them.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=HERE / "../../shared/data/clinical", help="folder of the tables")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 8, 16, 64], help="patients of an update")
    parser.add_argument("--patients", type=int, default=64, help="patients of a turn, a multiple of all sizes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--long", type=int, default=LONG, help="events of the one patient of the last line")
    parser.add_argument("--out", type=Path, default=HERE / "patients.md")
    options = parser.parse_args()
    if any(options.patients % size for size in options.sizes):
        parser.error("--patients is no multiple of one of --sizes")
    if options.data.is_dir():
        recipe = load_recipe(str(HERE / "clinical.yaml"), [f"data.root={options.data.resolve()}"])
    else:
        recipe = load_recipe("events", [])
    bench = prepare(recipe, (options.rounds + 1) * options.patients)
    agreed = check(bench, bench.patients.select(range(max(options.sizes))))
    lines = describe(bench, " ".join(sys.argv[1:]), agreed)
    own, reason = choose_precision(recipe.precision, torch.device("cpu"))
    for precision in dict.fromkeys(["fp32", own]):
        lines += [f"## {precision}" + (f", what a run chooses here: {reason}" if precision == own else ""), ""]
        lines += table(measure(bench, precision, options), options.sizes)
        lines += [memory(bench, max(options.sizes), precision), ""]
    batch = long_patient(bench.patients, options.long)
    seconds, mib = cost(lambda: update(bench, (bench.model, [batch]), own))
    lines += [
        f"One update in {own} on a patient of {batch.total_tokens:,} events, nothing cut, takes {seconds:.1f} s and "
        f"{mib:,.0f} MiB;",
        f"of {LONG:,} events in sets of up to 1,000 the tests allow {LONG_BOUND:,} MiB.",
        "",
    ]
    write_atomic(options.out, "\n".join(lines))
    print("\n".join(lines), end="")


if __name__ == "__main__":
    main()
