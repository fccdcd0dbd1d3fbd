"""`unpad bench`: speed, padding and memory of every way to batch, on the user's own data, model and machine.

What is timed is training as it runs: the loader's work, forward, backward, clipping and update. All ways take turns in
one process, round after round, each for the same time and from a copy of the same model, so that a machine that slows
down or speeds up does so for all of them.
"""

from __future__ import annotations

import copy
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unpad.batch import RaggedBatch
from unpad.errors import PlanError, RecipeError
from unpad.loader import load_micro, load_steps
from unpad.memory import peak_memory, process_memory, restart_peak, return_freed_memory
from unpad.monitor import Timers
from unpad.optim import freeze, make_optimizer
from unpad.plan.plan import Plan
from unpad.recipe import Stage, load_recipe
from unpad.setup import Setup, epoch_plan, prepare_setup, stage_sequences
from unpad.step import WEIGHTS, LossScaler, train_step
from unpad.tokens.corpus import KINDS

BATCH_SIZES = (1, 2, 4, 8, 16)
WARM_UPDATES = 2  # before the clock of every turn: new optimizer state, first products of a shape
MIB = 2**20


@dataclass(frozen=True)
class Spread:
    """Median and quartiles over the rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One way to batch.

    Args:
        plan: the plan settings that make it.
        tokens_per_update, tokens_per_pass: real tokens of an update and of a forward pass, means over an epoch.
        pad_share: share of the computed tokens that is padding, over an epoch.
        rates: real tokens per second, one per round.
        updates: timed updates, all rounds together.
        peak_bytes: memory at the peak of an update with the epoch's largest micro-batch: of the process, or allocated
            on the GPU.
        base_bytes: the same before model, gradients and optimizer state were made.
    """

    name: str
    plan: dict[str, Any]
    tokens_per_update: float
    tokens_per_pass: float
    pad_share: float
    rates: list[float]
    updates: int
    peak_bytes: int
    base_bytes: int

    @property
    def memory_bytes(self) -> int:
        """What training adds: model, gradients, optimizer state and the activations of the largest micro-batch."""
        return self.peak_bytes - self.base_bytes

    def rate(self) -> Spread:
        """Real tokens per second."""
        return spread(self.rates)

    def times(self, other: Row) -> Spread:
        """How many times as fast as another row, round by round."""
        return spread([mine / theirs for mine, theirs in zip(self.rates, other.rates, strict=True)])


@dataclass(frozen=True)
class Bench:
    """Both tables, and what they were measured on; the first row of each is what the others are compared with."""

    recipe: str
    overrides: list[str]
    data: dict[str, Any]
    machine: dict[str, Any]
    rounds: int
    seconds: float
    strategies: list[Row]
    batch_sizes: list[Row]

    def lines(self) -> list[str]:
        """Both tables as plain text."""
        data, machine = self.data, self.machine
        return [
            f"{machine['processor']}, {machine['cores']} cores, load {machine['load']:.1f} before; "
            f"torch {machine['torch']}, {machine['precision']}, {machine['device']}, threads: {machine['threads']}",
            f"{self.recipe}: {data['parameters']:,} parameters; {data['sequences']:,} training sequences of "
            f"{data['mean_tokens']:.1f} tokens, the longest {data['longest']}",
            f"{self.rounds} rounds of {self.seconds:g} s: median and quartiles. Tokens are real ones, never padding;",
            "memory: of a model copy, gradients, optimizer state and the activations of the largest micro-batch",
            "",
            *_table("strategy", self.strategies),
            "",
            *_table("padded batches, an update each", self.batch_sizes),
        ]

    def to_json(self) -> dict[str, Any]:
        tables = {"strategies": self.strategies, "batch_sizes": self.batch_sizes}
        return {**asdict(self), **{name: [_values(row, rows[0]) for row in rows] for name, rows in tables.items()}}


def bench(name: str, overrides: Sequence[str] = (), *, rounds: int = 3, seconds: float = 1.5) -> Bench:
    """Measure the strategies at equal tokens per update, and padded batches of several sizes with one update each.

    Args:
        name: packaged recipe or YAML file. All data of its stages is used together, with its own plan settings.
        rounds: how often every row has its turn.
        seconds: timed part of a turn; an update that has begun is finished.

    Raises:
        RecipeError, SourceError: as `train`.
        PlanError: the plan of a row has no update.
    """
    load = os.getloadavg()[0]  # before the first product: a busy machine is part of the result
    recipe = load_recipe(name, list(overrides))
    setup = prepare_setup(recipe, Path(), None, Timers())
    freeze(setup.model, recipe.train.freeze)
    setup.model.label_smoothing = recipe.train.label_smoothing
    if not stage_sequences(setup, _all_data(setup), 0).size:
        raise RecipeError("no stage has data to train on", where="stages", fix="set data.text or data.chat as they use")
    strategies, sizes = _strategies(setup), _batch_sizes(setup)
    variants = strategies + sizes
    updates = [_updates(variant.setup, variant.stage) for variant in variants]
    turns: list[list[tuple[int, int, float]]] = [[] for _ in variants]
    for number in range(rounds):
        order = range(len(variants)) if number % 2 == 0 else reversed(range(len(variants)))
        for i in order:
            turns[i].append(_turn(variants[i].setup, updates[i], seconds))
    memory = [_memory(variant) for variant in variants]  # last: what libraries keep for every shape is there by now
    rows = [_row(*measured) for measured in zip(variants, turns, memory, strict=True)]
    return Bench(
        name, list(overrides), _describe_data(setup), _machine(setup, load), rounds, seconds,
        rows[: len(strategies)], rows[len(strategies) :],
    )  # fmt: skip


# --------------------------------------------------------------------------- what is compared


@dataclass(frozen=True)
class _Variant:
    """One way to batch, as a recipe that differs from the user's in its plan alone, and its first epoch."""

    name: str
    setup: Setup
    stage: Stage
    plan: Plan


def _strategies(setup: Setup) -> list[_Variant]:
    """One sequence per forward pass, then as many as each strategy takes; no sequence alone is ever padded."""
    size = setup.recipe.plan.batch_size
    alone: dict[str, Any] = {"strategy": "pack", "tokens_per_micro": 1}  # a micro-batch holds one sequence at least
    return [
        _variant(setup, "one at a time", **alone, tokens_per_step=1),
        _variant(setup, "one at a time, accumulated", **alone),
        _variant(setup, f"dynamic padding, batches of {size}", strategy="dynamic"),
        _variant(setup, f"buckets, batches of {size}", strategy="bucket"),
        _variant(setup, "packed, no padding", strategy="pack"),
    ]


def _batch_sizes(setup: Setup) -> list[_Variant]:
    fields: dict[str, Any] = {"strategy": "dynamic", "tokens_per_step": 1}
    return [_variant(setup, f"batch size {size}", **fields, batch_size=size) for size in BATCH_SIZES]


def _variant(setup: Setup, name: str, **fields: Any) -> _Variant:
    recipe = setup.recipe.model_copy(update={"plan": setup.recipe.plan.model_copy(update=fields)})
    stage = _all_data(setup)
    changed = replace(setup, recipe=recipe)
    made = epoch_plan(changed, stage, 0)
    if made.num_steps == 0:
        fix = "lower plan.tokens_per_step, or set plan.drop_last=false and plan.overflow=split"
        raise PlanError(f"{name}: the plan drops every token", where="plan", fix=fix)
    return _Variant(name, changed, stage, made)


def _all_data(setup: Setup) -> Stage:
    used = {kind for stage in setup.stages for kind in stage.use}
    return Stage(name="bench", use=[kind for kind in KINDS if kind in used])


# --------------------------------------------------------------------------- measuring


def _updates(setup: Setup, stage: Stage) -> Iterator[list[RaggedBatch]]:
    """The micro-batches of one update after the other, epoch after epoch."""
    for epoch in count():
        yield from load_steps(setup.tokens, epoch_plan(setup, stage, epoch), setup.tokenizer.pad_id, setup.device)


class _Trainer:
    """A copy of the run's model with a new optimizer."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model = copy.deepcopy(setup.model).train()
        self.optimizer = make_optimizer(self.model, setup.recipe.optim)
        self.scaler = LossScaler() if setup.precision == "fp16" else None

    def update(self, micros: list[RaggedBatch]) -> None:
        """One update. It reads results back from the device, so that its time is the time it took."""
        train_step(
            self.model, micros, self.optimizer, weights=WEIGHTS, precision=self.setup.precision,
            clip=self.setup.recipe.optim.clip, scaler=self.scaler,
        )  # fmt: skip


def _turn(setup: Setup, updates: Iterator[list[RaggedBatch]], seconds: float) -> tuple[int, int, float]:
    """Train a fresh copy for a while, waiting for the loader included: (updates, real tokens, seconds)."""
    trainer = _Trainer(setup)
    began = time.perf_counter()
    for warm in range(WARM_UPDATES):
        if warm == 0 or time.perf_counter() - began < seconds / 2:
            trainer.update(next(updates))
    tokens, done = 0, 0
    began = time.perf_counter()
    while done == 0 or time.perf_counter() - began < seconds:
        micros = next(updates)
        trainer.update(micros)
        tokens += sum(int(batch.layout.lengths().sum()) for batch in micros)
        done += 1
    return done, tokens, time.perf_counter() - began


def _memory(variant: _Variant) -> tuple[int, int]:
    """Bytes at the peak of an update with the largest micro-batch of the first epoch, and bytes before it."""
    setup, made = variant.setup, variant.plan
    index = int(np.argmax(made.micro_cells))
    step = int(np.searchsorted(made.step_offsets, index, side="right")) - 1
    micro = made.step(step)[index - int(made.step_offsets[step])]
    on_gpu = setup.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(setup.device)
    return_freed_memory()
    base = torch.cuda.memory_allocated(setup.device) if on_gpu else process_memory()
    restart_peak()
    _Trainer(setup).update([load_micro(setup.tokens, micro, setup.tokenizer.pad_id).to(setup.device)])
    return torch.cuda.max_memory_allocated(setup.device) if on_gpu else max(peak_memory(), base), base


def _row(variant: _Variant, turns: list[tuple[int, int, float]], memory: tuple[int, int]) -> Row:
    made, settings = variant.plan, variant.setup.recipe.plan
    fields = ("strategy", "tokens_per_step", "tokens_per_micro", "batch_size", "bucket_width")
    return Row(
        variant.name,
        plan={field: getattr(settings, field) for field in fields},
        tokens_per_update=made.real_tokens / made.num_steps,
        tokens_per_pass=made.real_tokens / made.num_micros,
        pad_share=made.pad_share,
        rates=[tokens / seconds for _, tokens, seconds in turns],
        updates=sum(done for done, _, _ in turns),
        peak_bytes=memory[0],
        base_bytes=memory[1],
    )


def spread(values: Sequence[float]) -> Spread:
    low, median, high = np.percentile(values, [25, 50, 75])
    return Spread(float(median), float(low), float(high))


# --------------------------------------------------------------------------- what it was measured on


def _describe_data(setup: Setup) -> dict[str, Any]:
    ids = stage_sequences(setup, _all_data(setup), 0)
    lengths = setup.tokens.lengths[ids] - 1
    return {
        "sequences": int(ids.size), "tokens": int(lengths.sum()), "mean_tokens": float(lengths.mean()),
        "longest": int(lengths.max()), "parameters": sum(p.numel() for p in setup.model.parameters()),
        "vocabulary": setup.tokenizer.vocab_size,
    }  # fmt: skip


def _machine(setup: Setup, load: float) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(setup.device) if setup.device.type == "cuda" else None
    described = {"processor": processor(), "cores": os.cpu_count(), "gpu": gpu, "load": load}
    return {**described, "system": platform.platform(), "python": platform.python_version(), **setup.environment}


def processor() -> str:
    """The processor's name; family and model tell apart what clouds give the same name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name") or platform.processor() or platform.machine()
    return f"{name} (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else name


# --------------------------------------------------------------------------- tables


def _values(row: Row, first: Row) -> dict[str, Any]:
    return {
        **asdict(row),
        "memory_bytes": row.memory_bytes,
        "tokens_per_second": asdict(row.rate()),
        "times_first": asdict(row.times(first)),
    }


def _table(title: str, rows: list[Row]) -> list[str]:
    width = max(len(title), *(len(row.name) for row in rows))
    columns = {
        "tokens/s": 10,
        "quartiles": 17,
        "times": 8,
        "padding": 9,
        "per pass": 10,
        "per update": 12,
        "memory": 10,
    }
    lines = [f"{title:<{width}}" + "".join(f"{name:>{size}}" for name, size in columns.items())]
    for row in rows:
        rate, times = row.rate(), row.times(rows[0])
        quartiles = f"{rate.low:,.0f} to {rate.high:,.0f}"
        lines.append(
            f"{row.name:<{width}}{rate.median:>10,.0f}{quartiles:>17}{times.median:>7.1f}x{row.pad_share:>9.1%}"
            f"{row.tokens_per_pass:>10,.0f}{row.tokens_per_update:>12,.0f}{row.memory_bytes / MIB:>6,.0f} MiB"
        )
    return lines
