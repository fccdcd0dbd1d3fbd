"""Metrics of `unpad eval` with confidence intervals, and results of evaluations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from rich.cells import cell_len

from unpad.terminal.table import columns, number_of, wrapped

if TYPE_CHECKING:
    from unpad.evaluation.rows import ExampleRows

NUM_RESAMPLES = 1000
TAILS = (2.5, 97.5)  # percentiles that bound 95 %
FEW_GROUPS = 4
MAX_NAME = 40  # cells of a terminal; a letter of Chinese takes two


@dataclass(frozen=True)
class Metric:
    """A measured value, its 95 % confidence interval, and its number of documents, images or replies.

    Args:
        num_groups: independent units of these, such as document groups or pictures, over which the interval is taken;
            None where each is one.
        part: part of the data that was measured: train, valid, test, or the file of new data; None if unknown.
        best_of: number of evaluations on this part from which the best weights were selected; None otherwise.
    """

    value: float
    low: float
    high: float
    num: int
    num_groups: int | None = field(default=None, kw_only=True)
    part: str | None = field(default=None, kw_only=True)
    best_of: int | None = field(default=None, kw_only=True)

    def to_json(self) -> dict[str, float | int | str | None]:
        """Fields by name."""
        return dict(vars(self))


@dataclass(frozen=True)
class Extremes(Metric):
    """A mean, with the least and the most value in place of an interval."""


@dataclass(frozen=True)
class Refused(Metric):
    """A metric that the data does not allow, with the reason; its numbers are nan."""

    reason: str

    def to_json(self) -> dict[str, float | int | str | None]:
        """Fields by name; the numbers are null."""
        return {**vars(self), "value": None, "low": None, "high": None}


@dataclass(frozen=True)
class OneSided(Metric):
    """A metric with one bound of its interval unknown (nan), and the reason."""

    reason: str

    def to_json(self) -> dict[str, float | int | str | None]:
        """Fields by name; the unknown bound is null."""
        bounds = {
            name: None if math.isnan(bound) else bound for name, bound in (("low", self.low), ("high", self.high))
        }
        return {**vars(self), **bounds}


@dataclass(frozen=True)
class NoInterval(OneSided):
    """A metric without an interval (both bounds nan), and the reason: resamples of one group, or of groups that are all
    equal, show no spread."""


ONE_GROUP, EQUAL_GROUPS = "no interval: one group", "no interval: the same in every group"


# Remarks of `check_new` of a family on new data, beyond what `data.lines()` has: as lines, and by name for programs.
NewFacts = tuple[list[str], dict[str, object]]


@dataclass(frozen=True)
class Evaluation:
    """Result of `evaluate` of a family.

    Args:
        lines: examples, as text.
        metrics: those of the part that was measured have no `part`, which `evaluate_run` fills in.
        drawn: `evaluation.json` for the run's page; None leaves the run as it is.
        rows: makes the rows that were measured, when they are asked for; None for a family without them.
    """

    metrics: dict[str, Metric]
    lines: list[str]
    drawn: dict[str, object] | None = None
    rows: Callable[[], ExampleRows] | None = None


@dataclass(frozen=True)
class HeldOut:
    """One evaluation of a model in training.

    Args:
        loss: mean per target, which training minimizes; decides which weights are best.
        values: logged measures, `loss` among them.
        num_targets: number of targets.
        refused: measures that the data does not allow -> the reason.
    """

    loss: float
    values: dict[str, float]
    num_targets: int
    refused: dict[str, str] = field(default_factory=dict)


def metric_lines(metrics: dict[str, Metric]) -> list[str]:
    """Lay out metrics as a table of a line each. Columns fit names of up to MAX_NAME cells, or half of a terminal; a
    longer name has a line to itself. A number that does not exist, such as a rank measure of one class, is shown as
    "-", with the reason.

    Where the lines are too wide, what most metrics are of stands once, below the table.
    """
    wide = columns()
    longest = min(MAX_NAME, wide // 2)
    width = max((cell_len(name) for name in metrics if cell_len(name) <= longest), default=0)
    units, below = {name: _units(metric, metric.part) for name, metric in metrics.items()}, list[str]()
    rows = _rows(metrics, units, width)
    if any(cell_len(f"{start}   {end}") > wide for start, end in rows if end):
        common, number = Counter(units.values()).most_common(1)[0]
        part = next(metric.part for name, metric in metrics.items() if units[name] == common)
        units = {
            name: "" if units[name] == common else _units(metric, None if metric.part == part else metric.part)
            for name, metric in metrics.items()
        }
        rows = _rows(metrics, units, width)
        below = wrapped(common if number == len(metrics) else f"{common}, unless the line says otherwise", wide)
    indent = min(width + 2, wide // 2)
    table = list[str]()
    for start, end in rows:  # a reason may still be too long
        line = f"{start}   {end}".rstrip()
        parts = [" " * indent + part for part in wrapped(end, wide - indent)] if end else []
        table += [line] if cell_len(line) <= wide else [start, *parts]
    if any(metric.num_groups is not None and 1 < metric.num_groups < FEW_GROUPS for metric in metrics.values()):
        below += wrapped(f"an interval over fewer than {FEW_GROUPS} groups is too narrow; hold out more of them", wide)
    best = next((metric for metric in metrics.values() if metric.best_of), None)
    if best is not None:
        checks = number_of(best.best_of or 0, "checks")
        below += wrapped(
            f"{best.part} chose the weights: its figures are the best of {checks} of the same rows, and those of a "
            "test part would be a little worse",
            wide,
        )
    return table + below


def _units(metric: Metric, part: str | None) -> str:
    """Number of rows that a metric is of, their part, and the number of groups."""
    groups = f", {metric.num_groups} groups" if metric.num_groups not in (None, 1) else ""
    return f"of {metric.num} {part or ''}".rstrip() + (", 1 group" if metric.num_groups == 1 else groups)


def _rows(metrics: dict[str, Metric], units: dict[str, str], width: int) -> list[tuple[str, str]]:
    """Name, value and note of each metric as a table; a name wider than `width` cells has a line of its own."""
    rows = []
    for name, metric in metrics.items():
        fits = cell_len(name) <= width
        rows += [] if fits else [(name, "")]
        start = name + " " * (width - cell_len(name)) if fits else " " * width
        value, low, high = (
            "-" if math.isnan(number) else f"{number:.4f}" for number in (metric.value, metric.low, metric.high)
        )
        bounds = f"least {low}, most {high}" if isinstance(metric, Extremes) else f"{low} to {high}"
        if isinstance(metric, Refused | NoInterval):
            bounds = metric.reason
        elif isinstance(metric, OneSided):
            bounds = f"{bounds}: {metric.reason}"
        rows.append((f"{start}  {value:>10}", f"{bounds}   {units[name]}".rstrip()))
    return rows


def resample(columns: Sequence[np.ndarray], seed: int, groups: np.ndarray | None = None) -> np.ndarray:
    """Sums of each column over resamples of groups of its items, drawn with replacement and together.

    Args:
        columns: arrays (num,) of numbers that belong to the same items.
        groups: (num,) numbers of the groups; items of one group are drawn together, as they are not independent. None:
            every item is a group of its own.

    Returns:
        (len(columns), NUM_RESAMPLES) float64.
    """
    values = np.stack(columns).astype(np.float64)  # (columns, num)
    if groups is not None and len(groups):
        _, group = np.unique(groups, return_inverse=True)
        values = np.stack([np.bincount(group, column) for column in values])  # (columns, groups)
    # One resample at a time: all together would not fit for many items.
    sums = [values @ times for times in draws(values.shape[1], seed)]
    return np.stack(sums, 1) if sums else np.zeros((len(columns), NUM_RESAMPLES))


def draws(num: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the count of each of `num` items in every resample, (num,) int64; equal arguments give equal draws."""
    rng = np.random.default_rng(seed)
    for _ in range(NUM_RESAMPLES if num else 0):
        yield np.bincount(rng.integers(0, num, num), minlength=num)


def interval(value: float, samples: np.ndarray, num: int, num_groups: int | None = None) -> Metric:
    """A value with the 95 % percentile interval of its resamples (Efron 1979); `NoInterval` if they show no spread.

    Args:
        num_groups: number of groups that were drawn; None where each of the `num` is one.
    """
    low, high = (float(bound) for bound in np.percentile(samples, TAILS))
    return bounded(Metric(float(value), low, high, num, num_groups=None if num_groups == num else num_groups))


def bounded(metric: Metric) -> Metric:
    """A metric as it is, or `NoInterval` where resamples of its groups could not differ or did not."""
    num_groups = metric.num if metric.num_groups is None else metric.num_groups
    if math.isnan(metric.value) or (num_groups != 1 and metric.low != metric.high):
        return metric
    reason = ONE_GROUP if num_groups == 1 else EQUAL_GROUPS
    return NoInterval(metric.value, math.nan, math.nan, metric.num, reason, num_groups=metric.num_groups)


def refused(metric: Metric, reason: str) -> Refused:
    """A metric that does not exist, of the same rows."""
    return Refused(math.nan, math.nan, math.nan, metric.num, reason, num_groups=metric.num_groups)


def mean_of(values: np.ndarray, groups: np.ndarray | None = None, seed: int = 0, share: bool = False) -> Metric:
    """The mean of values (num,) with its 95 % interval over groups.

    Args:
        groups: (num,) as in `resample`.
        share: whether the values lie in 0 to 1, as of right answers. If all of them are 0 or all 1, resamples show no
            spread, and the interval is the exact one.
    """
    num_groups = len(values if groups is None else np.unique(groups))
    sums, counts = resample([values, np.ones(len(values))], seed, groups)
    metric = interval(values.mean(), sums / counts, len(values), num_groups)
    return exact_share(metric, num_groups) if share else metric


def ratio_of(total: np.ndarray, num: np.ndarray, groups: np.ndarray | None = None, scale: float = 1.0) -> Metric:
    """The sum of one column over that of another, (num_rows,) each, with its 95 % interval over groups.

    Args:
        groups: (num_rows,) as in `resample`.
        scale: of the result.
    """
    sums = resample([total, num], 0, groups)
    num_groups = len(total if groups is None else np.unique(groups))
    samples = scale * sums[0] / np.maximum(sums[1], 1)
    return interval(scale * total.sum() / max(num.sum(), 1), samples, len(total), num_groups)


def exact_share(metric: Metric, num_groups: int) -> Metric:
    """A share with the exact 95 % interval if it is 0 or 1, otherwise as it is.

    Clopper and Pearson (1934), "The use of confidence or fiducial limits illustrated in the case of the binomial": for
    n of n the lower limit is the share p with p^n = 2.5 %.

    Args:
        num_groups: independent units; within one, answers may depend on each other.
    """
    if metric.value not in (0.0, 1.0) or not num_groups:
        return metric
    limit = float((TAILS[0] / 100) ** (1 / num_groups))
    low, high = (limit, 1.0) if metric.value else (0.0, 1 - limit)
    return Metric(metric.value, low, high, metric.num, num_groups=metric.num_groups)
