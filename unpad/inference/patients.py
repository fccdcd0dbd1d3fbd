"""Predictions for patients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from unpad.batching.batch import RaggedBatch
from unpad.data.once import each_micro, once_each, slots
from unpad.data.patients import EventData
from unpad.models.contract import Model, PredictsSets
from unpad.models.set_sequence.event_sets import EventSets
from unpad.models.set_sequence.survival import cumulative_hazard
from unpad.processes.group import ALONE, Group
from unpad.recipes.training import PlanSettings

UNKNOWN = -1  # label of an unknown outcome


@dataclass(frozen=True)
class PatientPredictions:
    """Predictions of a model for patients, each (num_patients, ...).

    Args:
        log_p: (num_patients, 2) float64, log probabilities that the outcome does not come, and that it does.
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
def predict(
    model: Model,
    data: EventData,
    seq_ids: np.ndarray,
    settings: PlanSettings,
    device: torch.device,
    group: Group = ALONE,
) -> PatientPredictions:
    """Predict the outcome of patients, in the model's own precision; no result depends on the batching.

    Args:
        data: patients, whose batches hold the known outcomes.
        seq_ids: (num_patients,).
    """
    assert isinstance(model, PredictsSets), "a model of patients"
    slot, num = slots(data, seq_ids), len(seq_ids)
    log_p, risk, durations = np.full((num, 2), np.nan), np.full(num, np.nan), np.full(num, np.nan)
    labels, observed, num_sets = np.full(num, UNKNOWN), np.zeros(num, bool), np.zeros(num, np.int64)

    def measure(batch: RaggedBatch) -> dict[str, np.ndarray]:
        batch = batch.to(device)
        found = {"log_p": model.classify(batch).double().log_softmax(-1)}
        hazards = model.hazards(batch) if trains(model, "hazard") else None  # (num_seqs, bins) logits
        # Orders patients as the probability of the outcome by the last edge does, but still distinguishes patients for
        # whom that rounds to 1.
        found["risk"] = found["log_p"][:, 1] if hazards is None else cumulative_hazard(hazards.double())[:, -1]
        sets = batch.require(EventSets)
        found["num_sets"] = sets.history.lengths()
        if batch.seq_labels is not None:
            found["labels"] = batch.seq_labels
        if sets.durations is not None and sets.observed is not None:
            found |= {"durations": sets.durations, "observed": sets.observed}
        return {name: values.cpu().numpy() for name, values in found.items()}

    for micro, found in each_micro(model, data, seq_ids, settings, measure, targets=once_each, group=group):
        at = slot[micro.seq_ids]
        log_p[at], risk[at], num_sets[at] = found["log_p"], found["risk"], found["num_sets"]
        labels[at] = found.get("labels", labels[at])
        durations[at], observed[at] = found.get("durations", durations[at]), found.get("observed", observed[at])
    assert not np.isnan(log_p).any(), "the plan left out a patient, or a score is not a number"
    return PatientPredictions(log_p, labels, risk, durations, observed, num_sets)


def trains(model: Model, term: str) -> bool:
    """True if the model trains on a loss term at any time."""
    return bool(model.trained.get(term, 0))
