"""Patients for tests: batches of events in sets, drawn from a seed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.helpers.models import random_model
from unpad.batching.batch import RaggedBatch, make_batch
from unpad.batching.layout import build_layout
from unpad.models.set_sequence.event_sets import EventSets
from unpad.models.set_sequence.model import SetSequence

NUM_CODES = 7
BINS = [0.0, 100.0, 400.0, 1000.0]
SET_SEQUENCES: dict[str, dict[str, Any]] = {
    "plain": {"last_values": True},
    "filter": {
        "horizon": 250.0, "last_values": True,
        "prior": "history", "update": "product", "decoder_history": True, "rotary": False, "levels": 3,
        "norm": "rmsnorm", "activation": "swiglu", "kv_heads": 1,
    },
    "competing": {"horizon": 250.0, "last_values": True, "competing": 2, "levels": 1, "blocks": 1},
    "classes": {"bins": None, "last_values": True, "classes": 4, "levels": 1, "blocks": 1},
    "vectors": {"code_vectors": 5, "reconstruction": "sinkhorn", "update": "product", "levels": 1, "bins": None},
}  # fmt: skip


def patient_batch(
    sets: Sequence[Sequence[int]], codes: np.ndarray, values: np.ndarray, has_value: np.ndarray, times: np.ndarray
) -> RaggedBatch:
    """A batch from flat arrays.

    Args:
        sets: per patient the number of events of every set.
    """
    sizes = np.array([size for patient in sets for size in patient], np.int64)
    lengths = np.array([sum(patient) for patient in sets], np.int64)
    batch = make_batch(codes, np.zeros_like(codes), np.zeros(len(codes), np.bool_), lengths)
    events = EventSets(
        values=torch.from_numpy(np.where(has_value, values, 0).astype(np.float32)),
        has_value=torch.from_numpy(has_value),
        members=build_layout(sizes),
        history=build_layout(np.array([len(patient) for patient in sets], np.int64)),
        times=torch.from_numpy(times.astype(np.float32)),
    )
    return batch.with_part(events)


def split_into_sets(num_events: int, largest: int, rng: np.random.Generator) -> list[int]:
    """Sizes of the sets of a patient, 1 to `largest` each."""
    sizes: list[int] = []
    while (left := num_events - sum(sizes)) > 0:
        sizes.append(min(left, int(rng.integers(1, largest + 1))))
    return sizes


def random_patients(
    lengths: Sequence[int],
    *,
    largest: int = 12,
    num_codes: int = NUM_CODES,
    seed: int = 0,
    causes: int = 1,
    classes: int = 2,
) -> RaggedBatch:
    """Patients with these numbers of events, in sets of 1 to `largest`; the class of some, of so many `classes`, is not
    known, and half of the patients are observed until the first of so many `causes`."""
    rng = np.random.default_rng(seed)
    sets = [split_into_sets(length, largest, rng) for length in lengths]
    total, num_seqs = sum(lengths), len(lengths)
    times = [np.sort(-rng.exponential(300, len(patient)).round()) for patient in sets]
    batch = patient_batch(
        sets, codes=rng.integers(0, num_codes, total), values=rng.normal(0, 1.5, total),
        has_value=rng.random(total) < 0.7, times=np.concatenate([np.zeros(0), *times]),
    )  # fmt: skip
    events = replace(
        batch.require(EventSets),
        durations=torch.from_numpy(rng.exponential(500, num_seqs).astype(np.float32)),
        cause=torch.from_numpy((rng.random(num_seqs) < 0.5) * (1 + np.arange(num_seqs) % causes)),
    )
    labels = torch.from_numpy(rng.choice(np.arange(-1, classes), num_seqs, p=[0.2, *[0.8 / classes] * classes]))
    return replace(batch, seq_labels=labels).with_part(events)


def tiny_patients_model(
    dtype: torch.dtype = torch.float64, num_codes: int = NUM_CODES, moved: bool = True, **fields: Any
) -> SetSequence:
    """A small model with all heads; `moved` takes every parameter away from where it starts."""
    sizes = {
        "kind": "set_sequence", "width": 16, "blocks": 2, "heads": 2, "hidden": 24, "latent": 6, "inducing": 3,
        "bins": BINS, **fields,
    }  # fmt: skip
    return random_model(sizes, num_codes, 0.1 if moved else 0).to(dtype).eval()


def permute_members(batch: RaggedBatch, seed: int = 0) -> tuple[RaggedBatch, Tensor]:
    """The same patients with the events of every set in another order, and that order, (num_events,) int64."""
    events = batch.require(EventSets)
    keys = torch.rand(batch.total_tokens, generator=torch.Generator().manual_seed(seed)).argsort()
    order = keys[events.members.seq_of_token()[keys].argsort(stable=True)]
    shuffled = replace(events, values=events.values[order], has_value=events.has_value[order])
    return replace(batch, input_ids=batch.input_ids[order]).with_part(shuffled), order
