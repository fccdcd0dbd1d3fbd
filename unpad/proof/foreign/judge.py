"""A proof in the best precision that a model allows, and its certificate."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

from torch import nn

from unpad.errors import OutOfMemoryError, ProofError, UnpadError, is_memory_error
from unpad.proof.foreign import measure
from unpad.proof.foreign.certificate import COUNTED, ForeignCertificate, Measured, findings
from unpad.proof.foreign.model import config_of, placeholders, untouched_generators
from unpad.proof.foreign.update import Update, refuse_missing
from unpad.terminal.progress import LINE_SECONDS, progress

Precision = Literal["auto", "fp64", "fp32"]
EXACT = measure.Errors(measure.EXACT, measure.EXACT, measure.EXACT)  # in fp64
MOST_EXACT = 100_000_000  # weights of a model that "auto" proves in fp64
RANDOM = 1e-4  # difference of two runs of the same batches that no order of sums makes
FP32_LIKE = 1e-4  # errors below may be of a part that computes in fp32
FIRST_LINE = 5.0  # seconds before progress is told where it is told in lines
MOST_REFUSED = 300  # characters of an exception's message
PART = "{} of {} sequences of the first update were computed, some of each micro-batch; labels were read of all"
NO_ROUTER_LOSS = "the router's auxiliary loss is left out: a mean per batch, it depends on batching by definition"


@dataclass(frozen=True, eq=False)
class ComparedUpdate:
    """An update in one precision, and how it is measured.

    Args:
        alone: measures the sequences one at a time, by the mean cross-entropy.
        together: measures the batches.
        forward: the model on one batch's inputs, without labels.
        truth: loss and gradient of the sequences one at a time by an earlier model; None for those of `alone`.
        own: as of `Measured`.
        doubts: what cannot be told is meant; with one, nothing is proved.
    """

    update: Update
    alone: Callable[[], measure.UpdateResults]
    together: Callable[[], measure.UpdateResults]
    forward: measure.Forward
    truth: measure.UpdateResults | None = None
    own: str = ""
    doubts: tuple[str, ...] = ()

    def measured(self, model: nn.Module, bounds: measure.Errors | None = None) -> Measured:
        """Both sides.

        Args:
            bounds: of errors; by default those of one rounding of all weights to fp32.

        Raises:
            RefusedError: the model raises on a batch.
            ProofError: nothing can be compared.
        """
        refuse_missing(self.update)
        # The sequences, again where weights are rounded; the batches in logits, the step, and three times in `moves`.
        total = (1 if bounds else 2) * sum(piece.length for piece in self.update.pieces)
        total += 5 * sum(batch.ids.numel() for batch in self.update.batches)
        with (
            progress(f"proving in {'fp64' if bounds else 'fp32'}", total, "tokens", LINE_SECONDS - FIRST_LINE) as bar,
            model.register_forward_hook(
                lambda _, args, inputs, made: bar.advance(inputs["input_ids"].numel() if "input_ids" in inputs else 0),
                with_kwargs=True,
            ),
        ):
            alone = self.alone()
            truth = measure.UpdateResults(alone.logits, self.truth.loss, self.truth.gradient) if self.truth else alone
            try:
                found, moved = self.together(), measure.moves(self.forward, self.update, placeholders(model))
            except ProofError:
                raise
            except Exception as error:
                raise refused(error) from error
            bounds = bounds or measure.by_rounding(model, measure.EPS, self.alone).errors(alone).bounds()
        return Measured(self.update, truth, found, moved, bounds, self.own, "; ".join(self.doubts))


class RefusedError(Exception):
    """The model or the collator raised on a batch; the message is that of its exception."""


def judge(
    model: nn.Module, precision: Precision, compare: Callable[[bool], ComparedUpdate], notes: Sequence[str]
) -> ForeignCertificate:
    """Measure in fp64 where that works, else in fp32, and judge.

    Args:
        compare: called with True inside fp64, with False in the model's dtype, at least fp32.

    Raises:
        ProofError: the model cannot compute a sequence alone, or precision="fp64" and it does not compute in it.
    """
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    wants_exact = precision == "fp64" or (precision == "auto" and num_weights <= MOST_EXACT)
    with measure.in_fp64(model) if wants_exact else nullcontext():
        try:
            comparison = compare(True) if wants_exact else None
            measured = comparison.measured(model, EXACT) if comparison else None
        except Exception as error:
            raise_memory(error)
            comparison = None
        if comparison and measured:
            certificate = _certificate(measured, "fp64", notes)
            # An error this small may be of a part that computes in fp32.
            if all(one.kind in COUNTED or one.measured >= FP32_LIKE for one in certificate.failed):
                return _not_random(certificate, comparison.together)
    if precision == "fp64":
        raise ProofError("the model does not compute in fp64, or a part of it in less", fix='use precision="auto"')
    with measure.not_below_fp32(model):
        try:
            comparison = compare(False)
            measured = comparison.measured(model)
        except RefusedError as error:
            return ForeignCertificate((), "fp32", str(error), tuple(notes))
        except ProofError:
            raise
        except Exception as error:
            raise_memory(error)
            what = f"the model cannot compute a sequence alone: {describe(error)}"
            raise ProofError(what, fix=_fix(model)) from error
        return _not_random(_certificate(measured, "fp32", notes), comparison.together)


def _fix(model: nn.Module) -> str:
    """What to do where a model raises on a sequence alone, with its number of positions where it has one."""
    limit = getattr(config_of(model), "max_position_embeddings", None)
    rows = f", with rows of at most its {limit:,} positions" if isinstance(limit, int) else ""
    return f"prove a model of causal language{rows}"


def _certificate(measured: Measured, name: str, notes: Sequence[str]) -> ForeignCertificate:
    """Judge one measurement.

    Raises:
        ProofError: it cannot be judged.
    """
    update = measured.update
    if not math.isfinite(measured.truth.loss):
        raise ProofError("the loss of the sequences alone is not finite", fix="prove a model with other weights")
    if measured.moves.itself == 0:
        raise ProofError("the logits do not depend on the tokens", fix="prove a model with weights other than zero")
    sequences = {piece.sequence for piece in update.pieces}
    size = (len(sequences), sum(piece.length for piece in update.pieces), update.num_wanted)
    part = [PART.format(len(sequences), len(update.whole.sequences))] if update.whole else []
    return ForeignCertificate(findings(measured), name, None, (*notes, *_remarks(update), *part), *size)


def _remarks(update: Update) -> list[str]:
    """Notes on what these batches do not have, so that nothing is shown of it."""
    counts = [batch.num_targets for batch in update.batches]
    alike = "all batches have as many targets, so a mean of their means would be the mean over targets too"
    return [alike] if len(counts) > 1 and len(set(counts)) == 1 and counts[0] else []


def _not_random(certificate: ForeignCertificate, together: Callable[[], measure.UpdateResults]) -> ForeignCertificate:
    """A certificate, unless the model or step has results that are not those of its batches alone, where that shows.

    Raises:
        ProofError: errors failed, and the same batches twice differ by more than a rounding.
    """
    if all(finding.kind in COUNTED for finding in certificate.failed):
        return certificate

    def results(seed: int) -> measure.UpdateResults:
        with untouched_generators(seed):
            return together()

    if max(map(measure.relative, results(0).tensors(), results(1).tensors()), default=0.0) > RANDOM:
        raise ProofError(
            "the same batches give other results each time: the model or the step draws random numbers or keeps state",
            fix="set its noise to 0, and leave running means, counters and schedules out for the proof",
        )
    return certificate


def describe(error: Exception) -> str:
    """An exception's type and message on one line."""
    text = f"{error.summary} do: {error.fix}" if isinstance(error, UnpadError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:MOST_REFUSED].rstrip(": ")


def refused(error: Exception) -> Exception:
    """The exception of a batch as a refusal, if it is none of a proof.

    Raises:
        Exception: the given one, if memory is lacking: that says nothing about a batch.
    """
    raise_memory(error)
    return error if isinstance(error, ProofError) else RefusedError(describe(error))


def raise_memory(error: Exception) -> None:
    """Raise an exception for lack of memory."""
    if isinstance(error, OutOfMemoryError) or is_memory_error(error):
        raise error
