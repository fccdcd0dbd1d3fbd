"""Evaluation on the sets of patients: how well a model rebuilds each set, and whether it expects the next."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from unpad.batching.batch import RaggedBatch, required
from unpad.data.measuring import Measuring, once_each
from unpad.data.patients import EventData
from unpad.evaluation.binary import ranks, recall_at_k
from unpad.evaluation.metrics import Metric, measured, ratio
from unpad.models.contract import PredictsSets
from unpad.models.set_sequence.event_sets import EventSets
from unpad.nn.segments import real_tokens

NUM_CODES = 12  # codes with a metric of their own
RECALLS = (5, 10)


@dataclass(frozen=True)
class SetScores:
    """Scores of every set of some patients, of its events, and of its entries, the different codes in it.

    Args:
        num_patients: patients measured, those without a set included.
        num_codes: size of the vocabulary of codes.
        patient: (num_sets,) int64, index of the patient.
        reconstruction: (num_sets,) float64, loss of rebuilding the set from its own latent; empty if not asked for.
        event_patient, event_code: (num_events,) int64; empty without `reconstruction`.
        code_nats: (num_events,) float64, negative log probability of the code in the rebuilt set; parallel to them.
        sets, codes: (num_entries,) int64.
        above, equal: (num_entries,) int64, rank of the code in the model's expectation after the previous set, as of
            `binary.ranks`; `above` is -1 for entries of a patient's first set, and both are empty if not asked for.
        nats: (num_entries,) float64, negative log probability of the code among all codes; 0 where `above` is -1.
    """

    num_patients: int
    num_codes: int
    patient: np.ndarray
    reconstruction: np.ndarray
    event_patient: np.ndarray
    event_code: np.ndarray
    code_nats: np.ndarray
    sets: np.ndarray
    codes: np.ndarray
    above: np.ndarray
    equal: np.ndarray
    nats: np.ndarray


@torch.no_grad()
def score_sets(over: Measuring[EventData], reconstruction: bool, next_set: bool) -> SetScores:
    """Score every set of these patients.

    Args:
        reconstruction, next_set: whether to measure each.
    """
    model, data, place, num_sets = over.model, over.data, over.places(), 0
    assert isinstance(model, PredictsSets), "a model of patients"
    parts: list[tuple[np.ndarray, ...]] = [_nothing()]
    for micro in replace(over, targets=once_each).micros():
        batch = data.load(micro).to(over.model.device)
        patient = place[micro.seq_ids][batch.require(EventSets).history.seq_of_token().cpu().numpy()]
        rebuilt = _rebuilt(model, batch, patient) if reconstruction else _nothing()[1:5]
        sets, codes = entries(batch, data.num_outputs)
        expected = _expected(model, batch, patient, sets, codes) if next_set else _nothing()[7:]
        parts.append((patient, *rebuilt, sets + num_sets, codes, *expected))
        num_sets += len(patient)
    return SetScores(len(over.seq_ids), data.num_outputs, *map(np.concatenate, zip(*parts, strict=True)))


def entries(batch: RaggedBatch, num_codes: int) -> tuple[np.ndarray, np.ndarray]:
    """The different codes of every set of a batch: the set, and the code; each (num_entries,) int64, in order."""
    set_of_event, code = _events(batch)
    unique = np.unique(set_of_event * num_codes + code)
    return unique // num_codes, unique % num_codes


def _events(batch: RaggedBatch) -> tuple[np.ndarray, np.ndarray]:
    """The set and the code of every event, each (num_events,) int64."""
    codes = real_tokens(required(batch.input_ids), batch.layout)
    return batch.require(EventSets).members.seq_of_token().cpu().numpy(), codes.cpu().numpy()


def _nothing() -> tuple[np.ndarray, ...]:
    """The arrays of `SetScores` without a set."""
    whole, real = np.zeros(0, np.int64), np.zeros(0)
    return whole, real, whole, whole, real, whole, whole, whole, whole, real


def _rebuilt(model: PredictsSets, batch: RaggedBatch, patient: np.ndarray) -> tuple[np.ndarray, ...]:
    """`reconstruction`, `event_patient`, `event_code` and `code_nats` of one batch."""
    set_of_event, code = _events(batch)
    return _numpy(model.reconstruct(batch)), patient[set_of_event], code, _numpy(model.code_nll(batch))


def _expected(
    model: PredictsSets, batch: RaggedBatch, patient: np.ndarray, sets: np.ndarray, codes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`above`, `equal` and `nats` of the entries of one batch."""
    log_p = _numpy(model.next_codes(batch).double().log_softmax(-1))  # (num_sets, num_codes)
    above, equal = np.full(len(sets), -1), np.ones(len(sets), np.int64)
    nats = np.zeros(len(sets))
    later = np.flatnonzero((sets > 0) & (patient[np.maximum(sets - 1, 0)] == patient[sets]))
    before, mine = sets[later] - 1, codes[later]
    above[later], equal[later] = ranks(log_p, before, mine)
    nats[later] = -log_p[before, mine]
    return above, equal, nats


def _numpy(x: torch.Tensor) -> np.ndarray:
    return x.double().cpu().numpy()


# --------------------------------------------------------------------------- metrics


def summarise_sets(scores: SetScores, names: Sequence[str], groups: np.ndarray | None = None) -> dict[str, Metric]:
    """`reconstruction`, mean over sets, and of what was rebuilt `made_code`, nats per event, also by the most frequent
    codes; of sets that follow another `next_set_loss`, nats per code, and `next_set_auroc` and `next_set_recall@k`,
    means over sets, for every k that is less than the number of codes.

    A set that follows none has not been expected, and a patient of one set has no part in the latter. A set that
    several examples of a patient hold counts in each, as in training. Intervals are over patients.

    Args:
        names: of the codes.
        groups: (num_patients,) as of `metrics.bootstrap`, where a patient has several examples.
    """
    columns, metrics = set_columns(scores, names), dict[str, Metric]()
    for name in (name for name in columns if not name.startswith("num_")):
        measure, counted = partial(ratio, columns[name], columns[f"num_{name}"]), columns[f"num_{name}"] > 0
        is_share = name.startswith(SHARES)
        how = {"positive": not is_share, "share": is_share}
        metrics[name] = measured(measure, scores.num_patients, groups, counted=counted, **how)
    return metrics


SHARES = ("next_set_auroc", "next_set_recall@")
Means = dict[str, tuple[np.ndarray, np.ndarray]]  # by measure: values, and the patient of each, (num,) both


def set_columns(scores: SetScores, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Sums of the numbers of every patient by measure, and as `num_MEASURE` how many they are, (num_patients,) each."""
    columns: dict[str, np.ndarray] = {}
    for name, (values, patient) in set_measures(scores, names).items():
        columns[name] = np.bincount(patient, values, scores.num_patients)
        columns[f"num_{name}"] = np.bincount(patient, minlength=scores.num_patients)
    return columns


def set_measures(scores: SetScores, names: Sequence[str]) -> Means:
    """The numbers that the measures of `summarise_sets` are means of."""
    measures: Means = {}
    if scores.reconstruction.size:
        patient, code, nats = scores.event_patient, scores.event_code, scores.code_nats
        measures["reconstruction"] = scores.reconstruction, scores.patient
        measures["made_code"] = nats, patient
        times = np.bincount(code, minlength=len(names))
        for chosen in np.argsort(-times, kind="stable")[:NUM_CODES]:
            if times[chosen]:
                mine = code == chosen
                measures[f"made_code: {names[chosen]}"] = nats[mine], patient[mine]
    later = scores.above >= 0
    if later.any():
        measures |= _next_set(scores, later)
    return measures


def _next_set(scores: SetScores, later: np.ndarray) -> Means:
    sets, above, equal = scores.sets[later], scores.above[later], scores.equal[later]
    num_sets = len(scores.patient)
    measures: Means = {"next_set_loss": (scores.nats[later], scores.patient[sets])}
    # A code beats the other codes below it, and half of its equals; pairs within the set, one win each, do not count.
    wins = scores.num_codes - above - (equal + 1) / 2
    size = np.bincount(sets, minlength=num_sets)
    others = size * (scores.num_codes - size)
    some = np.flatnonzero(others)
    area = (np.bincount(sets, wins, num_sets) - size * (size - 1) / 2)[some] / others[some]
    measures["next_set_auroc"] = area, scores.patient[some]
    expected = np.flatnonzero(size)
    for k in (k for k in RECALLS if k < scores.num_codes):
        recall = recall_at_k(above, equal, sets, num_sets, k)[expected]
        measures[f"next_set_recall@{k}"] = recall, scores.patient[expected]
    return measures
