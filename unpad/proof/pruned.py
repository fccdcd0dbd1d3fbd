"""Claims about models that merge or remove visual tokens: those about tokens, and further ones per mode.

In every mode, the tokens left of a batch equal those left of each sample alone, computed in plain operations that move
nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch, from_padded
from unpad.batching.layout import PaddedLayout
from unpad.models.contract import ORIGIN, Model, PrunesTokens
from unpad.models.objective import LAST
from unpad.models.vision_language.adversary import TERMS as ADVERSARY
from unpad.models.vision_language.model import VisionLanguage
from unpad.nn.kernel import choose_kernels
from unpad.proof import tokens
from unpad.proof.claims import Case
from unpad.proof.line import Line
from unpad.proof.measure import (
    Measurement,
    Subject,
    Variant,
    equal_line,
    error_lines,
    gradients,
    in_own_precision,
    isolation_line,
    kernel_names,
    more_variants,
    torch_lines,
)
from unpad.proof.pruned_reference import plain_pass

TASK = ("cross_entropy", "nll")


def more_lines(case: Case) -> list[Line]:
    """The claims for every mode but origin; a discriminator's terms are left out."""
    lines: list[Line] = []
    weights = {name: weight for name, weight in case.weights.items() if name not in ADVERSARY}
    model = copy.deepcopy(case.model)
    assert isinstance(model, VisionLanguage), "which the reference is written for"
    model.begin_step(LAST, LAST, weights)
    _, left, *_, split = more_variants(case.base)
    for mode in model.modes:
        if mode != ORIGIN:
            subject = _subject(model, mode, case, weights)
            lines += [equal_line(subject, variant) for variant in (case.packed, left, split)]
            lines += torch_lines(subject, case.packed)
            lines += _own_precision_lines(in_own_precision(subject), case, mode)
    return lines


def _subject(model: VisionLanguage, mode: str, case: Case, weights: dict[str, float]) -> Subject:
    """The model in one mode, and the reference's truth."""
    exact = copy.deepcopy(model).double().eval().cpu()
    exact.mode = mode
    truth = _truth(exact, [one.to(torch.device("cpu")) for one in case.alone], mode, weights)
    return Subject(
        exact.to(case.device), truth, case.device, left_rows, _kernels_of, f"{mode}: ", truth_name="plain reference"
    )


def _own_precision_lines(own: Subject, case: Case, mode: str) -> list[Line]:
    """Sequences are isolated; and results are near fp64, except in modes whose choices of tokens depend on rounding."""
    assert isinstance(own.model, VisionLanguage)
    near: list[Line] = []
    if mode == "soft" and own.model.config.merge is None:
        # Terms of the kept share may be close to 0, which makes a relative error of rounding arbitrarily large.
        near = error_lines(own, case.packed, case.precision, TASK)
    return [*near, isolation_line(own, case.packed, case.precision)]


def _truth(model: VisionLanguage, alone: Sequence[RaggedBatch], mode: str, weights: dict[str, float]) -> Measurement:
    """Compute one sample after another by the reference, with the gradient of the weighted terms."""
    model.zero_grad()
    passes = [plain_pass(model, one, mode) for one in alone]
    parts: dict[str, list[tuple[Tensor, int]]] = {}
    for one in passes:
        for name, part in one.terms.items():
            parts.setdefault(name, []).append(part)
    counts = {name: sum(count for _, count in sums) for name, sums in parts.items()}
    means = {name: torch.stack([total for total, _ in sums]).sum() / counts[name] for name, sums in parts.items()}
    torch.stack([weight * means[name] for name, weight in weights.items() if name in means]).sum().backward()
    return Measurement(
        outputs=[one.hidden.detach() for one in passes],
        terms={name: float(value.detach()) for name, value in means.items()},
        counts=counts,
        weights=weights,
        gradients=gradients(model),
    )


def left_rows(model: Model, batch: RaggedBatch) -> list[Tensor] | None:
    """Hidden states of the tokens left of each sequence; None if a rectangle does not separate them from padding."""
    assert isinstance(model, PrunesTokens), "a model that counts what is left"
    hidden: Tensor = model(batch)
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


def _kernels_of(model: Model, variant: Variant, dtype: torch.dtype, device: torch.device) -> str:
    """Names of the kernels that compute a variant in the language model.

    Merged images make a flat run of a rectangle. Soft removal gives a key bias to the blocks after its first layer, and
    to all blocks when that is before the first; a batch without images has none.
    """
    assert isinstance(model, VisionLanguage)
    assert model.head_dim is not None
    prune, blocks = model.config.prune, model.config.language.blocks
    chosen = []
    for batch in variant.micros:
        layout = batch.attended if model.config.merge is None else batch.flat().layout
        softened = model.mode == "soft" and batch.media is not None and batch.media.total_tokens > 0
        first = prune.layers[0] if softened and prune is not None else blocks
        for key_bias in {index > first for index in range(blocks)}:
            chosen.append(choose_kernels(dtype, device, layout, model.head_dim, key_bias=key_bias))
    return kernel_names(*chosen)


CLAIMS = replace(tokens.CLAIMS, more_lines=more_lines)
