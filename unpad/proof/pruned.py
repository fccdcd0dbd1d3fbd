"""The part of the certificate on models that make visual tokens fewer.

In every mode, what a batch has left is what each sample has left alone, computed in plain operations where nothing
moves.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch, from_padded
from unpad.batching.layout import PaddedLayout
from unpad.models.objective import LAST
from unpad.models.vision_language.adversary import TERMS as ADVERSARY
from unpad.nn.kernel import choose_kernels
from unpad.nn.native import library
from unpad.nn.precision import autocast
from unpad.proof.line import Line
from unpad.proof.measure import (
    BOUNDS,
    EXACT,
    Measurement,
    Variant,
    change_tokens,
    errors,
    gradients,
    kernel_names,
    more_variants,
)
from unpad.proof.pruned_reference import plain_pass
from unpad.training.step import accumulate


def pruned_lines(
    model: Any,
    alone: list[RaggedBatch],
    base: RaggedBatch,
    packed: Variant,
    weights: dict[str, float],
    precision: str,
    device: torch.device,
) -> list[Line]:
    """The claims for every mode of a model but origin.

    Args:
        weights: of the loss terms; those that a discriminator makes are left out.
        alone: every sequence as a batch of its own, straight from the data.
        base: all of them in one run.
        packed: the same as the data batches them.
    """
    lines = []
    weights = {name: weight for name, weight in weights.items() if name not in ADVERSARY}
    model = copy.deepcopy(model)
    model.begin_step(LAST, LAST, weights)
    for mode in model.modes:
        if mode == "origin":
            continue
        exact = copy.deepcopy(model).double().eval()
        exact.mode = mode
        truth = _truth(exact.cpu(), [one.to(torch.device("cpu")) for one in alone], mode, weights)
        exact = exact.to(device)
        _, left, *_, split = more_variants(base)
        for variant in (packed, left, split):
            lines.append(_equal_line(exact, truth, variant, mode, device))
        if library.enabled():
            with library.switched_off():
                variant = replace(packed, name=f"{packed.name}, torch alone")
                lines.append(_equal_line(exact, truth, variant, mode, device))
        lines += _own_precision_lines(model, truth, packed, mode, precision, device)
    return lines


def _truth(model: Any, alone: list[RaggedBatch], mode: str, weights: dict[str, float]) -> Measurement:
    """One sample after another by the reference, with the gradient of these terms' sum."""
    model.zero_grad()
    passes = [plain_pass(model, one, mode) for one in alone]
    parts: dict[str, list[tuple[Tensor, int]]] = {}
    for one in passes:
        for name, part in one.terms.items():
            parts.setdefault(name, []).append(part)
    counts = {name: sum(count for _, count in found) for name, found in parts.items()}
    means = {name: torch.stack([total for total, _ in found]).sum() / counts[name] for name, found in parts.items()}
    torch.stack([weight * means[name] for name, weight in weights.items() if name in means]).sum().backward()
    return Measurement(
        outputs=[one.hidden.detach() for one in passes],
        terms={name: float(value.detach()) for name, value in means.items()},
        counts=counts,
        weights=weights,
        gradients=gradients(model),
    )


def _measure(
    model: Any, wanted: Measurement, variant: Variant, precision: str, device: torch.device
) -> tuple[Measurement, bool]:
    """What training computes, and whether the outputs could be compared: what is left in a rectangle of which tokens
    were removed has no order of its own."""
    model.zero_grad()
    micros = [batch.to(device) for batch in variant.micros]
    sums, counts = accumulate(model, micros, wanted.weights, precision)
    outputs, compared = list(wanted.outputs), True
    with torch.no_grad(), autocast(precision, device):
        for batch, rows in zip(micros, variant.rows, strict=True):
            found = left_rows(model, model(batch), batch)
            compared = compared and found is not None
            for row, output in zip(rows, found or [], strict=found is not None):
                if row >= 0:
                    outputs[row] = output.cpu()
    present = {name: count for name, count in counts.items() if count}
    terms = {name: float(sums[name]) / count for name, count in present.items()}
    on_host = {name: gradient.cpu() for name, gradient in gradients(model).items()}
    return Measurement(outputs, terms, present, wanted.weights, on_host), compared


def left_rows(model: Any, hidden: Tensor, batch: RaggedBatch) -> list[Tensor] | None:
    """The hidden states of each sequence after a pass over this batch, of the tokens that are left; None where a
    rectangle does not tell them from padding."""
    lengths = left = batch.layout.lengths()
    if model.kept and batch.media is not None and batch.media_seqs is not None:
        patches = torch.zeros_like(lengths).index_add(0, batch.media_seqs, batch.media.layout.lengths())
        left = lengths - patches + model.kept[-1]
    if isinstance(batch.layout, PaddedLayout) and len(hidden) == batch.total_tokens:
        if not torch.equal(left, lengths):
            return None
        mask = batch.layout.attention_mask
        hidden = from_padded(hidden.unflatten(0, mask.shape), mask)
    return list(hidden.split(left.tolist()))


def _equal_line(model: Any, truth: Measurement, variant: Variant, mode: str, device: torch.device) -> Line:
    got, compared = _measure(model, truth, variant, "fp32", device)
    error = max(errors(got, truth))
    what = "" if compared else ", terms and gradients"
    name = f"{mode}: {variant.name} = plain reference{what}"
    return Line(name, _kernels_of(model, variant, torch.float64, device), error, EXACT, error <= EXACT)


def _kernels_of(model: Any, variant: Variant, dtype: torch.dtype, device: torch.device) -> str:
    """Names of the kernels that compute a variant in the language model.

    Merged images make a flat run of a rectangle. Soft removal gives a key bias to the blocks after its first layer, and
    to all blocks when that is before the first; a batch without images has none.
    """
    chosen = []
    for batch in variant.micros:
        layout = batch.attended if model.config.merge is None else batch.flat().layout
        softened = model.mode == "soft" and batch.media is not None and batch.media.total_tokens > 0
        first = model.config.prune.layers[0] if softened else model.config.language.blocks
        for key_bias in {index > first for index in range(model.config.language.blocks)}:
            chosen.append(choose_kernels(dtype, device, layout, model.head_dim, key_bias=key_bias))
    return kernel_names(*chosen)


def _own_precision_lines(
    model: Any, truth: Measurement, variant: Variant, mode: str, precision: str, device: torch.device
) -> list[Line]:
    """In the run's precision: sequences are isolated; and where nothing is chosen, which a rounding could turn, near
    fp64."""
    own = copy.deepcopy(model).float().to(device).eval()
    own.mode = mode
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    kernels = _kernels_of(own, variant, dtype, device)
    lines = []
    if mode == "soft" and model.config.merge is None:
        # Terms of what is kept may be anything near 0, of which a rounding is any share.
        got, wanted = (_of_the_task(one) for one in (_measure(own, truth, variant, precision, device)[0], truth))
        found = errors(got, wanted)
        for name, error, bound in zip(("outputs", "loss terms", "gradients"), found, BOUNDS[precision], strict=True):
            lines.append(Line(f"{mode}: {precision} {name} against fp64", kernels, error, bound, error <= bound))
    wrong = _leaks(own, variant, precision, device)
    return [*lines, Line(f"{mode}: {precision} sequences are isolated, bit for bit", kernels, wrong, 0.0, wrong == 0)]


def _of_the_task(measured: Measurement) -> Measurement:
    names = ("cross_entropy", "nll")
    return replace(
        measured,
        terms={name: measured.terms[name] for name in names},
        counts={name: measured.counts[name] for name in names},
    )


@torch.no_grad()
def _leaks(model: Any, variant: Variant, precision: str, device: torch.device) -> float:
    """Change the first token of one sequence after another, and count the others whose output changes, and those whose
    own does not."""
    wrong = 0
    for micro in variant.micros:
        batch = micro.to(device)
        with autocast(precision, device):
            before = left_rows(model, model(batch), batch)
            if before is None:
                continue
            for index in range(min(batch.num_seqs, 6)):
                other, places = change_tokens(batch, lambda a, b: a, only=index)
                if not places:
                    continue
                after = left_rows(model, model(other), other)
                assert after is not None, "as before"
                same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
                wrong += sum(not s for i, s in enumerate(same) if i != index) + same[index]
    return float(wrong)
