"""The page of `icons.py`: what every side gets right, and paired differences with their intervals over names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from pruning_report import plain, signed, table

from unpad.evaluation.metrics import Metric, mean_of

TREES, ONE, ALL_SIZES = "trees", "one model", "all sizes as one sequence"
BOTH = "mean of trees and one model"
OVER_SIZES = ", over sizes"  # probabilities averaged over an icon's sizes
WITH_TREES = f"mean of {ALL_SIZES} and {TREES}{OVER_SIZES}"
LEAST, GAIN = -0.01, 0.02  # of the goals
DIFFERENCES = (
    (ONE, TREES),
    (BOTH, TREES),
    (TREES + OVER_SIZES, TREES),
    (ONE + OVER_SIZES, ONE),
    (ONE + OVER_SIZES, TREES + OVER_SIZES),
    (BOTH + OVER_SIZES, TREES + OVER_SIZES),
    (ALL_SIZES, TREES + OVER_SIZES),
    (ALL_SIZES, ONE + OVER_SIZES),
    (WITH_TREES, TREES + OVER_SIZES),
)
KEY_SIDES = (TREES, ONE, TREES + OVER_SIZES, ALL_SIZES)
KEY_GAPS = ((ONE, TREES), (ALL_SIZES, TREES + OVER_SIZES))


@dataclass(frozen=True, eq=False)
class Study:
    """What was measured.

    Args:
        right: of every side, (num_seeds, num_pictures) bool.
        names: (num_pictures,) name of each; icons: (num_pictures,) number of its icon; folds: (num_pictures,) int.
        chosen_on: (num_pictures,) bool, those of names by which settings were chosen in another fold.
        machine: of `describe_machine`.
    """

    right: dict[str, np.ndarray]
    names: np.ndarray
    icons: np.ndarray
    folds: np.ndarray
    chosen_on: np.ndarray
    seeds: list[int]
    machine: dict[str, Any]

    def per_picture(self, values: np.ndarray, among: np.ndarray | None = None) -> Metric:
        """Mean of (num_seeds, num_pictures) values, its interval over names.

        Args:
            among: (num_pictures,) bool, the pictures that count; default all.
        """
        among = np.ones(len(self.names), np.bool_) if among is None else among
        return mean_of(values.mean(0)[among], self.names[among])

    def per_icon(self, values: np.ndarray) -> Metric:
        """As `per_picture`, with every icon counted once, by the mean of its pictures."""
        first, number = np.unique(self.icons, return_index=True, return_inverse=True)[1:]
        return mean_of(np.bincount(number, values.mean(0)) / np.bincount(number), self.names[first])

    def gap(self, one: str, other: str) -> np.ndarray:
        """Difference of two sides, picture by picture, (num_seeds, num_pictures)."""
        found: np.ndarray = self.right[one].astype(np.float64) - self.right[other]
        return found


def averaged(probabilities: np.ndarray, icons: np.ndarray) -> np.ndarray:
    """Probabilities (num_pictures, num_classes) averaged over the pictures of an icon, for each of them."""
    number = np.unique(icons, return_inverse=True)[1]
    sums = np.zeros((number.max() + 1, probabilities.shape[1]))
    np.add.at(sums, number, probabilities)
    return (sums / np.bincount(number)[:, None])[number]


def with_means(found: dict[str, np.ndarray], icons: np.ndarray) -> dict[str, np.ndarray]:
    """The sides TREES, ONE and ALL_SIZES, (num_pictures, num_classes) each, with means of them and over sizes."""
    found = found | {BOTH: (found[TREES] + found[ONE]) / 2}
    found |= {side + OVER_SIZES: averaged(found[side], icons) for side in (TREES, ONE, BOTH)}
    return found | {WITH_TREES: (found[ALL_SIZES] + found[TREES + OVER_SIZES]) / 2}


class Goal(NamedTuple):
    """A goal of the study, with the paired difference per picture that it asks about.

    Args:
        missing: by how much the difference, or its interval, would have to be higher; 0 where the goal holds.
    """

    text: str
    found: Metric
    holds: bool
    missing: float

    def cells(self) -> list[str]:
        """A row of the table."""
        return [self.text, signed(self.found), "yes" if self.holds else "NO", f"{100 * self.missing:.1f}"]


def goals(study: Study) -> list[Goal]:
    """Goals of the study."""
    one, whole = (study.per_picture(study.gap(*sides)) for sides in KEY_GAPS)
    first = f"{ONE} is not below {TREES}: interval above {100 * LEAST:+g}"
    second = f"{ALL_SIZES}: {100 * GAIN:g} points above {TREES}{OVER_SIZES}, interval above 0"
    return [
        Goal(first, one, bool(one.low > LEAST), max(0.0, LEAST - one.low)),
        Goal(second, whole, bool(whole.value >= GAIN and whole.low > 0), max(0.0, GAIN - whole.value, -whole.low)),
    ]


def markdown(study: Study, command: str) -> str:
    """The page."""
    apart = study.per_picture(study.gap(ALL_SIZES, TREES + OVER_SIZES), ~study.chosen_on)
    lines = [
        "# Categories of icons",
        "",
        f"    {command}",
        "",
        f"{len(study.names):,} pictures of {len(np.unique(study.icons)):,} icons with "
        f"{len(np.unique(study.names)):,} names, each scored by what learnt from the other folds; seeds "
        f"{', '.join(map(str, study.seeds))}, together. Intervals are 95 %, over names; differences are of the same "
        f"pictures, in points. {study.machine['cores']} cores of {study.machine['processor']}, torch "
        f"{study.machine['torch']}.",
        "",
        *table(["goal", "points per picture", "holds", "missing"], [goal.cells() for goal in goals(study)]),
        "",
        f"Without the {len(np.unique(study.names[study.chosen_on])):,} names by which settings of the sequence were "
        f"chosen, the second difference is {signed(apart)}.",
        "",
        f"{plain(study.per_picture(_any(study)))} of the pictures are told by trees, the one model or the sequence: no",
        "choice among the three answers reaches more.",
        "",
        "The sequence is one picture with the sizes below each other, 32 x 32 each, as a row of the family holds one",
        "picture: convolutions and places run across its sizes, and it has one label where single pictures have one",
        "each.",
        "",
        "## Accuracy",
        "",
        *table(
            ["side", "per picture", "per icon"],
            [[side, plain(study.per_picture(r)), plain(study.per_icon(r))] for side, r in study.right.items()],
        ),
        "",
        "## Paired differences",
        "",
        *table(
            ["side", "beside", "points per picture", "points per icon"],
            [
                [one, other, signed(study.per_picture(gap)), signed(study.per_icon(gap))]
                for one, other in DIFFERENCES
                for gap in [study.gap(one, other)]
            ],
        ),
        "",
        "What else was tried, on the names within the first fold's training part, is in `docs/log.md`.",
        "",
        "## Every fold and seed",
        "",
        "Accuracy per picture, and the difference with its interval over the fold's names.",
        "",
        *table(["fold", "seed", *KEY_SIDES, *(f"{one} less {other}" for one, other in KEY_GAPS)], _folds(study)),
        "",
    ]
    return "\n".join(lines)


def _any(study: Study) -> np.ndarray:
    """Whether some side gets a picture right, (num_seeds, num_pictures) bool."""
    told: np.ndarray = study.right[TREES] | study.right[ONE] | study.right[ALL_SIZES]
    return told


def _folds(study: Study) -> list[list[str]]:
    rows = []
    for fold in np.unique(study.folds).tolist():
        mine = study.folds == fold
        for row, seed in enumerate(study.seeds):
            accuracies = [f"{study.right[side][row, mine].mean():.1%}" for side in KEY_SIDES]
            gaps = [signed(study.per_picture(study.gap(*sides)[row : row + 1], mine)) for sides in KEY_GAPS]
            rows.append([str(fold), str(seed), *accuracies, *gaps])
    return rows
