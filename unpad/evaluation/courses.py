"""Courses of a few held-out patients for the report: their events, and the model's probability set by set."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from unpad.batching.plan import Micro
from unpad.data.measuring import Measuring
from unpad.data.patients import EventData
from unpad.inference.patients import PatientPredictions
from unpad.models.contract import PredictsSets
from unpad.models.set_sequence.event_sets import EventSets
from unpad.nn.segments import real_tokens

FEWEST_SETS, MOST_EVENTS = 3, 400  # of a patient whose course can be read off a picture


@torch.no_grad()
def courses(over: Measuring[EventData], found: PatientPredictions) -> list[dict[str, Any]]:
    """Courses of the patients with and without the outcome with the highest and the lowest probability.

    Args:
        over: the patients to choose from.
        found: predictions for them.

    Returns:
        JSON values per patient; nothing but the place in this list identifies a patient. `outcome`: whether it came;
        `days`: of the sets, None for facts without a time; `events`: [set, name of the code, standardised value or
        None].
    """
    model, data, p, labels = over.model, over.data, found.p, found.labels
    assert isinstance(model, PredictsSets), "a model of patients"
    events = data.table.positions[over.seq_ids]
    readable = (found.num_sets >= FEWEST_SETS) & (events <= MOST_EVENTS)
    chosen: list[int] = []
    for label, best in ((1, 1), (1, -1), (0, 1), (0, -1)):
        mine = [i for i in np.flatnonzero(readable & (labels == label)) if i not in chosen]
        if mine:
            chosen.append(int(mine[int(np.argmax(best * p[mine]))]))
    was_training = model.training
    model.eval()
    try:
        return [
            _course(model, data, int(over.seq_ids[i])) | {"outcome": bool(labels[i]), "p": _short(p[i])} for i in chosen
        ]
    finally:
        model.train(was_training)


def _course(model: PredictsSets, data: EventData, seq_id: int) -> dict[str, Any]:
    stop = np.array([data.table.positions[seq_id]], np.int32)
    start = np.zeros_like(stop)
    batch = data.load(Micro(np.array([seq_id]), start, stop, start, pad_to=0, fill_to=0))
    assert batch.input_ids is not None, "events have codes"
    probability, attention = model.course(batch)
    events, codes = batch.require(EventSets), real_tokens(batch.input_ids, batch.layout)
    columns = (events.members.seq_of_token(), codes, events.has_value, events.values)
    members = zip(*(column.tolist() for column in columns), strict=True)
    facts = data.sets.timeless[data.sets.sets_of[seq_id] : data.sets.sets_of[seq_id + 1]].tolist()
    return {
        "days": [None if bare else _short(day) for day, bare in zip(events.times.tolist(), facts, strict=True)],
        "probability": [_short(value) for value in probability.tolist()],
        "attention": [_short(value) for value in attention.tolist()],
        "events": [[at, data.codes[code], _short(value) if has else None] for at, code, has, value in members],
    }


def _short(value: float) -> float:
    return round(float(value), 4)
