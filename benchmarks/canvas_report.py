"""The tables of `canvas.py`: checks, every arm by kind of question, and its share of the gap that an oracle leaves.

Arms answer the same questions, so differences are taken question by question, over all seeds together. Intervals come
from resampling canvases: questions about one canvas are not independent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pruning_report import signed, table

from unpad.evaluation.metrics import Metric, interval, resample

Key = tuple[str, float]
ALL: Key = ("all tokens", 1.0)
GUESS: Key = ("commonest look of the canvas", 0.0)
LEAST = 0.9  # accuracy of all tokens, below which a kind of questions is void
CEILING = 0.03  # that blind heads may differ from what they can reach
HARD = 0.02  # below soft
GOALS = {"one": 0.9, "two": 0.5}  # share of the gap at a sixteenth, of the better of the arms that read the question
GOAL_SHARE = 1 / 16
NAMES = {"one": "one hop", "two": "two hops"}
READS = ("heads", "heads, after block 1", "heads, at two depths", "relevance", "relevance, after block 1")
BLIND = ("blind", "blind, after block 1", "blind relevance")
LATE = re.compile(", after block [0-9]+")  # such arms are measured against chance and oracle at their own place
TUNED = ", tuned"
SOFT = ", soft"
FREE = ("uniform", "class_token", "similarity", "attention, after block 1", "attention, after block 2")


@dataclass(frozen=True)
class Study:
    """What was measured.

    Args:
        found: of every seed, the scores of every arm and share kept, (num_questions,) from 0 to 1.
        canvases: (num_questions,) number of the canvas of each.
        kinds: (num_questions,) kind of each.
        num_cells: of a canvas.
        machine: of `describe_machine`.
    """

    found: list[dict[Key, np.ndarray]]
    seeds: list[int]
    canvases: np.ndarray
    kinds: np.ndarray
    num_cells: int
    machine: dict[str, Any]

    @property
    def of_kinds(self) -> list[str]:
        return sorted(set(self.kinds.tolist()))

    def sound(self, kind: str) -> list[dict[Key, np.ndarray]]:
        """What was found with the seeds whose model answers enough questions of a kind with all tokens."""
        return [one for one in self.found if one[ALL][self.kinds == kind].mean() >= LEAST]

    def void(self, kind: str) -> list[int]:
        """The other seeds."""
        pairs = zip(self.seeds, self.found, strict=True)
        return [seed for seed, one in pairs if one[ALL][self.kinds == kind].mean() < LEAST]

    def of(self, seed: int) -> Study:
        """What was found with one seed."""
        return replace(self, seeds=[seed], found=[self.found[self.seeds.index(seed)]])

    def keys(self, kind: str) -> list[Key]:
        """Arms and shares that every sound seed has."""
        sound = self.sound(kind)
        return [key for key in sound[0] if all(key in one for one in sound)] if sound else []

    def shares(self, kind: str) -> list[float]:
        return sorted({keep for _, keep in self.keys(kind) if 0 < keep < 1}, reverse=True)

    def arms(self, kind: str) -> list[str]:
        return list(dict.fromkeys(name for name, keep in self.keys(kind) if 0 < keep < 1))

    def scores(self, key: Key, kind: str) -> np.ndarray:
        """Mean over sound seeds of the scores of the questions of one kind, (num,)."""
        return np.stack([one[key] for one in self.sound(kind)]).mean(0)[self.kinds == kind]

    def mean(self, values: np.ndarray, kind: str) -> Metric:
        """Mean of the values of the questions of one kind, (num,), its interval over canvases."""
        canvases = self.canvases[self.kinds == kind]
        drawn = resample([values, np.ones_like(values)], 0, canvases)
        return interval(float(values.mean()), drawn[0] / drawn[1], len(values), len(np.unique(canvases)))

    def gap(self, arm: str, keep: float, kind: str) -> Metric | None:
        """(arm - random) / (oracle - random), all at the arm's place and tuned if it is; None where one is missing, and
        for these two."""
        late = LATE.search(arm)
        place = late.group() if late else ""
        tuned = TUNED if arm.endswith(TUNED) else ""
        keys = [(arm, keep), (f"random{place}{tuned}", keep), (f"oracle{place}{tuned}", keep)]
        if len(set(keys)) < len(keys) or not set(keys) <= set(self.keys(kind)):
            return None
        one, chance, oracle = (self.scores(key, kind) for key in keys)
        drawn = resample([one - chance, oracle - chance], 0, self.canvases[self.kinds == kind])
        width = float((oracle - chance).mean())
        if width <= 0:
            return None
        part = float((one - chance).mean()) / width
        return interval(part, drawn[0] / np.where(drawn[1] == 0, math.nan, drawn[1]), len(one))

    def ceiling(self, keep: float) -> float:
        """Accuracy of one hop that a head can reach without the question: a cell per token, a guess at the others."""
        seen = min(1.0, round(4 * keep * self.num_cells) / self.num_cells)
        return seen * float(self.scores(ALL, "one").mean()) + (1 - seen) * float(self.scores(GUESS, "one").mean())


# --------------------------------------------------------------------------- checks


def checks(study: Study) -> list[list[str]]:
    """Rows of what the study asked: the question, the result, whether it holds."""
    rows: list[tuple[str, str, bool]] = []
    for keep in study.shares("one"):
        for arm in [name + end for name in BLIND for end in ("", TUNED)]:
            if (arm, keep) in study.keys("one"):
                limit = study.ceiling(keep)
                away = study.mean(study.scores((arm, keep), "one") - limit, "one")
                text = f"{arm}, {keep:g} kept, one hop: within 3 points of {limit:.1%}"
                rows.append((text, signed(away), abs(away.value) <= CEILING))
    for kind in study.of_kinds:
        rows += _goals(study, kind)
        for arm, keep in study.keys(kind):
            if (f"{arm}{SOFT}", keep) in study.keys(kind):
                lost = study.mean(study.scores((arm, keep), kind) - study.scores((f"{arm}{SOFT}", keep), kind), kind)
                text = f"{arm}, {keep:g} kept, {NAMES[kind]}: hard within 2 points of soft"
                rows.append((text, signed(lost), abs(lost.value) <= HARD))
    return [[asked, result, "yes" if holds else "NO"] for asked, result, holds in rows]


def _goals(study: Study, kind: str) -> list[tuple[str, str, bool]]:
    rows: list[tuple[str, str, bool]] = []
    for arm in [name + end for name in READS for end in ("", TUNED)]:
        found = study.gap(arm, GOAL_SHARE, kind)
        if found is None:
            continue
        what = f"{arm}, {GOAL_SHARE:g} kept, {NAMES[kind]}:"
        rows.append((f"{what} {GOALS[kind]:g} of the gap", _share(found), found.value >= GOALS[kind]))
        for name in FREE if kind == "two" else ():
            other = name + (TUNED if arm.endswith(TUNED) else ""), GOAL_SHARE
            if other in study.keys(kind):
                won = study.mean(study.scores((arm, GOAL_SHARE), kind) - study.scores(other, kind), kind)
                rows.append((f"{what} above {other[0]}", signed(won), won.low > 0))
    return rows


# --------------------------------------------------------------------------- words


def _accuracy(found: Metric) -> str:
    bounds = "the same in all" if math.isnan(found.low) else f"{found.low:.1%} to {found.high:.1%}"
    return f"{found.value:.1%} ({bounds})"


def _share(found: Metric | None) -> str:
    return "" if found is None else f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def markdown(study: Study, control: Study, command: str) -> str:
    """The page; of a void study only what all tokens reach."""
    num = len(np.unique(study.canvases))
    lines = [
        "# Canvases on which the question matters",
        "",
        f"    {command}",
        "",
        f"{len(study.kinds)} questions about {num} canvases of icons that no model was trained on; seeds "
        f"{', '.join(map(str, study.seeds))}. Intervals of 95 % over canvases; differences are of the same questions, "
        f"in points. {study.machine['threads']} threads on {study.machine['cores']} cores of "
        f"{study.machine['processor']}, torch {study.machine['torch']}.",
        "",
        "## All visual tokens",
        "",
        *table(["questions", *(f"seed {seed}" for seed in study.seeds), GUESS[0]], _whole(study)),
        "",
    ]
    for kind in study.of_kinds:
        if void := study.void(kind):
            seeds = f"seed{'s' if len(void) > 1 else ''} {', '.join(map(str, void))}"
            lines += [f"**{NAMES[kind].capitalize()}: void with {seeds}**, below {LEAST:.0%} with all tokens.", ""]
    if any(study.arms(kind) for kind in study.of_kinds):
        lines += ["## What was asked", "", *table(["", "result", "holds"], checks(study)), ""]
    for kind in study.of_kinds:
        if not study.arms(kind):
            continue
        text = (
            "Accuracy, its interval, and the share of the gap from random to oracle with its own. What is called soft "
            "removes nothing: every token stays, with less weight."
        )
        lines += [f"## {NAMES[kind].capitalize()}", "", text, "", *_arms(study, kind, _shares(study, kind)), ""]
        if len(study.seeds) > 1:
            each = [column for seed in study.seeds for column in _shares(study.of(seed), kind)]
            lines += [f"### {NAMES[kind].capitalize()}, seed by seed", "", *_arms(study, kind, each), ""]
    return "\n".join([*lines, *_control(control)])


def _control(control: Study) -> list[str]:
    """Lines on pictures that one icon fills, of which every part may tell the answer."""
    what = f"{len(control.kinds)} pictures of the same size, each with one icon: to choose tokens helps less there."
    [[_, *whole]] = _whole(control)
    seeds = [f"seed {seed}" for seed in control.seeds]
    lines = [
        "## Control: one icon fills the picture",
        "",
        what,
        "",
        *table(["", *seeds], [["all tokens", *whole[:-1]]]),
    ]
    if control.arms("one"):
        lines += ["", *_arms(control, "one", _shares(control, "one"))]
    return [*lines, ""]


def _whole(study: Study) -> list[list[str]]:
    def cells(key: Key, kind: str) -> list[str]:
        return [_accuracy(study.mean(one[key][study.kinds == kind], kind)) for one in study.found]

    return [[NAMES[kind], *cells(ALL, kind), cells(GUESS, kind)[0]] for kind in study.of_kinds]


def _shares(study: Study, kind: str) -> list[tuple[float, Study]]:
    """Columns of the arms: a share kept, and what was found."""
    return [(keep, study) for keep in study.shares(kind)]


def _arms(study: Study, kind: str, columns: Sequence[tuple[float, Study]]) -> list[str]:
    """The table of the arms, with the sound seeds of every column above it."""

    def cell(arm: str, keep: float, found: Study) -> str:
        if (arm, keep) not in found.keys(kind):
            return ""
        part = _share(found.gap(arm, keep, kind))
        return _accuracy(found.mean(found.scores((arm, keep), kind), kind)) + (f", {part}" if part else "")

    def head(keep: float, found: Study) -> str:
        sound = [seed for seed in found.seeds if seed not in found.void(kind)]
        return f"{keep:g} kept, seed{'s' if len(sound) > 1 else ''} {', '.join(map(str, sound))}"

    rows = [[arm, *(cell(arm, *column) for column in columns)] for arm in study.arms(kind)]
    return table(["arm", *(head(*column) for column in columns)], rows)
