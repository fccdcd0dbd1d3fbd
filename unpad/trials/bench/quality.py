"""Held-out loss after equal numbers of steps, by batch size."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from unpad.data.measuring import Measuring
from unpad.evaluation.family import held_out
from unpad.terminal.progress import counted
from unpad.terminal.table import number_of, text_table
from unpad.training.rehearsal import Rehearsal
from unpad.trials.bench.speed import MIB
from unpad.trials.bench.variants import BenchVariant, every_update

TRAINED_SIZES = (1, 4, 8)  # batch sizes of the table of equal steps


@dataclass(frozen=True)
class Trained:
    """Result of one batch size after a number of steps that is equal for all.

    Args:
        tokens: real tokens trained on.
        seconds: of all steps, the loader included.
        heldout_loss: nats per target after the last step; None without held-out data.
    """

    name: str
    updates: int
    tokens: int
    seconds: float
    heldout_loss: float | None
    memory_bytes: int


def train(variant: BenchVariant, updates: int, memory_bytes: int) -> Trained:
    """Train a copy with initial weights for some steps at the recipe's learning rate; evaluate its held-out loss."""
    setup, stage = variant.setup, variant.stage
    rehearsal = Rehearsal(setup, stage)
    tokens, began = 0, time.perf_counter()
    for micros in counted(islice(every_update(setup, stage), updates), "training", updates, "updates"):
        rehearsal.step(micros)
        tokens += sum(int(batch.layout.lengths().sum()) for batch in micros)
    seconds = time.perf_counter() - began
    loss = None
    if stage.held_out_ids.size:
        over = Measuring(rehearsal.model, setup.data, stage.held_out_ids, stage.recipe.plan, setup.device)
        loss = held_out(over).loss
    return Trained(variant.name, updates, tokens, seconds, loss, memory_bytes)


def trained_lines(trained: Sequence[Trained]) -> list[str]:
    """Rows as lines of text."""
    title = f"after {number_of(trained[0].updates, 'updates')}"
    rows = []
    for row in trained:
        loss = "-" if row.heldout_loss is None else f"{row.heldout_loss:.4f}"
        memory = f"{row.memory_bytes / MIB:,.0f} MiB"
        rows.append([row.name, loss, f"{row.tokens:,}", f"{row.seconds:.1f}", memory])
    return text_table([title, "held-out loss", "tokens", "seconds", "memory"], rows)
