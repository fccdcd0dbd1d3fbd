"""The claims that hold for patients alone."""

from __future__ import annotations

from dataclasses import replace

import torch

from unpad.batching.batch import RaggedBatch
from unpad.models.contract import Model, PredictsSets
from unpad.models.set_sequence.event_sets import EventSets
from unpad.proof.line import Line


@torch.no_grad()
def _history_line(model: Model, batch: RaggedBatch) -> Line:
    """Change the last set of every patient: nothing that was predicted from the sets before may change."""
    assert isinstance(model, PredictsSets), "a model of patients"
    assert batch.input_ids is not None
    sets = batch.require(EventSets)
    last = sets.history.cu_seqlens[1:].long()[sets.history.lengths() > 0] - 1
    is_last = torch.zeros_like(sets.times, dtype=torch.bool).index_fill(0, last, True)
    events = is_last.repeat_interleave(sets.members.lengths())
    codes = torch.where(events, (batch.input_ids == 0).long(), batch.input_ids)
    values = torch.where(events, 1 - sets.values, sets.values)
    changed = replace(batch, input_ids=codes).with_part(replace(sets, values=values))
    before, after = (model.next_codes(one)[~is_last] for one in (batch, changed))
    difference = float((before - after).abs().max()) if before.numel() else 0.0
    return Line("a set never changes an earlier output", "", difference, 0.0, difference == 0)
