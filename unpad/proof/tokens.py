"""Claims about models of tokens: of text, patches, and text with images (apart: what a model reads names its file)."""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch, from_sequences, required
from unpad.models.contract import Model, ReadsTokens
from unpad.proof.line import Line, not_applicable
from unpad.proof.measure import Claims, change_tokens, per_sequence

ORDER = "a token never changes an earlier output"


def alone(batch: RaggedBatch) -> list[RaggedBatch]:
    """Every sequence as a batch of its own. Labels of text are recomputed from the ids; only the last is copied."""
    if batch.input_ids is None or batch.media is not None:
        return [batch.select([i]) for i in range(batch.num_seqs)]
    bounds = batch.flat_layout.cu_seqlens.tolist()
    ids, labels, counts = batch.input_ids.tolist(), batch.labels.tolist(), batch.loss_mask.tolist()
    made = [from_sequences([[*ids[a:b], labels[b - 1]]], [[False, *counts[a:b]]]) for a, b in pairwise(bounds)]
    return [replace(one, parts=batch.select([i]).parts) for i, one in enumerate(made)] if batch.parts else made


def outputs(model: Model, batch: RaggedBatch) -> list[Tensor]:
    """Hidden states of every sequence, a row per token."""
    return per_sequence(model(batch), batch)


def leaves(model: Model, batch: RaggedBatch) -> tuple[RaggedBatch, list[tuple[Tensor, Tensor]]]:
    """Let gradients reach embedded tokens and patches."""
    tokens = _embedded(model, batch).requires_grad_()
    inputs = [(tokens, batch.flat_layout.seq_of_token())]
    if batch.media is None:
        return replace(batch, inputs_embeds=tokens), inputs
    patches = _embedded(model, batch.media).requires_grad_()
    inputs.append((patches, required(batch.media_seqs)[batch.media.flat_layout.seq_of_token()]))
    return replace(batch, inputs_embeds=tokens, media=replace(batch.media, inputs_embeds=patches)), inputs


def _embedded(model: Model, batch: RaggedBatch) -> Tensor:
    """Embeddings of a batch, in the dtype of the model's weights, (total_tokens, dim)."""
    if batch.inputs_embeds is not None:
        return batch.inputs_embeds.detach().to(next(model.parameters()).dtype)
    assert isinstance(model, ReadsTokens), "a batch of tokens is for a model that reads them"
    with torch.no_grad():
        return model.embed_tokens(required(batch.input_ids)).detach()


@torch.no_grad()
def order_line(model: Model, batch: RaggedBatch) -> Line:
    """Change the last token of every sequence: no earlier output may change."""
    changed, ends = change_tokens(batch, lambda a, b: b - 1)
    before, after = model(batch), model(changed)
    keep = torch.ones(batch.total_tokens, dtype=torch.bool)
    keep[ends] = False
    if not keep.any():
        return not_applicable(ORDER, "no sequence has two tokens")
    difference = float((before - after)[keep].abs().max())
    line = Line(ORDER, "", difference, 0.0, difference == 0)
    return line.unless("the changed tokens change no output" if torch.equal(before[ends], after[ends]) else "")


CLAIMS = Claims(alone, outputs, leaves, ORDER, order_line)
