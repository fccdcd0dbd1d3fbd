"""Labels against inputs: a model that learns some classes by heart must say something about those of others."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from unpad.batching.plan import Micro
from unpad.doctor.finding import Finding, Value
from unpad.doctor.rows import class_labels
from unpad.doctor.subject import Subject, Trial
from unpad.doctor.sweep import Sweep
from unpad.models.contract import Classifies
from unpad.nn.precision import autocast
from unpad.terminal.progress import counted

MOST_LEARNT, MOST_JUDGED, LEAST = 512, 400, 24  # sequences
STEPS, LOOKS = 120, 6
BATCH_TOKENS = 1024
LEARNT = 0.6  # of the first loss, below which it was learnt by heart
NOTHING = 1.5  # standard errors, below which nothing holds for others
USUAL_RATE = 1e-3


@dataclass(frozen=True)
class Carry:
    """Training on some sequences, judged on others.

    Args:
        start, end: loss of those that were trained on.
        errors: how much likelier their own labels are than those of their neighbours, in standard errors, the mean of
            some moments of training.
        steps: that were taken.
        is_short: whether the time ended it.
    """

    learnt: int
    judged: int
    start: float
    end: float
    errors: float
    steps: int
    is_short: bool = False

    @property
    def by_heart(self) -> bool:
        return self.end < LEARNT * self.start


def carry_over(subject: Subject, found: Sweep, seconds: float) -> Carry | None:
    """Train on some sequences and judge on those held out; None without classes, or with too few of either."""
    model = subject.setup.model
    if class_labels(subject) is None or not isinstance(model, Classifies):
        return None
    rng, table = np.random.default_rng(0), subject.setup.data.table
    learnt = _labelled(subject, rng.permutation(subject.stage.train_ids))[:MOST_LEARNT]
    judged = _labelled(subject, rng.permutation(subject.stage.held_out_ids))[:MOST_JUDGED]
    if min(len(learnt), len(judged)) < LEAST or not (table.positions[learnt] > 0).any():
        return None
    rate = found.middle if found.low is not None else USUAL_RATE
    trial = Trial(subject, drops=False, lr=rate, lr_scale=1.0, clip=1.0)
    training, others = _batches(subject, learnt), _batches(subject, judged)
    began, moments, is_short = subject.clock.now(), list[float](), False
    start = end = _mean_loss(trial, training)
    for step in counted(range(STEPS), "learning some labels", STEPS, "steps"):
        trial.step([subject.load(training[step % len(training)])])
        if (step + 1) % (STEPS // LOOKS) == 0:
            moments.append(_errors(trial, others))
            end = _mean_loss(trial, training)
            if end < 0.1 * start:
                break
        if is_short := subject.clock.now() - began > seconds:
            break
    errors = float(np.mean(moments)) if moments else math.inf
    return Carry(len(learnt), len(judged), start, end, errors, step + 1, is_short=is_short and end >= LEARNT * start)


def judge_carry(subject: Subject, carry: Carry) -> list[Finding]:
    """A finding on labels that were learnt by heart, and of which nothing holds for others."""
    if not carry.by_heart or carry.errors >= NOTHING:
        return []
    fields = ("events.labels",) if subject.setup.data.family == "patients" else ("data.images",)
    values: dict[str, Value] = {"learnt": carry.learnt, "sequences": carry.judged}
    return [Finding("labels_random", "warning", carry.errors, fields, values)]


def _labelled(subject: Subject, ids: np.ndarray) -> np.ndarray:
    labels = getattr(subject.setup.data, "labels", None)
    assert labels is not None, "asked where classes are known"
    chosen: np.ndarray = ids[(labels[ids] >= 0) & (subject.setup.data.table.positions[ids] > 0)]
    return chosen


def _batches(subject: Subject, ids: np.ndarray) -> list[Micro]:
    """Sequences in micro-batches of about BATCH_TOKENS positions."""
    lengths = subject.setup.data.lengths((subject.recipe.train.seed, 0))[ids]
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


@torch.no_grad()
def _errors(trial: Trial, micros: list[Micro]) -> float:
    """Distance between the likelihood of labels at their own sequences and that at all others, in standard errors."""
    model, subject = trial.model.eval(), trial.subject
    assert isinstance(model, Classifies), "checked before"
    scores, labels = [], []
    for micro in micros:
        batch = subject.load(micro)
        assert batch.seq_labels is not None, "chosen by their labels"
        with autocast(subject.setup.precision, subject.setup.device):
            scores.append(model.classify(batch).double().log_softmax(-1).cpu())
        labels.append(batch.seq_labels.cpu())
    likely, own = torch.cat(scores), torch.cat(labels)
    shares = torch.bincount(own, minlength=likely.shape[1]).double() / len(own)
    gain = likely.gather(1, own[:, None])[:, 0] - likely @ shares
    return float(gain.mean() / (gain.std() / len(gain) ** 0.5).clamp_min(1e-12))
