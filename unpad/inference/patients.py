"""Predictions for patients."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch, concatenate
from unpad.data.measuring import Measuring, once_each
from unpad.data.patients import EventData
from unpad.inference.loaded import LoadedRun
from unpad.models.contract import Model, PredictsSets
from unpad.models.set_sequence.event_sets import EventSets
from unpad.models.set_sequence.heads import risk
from unpad.nn.linear import independent_rows

UNKNOWN = -1  # label of an unknown outcome
PART_PLACES = 1 << 13  # sets that the records of a part hold together, as explanations read each record anew
COURSE = "course_"  # before the name of a probability: that after every set


class Likeliest:
    """Classes by their log probabilities, (num_rows, num_classes), and those of the rows, (num_rows,) int64."""

    log_p: np.ndarray
    labels: np.ndarray

    @property
    def chosen(self) -> np.ndarray:
        """The likeliest class of every row, (num_rows,) int64."""
        return np.asarray(self.log_p.argmax(1))

    @property
    def right(self) -> np.ndarray:
        """(num_rows,) float64, 1 where the likeliest class is the row's."""
        return np.asarray(self.chosen == self.labels, np.float64)


@dataclass(frozen=True)
class PatientPredictions(Likeliest):
    """Predictions of a model for patients, each (num_patients, ...).

    Args:
        log_p: (num_patients, 2) float64, log probabilities of no outcome, and of the outcome; or (num_patients,
            num_classes) of several classes.
        labels: int64, 0, 1, or the place of one of several classes, or -1 for an unknown one.
        competing: (num_patients, num_competing) float64, probabilities that the competing events come first.
        risk: float64, higher for an outcome expected sooner: the hazard summed over time if the model trains hazards,
            else the log probability of the outcome.
        durations: float64, days to the outcome or to the end of observation; NaN if unknown.
        cause: int64, what `durations` ends with, as in `EventSets`.
        num_sets: int64.
        patient: number of the patient of each, as one may have several landmarks.
        classes: names of several classes; () for an outcome that comes or does not.
    """

    log_p: np.ndarray
    competing: np.ndarray
    labels: np.ndarray
    risk: np.ndarray
    durations: np.ndarray
    cause: np.ndarray
    num_sets: np.ndarray
    patient: np.ndarray
    classes: tuple[str, ...] = ()

    def only(self, chosen: np.ndarray) -> "PatientPredictions":
        """Some of the patients, by a mask."""
        arrays = {name: values[chosen] for name, values in vars(self).items() if isinstance(values, np.ndarray)}
        return replace(self, **arrays)

    @property
    def p(self) -> np.ndarray:
        """Probability of the outcome, (num_patients,)."""
        return np.asarray(np.exp(self.log_p[:, 1]))

    def waits(self, cause: int) -> np.ndarray:
        """Days to a cause or to censoring, (num_patients,), without end after another cause: this one will never come,
        and the patient stays among those who are at risk of it longer than any other (Wolbers et al. 2014,
        "Concordance for prognostic models with competing risks")."""
        return np.asarray(np.where((self.cause > 0) & (self.cause != cause), np.inf, self.durations))

    @property
    def known(self) -> np.ndarray:
        """True for patients of known outcome, (num_patients,) bool."""
        return np.asarray(self.labels != UNKNOWN)

    @property
    def nll(self) -> np.ndarray:
        """Negative log-likelihood of the known outcomes, (num_known,) nats."""
        log_p, labels = self.log_p[self.known], self.labels[self.known]
        return np.asarray(-log_p[np.arange(len(labels)), labels])


@torch.no_grad()
def predict(over: Measuring[EventData]) -> PatientPredictions:
    """Predict the outcome of patients, in the model's own precision; results do not depend on batching.

    Args:
        over: patients; their batches hold the known outcomes.
    """
    model = over.model
    assert isinstance(model, PredictsSets), "a model of patients"

    def measure(batch: RaggedBatch) -> dict[str, np.ndarray]:
        sets = batch.require(EventSets)
        is_timed = sets.durations is not None and sets.cause is not None
        found = {
            "labels": torch.full((batch.num_seqs,), UNKNOWN) if batch.seq_labels is None else batch.seq_labels,
            "durations": sets.durations if is_timed else torch.full((batch.num_seqs,), torch.nan),
            "cause": sets.cause if is_timed else torch.zeros(batch.num_seqs, dtype=torch.int64),
            "num_sets": sets.history.lengths(),
        }
        known = {name: values.cpu().numpy() for name, values in found.items() if values is not None}
        return outcomes(model, batch) | known

    found = replace(over, targets=once_each).collect(measure)
    assert np.allclose(np.exp(found["log_p"]).sum(1), 1), "the plan left out a patient, or a score is not a number"
    found["durations"] = found["durations"].astype(np.float64)
    return PatientPredictions(**found, patient=over.data.table.group[over.seq_ids], classes=over.data.classes)


def outcomes(model: PredictsSets, batch: RaggedBatch) -> dict[str, np.ndarray]:
    """`log_p`, `competing` and `risk` of `PatientPredictions` for the patients of a batch."""
    found = predictions(model, *model.classes_and_hazards(batch))
    return {name: values.cpu().numpy() for name, values in found.items()}


def predictions(model: PredictsSets, scores: Tensor, hazards: Tensor | None) -> dict[str, Tensor]:
    """`outcomes` of the scores of classes, (num_seqs, num_classes), and logits of hazards, (num_seqs, bins, causes)."""
    log_p = scores.double().log_softmax(-1)
    if hazards is None or not trains(model, "hazard"):
        return {"log_p": log_p, "competing": log_p[:, :0], "risk": log_p[:, 1]}
    return {"log_p": log_p, "competing": model.competing(hazards.double()).exp(), "risk": risk(hazards.double())}


def probabilities(run: LoadedRun, log_p: np.ndarray, competing: np.ndarray) -> dict[str, np.ndarray]:
    """Columns of the probability of the outcome and of every competing event, or of every class, (num_patients,) each,
    under the names that people read; arguments as in `PatientPredictions`."""
    found = {name: np.exp(values) for name, values in by_class(run, log_p).items()}
    if competing.shape[1]:  # a model without hazards has none of a competing event
        labels = run.recipe.events.labels
        assert labels is not None, "competing events are those of labels"
        found |= {f"probability_{name}": p for name, p in zip(labels.competing, competing.T, strict=True)}
    return found


def by_class(run: LoadedRun, values: np.ndarray) -> dict[str, np.ndarray]:
    """Columns (num,) of values (num, num_classes) under the names of probabilities: of two classes only that of the
    outcome."""
    if values.shape[1] == 2:
        return {"probability": values[:, 1]}
    return {f"probability_{name}": values[:, place] for place, name in enumerate(class_names(run))}


def class_names(run: LoadedRun) -> tuple[str, ...]:
    """Names of several classes of a run; () for an outcome that comes or does not."""
    labels = run.recipe.events.labels
    return () if labels is None else labels.several


def likeliest(run: LoadedRun, log_p: np.ndarray) -> list[str]:
    """Name of the likeliest of several classes of every patient; [] for an outcome that comes or does not."""
    names = class_names(run)
    return [names[place] for place in log_p.argmax(1).tolist()] if names else []


def gives_probability(model: PredictsSets) -> bool:
    """True if the model trains the probability of the outcome, by classes or by hazards up to a horizon."""
    return trains(model, "classification") or (model.horizon is not None and trains(model, "hazard"))


def trains(model: Model, term: str) -> bool:
    """True if the model trains on a loss term at any time."""
    return bool(model.trained.get(term, 0))


# --------------------------------------------------------------------------- passes that several share


def batches(run: LoadedRun, data: EventData, seq_ids: np.ndarray) -> list[tuple[np.ndarray, RaggedBatch]]:
    """Batches of patients, each with the places of its patients in the data."""
    over = Measuring(run.model, data, seq_ids, run.recipe.plan, targets=once_each)
    return [(micro.seq_ids, data.load(micro)) for micro in over.micros()]


def computed(run: LoadedRun, kind: str, given: Sequence[RaggedBatch]) -> list[dict[str, np.ndarray]]:
    """Numbers of every batch, computed together in passes of the run's size.

    Args:
        kind: "predict" or "vector".
    """
    results: list[dict[str, np.ndarray]] = []
    waiting: list[RaggedBatch] = []
    for batch in given:
        if waiting and sum(one.total_tokens for one in waiting) + batch.total_tokens > run.recipe.plan.tokens_per_micro:
            results += computed_at_once(run, kind, waiting)
            waiting = []
        waiting.append(batch)
    return results + (computed_at_once(run, kind, waiting) if waiting else [])


def parts_of_course(batch: RaggedBatch) -> list[slice]:
    """The sets of a patient's batch in parts whose explanations take some tenths of a second each."""
    num_sets = batch.require(EventSets).num_sets
    cuts = np.flatnonzero(np.diff(np.arange(1, num_sets + 1).cumsum() // PART_PLACES)) + 1
    return [slice(*bounds) for bounds in pairwise([0, *cuts.tolist(), num_sets])]


def explained(run: LoadedRun, given: Sequence[tuple[RaggedBatch, slice]]) -> list[dict[str, np.ndarray]]:
    """As `computed` for "explain", of parts of batches, one by one."""
    return [computed_at_once(run, "explain", [batch], part)[0] for batch, part in given]


@torch.no_grad()
def computed_at_once(
    run: LoadedRun, kind: str, given: Sequence[RaggedBatch], part: slice = slice(None)
) -> list[dict[str, np.ndarray]]:
    """Numbers of every batch, computed in one pass; otherwise as `computed`.

    Args:
        part: of the sets of a single batch that is explained.
    """
    model, batch = run.model, concatenate(list(given)).to(run.model.device)
    assert isinstance(model, PredictsSets), "a run of patients"
    sizes = [one.num_seqs for one in given]
    with independent_rows():
        if kind == "vector":
            found = {"vector": model.vectors(batch, "patient").float().cpu().numpy()}
        elif kind == "explain":
            probability, attention = model.course(batch, part)
            found = {"probability": probability.cpu().numpy(), "attention": attention.cpu().numpy()}
            sizes = [int(one.require(EventSets).history.lengths().sum()) for one in given]
        else:
            found = outcomes(model, batch)
    cuts = np.cumsum(sizes)[:-1]
    parts = {name: np.split(values, cuts) for name, values in found.items()}
    return [{name: values[place] for name, values in parts.items()} for place in range(len(given))]
