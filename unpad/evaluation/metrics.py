"""Metrics of `unpad eval` with confidence intervals, and results of evaluations."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
from rich.cells import cell_len

from unpad.terminal.table import columns, number_of, wrapped

NUM_RESAMPLES = 1000
TAILS = (2.5, 97.5)  # percentiles that bound 95 %
BLOCK_CELLS = 1 << 21  # resamples times rows that are looked at together: 16 MiB an array
ALIKE = 1e-12  # bounds that differ by less, relatively, differ by rounding
MAX_NAME = 40  # cells of a terminal; a letter of Chinese takes two

TOO_GOOD, FEWEST_JUDGED = 0.99, 30  # value and number of rows
# Lower limits; that of a perfect AUROC of 17 rows with the outcome is 0.805.
TOO_GOOD_LOW = {"auroc": 0.8, "accuracy": 0.95}

EXTREMES = "least and most"
ONE_GROUP, EQUAL_GROUPS = "no interval: one group", "no interval: the same in every group"


@dataclass(frozen=True)
class Metric:
    """A measured value, its 95 % confidence interval, and its number of documents, images or replies.

    Args:
        value, low, high: nan where the data does not allow them.
        note: why one of these is missing; EXTREMES where the bounds are the least and the most value of a row.
        num_groups: independent units of these, such as document groups or pictures, over which the interval is taken;
            None where each is one.
        num_censored: how many more were censored too early to be measured, for whom the others stand; None: nobody.
        part: part of the data that was measured: train, valid, test, or the file of new data; None if unknown.
        best_of: number of evaluations on this part from which the best weights were selected; None otherwise.
    """

    value: float
    low: float
    high: float
    num: int
    note: str = ""
    num_groups: int | None = field(default=None, kw_only=True)
    num_censored: int | None = field(default=None, kw_only=True)
    part: str | None = field(default=None, kw_only=True)
    best_of: int | None = field(default=None, kw_only=True)

    def to_json(self) -> dict[str, float | int | str | None]:
        """Fields by name; a missing number is null, with the note as its `reason`."""
        fields = {**vars(self)}
        note = fields.pop("note")
        missing = [name for name in ("value", "low", "high") if math.isnan(fields[name])]
        return fields | dict.fromkeys(missing) | ({"reason": note} if note and missing else {})

    def bounds(self) -> str:
        """The interval in words, and why a part of it is missing."""
        low, high = written(self.low), written(self.high)
        if self.note == EXTREMES:
            return f"least {low}, most {high}"
        if self.note and math.isnan(self.low) and math.isnan(self.high):
            return self.note
        return f"{low} to {high}" + (f": {self.note}" if self.note else "")

    def mapped(self, function: Callable[[float], float]) -> "Metric":
        """An increasing function of a metric."""
        return replace(self, value=function(self.value), low=function(self.low), high=function(self.high))


def refused(num: int, why: str, num_groups: int | None = None) -> Metric:
    """A metric that the data does not allow."""
    return Metric(math.nan, math.nan, math.nan, num, why, num_groups=num_groups)


def extremes(values: np.ndarray) -> Metric:
    """The mean of values (num,), with the least and the most in place of an interval."""
    return Metric(float(values.mean()), float(values.min()), float(values.max()), len(values), EXTREMES)


def too_good(metrics: Mapping[str, Metric]) -> str:
    """What is to be said of an AUROC or accuracy that is seldom reached without a leak; "" for other figures.

    Args:
        metrics: that of `commonest_class` among them where guessing reaches much; those of pairs, with a `margin`, are
            passed over.
    """
    guess = metrics.get("commonest_class")
    for name in ("auroc", "accuracy") if "margin" not in metrics else ():
        metric = metrics.get(name)
        if metric is None or (name == "accuracy" and guess is not None and guess.value >= TOO_GOOD_LOW[name]):
            continue
        if metric.num >= FEWEST_JUDGED and metric.value >= TOO_GOOD and metric.low > TOO_GOOD_LOW[name]:
            return f"{name} {written(metric.value)} is too good to be trusted: look for a leak"
    return ""


def perplexity(loss: Metric) -> Metric:
    """exp of a loss in nats; infinite where no float holds it."""
    return loss.mapped(lambda nats: math.inf if nats >= 700 else math.exp(nats))


def written(number: float | None) -> str:
    """A number of a metric as tables have it; "-" for a missing one."""
    return "-" if number is None or math.isnan(number) else f"{number:.4f}"


# Remarks of `check_new` of a family on new data, beyond what `data.lines()` has: as lines, and by name for programs.
NewFacts = tuple[list[str], dict[str, object]]


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
    best = next((metric for metric in metrics.values() if metric.best_of), None)
    if best is not None:
        checks = number_of(best.best_of or 0, "checks")
        what = f"{best.part} chose the weights: its figures are the best of {checks} of the same rows"
        below += wrapped(f"{what}, and those of a test part would be a little worse", wide)
    return table + below


def _units(metric: Metric, part: str | None) -> str:
    """Number of rows that a metric is of, their part, and the number of groups."""
    groups = f", {metric.num_groups} groups" if metric.num_groups not in (None, 1) else ""
    more = f", {metric.num_censored} more censored" if metric.num_censored else ""
    return f"of {metric.num} {part or ''}".rstrip() + (", 1 group" if metric.num_groups == 1 else groups) + more


def _rows(metrics: dict[str, Metric], units: dict[str, str], width: int) -> list[tuple[str, str]]:
    """Name, value and note of each metric as a table; a name wider than `width` cells has a line of its own."""
    rows = []
    for name, metric in metrics.items():
        fits = cell_len(name) <= width
        rows += [] if fits else [(name, "")]
        start = name + " " * (width - cell_len(name)) if fits else " " * width
        rows.append((f"{start}  {written(metric.value):>10}", f"{metric.bounds()}   {units[name]}".rstrip()))
    return rows


# --------------------------------------------------------------------------- intervals

Measure = Callable[[np.ndarray], np.ndarray]  # from the number of times that each row counts, (..., num), to (...)


def draws(num: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Yield the count of each of `num` items in every resample, (num,) int64; equal arguments give equal draws."""
    rng = np.random.default_rng(seed)
    for _ in range(NUM_RESAMPLES if num else 0):
        yield np.bincount(rng.integers(0, num, num), minlength=num)


def bootstrap(measure: Measure, num: int, groups: np.ndarray | None = None) -> np.ndarray:
    """A measure over resamples of `num` rows, (NUM_RESAMPLES,) float64; equal arguments draw the same rows.

    Args:
        groups: (num,) equal for rows that are drawn together, as they are not independent; None: each is drawn alone.
    """
    place = np.arange(num) if groups is None else np.unique(groups, return_inverse=True)[1]
    each, size = draws(int(place.max(initial=-1)) + 1), max(1, BLOCK_CELLS // max(num, 1))
    values = [np.zeros(0)]
    while block := [times[place] for times in islice(each, size)]:
        values.append(measure(np.stack(block).astype(np.float64)))
    return np.concatenate(values)


def measured(
    measure: Measure,
    num: int,
    groups: np.ndarray | None = None,
    *,
    counted: np.ndarray | None = None,
    positive: bool = False,
    share: bool = False,
) -> Metric:
    """The value of a measure with its 95 % interval over groups of rows: Student's t of as many groups, by the standard
    error of the bootstrap (Efron 1979).

    Tokens of one document and documents of one group are not independent, nor are the examples of one patient. Left out
    are resamples in which the measure does not exist because a class is missing. There is no interval where resamples
    could not differ, or did not. Percentiles of the bootstrap in its place are too narrow for few groups (Hesterberg
    2015, "What teachers should know about the bootstrap"); benchmarks/coverage.md has what either covers.

    Args:
        groups: as in `bootstrap`.
        counted: (num,) bool, rows that the measure looks at; None: all.
        positive: the measure is above 0, and its interval symmetric on the scale of its logarithm.
        share: the measure is from 0 to 1, and its interval symmetric on the scale of its logit; it is exact, as of a
            mean of as many numbers, where the measure is 0 or 1.
    """
    samples = bootstrap(measure, num, groups)
    samples = samples[np.isfinite(samples)]
    value = float(measure(np.ones(num)))
    units = np.arange(num) if groups is None else groups
    units = units if counted is None else units[counted]
    num, num_groups = len(units), len(np.unique(units))
    low = high = math.nan
    if samples.size and num_groups > 1:
        error = float(samples.std()) * math.sqrt(num_groups / (num_groups - 1))
        low, high = _bounds(value, student(num_groups - 1) * error, positive, share)
    metric = Metric(value, low, high, num, num_groups=None if num_groups == num else num_groups)
    if not math.isnan(value) and (num_groups == 1 or math.isclose(low, high, rel_tol=ALIKE)):
        note = ONE_GROUP if num_groups == 1 else EQUAL_GROUPS
        metric = replace(metric, low=math.nan, high=math.nan, note=note)
    return exact_share(metric, num_groups) if share else metric


def _bounds(value: float, reach: float, positive: bool, share: bool) -> tuple[float, float]:
    """A value less and plus its reach, on a scale on which that leaves it `positive`, or a `share` below 1."""
    if share and 0 < value < 1:
        centre, reach = math.log(value / (1 - value)), reach / (value * (1 - value))
        low, high = ((1 + math.tanh(end / 2)) / 2 for end in (centre - reach, centre + reach))
        return low, high
    if positive and value > 0:
        factor = math.exp(min(reach / value, 700))
        return value / factor, value * factor
    return value - reach, value + reach


def student(degrees: int) -> float:
    """The 97.5 % quantile of Student's t; of one degree of freedom 11 % too small, of two 1 %.

    Abramowitz and Stegun (1964), "Handbook of mathematical functions", 26.7.5, at the quantile 1.96 of the normal.
    """
    return float(np.polyval([1.5904, 2.5559, 2.8225, 2.3723, 1.9600], 1 / degrees))


def ratio(total: np.ndarray, num: np.ndarray | None, weights: np.ndarray | None = None) -> np.ndarray:
    """The weighted sum of one column over that of another, (...); nan where the latter is 0.

    Args:
        total: (num_rows,).
        num: (num_rows,); None counts each row once.
        weights: (..., num_rows); ones by default.
    """
    total = np.asarray(total, np.float64)
    weights = np.ones(len(total)) if weights is None else weights
    return divided(weights @ total, weights.sum(-1) if num is None else weights @ num)


def divided(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """A quotient, without a warning where it does not exist."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient: np.ndarray = np.divide(above, below)
    return quotient


def mean_of(values: np.ndarray, groups: np.ndarray | None = None, share: bool = False) -> Metric:
    """The mean of values (num,) with its 95 % interval; further arguments as in `measured`."""
    return ratio_of(values, None, groups, share=share)


def ratio_of(
    total: np.ndarray,
    num: np.ndarray | None,
    groups: np.ndarray | None = None,
    *,
    scale: float = 1.0,
    share: bool = False,
) -> Metric:
    """The sum of one column over that of another, (num_rows,) each, times `scale`, with its 95 % interval; further
    arguments as in `measured`."""
    positive = bool(np.all(total >= 0))
    return measured(lambda w: scale * ratio(total, num, w), len(total), groups, positive=positive, share=share)


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
    return replace(metric, low=low, high=high, note="")
