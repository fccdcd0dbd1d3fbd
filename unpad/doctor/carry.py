"""Labels against inputs: a model that overfits some classes must say something about those of others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from unpad.batching.plan import Micro
from unpad.data.vqa import VqaData
from unpad.doctor.finding import Found, Severity, finding
from unpad.doctor.subject import Subject, Trial
from unpad.doctor.trials import USUAL_RATE, Sweep
from unpad.models.contract import Classifies
from unpad.nn.precision import autocast
from unpad.terminal.progress import counted

MOST_LEARNT, MOST_JUDGED, LEAST = 512, 400, 24  # sequences
STEPS, FIRST_STEPS, EVERY = 360, 120, 20  # at most, at least, and between two looks
LOOKS = 6  # the last ones, judged by their mean
BATCH_TOKENS = 1024
LEARNT = 0.7  # of the first loss, below which it was overfit
MOST_SWAPPED = 40  # questions with pictures that change places
SURELY = 3.0  # standard errors, from which on answers are learnt from pictures
SEEN = 0.1  # nats by which their own picture has to help answers that were learnt
HOLDS = 0.25  # of that help, which others may have within two standard errors where nothing holds for them


@dataclass(frozen=True)
class Carry:
    """Training on some sequences, judged on others.

    Args:
        rarer: judged sequences of the rarer one of two classes; None where there are not two.
        start, end: loss of those that were trained on.
        errors: how much likelier their own labels are than those of their neighbours, in standard errors, the mean of
            some moments of training.
        steps: that were taken.
        by_heart: whether those that were trained on were learnt, from pictures where there are some, by so much that
            the others would show a quarter of it.
        is_short: whether the time ended it.
    """

    learnt: int
    judged: int
    rarer: int | None
    start: float
    end: float
    errors: float
    steps: int
    by_heart: bool = False
    is_short: bool = False


class Transfer(NamedTuple):
    """A way to judge what a model that overfit some sequences knows of others.

    Args:
        usable: of some sequences, those that can be learnt and judged, in their order.
        most: sequences that are judged at a time.
        errors: how much likelier the own targets of sequences are than those of others, in standard errors.
        is_seen: whether what was learnt rests on the inputs, given learnt and judged sequences.
    """

    usable: Callable[[np.ndarray], np.ndarray]
    most: int
    errors: Callable[[Trial, np.ndarray], float]
    is_seen: Callable[[Trial, np.ndarray, np.ndarray], bool]


def transfer_of(subject: Subject) -> Transfer | None:
    """Judge answers by their pictures, or classes; None where the data have neither, or the model names no class."""
    data, classes = subject.data, subject.data.class_labels()
    if isinstance(data, VqaData):
        errors, is_seen = partial(_errors_of_pictures, data), partial(_pictures_are_seen, data)
        return Transfer(partial(_about_one, data), MOST_SWAPPED, errors, is_seen)
    if classes is None or not isinstance(subject.setup.model, Classifies):
        return None
    is_usable = (classes[0] >= 0) & (data.table.positions > 0)
    return Transfer(lambda ids: ids[is_usable[ids]], MOST_JUDGED, _errors, lambda *_: True)


def carry_over(subject: Subject, transfer: Transfer, rates: Sweep, seconds: float) -> Carry | None:
    """Train on some sequences and judge on those held out; None with too few."""
    rng = np.random.default_rng(0)
    learnt = transfer.usable(rng.permutation(subject.stage.train_ids))[:MOST_LEARNT]
    judged = transfer.usable(rng.permutation(subject.stage.held_out_ids))[: transfer.most]
    if min(len(learnt), len(judged)) < LEAST or not (subject.data.table.positions[learnt] > 0).any():
        return None
    rate = rates.middle if rates.low is not None else USUAL_RATE
    trial = Trial(subject, drops=False, lr=rate, lr_scale=1.0, clip=1.0)
    training = _batches(subject, learnt)
    began, moments, is_short, by_heart = subject.clock.now(), list[float](), False, False
    start = end = _mean_loss(trial, training)
    for step in counted(range(STEPS), "learning some labels", STEPS, "steps"):
        trial.step([subject.load(training[step % len(training)])])
        if (step + 1) % EVERY == 0:
            moments.append(transfer.errors(trial, judged))
            end = _mean_loss(trial, training)
            if end < 0.1 * start or step + 1 >= FIRST_STEPS:
                by_heart = transfer.is_seen(trial, learnt, judged) and end < LEARNT * start
            if by_heart:
                break
        if is_short := subject.clock.now() - began > seconds:
            break
    errors = float(np.mean(moments[-LOOKS:])) if moments else math.inf
    known = subject.data.class_labels()
    two = None if known is None or len(known[1]) != 2 else np.bincount(known[0][judged], minlength=2)
    rarer = None if two is None else int(two.min())
    return Carry(len(learnt), len(judged), rarer, start, end, errors, step + 1, by_heart, is_short and not by_heart)


@finding(
    "labels_random",
    en=("The model overfit {learnt} sequences, and nothing of it holds for {judged} others: their labels are no likelier "
        "than those of their neighbours ({number:.2f} standard errors){mirrored}.",
        "look at how labels are matched with rows: they look shuffled"),
    zh=("模型记住了 {learnt} 个样本，却对另外 {judged} 个毫无用处：它们自己的标签并不比别人的更可能（相差 {number:.2f} 个标准误）{mirrored}。",
        "检查标签与样本的对应关系：看起来被打乱了"),
)  # fmt: skip
def labels_random(subject: Subject, carry: Carry) -> Found | None:
    """Labels that were overfit without anything that holds for others."""
    if not carry.by_heart or carry.errors >= 1.5:
        return None
    data, flip = subject.data, subject.setup.recipe.images.flip
    fields = data.label_fields[:1] or (f"data.{data.kinds[0]}",)
    # Outcomes are often weak, and look like none among few of the rarer class.
    is_weak = carry.rarer is not None and carry.rarer < 30 and carry.errors >= 1
    mirrored = ("", "")
    if data.augmentation == "images" and data.class_labels() is not None and flip:
        mirrored = (f"; images.flip={flip:g} mirrors pictures, and labels may depend on left and right",
                    f"；images.flip={flip:g} 会左右翻转图像，标签可能与左右有关")  # fmt: skip
        fields = ("images.flip", *fields)
    severity: Severity = "note" if is_weak else "warning"
    return Found(carry.errors, *fields, severity=severity, learnt=carry.learnt, judged=carry.judged, mirrored=mirrored)


def _batches(subject: Subject, ids: np.ndarray) -> list[Micro]:
    """Sequences in micro-batches of about BATCH_TOKENS positions."""
    lengths = subject.data.lengths((subject.recipe.train.seed, 0))[ids]
    groups = np.cumsum(lengths) // BATCH_TOKENS
    micros = []
    for group in np.unique(groups).tolist():
        chosen = ids[groups == group]
        stops = lengths[groups == group].astype(np.int32)
        nothing = np.zeros_like(stops)
        micros.append(Micro(chosen, nothing, stops, nothing, 0, 0, (subject.recipe.train.seed, 0)))
    return micros


def _mean_loss(trial: Trial, micros: list[Micro]) -> float:
    return float(np.mean([trial.loss(trial.subject.load(micro)) for micro in micros]))


def _about_one(data: VqaData, ids: np.ndarray) -> np.ndarray:
    """Questions about one picture each, where another has as many patches."""
    one = np.array([seq for seq in ids.tolist() if len(data.examples[seq].images) == 1], np.int64)
    if not len(one):
        return one
    sizes, counts = np.unique(data.num_patches[one], return_counts=True)
    chosen: np.ndarray = one[np.isin(data.num_patches[one], sizes[counts > 1])]
    return chosen


def _errors_of_pictures(data: VqaData, trial: Trial, ids: np.ndarray) -> float:
    """Distance between the loss of answers beside the picture of another answer and beside their own, in standard
    errors."""
    mean, error = _help_of_pictures(data, trial, ids)
    return mean / error


def _pictures_are_seen(data: VqaData, trial: Trial, learnt: np.ndarray, judged: np.ndarray) -> bool:
    """True if learnt answers rest on their pictures, and the others, were they as good, could not hide it.

    Answers that are learnt without pictures say nothing of them, and a chance among many looks is no help of theirs.
    """
    ours, error = _help_of_pictures(data, trial, learnt[:MOST_SWAPPED])
    if not SEEN <= ours < math.inf or ours < SURELY * error:
        return False
    theirs, error = _help_of_pictures(data, trial, judged)
    return theirs >= HOLDS * ours or theirs + 2 * error < HOLDS * ours


def _help_of_pictures(data: VqaData, trial: Trial, ids: np.ndarray) -> tuple[float, float]:
    """Nats by which answers are likelier beside their own picture than beside that of another answer, and the standard
    error; inf for too few."""
    differences, swapped = [], list(data.examples)
    for seq in ids.tolist():
        others = ids[(data.num_patches[ids] == data.num_patches[seq]) & (ids != seq)].tolist()
        other = next((one for one in others if data.examples[one].answer != data.examples[seq].answer), None)
        if other is not None:
            swapped[seq] = replace(data.examples[seq], images=data.examples[other].images)
            differences.append(seq)
    changed = replace(data, examples=swapped)
    whole = [(seq, 0, int(data.table.positions[seq]), 0) for seq in differences]
    gain = np.array([trial.loss(changed.alone(*one)) - trial.loss(data.alone(*one)) for one in whole])
    if len(gain) < LEAST / 2:
        return math.inf, 1.0
    return float(gain.mean()), max(float(gain.std()) / len(gain) ** 0.5, 1e-12)


@torch.no_grad()
def _errors(trial: Trial, ids: np.ndarray) -> float:
    """Distance between the likelihood of labels at their own sequences and that at all others, in standard errors."""
    model, subject = trial.model.eval(), trial.subject
    assert isinstance(model, Classifies), "checked before"
    scores, labels = [], []
    for micro in _batches(subject, ids):
        batch = subject.load(micro)
        assert batch.seq_labels is not None, "chosen by their labels"
        with autocast(subject.setup.precision, subject.setup.device):
            scores.append(model.classify(batch).double().log_softmax(-1).cpu())
        labels.append(batch.seq_labels.cpu())
    likely, own = torch.cat(scores), torch.cat(labels)
    shares = torch.bincount(own, minlength=likely.shape[1]).double() / len(own)
    gain = likely.gather(1, own[:, None])[:, 0] - likely @ shares
    return float(gain.mean() / (gain.std() / len(gain) ** 0.5).clamp_min(1e-12))
