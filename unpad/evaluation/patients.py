"""Evaluation of models of patients: the predicted outcome, the rebuilt sets, the expected next set.

Training calls `held_out`, `unpad eval` calls `evaluate`. Intervals are bootstraps over patients, because sets
of one patient are not independent, and neither are its examples at several landmarks, each of which a measure counts.
Measures of the prediction leave out patients of unknown outcome.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from unpad.batching.batch import RaggedBatch
from unpad.data.measuring import Measuring, once_each
from unpad.data.patient_marks import mark_patients, refuse_unknown, unknown_lines
from unpad.data.patients import EventData
from unpad.data.sources.split import Split
from unpad.errors import SourceError
from unpad.evaluation import binary, sets
from unpad.evaluation import rows as example_rows
from unpad.evaluation.family import HeldOutInputs, Numbers, evenly
from unpad.evaluation.metrics import HeldOut, Metric, NewFacts, exact_share, ratio, refused
from unpad.evaluation.simple import MOST_ROWS, Guesses, of_rows
from unpad.inference import patients
from unpad.inference.embed import predicts
from unpad.inference.loaded import LoadedRun
from unpad.models.contract import PredictsSets
from unpad.models.set_sequence.event_sets import FIRST_COMPETING, OUTCOME
from unpad.models.set_sequence.model import SetSequence

# The first of these terms that trains decides which weights are best.
JUDGES = ("classification", "hazard", "reconstruction", "next_code")
EVENT = "competing_event"
NUM_POINTS = 200  # of a drawn curve
Z = 1.959964  # normal quantile of 97.5 %


def held_out(over: Measuring[EventData]) -> HeldOut:
    """Loss per patient of known outcome, ranking and fit of the probabilities.

    A model that is not trained to classify, or that is shown no patient of known outcome, is judged by the first other
    term of `JUDGES` that trains and has targets, such as its reconstruction.

    Raises:
        SourceError: no term of `JUDGES` has targets.
    """
    assert isinstance(over.model, PredictsSets), "a model of patients"
    terms = [name for name in JUDGES if patients.trains(over.model, name)]
    if patients.gives_probability(over.model):
        predictions = patients.predict(over)
        if predictions.known.any():
            return _judged(predictions)
        terms = [name for name in terms if name != "classification"]
    sums = _term_sums(over)
    for name in terms:
        total, num = sums.get(name, (0.0, 0))
        if num:
            return HeldOut(total / num, {"loss": total / num, name: total / num}, num)
    what = "held-out patients have no target of " + ", ".join(JUDGES)
    raise SourceError(what, where="data.holdout", fix="hold out others, or give one of these losses a weight")


def _judged(predictions: patients.PatientPredictions) -> HeldOut:
    """`held_out` by patients of whom some have a known outcome."""
    rows, loss, why = outcome_rows(predictions, True, False), float(predictions.nll.mean()), dict[str, str]()
    values = {"loss": loss}
    for name in ("accuracy", "auroc") if predictions.classes else ("auroc", "average_precision", "brier"):
        measure = rows.measures[name]
        columns = rows.only(measure.has(rows.columns)).columns
        value = float(measure.of(columns, None))
        if not np.isnan(value):
            values[name] = value
        elif isinstance(measure, example_rows.Ranked) and measure.finish is not None:
            why[name] = measure.finish(refused(len(columns["label"]), ""), columns).note
    # Independent targets: their number says how far chance may move the loss.
    return HeldOut(loss, values, len(np.unique(predictions.patient[predictions.known])), why)


@torch.no_grad()
def _term_sums(over: Measuring[EventData]) -> dict[str, tuple[float, int]]:
    """Sum and count of every loss term."""
    sums: dict[str, tuple[float, int]] = {}

    def measure(batch: RaggedBatch) -> dict[str, np.ndarray]:
        terms = over.model.losses(batch)
        return {name: np.array([float(total), count]) for name, (total, count) in terms.items()}

    for _, values in replace(over, targets=once_each).results(measure):
        for name, (total, count) in values.items():
            before = sums.get(name, (0.0, 0))
            sums[name] = before[0] + float(total), before[1] + int(count)
    return sums


def evaluate(run: LoadedRun, over: Measuring[EventData], num_shown: int) -> example_rows.Evaluation:
    """Measures of what the model was trained on: of the outcome (`outcome_rows`), and of sets (`sets.summarise_sets`).

    No patient is named in what the page draws.

    Args:
        over: the patients to measure on.
        num_shown: number of patients to show with a sure and wrong prediction.
    """
    model, data, ids = over.model, over.data, over.seq_ids
    assert isinstance(model, PredictsSets), "a model of patients"
    metrics: dict[str, Metric] = {}
    groups = data.table.group[ids]
    counts = {"examples": len(ids)} if data.landmarks is not None else {}
    drawn: dict[str, Any] = {"family": "events", "counts": counts | {"patients": len(np.unique(groups))}}
    lines: list[str] = []
    columns = example_rows.named(data, ids, example_rows.ID, data.ids[ids])
    if data.landmarks is not None:
        columns = {example_rows.ID: columns[example_rows.ID], example_rows.LANDMARK: data.landmarks[ids], **columns}
    measures: example_rows.Measures = {}
    if patients.gives_probability(model) or patients.trains(model, "hazard"):
        predictions = patients.predict(over)
        classifies = patients.gives_probability(model) and bool(predictions.known.any())
        competing, horizon = tuple[str, ...](), 0.0
        if predictions.competing.shape[1]:
            assert run.recipe.events.labels is not None, "competing events are those of labels"
            assert data.horizon is not None, "their probabilities are up to a horizon"
            competing, horizon = tuple(run.recipe.events.labels.competing), data.horizon
        ranks = classifies or patients.trains(model, "hazard")
        of_outcome = outcome_rows(predictions, classifies, ranks, competing, horizon)
        metrics |= of_outcome.metrics()
        drawn["counts"] |= count(predictions, data.labels is not None)
        columns |= of_outcome.columns
        measures |= {"loss": LOSS} if classifies else {}
        measures |= {name: one for name, one in of_outcome.measures.items() if name in metrics.keys() - ALONE}
        if classifies:
            lines = _surest_wrong(predictions, data, ids, num_shown)
            drawn |= describe(predictions)
    wanted = [patients.trains(model, "reconstruction"), patients.trains(model, "next_code")]
    if any(wanted):
        scores = sets.score_sets(over, *wanted)
        metrics |= sets.summarise_sets(scores, data.codes, groups=groups)
        by_patient = sets.set_columns(scores, data.codes)
        columns |= by_patient
        counted = [name for name in by_patient if f"num_{name}" in by_patient]
        measures |= {name: example_rows.Ratio(name, f"num_{name}") for name in counted}
        drawn["counts"] |= {"sets": len(scores.patient)}
    shown = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in drawn["counts"].items())
    lines.insert(0, f"evaluated: {shown}")
    return example_rows.Evaluation(metrics, lines, drawn, example_rows.ExampleRows(columns, measures))


def simple(training: EventData, over: Measuring[EventData], rows: example_rows.ExampleRows) -> list[Guesses]:
    """Ridge regression on the last values of patients, with which training begins."""
    measures = [name for name in ("auroc", "concordance") if name in rows.measures]
    if not measures or not isinstance(over.model, SetSequence):
        return []
    plain = SetSequence(over.model.config.model_copy(update={"last_values": True}), training.num_outputs)
    training.initialize(plain)
    training.begin(plain, MOST_ROWS)
    plain.trained = over.model.trained
    for head in filter(None, (plain.patient.classes, plain.patient.bins)):
        torch.nn.init.zeros_(head.weight)  # which leaves the network out
    columns = _columns(patients.predict(replace(over, model=plain.eval())), True)
    answers = {name: one for name, one in columns.items() if name == "risk" or name.startswith("probability")}
    trained = np.flatnonzero(training.table.split == Split.TRAIN)
    return [Guesses(measures[0], of_rows("ridge regression on last values", trained[:MOST_ROWS], trained), answers)]


def outcome_rows(
    predictions: patients.PatientPredictions,
    classifies: bool,
    ranks: bool,
    competing: tuple[str, ...] = (),
    horizon: float = 0.0,
) -> example_rows.ExampleRows:
    """Rows of patients with the measures of their outcome.

    Args:
        classifies: whether probabilities were trained and labels exist.
        ranks: whether the risk was trained.
        competing: names of the competing events; horizon: days from the landmark, of their probabilities.
    """
    measures: example_rows.Measures = {}
    if classifies:
        measures = _of_classes(predictions.classes) if predictions.classes else OF_OUTCOME
    if ranks and not predictions.classes:
        measures = measures | {"concordance": _of_times("risk")}
    for name in competing:
        measures = measures | _of_cause(name, np.float32(horizon))  # durations are rounded so
    columns = _columns(predictions, classifies or bool(competing), competing)
    return example_rows.ExampleRows(columns | {example_rows.GROUP: predictions.patient}, measures)


def _columns(
    predictions: patients.PatientPredictions, predicts: bool, competing_events: Sequence[str] = ()
) -> example_rows.Columns:
    """Columns of the patients' rows: `risk`, `duration` and `observed`, whether it ended with the outcome; `competing`,
    whether with another event, where any did, and `competing_event`, its name, where these have probabilities; if it
    `predicts` probabilities, these, `label` (0, 1 or None), `loss` in nats and `num_targets`, 1 where the outcome is
    known. Of several classes in place of risk and times `prediction`, the likeliest, and `right`."""
    timed, known = ~np.isnan(predictions.durations), predictions.known
    names, p = example_rows.objects(predictions.classes), np.exp(predictions.log_p)
    columns: example_rows.Columns = {} if len(names) else {"risk": predictions.risk, "duration": predictions.durations}
    competing = predictions.cause >= FIRST_COMPETING
    if columns:
        columns["observed"] = _known_only(predictions.cause == OUTCOME, timed)
    if competing.any():
        columns["competing"] = _known_only(competing, timed)
    if competing_events:
        causes = example_rows.objects([None, None, *competing_events])  # of censoring and the outcome
        columns[EVENT] = _known_only(causes[predictions.cause], competing)
    if not predicts:
        return columns
    columns["label"] = _known_only(names[predictions.labels] if len(names) else predictions.labels, known)
    if len(names):
        columns["prediction"] = names[predictions.chosen]
        columns["right"] = np.where(known, predictions.right, np.nan)
        columns |= {f"probability_{name}": p[:, place] for place, name in enumerate(names)}
    else:
        columns["probability"] = p[:, 1]
    columns |= {f"probability_{name}": predictions.competing[:, place] for place, name in enumerate(competing_events)}
    columns["loss"] = np.full(len(known), np.nan)
    columns["loss"][known] = predictions.nll
    return columns | {"num_targets": known.astype(np.int64)}


def _known_only(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """(num,) object, None where a value is not known."""
    pairs = zip(values.tolist(), known.tolist(), strict=True)
    return example_rows.objects([value if is_known else None for value, is_known in pairs])


# --------------------------------------------------------------------------- measures of the outcome


class _Over(NamedTuple):
    """What measures take of the rows that have a column: calling it makes one.

    Those of labels by a horizon also take the patients who were censored before it, and weigh the others for them.

    Args:
        inputs: arrays that the measure takes before the weights.
        why: reason why a measure does not exist, given these.
    """

    needs: tuple[str, ...]
    inputs: Callable[[example_rows.Columns], tuple[np.ndarray, ...]]
    why: Callable[..., str]

    def __call__(
        self,
        measure: Callable[..., np.ndarray],
        limit: Callable[..., Metric] | None = None,
        *,
        beside_perfect: bool = False,
        **how: bool,
    ) -> example_rows.Ranked:
        """A measure; `limit` gives its metric exact limits, from it, the patient of every row, and the inputs."""

        def finish(metric: Metric, rows: example_rows.Columns) -> Metric:
            known = example_rows.having(rows, self.needs[0])
            metric = replace(metric, num_censored=int(np.sum(~known)) or None)
            if np.isnan(metric.value):
                ends = _weights(rows, known, np.ones(len(known)))
                why = NEVER if np.isnan(ends).any() else self.why(*(column[known] for column in self.inputs(rows)))
                return replace(metric, low=np.nan, high=np.nan, note=why)
            patient = rows[example_rows.GROUP]
            if beside_perfect:
                p, weights = self.inputs(rows)[1], _weights(rows, known, np.ones(len(known)))
                return binary.beside_perfect(metric, lambda drawn: measure(drawn, p, weights), p, patient)
            inputs = (column[known] for column in (patient, *self.inputs(rows)))
            return metric if limit is None else limit(metric, *inputs)

        def of(rows: example_rows.Columns, weights: np.ndarray | None) -> np.ndarray:
            known = example_rows.having(rows, self.needs[0])
            counts = np.ones(len(known)) if weights is None else weights
            return measure(*self.inputs(rows), _weights(rows, known, counts))

        return example_rows.Ranked(self.needs, of, finish, **how)


NEVER = "nobody is observed until the horizon"
NO_FIT = "a threshold separates the outcomes, or all probabilities are equal, so that no fit converges"


def _weights(rows: example_rows.Columns, known: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weights for a measure of the known rows, by which they stand for the others."""
    return weights if known.all() else binary.uncensored_weights(rows["duration"], known, weights)


def _outcome(rows: example_rows.Columns) -> tuple[np.ndarray, np.ndarray]:
    return (rows["label"] == 1).astype(np.int64), rows["probability"]


def _why_no_outcome(labels: np.ndarray, p: np.ndarray) -> str:
    if labels.all() or not labels.any():
        return "all patients have the outcome" if labels.all() else "no patient has the outcome"
    return NO_FIT


def _in_pairs(metric: Metric, patient: np.ndarray, labels: np.ndarray, p: np.ndarray) -> Metric:
    return binary.exact_auroc(metric, labels, patient)


LOSS = example_rows.Ratio("loss", "num_targets")
_OF_LABEL = _Over(("label", "observed"), _outcome, _why_no_outcome)
OF_OUTCOME: example_rows.Measures = {
    "auroc": _OF_LABEL(binary.auroc, _in_pairs, share=True),
    "average_precision": _OF_LABEL(
        binary.average_precision, lambda metric, *_: binary.one_sided_precision(metric), share=True
    ),
    "prevalence": _OF_LABEL(lambda labels, p, weights: ratio(labels, None, weights), share=True),
    "brier": _OF_LABEL(binary.brier, share=True),
    "accuracy": _OF_LABEL(binary.accuracy, share=True),
    "loss": LOSS,
    "calibration_error": _OF_LABEL(binary.calibration_error, beside_perfect=True),
    "calibration_slope": _OF_LABEL(binary.calibration_slope),
    "calibration_intercept": _OF_LABEL(binary.calibration_intercept),
}
ONE_CLASS, NOBODY = "all have one class", "no patient has the class"
# Of the rows of one run, which `unpad compare --rows` leaves out.
ALONE = {"prevalence", "commonest_class", "calibration_error", "calibration_slope", "calibration_intercept"}


def _of_classes(classes: Sequence[str]) -> example_rows.Measures:
    """`auroc`, the mean of `auroc_CLASS` of every class against the rest, `accuracy` beside that of always saying the
    `commonest_class`, `brier`, `loss` and `calibration_error`, of patients of known class. A class that no patient has,
    or all have, has no `auroc_CLASS`, and does not count in the mean."""

    def inputs(rows: example_rows.Columns) -> tuple[np.ndarray, np.ndarray]:
        labels = np.array([classes.index(name) for name in rows["label"].tolist()], np.int64)
        return labels, np.stack([rows[f"probability_{name}"] for name in classes], 1)

    def of_one(place: int) -> _Over:
        def against_rest(rows: example_rows.Columns) -> tuple[np.ndarray, np.ndarray]:
            labels, p = inputs(rows)
            return labels == place, p[:, place]

        return _Over(("label",), against_rest, lambda mine, p: ONE_CLASS if mine.any() else NOBODY)

    def rarest(metric: Metric, patient: np.ndarray, labels: np.ndarray, p: np.ndarray) -> Metric:
        pairs = [binary.num_pairs(labels == place, patient) for place in np.unique(labels)]
        return exact_share(metric, min(pairs, default=0))

    def commonest(labels: np.ndarray, p: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return ratio(labels == np.bincount(labels).argmax(), None, weights)

    of_all = _Over(("label",), inputs, lambda labels, p: ONE_CLASS)
    return {
        "auroc": of_all(binary.mean_auroc, rarest, share=True),
        "accuracy": example_rows.Ratio("right", "num_targets", share=True),
        "commonest_class": of_all(commonest, share=True),
        "brier": of_all(binary.class_brier, positive=True),
        "loss": LOSS,
        "calibration_error": of_all(binary.class_calibration_error, beside_perfect=True),
        **{f"auroc_{name}": of_one(place)(binary.auroc, _in_pairs, share=True) for place, name in enumerate(classes)},
    }


def _of_times(risk: str, name: str = "outcome") -> example_rows.Ranked:
    """Concordance of a column of risks with the times to the outcome, or to the competing event `name`; after another
    of these it never comes."""

    def inputs(rows: example_rows.Columns) -> tuple[np.ndarray, ...]:
        outcome = rows["observed"].astype(bool)
        mine = outcome if risk == "risk" else rows[EVENT] == name
        ended = outcome | rows["competing"].astype(bool) if "competing" in rows else outcome
        return rows[risk], np.where(ended & ~mine, np.inf, rows["duration"]), mine

    def limit(metric: Metric, patient: np.ndarray, risk: np.ndarray, waits: np.ndarray, came: np.ndarray) -> Metric:
        return binary.exact_concordance(metric, waits, came, patient)

    why = f"no {name} came before another patient's observation ended"
    return _Over(("observed",), inputs, lambda *_: why)(binary.concordance, limit, share=True)


def _of_cause(name: str, horizon: np.float32) -> example_rows.Measures:
    """Measures of the probability of a competing event, as those of the outcome: after another event this one never
    comes."""
    p = f"probability_{name}"

    def inputs(rows: example_rows.Columns) -> tuple[np.ndarray, np.ndarray]:
        return (rows[EVENT] == name) & (rows["duration"] <= horizon), rows[p]

    def why(came: np.ndarray, p: np.ndarray) -> str:
        return f"{'all patients have' if came.all() else 'no patient has'} {name} by the horizon"

    by_horizon = _Over(("label", "observed"), inputs, why)
    return {
        f"auroc_{name}": by_horizon(binary.auroc, _in_pairs, share=True),
        f"concordance_{name}": _of_times(p, name),
        f"brier_{name}": by_horizon(binary.brier, share=True),
    }


def check_new(data: EventData, path: Path) -> NewFacts:
    """Refuse new tables unknown to the run; otherwise return lines on their unknown codes, values and patients.

    Raises:
        SourceError: as `refuse_unknown`.
    """
    refuse_unknown(data)
    return unknown_lines(data, mark_patients(data)), {}


def count(predictions: patients.PatientPredictions, labelled: bool) -> dict[str, int]:
    """Count patients by outcome or class if the data has `labelled` them, and by end of observation if it has times to
    the outcome."""
    counts: dict[str, int] = {}
    if labelled:
        names = {1: "with_outcome", 0: "without_outcome", patients.UNKNOWN: "of_unknown_outcome"}
        if predictions.classes:
            names = {place: f"of_class_{name}" for place, name in enumerate(predictions.classes)}
            names[patients.UNKNOWN] = "of_unknown_class"
        counts = {name: int((predictions.labels == label).sum()) for label, name in names.items()}
    timed = ~np.isnan(predictions.durations)
    if timed.any():
        cause = predictions.cause[timed]
        counts["observed_until_the_outcome"] = int((cause == OUTCOME).sum())
        if (cause >= FIRST_COMPETING).any():
            counts["observed_until_a_competing_event"] = int((cause >= FIRST_COMPETING).sum())
        counts["censored"] = int((cause == 0).sum())
    return counts


def describe(predictions: patients.PatientPredictions) -> dict[str, Any]:
    """Contents of `evaluation.json`: observed and predicted shares with 95 % Wilson intervals, of as many trials as
    patients, and the two curves; of several classes the confusion matrix (rows: true classes)."""
    known = predictions.only(predictions.known)
    labels, p = known.labels, known.p
    if known.classes:
        confusion = np.zeros((len(known.classes), len(known.classes)), np.int64)
        np.add.at(confusion, (labels, known.chosen), 1)
        return {"classes": list(known.classes), "confusion": confusion.tolist()}
    timed = predictions.only(predictions.known | ~np.isnan(predictions.durations))
    weights = np.nan_to_num(binary.uncensored_weights(timed.durations, timed.known)[timed.known], nan=1.0)
    bins = binary.calibration_bins(p)
    calibration = []
    for b in np.unique(bins):
        here = bins == b
        mine, num = ratio(labels[here], None, weights[here]), len(np.unique(known.patient[here]))
        middle, reach = mine + Z**2 / (2 * num), Z * np.sqrt(mine * (1 - mine) / num + Z**2 / (4 * num**2))
        low, high = (middle - reach) / (1 + Z**2 / num), (middle + reach) / (1 + Z**2 / num)
        point = {"predicted": ratio(p[here], None, weights[here]), "observed": mine, "low": low, "high": high}
        calibration.append({name: round(float(value), 6) for name, value in point.items()} | {"patients": num})
    if not 0 < labels.mean() < 1:  # curves need both outcomes
        return {"calibration": calibration}
    return {
        "calibration": calibration,
        "roc": _thin(binary.roc_points(labels, p, weights)),
        "precision_recall": _thin(binary.precision_recall_points(labels, p, weights)),
    }


def _thin(points: np.ndarray) -> list[list[float]]:
    """At most `NUM_POINTS` of the points of a curve, evenly along its length, both ends among them."""
    steps = np.abs(np.diff(points, axis=0)).sum(1)
    along = np.concatenate([[0.0], np.cumsum(steps)])
    wanted = np.linspace(0, along[-1], NUM_POINTS)
    chosen = np.unique(np.searchsorted(along, wanted).clip(0, len(points) - 1))
    return points[chosen].round(6).tolist()


def _surest_wrong(
    predictions: patients.PatientPredictions, data: EventData, seq_ids: np.ndarray, num_shown: int
) -> list[str]:
    if predictions.classes:
        names, sure = predictions.classes, np.exp(predictions.log_p.max(1))
        missed = predictions.known & (predictions.right == 0)
        worst = [i for i in np.argsort(-sure, kind="stable") if missed[i]][:num_shown]
        chosen, labels = ([names[place] for place in places] for places in (predictions.chosen, predictions.labels))
        return [f"{data.where(int(seq_ids[i]))}: {sure[i]:.0%} for {chosen[i]}, it is {labels[i]}" for i in worst]
    wrong = np.where(predictions.known, np.abs(predictions.p - predictions.labels), 0.0)
    worst = [i for i in np.argsort(-wrong, kind="stable")[:num_shown] if wrong[i] > 0.5]
    came = ("an outcome that did not come", "an outcome that came")
    return [f"{data.where(int(seq_ids[i]))}: {predictions.p[i]:.0%} for {came[predictions.labels[i]]}" for i in worst]


def held_out_inputs(run: LoadedRun, data: EventData, most: int) -> HeldOutInputs:
    """Held-out patients with all numbers that are told of them; those with an event in time, as others are refused."""
    timed = np.append(0, np.cumsum(~data.sets.timeless))
    usable = (data.table.split == Split.HOLDOUT) & (np.diff(timed[data.sets.sets_of]) > 0)
    rows = evenly(np.flatnonzero(usable), data.table.positions, most)
    classifies, has_hazards = predicts(run)

    def compute(given: Sequence[RaggedBatch]) -> list[Numbers]:
        found = [{"vector": one["vector"][0]} for one in patients.computed_at_once(run, "vector", given)]
        if classifies or has_hazards:
            for numbers, one in zip(found, patients.computed_at_once(run, "predict", given), strict=True):
                if classifies:
                    numbers |= patients.probabilities(run, one["log_p"], one["competing"])
                numbers |= {"risk": one["risk"]} if has_hazards else {}
        if classifies:
            for numbers, one in zip(found, patients.computed_at_once(run, "explain", given), strict=True):
                by_class = patients.by_class(run, one["probability"])
                numbers |= {f"{patients.COURSE}{name}": values for name, values in by_class.items()}
                numbers |= {"attention": one["attention"]}
        return found

    inputs = [batch for row in rows for _, batch in patients.batches(run, data, np.array([row]))]
    return HeldOutInputs(data, rows, inputs, compute)
