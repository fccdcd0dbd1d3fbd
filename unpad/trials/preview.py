"""`unpad plan`: cost of every batching strategy on the user's own data and machine, before anything trains."""

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import reduce
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from unpad import storage
from unpad.batching.batch import RaggedBatch
from unpad.batching.ledger import Ledger
from unpad.batching.loader import load_steps
from unpad.batching.plan import Plan, plan
from unpad.data.family import family_of
from unpad.errors import OutOfMemoryError, RecipeError
from unpad.interchange.origin import open_recipe
from unpad.machine import Load, LoadMeter, cores
from unpad.models.cost import cells_per_token
from unpad.recipes.training import PlanSettings
from unpad.terminal.printing import print_styled
from unpad.terminal.progress import counted, progress
from unpad.terminal.table import cells, columns, text_table, wrapped
from unpad.training.auto_size import SHARE, StageMemory, free_memory, largest_update
from unpad.training.rehearsal import Rehearsal, StepCost
from unpad.training.setup import Setup, check_patience, describe, prepare_setup
from unpad.training.stage import StageSetup, epoch_plan, num_epochs, plan_inputs, stage_epochs
from unpad.training.updates import takes_groups
from unpad.trials.strategy_table import (
    ProcessTable,
    StrategyRow,
    Units,
    compare,
    histogram_lines,
    plot,
    process_table,
    to_json,
)

# --------------------------------------------------------------------------- speed and memory, measured


ROUNDS, SECONDS = 3, 1.5  # turns of each strategy, and the timed part of a turn
WARM_STEPS = 2  # untimed, of each strategy before the first round
COMING_BACK = 0.3  # untimed work at the beginning of a turn, as a share of its seconds: other sides filled the caches
BATCH_SIZES = (1, 2, 4, 8, 16)
PADDED = ("fixed", "dynamic", "bucket")


@dataclass(frozen=True)
class PaddedBatch:
    """Padded batches of one size, one update each: the largest pass in tokens, and its predicted peak beside the
    weights in bytes."""

    size: int
    largest_pass: int
    peak_bytes: int


@dataclass(frozen=True)
class MeasuredStage:
    """Rates of a stage's strategies, and the memory of padded batches.

    Args:
        rates: by strategy, real tokens per second, one per round; ratios are taken within a round.
        unit: name of the tokens.
    """

    rates: dict[str, list[float]]
    batches: list[PaddedBatch]
    unit: str

    def times(self, name: str, other: str) -> float:
        """Speed of one strategy relative to another, the median over the rounds."""
        pairs = zip(self.rates[name], self.rates[other], strict=True)
        return float(np.median([mine / theirs for mine, theirs in pairs]))

    def lines(self) -> list[str]:
        """Both tables as text."""
        first = next(iter(self.rates))
        rows = []
        for name, rates in self.rates.items():
            low, middle, high = np.percentile(rates, [25, 50, 75])
            span = f"{low:,.0f} to {high:,.0f}"
            rows.append([name, f"{middle:,.0f}", span, f"{self.times(name, first):.1f}x"])
        head = ["strategy", f"{self.unit}/s", "quartiles", f"of {first}"]
        sizes = [[str(b.size), f"{b.largest_pass:,}", f"{b.peak_bytes / 2**20:,.0f} MiB"] for b in self.batches]
        about = f"{ROUNDS} rounds of {SECONDS:g} s by turns, in real {self.unit}, never padding"
        return [
            *text_table(head, rows),
            *wrapped(about),
            "",
            *text_table(["padded batch", "largest pass", "memory"], sizes),
            *wrapped("memory: predicted peak beside the weights, as for plan.tokens_per_micro=auto"),
        ]

    def to_json(self) -> dict[str, Any]:
        """Rates of every round by strategy, and the batches."""
        batches = [vars(batch) for batch in self.batches]
        return {"rounds": ROUNDS, "seconds": SECONDS, "tokens_per_second": self.rates, "padded_batches": batches}


def measure(setup: Setup, stage: StageSetup, strategies: Iterable[str], unit: str) -> MeasuredStage:
    """Time strategies of a stage by turns on one copy of the model, at rate 0, so that all do the same work.

    Whole steps are timed: loading, forward, backward, clipping and the update. Strategies take turns in one process,
    round after round, so that changes of the machine's speed affect all of them.

    Args:
        strategies: those that can plan the data and fit into memory, padded ones first.
        unit: name of the tokens.
    """
    memory = StageMemory.measured(stage, setup.model, setup.device, setup.precision)
    batches = []
    for size in BATCH_SIZES:
        first = epoch_plan(_with(stage, strategy="dynamic", batch_size=size, tokens_per_step=1), 0)
        batches.append(PaddedBatch(size, int(first.micro_cells.max(initial=0)), memory.needed(first)))
    rehearsal = Rehearsal(setup, stage)
    rehearsal.rate(0.0)
    planned = {name: _with(stage, strategy=name) for name in strategies}
    steps = {name: _updates(setup, of) for name, of in planned.items() if epoch_plan(of, 0).num_steps}
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for updates in steps.values():
        for _ in range(WARM_STEPS):
            rehearsal.step(next(updates))
    for number in counted(range(ROUNDS), "measuring speed", ROUNDS, "rounds"):
        for name in list(steps)[:: 1 if number % 2 == 0 else -1]:
            _rate(rehearsal, steps[name], SECONDS * COMING_BACK)
            rates[name].append(_rate(rehearsal, steps[name], SECONDS))
    return MeasuredStage(rates, batches, unit)


def _with(stage: StageSetup, **fields: Any) -> StageSetup:
    """The stage with other fields of its plan."""
    settings = stage.recipe.plan.model_copy(update={"grow": {}, **fields})
    return replace(stage, recipe=stage.recipe.model_copy(update={"plan": settings}))


def _updates(setup: Setup, stage: StageSetup) -> Iterator[list[RaggedBatch]]:
    """Micro-batches of one update after the other, epoch after epoch."""
    grouped = takes_groups(setup)
    for epoch in count():
        yield from load_steps(setup.data.load, epoch_plan(stage, epoch), setup.device, group_lengths=grouped)


def _rate(rehearsal: Rehearsal, updates: Iterator[list[RaggedBatch]], seconds: float) -> float:
    """Real tokens per second of steps that begin within a time; one step at least."""
    tokens, began = 0, time.perf_counter()
    while not tokens or time.perf_counter() - began < seconds:
        micros = next(updates)
        rehearsal.step(micros)
        tokens += sum(int(batch.layout.lengths().sum()) for batch in micros)
    return tokens / (time.perf_counter() - began)


# --------------------------------------------------------------------------- a stage


@dataclass(frozen=True)
class StagePreview:
    """Table of one stage: a row and a trial per strategy, and the epochs of the recipe.

    Args:
        trials: by strategy, without refused ones, those that did not fit into memory, and those that were not tried.
        units: names of sequences and their tokens.
        windows: plans of an epoch, of which this shows the first.
        attends: whether attention runs over tokens, so that its cells can be counted; otherwise sequences are never
            cut, and each has one target.
        shared: the stage on several processes, if requested; measured: rates and memory, if requested.
    """

    name: str
    lengths: np.ndarray
    rows: list[StrategyRow]
    trials: dict[str, StepCost]
    epochs: int
    settings: PlanSettings
    units: Units
    attends: bool
    windows: int = 1
    shared: ProcessTable | None = None
    measured: MeasuredStage | None = None

    def estimated_seconds(self, row: StrategyRow) -> float:
        """Time of the stage's epochs: computed tokens at the trial's rate."""
        trial = self.trials[row.name]
        return trial.seconds / max(trial.tokens, 1) * row.padded_tokens * self.windows * self.epochs


def planned(stage: StageSetup) -> StagePreview:
    """Plan every strategy for a stage, without trials."""
    recipe = stage.recipe
    lengths, settings, known = plan_inputs(stage, 0)
    rows = compare(lengths, settings, **known)
    epochs = recipe.train.max_epochs if recipe.train.max_epochs is not None else 1
    if recipe.train.min_steps is not None:
        epochs = num_epochs(stage, stage_epochs(stage)) or epochs
    sequences, tokens = family_of(recipe).UNITS
    units, attends = Units(stage.data.unit or sequences, tokens), stage.data.table.attended is None
    lengths = lengths[known["seq_ids"]]
    return StagePreview(stage.name, lengths, rows, {}, epochs, settings, units, attends, stage.windows)


# --------------------------------------------------------------------------- the screen


def _show(console: Console, lines: Iterable[str], style: str | None = None) -> None:
    for line in lines:
        print_styled(console, line, style=style)


def padding_lines(stage: StagePreview) -> list[str]:
    """Lengths and the table of padding of a stage."""
    units, num_tokens = stage.units, int(stage.lengths.sum())
    head = f"{stage.name}: {len(stage.lengths):,} {units.sequences}, {num_tokens:,} {units.tokens}"
    if stage.windows > 1:
        head += f", the first of {stage.windows:,} windows of an epoch"
    return ["", head, *("  " + line for line in histogram_lines(stage.lengths)), *_table(stage)]


def _table(stage: StagePreview) -> list[str]:
    columns = ("trained", "context", "cut", "dropped", "attention") if stage.attends else (*stage.units, "dropped")
    return text_table(("strategy", "padding", "steps", *columns), [_cells(stage, row) for row in stage.rows], gap=1)


def _cells(stage: StagePreview, row: StrategyRow) -> list[str]:
    if row.refused:
        return [row.name, "refused"]
    ledger, ratio = row.ledger, []
    if stage.attends:
        counts = [ledger.tokens(column) for column in ("trained", "context", "truncated", "dropped")]
        ratio = [f"x{row.attention_ratio:.2f}"]
    else:
        counts = [*trained_whole(ledger), sum(ledger.sequences[reason] for reason in ledger.dropped)]
    counted = [_short(count) for count in counts]
    return [_named(stage, row), f"{row.pad_share:.1%}", f"{row.steps:,}", *counted, *ratio]


def _named(stage: StagePreview, row: StrategyRow) -> str:
    return row.name + (" *" if row.name == stage.settings.strategy else "")


def trial_line(stage: StagePreview, row: StrategyRow) -> str:
    if row.name not in stage.trials:
        return f"{_named(stage, row):<10}  does not fit into memory"
    memory, duration = stage.trials[row.name].peak_bytes / 2**30, _duration(stage.estimated_seconds(row))
    return f"{_named(stage, row):<10}{memory:>6.1f} GiB{duration:>10}"


def trained_whole(ledger: Ledger) -> tuple[int, int]:
    """Sequences that are trained on and their tokens: with one target each, all their other tokens are context."""
    return ledger.sequences.get("whole", 0), ledger.tokens("trained") + ledger.tokens("context")


def _short(count: int) -> str:
    """A count in at most six characters; the ledger below the table is exact."""
    if count < 10_000:
        return f"{count:,}"
    return f"{count / 1e3:.1f}k" if count < 1e6 else f"{count / 1e6:.1f}M"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


@dataclass(frozen=True)
class Preview:
    """Preview of a run."""

    setup: Setup
    stages: list[StagePreview]

    @property
    def together(self) -> tuple[list[StrategyRow], np.ndarray]:
        """A row per strategy over all stages, and the lengths of all their sequences."""
        rows = [
            reduce(StrategyRow.__add__, of_stages) for of_stages in zip(*(s.rows for s in self.stages), strict=True)
        ]
        return rows, np.concatenate([stage.lengths for stage in self.stages])

    def to_json(self) -> dict[str, Any]:
        """`strategies` and `ledger` cover all stages together; `stages` holds each on its own, with null for memory and
        time of strategies that do not fit or were not tried; `auto` is the size that `plan.tokens_per_micro=auto` gives
        here, if the recipe uses it."""
        recipe = self.setup.recipe
        stages = []
        for stage in self.stages:
            part = to_json(stage.rows, stage.lengths, stage.settings, stage.units)
            for row, values in zip(stage.rows, part["strategies"], strict=True):
                if not row.refused:
                    trial = stage.trials.get(row.name)
                    values["peak_bytes"] = trial.peak_bytes if trial is not None else None
                    values["seconds"] = stage.estimated_seconds(row) if trial is not None else None
            if stage.shared is not None:
                part["processes"] = stage.shared.to_json()
            if stage.measured is not None:
                part["measured"] = stage.measured.to_json()
            stages.append({"name": stage.name, "epochs": stage.epochs, **part})
        whole = to_json(*self.together, recipe.plan, self.stages[0].units)
        positions = self.setup.data.table.positions
        corpus = {"tokens": int(positions.sum()), "documents": len(positions), **self.setup.data.facts()}
        auto = {} if self.setup.auto is None else {"auto": asdict(self.setup.auto)}
        return {**whole, "corpus": corpus, "stages": stages, **auto}


def preview(
    recipe: str,
    overrides: Sequence[str],
    picture: Path | None = None,
    console: Console | None = None,
    processes: Sequence[int] = (),
    measures: bool = False,
) -> Preview:
    """Plan every strategy for every stage of a recipe, and try one micro-batch of each.

    Args:
        picture: path for an SVG of lengths, padding and attention cells.
        console: shows each stage's table of padding as soon as it is planned, each trial as it is done, and last how
            much of the held-out data occurs in training.
        processes: numbers of processes to share each stage among.
        measures: whether to time every strategy.

    Raises:
        RecipeError: the picture has another suffix, or no stage has data, or none to stop early by.
    """
    if picture is not None and picture.suffix.lower() != ".svg":
        fix = "let the name end in .svg; browsers open it"
        raise RecipeError("the picture of a plan is an SVG", where=str(picture), fix=fix)
    console = console or Console(quiet=True)
    loaded = open_recipe(recipe, overrides)
    with progress("reading the data"):
        setup = prepare_setup(loaded, Path(), None, compare=False)
    check_patience(setup)
    _show(console, [*describe(setup), *([setup.auto.line] if setup.auto else [])])
    stages = [_tried(setup, stage, console, processes, measures) for stage in setup.stages if stage.train_ids.size]
    if not stages:
        fix = "set " + " or ".join(f"data.{kind}" for kind in setup.data.kinds) + " as they use"
        raise RecipeError("no stage has data to train on", where="stages", fix=fix)
    result = Preview(setup, stages)
    if picture is not None:
        storage.write_atomic(picture, plot(*result.together, stages[0].attends, stages[0].units))
    _show(console, setup.data.compare())
    return result


TRIALS_SECONDS = 10.0  # of processor time, in which other strategies than the recipe's begin to be tried


def _tried(setup: Setup, stage: StageSetup, console: Console, processes: Sequence[int], measures: bool) -> StagePreview:
    """Plan every strategy for a stage, try a step of each, share its updates among processes, and time it."""
    lengths, settings, known = plan_inputs(stage, 0)
    with progress(f"planning {stage.name}"):
        seen = planned(stage)
    _show(console, [*padding_lines(seen), ""])
    _show(console, [f"{'strategy':<10}{'memory':>10}{f'{seen.epochs} ep.':>10}"], style="bold")
    usable = sorted(  # by what anyone would choose first
        (row for row in seen.rows if not row.refused),
        key=lambda row: (row.name != settings.strategy, row.padded_tokens),
    )
    meter = LoadMeter()
    ends, left = time.thread_time() + TRIALS_SECONDS, list[str]()
    for row in usable:
        if row.name != settings.strategy and not measures and time.thread_time() > ends:
            left.append(row.name)
            continue
        chosen = settings.model_copy(update={"strategy": row.name})
        # Another strategy than the recipe's need not fit into memory.
        with progress(f"trying a step of {row.name}"), suppress(*[OutOfMemoryError][row.name == settings.strategy :]):
            seen.trials[row.name] = _try(setup, stage, plan(lengths, chosen, epoch=0, **known))
        if row.name not in seen.trials:
            gc.collect()
        _show(console, [trial_line(seen, row)])
    if left:
        _show(
            console, wrapped(f"not tried, as that took {TRIALS_SECONDS:.0f} s: {', '.join(left)}; --measure tries all")
        )
    _show(console, [*_notes(seen, setup, meter.read()), *_memory_lines(setup, stage, seen)])
    if processes:
        with progress(f"sharing {stage.name} out"):
            names = [row.name for row in seen.rows if not row.refused]
            seen = replace(seen, shared=process_table(stage, processes, cells_per_token(setup.model), names))
    if measures:
        by_padding = sorted(seen.trials, key=lambda name: (name not in PADDED, name))
        seen = replace(seen, measured=measure(setup, stage, by_padding, seen.units.tokens))
    _show(console, [] if seen.shared is None else ["", *seen.shared.lines(seen.units)])
    _show(console, [] if seen.measured is None else ["", *seen.measured.lines()])
    return seen


def _try(setup: Setup, stage: StageSetup, strategy_plan: Plan) -> StepCost:
    """Measure the peak memory of the plan's largest micro-batch and the time of its first step, on a copied model."""
    return Rehearsal(setup, stage).cost(strategy_plan)


def measured_lines(load: Load | None) -> list[str]:
    """How memory and time were measured; with the load of other programs where it makes the time too long.

    Args:
        load: meanwhile; None if it is not known.
    """
    line = "memory and time: measured on one micro-batch and one step of each"
    if load is not None and load.others > cores() / 2:
        line += f", while other programs kept {load.others:.1f} of {cores()} cores busy"
    return wrapped(f"{line}.")


def _notes(stage: StagePreview, setup: Setup, load: Load | None) -> list[str]:
    chosen = next(row for row in stage.rows if row.name == stage.settings.strategy)
    advice = to_json(stage.rows, stage.lengths, stage.settings, stage.units)["advice"]
    size, width = advice["batch_size"], advice["bucket_width"]
    shares = ", ".join(f"{w}: {share:.1%}" for w, share in width["pad_shares"].items())
    if stage.attends:
        legend = "* the recipe's. attention: query-key pairs computed over those needed."
        fates = _token_lines(chosen.ledger, setup, stage.units)
    else:
        legend, fates = "* the recipe's.", _sequence_lines(chosen.ledger, setup, stage.units)
    return [
        legend,
        *measured_lines(load),
        *fates,
        f"batch size for padded strategies: {size['value']} ({size['why']})"
        + ("" if size["helps"] else "; batching will not help here"),
        f"bucket width: {width['value']} ({width['why']}; padding by width {shares})",
    ]


def _token_lines(ledger: Ledger, setup: Setup, units: Units) -> list[str]:
    lines = []
    for column, reason, tokens, share, sequences, first in ledger.rows():
        where = ", ".join(setup.data.where(i) for i in first[:3]) if column in ("truncated", "dropped") else ""
        counts = f"{tokens:>12,} {units.tokens} {share:6.1%} of {sequences:,} {units.sequences}"
        lines += _with_places(f"  {column:<10}{reason:<15}{counts}", where)
    return lines


def _with_places(line: str, where: str) -> list[str]:
    """A line of the ledger with the places of its first sequences, on lines below if they do not fit."""
    whole = f"{line}  {where}".rstrip()
    return [whole] if cells(whole) <= columns() else [line, *wrapped(where, indent=4)]


def _sequence_lines(ledger: Ledger, setup: Setup, units: Units) -> list[str]:
    """Sequences by fate, each with all its tokens."""
    sequences, tokens = units
    num, inside = trained_whole(ledger)
    lines = [f"  {'trained':<10}{'whole':<15}{num:>12,} {sequences} with {inside:,} {tokens}"] if num else []
    for column, reason, inside, _, num, first in ledger.rows():
        if column == "dropped":
            where = ", ".join(setup.data.where(i) for i in first[:3])
            lines += _with_places(f"  {column:<10}{reason:<15}{num:>12,} {sequences} with {inside:,} {tokens}", where)
    return lines


def _memory_lines(setup: Setup, stage: StageSetup, seen: StagePreview) -> list[str]:
    """The largest micro-batch that fits into memory, and the peak of the recipe's plan, predicted and measured."""
    first_epoch, trial = epoch_plan(stage, 0), seen.trials[seen.settings.strategy]
    if not first_epoch.num_steps:
        return []
    memory = StageMemory.measured(stage, setup.model, setup.device, setup.precision)
    free = free_memory(setup.device)
    largest = memory.largest(int(SHARE * free))
    most = f"{largest:,}" if largest else f"a whole update, {largest_update(stage):,}"
    return wrapped(
        f"plan.tokens_per_micro can be up to about {most} {seen.units.tokens} in {SHARE:.0%} of {free / 2**30:.1f} GiB "
        f"of free memory; this plan beside the weights: predicted peak {memory.needed(first_epoch) / 2**30:.2f} GiB, "
        f"measured {(trial.peak_bytes - trial.base_bytes) / 2**30:.2f} GiB"
    )
