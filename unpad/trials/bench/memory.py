"""Memory of batching variants, one process each, and the largest batch predicted to fit into a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from unpad.machine.memory import peak_memory, process_memory, restart_peak
from unpad.processes.children import run_all
from unpad.terminal.progress import counted, held
from unpad.terminal.table import text_table, wrapped
from unpad.training.auto_size import StageMemory
from unpad.training.footprint import process_bytes, state_bytes
from unpad.training.memory import return_freed_memory
from unpad.training.rehearsal import Rehearsal
from unpad.trials.bench.speed import MIB, SpeedRow
from unpad.trials.bench.variants import BenchVariant, prepare, size_variants, strategy_variants

CARDS = (8, 16, 32)  # GiB
GIB = 2**30


def peaks(recipe: str, overrides: Sequence[str], variants: Sequence[BenchVariant]) -> list[tuple[int, int]]:
    """Bytes at the peak of every variant's largest step, and before it: `Row.peak_bytes` and `base_bytes`.

    Each variant runs in its own process; on a GPU in this one, because the allocator counts exactly.
    """
    if variants[0].setup.device.type == "cuda":
        return [_peak(variant) for variant in variants]
    calls = [(recipe, list(overrides), row) for row in range(len(variants))]
    found = run_all(_peak_of, calls, at_once=2)
    return list(counted(found, "measuring memory", len(calls), "rows"))


def _peak_of(recipe: str, overrides: list[str], row: int) -> tuple[int, int]:
    with held():  # the process that waits shows the progress
        setup = prepare(recipe, overrides)
    return _peak((strategy_variants(setup) + size_variants(setup))[row])


def _peak(variant: BenchVariant) -> tuple[int, int]:
    """Bytes at the peak of a step with the largest micro-batch of the first epoch, and bytes before it."""
    setup, made = variant.setup, variant.plan
    on_gpu = setup.device.type == "cuda"
    _step(variant, int(np.argmin(made.micro_cells)))  # libraries load what they need
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(setup.device)
    return_freed_memory()
    base = torch.cuda.memory_allocated(setup.device) if on_gpu else process_memory()
    restart_peak()
    _step(variant, int(np.argmax(made.micro_cells)))
    return torch.cuda.max_memory_allocated(setup.device) if on_gpu else max(peak_memory(), base), base


def _step(variant: BenchVariant, number: int) -> None:
    """Take a step of one micro-batch of the first epoch, with a new copy of the model."""
    rehearsal = Rehearsal(variant.setup, variant.stage)
    rehearsal.step(rehearsal.load([variant.plan.micro(number)]))


@dataclass(frozen=True)
class MemoryModel:
    """Memory of training with padded batches, from small passes: fixed_bytes + bytes_per_token * padded tokens of the
    largest pass.

    All batches hold the corpus's longest sequence, so the tokens of a pass are its number of sequences times that
    length.

    Args:
        process_bytes: memory of the libraries before training.
        worst_error: largest relative error of the prediction over the measured rows.
    """

    fixed_bytes: float
    bytes_per_token: float
    process_bytes: int
    worst_error: float

    def predict(self, tokens: int) -> float:
        """Bytes that training adds, given the padded tokens of a micro-batch."""
        return self.fixed_bytes + self.bytes_per_token * tokens

    def fitting_tokens(self, total_bytes: int) -> int:
        """Padded tokens of a pass that fits into memory of this size, libraries included."""
        free = total_bytes - self.process_bytes - self.fixed_bytes
        return max(int(free / self.bytes_per_token), 0)


def predicted_memory(memory: StageMemory, rows: Sequence[SpeedRow], longest: int) -> MemoryModel:
    """Predict the memory of padded batches of one update each, and compare it with the measured rows of batch sizes.

    Args:
        longest: positions of the longest sequence.
    """
    footprint, weights = memory.footprint, sum(p.numel() * p.element_size() for p in memory.parameters)
    fixed = weights + state_bytes(memory.parameters, micros=1) + process_bytes(footprint.fixed)
    slope = process_bytes(footprint.of(1, longest)) - process_bytes(footprint.fixed)
    found = MemoryModel(fixed, slope, max(row.base_bytes for row in rows), 0.0)
    errors = [abs(found.predict(row.largest_pass) / row.memory_bytes - 1) for row in rows]
    return replace(found, worst_error=max(errors))


def memory_lines(model: MemoryModel, longest: int) -> list[str]:
    """The prediction as text, and the number of sequences of `longest` tokens that fit into `CARDS`."""
    about = (
        f"memory of padded batches: {model.fixed_bytes / MIB:,.0f} MiB + {model.bytes_per_token / 1024:,.1f} KiB per "
        f"token of the largest pass; predicted from small passes, at worst {model.worst_error:.0%} off a row"
    )
    fitting = [(size, model.fitting_tokens(size * GIB)) for size in CARDS]
    rows = [[f"{size} GiB", f"{tokens:,}", f"{tokens // longest:,}"] for size, tokens in fitting]
    return [*wrapped(about), *text_table(["card", "tokens a pass", f"sequences of {longest}"], rows)]
