"""Claims about models that merge or remove visual tokens: the claims about tokens, and more per mode.

In every mode, the remaining tokens of a batch equal those of each sample alone, computed in plain operations without
moving tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch, from_padded
from unpad.batching.layout import PaddedLayout
from unpad.models.contract import ORIGIN, Model, PrunesTokens
from unpad.models.objective import LAST
from unpad.models.vision_language.adversary import TERMS as ADVERSARY
from unpad.models.vision_language.model import VisionLanguage
from unpad.proof import tokens
from unpad.proof.claims import Case
from unpad.proof.content import gap_of, units_of
from unpad.proof.line import Line, Lines
from unpad.proof.measure import (
    PADDED_LEFT,
    SPLIT,
    Measurement,
    ProofSubject,
    error_lines,
    gradients,
    in_own_precision,
    isolation_line,
    made_and_equal,
    more_variants,
    torch_lines,
)
from unpad.proof.pruned_reference import plain_pass

REFERENCE = "plain reference"
OTHERS = (PADDED_LEFT, SPLIT)
WITH_IMAGE = "sequence with an image"
TASK = ("cross_entropy", "nll")


def more_lines(case: Case) -> list[Line]:
    """The claims for every mode but origin; a discriminator's terms are left out."""
    lines = Lines()
    weights = {name: weight for name, weight in case.weights.items() if name not in ADVERSARY}
    model = copy.deepcopy(case.model)
    assert isinstance(model, VisionLanguage), "which the reference is written for"
    model.begin_step(LAST, LAST, weights)
    for mode in model.modes:
        if mode != ORIGIN:
            _add_lines(lines, model, mode, case, weights)
    return lines.done


def _add_lines(lines: Lines, model: VisionLanguage, mode: str, case: Case, weights: dict[str, float]) -> None:
    """The lines of one mode."""
    subject = lines.value(f"{mode}: {REFERENCE}", lambda: _subject(model, mode, case, weights))
    if subject is None:
        return
    # Only sequences with an image lose tokens.
    units = [
        unit if one.media is not None and one.media.num_seqs else None
        for unit, one in zip(units_of(case.alone), case.alone, strict=True)
    ]
    packed = replace(case.packed, gap=case.packed.gap or gap_of(case.packed.rows, units, what=WITH_IMAGE))
    others = more_variants(case.base, gap_of([range(len(units))], units, what=WITH_IMAGE))
    for name, make in {packed.name: lambda: packed, **{name: others[name] for name in OTHERS}}.items():
        lines.add(subject.claim(name), partial(made_and_equal, subject, make))
    lines.add(subject.claim(f"{packed.name}, torch alone"), lambda: torch_lines(subject, packed))
    own = in_own_precision(subject, model)
    if mode == "soft" and model.config.merge is None:
        # Terms of the kept share may be close to 0, which makes a relative error of rounding arbitrarily large.
        terms = f"{mode}: {case.precision} against fp64"
        lines.add(terms, lambda: error_lines(own, packed, case.precision, TASK))
    lines.add(f"{mode}: {case.precision} isolation", lambda: isolation_line(own, packed, case.precision))


def _subject(model: VisionLanguage, mode: str, case: Case, weights: dict[str, float]) -> ProofSubject:
    """The model in one mode, with its reference."""
    exact = copy.deepcopy(model).double().eval().cpu()
    exact.mode = mode
    truth = _truth(exact, [one.to(torch.device("cpu")) for one in case.alone], mode, weights)
    is_whole = [len(left) == one.total_tokens for left, one in zip(truth.outputs, case.alone, strict=True)]
    gap = "no token of the sample is merged or removed" if mode != "soft" and all(is_whole) else ""
    prefix = f"{mode}: "
    return ProofSubject(exact.to(case.device), truth, case.device, left_rows, prefix, truth_name=REFERENCE, gap=gap)


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


CLAIMS = replace(tokens.CLAIMS, more_lines=more_lines)
