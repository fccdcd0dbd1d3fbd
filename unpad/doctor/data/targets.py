"""Targets of the batches that training would see: the next token of their own sequence, and never on padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.batching.layout import Layout
from unpad.doctor.subject import Subject
from unpad.models.contract import ScoresTokens
from unpad.terminal.finding import Finding

LEAST_WRONG = 0.001  # of the labels
SEEN = 1e-4  # relative change of an output that is more than rounding in bf16's sums of equal inputs
BATCHES = 4


def check_targets(subject: Subject) -> list[Finding]:
    """Findings on the labels of the first steps' batches."""
    micros = [micro for step in range(min(BATCHES, subject.plan.num_steps)) for micro in subject.plan.step(step)]
    batches = [subject.load(micro) for micro in micros[:BATCHES]]
    found = _on_padding(batches)
    if isinstance(subject.model, ScoresTokens):
        found += _shifted(subject, batches) + _seen(subject)
    return found


def _on_padding(batches: Sequence[RaggedBatch]) -> list[Finding]:
    wrong = total = 0
    for batch in batches:
        real = _real_tokens(batch)
        wrong += int((batch.loss_mask & ~real).sum())
        total += int(batch.loss_mask.sum())
    if not wrong:
        return []
    return [Finding("padding_labels", "fault", wrong / total, ("plan.strategy",))]


def _real_tokens(batch: RaggedBatch) -> Tensor:
    """True for tokens of sequences, False for padding and filler, (total_tokens,) bool."""
    if not isinstance(batch.layout, Layout):
        return batch.layout.attention_mask.flatten()
    if batch.seq_ids is None:
        return torch.ones_like(batch.loss_mask)
    return (batch.seq_ids >= 0).repeat_interleave(batch.layout.lengths(), output_size=batch.total_tokens)


def _shifted(subject: Subject, batches: Sequence[RaggedBatch]) -> list[Finding]:
    wrong, total, where = 0, 0, ""
    for batch in batches:
        flat = batch.flat()
        ids, layout = flat.input_ids, flat.layout
        if ids is None or not isinstance(layout, Layout):
            continue
        inner = torch.ones_like(flat.loss_mask)
        inner[layout.cu_seqlens[1:][layout.lengths() > 0].long() - 1] = False  # the last label is in no input
        if flat.media_index is not None:  # places of patches hold no token
            inner &= ~torch.zeros_like(inner).index_fill(0, flat.media_index - 1 + (flat.media_index == 0).long(), True)
        inner &= flat.loss_mask
        bad = inner & (flat.labels != ids.roll(-1))
        wrong, total = wrong + int(bad.sum()), total + int(inner.sum())
        if not where and flat.seq_ids is not None and bool(bad.any()):
            sequence = int(flat.seq_ids[layout.seq_of_token()[int(bad.nonzero()[0])]])
            where = subject.data.where(sequence)
    if wrong <= LEAST_WRONG * total:
        return []
    return [Finding("targets_shifted", "fault", wrong / total, ("data",), {"where": where})]


@torch.no_grad()
def _seen(subject: Subject) -> list[Finding]:
    """Change the last token of a sequence, and look for a change of the outputs before it."""
    model, batch = subject.model.eval(), subject.small_batch(4, 256)
    if batch.input_ids is None or not isinstance(batch.layout, Layout):
        return []
    lengths = batch.layout.lengths()
    seq = int(lengths.argmax())
    if lengths[seq] < 3:
        return []
    one = batch.select([seq])
    assert one.input_ids is not None, "as the batch has them"
    other = one.input_ids.clone()
    other[-1] = (other[-1] + 1) % subject.data.num_outputs
    field = subject.setup.model.config.context_field.rpartition(".")[0] + ".causal"  # of the same section
    before, after = (model(changed)[:-1].float() for changed in (one, replace(one, input_ids=other)))
    change = float((before - after).abs().max() / before.abs().max().clamp_min(1e-12))
    if not change > SEEN:
        return []
    return [Finding("sees_target", "fault", change, (field,), {"field": field})]
