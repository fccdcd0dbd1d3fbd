"""`unpad compare --rows`: differences between runs on the held-out examples that both have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unpad.data.family import family_name
from unpad.errors import RecipeError, SourceError
from unpad.evaluation.binary import measured
from unpad.evaluation.metrics import Metric, Refused, interval, metric_lines, resample
from unpad.evaluation.rows import GROUP, ID, KIND, LANDMARK, PART, WHERE, Columns, ExampleRows, Ranked, Ratio, objects
from unpad.evaluation.run import rows_of, score
from unpad.run.folder import find_run, run_recipe
from unpad.terminal.progress import progress
from unpad.terminal.table import number_of, wrapped


@dataclass(frozen=True)
class Paired:
    """A run beside the first one, on the rows that both have.

    Args:
        first, second: names of the runs.
        common: rows of both; only_first, only_second: rows of one.
        differences: of every metric that both have, that of the second run less that of the first.
    """

    first: str
    second: str
    common: int
    only_first: int
    only_second: int
    differences: dict[str, Metric]

    def lines(self) -> list[str]:
        """The differences as a table, below what they are of."""
        head = f"{self.second} less {self.first}, on {number_of(self.common, 'rows')} that both hold out"
        alone = [
            f"{number_of(number, 'rows')} of {name} alone"
            for name, number in ((self.first, self.only_first), (self.second, self.only_second))
            if number
        ]
        return [*wrapped("; ".join([head, *alone])), *metric_lines(self.differences)]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "differences": {name: one.to_json() for name, one in self.differences.items()}}


def check_families(runs: Sequence[str]) -> None:
    """Refuse runs whose rows have nothing in common.

    Raises:
        RecipeError: they are of several families.
    """
    families = {run: family_name(run_recipe(find_run(run))) for run in runs}
    if len(set(families.values())) > 1:
        what = "rows of several families cannot be compared: " + ", ".join(
            f"{run} is of {family}" for run, family in families.items()
        )
        raise RecipeError(what, where="--rows", fix="name runs of one family, or leave out --rows")


def compare_rows(runs: Sequence[str], names: Sequence[str]) -> list[Paired]:
    """Measure runs as `unpad eval` does, and compare every further one with the first; nothing is written.

    Args:
        names: of the runs.

    Raises:
        RecipeError: the runs are of several families.
        SourceError: the data of a run cannot be used, or two runs hold out no row in common.
    """
    check_families(runs)
    measured_rows = []
    for run, name in zip(runs, names, strict=True):
        with progress(f"evaluating {name}"):
            scored = score(run)
            rows = rows_of(scored.evaluation, scored.data, scored.part)
        measured_rows.append(rows.only(rows.columns[PART] == scored.part))  # without questions of the training part
    first, *others = measured_rows
    return [paired(names[0], name, first, rows) for name, rows in zip(names[1:], others, strict=True)]


def paired(first: str, second: str, a: ExampleRows, b: ExampleRows) -> Paired:
    """Compare the rows of two runs that have the same id, landmark or place; several of one place are taken in order.

    Groups are those of the first run.

    Raises:
        SourceError: the runs have no row in common.
    """
    keys, others = _keys(a), {key: row for row, key in enumerate(_keys(b))}
    mine = [row for row, key in enumerate(keys) if key in others]
    if not mine:
        what = f"{first} and {second} hold out no row in common, by place or id and landmark"
        fix = "train both on the same files, under the same names, with the same data.holdout and train.seed"
        raise SourceError(what, where="--rows", fix=fix)
    theirs = [others[keys[row]] for row in mine]
    common = a.only(np.array(mine)).columns, b.only(np.array(theirs)).columns
    differences = {}
    for name, measure in a.measures.items():
        if name in b.measures and (found := _difference(*common, measure)) is not None:
            differences[name] = found
    alone = len(keys) - len(mine), len(others) - len(mine)
    return Paired(first, second, len(mine), *alone, differences)


def _keys(rows: ExampleRows) -> list[tuple[str, str, int]]:
    """Kind, id (and landmark) or place of every row, and how many rows before it have the same."""
    names = rows.columns[ID if ID in rows.columns else WHERE]
    if LANDMARK in rows.columns:
        names = objects([f"{name} at {at}" for name, at in zip(names, rows.columns[LANDMARK], strict=True)])
    kinds = rows.columns.get(KIND, [""] * len(names))
    seen = Counter[tuple[str, str]]()
    keys = []
    for kind, name in zip(kinds, names, strict=True):
        key = kind, str(name)
        keys.append((*key, seen[key]))
        seen[key] += 1
    return keys


def _difference(a: Columns, b: Columns, measure: Ratio | Ranked) -> Metric | None:
    """A measure of the second rows less that of the first, with its 95 % interval over groups of rows, drawn in pairs;
    None where no row of both has it."""
    if isinstance(measure, Ranked):
        has = [np.array([value is not None for value in rows[measure.needs]]) for rows in (a, b)]
    else:
        has = [np.isfinite(total) & (num > 0) for total, num in (_sums(rows, measure) for rows in (a, b))]
        if measure.kind is not None:
            has.append(a[KIND] == measure.kind)
    known = np.all(has, 0)
    if not known.any():
        return None
    a, b = ({name: column[known] for name, column in rows.items()} for rows in (a, b))
    found = _ranked(a, b, measure.measure) if isinstance(measure, Ranked) else _ratio(a, b, measure)
    if np.isnan(found.value):
        found = Refused(np.nan, np.nan, np.nan, found.num, "does not exist on these rows", num_groups=found.num_groups)
    parts = set(a[PART])
    return replace(found, part=parts.pop() if len(parts) == 1 else None)


def _ranked(a: Columns, b: Columns, measure: Callable[[Columns, np.ndarray | None], np.ndarray]) -> Metric:
    return measured(lambda weights: measure(b, weights) - measure(a, weights), len(a[GROUP]), groups=a[GROUP])


def _ratio(a: Columns, b: Columns, measure: Ratio) -> Metric:
    columns, groups = [*_sums(a, measure), *_sums(b, measure)], a[GROUP]
    value, samples = (
        measure.scale * (sums[2] / sums[3] - sums[0] / sums[1])
        for sums in (np.sum(columns, 1), resample(columns, 0, groups))
    )
    return interval(value, samples, len(groups), len(np.unique(groups)))


def _sums(rows: Columns, measure: Ratio) -> tuple[np.ndarray, np.ndarray]:
    """The column of a measure, and its counts."""
    total = rows[measure.total].astype(np.float64)
    return total, np.ones(len(total)) if measure.num is None else rows[measure.num].astype(np.float64)
