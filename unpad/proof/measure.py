"""Outputs, loss terms and gradients of one way to batch, and their errors against the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch, Side, from_padded
from unpad.batching.layout import Layout, PaddedLayout
from unpad.models.contract import Model
from unpad.models.set_sequence.event_sets import EventSets
from unpad.nn.kernel import Kernel, choose_kernels
from unpad.nn.precision import autocast
from unpad.training.step import accumulate

EXACT = 1e-10


# Relative error allowed of (outputs, loss terms, gradients) against fp64. bf16 keeps 8 bits: one rounding is 0.4 %,
# and a deep network's gradient adds up a few.
BOUNDS = {"fp32": (1e-5, 1e-6, 1e-4), "fp16": (5e-3, 1e-3, 2e-2), "bf16": (3e-2, 5e-3, 6e-2)}


NATIVE_ERROR = 1.2  # native kernels may be this much further from fp64 than torch's in the same precision


SIDES: tuple[Side, Side] = ("left", "right")


@dataclass(frozen=True)
class Variant:
    """One way to batch all sequences once: its micro-batches, and which sequence each of their rows is (-1: filler)."""

    name: str
    micros: Sequence[RaggedBatch]
    rows: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Measurement:
    outputs: list[Tensor]
    terms: dict[str, float]
    counts: dict[str, int]
    weights: dict[str, float]  # of the terms whose gradients these are
    gradients: dict[str, Tensor]


def _one_at_a_time(model: Model, alone: list[RaggedBatch], weights: dict[str, float]) -> Measurement:
    """Each sequence as a batch of its own; the gradient of their losses, each over its count in all of them."""
    model.zero_grad()
    per_batch = [model.count_targets(batch) for batch in alone]
    counts = {name: sum(one[name] for one in per_batch) for name in per_batch[0]}
    outputs: list[Tensor] = []
    sums: dict[str, float] = {}
    for batch, present in zip(alone, per_batch, strict=True):
        with torch.no_grad():
            outputs.append(model(batch))
        if any(present[name] for name in weights):
            terms = model.losses(batch)
            trained = [weight * terms[name][0] / counts[name] for name, weight in weights.items() if counts[name]]
            torch.stack(trained).sum().backward()
            sums = {name: sums.get(name, 0.0) + float(value[0].detach()) for name, value in terms.items()}
    means = {name: value / max(counts[name], 1) for name, value in sums.items()}
    return Measurement(outputs, means, {name: counts[name] for name in sums}, weights, gradients(model))


def _measure(model: Model, truth: Measurement, variant: Variant, device: torch.device, precision: str) -> Measurement:
    """What training computes for this variant, through the same `accumulate` that training uses."""
    model.zero_grad()
    micros = [batch.to(device) for batch in variant.micros]
    sums, counts = accumulate(model, micros, truth.weights, precision)
    terms = {name: float(value) / max(counts[name], 1) for name, value in sums.items()}
    outputs: list[Tensor] = [torch.zeros(0)] * len(truth.outputs)
    with torch.no_grad(), autocast(precision, device):
        for batch, rows in zip(micros, variant.rows, strict=True):
            for row, output in zip(rows, _outputs(model, batch), strict=True):
                if row >= 0:
                    outputs[row] = output
    return Measurement(outputs, terms, counts, truth.weights, gradients(model))


def _outputs(model: Model, batch: RaggedBatch) -> list[Tensor]:
    """What the model makes of every sequence: a row per token, or one per patient."""
    hidden = model(batch)
    return list(hidden[:, None].unbind()) if batch.part(EventSets) is not None else _per_sequence(hidden, batch)


def _per_sequence(hidden: Tensor, batch: RaggedBatch) -> list[Tensor]:
    if isinstance(batch.layout, PaddedLayout):
        mask = batch.layout.attention_mask
        hidden = from_padded(hidden.unflatten(0, mask.shape), mask)
    return list(hidden.split(batch.layout.lengths().tolist()))


def gradients(model: Model) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _error(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference relative to the norm of what is wanted; infinite when shapes differ or values are NaN."""
    if got.shape != wanted.shape:
        return float("inf")
    difference = (got.double() - wanted.double()).norm()
    relative = (
        float(difference / wanted.double().norm().clamp_min(1e-30)) if float(difference) > 0 else float(difference)
    )
    return relative if relative == relative else float("inf")


def errors(got: Measurement, wanted: Measurement) -> tuple[float, float, float]:
    """Largest relative errors of outputs, loss terms (counts must be equal) and gradients as one vector."""
    outputs = max((_error(a, b) for a, b in zip(got.outputs, wanted.outputs, strict=True)), default=0.0)
    if got.counts != wanted.counts:
        return outputs, float("inf"), float("inf")
    terms = max((abs(got.terms[n] - v) / max(abs(v), 1e-30) for n, v in wanted.terms.items()), default=0.0)
    if got.gradients.keys() != wanted.gradients.keys():
        return outputs, terms, float("inf")
    flat = [torch.cat([g.double().flatten() for g in m.gradients.values()] or [torch.zeros(0)]) for m in (got, wanted)]
    return outputs, terms if terms == terms else float("inf"), _error(*flat)


def more_variants(packed: RaggedBatch) -> list[Variant]:
    """Rectangles padded on either side and further than needed, and a split with an empty micro-batch in between."""
    whole = list(range(packed.num_seqs))
    longest = packed.layout.max_seqlen if isinstance(packed.layout, Layout) else 0
    shuffled = whole[1::2] + whole[::2]
    third = max(len(whole) // 3, 1)
    parts = [shuffled[:third], [], shuffled[third:]]
    return [
        Variant("padded right", [packed.pad("right")], [whole]),
        Variant("padded left", [packed.pad("left")], [whole]),
        Variant("padded further", [packed.pad("right", pad_to=longest + 7)], [whole]),
        Variant("split into micro-batches, one empty", [packed.select(part) for part in parts], parts),
    ]


def kernels_of(model: Model, variant: Variant, dtype: torch.dtype, device: torch.device) -> str:
    """Names of the attention kernels that compute a variant."""
    head_dim = model.head_dim
    if head_dim is None:
        return ""
    return kernel_names(*(choose_kernels(dtype, device, batch.attended, head_dim) for batch in variant.micros))


def kernel_names(*chosen: Iterable[Kernel]) -> str:
    """Names of the chosen kernels, each once."""
    return ", ".join(sorted({kernel.value for kernels in chosen for kernel in kernels}))


def change_tokens(
    batch: RaggedBatch, where: Callable[[int, int], int], only: int | None = None
) -> tuple[RaggedBatch, list[int]]:
    """Replace one token of every sequence, or of sequence `only`; return the batch and the places.

    Where an image stands it is the next token of text, and none where no text follows.
    """
    assert isinstance(batch.layout, Layout)
    bounds = batch.layout.cu_seqlens.tolist()
    spans = [(index, a, b) for index, (a, b) in enumerate(pairwise(bounds)) if b > a]
    images = set() if batch.media_index is None else set(batch.media_index.tolist())
    texts = [
        [place for place in range(where(a, b), b) if place not in images]
        for index, a, b in spans
        if only in (None, index)
    ]
    places = [text[0] for text in texts if text]
    if batch.input_ids is None:
        assert batch.inputs_embeds is not None
        embeds = batch.inputs_embeds.clone()
        embeds[places] += 1.0
        return replace(batch, inputs_embeds=embeds), places
    ids = batch.input_ids.clone()
    # Token 0 or 1, whichever it is not: ids that every vocabulary has.
    ids[places] = (ids[places] == 0).to(ids.dtype)
    return replace(batch, input_ids=ids), places
