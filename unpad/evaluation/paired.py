"""`unpad compare --rows`: differences between runs on the held-out examples that both have."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unpad.data.family import family_name
from unpad.errors import RecipeError, SourceError
from unpad.evaluation.metrics import Metric, measured, metric_lines, refused, student
from unpad.evaluation.rows import GROUP, ID, KIND, LANDMARK, PART, WHERE, Columns, ExampleRows, Ratio, objects
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
        differences: of every metric that both have, that of the second run less that of the first, with intervals over
            rows; of several seeds on a side their means.
        of_seeds: the same with intervals over seeds, if either side has several.
        left_out: metrics per target of runs that count other targets in these rows, as with another tokenizer.
    """

    first: str
    second: str
    common: int
    only_first: int
    only_second: int
    differences: dict[str, Metric]
    of_seeds: dict[str, Metric]
    left_out: tuple[str, ...]

    def lines(self) -> list[str]:
        """The differences as a table, below what they are of."""
        head = f"{self.second} less {self.first}, on {number_of(self.common, 'rows')} that both hold out"
        both = ((self.first, self.only_first), (self.second, self.only_second))
        alone = [f"{number_of(number, 'rows')} of {name} alone" for name, number in both if number]
        if self.left_out:
            alone.append(f"they count other targets, so that these cannot be compared: {', '.join(self.left_out)}")
        lines = [*wrapped("; ".join([head, *alone])), *metric_lines(self.differences)]
        if self.of_seeds:
            return [*lines, "intervals are over rows; over seeds they are:", *metric_lines(self.of_seeds)]
        what = "intervals are over rows, of these trained runs: other seeds may change the sign"
        return [*lines, *wrapped(f"{what}; name two or more seeds of each for intervals over seeds")]

    def to_json(self) -> dict[str, Any]:
        named = {"differences": self.differences, "of_seeds": self.of_seeds}
        tables = {key: {name: one.to_json() for name, one in metrics.items()} for key, metrics in named.items()}
        return {**vars(self), **tables}


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
    """Measure runs as `unpad eval` does, and compare every further one with the first; nothing is written. Runs whose
    recipes differ in the seed alone are one side.

    Args:
        names: of the runs.

    Raises:
        RecipeError: the runs are of several families.
        SourceError: the data of a run cannot be used, or two runs hold out no row in common, or have other labels.
    """
    check_families(runs)
    sides: dict[str, list[tuple[str, ExampleRows]]] = {}
    for run, name in zip(runs, names, strict=True):
        recipe = run_recipe(find_run(run)).model_dump(mode="json")
        recipe["train"]["seed"] = None
        with progress(f"evaluating {name}"):
            scored = score(run)
            rows = rows_of(scored.evaluation, scored.data, scored.part)
        rows = rows.only(rows.columns[PART] == scored.part)  # without questions of the training part
        sides.setdefault(json.dumps(recipe, sort_keys=True), []).append((name, rows))
    first, *others = sides.values()
    if not others:  # of one recipe: every seed is a side
        first, *others = ([run] for run in first)
    return [paired(_named(first), _named(side), [run[1] for run in first], [run[1] for run in side]) for side in others]


def _named(runs: Sequence[tuple[str, ExampleRows]]) -> str:
    return runs[0][0] + (f" and {number_of(len(runs) - 1, 'other seeds')}" if len(runs) > 1 else "")


def paired(first: str, second: str, a: Sequence[ExampleRows], b: Sequence[ExampleRows]) -> Paired:
    """Compare the rows of runs that have the same id, landmark or place; several of one place are taken in order.

    Groups are those of the first run.

    Args:
        a, b: of a run, or of runs of several seeds.

    Raises:
        SourceError: the runs have no row in common, or other labels on one.
    """
    places = [{key: row for row, key in enumerate(_keys(rows))} for rows in (*a, *b)]
    common = [key for key in places[0] if all(key in rows for rows in places)]
    if not common:
        what = f"{first} and {second} hold out no row in common, by place or id and landmark"
        fix = "train both on the same files, under the same names, with the same data.holdout and train.seed"
        raise SourceError(what, where="--rows", fix=fix)
    runs = [rows.only(np.array([place[key] for key in common])) for rows, place in zip((*a, *b), places, strict=True)]
    for run in runs[1:]:
        _refuse_other_labels(first, second, runs[0].columns, run.columns)
    differences, of_seeds, left_out = dict[str, Metric](), dict[str, Metric](), list[str]()
    for name, measure in runs[0].measures.items():
        if any(name not in run.measures for run in runs):
            continue
        if isinstance(measure, Ratio) and any(_counts_differ(runs[0].columns, run.columns, measure) for run in runs):
            left_out.append(name)
        elif (found := _difference(runs, len(a), name)) is not None:
            differences[name] = found[0]
            of_seeds |= {} if found[1] is None else {name: found[1]}
    alone = len(places[0]) - len(common), len(places[len(a)]) - len(common)
    return Paired(first, second, len(common), *alone, differences, of_seeds, tuple(left_out))


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


def _difference(runs: Sequence[ExampleRows], num_first: int, name: str) -> tuple[Metric, Metric | None] | None:
    """The mean of a measure over the runs of the second side less that over the `num_first` ones of the first: with its
    95 % interval over groups of rows, drawn for all at once, and over seeds, if both sides have two; None where no row
    of all has it. Each run has a measure of its own, as names of classes are in it."""
    has = np.logical_and.reduce([run.measures[name].has(run.columns) for run in runs])
    if not has.any():
        return None
    runs = [run.only(has) for run in runs]

    def of_runs(weights: np.ndarray) -> np.ndarray:  # (..., num_runs)
        return np.stack([run.measures[name].of(run.columns, weights) for run in runs], -1)

    def difference(weights: np.ndarray) -> np.ndarray:
        values = of_runs(weights)
        return values[..., num_first:].mean(-1) - values[..., :num_first].mean(-1)

    groups, parts = runs[0].columns[GROUP], set(runs[0].columns[PART])
    part = parts.pop() if len(parts) == 1 else None
    metric = replace(measured(difference, len(groups), groups), part=part)
    if np.isnan(metric.value):
        return refused(metric.num, "the rows of both do not allow it", metric.num_groups), None
    sides = np.split(of_runs(np.ones(len(groups))), [num_first])
    if min(map(len, sides)) < 2:
        return metric, None
    error = float(np.sqrt(sum(side.var(ddof=1) / len(side) for side in sides)))
    reach = student(len(runs) - 2) * error
    return metric, Metric(metric.value, metric.value - reach, metric.value + reach, len(runs), part="runs")


def _counts_differ(a: Columns, b: Columns, measure: Ratio) -> bool:
    both = measure.has(a) & measure.has(b)
    return not np.array_equal(measure.counts(a)[both], measure.counts(b)[both])
