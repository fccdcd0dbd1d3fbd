"""The equivalence certificate: batching changed nothing.

Part one runs in fp64 on the path that shares everything but the kernel's precision: every way to batch a few sequences
must equal the same sequences one at a time, in outputs, loss terms and all gradients. Part two runs in the run's own
precision and kernels: against fp64 within stated bounds, and isolation exactly.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch, concatenate, from_sequences
from unpad.batching.layout import Layout
from unpad.errors import ProofError
from unpad.models.contract import ORIGIN, Model, ReadsTokens
from unpad.models.objective import Objective
from unpad.models.set_sequence.event_sets import EventSets
from unpad.nn.kernel import by_definition
from unpad.nn.native import library
from unpad.nn.precision import autocast
from unpad.proof.line import Certificate, Line
from unpad.proof.measure import (
    BOUNDS,
    EXACT,
    NATIVE_ERROR,
    SIDES,
    Measurement,
    Variant,
    _measure,
    _one_at_a_time,
    _outputs,
    _per_sequence,
    change_tokens,
    errors,
    kernels_of,
    more_variants,
)
from unpad.proof.patients import _history_line
from unpad.proof.plain import Provable, as_model
from unpad.recipes.training import Weight


def prove(
    model: Model | Provable, batch: RaggedBatch, *, precision: str = "fp32", device: torch.device | None = None
) -> Certificate:
    """Prove a model on a batch of token sequences, ready for any training loop.

    Args:
        model: a model as in `models/`: `forward(batch) -> (total_tokens, dim)`, `losses(batch)` with the terms of its
            `weights`, or one named cross_entropy, `count_targets(batch)`, and an `embed` module for tokens.
        batch: a flat run of token sequences.
        precision: what training will run in.
        device: where to compute; by default where the model is.

    Raises:
        ProofError: the batch is padded, or holds no target; there would be nothing to prove.
    """
    if not isinstance(batch.layout, Layout) or batch.num_targets == 0:
        raise ProofError("prove needs a flat run of sequences with targets", fix="use a RaggedBatch that is not padded")
    if batch.part(EventSets) is None:  # a patient without events has a label all the same
        batch = batch.select([i for i, length in enumerate(batch.layout.lengths().tolist()) if length])
    alone = _sequences_of(batch)
    whole = list(range(len(alone)))
    return certify(as_model(model), alone, [Variant("packed", [batch], [whole])], precision=precision, device=device)


def certify(
    model: Model,
    alone: list[RaggedBatch],
    variants: list[Variant],
    *,
    precision: str = "fp32",
    device: torch.device | None = None,
    expected_kernels: set[str] | None = None,
    losses: dict[str, Weight] | None = None,
) -> Certificate:
    """Prove that every variant equals the sequences taken one at a time; the first variant must be ragged.

    Args:
        alone: the truth, every sequence as a batch of its own, straight from the data and not from any batch.
        variants: ways to batch them, such as the plans of all strategies. Paddings and splits are added here.
        expected_kernels: attention kernels the run will use; one that no line ran is NOT PROVEN.
        losses: the recipe's weights of loss terms; gradients are those of the sum that they make.
    """
    device = device or next(model.parameters()).device
    reduces = len(model.modes) > 1  # the lines up to the last ones need an output for every token
    if reduces:
        model = copy.deepcopy(model)
        model.mode = ORIGIN
    weights = Objective.of(model, losses).final(model)
    exact = copy.deepcopy(model).double().to(device).eval()
    alone = [one.to(device) for one in alone]
    with library.switched_off(), by_definition():
        truth = _one_at_a_time(exact, alone, weights)
    base = concatenate(alone)
    lines = [
        _labels_line(alone, variants),
        _repeat_line(exact, base),
        *(_equal_line(exact, truth, variant, device) for variant in [*variants, *more_variants(base)]),
        *_torch_line(exact, truth, variants[0], device),
        _cross_gradient_line(exact, base),
        _pad_contents_line(exact, base),
    ]
    if model.causal:
        lines.append(_causal_line(exact, base) if base.part(EventSets) is None else _history_line(exact, base))
    own, exercised = _own_precision_lines(model, truth, variants[0], precision, device)
    missing = sorted((expected_kernels or set()) - exercised)
    not_proven = [
        Line("attention of this run's longer or shorter sequences", name, None, None, None) for name in missing
    ]
    fewer: list[Line] = []
    if reduces:
        from unpad.proof.pruned import pruned_lines  # it measures with what stands below

        fewer = pruned_lines(model, alone, base, variants[0], weights, precision, device)
    return Certificate((*lines, *own, *fewer, *not_proven))


# --------------------------------------------------------------------------- the truth, and measurements against it


def _sequences_of(batch: RaggedBatch) -> list[RaggedBatch]:
    """Every sequence alone. Of tokens only the ids are believed: labels are the tokens that follow."""
    assert isinstance(batch.layout, Layout), "checked by prove"
    if batch.input_ids is None or batch.media is not None or batch.part(EventSets) is not None:
        return [batch.select([i]) for i in range(batch.num_seqs)]
    bounds = batch.layout.cu_seqlens.tolist()
    ids, labels, counts = batch.input_ids.tolist(), batch.labels.tolist(), batch.loss_mask.tolist()
    return [from_sequences([[*ids[a:b], labels[b - 1]]], [[False, *counts[a:b]]]) for a, b in pairwise(bounds) if b > a]


# --------------------------------------------------------------------------- part one: fp64


def _equal_line(model: Model, truth: Measurement, variant: Variant, device: torch.device) -> Line:
    got = _measure(model, truth, variant, device, "fp32")
    error = max(errors(got, truth))
    return Line(
        f"{variant.name} = alone", kernels_of(model, variant, torch.float64, device), error, EXACT, error <= EXACT
    )


def _torch_line(model: Model, truth: Measurement, variant: Variant, device: torch.device) -> list[Line]:
    """The same without native kernels, where the lines before ran with them."""
    if not library.enabled():
        return []
    with library.switched_off():
        return [_equal_line(model, truth, replace(variant, name=f"{variant.name}, torch alone"), device)]


def _labels_line(alone: list[RaggedBatch], variants: list[Variant]) -> Line:
    """Count labels and positions that differ from those of the sequence alone, and labels where it has none."""
    wrong = 0
    for variant in variants:
        for batch, rows in zip(variant.micros, variant.rows, strict=True):
            labels, masks = _per_sequence(batch.labels, batch), _per_sequence(batch.loss_mask, batch)
            positions = _per_sequence(batch.position_ids, batch)
            for row, label, mask, position in zip(rows, labels, masks, positions, strict=True):
                wrong += _wrong_labels(alone[row] if row >= 0 else None, label, mask, position)
            wrong += batch.target_index.numel() - sum(int(mask.sum()) for mask in masks)  # a label in the padding
            if batch.seq_labels is not None:
                wanted = [alone[row].seq_labels for row in rows]
                classes = torch.cat([label for label in wanted if label is not None]).to(batch.seq_labels.device)
                wrong += int((batch.seq_labels != classes).sum())
    wrong += _crossing(variants[0].micros[0])
    return Line("labels stay within their sequence", "", float(wrong), 0.0, wrong == 0)


def _wrong_labels(alone: RaggedBatch | None, labels: Tensor, mask: Tensor, positions: Tensor) -> int:
    if alone is None:
        return int(mask.sum())
    if labels.numel() != alone.total_tokens:
        return 1
    wanted, counts, places = (x.to(labels.device) for x in (alone.labels, alone.loss_mask, alone.position_ids))
    misplaced = int((positions != places).sum())
    return int(((labels != wanted) & mask).sum()) + int((mask != counts).sum()) + misplaced


def _crossing(batch: RaggedBatch) -> int:
    """Labels at the ends of sequences, when all of them are the first token of the sequence that follows."""
    if not isinstance(batch.layout, Layout) or batch.input_ids is None:
        return 0
    starts = [
        b for b in batch.layout.cu_seqlens.tolist()[1:-1] if 0 < b < batch.total_tokens and batch.loss_mask[b - 1]
    ]
    crossing = [int(batch.labels[b - 1]) == int(batch.input_ids[b]) for b in starts]
    return len(crossing) if len(crossing) > 1 and all(crossing) else 0


@torch.no_grad()
def _repeat_line(model: Model, batch: RaggedBatch) -> Line:
    difference = float((model(batch) - model(batch)).abs().max()) if batch.total_tokens else 0.0
    return Line("the same batch twice is bit-equal (no dropout left on)", "", difference, 0.0, difference == 0)


def _cross_gradient_line(model: Model, batch: RaggedBatch) -> Line:
    """Gradient of one sequence's output with respect to the inputs of all others: exactly zero."""
    worst = 0.0
    changed, leaves = _with_leaves(model, batch)
    for seq, output in list(enumerate(_outputs(model, changed)))[:4]:
        found = torch.autograd.grad(output.square().sum(), [x for x, _ in leaves], allow_unused=True, retain_graph=True)
        outside = [g[owner != seq] for g, (_, owner) in zip(found, leaves, strict=True) if g is not None]
        worst = max([worst, *(float(part.abs().max()) for part in outside if part.numel())])
    name = "no gradient crosses between sequences"
    if batch.num_seqs < 2:  # nothing to cross to
        return Line(name, "", None, None, None)
    return Line(name, "", worst, 0.0, worst == 0)


def _with_leaves(model: Model, batch: RaggedBatch) -> tuple[RaggedBatch, list[tuple[Tensor, Tensor]]]:
    """The batch with inputs that gradients reach: embedded tokens and patches, or the values of events.

    Returns:
        The batch, and each such input with the sequence of each of its rows.
    """
    assert isinstance(batch.layout, Layout), "certify has flat runs"
    owner, dtype = batch.layout.seq_of_token(), next(model.parameters()).dtype
    if (sets := batch.part(EventSets)) is not None:
        values = sets.values.detach().to(dtype).requires_grad_()
        return batch.with_part(replace(sets, values=values)), [(values, owner)]
    tokens = _inputs(model, batch).requires_grad_()
    if batch.media is None:
        return replace(batch, inputs_embeds=tokens), [(tokens, owner)]
    patches = _inputs(model, batch.media).requires_grad_()
    media = replace(batch.media, inputs_embeds=patches)
    return replace(batch, inputs_embeds=tokens, media=media), [(tokens, owner), (patches, _media_owner(batch))]


def _inputs(model: Model, batch: RaggedBatch) -> Tensor:
    """What a model computes with in place of tokens, in the dtype of its weights, (total_tokens, dim)."""
    if batch.inputs_embeds is not None:
        return batch.inputs_embeds.detach().to(next(model.parameters()).dtype)
    with torch.no_grad():
        assert isinstance(model, ReadsTokens), "a batch of tokens is for a model that reads tokens"
        assert batch.input_ids is not None, "a batch holds input_ids or inputs_embeds"
        return model.embed_tokens(batch.input_ids).detach()


def _media_owner(batch: RaggedBatch) -> Tensor:
    """The sequence that each token of the batch's images stands in, (media.total_tokens,)."""
    assert isinstance(batch.media, RaggedBatch)
    assert isinstance(batch.media.layout, Layout)
    assert batch.media_seqs is not None
    return batch.media_seqs[batch.media.layout.seq_of_token()]


@torch.no_grad()
def _pad_contents_line(model: Model, batch: RaggedBatch) -> Line:
    """Padding on the left is what a causal model could see; on the right what any other could."""
    worst = 0.0
    for side in SIDES:
        zeros, ones = (_outputs(model, batch.pad(side, pad_id=fill)) for fill in (0, 1))
        gaps = [float((a - b).abs().max()) for a, b in zip(zeros, ones, strict=True) if a.numel()]
        worst = max([worst, *gaps])
    return Line("what padding holds is invisible", "padded sdpa", worst, 0.0, worst == 0)


@torch.no_grad()
def _causal_line(model: Model, batch: RaggedBatch) -> Line:
    """Change the last token of every sequence: nothing before it may change."""
    changed, ends = change_tokens(batch, lambda a, b: b - 1)
    before, after = model(batch), model(changed)
    keep = torch.ones(batch.total_tokens, dtype=torch.bool)
    keep[ends] = False
    difference = float((before - after)[keep].abs().max()) if keep.any() else 0.0
    return Line("a token never changes an earlier output", "", difference, 0.0, difference == 0)


# --------------------------------------------------------------------------- part two: the run's own precision


def _own_precision_lines(
    model: Model, truth: Measurement, variant: Variant, precision: str, device: torch.device
) -> tuple[list[Line], set[str]]:
    own = copy.deepcopy(model).float().to(device).eval()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    kernels = kernels_of(own, variant, dtype, device)
    measured = errors(_measure(own, truth, variant, device, precision), truth)
    names = ("outputs", "loss terms", "gradients")
    bounded = zip(names, measured, BOUNDS[precision], strict=True)
    lines = [Line(f"{precision} {name} against fp64", kernels, e, bound, e <= bound) for name, e, bound in bounded]
    if "native" in kernels:
        with library.switched_off():
            by_torch = errors(_measure(own, truth, variant, device, precision), truth)[2]
        ratio = measured[2] / max(by_torch, 1e-30)
        name = f"{precision} gradient error over that of torch's kernels"
        lines.append(Line(name, kernels, ratio, NATIVE_ERROR, ratio <= NATIVE_ERROR))
    lines.append(_isolation_line(own, variant, precision, device, kernels))
    return lines, set(kernels.split(", ")) if kernels else set()


@torch.no_grad()
def _isolation_line(model: Model, variant: Variant, precision: str, device: torch.device, kernels: str) -> Line:
    """Change the first token of one sequence after another: every other sequence's output stays bit-equal."""
    changed_others, unchanged_self = 0, 0
    for micro in variant.micros:
        batch = micro.to(device)
        with autocast(precision, device):
            before = _outputs(model, batch)
            for index in range(min(batch.num_seqs, 6)):
                other, places = change_tokens(batch, lambda a, b: a, only=index)
                if not places:
                    continue
                after = _outputs(model, other)
                same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
                changed_others += sum(not s for i, s in enumerate(same) if i != index)
                unchanged_self += same[index]
    passed = changed_others == 0 and unchanged_self == 0
    return Line(
        f"{precision} sequences are isolated, bit for bit", kernels, float(changed_others + unchanged_self), 0.0, passed
    )
