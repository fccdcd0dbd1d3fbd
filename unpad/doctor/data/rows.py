"""Rows of the data and targets of their batches: all alike, without content, on padding, on both sides, or cut."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.batching.layout import Layout
from unpad.doctor.subject import Subject
from unpad.models.contract import ScoresTokens
from unpad.terminal.finding import Finding, Severity, Value

SAMPLE = 200  # sequences that are looked at
MOST_COMPARED = 3000  # of training, with those held out
LEAST_SEQUENCES = 8
CONSTANT, MOSTLY_ONE, ENOUGH = 0.999, 0.95, 100  # shares of one class, and rows of others
EMPTY_INPUTS, MOSTLY_EMPTY = 0.1, 0.5
COPIES, MANY_COPIES, FEW_COPIES = 0.02, 0.05, 3  # shares of what is held out, and rows
LOST, MOSTLY_LOST = 0.1, 0.5
CUT, TINY_PIECE = 0.25, 16.0  # of the mean length, and positions of a piece
MANY_SPLIT = 0.5  # of the conversations
SWALLOWED = 0.01  # of the targets of an epoch
OFTEN, MOSTLY_OF_ONE = 10.0, 0.5  # times a row of a source is in an epoch, and its share of the targets
IDENTITIES = ("seq_ids", "seq_labels")  # of a batch, which are no content
SHOWN = 40  # letters of a target


def check_rows(subject: Subject) -> list[Finding]:
    """Findings on the rows of the stage."""
    return [*_targets(subject), *_copies(subject), *_cuts(subject), *_split(subject), *_sources(subject)]


def class_labels(subject: Subject) -> tuple[np.ndarray, tuple[str, ...]] | None:
    """Classes of the training sequences where they are known, (n,) int64, and their names; None for other data."""
    known = subject.data.class_labels()
    if known is None:
        return None
    labels = known[0][subject.stage.train_ids]
    return labels[labels >= 0], known[1]


# --------------------------------------------------------------------------- targets and inputs


def _targets(subject: Subject) -> list[Finding]:
    known = class_labels(subject)
    if known is not None:
        labels, names = known
        if len(labels) < LEAST_SEQUENCES:
            return []
        counts = np.bincount(labels, minlength=len(names))
        share, most = float(counts.max() / counts.sum()), names[int(counts.argmax())]
        values: dict[str, Value] = {"sequences": len(labels), "target": most}
        if share >= CONSTANT:
            return [Finding("constant_labels", "fault", share, label_fields(subject), values)]
        rare = int(counts.sum() - counts.max())
        severity: Severity = "note" if rare >= ENOUGH else "warning"  # so many rows of other classes can be learnt from
        return [Finding("imbalance", severity, share, label_fields(subject), values)] if share >= MOSTLY_ONE else []
    found = Counter(_target_of(subject, seq) for seq in sampled(subject.stage.train_ids).tolist())
    (most_bytes, num), total = found.most_common(1)[0], sum(found.values())
    if total < LEAST_SEQUENCES or num / total < CONSTANT:
        return []
    values = {"sequences": total, "target": _shown(subject, most_bytes)}
    return [Finding("constant_labels", "fault", num / total, label_fields(subject), values)]


def label_fields(subject: Subject) -> tuple[str, ...]:
    """Fields of the recipe that give the targets."""
    kinds = [kind for kind in subject.stage.kinds if subject.setup.recipe.data.sources(kind)]
    return subject.data.label_fields or tuple(f"data.{kind}" for kind in kinds)


def sampled(ids: np.ndarray, num: int = SAMPLE) -> np.ndarray:
    chosen: np.ndarray = np.random.default_rng(0).permutation(ids)[:num]
    return chosen


def alone(subject: Subject, seq: int) -> RaggedBatch:
    return subject.data.alone(seq, 0, int(subject.data.table.positions[seq]), 0)


def _target_of(subject: Subject, seq: int) -> bytes:
    batch = alone(subject, seq)
    return batch.labels[batch.loss_mask].numpy().tobytes()


def _shown(subject: Subject, target: bytes) -> str:
    tokenizer = getattr(subject.data, "tokenizer", None)
    ids = np.frombuffer(target, np.int64).tolist()
    text: str = tokenizer.decode(ids) if tokenizer is not None else str(ids)
    return text[:SHOWN]


def is_one_vector(batch: RaggedBatch) -> bool | None:
    """True if all vectors of a sequence, such as the patches of its pictures, are equal; None for fewer than two."""
    vectors = batch.inputs_embeds if batch.media is None else batch.media.inputs_embeds
    return None if vectors is None or len(vectors) < 2 else bool((vectors == vectors[:1]).all())


def is_one_token(batch: RaggedBatch) -> bool | None:
    """True if a text is one token again and again; None for a short one."""
    assert batch.input_ids is not None, "texts are tokens"
    return None if batch.total_tokens < LEAST_SEQUENCES else len(batch.input_ids[1:].unique()) == 1


def check_inputs(subject: Subject, is_empty: Callable[[RaggedBatch], bool | None]) -> list[Finding]:
    """A finding on sequences without content.

    Args:
        is_empty: judges a sequence by itself; None for one that is not counted.
    """
    empty, where, total = 0, "", 0
    for seq in sampled(subject.stage.train_ids).tolist():
        judged = is_empty(alone(subject, seq))
        if judged is None:
            continue
        total, empty = total + 1, empty + judged
        where = where or (subject.data.where(seq) if judged else "")
    if total < LEAST_SEQUENCES or empty / total < EMPTY_INPUTS:
        return []
    share = empty / total
    values: dict[str, Value] = {"sequences": total, "where": where}
    severity: Severity = "fault" if share >= MOSTLY_EMPTY else "warning"
    return [Finding("constant_inputs", severity, share, label_fields(subject), values)]


# --------------------------------------------------------------------------- both sides


def _copies(subject: Subject) -> list[Finding]:
    """Held-out sequences with content that is also trained on."""
    data, table = subject.data, subject.data.table
    long = table.positions[subject.stage.held_out_ids] >= data.least_content
    held_out = sampled(subject.stage.held_out_ids[long])
    if len(held_out) < LEAST_SEQUENCES:
        return []
    lengths = np.unique(table.positions[held_out])
    train_ids = subject.stage.train_ids[np.isin(table.positions[subject.stage.train_ids], lengths)]
    trained = {content_of(alone(subject, seq)) for seq in sampled(train_ids, MOST_COMPARED).tolist()}
    same = [seq for seq in held_out.tolist() if content_of(alone(subject, seq)) in trained]
    share = len(same) / len(held_out)
    if not same:
        return []
    some = share >= COPIES and len(same) >= FEW_COPIES
    severity: Severity = "note" if not some else "fault" if share >= MANY_COPIES else "warning"
    values: dict[str, Value] = {"sequences": len(held_out), "where": data.where(same[0]), "unit": subject.units[0]}
    kinds = tuple(f"data.{kind}" for kind in data.kinds)
    fields = tuple(dict.fromkeys((*label_fields(subject), *kinds, "data.holdout")))
    return [Finding("same_rows", severity, share, fields, values)]


def content_of(batch: RaggedBatch) -> bytes:
    """Hash of all that a sequence holds besides its number and class."""
    digest = hashlib.blake2b(digest_size=16)
    for part in _numbers(batch):
        digest.update(part.contiguous().numpy().tobytes())
    return digest.digest()


def _numbers(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from _numbers(one)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            if field.name not in IDENTITIES:
                yield from _numbers(getattr(value, field.name))


# --------------------------------------------------------------------------- the plan


def _cuts(subject: Subject) -> list[Finding]:
    plan, table, ids = subject.plan, subject.data.table, subject.stage.train_ids
    ledger, settings = plan.ledger, subject.recipe.plan
    cut = sum(ledger.truncated.values()) + ledger.dropped.get("too_long", 0)
    lost = cut / max(ledger.total, 1)
    whole, piece = float(table.positions[ids].mean()), float(plan.pieces.lengths.mean())
    tiny = piece < CUT * whole and piece < TINY_PIECE and not settings.cross_documents
    if lost < LOST and not tiny:
        return []
    field = subject.field("plan.max_tokens") if settings.max_tokens else subject.setup.model.config.context_field
    values: dict[str, Value] = {"whole": whole, "unit": subject.units[1], "lost": lost, "field": field}
    severity: Severity = "fault" if tiny or lost >= MOSTLY_LOST else "warning"
    return [Finding("cut_short", severity, piece, (field,), values)]


def _split(subject: Subject) -> list[Finding]:
    """Conversations that are cut into windows, so that a reply stands in another one than its question."""
    plan, table, settings = subject.plan, subject.data.table, subject.recipe.plan
    chats = [at for at, kind in enumerate(subject.data.kinds) if kind == "chat"]
    ids = subject.stage.train_ids[np.isin(table.kind[subject.stage.train_ids], chats)]
    if settings.overflow != "split" or len(ids) < LEAST_SEQUENCES:
        return []
    split = plan.pieces.seq_ids[plan.pieces.starts > 0]  # pieces without targets are in no plan
    share = float(np.isin(ids, split).mean())
    if share < MANY_SPLIT:
        return []
    field = subject.field("plan.max_tokens") if settings.max_tokens else subject.setup.model.config.context_field
    values: dict[str, Value] = {"most": int(plan.pieces.lengths.max()), "field": field}
    return [Finding("split_talks", "warning", share, (field, "plan.overflow", "data.chat"), values)]


def _sources(subject: Subject) -> list[Finding]:
    """Sources with next to no share in the targets of an epoch, or with most of them by a few rows again and again."""
    table, pieces = subject.data.table, subject.plan.pieces
    used = np.unique(table.source[subject.stage.train_ids])
    if len(used) < 2:
        return []
    targets = table.num_targets[pieces.seq_ids] * pieces.lengths / np.maximum(table.positions[pieces.seq_ids], 1)
    sums = np.bincount(table.source[pieces.seq_ids], weights=targets, minlength=len(table.weights))
    shares = sums / max(float(sums.sum()), 1e-9)
    least, most = int(used[shares[used].argmin()]), int(used[shares[used].argmax()])
    rows = pieces.seq_ids[(table.source[pieces.seq_ids] == most) & (pieces.starts == 0)]
    times = len(rows) / max(len(np.unique(rows)), 1)
    swallowed = shares[least] < SWALLOWED
    if not swallowed and (times < OFTEN or shares[most] < MOSTLY_OF_ONE):
        return []
    shown = least if swallowed else most
    data = subject.setup.recipe.data
    listed = [(kind, source.path) for kind in subject.data.kinds for source in data.sources(kind)]
    kind, path = listed[shown] if shown < len(listed) else (subject.data.kinds[0], "")
    field = f"data.{kind}"
    values: dict[str, Value] = {"where": str(path), "field": f"{field}.{shown}.weight", "times": times}
    code = "swallowed" if swallowed else "too_often"
    return [Finding(code, "warning", float(shares[shown]), (field, f"{field}.weight"), values)]


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
