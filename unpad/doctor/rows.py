"""Findings on the rows of any family: targets, copies on both sides of the split, and what a plan cuts."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch, required
from unpad.batching.layout import Layout
from unpad.doctor.finding import Finding, Found, Severity, finding, level
from unpad.doctor.subject import Subject
from unpad.models.contract import ScoresTokens


class Labelled(NamedTuple):
    """A sequence to compare with others: its input, its target, and its place."""

    asked: Hashable
    target: Hashable
    where: str


def look(subject: Subject) -> list[Finding]:
    """Findings of a family without a file of its own here."""
    return [*of_rows(subject, labelled(subject)), *sees_target(subject), *cut_short(subject)]


def of_rows(subject: Subject, rows: Sequence[Labelled]) -> list[Finding]:
    """Findings on targets and on copies, for all families."""
    where = label_fields(subject)
    return [*clashing_labels(rows, where), *constant_labels(rows, where), *same_rows(subject), *near_rows(subject)]


def label_fields(subject: Subject) -> tuple[str, ...]:
    """Fields of the recipe that give the targets."""
    kinds = [kind for kind in subject.stage.kinds if subject.setup.recipe.data.sources(kind)]
    return subject.data.label_fields or tuple(f"data.{kind}" for kind in kinds)


def sampled(ids: np.ndarray, num: int) -> np.ndarray:
    """Some sequences, always the same."""
    chosen: np.ndarray = np.random.default_rng(0).permutation(ids)[:num]
    return chosen


def labelled(subject: Subject) -> list[Labelled]:
    """Contents and classes of some training sequences; none without classes."""
    classes, data = subject.data.class_labels(), subject.data
    if classes is None:
        return []
    ids = sampled(subject.stage.train_ids[classes[0][subject.stage.train_ids] >= 0], 1500)
    large = data.table.positions[ids] >= data.least_content
    return [
        Labelled(content_of(alone(subject, seq)) if enough else seq, classes[1][classes[0][seq]], data.where(seq))
        for seq, enough in zip(ids.tolist(), large.tolist(), strict=True)
    ]


def alone(subject: Subject, seq: int) -> RaggedBatch:
    """A batch of one sequence."""
    return subject.data.alone(seq, 0, int(subject.data.table.positions[seq]), 0)


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
        for item in value:
            yield from _numbers(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            if field.name not in ("seq_ids", "seq_labels"):
                yield from _numbers(getattr(value, field.name))


@finding("same_rows", "fault", explains={"near_rows"},
    en=("{number:.0%} of {num:,} held-out {unit} are also trained on, such as {where}: identical copies (duplicates).",
        "take the copies out, or let data.holdout divide rows, without `split`"),
    zh=("{num:,} 个验证样本（{unit}）中有 {number:.0%} 也在训练集里，例如 {where}。",
        "删掉副本；或由 data.holdout 划分"))  # fmt: skip
def same_rows(subject: Subject) -> Found | None:
    """Held-out sequences with content that is also trained on."""
    data, table = subject.data, subject.data.table
    held = sampled(subject.stage.held_out_ids[table.positions[subject.stage.held_out_ids] >= data.least_content], 200)
    if len(held) < 8:
        return None
    train_ids = subject.stage.train_ids
    train_ids = train_ids[np.isin(table.positions[train_ids], np.unique(table.positions[held]))]
    trained = {content_of(alone(subject, seq)) for seq in sampled(train_ids, 3000).tolist()}
    same = [seq for seq in held.tolist() if content_of(alone(subject, seq)) in trained]
    share = len(same) / len(held)
    if not same:
        return None
    severity: Severity = "note" if share < 0.02 or len(same) < 3 else "fault" if share >= 0.05 else "warning"
    names = (*label_fields(subject), *(f"data.{kind}" for kind in data.kinds), "data.holdout")
    at = data.where(same[0])
    return Found(share, *dict.fromkeys(names), severity=severity, num=len(held), where=at, unit=subject.units[0])


@finding("near_rows", "fault",
    en=("{number:.0%} of {num:,} held-out {unit} are near-duplicates of training ones, such as {where}: the held-out "
        "loss is too good.", "set data.near_duplicates=together, or give rows that belong together a `group`"),
    zh=("{num:,} 个验证样本（{unit}）中有 {number:.0%} 与训练样本几乎相同，例如 {where}。",
        "设置 data.near_duplicates=together"))  # fmt: skip
def near_rows(subject: Subject) -> Found | None:
    """Held-out texts and pictures that hardly differ from training ones, by the comparison that training reports."""
    if not subject.data.compares or subject.recipe.plan.cross_documents or not len(subject.stage.held_out_ids):
        return None
    near = subject.data.near_training(subject.data, sampled(subject.stage.held_out_ids, 200))
    if near is None or near.reason or near.num < 8 or near.num_near < near.num / 2:
        return None
    share, names = near.num_near / near.num, ("data.near_duplicates", *label_fields(subject))
    return Found(share, *names, num=near.num, unit=near.unit, where=near.pairs[0][0])


@finding("clashing_labels", explains={"labels_random", "by_heart", "constant_labels"},
    en=("{number:.0%} of {num:,} training inputs equal others with other labels or answers, which contradict theirs, "
        "such as {where}: {first!r} and {second!r}.", "look at how labels are matched with rows"),
    zh=("{num:,} 个训练输入中有 {number:.0%} 以不同的标签或答案再次出现，例如 {where}：{first!r} 和 {second!r}。",
        "检查标签与样本的对应"))  # fmt: skip
def clashing_labels(rows: Sequence[Labelled], where: tuple[str, ...], most: float = 0.1) -> Found | None:
    """Equal inputs with different targets: pictures all alike, questions with two answers, pairs chosen both ways."""
    targets: dict[Hashable, set[Hashable]] = defaultdict(set)
    for row in rows:
        targets[row.asked].add(row.target)
    bad = [row for row in rows if len(targets[row.asked]) > 1]
    if len(rows) < 16 or len(bad) < most * len(rows):
        return None
    first, second, *_ = sorted(str(target)[:30] for target in targets[bad[0].asked])
    share, at = len(bad) / len(rows), bad[0].where
    return Found(share, *where, severity=level(share >= 0.4), num=len(rows), where=at, first=first, second=second)


@finding("constant_labels", explains={"labels_random", "by_heart"},
    en=("{number:.1%} of {num:,} training rows have the same reply or target, {target!r}: to say it always is nearly "
        "right.", "look at the labels or replies in the files; judge rare classes by auroc"),
    zh=("{num:,} 个训练样本中有 {number:.1%} 的目标或回复都是 {target!r}：总答它就几乎全对。",
        "检查标签或回复；少见的类看 auroc"))  # fmt: skip
def constant_labels(rows: Sequence[Labelled], where: tuple[str, ...]) -> Found | None:
    """One target for all or nearly all rows, or one sentence as the reply to many questions beside varied ones."""
    if len(rows) < 8:
        return None
    counts = Counter(row.target for row in rows)
    target, num = counts.most_common(1)[0]
    share, rest = num / len(rows), len(rows) - num
    text = str(target)
    differ = len(counts) - 1 >= rest / 2 and len({row.asked for row in rows if row.target == target}) >= num / 2
    severity: Severity = "fault" if share >= 0.999 else "note" if rest >= 100 else "warning"
    if share < 0.95:
        if share < 0.4 or len(text) < 8 or not differ or len(rows) < 20:
            return None
        severity = "warning"
    return Found(share, *where, severity=severity, num=len(rows), target=text[:40])


@finding("cut_short", explains={"labels_random"},
    en=("Sequences of {whole:,.0f} {unit} on average are cut to {number:,.1f}; {lost:.0%} of all is left out.",
        "raise {field}"),
    zh=("平均长 {whole:,.0f} 的序列（{unit}）被截成 {number:,.1f}；{lost:.0%} 没有用上。",
        "调大 {field}"))  # fmt: skip
def cut_short(subject: Subject, beyond: int = 0, field: str = "", least: float = 0.1) -> Found | None:
    """Sequences of which the plan, or the reading of `beyond` units by `field`, leaves out a large part."""
    plan, ids, settings = subject.plan, subject.stage.train_ids, subject.recipe.plan
    cut = beyond + sum(plan.ledger.truncated.values()) + plan.ledger.dropped.get("too_long", 0)
    lost = cut / max(plan.ledger.total + beyond, 1)
    whole, piece = subject.data.table.positions[ids].mean() + beyond / len(ids), float(plan.pieces.lengths.mean())
    tiny = piece < whole / 4 and piece < 16 and not settings.cross_documents and not beyond
    if lost < least and not tiny:
        return None
    limit = subject.field("plan.max_tokens") if settings.max_tokens else subject.setup.model.config.context_field
    field = field or limit
    severity = level(tiny or lost >= max(0.5, 1.8 * least))
    return Found(piece, field, severity=severity, whole=whole, unit=subject.units[1], lost=lost, field=field)


@finding("sees_target", "fault",
    en=("A later token changes outputs before it, by {number:.2g} of their size: the model sees what it predicts.",
        "set {field}=true; a loss near 0 is no success"),
    zh=("后面的词元会改变前面的输出（幅度 {number:.2g}）：模型看到了要预测的词元。", "设置 {field}=true"))  # fmt: skip
@torch.no_grad()
def sees_target(subject: Subject) -> Found | None:
    """Change the last token of a sequence, and look for a change of the outputs before it."""
    model, batch = subject.model.eval(), subject.small_batch(4, 256)
    if not isinstance(model, ScoresTokens) or batch.input_ids is None or not isinstance(batch.layout, Layout):
        return None
    lengths = batch.layout.lengths()
    longest = int(lengths.argmax())
    if lengths[longest] < 3:
        return None
    before = batch.select([longest])
    changed = required(before.input_ids).clone()
    changed[-1] = (changed[-1] + 1) % subject.data.num_outputs
    outputs, others = (model(one)[:-1].float() for one in (before, replace(before, input_ids=changed)))
    change = float((outputs - others).abs().max() / outputs.abs().max().clamp_min(1e-12))
    field = subject.setup.model.config.context_field.rpartition(".")[0] + ".causal"  # of the same section
    return Found(change, field, field=field) if change > 1e-4 else None  # less is rounding in bf16
