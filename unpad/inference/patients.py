"""Predictions for patients."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from unpad.batching.batch import RaggedBatch
from unpad.data.measuring import Measuring, once_each
from unpad.data.patients import EventData
from unpad.models.contract import Model, PredictsSets
from unpad.models.set_sequence.event_sets import EventSets
from unpad.models.set_sequence.heads import cumulative_hazard

UNKNOWN = -1  # label of an unknown outcome


@dataclass(frozen=True)
class PatientPredictions:
    """Predictions of a model for patients, each (num_patients, ...).

    Args:
        log_p: (num_patients, 2) float64, log probabilities of no outcome, and of the outcome.
        labels: int64, 0, 1, or -1 for an unknown outcome.
        risk: float64, higher for an outcome expected sooner: the hazard summed over time if the model trains hazards,
            else the log probability of the outcome.
        durations: float64, days to the outcome or to the end of observation; NaN if unknown.
        observed: bool, True if `durations` ends with the outcome.
        num_sets: int64.
    """

    log_p: np.ndarray
    labels: np.ndarray
    risk: np.ndarray
    durations: np.ndarray
    observed: np.ndarray
    num_sets: np.ndarray

    @property
    def p(self) -> np.ndarray:
        """Probability of the outcome, (num_patients,)."""
        p: np.ndarray = np.exp(self.log_p[:, 1])
        return p

    @property
    def known(self) -> np.ndarray:
        """True for patients of known outcome, (num_patients,) bool."""
        known: np.ndarray = self.labels != UNKNOWN
        return known

    @property
    def nll(self) -> np.ndarray:
        """Negative log-likelihood of the known outcomes, (num_known,) nats."""
        log_p, labels = self.log_p[self.known], self.labels[self.known]
        nll: np.ndarray = -log_p[np.arange(len(labels)), labels]
        return nll


@torch.no_grad()
def predict(over: Measuring[EventData]) -> PatientPredictions:
    """Predict the outcome of patients, in the model's own precision; results do not depend on batching.

    Args:
        over: patients; their batches hold the known outcomes.
    """
    model = over.model
    assert isinstance(model, PredictsSets), "a model of patients"

    def measure(batch: RaggedBatch) -> dict[str, np.ndarray]:
        sets, unknown = batch.require(EventSets), torch.full((batch.num_seqs,), torch.nan)
        is_timed = sets.durations is not None and sets.observed is not None
        found = {
            "labels": torch.full((batch.num_seqs,), UNKNOWN) if batch.seq_labels is None else batch.seq_labels,
            "durations": sets.durations if is_timed else unknown,
            "observed": sets.observed if is_timed else unknown > 0,
            "num_sets": sets.history.lengths(),
        }
        known = {name: values.cpu().numpy() for name, values in found.items() if values is not None}
        return outcomes(model, batch) | known

    found = replace(over, targets=once_each).collect(measure)
    assert np.allclose(np.exp(found["log_p"]).sum(1), 1), "the plan left out a patient, or a score is not a number"
    return PatientPredictions(**{**found, "durations": found["durations"].astype(np.float64)})


def outcomes(model: PredictsSets, batch: RaggedBatch) -> dict[str, np.ndarray]:
    """`log_p` and `risk` of `PatientPredictions` for the patients of a batch."""
    log_p = model.classify(batch).double().log_softmax(-1)  # (num_seqs, 2)
    hazards = model.hazards(batch) if trains(model, "hazard") else None  # (num_seqs, bins) logits
    # The log probability orders patients as the probability of the outcome by the last edge does, but still
    # distinguishes patients for whom that rounds to 1.
    risk = log_p[:, 1] if hazards is None else cumulative_hazard(hazards.double())[:, -1]
    return {"log_p": log_p.cpu().numpy(), "risk": risk.cpu().numpy()}


def trains(model: Model, term: str) -> bool:
    """True if the model trains on a loss term at any time."""
    return bool(model.trained.get(term, 0))
