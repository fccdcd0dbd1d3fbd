"""Strategies compared on a corpus before anything trains, on one process and several: numbers, advice and a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from unpad.batching.balance import Balance, BalancedSize, Costs
from unpad.batching.layout import attention_cells, length_groups
from unpad.batching.ledger import Ledger
from unpad.batching.plan import Plan, plan
from unpad.batching.strategies import bucket
from unpad.errors import PlanError, RecipeError
from unpad.recipes.training import PlanSettings, strategy_names
from unpad.run.report.svg import Bar, Bars, bars_picture
from unpad.terminal.table import text_table, wrapped
from unpad.training.fit import best_cut, fill_tokens
from unpad.training.stage import StageSetup, replanned

BARS = " ▏▎▍▌▋▊▉█"


class Units(NamedTuple):
    """Names of sequences and of the things their length counts, in the plural: `UNITS` of a family of data."""

    sequences: str = "sequences"
    tokens: str = "tokens"


TEXT = Units()
# Fields of a row that are sums over its steps.
SUMMED = (
    *("real_tokens", "padded_tokens", "steps", "micros", "pieces"),
    *("attention_cells_needed", "attention_cells_computed", "ledger"),
)


@dataclass(frozen=True)
class StrategyRow:
    """Numbers of one strategy on one corpus; all counts are 0 if it was refused.

    Args:
        attention_cells_needed: query-key pairs inside sequences, before the causal mask halves them.
        attention_cells_computed: the same with padding, filler and the padding of length groups.
        length_correlation: Pearson correlation of the mean lengths of neighbouring steps; None where undefined.
        micro_tokens_min, micro_tokens_max: real tokens per micro-batch.
        pieces: sequences of all steps; a cut one counts once per piece.
        refused: why the strategy cannot plan these lengths; empty if it can.
    """

    name: str
    real_tokens: int = 0
    padded_tokens: int = 0
    steps: int = 0
    micros: int = 0
    pieces: int = 0
    attention_cells_needed: int = 0
    attention_cells_computed: int = 0
    length_correlation: float | None = None
    micro_tokens_min: int = 0
    micro_tokens_max: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    refused: str = ""

    @classmethod
    def of(cls, planned: Plan) -> StrategyRow:
        """The numbers of a plan."""
        tokens = planned.micro_tokens
        needed, computed = plan_attention_cells(planned)
        return cls(
            name=planned.strategy,
            real_tokens=planned.real_tokens,
            padded_tokens=planned.padded_tokens,
            steps=planned.num_steps,
            micros=planned.num_micros,
            pieces=len(planned.order),
            attention_cells_needed=needed,
            attention_cells_computed=computed,
            length_correlation=length_correlation(planned),
            micro_tokens_min=int(tokens.min(initial=tokens.max(initial=0))),
            micro_tokens_max=int(tokens.max(initial=0)),
            ledger=planned.ledger,
        )

    def __add__(self, other: StrategyRow) -> StrategyRow:
        """The strategy over two stages, in which the mean lengths of steps do not follow each other."""
        if refused := self.refused or other.refused:
            return replace(self, refused=refused)
        sums = {name: getattr(self, name) + getattr(other, name) for name in SUMMED}
        low = min(self.micro_tokens_min, other.micro_tokens_min)
        high = max(self.micro_tokens_max, other.micro_tokens_max)
        return replace(self, **sums, micro_tokens_min=low, micro_tokens_max=high, length_correlation=None)

    @property
    def pad_share(self) -> float:
        """Share of the computed tokens that is padding or filler."""
        return 1 - self.real_tokens / self.padded_tokens if self.padded_tokens else 0.0

    @property
    def attention_ratio(self) -> float:
        """Query-key pairs that are computed over those that are needed."""
        return self.attention_cells_computed / max(self.attention_cells_needed, 1)

    def to_json(self) -> dict[str, Any]:
        """All numbers; null for a correlation that is undefined."""
        means = {"pad_share": self.pad_share, "micro_tokens_mean": self.real_tokens / max(self.micros, 1)}
        return {**vars(self), **means, "ledger": self.ledger.to_json()}


def compare(lengths: np.ndarray, settings: PlanSettings, **known: Any) -> list[StrategyRow]:
    """Plan epoch 0 with each strategy; arguments as in `plan`. A row that a strategy refuses names the reason."""
    result = []
    for name in strategy_names():
        try:
            planned = plan(lengths, settings.model_copy(update={"strategy": name}), epoch=0, **known)
        except PlanError as error:
            if name != "rows":  # only rows has a size of its own; a refusal by another strategy holds for all
                raise
            result.append(StrategyRow(name, refused=error.what))
        else:
            result.append(StrategyRow.of(planned))
    return result


def plan_attention_cells(planned: Plan) -> tuple[int, int]:
    """Query-key pairs (needed, computed) of a plan, before the causal mask halves both.

    A padded micro-batch computes batch * pad_to**2; a ragged one computes its length groups, and one cell for each
    token of filler.
    """
    lengths, offsets = planned.pieces.lengths[planned.order], planned.micro_offsets
    needed = attention_cells(lengths)
    counts, pad_to = np.diff(offsets), planned.pad_to.astype(np.int64)
    computed = int((counts * pad_to * pad_to).sum())
    filler = planned.micro_cells - planned.micro_tokens
    ragged = np.flatnonzero(pad_to == 0)
    descending = lengths[np.lexsort((-lengths, np.repeat(np.arange(len(counts)), counts)))]
    for i in ragged.tolist():
        run = descending[offsets[i] : offsets[i + 1]]
        run = np.append(run, np.ones(filler[i], np.int64))
        computed += attention_cells(run, length_groups(run))
    return needed, computed


def length_correlation(planned: Plan) -> float | None:
    """Pearson correlation of the mean lengths of neighbouring steps: near 1 when a plan runs from short to long.

    None for fewer than three steps or equal means.
    """
    bounds = planned.micro_offsets[planned.step_offsets]
    if len(bounds) < 4:
        return None
    means = np.add.reduceat(planned.pieces.lengths[planned.order], bounds[:-1]) / np.diff(bounds)
    before, after = means[:-1] - means[:-1].mean(), means[1:] - means[1:].mean()
    scale = math.sqrt(float((before**2).sum() * (after**2).sum()))
    return float((before * after).sum()) / scale if scale > 0 else None


# --------------------------------------------------------------------------- advice


def advise_batch_size(num_sequences: int, lengths: np.ndarray, units: Units = TEXT) -> dict[str, Any]:
    """2, 4, 8 or 16 sequences for corpora below 100, 500, 1001 and above; `helps` says whether batching will help."""
    value = 2 if num_sequences < 100 else 4 if num_sequences < 500 else 8 if num_sequences <= 1000 else 16
    if num_sequences < 50:
        why = f"{num_sequences} {units.sequences} are too few for batching to help"
        return {"value": value, "helps": False, "why": why}
    shortest, longest = int(np.min(lengths)), int(np.max(lengths))
    why = f"{num_sequences} {units.sequences} of {shortest} to {longest} {units.tokens}"
    if shortest == longest:
        why = f"all {units.sequences} have {longest} {units.tokens}: there is no padding to save"
    return {"value": value, "helps": shortest < longest, "why": why}


def advise_bucket_width(lengths: np.ndarray, batch_size: int = 8, units: Units = TEXT) -> dict[str, Any]:
    """8, 16 or 32 for a median length below 50, up to 100 and above, with the pad share that each width gives."""
    lengths = np.asarray(lengths).astype(np.int64)
    lengths = lengths[lengths > 0]
    median = float(np.median(lengths)) if len(lengths) else 0.0
    shares = {}
    for width in (8, 16, 32):
        settings = PlanSettings(bucket_width=width, batch_size=batch_size)
        grouping = bucket.group(lengths, settings, np.random.default_rng(0))
        cells = int((grouping.pad_to * np.diff(grouping.micro_offsets)).sum())
        shares[width] = 1 - int(lengths.sum()) / cells if cells else 0.0
    value = 8 if median < 50 else 16 if median <= 100 else 32
    return {"value": value, "pad_shares": shares, "why": f"median length {median:g} {units.tokens}"}


# --------------------------------------------------------------------------- pictures and JSON


def histogram(lengths: np.ndarray, bins: int = 12) -> list[tuple[int, int, int]]:
    """Number of sequences per range of lengths: (lowest, highest, count), both ends inside, ranges of equal width."""
    lengths = np.asarray(lengths).astype(np.int64)
    if len(lengths) == 0:
        return []
    low, high = int(lengths.min()), int(lengths.max())
    width = -(-(high - low + 1) // bins)
    counts = np.bincount((lengths - low) // width)
    return [(low + i * width, low + (i + 1) * width - 1, count) for i, count in enumerate(counts.tolist())]


def histogram_lines(lengths: np.ndarray, bins: int = 12, width: int = 40) -> list[str]:
    """The histogram as lines of text with bars of at most `width` characters; every non-empty range has a bar."""
    bars = histogram(lengths, bins)
    most = max((count for _, _, count in bars), default=1)
    digits = len(str(bars[-1][1])) if bars else 1
    lines = []
    for low, high, count in bars:
        eighths = max(round(count / most * width * 8), 1) if count else 0
        bar = "█" * (eighths // 8) + BARS[eighths % 8].strip()
        lines.append(f"{low:>{digits}}-{high:>{digits}} {bar:<{width}} {count:,}")
    return lines


def plot(rows: Sequence[StrategyRow], lengths: np.ndarray, attention: bool = True, units: Units = TEXT) -> str:
    """SVG of the length histogram, the pad share and the attention cells of each strategy.

    Args:
        attention: whether the model attends over whole sequences; if not, the cells are left out.
    """
    rows = [row for row in rows if not row.refused]
    names = [(float(place), row.name) for place, row in enumerate(rows)]
    bars = [Bar(low, high - low + 1, count) for low, high, count in histogram(lengths, bins=30)]
    shares = [Bar(i - 0.4, 0.8, 100 * row.pad_share, note=f"{100 * row.pad_share:.1f}") for i, row in enumerate(rows)]
    needed = [Bar(i - 0.4, 0.4, row.attention_cells_needed) for i, row in enumerate(rows)]
    computed = [
        Bar(i, 0.4, row.attention_cells_computed, "miss", f"{row.attention_ratio:.2f}×") for i, row in enumerate(rows)
    ]
    figures = [
        Bars(f"Length of {units.sequences}", units.sequences, bars, over=units.tokens),
        Bars("Padding", f"% of computed {units.tokens}", shares, names=names),
    ]
    if attention:
        legend = [("hit", "needed"), ("miss", "computed")]
        figures.append(Bars("Attention cells", "query-key pairs", needed + computed, names=names, legend=legend))
    return bars_picture(figures)


def to_json(
    rows: Sequence[StrategyRow],
    lengths: np.ndarray,
    settings: PlanSettings,
    units: Units = TEXT,
) -> dict[str, Any]:
    """Convert the report to JSON values; `ledger` belongs to the recipe's own strategy, nan becomes null.

    Fields are named after sequences and tokens for all data; `units` has the names of the data's own units.

    Args:
        rows: from `compare`.
        lengths: positions of the sequences that were planned, (n,) int.
    """
    lengths = np.asarray(lengths)
    chosen = next((row for row in rows if row.name == settings.strategy), None)
    advice = {
        "batch_size": advise_batch_size(len(lengths), lengths, units),
        "bucket_width": advise_bucket_width(lengths, settings.batch_size, units),
    }
    return {
        "strategies": [row.to_json() for row in rows],
        "ledger": chosen.ledger.to_json() if chosen else None,
        "lengths": _lengths_json(lengths),
        "advice": advice,
        "units": units._asdict(),
    }


def _lengths_json(lengths: np.ndarray) -> dict[str, Any]:
    if len(lengths) == 0:
        return {"num_sequences": 0, "total": 0, "histogram": []}
    return {
        "num_sequences": len(lengths),
        "total": int(lengths.sum(dtype=np.int64)),
        "min": int(lengths.min()),
        "median": float(np.median(lengths)),
        "mean": float(lengths.mean()),
        "max": int(lengths.max()),
        "histogram": [{"low": low, "high": high, "count": count} for low, high, count in histogram(lengths)],
    }


@dataclass(frozen=True)
class Shared:
    """One strategy on several processes.

    Args:
        balances: one per number of processes.
        fill_tokens: `Costs.fill_tokens` for each number of processes.
        longest: tokens of the most expensive sequence; longest_cost: its cost.
        mean_cost: cost of a mean update, padding included.
    """

    balances: list[Balance]
    fill_tokens: list[int | None]
    longest: int
    longest_cost: float
    mean_cost: float


@dataclass(frozen=True)
class ProcessTable:
    """A stage on several processes.

    Args:
        strategies: by name.
        chosen: the recipe's strategy.
        cuts: a smaller `plan.tokens_per_micro` that gives all processes work, one per number of processes; None if the
            recipe's own does, or none does.
        epoch_tokens: real tokens of an epoch.
    """

    processes: tuple[int, ...]
    cells_per_token: float
    strategies: dict[str, Shared]
    chosen: str
    cuts: list[BalancedSize | None]
    epoch_tokens: int

    def to_json(self) -> dict[str, Any]:
        ratio = self.cells_per_token
        strategies = [
            {
                "name": name,
                "longest": strategy.longest,
                "longest_cost": strategy.longest_cost,
                "mean_cost": strategy.mean_cost,
                "processes": [
                    {**asdict(balance), "fill_tokens": fill}
                    for balance, fill in zip(strategy.balances, strategy.fill_tokens, strict=True)
                ],
            }
            for name, strategy in self.strategies.items()
        ]
        cuts = [None if cut is None else asdict(cut) for cut in self.cuts]
        return {
            "cells_per_token": ratio if math.isfinite(ratio) else None,
            "strategies": strategies,
            "cuts": cuts,
            "epoch_tokens": self.epoch_tokens,
        }

    def lines(self, units: Units) -> list[str]:
        """The table, and notes on how to read it, in 80 columns."""
        head = ("processes", *(f"{num:,}" for num in self.processes))
        rows = [
            [
                name + (" *" if name == self.chosen else ""),
                *(f"{balance.efficiency:.1%}" for balance in strategy.balances),
            ]
            for name, strategy in self.strategies.items()
        ]
        chosen = self.strategies.get(self.chosen)
        if chosen is None:
            return text_table(head, rows)
        rows += [
            ["bound: longest sequence", *(f"{balance.bound:.1%}" for balance in chosen.balances)],
            ["idle in most updates", *(f"{balance.idle:,}" for balance in chosen.balances)],
            ["tokens_per_micro for all", *("-" if cut is None else f"{cut.tokens_per_micro:,}" for cut in self.cuts)],
            ["  efficiency with it", *("-" if cut is None else f"{cut.balance.efficiency:.1%}" for cut in self.cuts)],
            ["tokens_per_step to fill", *("-" if fill is None else f"{fill:,}" for fill in chosen.fill_tokens)],
        ]
        sequences, tokens = units
        pairs = f", {self.cells_per_token:,.0f} pairs that attend 1" if math.isfinite(self.cells_per_token) else ""
        notes = [
            "* the recipe's; the rows below the strategies are of it. Percentages: cost of the real "
            f"{tokens} over that of all processes until the largest share of every update is done. One of the "
            f"{tokens} costs 1{pairs}; communication is not counted.",
            f"The most expensive of the {sequences} has {chosen.longest:,} {tokens} and costs "
            f"{chosen.longest_cost:,.0f}, a mean update {chosen.mean_cost:,.0f}. "
            f"An epoch has {self.epoch_tokens:,} {tokens}.",
        ]
        return [*text_table(head, rows), *(line for note in notes for line in wrapped(note))]


def process_table(
    stage: StageSetup, processes: Sequence[int], cells_per_token: float, names: Sequence[str]
) -> ProcessTable:
    """Share the first epoch of a stage among processes.

    Args:
        processes: numbers of them; cells_per_token: of the model.
        names: strategies that can plan it.
    """
    strategies, tokens = dict[str, Shared](), 0
    for name in names:
        plan = replanned(stage, strategy=name)
        costs = Costs(plan, cells_per_token, stage.data.table.attended)
        strategies[name] = Shared(
            [costs.balance(num) for num in processes],
            fill_tokens(stage, processes, cells_per_token, name),
            costs.tokens,
            costs.largest,
            float(costs.micros.sum()) / max(plan.num_steps, 1),
        )
        tokens = max(tokens, plan.real_tokens)
    chosen = stage.recipe.plan.strategy
    chosen_strategy = strategies.get(chosen)
    balances = chosen_strategy.balances if chosen_strategy is not None else []
    cuts = [best_cut(stage, share.processes, cells_per_token) if share.idle else None for share in balances]
    return ProcessTable(tuple(processes), cells_per_token, strategies, chosen, cuts, tokens)


def process_counts(text: str) -> tuple[int, ...]:
    """Numbers of processes from "2,8,64".

    Raises:
        RecipeError: one is not a number above 0.
    """
    counts = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(counts) < 1:
        fix = "write numbers above 0, as in --processes 2,8,64"
        raise RecipeError(f'"{text[:80]}" is no list of numbers of processes', where="--processes", fix=fix)
    return tuple(dict.fromkeys(counts))
