"""Balance of an update among many processes, simulated: the part `simulation` of `processes.py`.

Nothing is trained. Lengths are drawn, the plans are ours, and a process costs what its micro-batches cost by
`unpad.batching.balance.micro_cost`. Efficiency is the cost of the real tokens over that of all processes until the
most expensive share of every update is done.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unpad.batching.balance import Costs
from unpad.batching.plan import plan
from unpad.models.cost import cells_per_token
from unpad.models.decoder import Config, Decoder
from unpad.recipes.training import PlanSettings

PROCESSES = (8, 64, 256, 1024)
UPDATE = 1 << 22  # real tokens of an update that is the same for any number of processes
PER_PROCESS = 1 << 14  # and of a process, where updates grow with their number
UPDATES = 6  # of every setting
MICROS_EACH = 4  # micro-batches per process, or more, as far as they have LEAST_MICRO tokens
LEAST_MICRO, MOST_MICRO = 512, 8192
SLACK = 1.03  # tokens per micro-batch over an even cut, which whole sequences would overflow
VOCABULARY = 32_000
MODEL = Config(width=2048, blocks=24, heads=16, hidden=5632, activation="swiglu", context=32_768)


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths between 8 and `longest`; sigma is of their logarithm."""

    median: int
    sigma: float
    longest: int

    def draw(self, tokens: int, rng: np.random.Generator) -> np.ndarray:
        """Lengths of at least so many tokens, (num_sequences,) int64."""
        parts, total = list[np.ndarray](), 0
        while total < tokens:
            drawn = np.exp(rng.normal(math.log(self.median), self.sigma, 1 << 14))
            parts.append(np.clip(drawn, 8, self.longest).astype(np.int64))
            total += int(parts[-1].sum())
        return np.concatenate(parts)


DISTRIBUTIONS = {
    "exchanges": Lengths(64, 0.6, 512),
    "documents": Lengths(512, 1.3, 8192),
    "a long tail": Lengths(512, 1.3, 32_768),
}
# name -> (strategy, True for shares by cost, False for micro-batches dealt in turn)
SIDES = {
    "padded, in turn": ("dynamic", False),
    "padded by length, in turn": ("bucket", False),
    "flat, in turn": ("pack", False),
    "flat, by cost": ("pack", True),
}


def simulate() -> dict[str, Any]:
    """Efficiency of every side, for every distribution, number of processes and size of update."""
    with torch.device("meta"):
        model = Decoder(MODEL, VOCABULARY)
    ratio, began = cells_per_token(model), time.perf_counter()
    rows = [
        {"lengths": name, "processes": processes, "update": update, **efficiencies(lengths, processes, update, ratio)}
        for name, lengths in DISTRIBUTIONS.items()
        for processes in PROCESSES
        for update in sorted({UPDATE, PER_PROCESS * processes})
    ]
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "cells_per_token": ratio,
        "updates": UPDATES,
        "distributions": {name: vars(lengths) for name, lengths in DISTRIBUTIONS.items()},
        "rows": rows,
        "seconds": time.perf_counter() - began,
    }


def efficiencies(
    distribution: Lengths, processes: int, update: int, ratio: float, updates: int = UPDATES
) -> dict[str, Any]:
    """Efficiency of every side, and the bound of whole sequences, over so many updates."""
    lengths = distribution.draw(update * (updates + 1), np.random.default_rng(1))
    share = SLACK * update / processes
    micro = math.ceil(max(share / max(MICROS_EACH, math.ceil(share / MOST_MICRO)), LEAST_MICRO))
    found: dict[str, Any] = {"tokens_per_micro": micro, "sides": {}}
    for name, (strategy, by_cost) in SIDES.items():
        settings = PlanSettings(
            strategy=strategy, tokens_per_step=update, tokens_per_micro=micro, batch_size=8, drop_last=True
        )
        costs = Costs(plan(lengths, settings, seed=0, epoch=0), ratio)
        balance = costs.balance(processes)
        found["sides"][name] = balance.efficiency if by_cost else in_turn(costs, processes)
        if by_cost:
            found |= {"bound": balance.bound, "longest": costs.tokens}
    return found


def in_turn(costs: Costs, processes: int) -> float:
    """Efficiency if process r takes every micro-batch r, r + `processes` and so on of an update."""
    made, spent = costs.made, 0.0
    for begin, end in zip(made.step_offsets[:-1], made.step_offsets[1:], strict=True):
        rounds = np.zeros(-(-(end - begin) // processes) * processes)
        rounds[: end - begin] = costs.micros[begin:end]
        spent += float(rounds.reshape(-1, processes).sum(0).max())
    return float(costs.pieces.sum()) / (processes * spent)


def markdown(result: dict[str, Any]) -> list[str]:
    """The part as Markdown."""
    lines = [
        "## Balance by simulation",
        "",
        "`--simulate`: lengths are drawn and plans made, and nothing is trained. Efficiency is the cost of the real "
        "tokens over that of all processes until",
        "the most expensive share of every update is done; padding is waste, and communication is not counted. Cost: "
        "tokens, "
        f"and {result['cells_per_token']:,.0f} pairs of positions for",
        f"one token, the ratio of a decoder of {result['parameters'] / 1e9:.1f} billion parameters. Flat micro-batches "
        f"have {LEAST_MICRO} to {MOST_MICRO:,} tokens, {MICROS_EACH} for each process where possible;",
        f"padded ones are 8 sequences, in random order or among their like. At least {result['updates']} updates for "
        "every row.",
        "",
    ]
    for name, sizes in result["distributions"].items():
        rows = [row for row in result["rows"] if row["lengths"] == name]
        sides = list(rows[0]["sides"])
        lines += [
            f"### {name.capitalize()}: log-normal, median {sizes['median']}, sigma {sizes['sigma']}, at most "
            f"{sizes['longest']:,} tokens",
            "",
            f"| processes | tokens of an update | {' | '.join(sides)} | bound: longest sequence |",
            f"|---|---|{'---|' * (len(sides) + 1)}",
        ]
        for row in rows:
            shares = [*row["sides"].values(), row["bound"]]
            shown = " | ".join(f"{share:.0%}" for share in shares)
            lines.append(f"| {row['processes']:,} | {row['update']:,} | {shown} |")
        lines.append("")
    return lines
