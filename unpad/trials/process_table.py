"""Table of a stage on several processes: the efficiency of each strategy, and settings that keep all processes busy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unpad.batching.balance import Balance, BalancedSize, Costs
from unpad.errors import RecipeError
from unpad.terminal.table import text_table, wrapped
from unpad.training.fit import best_cut, fill_tokens, recut
from unpad.training.stage import StageSetup
from unpad.trials.strategy_table import Units


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
        tokens = units.tokens
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
        plan = recut(stage, strategy=name)
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
