"""The tables and the plot of `pruning.py`: differences between methods with their intervals, and what the study asked.

Methods answer the same questions, so a difference is taken question by question, over all seeds together, and its
interval comes from resampling icons: pictures of one icon in several sizes are not independent questions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from unpad.evaluation.metrics import Metric, interval, resample

ORIGIN = ("origin", 1.0)
BLIND = (("question only", 0.0), ("commonest answer", 0.0))
LEAST_GAIN = 0.25  # of the base over what knows no image
MOST_LOST = {0.5: 0.02, 0.25: 0.05}  # of learned pruning, by the share kept
# Heads alone and untuned random keep have the same weights beside them; tuned ones were trained further for as long.
DUELS = (("learned, heads alone", "random"), ("learned", "random"), ("learned", "random, tuned"))
# Colours of Okabe and Ito (2008), which colour-blind readers tell apart; markers tell them apart on paper.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000", "#8C8C00")
MARKERS = "os^Dv<>P"

Key = tuple[str, float]


@dataclass(frozen=True)
class Study:
    """What was measured.

    Args:
        scores: of every method and share kept, (num_seeds, num_questions) from 0 to 1.
        icons: (num_questions,) number of the icon of each.
        questions: (num_questions,) their texts.
        costs: rows of the table of prefill.
        machine: of `describe_machine`.
    """

    scores: dict[Key, np.ndarray]
    icons: np.ndarray
    questions: np.ndarray
    costs: list[dict[str, Any]]
    seeds: list[int]
    machine: dict[str, Any]

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(name for name, keep in self.scores if 0 < keep < 1))

    @property
    def shares(self) -> list[float]:
        """Shares kept, the largest first."""
        return sorted({keep for _, keep in self.scores if 0 < keep < 1}, reverse=True)

    @property
    def blind(self) -> Key:
        """The better of what knows no image."""
        return max((key for key in BLIND if key in self.scores), key=lambda key: float(self.scores[key].mean()))

    def mean(self, values: np.ndarray) -> Metric:
        """Mean of (num_seeds, num_questions) values, its interval over icons."""
        per_question = values.mean(0)
        sums, counts = np.bincount(self.icons, per_question), np.bincount(self.icons)
        drawn = resample([sums, counts], 0)
        return interval(per_question.mean(), drawn[0] / drawn[1], len(counts))

    def gap(self, one: Key, other: Key) -> Metric:
        return self.mean(self.scores[one] - self.scores[other])


def checks(study: Study) -> list[tuple[str, str, bool]]:
    """Questions of the study, each with its result and whether it holds."""
    gain = study.gap(ORIGIN, study.blind)
    asked = [(f"all tokens beat {study.blind[0]} by {100 * LEAST_GAIN:g} points", gain, gain.value >= LEAST_GAIN)]
    for keep, most in MOST_LOST.items():
        if ("learned", keep) in study.scores:
            lost = study.gap(("learned", keep), ORIGIN)
            asked.append((f"learned, {keep:g} kept: within {100 * most:g} points of all", lost, lost.value >= -most))
    for keep in study.shares:
        for one, other in DUELS:
            if keep < 0.5 and {(one, keep), (other, keep)} <= study.scores.keys():
                won = study.gap((one, keep), (other, keep))
                asked.append((f"{one} beats {other}, {keep:g} kept", won, won.low > 0))
    return [(question, signed(found), bool(holds)) for question, found, holds in asked]


def signed(metric: Metric) -> str:
    """A difference in points with its interval."""
    bounds = "the same in all" if math.isnan(metric.low) else f"{100 * metric.low:+.1f} to {100 * metric.high:+.1f}"
    return f"{100 * metric.value:+.1f} ({bounds})"


def plain(metric: Metric) -> str:
    return f"{metric.value:.1%} ({metric.low:.1%} to {metric.high:.1%})"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def markdown(study: Study, command: str) -> str:
    num_rows, num_icons = len(study.icons), int(study.icons.max()) + 1
    lines = [
        "# Fewer visual tokens",
        "",
        f"    {command}",
        "",
        f"{num_rows} questions about {num_icons} icons that no model was trained on; seeds "
        f"{', '.join(map(str, study.seeds))}, together. Intervals of 95 % over icons; differences are of the same "
        f"questions, in points. {study.machine['threads']} threads on {study.machine['cores']} cores of "
        f"{study.machine['processor']}, torch {study.machine['torch']}.",
        "",
        *table(["", "points", "holds"], [[text, found, "yes" if ok else "NO"] for text, found, ok in checks(study)]),
        "",
        "## All visual tokens, and none",
        "",
        *table(["", "accuracy", "every seed"], [_whole(study, key) for key in (ORIGIN, *BLIND) if key in study.scores]),
        "",
        *table(["question", "origin", "commonest answer"], _by_question(study)),
        "",
        "## Every method",
        "",
        "Accuracy, and points below all tokens.",
        "",
        *table(["method", *(f"{keep:g} kept" for keep in study.shares)], [_row(study, name) for name in study.methods]),
        "",
        *_costs(study),
    ]
    return "\n".join(lines)


def _whole(study: Study, key: Key) -> list[str]:
    found = study.scores[key]
    return [key[0], plain(study.mean(found)), " ".join(f"{seed.mean():.1%}" for seed in found)]


def _by_question(study: Study) -> list[list[str]]:
    keys = [ORIGIN, BLIND[1]]
    masks = {text: study.questions == text for text in np.unique(study.questions).tolist()}
    return [[text, *(f"{study.scores[key][:, mask].mean():.1%}" for key in keys)] for text, mask in masks.items()]


def _row(study: Study, name: str) -> list[str]:
    cells = [
        f"{study.scores[name, keep].mean():.1%}, {signed(study.gap((name, keep), ORIGIN))}"
        if (name, keep) in study.scores
        else ""
        for keep in study.shares
    ]
    return [name, *cells]


def _costs(study: Study) -> list[str]:
    if not study.costs:
        return []
    rows = [
        [
            str(cost["batch"]),
            f"{cost['keep']:g}",
            f"{1e3 * cost['seconds']['median']:.2f}",
            f"{cost['ratio']['median']:.2f} ({cost['ratio']['low']:.2f} to {cost['ratio']['high']:.2f})",
            f"{min(cost['kept'])} to {max(cost['kept'])}",
            f"{cost['cache_bytes'] / 1024:,.0f}",
        ]
        for cost in study.costs
    ]
    head = ["prompts at once", "kept", "ms", "times as fast as all tokens", "visual tokens left", "cache, KiB"]
    text = "Tower and heads are part of it. Prompts are of unequal sizes; sides take turns; medians (quartiles)."
    return ["## Prefill", "", text, "", *table(head, rows), ""]


def draw(study: Study, file: Path) -> None:
    """Accuracy against the share kept, a line per method.

    Intervals are those of the difference to all tokens, which methods are compared by: that of an accuracy is several
    times as wide, and alike for all of them, as it comes from the icons that were asked about.
    """
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    whole = 100 * study.mean(study.scores[ORIGIN]).value
    axes.axhline(whole, color="#444444", linewidth=1, label="all tokens")
    for number, name in enumerate(study.methods):
        shares = [keep for keep in study.shares if (name, keep) in study.scores]
        gaps = [study.gap((name, keep), ORIGIN) for keep in shares]
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        aside = 1.035 ** (number - (len(study.methods) - 1) / 2)  # so that the bars stand side by side
        axes.errorbar(
            [keep * aside for keep in shares],
            [whole + 100 * gap.value for gap in gaps],
            yerr=[[100 * (gap.value - gap.low) for gap in gaps], [100 * (gap.high - gap.value) for gap in gaps]],
            color=colour,
            marker=marker,
            linewidth=1,
            elinewidth=0.8,
            capsize=2,
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(study.shares, [f"{keep:g}" for keep in study.shares])
    axes.set_xlabel("share of visual tokens kept")
    axes.set_ylabel(f"accuracy, %; {study.blind[0]}: {100 * study.scores[study.blind].mean():.0f} %")
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=110)
    plt.close(figure)
