"""Writes `scikit_learn.json`: what scikit-learn, lifelines and scikit-survival make of some samples, for tests that run
without them.

    python -m tests.evaluation.scikit_learn

Its wheels bring an OpenMP runtime of their own, beside which the native kernels would turn themselves off for the rest
of a test run, so tests do not import it.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from unpad.evaluation.binary import NUM_BINS
from unpad.evaluation.metrics import draws
from unpad.evaluation.simple import PENALTIES

FILE = Path(__file__).with_suffix(".json")


def sample(num: int, ties: bool, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Labels and probabilities that tell something of them; `ties` leaves eight different ones."""
    rng = np.random.default_rng(seed)
    p = rng.beta(1, 4, num)
    labels = (rng.random(num) < p).astype(np.int64)
    labels[:2] = 0, 1
    return labels, np.round(p * 7) / 7 if ties else p


def sample_classes(num: int, absent: int | None, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Labels of five classes, of which one may be absent, and probabilities with ties."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet([0.9, 0.5, 0.4, 0.3, 0.2], num).clip(0.02)
    p = np.round(p * 20 + 0.5) / np.round(p * 20 + 0.5).sum(1, keepdims=True)
    labels = np.array([rng.choice(5, p=row) for row in p])
    return np.where(labels == absent, 0, labels) if absent is not None else labels, p


def sample_censored(num: int = 200, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities of the outcome by day 1, days to the end of observation, and its cause: 0 censoring, 1 the
    outcome, 2 a competing event; half are censored before the horizon."""
    rng = np.random.default_rng(seed)
    rate = np.exp(rng.normal(-0.5, 1, num))
    days = rng.exponential(1, (3, num)) / np.stack([np.ones(num), rate, np.full(num, 0.3)])
    return 1 - np.exp(-rate), days.min(0), days.argmin(0)


def measures_of_censored() -> dict[str, float]:
    """At day 1: the incidence of the outcome beside the competing event; with that as censoring, Brier and AUROC."""
    from lifelines import AalenJohansenFitter
    from sksurv.metrics import brier_score, cumulative_dynamic_auc
    from sksurv.util import Surv

    p, days, cause = sample_censored()
    curve = AalenJohansenFitter(calculate_variance=False).fit(days, cause, 1).cumulative_density_
    ends = Surv.from_arrays(cause == 1, days)
    return {
        "incidence": float(curve[curve.index <= 1].iloc[-1, 0]),
        "brier": float(brier_score(ends, ends, (1 - p)[:, None], [1.0])[1][0]),
        "auroc": float(cumulative_dynamic_auc(ends, ends, p, [1.0])[0][0]),
    }


def measures_of_classes(absent: int | None) -> dict[str, Any]:
    from sklearn import metrics

    labels, p = sample_classes(300, absent)
    present = np.unique(labels)
    areas = {int(c): float(metrics.roc_auc_score(labels == c, p[:, c])) for c in present}
    found = {
        "accuracy": float(metrics.accuracy_score(labels, p.argmax(1))),
        "log_loss": float(metrics.log_loss(labels, p, labels=np.arange(5))),
        "brier": float(metrics.brier_score_loss(labels, p, labels=np.arange(5), scale_by_half=False)),
        "auroc_of": {str(c): area for c, area in areas.items()},
    }
    # It has no macro average where a class is absent.
    whole = metrics.roc_auc_score(labels, p, multi_class="ovr", average="macro") if absent is None else None
    return found | {"auroc": None if whole is None else float(whole)}


def measures(ties: bool) -> dict[str, Any]:
    from sklearn import metrics
    from sklearn.calibration import calibration_curve

    labels, p = sample(400, ties)
    # Exact 0 and 1 cost the likelihood whatever they are cut off at, which is each library's own.
    p = np.clip(p, 0.01, 0.99)
    times = next(draws(400, 3))
    scores = {
        "auroc": metrics.roc_auc_score, "average_precision": metrics.average_precision_score,
        "brier": metrics.brier_score_loss, "log_loss": metrics.log_loss,
    }  # fmt: skip
    false, true, _ = metrics.roc_curve(labels, p, drop_intermediate=False)
    precision, recall, _ = metrics.precision_recall_curve(labels, p)
    observed, predicted = calibration_curve(labels, p, n_bins=NUM_BINS, strategy="quantile")
    return {
        "labels": labels.tolist(),
        "p": p.tolist(),
        "times": times.tolist(),
        "scores": {name: float(score(labels, p)) for name, score in scores.items()},
        "weighted": {name: float(score(labels, p, sample_weight=times)) for name, score in scores.items()},
        "accuracy": float(metrics.accuracy_score(labels, p > 0.5)),
        "roc": np.stack([false, true], 1).tolist(),
        "precision_recall": np.stack([recall, precision], 1)[:-1].tolist(),
        "calibration": np.stack([predicted, observed], 1).tolist(),
    }


def sample_pictures() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values of rows in fp32, their classes, and values of others."""
    rng = np.random.default_rng(0)
    labels = np.concatenate([np.arange(4), rng.integers(0, 4, 86)])
    x = rng.normal(size=(130, 12)) + np.eye(4, 12)[np.append(labels, np.arange(40) % 4)]
    return x[:90].astype(np.float32), labels, x[90:].astype(np.float32)


def simple_classes() -> dict[str, Any]:
    from sklearn.linear_model import Ridge
    from sklearn.neighbors import KNeighborsClassifier

    x, labels, asked = sample_pictures()
    regressions = [Ridge(penalty).fit(x, np.eye(4)[labels]) for penalty in PENALTIES]
    nearest = KNeighborsClassifier(1, algorithm="brute").fit(x, labels).predict(asked)
    return {"ridge": [one.predict(asked).argmax(1).tolist() for one in regressions], "nearest": nearest.tolist()}


if __name__ == "__main__":
    import sklearn

    found = {"version": sklearn.__version__, "plain": measures(False), "ties": measures(True)}
    found |= {
        "classes": measures_of_classes(None),
        "absent": measures_of_classes(2),
        "censored": measures_of_censored(),
        "simple": simple_classes(),
    }
    FILE.write_text(json.dumps(found), encoding="utf-8")
