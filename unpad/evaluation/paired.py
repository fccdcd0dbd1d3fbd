"""`unpad compare --rows`: differences between runs on the held-out examples that both have."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unpad.data.family import family_name
from unpad.errors import RecipeError, SourceError
from unpad.evaluation.metrics import Metric, measured, metric_lines, refused
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
        left_out: metrics per target of runs that count other targets in these rows, as with another tokenizer.
    """

    first: str
    second: str
    common: int
    only_first: int
    only_second: int
    differences: dict[str, Metric]
    left_out: tuple[str, ...]

    def lines(self) -> list[str]:
        """The differences as a table, below what they are of."""
        head = f"{self.second} less {self.first}, on {number_of(self.common, 'rows')} that both hold out"
        both = ((self.first, self.only_first), (self.second, self.only_second))
        alone = [f"{number_of(number, 'rows')} of {name} alone" for name, number in both if number]
        if self.left_out:
            alone.append(f"they count other targets, so that these cannot be compared: {', '.join(self.left_out)}")
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
        named = ", ".join(f"{run} is of {family}" for run, family in families.items())
        what = f"rows of several families cannot be compared: {named}"
        raise RecipeError(what, where="--rows", fix="name runs of one family, or leave out --rows")


def compare_rows(runs: Sequence[str], names: Sequence[str]) -> list[Paired]:
    """Measure runs as `unpad eval` does, and compare every further one with the first; nothing is written.

    Args:
        names: of the runs.

    Raises:
        RecipeError: the runs are of several families.
        SourceError: the data of a run cannot be used, or two runs hold out no row in common, or have other labels.
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
        SourceError: the runs have no row in common, or other labels on one.
    """
    keys, others = _keys(a), {key: row for row, key in enumerate(_keys(b))}
    mine = [row for row, key in enumerate(keys) if key in others]
    if not mine:
        what = f"{first} and {second} hold out no row in common, by place or id and landmark"
        fix = "train both on the same files, under the same names, with the same data.holdout and train.seed"
        raise SourceError(what, where="--rows", fix=fix)
    theirs = [others[keys[row]] for row in mine]
    common = a.only(np.array(mine)).columns, b.only(np.array(theirs)).columns
    _refuse_other_labels(first, second, *common)
    differences, left_out = {}, list[str]()
    for name, measure in a.measures.items():
        if name not in b.measures:
            continue
        if isinstance(measure, Ratio) and _counts_differ(*common, measure):
            left_out.append(name)
        elif (found := _difference(*common, measure, b.measures[name])) is not None:
            differences[name] = found
    alone = len(keys) - len(mine), len(others) - len(mine)
    return Paired(first, second, len(mine), *alone, differences, tuple(left_out))


def _keys(rows: ExampleRows) -> list[tuple[str, str, int]]:
    """Kind, id (and landmark) or place of every row, and how many rows before it have the same."""
    names = rows.columns.get(ID)
    if names is None:  # one file may be named in several ways
        names = objects([os.path.realpath(where) for where in rows.columns[WHERE]])
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


def _refuse_other_labels(first: str, second: str, a: Columns, b: Columns) -> None:
    """Refuse rows of which both runs know a label, and not the same: they predict different outcomes."""
    if "label" in a and "label" in b:
        known = [(one, other) for one, other in zip(a["label"], b["label"], strict=True) if None not in (one, other)]
        num = sum(one != other for one, other in known)
        if num:
            what = f"{first} and {second} have different labels on {number_of(num, 'rows')} of {len(known):,}"
            fix = "compare runs of one outcome; 'unpad eval RUN --rows FILE' writes the rows of each"
            raise SourceError(what, where="--rows", fix=fix)


def _difference(a: Columns, b: Columns, of_a: Ratio | Ranked, of_b: Ratio | Ranked) -> Metric | None:
    """A measure of the second rows less that of the first, with its 95 % interval over groups of rows, drawn in pairs;
    None where no row of both has it. Either run has its own, as names of classes are in it."""
    both = of_a.has(a) & of_b.has(b)
    if not both.any():
        return None
    a, b = ({name: column[both] for name, column in rows.items()} for rows in (a, b))
    metric = measured(lambda weights: of_b.of(b, weights) - of_a.of(a, weights), len(a[GROUP]), a[GROUP])
    if np.isnan(metric.value):
        metric = refused(metric.num, "the rows of both do not allow it", metric.num_groups)
    parts = set(a[PART])
    return replace(metric, part=parts.pop() if len(parts) == 1 else None)


def _counts_differ(a: Columns, b: Columns, measure: Ratio) -> bool:
    both = measure.has(a) & measure.has(b)
    return not np.array_equal(measure.counts(a)[both], measure.counts(b)[both])
