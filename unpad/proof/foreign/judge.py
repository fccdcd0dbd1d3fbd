"""A proof in the best precision that a model allows, and its certificate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from unpad.errors import OutOfMemoryError, ProofError, UnpadError, is_memory_error
from unpad.proof.content import is_zero
from unpad.proof.foreign.certificate import COUNTED, BatchClaim, ForeignCertificate, Kind, Measured, findings
from unpad.proof.foreign.measure import (
    EXACT,
    Errors,
    Moves,
    UpdateResults,
    eager_experts,
    has_experts,
    in_fp64,
    is_smooth,
    not_below_fp32,
    relative,
)
from unpad.proof.foreign.model import untouched_generators
from unpad.proof.foreign.targets import Taken
from unpad.proof.foreign.update import Update, read_labels

Precision = Literal["auto", "fp64", "fp32"]
MOST_EXACT = 100_000_000  # weights of a model that "auto" proves in fp64
RANDOM = 1e-4  # difference of two runs of the same batches that no order of sums makes
FP32_LIKE = 1e-4  # errors below may be of a part that computes in fp32
ALIKE = 1e-5  # relative difference of a loss from the mean over sequences of their means
MOST_REFUSED = 300  # characters of an exception's message
NO_ROUTER_LOSS = "the router's auxiliary loss is left out: a mean per batch, it depends on batching by definition"
HIDDEN = "the loss computes no logits that could be followed: it is not shown which targets it takes"
UNCLEAR = "the gradient of the loss does not show which targets it takes"
IGNORED_PADDING = "{} labels are padding, and the loss ignores them: they change neither it nor its gradient"
OWN_LOSS = "the loss is not the mean cross-entropy of the logits; it is compared with itself, one at a time"


@dataclass(frozen=True, eq=False)
class Outcome:
    """Results in one precision.

    Args:
        truth, found: of the sequences one at a time, and in the batches.
        rounding: relative change of the truth by one rounding of all weights to fp32.
        again: computes the batches again, to see if their results are smooth functions of the weights.
        taken: distance from a position to the token that the loss takes for its target, as far as it was looked for.
        unjudged: kinds of findings that cannot be judged, with the reason.
        doubts: what cannot be told is meant; with one, nothing is proved.
        own: whether the loss is the trainer's own, which may ignore labels that the usual one takes.
    """

    update: Update
    truth: UpdateResults
    found: UpdateResults
    moved: Moves
    rounding: Callable[[], Errors]
    again: Callable[[], UpdateResults]
    notes: tuple[str, ...] = ()
    taken: Taken = 1
    unjudged: Mapping[Kind, str] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()
    own: bool = False


class RefusedError(Exception):
    """The model or the collator raised on a batch; the message is that of its exception."""


def judge(
    model: nn.Module, precision: Precision, measure: Callable[[bool], Outcome], notes: Sequence[str]
) -> ForeignCertificate:
    """Measure in fp64 where that works, else in fp32, and judge.

    Args:
        measure: called with True inside fp64, with False in the model's dtype, at least fp32.

    Raises:
        ProofError: the model cannot compute a sequence alone, or precision="fp64" and it does not compute in it.
    """
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    wants_exact = precision == "fp64" or (precision == "auto" and num_weights <= MOST_EXACT)
    attempts = [(True, False), (True, True)] if wants_exact and has_experts(model) else [(True, False)] * wants_exact
    for exact, eager in attempts:
        with ExitStack() as stack:
            try:
                if eager:  # the grouped products of transformers' experts have no fp64
                    stack.enter_context(eager_experts(model))
                stack.enter_context(in_fp64(model))
                outcome = measure(exact)
            except Exception as error:
                raise_memory(error)
                continue
            certificate = _certificate(model, outcome, "fp64", Errors(EXACT, EXACT, EXACT), notes)
            _refuse_random(certificate, outcome)
            if not _has_small_errors(certificate) or is_smooth(model, outcome.again):
                return certificate
    if precision == "fp64":
        raise ProofError("the model does not compute in fp64, or a part of it in less", fix='use precision="auto"')
    with not_below_fp32(model):
        try:
            outcome = measure(False)
        except RefusedError as error:
            return ForeignCertificate((), "fp32", str(error), tuple(notes))
        except ProofError:
            raise
        except Exception as error:
            raise_memory(error)
            raise ProofError(
                f"the model cannot compute a sequence alone: {describe(error)}", fix="prove a model of causal language"
            ) from error
        certificate = _certificate(model, outcome, "fp32", outcome.rounding().bounds(), notes)
        _refuse_random(certificate, outcome)
        return certificate


def _certificate(
    model: nn.Module, outcome: Outcome, name: str, bounds: Errors, notes: Sequence[str]
) -> ForeignCertificate:
    if not math.isfinite(outcome.truth.loss):
        raise ProofError("the loss of the sequences alone is not finite", fix="prove a model with other weights")
    if outcome.moved.itself == 0:
        raise ProofError("the logits do not depend on the tokens", fix="prove a model with weights other than zero")
    update = outcome.update
    errors = outcome.found.errors(outcome.truth)
    scale = outcome.found.loss / outcome.truth.loss if outcome.truth.loss else 1.0
    gradient = list(outcome.truth.gradient.values())
    labels = read_labels(update)
    alike = outcome.found.loss / outcome.truth.mean_of_means if outcome.truth.mean_of_means else 1.0
    is_right = errors.loss <= bounds.loss and errors.gradient <= bounds.gradient
    ignored = labels.padding_predicts + labels.padding_predicted if outcome.own and is_right else 0
    if ignored and not outcome.unjudged.get("loss"):
        labels = replace(labels, padding_predicts=0, padding_predicted=0)
        notes = (*notes, IGNORED_PADDING.format(ignored))
    measured = Measured(
        update,
        labels,
        errors,
        outcome.moved,
        bounds,
        scale,
        bool(gradient),
        is_zero(gradient),
        abs(alike - 1) < ALIKE,
        outcome.taken,
    )
    sequences = {piece.sequence for piece in update.pieces}
    size = (len(sequences), sum(piece.length for piece in update.pieces), update.num_wanted)
    shown = {"hidden": (HIDDEN,), "unclear": (UNCLEAR,)}
    taken = shown[outcome.taken] if isinstance(outcome.taken, str) else ()
    remarks = (*notes, *outcome.notes, *taken, *_remarks(update))
    found = tuple(
        BatchClaim(one.kind, 0, one.bound, "", reason) if (reason := outcome.unjudged.get(one.kind)) else one
        for one in findings(model, measured)
    )
    doubt = "; ".join(outcome.doubts)
    found = tuple(replace(one, gap=doubt) if doubt and one.kind == "targets" else one for one in found)
    return ForeignCertificate(found, name, None, remarks, *size)


def _remarks(update: Update) -> list[str]:
    """Notes on what these batches do not have, so that nothing is shown of it."""
    remarks = []
    if not any(bool(filler.any()) for filler in update.filler) and _has_rows(update):
        remarks.append("no batch of the update has padding, so nothing is shown of it; prove with unlike lengths too")
    counts = [batch.num_targets for batch in update.batches]
    if len(counts) > 1 and len(set(counts)) == 1:
        remarks.append("all batches have as many targets, so a mean of their means would be the mean over targets too")
    return remarks


def _has_rows(update: Update) -> bool:
    """True if a batch has several rows, each with one sequence, as padded batches have."""
    rows = [[row for _, row, _ in update.places(index)] for index in range(len(update.batches))]
    return any(len(one) > 1 and len(set(one)) == len(one) for one in rows)


def _refuse_random(certificate: ForeignCertificate, outcome: Outcome) -> None:
    """Refuse a model or step with results that are not those of its batches alone, where that shows.

    Raises:
        ProofError: errors failed, and the same batches twice differ by more than a rounding, with other random numbers
            or with equal ones.
    """
    if all(finding.kind in COUNTED for finding in certificate.failed):
        return

    def results(seed: int) -> UpdateResults:
        with untouched_generators(seed):
            return outcome.again()

    def differ(one: UpdateResults, other: UpdateResults) -> bool:
        return max(map(relative, one.tensors(), other.tensors()), default=0.0) > RANDOM

    once, twice = results(0), results(1)
    if not differ(once, twice):
        return
    if differ(twice, results(1)):
        raise ProofError(
            "the same batches give other results each time, with the same random numbers: the model or the step keeps "
            "state from call to call",
            fix="leave that state out for the proof, such as running means, counters and schedules",
        )
    raise ProofError(
        "the same batches give other results each time: the model or the step draws random numbers",
        fix="set its noise to 0 for the proof",
    )


def _has_small_errors(certificate: ForeignCertificate) -> bool:
    """True if an error failed that is so small that a part in fp32 may have made it."""
    return any(one.kind not in COUNTED and one.measured < FP32_LIKE for one in certificate.failed)


def describe(error: Exception) -> str:
    """An exception's type and message on one line."""
    text = f"{error.summary} do: {error.fix}" if isinstance(error, UnpadError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:MOST_REFUSED].rstrip(": ")


def refused(error: Exception) -> RefusedError:
    """The exception of a batch as a refusal.

    Raises:
        Exception: the given one, if memory is lacking: that says nothing about a batch.
    """
    raise_memory(error)
    return RefusedError(describe(error))


def raise_memory(error: Exception) -> None:
    """Raise an exception for lack of memory."""
    if isinstance(error, OutOfMemoryError) or is_memory_error(error):
        raise error
