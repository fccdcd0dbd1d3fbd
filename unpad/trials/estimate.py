"""Tables over a sample of large data, shown while the rest is being read and encoded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console

from unpad.data.family import Sample, open_sample
from unpad.models import model_config
from unpad.recipes.recipe import Recipe, stages_of
from unpad.terminal.progress import progress
from unpad.terminal.table import wrapped
from unpad.training.stage import StageSetup, make_stage, plan_inputs
from unpad.trials.stage_table import StagePreview, planned, show, show_padding
from unpad.trials.strategy_table import padding_spread

MOST_PLANNED = 100_000  # sequences of an estimate; more would take seconds


@dataclass(frozen=True)
class Estimate:
    """Table of a stage over a sample of its sequences, before the lengths of all are known.

    Args:
        table: of the sample repeated up to the number of all sequences, since padding depends on that; no trials.
        num: sampled sequences; population: those of the stage that they were drawn from; unit: their name, plural.
        note: of the `Sample`.
        spread: strategy -> standard deviation of the pad share over samples of this size.
    """

    table: StagePreview
    num: int
    population: int
    unit: str
    note: str
    spread: dict[str, float]

    def lines(self) -> list[str]:
        """Lines that describe the sample of the table."""
        size = "" if len(self.table.lengths) == self.population else f" to {len(self.table.lengths):,}"
        what = f"estimate from {self.num:,} of {self.population:,} {self.unit}, drawn at random{self.note} and repeated"
        return wrapped(f"{what}{size}; the table of all of them follows")

    def interval_lines(self) -> list[str]:
        """95 % intervals of the pad share: the estimate and 1.96 of its standard deviations to both sides."""
        found = []
        for row in self.table.rows:
            width = 1.96 * self.spread.get(row.name, 0.0)
            if width:
                found.append(f"{row.name} {max(row.pad_share - width, 0):.1%} to {min(row.pad_share + width, 1):.1%}")
        return wrapped("padding, 95 % intervals of the drawing: " + (", ".join(found) or "none has any"))


def estimates_of(recipe: Recipe) -> list[Estimate]:
    """Plan every stage over a sample of its data; empty if the lengths of all data will be known soon."""
    with progress("reading a sample of the data"):
        sample = open_sample(recipe)
    if sample is None:
        return []
    longest = model_config(recipe.model).longest
    stages = [make_stage(stage, sample.data, longest) for stage in stages_of(recipe)]
    return [_estimate(sample, stage) for stage in stages if stage.train_ids.size]


def _estimate(sample: Sample, stage: StageSetup) -> Estimate:
    drawn = replace(stage, train_ids=_evenly(sample, stage))
    population = int(sample.population[[sample.data.kinds.index(kind) for kind in stage.kinds]].sum())
    repeated = replace(drawn, train_ids=np.resize(drawn.train_ids, min(population, MOST_PLANNED)))
    lengths, settings, known = plan_inputs(drawn, 0)
    with progress(f"planning {stage.name}"):
        table, spread = planned(repeated), padding_spread(lengths, settings, **known)
    return Estimate(table, drawn.train_ids.size, population, sample.unit, sample.note, spread)


def _evenly(sample: Sample, stage: StageSetup) -> np.ndarray:
    """Sampled sequences of a stage, the same share of every kind, since kinds are sampled separately."""
    kind, rng = sample.data.table.kind[stage.train_ids], np.random.default_rng(stage.recipe.train.seed)
    used = np.unique(kind).tolist()
    share = min((kind == k).sum() / sample.population[k] for k in used)
    parts = [
        rng.permutation(stage.train_ids[kind == k])[: max(round(share * int(sample.population[k])), 1)] for k in used
    ]
    return np.concatenate(parts)


def show_estimate(console: Console, estimate: Estimate) -> None:
    """Print an estimate: a description, the table, and the intervals of its padding."""
    show(console, estimate.lines())
    show_padding(console, estimate.table)
    show(console, [*estimate.interval_lines(), ""])
