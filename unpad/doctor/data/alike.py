"""Rows that are alike: inputs with several targets, rows that repeat others, and held-out rows that hardly differ from
training ones."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable

import numpy as np

from unpad.data.images import ImageData
from unpad.data.pictures.alike import near_pictures, small_copies
from unpad.data.sources.alike import Near, TextSearch, plain
from unpad.data.text import TextData
from unpad.data.vqa import VqaData
from unpad.doctor.data.rows import SAMPLE, alone, content_of, label_fields, sampled
from unpad.doctor.subject import Subject
from unpad.terminal.finding import Finding, Severity, Value

MOST_COMPARED = 1500  # training sequences
MOST_PICTURES = 3000
LEAST = 16  # sequences
CLASHES, MANY_CLASHES = 0.1, 0.4  # shares of sequences with an equal one of another target
REPEATS, MANY_REPEATS = 0.3, 0.6  # shares of sequences that repeat an earlier one
LEAST_LETTERS, SHARED = 24, 0.8  # of a text, and share of its length and passages that altered copies have
NEAR, MANY_NEAR = 0.1, 0.3  # shares of what is held out
DETAIL, SAME_COLOURS = 8.0, 3.0  # spread of a small copy's colours, and mean difference of two, of 255
USUAL_OVERLAP, UNLIKE = 0.3, 0.35  # of the tokens of two parts of training, and of that


def check_alike(subject: Subject, asked: Callable[[int], tuple[object, object]] | None = None) -> list[Finding]:
    """A finding on training inputs that occur again: with another target, or with the same one.

    Args:
        asked: input and target of a sequence; default all that it holds and its class, or the same twice where there
            are no classes.
    """
    data, table = subject.data, subject.data.table
    ids = sampled(subject.stage.train_ids, MOST_COMPARED)
    ids = ids[table.positions[ids] >= data.least_content]
    if len(ids) < LEAST:
        return []
    contents = {seq: content_of(alone(subject, seq)) for seq in ids.tolist()}
    classes = data.class_labels()
    targets: dict[object, set[object]] = defaultdict(set)
    inputs: dict[int, object] = {}
    for seq, content in contents.items():
        known = content if classes is None else int(classes[0][seq])
        inputs[seq], target = (content, known) if asked is None else asked(seq)
        targets[inputs[seq]].add(target)
    clashing = [seq for seq in contents if len(targets[inputs[seq]]) > 1]
    share = len(clashing) / len(contents)
    if share >= CLASHES:
        values: dict[str, Value] = {"sequences": len(contents), "where": data.where(clashing[0])}
        severity: Severity = "fault" if share >= MANY_CLASHES else "warning"
        return [Finding("clashing_labels", severity, share, label_fields(subject), values)]
    counts = Counter(contents.values())
    repeats = 1 - len(counts) / len(contents)
    if repeats < REPEATS:
        return []
    most = counts.most_common(1)[0]
    first = next(seq for seq, content in contents.items() if content == most[0])
    values = {"sequences": len(contents), "where": data.where(first), "times": most[1]}
    severity = "warning" if repeats >= MANY_REPEATS else "note"
    return [Finding("repeats", severity, repeats, label_fields(subject), values)]


def check_near_texts(subject: Subject[TextData]) -> list[Finding]:
    """A finding on held-out texts that are near-duplicates of training ones in nearly all of their passages, and no
    copies."""
    data = subject.data
    if subject.recipe.plan.cross_documents:
        return []

    def read(ids: np.ndarray) -> list[str]:
        return [data.tokenizer.decode(data.tokens_of(seq).tolist()) for seq in ids.tolist()]

    held = sampled(subject.stage.held_out_ids, SAMPLE)
    theirs, ours = read(held), read(sampled(subject.stage.train_ids, MOST_COMPARED))
    copies = set(ours)
    first: dict[str, int] = {}  # held-out text as it is compared, and its place
    for seq, text in zip(held.tolist(), theirs, strict=True):
        if len(text) >= LEAST_LETTERS and text not in copies:
            first.setdefault(plain(text), seq)
    if len(first) < LEAST / 2:
        return []
    trained = list(dict.fromkeys(map(plain, ours)))
    held_out = list(first)
    search = TextSearch(held_out)
    search.count([*held_out, *trained])
    matched = [pair for pair in search.match(trained) if pair.share >= SHARED and _as_long(held_out, trained, pair)]
    # One form with other numbers, as sums have it, is another row.
    near = {pair.text for pair in matched if not _other_numbers(held_out[pair.text], trained[pair.other])}
    share = len(near) / len(first)
    if share < NEAR:
        return []
    return [_near(subject, share, len(first), data.where(list(first.values())[min(near)]))]


def check_unlike(subject: Subject[TextData]) -> list[Finding]:
    """A finding on held-out texts with hardly a token of the training ones, among which as many others share most of
    theirs."""
    data = subject.data
    held, trained = sampled(subject.stage.held_out_ids), sampled(subject.stage.train_ids, MOST_COMPARED)
    num = min(len(held), len(trained) // 2)
    if num < LEAST / 2:
        return []

    def shares(ids: np.ndarray) -> np.ndarray:
        tokens = np.concatenate([data.tokens_of(seq) for seq in ids.tolist()])
        counts = np.bincount(tokens, minlength=data.tokenizer.vocab_size).astype(np.float64)
        share: np.ndarray = counts / max(counts.sum(), 1)
        return share

    rest = shares(trained[num:])
    theirs, usual = (float(np.minimum(shares(ids), rest).sum()) for ids in (held[:num], trained[:num]))
    if usual < USUAL_OVERLAP or theirs >= UNLIKE * usual:
        return []
    values: dict[str, Value] = {"usual": usual, "sequences": num, "where": data.where(int(held[0]))}
    return [Finding("held_out_unlike", "warning", theirs, (*label_fields(subject), "data.holdout"), values)]


def _as_long(held_out: list[str], trained: list[str], pair: Near) -> bool:
    """True for texts of about the same length, neither of which is a part of the other."""
    shorter, longer = sorted((len(held_out[pair.text]), len(trained[pair.other])))
    return shorter >= SHARED * longer


def _other_numbers(text: str, other: str) -> bool:
    """True for texts that differ in their numbers alone."""
    return text != other and re.sub(r"\d+", "0", text) == re.sub(r"\d+", "0", other)


def _near(subject: Subject, share: float, num: int, where: str) -> Finding:
    values: dict[str, Value] = {"sequences": num, "where": where}
    severity: Severity = "fault" if share >= MANY_NEAR else "warning"
    return Finding("near_rows", severity, share, ("data.near_duplicates", *label_fields(subject)), values)


def check_near_pictures(subject: Subject[ImageData | VqaData]) -> list[Finding]:
    """A finding on held-out pictures that are training ones, saved again or hardly changed."""
    data, examples = subject.data, subject.data.album.images
    trained = data.shown(subject.stage.train_ids)
    held = data.shown(subject.stage.held_out_ids) & ~trained
    if len(examples) > MOST_PICTURES or not held.any():
        return []
    copies = small_copies(examples).astype(np.float64).reshape(len(examples), -1)
    detailed = copies.std(1) >= DETAIL
    held, trained = held & detailed, trained & detailed
    found = [
        one
        for one, other in near_pictures(small_copies(examples), held, trained)
        if examples[one].sha256 != examples[other].sha256 and np.abs(copies[one] - copies[other]).mean() <= SAME_COLOURS
    ]
    num = int(held.sum())
    if num < LEAST / 2 or len(found) < NEAR * num:
        return []
    return [_near(subject, len(found) / num, num, examples[found[0]].where)]
