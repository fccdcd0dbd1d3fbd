"""Claims about models that merge or remove visual tokens: the claims about tokens, and more per mode.

In every mode, the remaining tokens of a batch equal those of each sample alone, computed in plain operations without
moving tokens.

In the reference, images are merged one by one, the row is
assembled token by token, and inside the language model nothing moves: a removed token stays in place, and no query sees
it. So it shares neither the shortening of runs nor the kernels with the code under proof.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from unpad.batching.batch import RaggedBatch, required
from unpad.batching.layout import Layout, PaddedLayout, build_layout
from unpad.models.contract import ORIGIN, Model, PrunesTokens
from unpad.models.objective import LAST
from unpad.models.vision_language.losses import TERMS as ADVERSARY
from unpad.models.vision_language.model import TEACHING, VisionLanguage
from unpad.models.vision_language.prune import PruneConfig, drawn_noise, even_order, random_order
from unpad.models.vision_language.visual import VisionTokens
from unpad.nn.block import BEFORE, Block
from unpad.nn.losses import Terms
from unpad.nn.rope import Rotary, turned
from unpad.proof import measure, tokens
from unpad.proof.content import gap_of, units_of
from unpad.proof.line import Line, Lines


@dataclass(frozen=True)
class ReferenceRow:
    """One sample as the language model reads it.

    Args:
        batch: with embeddings of text and of visual tokens.
        visual: (total_tokens,) bool.
        question: (total_tokens,) bool, the text up to the token that predicts the first target.
        source: (num_visual,) int64, the patch of the sample that each visual token is or represents.
        received: (num_patches,), attention that patches receive in the tower; None if no ranking reads it.
    """

    batch: RaggedBatch
    visual: Tensor
    question: Tensor
    source: Tensor
    received: Tensor | None


@dataclass(frozen=True)
class Plain:
    """One sample's pass.

    Args:
        hidden: (num_left, width), states of the tokens that are left, after the last norm.
        kept: visual tokens that entered each block.
        terms: of the model's losses.
    """

    hidden: Tensor
    kept: list[int]
    terms: Terms


def plain_pass(model: VisionLanguage, sample: RaggedBatch, mode: str) -> Plain:
    """Compute one sample.

    Args:
        model: in evaluation mode.
        sample: a flat run of one sequence.
        mode: one of `model.modes`.
    """
    row = _row(model, sample, merges=model.config.merge is not None and mode != "origin")
    batch, decoder = row.batch, model.decoder
    total = batch.total_tokens
    there, p = torch.ones(total, dtype=torch.bool), torch.ones(total, dtype=next(model.parameters()).dtype)
    rotary, x = decoder._rotary(batch.position_ids, p.dtype), decoder._embed(batch)
    kept, weights = [], p[:0]  # before the first block there is no attention
    chances: list[Tensor] = []  # weights that tokens have by chance
    expected: list[Tensor] = []  # logits of heads beside them
    for index in range(BEFORE, len(decoder.blocks)):
        if index != BEFORE:
            kept.append(int((row.visual & there).sum()))
            block = decoder.blocks[index]
            assert isinstance(block, Block)
            attended, weights = _attend(block, x, rotary, there, p)
            x = x + attended
            x = x + block.feed_forward(block.norm_2(x)[1])
        if mode in (*TEACHING, "hard") and index in _pruning(model).layers and bool(row.visual.any()):
            if mode == "hard":
                there = there & ~_removed(model, index, x, weights, row.visual & there, row)
                continue
            noise = _noise(index, row.visual, row, p.dtype)
            judged = _judged(model, index, x.detach() if mode == "relevance" else x, weights, row.visual, row)
            factor = torch.ones_like(p)
            factor[row.visual] = torch.sigmoid(noise if mode == "relevance" else (judged + noise) / model.temperature)
            factor = torch.where(_needed(batch), 1, factor)
            if mode == "relevance":  # weights by chance, which the heads beside them expect
                expected.append(judged)
                chances.append(factor.requires_grad_())
            p = p * factor
    hidden = decoder.norm(x)[1]
    terms = _terms(model, hidden, batch, p[row.visual] if mode == "soft" else None)
    if expected:
        terms["relevance"] = _relevance(terms["cross_entropy"][0], chances, expected, row.visual & ~_needed(batch), row)
    return Plain(hidden[there], kept, terms)


def _pruning(model: VisionLanguage) -> PruneConfig:
    assert model.config.prune is not None, "a model that prunes"
    return model.config.prune


def _attend(block: Block, x: Tensor, rotary: Rotary | None, there: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """A block's attention with keys and values of probability p, and its weights (heads, total, total)."""
    attention, total = block.attention, len(x)
    q, k, v = turned(attention.project(block.norm_1(x)[1]), attention.heads, rotary)
    k, v = (y.repeat_interleave(attention.heads // attention.kv_heads, 1) for y in (k, v))
    # A removed token still sees itself, or its row would be NaN; no token sees that row.
    visible = there | torch.eye(total, dtype=torch.bool)
    if attention.causal:
        visible = visible & torch.ones(total, total, dtype=torch.bool).tril()
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(attention.head_dim) + p.log()
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return attention.to_out(torch.einsum("hqk,khd->qhd", weights, v * p[:, None, None]).flatten(1)), weights


def _needed(batch: RaggedBatch) -> Tensor:
    """Tokens that are never removed: those with a target, and the last one; (total_tokens,) bool."""
    return batch.loss_mask | (torch.arange(batch.total_tokens) == batch.total_tokens - 1)


def _judged(model: VisionLanguage, index: int, x: Tensor, weights: Tensor, visual: Tensor, row: ReferenceRow) -> Tensor:
    """Logits of the visual tokens, by the head after a block."""
    asks = row.question & _pruning(model).question
    layouts = [build_layout(np.array([int(mask.sum())])) for mask in (visual, asks)]
    received = None
    if _pruning(model).attention_weight != "none":
        seen = weights[:, asks][:, :, visual].detach()
        received = seen.sum((0, 1)) / max(seen.shape[0] * seen.shape[1], 1) * len(row.source)
    return model.pruners[str(index)](VisionTokens(x[visual], layouts[0], x[asks], layouts[1], received))


def _noise(index: int, visual: Tensor, row: ReferenceRow, dtype: torch.dtype) -> Tensor:
    """The noise that evaluation draws for these visual tokens and the head after a block."""
    return drawn_noise(index, visual[row.visual].nonzero().flatten(), dtype)  # place among all of the sample


def _relevance(
    loss: Tensor, chances: list[Tensor], expected: list[Tensor], removable: Tensor, row: ReferenceRow
) -> tuple[Tensor, int]:
    """Cross entropy of what heads expect with the shares of tokens in how much the loss falls as their weights grow.

    Args:
        chances: of every head, weights of all tokens, (total_tokens,).
        expected: of every head, logits of the visual tokens.
        removable: (total_tokens,) bool, visual tokens that do not always stay.
    """
    total = loss.new_zeros(())
    for grown, logits in zip(torch.autograd.grad(loss, chances, retain_graph=True), expected, strict=True):
        falls = torch.where(removable, -grown, 0).clamp_min(0)[row.visual]
        if float(falls.sum()) > 0:
            total = total - (falls / falls.sum() * logits.log_softmax(0)).sum()
    return total, 1


@torch.no_grad()
def _removed(
    model: VisionLanguage, index: int, x: Tensor, weights: Tensor, visual: Tensor, row: ReferenceRow
) -> Tensor:
    """The tokens that a block's head or ranking takes out of those that are left, (total_tokens,) bool."""
    config, num = _pruning(model), int(visual.sum())
    needed = _needed(row.batch)[visual]
    if config.learns:
        scores = _judged(model, index, x, weights, visual, row)
        if config.softens:
            scores = scores + _noise(index, visual, row, scores.dtype)
    else:
        scores = _ranked(config.method, weights, visual, row)
    scores = torch.where(needed, math.inf, scores)
    kept = torch.zeros(num, dtype=torch.bool)
    if config.keep is None:
        kept = torch.sigmoid(scores / model.temperature) > config.threshold if config.threshold > 0 else ~kept
        kept[scores.argmax()] = True
    else:
        kept[scores.argsort(descending=True, stable=True)[: max(1, math.ceil(config.keep * num - 1e-9))]] = True
    removed = torch.zeros_like(visual)
    removed[visual] = ~kept
    return removed


def _ranked(method: str, weights: Tensor, visual: Tensor, row: ReferenceRow) -> Tensor:
    """Scores of the visual tokens that are left, (num,), by a ranking."""
    media, ids = row.batch.media, row.batch.seq_ids
    source = row.source[visual[row.visual]]
    assert media is not None
    assert media.grid is not None
    if method == "attention":
        asks = row.question.nonzero().flatten()
        return weights[:, asks[-1], visual].mean(0) if len(asks) else weights.new_zeros(len(source))
    if method == "class_token":
        return required(row.received)[source]
    if method == "random":
        samples = torch.zeros(1, dtype=torch.int64) if ids is None else ids
        return random_order(build_layout(np.array([len(source)])), samples)
    columns = media.grid[media.flat_layout.seq_of_token(), 1]
    return even_order((media.position_ids // columns)[source], (media.position_ids % columns)[source])


def _terms(model: VisionLanguage, hidden: Tensor, batch: RaggedBatch, keep: Tensor | None) -> Terms:
    """The model's loss terms, from hidden states of all tokens and the probabilities that visual tokens stay."""
    logits = hidden[batch.target_index] @ model.decoder.head_weight.T
    labels, num = batch.labels[batch.target_index], batch.num_targets
    loss, nll = (
        F.cross_entropy(logits, labels, reduction="sum", label_smoothing=share)
        for share in (model.label_smoothing, 0.0)
    )
    terms: Terms = {"cross_entropy": (loss, num), "nll": (nll.detach(), num)}
    if keep is not None and len(keep):
        config, mean = _pruning(model), keep.mean()
        target, unit = config.wanted
        gap = mean - (target if unit == "ratio" else min(target / len(keep), 1))
        gap = gap.clamp_min(0) if config.one_sided else gap
        decided = (keep * (1 - keep)).mean() - (keep - mean).square().mean() / 2
        terms |= {"sparsity": (gap.square(), 1), "token_count": (mean, 1), "binarisation": (decided, 1)}
    return terms


# --------------------------------------------------------------------------- the row, token by token


def _row(model: VisionLanguage, sample: RaggedBatch, merges: bool) -> ReferenceRow:
    assert isinstance(sample.layout, Layout), "one sequence, not a rectangle"
    text, owner = model._text(sample), torch.full((sample.total_tokens,), -1)  # the image of every placeholder
    images: list[tuple[Tensor, Tensor, Tensor]] = []  # embeddings, patches that they stand for, places of all patches
    received: list[Tensor] = []
    if sample.media is not None and sample.media_index is not None:
        places = sample.media_index.split(sample.media.layout.lengths().tolist())
        for image, patches in enumerate(places):
            owner[patches] = image
        for image, patches in enumerate(places):
            features, seen = model.tower.look(sample.media.select([image]), model.config.ranks_in_tower)
            received += [] if seen is None else [seen]
            stands = torch.arange(len(features))
            if merges:
                question = text[(owner < 0) & _asks(sample.loss_mask)]
                features, stands = _merged(model, features, seen, question)
            images.append((model.projector(features), stands, patches))
    return _put_together(sample, text, owner, images, torch.cat(received) if received else None)


def _asks(loss_mask: Tensor) -> Tensor:
    """The tokens up to the one that predicts the first target."""
    return loss_mask.cumsum(0) == loss_mask.long()


def _merged(
    model: VisionLanguage, features: Tensor, received: Tensor | None, question: Tensor
) -> tuple[Tensor, Tensor]:
    """Features of one image's merged tokens, and the patch that each replaces."""
    merge, num = model.config.merge, len(features)
    assert merge is not None, "a model that merges"
    if merge.variant == "class_token":
        assert received is not None
        assert merge.ratio is not None, "checked by the config"
        order = received.argsort(descending=True, stable=True)
        best = order[: max(1, math.floor(merge.ratio * num + 1e-9))].sort()[0]
        return features[best], best
    layouts = [build_layout(np.array([len(x)])) for x in (features, question)]
    merged = required(model.merger)(VisionTokens(features, layouts[0], question, layouts[1]))
    if merge.variant == "slots":
        assert merge.slots is not None, "checked by the config"
        return merged.features, torch.tensor([slot * num // merge.slots for slot in range(merge.slots)])
    return merged.features, merged.places


def _put_together(
    sample: RaggedBatch,
    text: Tensor,
    owner: Tensor,
    images: list[tuple[Tensor, Tensor, Tensor]],
    received: Tensor | None,
) -> ReferenceRow:
    """Assemble the row: text in place, and every image's tokens at the place of its first patch."""
    cells: list[tuple[Tensor, int, int, bool, bool]] = []  # embedding, position, label, is a target, is visual
    first_patch, source = 0, [torch.zeros(0, dtype=torch.int64)]
    positions, labels, counted = (x.tolist() for x in (sample.position_ids, sample.labels, sample.loss_mask))
    for token, image in enumerate(owner.tolist()):
        if image < 0:
            cells.append((text[token], positions[token], labels[token], counted[token], False))
            continue
        embeds, stands, places = images[image]
        if token != int(places[0]):
            continue
        last = int(places[-1])  # the only patch that may predict a target
        for number, (embed, patch) in enumerate(zip(embeds, places[stands].tolist(), strict=True), 1):
            at_end = number == len(embeds)
            cells.append((embed, positions[patch], labels[last] * at_end, counted[last] and at_end, True))
        source.append(first_patch + stands)
        first_patch += len(places)
    x, *columns = zip(*cells, strict=True) if cells else ((), (), (), (), ())
    ids, targets = (torch.tensor(column, dtype=torch.int64) for column in columns[:2])
    loss_mask, is_visual = (torch.tensor(column, dtype=torch.bool) for column in columns[2:])
    batch = RaggedBatch(
        layout=build_layout(np.array([len(x)])),
        position_ids=ids,
        input_ids=torch.zeros(len(x), dtype=torch.int64),  # marks the batch as text: its positions are scaled
        labels=targets,
        loss_mask=loss_mask,
        target_index=loss_mask.nonzero().flatten(),
        inputs_embeds=torch.stack(x) if x else text[:0],
        seq_ids=sample.seq_ids,
        media=sample.media,
    )
    return ReferenceRow(batch, is_visual, _asks(loss_mask) & ~is_visual, torch.cat(source), received)


REFERENCE = "plain reference"
OTHERS = (measure.PADDED_LEFT, measure.SPLIT)
WITH_IMAGE = "sequence with an image"


def more_lines(case: measure.Case) -> list[Line]:
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


def _add_lines(lines: Lines, model: VisionLanguage, mode: str, case: measure.Case, weights: dict[str, float]) -> None:
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
    others = measure.more_variants(case.base, gap_of([range(len(units))], units, what=WITH_IMAGE))
    for name, make in {packed.name: lambda: packed, **{name: others[name] for name in OTHERS}}.items():
        lines.add(subject.claim(name), partial(measure.made_and_equal, subject, make))
    lines.add(subject.claim(f"{packed.name}, torch alone"), lambda: measure.torch_lines(subject, packed))
    own = measure.in_own_precision(subject, model)
    if mode in TEACHING and model.config.merge is None:
        # Terms of the kept share may be close to 0, which makes a relative error of rounding arbitrarily large.
        terms = f"{mode}: {case.precision} against fp64"
        lines.add(terms, lambda: measure.error_lines(own, packed, case.precision, ("cross_entropy", "nll")))
    lines.add(f"{mode}: {case.precision} isolation", lambda: measure.isolation_line(own, packed, case.precision))


def _subject(model: VisionLanguage, mode: str, case: measure.Case, weights: dict[str, float]) -> measure.ProofSubject:
    """The model in one mode, with its reference."""
    exact = copy.deepcopy(model).double().eval().cpu()
    exact.mode = mode
    truth = _truth(exact, [one.to(torch.device("cpu")) for one in case.alone], mode, weights)
    is_whole = [len(left) == one.total_tokens for left, one in zip(truth.outputs, case.alone, strict=True)]
    gap = "no token of the sample is merged or removed" if mode not in TEACHING and all(is_whole) else ""
    return measure.ProofSubject(exact.to(case.device), truth, case.device, left_rows, f"{mode}: ", REFERENCE, gap)


def _truth(
    model: VisionLanguage, alone: Sequence[RaggedBatch], mode: str, weights: dict[str, float]
) -> measure.Measurement:
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
    return measure.Measurement(
        outputs=[one.hidden.detach() for one in passes],
        terms={name: float(value.detach()) for name, value in means.items()},
        counts=counts,
        weights=weights,
        gradients=measure.gradients(model),
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
        return measure.per_sequence(hidden, batch) if torch.equal(left, lengths) else None
    return list(hidden.split(left.tolist()))


CLAIMS = replace(tokens.CLAIMS, more_lines=more_lines)
