"""How often 95 % intervals hold the truth: those of `unpad eval`, and percentiles of the same bootstrap.

python benchmarks/coverage.py                  # the tables of coverage.md, 15 minutes on one core
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from unpad.evaluation import binary
from unpad.evaluation.metrics import TAILS, Metric, measured, ratio

PEOPLE, GROUPS = (20, 35, 60, 300), (5, 8, 15, 30)
LEAST, MOST = 0.93, 0.97  # of a share of 0.95 in as many simulations as there are
MANY = 100_000  # rows from which the truth is computed

Rows = tuple[np.ndarray, ...]  # (num,) each
Measure = Callable[..., np.ndarray]  # of rows, and of weights (..., num)


class Case(NamedTuple):
    """A measure of simulated rows.

    Args:
        draw: draws rows of so many people or groups; the last column is the group of each.
        how: arguments of `metrics.measured`.
        truth: None computes it from many rows.
        finish: of rows, gives the metric its exact limits.
    """

    name: str
    draw: Callable[[int, np.random.Generator], Rows]
    measure: Measure
    how: dict[str, bool]
    truth: float | None = None
    finish: Callable[[Metric, Rows], Metric] = lambda metric, rows: metric


def patients(num: int, rng: np.random.Generator) -> Rows:
    """Labels, their right probabilities, and every patient a group."""
    p = 1 / (1 + np.exp(-rng.normal(-0.8, 1.6, num)))
    return (rng.random(num) < p).astype(np.int64), p, np.arange(num)


def censored(num: int, rng: np.random.Generator) -> Rows:
    """Labels by day 1, their right probabilities, days to the end of observation, if the label is known; a third is
    censored before."""
    rate = np.exp(rng.normal(-0.6, 1.4, num))
    days, stop = rng.exponential(1 / rate), rng.uniform(0, 2.2, num)
    came = (days <= 1) & (days <= stop)
    return came.astype(np.int64), 1 - np.exp(-rate), np.minimum(days, stop), came | (stop >= 1), np.arange(num)


def classes(num: int, rng: np.random.Generator) -> Rows:
    """Labels of three classes, and the probabilities of each."""
    p = rng.dirichlet([1.2, 0.8, 0.5], num)
    return (rng.random((num, 1)) >= np.cumsum(p, 1)[:, :2]).sum(1), p, np.arange(num)


def shares(num_groups: int, rng: np.random.Generator) -> Rows:
    """Values 0 or 1, 20 of a group, half of their variance between groups."""
    right = rng.random((num_groups, 20)) < rng.beta(0.7, 0.3, (num_groups, 1))
    return right.ravel().astype(np.float64), np.repeat(np.arange(num_groups), 20)


def documents(num_groups: int, rng: np.random.Generator) -> Rows:
    """Nats and tokens of documents, 1 to 9 of a group, a third of whose variance is between groups."""
    groups = np.repeat(np.arange(num_groups), rng.integers(1, 10, num_groups))
    tokens = rng.integers(20, 400, len(groups)).astype(np.float64)
    per_token = 3 * np.exp(0.2 * rng.normal(size=num_groups)[groups] + 0.28 * rng.normal(size=len(groups)))
    return per_token * tokens, tokens, groups


def weighed(
    measure: Measure, came: np.ndarray, p: np.ndarray, days: np.ndarray, known: np.ndarray, w: np.ndarray
) -> np.ndarray:
    return measure(came, p, binary.uncensored_weights(days, known, w))


def nats(labels: np.ndarray, p: np.ndarray, w: np.ndarray) -> np.ndarray:
    return ratio(-np.log(np.where(labels > 0, p, 1 - p)), None, w)


def gained(labels: np.ndarray, p: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Brier score of less extreme probabilities less that of the right ones, a difference of two runs."""
    gain: np.ndarray = binary.brier(labels, 0.5 * p + 0.15, w) - binary.brier(labels, p, w)
    return gain


def share_of(labels: np.ndarray, p: np.ndarray, w: np.ndarray) -> np.ndarray:
    return ratio(labels, None, w)


def concordance(came: np.ndarray, p: np.ndarray, days: np.ndarray, known: np.ndarray, w: np.ndarray) -> np.ndarray:
    return binary.concordance(p, days, came > 0, w)


def in_pairs(metric: Metric, rows: Rows) -> Metric:
    labels, known = rows[0], rows[3] if len(rows) > 2 else slice(None)
    return binary.exact_auroc(metric, labels[known])


SHARE, POSITIVE, PLAIN = {"share": True}, {"positive": True}, dict[str, bool]()
OF_PEOPLE = (
    Case("AUROC", patients, binary.auroc, SHARE, finish=in_pairs),
    Case("average precision", patients, binary.average_precision, SHARE),
    Case("prevalence", patients, share_of, SHARE),
    Case("Brier score", patients, binary.brier, SHARE),
    Case("accuracy", patients, binary.accuracy, SHARE),
    Case("loss", patients, nats, POSITIVE),
    Case("calibration slope", patients, binary.calibration_slope, PLAIN, 1.0),
    Case("calibration intercept", patients, binary.calibration_intercept, PLAIN, 0.0),
    Case("difference of Brier scores", patients, gained, PLAIN),
    Case("AUROC, mean of 3 classes", classes, binary.mean_auroc, SHARE),
    Case("Brier score, 3 classes", classes, binary.class_brier, POSITIVE),
    Case("AUROC, 1/3 censored", censored, partial(weighed, binary.auroc), SHARE, finish=in_pairs),
    Case("Brier score, 1/3 censored", censored, partial(weighed, binary.brier), SHARE),
    Case("concordance, 1/3 censored", censored, concordance, SHARE),
    Case("prevalence, 1/3 censored", censored, partial(weighed, share_of), SHARE),
    Case("intercept, 1/3 censored", censored, partial(weighed, binary.calibration_intercept), PLAIN, 0.0),
)
OF_GROUPS = (
    Case("share of rows", shares, lambda right, w: ratio(right, None, w), SHARE, 0.7),
    Case("loss per token of documents", documents, ratio, POSITIVE),
    Case("difference of losses", documents, lambda nats, tokens, w: ratio(nats - 3 * tokens, tokens, w), PLAIN),
)


def covered(case: Case, num: int, times: int) -> tuple[float, float]:
    """Share of `times` simulations whose interval holds the truth: ours, and percentiles of the same bootstrap. One
    without an interval, as of equal outcomes, does not count."""
    truth = case.truth
    if truth is None:
        *rows, groups = case.draw(MANY, np.random.default_rng(0))
        truth = float(case.measure(*rows, np.ones(len(groups))))
    held: tuple[list[bool], list[bool]] = [], []
    for seed in range(times):
        *rows, groups = case.draw(num, np.random.default_rng([seed, num]))
        seen = list[np.ndarray]()

        def of_rows(weights: np.ndarray, rows: Rows = tuple(rows), seen: list[np.ndarray] = seen) -> np.ndarray:
            seen.append(np.atleast_1d(case.measure(*rows, weights)))
            return seen[-1] if weights.ndim > 1 else seen.pop()[0]

        metric = case.finish(measured(of_rows, len(groups), groups, counted=None, **case.how), tuple(rows))
        samples = np.concatenate(seen)
        samples = samples[np.isfinite(samples)]
        low, high = np.percentile(samples, TAILS) if samples.size else (np.nan, np.nan)
        for place, (least, most) in enumerate(((metric.low, metric.high), (low, high))):
            if np.isfinite(least + most):
                held[place].append(bool(least <= truth <= most))
    return float(np.mean(held[0])), float(np.mean(held[1]))


def table(cases: tuple[Case, ...], sizes: tuple[int, ...], times: int) -> Iterator[str]:
    """Lines of a table; a share outside of 0.93 to 0.97 is bold."""
    yield f"| measure | {' | '.join(map(str, sizes))} |"
    yield "|---" * (len(sizes) + 1) + "|"
    for case in cases:
        cells = []
        for num in sizes:
            ours, percentiles = covered(case, num, times)
            cells.append(
                f"{ours:.3f} ({percentiles:.3f})" if LEAST <= ours <= MOST else f"**{ours:.3f}** ({percentiles:.3f})"
            )
        yield f"| {case.name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=500, help="simulations of each cell")
    times = parser.parse_args().times
    for cases, sizes in ((OF_GROUPS, GROUPS), (OF_PEOPLE, PEOPLE)):
        for line in table(cases, sizes, times):
            print(line, flush=True)
        print()


if __name__ == "__main__":
    main()
