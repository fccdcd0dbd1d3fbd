"""Claims about models of patients, where sequences consist of sets of events."""

from dataclasses import replace

import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.models.contract import Model, PredictsSets
from unpad.models.set_sequence.event_sets import EventSets
from unpad.proof.content import is_zero
from unpad.proof.line import Line, not_applicable
from unpad.proof.measure import Claims

ORDER = "a set never changes an earlier output"


def alone(batch: RaggedBatch) -> list[RaggedBatch]:
    """Every patient as a batch of its own."""
    return [batch.select([i]) for i in range(batch.num_seqs)]


def outputs(model: Model, batch: RaggedBatch) -> list[Tensor]:
    """Hidden state of every patient and the scores of both classes, (1, width + 2)."""
    assert isinstance(model, PredictsSets), "a model of patients"
    hidden: Tensor = model(batch)
    return list(torch.cat([hidden, model.classify(batch).to(hidden)], 1)[:, None].unbind())


def leaves(model: Model, batch: RaggedBatch) -> tuple[RaggedBatch, list[tuple[Tensor, Tensor]]]:
    """Let gradients reach the values of events."""
    sets = batch.require(EventSets)
    values = sets.values.detach().to(next(model.parameters()).dtype).requires_grad_()
    return batch.with_part(replace(sets, values=values)), [(values, batch.flat_layout.seq_of_token())]


@torch.no_grad()
def order_line(model: Model, batch: RaggedBatch) -> Line:
    """Change the last set of every patient: no prediction from earlier sets may change."""
    assert isinstance(model, PredictsSets), "a model of patients"
    assert batch.input_ids is not None, "events have codes"
    sets = batch.require(EventSets)
    last = sets.history.cu_seqlens[1:].long()[sets.history.lengths() > 0] - 1
    is_last = torch.zeros_like(sets.times, dtype=torch.bool).index_fill(0, last, True)
    events = is_last.repeat_interleave(sets.members.lengths())
    codes = torch.where(events, (batch.input_ids == 0).long(), batch.input_ids)
    values = torch.where(events, 1 - sets.values, sets.values)
    changed = replace(batch, input_ids=codes).with_part(replace(sets, values=values))
    before, after = (model.next_codes(one) for one in (batch, changed))
    gaps = (before - after).abs()
    if len(before) == len(last):
        return not_applicable(ORDER, "no patient has two sets of events")
    difference = float(gaps[~is_last].max())
    line = Line(ORDER, "", difference, 0.0, difference == 0)
    return line.unless("the changed sets change no output" if is_zero([gaps[is_last]]) else "")


CLAIMS = Claims(alone, outputs, leaves, ORDER, order_line)
