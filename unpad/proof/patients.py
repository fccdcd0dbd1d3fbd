"""The claims that hold for patients alone."""

from __future__ import annotations

from dataclasses import replace

import torch

from unpad.batching.batch import RaggedBatch
from unpad.models.contract import Model, PredictsSets
from unpad.proof.line import Line


@torch.no_grad()
def _history_line(model: Model, batch: RaggedBatch) -> Line:
    """Change the last set of every patient: nothing that was predicted from the sets before may change."""
    assert isinstance(model, PredictsSets), "a model of patients"
    assert batch.events is not None
    assert batch.input_ids is not None
    last = batch.events.history.cu_seqlens[1:].long()[batch.events.history.lengths() > 0] - 1
    is_last = torch.zeros_like(batch.events.times, dtype=torch.bool).index_fill(0, last, True)
    events = is_last.repeat_interleave(batch.events.members.lengths())
    changed = replace(
        batch,
        input_ids=torch.where(events, (batch.input_ids == 0).long(), batch.input_ids),
        events=replace(batch.events, values=torch.where(events, 1 - batch.events.values, batch.events.values)),
    )
    before, after = (model.next_codes(one)[~is_last] for one in (batch, changed))
    difference = float((before - after).abs().max()) if before.numel() else 0.0
    return Line("a set never changes an earlier output", "", difference, 0.0, difference == 0)
