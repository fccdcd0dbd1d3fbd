"""Measures of a predicted probability of an outcome: ranking, calibration, survival.

Every measure takes weights (..., num), the count of each patient, and returns (...): one value without weights, and
one per resample of the bootstrap, which reads a block of resamples in one pass over the sorted scores. All in fp64;
equal scores count as equal. A measure that does not exist, as AUROC among patients of one class, is not a number.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from unpad.evaluation.metrics import BLOCK_CELLS, NUM_RESAMPLES, TAILS, Metric, divided, exact_share, ratio, written

NUM_BINS = 10  # of equally many patients, in the calibration error and its picture
NEWTON_STEPS = 50
CLOSEST = 1e-12  # probabilities nearer to 0 or 1 count as this near, so that their logarithms exist


# --------------------------------------------------------------------------- ranking


def auroc(labels: np.ndarray, scores: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Probability that a patient with the outcome scores higher than one without; equal scores count half.

    Args:
        labels: (num,) 0 or 1.
        scores: (num,), higher where the outcome is likelier.
        weights: (..., num), each patient's number; ones by default.

    Hanley and McNeil (1982), "The meaning and use of the area under a receiver operating characteristic curve".
    """
    positives, negatives = _by_score(labels, scores, weights)
    below = np.cumsum(negatives, -1) - negatives
    return divided((positives * (below + negatives / 2)).sum(-1), positives.sum(-1) * negatives.sum(-1))


def mean_auroc(labels: np.ndarray, p: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Plain mean of the AUROC of every one of several classes against the rest; classes that nobody or everybody has
    are left out of it.

    Args:
        labels: (num,) int64.
        p: (num, num_classes).
        weights: as in `auroc`.

    Without such classes as `sklearn.metrics.roc_auc_score(multi_class="ovr", average="macro")`.
    """
    areas = np.stack([auroc(labels == place, p[:, place], weights) for place in range(p.shape[1])])
    exists = ~np.isnan(areas)
    return divided(np.where(exists, areas, 0).sum(0), exists.sum(0))


def exact_auroc(metric: Metric, labels: np.ndarray, groups: np.ndarray | None = None) -> Metric:
    """An AUROC with an exact 95 % limit if it is 0 or 1, where no resample differs from it; otherwise as it is.

    The patients of the smaller class and as many of the other form pairs that share no patient (the blocks of Hoeffding
    1963, "Probability inequalities for sums of bounded random variables", section 5). Pairs are independent, each is
    ranked right with the probability AUROC, and all of them were, so that the limit is Clopper and Pearson's for as
    many of as many. It is a cautious one, as every other pair was ranked right too. Obuchowski and Lieber (2002),
    "Confidence bounds when the estimated ROC area is 1.0", have closer ones for scores of known distributions.

    A patient of several examples, in `groups` as of `measured`, is in one pair, whichever of its labels that takes.
    """
    return exact_share(metric, num_pairs(labels, np.arange(len(labels)) if groups is None else groups))


def num_pairs(labels: np.ndarray, groups: np.ndarray) -> int:
    """Most pairs of a patient with the outcome and one without that share no patient; arguments as of `exact_auroc`."""
    came, not_come = np.unique(groups[labels > 0]), np.unique(groups[labels == 0])
    return min(len(came), len(not_come), len(np.union1d(came, not_come)) // 2)


def one_sided_precision(metric: Metric) -> Metric:
    """An average precision of 1 without the lower limit that resamples, all of them 1, cannot give."""
    if metric.value != 1:
        return metric
    why = "all with the outcome rank first, so that resamples give no lower limit"
    return replace(metric, low=np.nan, high=1.0, note=why)


def average_precision(labels: np.ndarray, scores: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Mean precision over the patients with the outcome, each at its own score as the threshold.

    Arguments as in `auroc`. Without interpolation, as `sklearn.metrics.average_precision_score`.
    """
    positives, negatives = _by_score(labels, scores, weights)
    hits = np.cumsum(positives[..., ::-1], -1)  # from the highest score down
    shown = hits + np.cumsum(negatives[..., ::-1], -1)
    precision = np.divide(hits, shown, out=np.zeros_like(hits), where=shown > 0)
    return divided((positives[..., ::-1] * precision).sum(-1), positives.sum(-1))


def roc_points(labels: np.ndarray, scores: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """The receiver operating characteristic, (num_points, 2): false and true positive rate, from (0, 0) to (1, 1);
    weights (num,)."""
    positives, negatives = _by_score(labels, scores, weights)
    rates = [np.cumsum(part[::-1]) / part.sum() for part in (negatives, positives)]
    return np.concatenate([np.zeros((1, 2)), np.stack(rates, 1)])


def precision_recall_points(labels: np.ndarray, scores: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Recall and precision at every threshold, (num_points, 2), from the highest score down; weights (num,)."""
    positives, negatives = _by_score(labels, scores, weights)
    hits = np.cumsum(positives[::-1])
    return np.stack([hits / hits[-1], hits / (hits + np.cumsum(negatives[::-1]))], 1)


def _by_score(labels: np.ndarray, scores: np.ndarray, weights: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Weight of the patients with and without the outcome at every score, lowest first, each (..., scores)."""
    order = np.argsort(scores, kind="stable")
    ordered = np.asarray(scores, np.float64)[order]
    first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(ordered)])
    weights = (np.ones(len(order)) if weights is None else weights)[..., order]
    mine = np.asarray(labels, np.float64)[order]
    return _sums(weights * mine, first), _sums(weights * (1 - mine), first)


def _sums(values: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Sums over runs along the last axis that begin at `first`."""
    return np.add.reduceat(values, first, -1) if first.size else values


# --------------------------------------------------------------------------- probabilities


def brier(labels: np.ndarray, p: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Mean squared distance between probability and outcome (Brier 1950); arguments as in `auroc`, p in 0 to 1."""
    return ratio((p - labels) ** 2, None, weights)


def class_brier(labels: np.ndarray, p: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Mean over patients of the sum over several classes of the squared distance of probability and class, 0 to 2, as
    Brier (1950) defines it; of two classes it is twice `brier`. Arguments as in `mean_auroc`."""
    return ratio(((p - np.eye(p.shape[1])[labels]) ** 2).sum(1), None, weights)


def accuracy(labels: np.ndarray, p: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Share of patients with a correctly predicted outcome; a probability of exactly a half predicts no outcome."""
    return ratio((p > 0.5) == (labels > 0), None, weights)


def calibration_bins(p: np.ndarray) -> np.ndarray:
    """The bin of every patient, (num,) int: `NUM_BINS` of equally many patients by probability, ties together."""
    edges = np.percentile(p, np.linspace(0, 100, NUM_BINS + 1)) if len(p) else np.zeros(NUM_BINS + 1)
    return np.searchsorted(edges[1:-1], p)


def calibration_error(labels: np.ndarray, p: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Mean distance between predicted and observed share over bins of patients; arguments as in `brier`.

    Naeini et al. (2015), "Obtaining well calibrated probabilities using Bayesian binning", with bins of equal size:
    where an outcome is rare, bins of equal width hold nearly everyone in the first.
    """
    return binned_error(labels, p, calibration_bins(p), weights)


def binned_error(labels: np.ndarray, p: np.ndarray, bins: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Mean distance between predicted and observed share over `NUM_BINS` bins, (num,) int."""
    member = bins[:, None] == np.arange(NUM_BINS)
    gap = member * np.asarray(p - labels, np.float64)[:, None]  # (num, bins)
    weights = np.ones(len(p)) if weights is None else weights
    return divided(np.abs(weights @ gap).sum(-1), weights.sum(-1))


def beside_perfect(
    metric: Metric, error: Callable[[np.ndarray], np.ndarray], p: np.ndarray, groups: np.ndarray
) -> Metric:
    """A calibration error beside the middle 95 % of those of perfect probabilities: chance makes every distance larger,
    so that no interval of the value would hold 0.

    Args:
        error: takes labels, (num,), as drawn from the probabilities.
        p: (num,) of the outcome, or (num, num_classes).
        groups: (num,) of rows that have one random number in common, as they are not independent.
    """
    place, rng = np.unique(groups, return_inverse=True)[1], np.random.default_rng(0)
    below = np.cumsum(p, 1)[:, :-1] if p.ndim > 1 else 1 - p[:, None]
    each = (rng.random(place.max() + 1)[place] for _ in range(NUM_RESAMPLES))
    low, high = np.percentile([error((chance[:, None] >= below).sum(1)) for chance in each], TAILS)
    return replace(metric, low=np.nan, high=np.nan, note=f"perfect probabilities: {written(low)} to {written(high)}")


def class_calibration_error(labels: np.ndarray, p: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Plain mean of the `calibration_error` of every one of several classes against the rest; arguments as in
    `mean_auroc`.

    Kull et al. (2019), "Beyond temperature scaling: obtaining well-calibrated multiclass probabilities with Dirichlet
    calibration", with bins of equal size.
    """
    return np.mean([calibration_error(labels == place, p[:, place], weights) for place in range(p.shape[1])], 0)


def calibration_intercept(labels: np.ndarray, p: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Shift of every logit at which the expected number of outcomes equals the observed one, (...).

    Calibration in the large: above 0 if the probabilities are too low on the whole, below 0 if they are too high.
    The slope stays 1. It does not exist where all outcomes are equal. Arguments as in `brier`.
    Steyerberg (2009), "Clinical prediction models", section 15.2.
    """
    x = _logit(p)
    shape = () if weights is None else weights.shape[:-1]
    w = np.ones((1, len(p))) if weights is None else weights.reshape(-1, len(p))
    intercept, came = np.zeros(len(w)), w @ labels
    exists = (came > 0) & (came < w.sum(1))
    for _ in range(NEWTON_STEPS):
        expected = 1 / (1 + np.exp(-(intercept[:, None] + x)))  # (draws, num)
        curve = (w * expected * (1 - expected)).sum(1)
        # Steps of at most 2: where nearly all probabilities are 0 or 1, the whole one would leap over the solution.
        change = np.clip(divided(came - (w * expected).sum(1), curve), -2, 2)
        change = np.where(exists, change, 0)
        intercept += change
        if not np.any(np.abs(change) > 1e-12):
            break
    intercept[~(exists & (np.abs(change) < 1e-8))] = np.nan
    return intercept.reshape(shape)


def calibration_slope(labels: np.ndarray, p: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Slope of the logistic regression of the outcome on the logit of its probability, (...).

    A slope below 1 means that the probabilities are too extreme. It does not exist where a threshold separates the
    classes, or where all probabilities are equal.
    Arguments as in `brier`. Cox (1958), "Two further applications of a model for binary regression".
    """
    x = _logit(p)
    shape = () if weights is None else weights.shape[:-1]
    w = np.ones((1, len(p))) if weights is None else weights.reshape(-1, len(p))
    with np.errstate(all="ignore"):  # what has no solution becomes not a number below
        odds = divided(w @ labels, w @ (1 - labels))
        line = np.stack([np.log(odds), np.zeros(len(w))], 1)  # (draws, 2) intercept and slope
        for _ in range(NEWTON_STEPS):
            expected = 1 / (1 + np.exp(-(line[:, :1] + line[:, 1:] * x)))  # (draws, num)
            slack = w * (labels - expected)
            curve = w * expected * (1 - expected)
            down = np.stack([slack.sum(1), slack @ x], 1)
            a, b, c = curve.sum(1), curve @ x, curve @ x**2
            det = a * c - b * b
            change = np.stack([c * down[:, 0] - b * down[:, 1], a * down[:, 1] - b * down[:, 0]], 1) / det[:, None]
            line += change
            if not np.any(np.abs(change) > 1e-12):
                break
        line[~((np.abs(change) < 1e-8).all(1) & (det > 1e-9 * a * c))] = np.nan
    return line[:, 1].reshape(shape)


def _logit(p: np.ndarray) -> np.ndarray:
    p = np.clip(p, CLOSEST, 1 - CLOSEST)
    return np.log(p) - np.log1p(-p)


# --------------------------------------------------------------------------- survival


def uncensored_weights(durations: np.ndarray, known: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Number of patients that each of known outcome by a horizon stands for, (..., num); 0 for the others.

    It is the inverse of the probability of not being censored until then, by Kaplan and Meier. Weighted so, the share
    with the outcome equals the estimate of Aalen and Johansen, and measures of a probability are, but for chance, those
    that all outcomes would give if censoring says nothing of the patient. Not a number where the last patient is
    censored, as nobody tells then what comes until the horizon.

    Args:
        durations: (num,) time to the outcome, to a competing event, or to the end of observation.
        known: (num,) bool; false for patients censored before the horizon.
        weights: (..., num), as in `auroc`; the measures take the result in their place.

    Graf et al. (1999), "Assessment and comparison of prognostic classification schemes for survival data"; Uno et al.
    (2007), "Evaluating prediction rules for t-year survivors with censored regression models"; with competing events
    Schoop et al. (2011), "Quantifying the predictive accuracy of time to event models in the presence of competing
    risks".
    """
    order = np.lexsort((~known, durations))  # at one time outcomes come before the ends of observation
    counts = (np.ones(len(order)) if weights is None else weights)[..., order]
    at_risk = np.cumsum(counts[..., ::-1], -1)[..., ::-1]
    leaves = np.divide(counts, at_risk, out=np.zeros_like(counts), where=(counts > 0) & ~known[order])
    stays = np.cumprod(1 - leaves, -1)
    found = np.empty_like(counts)
    found[..., order] = np.divide(counts, stays, out=np.zeros_like(counts), where=(counts > 0) & known[order])
    return found + np.where(stays[..., -1:] > 0, 0, np.nan)


def concordance(
    risk: np.ndarray, durations: np.ndarray, observed: np.ndarray, weights: np.ndarray | None = None
) -> np.ndarray:
    """Share of comparable pairs of patients in which the patient with the earlier outcome has the higher risk.

    A pair is comparable when the outcome of one was seen before the observation of the other ended, or at the moment
    when the other was censored; two outcomes at once are not. Equal risks count half. Counted in n log² n operations
    and without a loop over pairs: two different ranks differ first at exactly one binary digit, so pairs are counted
    digit by digit, by running sums over patients in the order of time.

    Args:
        risk: (num,), higher where the outcome is expected sooner.
        durations: (num,) time to the outcome or to the end of observation; infinite where it can never come.
        observed: (num,) bool, whether it was the outcome.
        weights: (..., num) as in `auroc`.

    Harrell et al. (1982), "Evaluating the yield of medical tests".
    """
    observed = np.asarray(observed, bool)
    weights = np.ones(len(risk)) if weights is None else weights
    rank = np.unique(risk, return_inverse=True)[1]
    time = _order(durations, observed)
    comparable = _later(weights, np.zeros_like(time), time, observed, None)
    equal = _later(weights, rank, time, observed, None)
    right = np.zeros_like(comparable)
    for digit in range(int(rank.max(initial=0)).bit_length()):
        bit = (rank >> digit) & 1 == 1
        right += _later(weights, rank >> (digit + 1), time, observed & bit, ~bit)
    return divided(right + equal / 2, comparable)


def exact_concordance(
    metric: Metric, durations: np.ndarray, observed: np.ndarray, groups: np.ndarray | None = None
) -> Metric:
    """A concordance with an exact 95 % limit if it is 0 or 1, where no resample differs from it; otherwise as it is.

    As in `exact_auroc`, half of the patients form pairs with the other half, which are independent. A pair is wrong if
    it is comparable and ranked wrong, with the probability q (1 - concordance), where q is the share of comparable
    pairs, taken as it was observed. No pair was wrong. Of a patient of several examples, in `groups` as of `measured`,
    one is in a pair.
    """
    observed, num = np.asarray(observed, bool), len(durations)
    time = _order(durations, observed)
    comparable = float(_later(np.ones(num), np.zeros_like(time), time, observed, None))
    exact = exact_share(metric, (num if groups is None else len(np.unique(groups))) // 2)
    if exact is metric:
        return metric
    widened = (exact.high - exact.low) * num * (num - 1) / 2 / comparable
    low, high = (max(0.0, 1 - widened), 1.0) if metric.value else (0.0, min(1.0, widened))
    return replace(metric, low=low, high=high)


def _order(durations: np.ndarray, observed: np.ndarray) -> np.ndarray:
    """Rank of the ends of observation, (num,) int64; at equal times censoring comes after the outcome, so that two
    patients are comparable if one's outcome is strictly before the other in this order."""
    return 2 * np.unique(durations, return_inverse=True)[1] + ~observed


def _later(
    weights: np.ndarray, group: np.ndarray, time: np.ndarray, first: np.ndarray, second: np.ndarray | None
) -> np.ndarray:
    """Weight of the pairs within a group of a `first` patient and a strictly later `second` one, (...)."""
    order = np.lexsort((-time, group))  # by group, the latest first
    group, time = group[order], time[order]
    starts_group = np.concatenate([[True], group[1:] != group[:-1]])[: len(order)]
    starts_time = starts_group | np.concatenate([[True], time[1:] != time[:-1]])[: len(order)]
    place = np.arange(len(order))
    mine = weights[..., order]
    counted = mine if second is None else mine * second[order]
    before = np.cumsum(counted, -1) - counted  # weight of everyone before, in whole numbers exact
    from_group = before[..., np.maximum.accumulate(np.where(starts_group, place, 0))]
    to_time = before[..., np.maximum.accumulate(np.where(starts_time, place, 0))]
    return (mine * first[order] * (to_time - from_group)).sum(-1)


# --------------------------------------------------------------------------- lists


def ranks(scores: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ranks of entries among the columns of their rows.

    Args:
        scores: (num_rows, num_columns).
        rows, columns: (num,) int, places of the entries.

    Returns:
        Number of columns of the row that score higher, and that score the same, the entry included; each (num,) int64.
    """
    size = max(1, BLOCK_CELLS // max(scores.shape[1], 1))
    above, equal = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for start in range(0, len(rows), size):
        near = slice(start, start + size)
        others, target = scores[rows[near]], scores[rows[near], columns[near]][:, None]
        above.append((others > target).sum(1))
        equal.append((others == target).sum(1))
    return np.concatenate(above), np.concatenate(equal)


def recall_at_k(above: np.ndarray, equal: np.ndarray, rows: np.ndarray, num_rows: int, k: int) -> np.ndarray:
    """Share of every row's entries that are among its k highest scores, (num_rows,); not a number without entries.

    Equal scores share the places that are left for them, so scores that say nothing earn k of all columns. A row of
    more than k entries cannot reach 1.

    Args:
        above, equal: (num,) of `ranks`.
        rows: (num,) the row of each.
    """
    hits = np.bincount(rows, np.clip((k - above) / equal, 0, 1), num_rows)
    return divided(hits, np.bincount(rows, minlength=num_rows))
