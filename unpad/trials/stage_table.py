"""Table of one stage of a run: a row per strategy, its trial, and both as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from unpad.batching.ledger import Ledger
from unpad.data.family import family_of
from unpad.recipes.training import PlanSettings
from unpad.terminal.printing import print_styled
from unpad.terminal.table import text_table
from unpad.training.rehearsal import StepCost
from unpad.training.stage import StageSetup, plan_inputs
from unpad.trials.process_table import ProcessTable
from unpad.trials.strategy_table import StrategyRow, Units, compare, histogram_lines


@dataclass(frozen=True)
class StagePreview:
    """Table of one stage: a row and a trial per strategy, and the epochs of the recipe.

    Args:
        trials: by strategy, without refused ones and those that did not fit into memory.
        units: names of sequences and their tokens.
        attends: whether attention runs over tokens, so that its cells can be counted; otherwise sequences are never
            cut, and each has one target.
        memory: lines on the memory that micro-batches need.
        shared: the stage on several processes, if requested.
    """

    name: str
    lengths: np.ndarray
    rows: list[StrategyRow]
    trials: dict[str, StepCost]
    epochs: int
    settings: PlanSettings
    units: Units
    attends: bool
    memory: Sequence[str] = ()
    shared: ProcessTable | None = None

    def estimated_seconds(self, row: StrategyRow) -> float:
        """Time of the stage's epochs: computed tokens at the trial's rate."""
        trial = self.trials[row.name]
        return trial.seconds / max(trial.tokens, 1) * row.padded_tokens * self.epochs


def planned(stage: StageSetup) -> StagePreview:
    """Plan every strategy for a stage, without trials."""
    recipe = stage.recipe
    lengths, settings, known = plan_inputs(stage, 0)
    rows = compare(lengths, settings, **known)
    epochs = recipe.train.max_epochs if recipe.train.max_epochs is not None else 1
    units, attends = Units(*family_of(recipe).UNITS), stage.data.table.attended is None
    return StagePreview(stage.name, lengths[known["seq_ids"]], rows, {}, epochs, settings, units, attends)


# --------------------------------------------------------------------------- the screen


def show(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        print_styled(console, line)


def show_padding(console: Console, stage: StagePreview) -> None:
    units, num_tokens = stage.units, int(stage.lengths.sum())
    head = f"{stage.name}: {len(stage.lengths):,} {units.sequences}, {num_tokens:,} {units.tokens}"
    show(console, ["", head, *("  " + line for line in histogram_lines(stage.lengths)), *_table(stage)])


def _table(stage: StagePreview) -> list[str]:
    columns = ("trained", "context", "cut", "dropped", "attention") if stage.attends else (*stage.units, "dropped")
    return text_table(
        ("strategy", "padding", "steps", *columns, "corr"), [_cells(stage, row) for row in stage.rows], gap=1
    )


def _cells(stage: StagePreview, row: StrategyRow) -> list[str]:
    if row.refused:
        return [row.name, "refused"]
    ledger = row.ledger
    if stage.attends:
        cells = [_short(ledger.tokens(column)) for column in ("trained", "context", "truncated", "dropped")]
        cells.append(f"x{row.attention_cells_computed / max(row.attention_cells_needed, 1):.2f}")
    else:
        counts = [*trained_whole(ledger), sum(ledger.sequences[reason] for reason in ledger.dropped)]
        cells = [_short(count) for count in counts]
    return [
        _named(stage, row),
        f"{row.pad_share:.1%}",
        f"{row.steps:,}",
        *cells,
        "-" if row.length_correlation != row.length_correlation else f"{row.length_correlation:+.2f}",
    ]


def _named(stage: StagePreview, row: StrategyRow) -> str:
    return row.name + (" *" if row.name == stage.settings.strategy else "")


def show_head(console: Console, stage: StagePreview) -> None:
    print_styled(console, "")
    print_styled(console, f"{'strategy':<10}{'memory':>10}{f'{stage.epochs} ep.':>10}", style="bold")


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
