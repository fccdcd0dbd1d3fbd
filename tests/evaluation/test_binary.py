"""Measures of a predicted probability: equal to scikit-learn where it has them, to brute force where not."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from tests.evaluation.scikit_learn import FILE, sample, sample_censored
from unpad.evaluation import binary
from unpad.evaluation.metrics import NUM_RESAMPLES, Metric, bootstrap, draws, measured, metric_lines

MEASURES = [binary.auroc, binary.average_precision, binary.brier, binary.accuracy]


KNOWN = json.loads(FILE.read_text(encoding="utf-8"))  # made by scikit-learn


@pytest.mark.promise("patients.outcomes")
@pytest.mark.parametrize("kind", ["plain", "ties"])
def test_measures_equal_those_of_scikit_learn(kind):
    known = KNOWN[kind]
    labels, p, times = (np.array(known[name]) for name in ("labels", "p", "times"))
    for ours in (binary.auroc, binary.average_precision, binary.brier):
        assert ours(labels, p) == pytest.approx(known["scores"][ours.__name__], abs=1e-12)
        assert ours(labels, p, times) == pytest.approx(known["weighted"][ours.__name__], abs=1e-12)
    assert binary.accuracy(labels, p) == pytest.approx(known["accuracy"], abs=1e-12)


def test_curves_equal_those_of_scikit_learn():
    known = KNOWN["ties"]
    labels, p = np.array(known["labels"]), np.array(known["p"])
    assert binary.roc_points(labels, p) == pytest.approx(np.array(known["roc"]), abs=1e-12)
    assert binary.precision_recall_points(labels, p)[::-1] == pytest.approx(
        np.array(known["precision_recall"]), abs=1e-12
    )


def test_calibration_equals_that_of_scikit_learn():
    known = KNOWN["plain"]
    labels, p = np.array(known["labels"]), np.array(known["p"])
    bins = binary.calibration_bins(p)
    predicted, observed = np.array(known["calibration"]).T
    for b in range(binary.NUM_BINS):
        assert p[bins == b].mean() == pytest.approx(predicted[b], abs=1e-12)
        assert labels[bins == b].mean() == pytest.approx(observed[b], abs=1e-12)
    share = np.bincount(bins, minlength=binary.NUM_BINS) / len(p)
    assert binary.calibration_error(labels, p) == pytest.approx((share * np.abs(predicted - observed)).sum(), abs=1e-12)


def test_a_probability_of_a_half_predicts_no_outcome():
    half = np.array([0.5])
    assert (binary.accuracy(np.array([0]), half), binary.accuracy(np.array([1]), half)) == (1, 0)


def test_a_probability_on_an_edge_belongs_to_the_bin_below():
    assert binary.calibration_bins(np.arange(11.0)).tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert binary.calibration_bins(np.array([0.1] * 9 + [0.9])).tolist() == [0] * 9 + [9]


@pytest.mark.parametrize("measure", [*MEASURES, binary.calibration_intercept, binary.calibration_slope])
@pytest.mark.parametrize("ties", [False, True])
def test_a_weight_is_so_many_patients(measure, ties):
    labels, p = sample(60, ties)
    blocks = np.stack([times for times, _ in zip(draws(60, 0), range(5), strict=False)]).astype(float)
    together = np.moveaxis(np.asarray(measure(labels, p, blocks)), -1, 0)
    for times, found in zip(blocks.astype(int), together, strict=True):
        alone = np.asarray(measure(np.repeat(labels, times), np.repeat(p, times)))
        assert found == pytest.approx(alone, abs=1e-12 if measure in MEASURES else 1e-9)


def test_calibration_error_of_a_resample_uses_the_bins_of_all_patients():
    labels, p = sample(200, ties=False)
    times = next(draws(200, 1)).astype(float)
    bins = binary.calibration_bins(p)
    gaps = [abs((times * (p - labels))[bins == b].sum()) for b in range(binary.NUM_BINS)]
    assert binary.calibration_error(labels, p, times) == pytest.approx(sum(gaps) / 200, abs=1e-12)


def test_where_a_measure_does_not_exist_it_is_not_a_number():
    p = np.array([0.1, 0.2, 0.3])
    for labels in (np.zeros(3), np.ones(3)):
        assert math.isnan(binary.auroc(labels, p))
        assert math.isnan(binary.calibration_intercept(labels, p))
    assert math.isnan(binary.average_precision(np.zeros(3), p))
    assert math.isnan(binary.auroc(np.zeros(0), np.zeros(0)))
    assert math.isnan(binary.brier(np.zeros(0), np.zeros(0)))
    assert np.isnan(binary.calibration_slope(np.array([0, 0, 1, 1]), np.array([0.1, 0.2, 0.8, 0.9])))  # told apart
    times = np.stack(list(draws(50, 0))).astype(float)
    for equal in (0.5, 0.3, 0.01, 1e-13):
        assert np.isnan(binary.calibration_slope(np.arange(50) % 3 == 0, np.full(50, equal), times)).all()
    rare = measured(lambda w: binary.auroc(np.array([1, 0, 0, 0]), np.arange(4.0), w), 4)
    assert rare.value == 0
    assert rare.note.startswith("no interval")  # resamples without the one patient are left out, and all others are 0


@pytest.mark.parametrize(
    ("came", "others", "limit"), [(10, 90, 0.6915), (90, 10, 0.6915), (15, 15, 0.7820), (1, 9, 0.025)]
)
def test_an_auroc_of_1_or_0_has_the_exact_limit_of_its_independent_pairs(came, others, limit):
    labels, p = np.repeat([0, 1], [others, came]), np.linspace(0, 1, others + came)
    right = binary.exact_auroc(measured(lambda w: binary.auroc(labels, p, w), len(p)), labels)
    assert (right.value, right.high) == (1, 1)
    assert right.low == pytest.approx(limit, abs=1e-4)
    wrong = binary.exact_auroc(measured(lambda w: binary.auroc(labels, -p, w), len(p)), labels)
    assert (wrong.value, wrong.low) == (0, 0)
    assert wrong.high == pytest.approx(1 - limit, abs=1e-4)
    some = measured(lambda w: binary.auroc(labels, np.roll(p, 1), w), len(p))
    assert binary.exact_auroc(some, labels) is some


def test_a_concordance_of_1_or_0_has_a_limit_by_half_of_the_patients_and_the_share_of_comparable_pairs():
    num = 40
    durations, risk = np.arange(num) + 1.0, -np.arange(num) * 1.0
    limit = 0.025 ** (1 / (num // 2))

    def measure(risk: np.ndarray, seen: np.ndarray) -> Metric:
        bootstrapped = measured(lambda w: binary.concordance(risk, durations[: len(risk)], seen, w), len(risk))
        assert bootstrapped.note.startswith("no interval")
        return binary.exact_concordance(bootstrapped, durations[: len(risk)], seen)

    for seen in (np.ones(num, bool), np.arange(num) % 2 == 0):
        share = np.triu(np.ones((num, num)), 1)[seen].sum() / (num * (num - 1) / 2)
        found = measure(risk, seen)
        assert (found.value, found.high) == (1, 1)
        assert found.low == pytest.approx(1 - (1 - limit) / share)
        assert measure(-risk, seen).high == pytest.approx((1 - limit) / share)
    assert measure(risk[:4], seen[:4]).low == 0, "of two pairs nothing follows"


def test_an_average_precision_of_1_has_no_lower_limit():
    found = binary.one_sided_precision(Metric(1.0, 1.0, 1.0, 9))
    assert found.to_json().items() >= {"value": 1.0, "low": None, "high": 1.0, "num": 9}.items()
    (line,) = [" ".join(" ".join(metric_lines({"average_precision": found})).split())]
    assert "- to 1.0000: all with the outcome rank first, so that resamples give no lower limit of 9" in line
    some = Metric(0.9, 0.8, 1.0, 9)
    assert binary.one_sided_precision(some) is some


@settings(deadline=None, max_examples=200)
@given(some.lists(some.tuples(some.integers(0, 1), some.integers(1, 9)), min_size=2, max_size=12))
def test_a_slope_is_missing_exactly_where_a_threshold_separates_or_all_are_equal(rows):
    labels, p = np.array([label for label, _ in rows]), np.array([tenth / 10 for _, tenth in rows])
    if labels.min() == labels.max():
        return
    came, not_come = p[labels == 1], p[labels == 0]
    apart = came.min() >= not_come.max() or came.max() <= not_come.min()
    assert math.isnan(float(binary.calibration_slope(labels, p))) == apart


def test_the_calibration_slope_finds_how_probabilities_were_bent():
    rng = np.random.default_rng(0)
    x = rng.normal(size=200_000)
    labels = (rng.random(x.size) < 1 / (1 + np.exp(-x))).astype(float)
    assert binary.calibration_slope(labels, 1 / (1 + np.exp(-(2 * x + 1)))) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("shift", [-6.0, 0.0, 1.0, 9.0])
def test_the_calibration_intercept_is_the_shift_that_expects_as_many_events_as_came(shift):
    rng = np.random.default_rng(0)
    x = 4 * rng.normal(size=500)
    labels = (rng.random(x.size) < 1 / (1 + np.exp(-x))).astype(float)
    found = binary.calibration_intercept(labels, 1 / (1 + np.exp(-(x + shift))))
    assert (1 / (1 + np.exp(-(x + shift + found)))).sum() == pytest.approx(labels.sum(), abs=1e-6)
    assert found == pytest.approx(-shift, abs=0.5)


def test_a_calibration_error_stands_beside_those_of_perfect_probabilities():
    def shown(labels, p):
        groups = np.arange(len(p)) // 2  # labels of a patient are alike, as its probabilities are
        metric = measured(lambda w: binary.calibration_error(labels, p, w), len(p), groups)
        return binary.beside_perfect(metric, lambda drawn: binary.calibration_error(drawn, p), p, groups)

    rng, within = np.random.default_rng(3), 0
    for _ in range(30):
        p = np.repeat(rng.beta(1, 4, 30), 2)
        labels = (np.repeat(rng.random(30), 2) < p).astype(np.int64)
        metric = shown(labels, p)
        low, high = (float(end) for end in metric.note.removeprefix("perfect probabilities: ").split(" to "))
        within += low <= metric.value <= high
        assert math.isnan(metric.low)
        assert low > 0, "no interval of the value would hold 0"
    assert within >= 26
    assert shown(1 - labels, p).value > high


@pytest.mark.promise("patients.outcomes")
def test_measures_of_censored_patients_equal_those_of_lifelines_and_scikit_survival():
    p, days, cause = sample_censored()
    for competing in (True, False):  # another event ends the wait for the outcome; or it is one more kind of censoring
        known = ((cause > 0) if competing else (cause == 1)) & (days <= 1) | (days > 1)
        weights = binary.uncensored_weights(days, known)
        came = known & (cause == 1) & (days <= 1)
        assert weights.sum() == pytest.approx(200, abs=1e-9)
        if competing:
            assert (weights @ came) / 200 == pytest.approx(KNOWN["censored"]["incidence"], abs=1e-12)
        else:
            assert binary.brier(came, p, weights) == pytest.approx(KNOWN["censored"]["brier"], abs=1e-12)
            assert binary.auroc(came, p, weights) == pytest.approx(KNOWN["censored"]["auroc"], abs=1e-12)
    times = next(draws(200, 4))
    again = binary.uncensored_weights(np.repeat(days, times), np.repeat(known, times))
    assert (binary.uncensored_weights(days, known, times.astype(float)) @ p) == pytest.approx(
        again @ np.repeat(p, times)
    )
    assert np.isnan(binary.uncensored_weights(days, known & (days < 1))).all(), "nobody is observed until day 1"


@pytest.mark.parametrize("ends", [math.inf, 4.0, 1.3, 1.1])  # 0, 15, 46 and 55 % censored before the horizon
def test_right_probabilities_are_right_however_many_patients_are_censored(ends):
    rng = np.random.default_rng(1)
    rate = np.exp(rng.normal(0, 1, 20000))
    days, stop = rng.exponential(1 / rate), rng.uniform(0, min(ends, 1e9), len(rate))
    came, p = days <= 1, 1 - np.exp(-rate)
    known = (days <= stop) & came | (stop >= 1)
    weights = binary.uncensored_weights(np.minimum(days, stop), known)
    assert abs(binary.calibration_intercept(came & known, p, weights)) < 0.08
    assert binary.calibration_slope(came & known, p, weights) == pytest.approx(1, abs=0.12)
    for measure in (binary.brier, binary.auroc):
        assert measure(came & known, p, weights) == pytest.approx(float(measure(came, p)), abs=0.02)


def by_pairs(risk: np.ndarray, durations: np.ndarray, observed: np.ndarray, weights: np.ndarray) -> float:
    right = total = 0.0
    for i in range(len(risk)):
        for j in range(len(risk)):
            ends_later = durations[j] > durations[i] or (durations[j] == durations[i] and not observed[j])
            if observed[i] and ends_later:
                both = weights[i] * weights[j]
                total += both
                right += both * (1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0)
    return right / total if total else math.nan


@pytest.mark.promise("patients.outcomes")
@settings(deadline=None, max_examples=60)
@given(some.integers(0, 40), some.integers(1, 9), some.integers(1, 9), some.integers(0, 1000))
def test_concordance_equals_that_of_all_pairs(num, risks, times, seed):
    rng = np.random.default_rng(seed)
    risk, durations = rng.integers(0, risks, num) / 3.0, rng.integers(0, times, num).astype(float)
    observed, weights = rng.random(num) < 0.6, rng.integers(0, 3, (2, num)).astype(float)
    assert binary.concordance(risk, durations, observed) == pytest.approx(
        by_pairs(risk, durations, observed, np.ones(num)), abs=1e-12, nan_ok=True
    )
    for row, found in zip(weights, binary.concordance(risk, durations, observed, weights), strict=True):
        assert found == pytest.approx(by_pairs(risk, durations, observed, row), abs=1e-12, nan_ok=True)


def test_the_bootstrap_draws_patients_as_the_others_do_and_does_not_depend_on_its_blocks(monkeypatch):
    labels, p = sample(40, ties=True)
    samples = bootstrap(lambda w: binary.auroc(labels, p, w), 40)
    assert samples.shape == (NUM_RESAMPLES,)
    assert np.array_equal(samples, np.array([binary.auroc(labels, p, times) for times in draws(40)]), equal_nan=True)
    monkeypatch.setattr("unpad.evaluation.metrics.BLOCK_CELLS", 7 * 40)
    assert np.array_equal(bootstrap(lambda w: binary.auroc(labels, p, w), 40), samples, equal_nan=True)


def test_recall_counts_the_entries_among_the_highest_scores():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(6, 20))
    rows, columns = np.nonzero(rng.random((5, 20)) < 0.2)
    found = binary.recall_at_k(*binary.ranks(scores, rows, columns), rows, 6, 5)
    for row in range(6):
        wanted = set(columns[rows == row].tolist())
        top = set(np.argsort(-scores[row])[:5].tolist())
        assert found[row] == pytest.approx(len(wanted & top) / len(wanted) if wanted else math.nan, nan_ok=True)


def test_equal_scores_share_the_places_left_for_them_whatever_the_block(monkeypatch):
    scores = np.array([[1.0, 2.0, 2.0, 0.0], [5.0, 5.0, 5.0, 5.0]])
    rows, columns = np.array([0, 0, 0, 1]), np.array([0, 1, 3, 2])
    above, equal = binary.ranks(scores, rows, columns)
    assert (above.tolist(), equal.tolist()) == ([2, 0, 3, 0], [1, 2, 1, 4])
    assert binary.recall_at_k(above, equal, rows, 2, 1).tolist() == [0.5 / 3, 0.25]
    assert binary.recall_at_k(above, equal, rows, 2, 3).tolist() == [2 / 3, 0.75]
    monkeypatch.setattr("unpad.evaluation.binary.BLOCK_CELLS", 4)
    assert [part.tolist() for part in binary.ranks(scores, rows, columns)] == [above.tolist(), equal.tolist()]
