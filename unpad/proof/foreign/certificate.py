"""The certificate for an external model, collator or trainer: findings, a verdict, and each failure's cause and fix."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from unpad.proof.content import is_zero
from unpad.proof.foreign.measure import Errors, Moves, UpdateResults
from unpad.proof.foreign.update import Labels, Update, count_cut, read_labels
from unpad.proof.line import Certificate, Line, not_applicable
from unpad.terminal.table import columns, wrapped

Counted = Literal["cut", "unknown", "crossing", "padding", "targets", "collated"]  # tokens, targets or cells
Kind = Literal[Counted, "isolation", "filler", "logits", "loss", "step", "gradient"]
Verdict = Literal["sound", "leaking", "cut", "wrong loss", "refused", "not proven"]

CLAIMS: dict[Kind, str] = {
    "cut": "tokens cut off or torn from their sequence",
    "unknown": "tokens of no known sequence",
    "crossing": "targets predicted from another sequence",
    "padding": "targets predicted from or in padding",
    "targets": "targets missing, added or wrong",
    "isolation": "another sequence moves the logits",
    "filler": "the padding's content moves the logits",
    "logits": "logits = one at a time",
    "loss": "reported loss = mean over targets",
    "step": "loss of the step = of its rows computed alone",
    "collated": "cells of rows other than with the row alone",
    "gradient": "gradient of the update = one at a time",
}
LEAKS: tuple[Kind, ...] = ("crossing", "isolation", "filler")
COUNTED: tuple[Kind, ...] = get_args(Counted)
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class BatchClaim:
    """One claim about the batches of an update.

    Args:
        kind: short name of the claim; `claim` is its sentence.
        measured: a number of tokens or targets for the kinds in `COUNTED`, else a relative error.
        bound: largest passing value.
        advice: for a failed finding, its cause and a fix; otherwise a remark or nothing.
        gap: the reason why the comparison could not have failed; empty for none.
        applies: False if the claim does not apply to the batches; `gap` says why.
    """

    kind: Kind
    measured: float
    bound: float
    advice: str = ""
    gap: str = ""
    applies: bool = True

    @property
    def claim(self) -> str:
        return CLAIMS[self.kind]

    @property
    def passed(self) -> bool | None:
        """False above the bound, or for NaN; None if it holds but nothing was compared."""
        return (None if self.gap else True) if self.measured <= self.bound else False

    def line(self) -> Line:
        """The finding as a line of a certificate."""
        if self.kind in COUNTED:
            name = f"{self.claim}: {self.measured:g}" if self.passed is False else self.claim
            return Line(name, "", None, None, self.passed, self.advice or self.gap)
        if not self.applies:
            return not_applicable(self.claim, self.gap)
        return Line(self.claim, "", self.measured, self.bound, self.passed, self.advice or self.gap)


@dataclass(frozen=True)
class ForeignCertificate:
    """Findings on the batches of one update, compared with the sequences one at a time.

    Args:
        precision: of the computation: "fp64", or the model's own dtype, such as "fp32".
        refused: the message of the exception with which the model or the collator refused the batch.
        notes: what the proof left out or changed, such as a router's auxiliary loss.
        num_sequences, num_tokens, num_targets: of the sequences in the update.
    """

    findings: tuple[BatchClaim, ...]
    precision: str
    refused: str | None = None
    notes: tuple[str, ...] = ()
    num_sequences: int = 0
    num_tokens: int = 0
    num_targets: int = 0

    @property
    def passed(self) -> bool | None:
        """True if sound, None if nothing fails but something was not proven, else False."""
        return None if self.verdict == "not proven" else self.verdict == "sound"

    @property
    def verdict(self) -> Verdict:
        """The most serious failure.

        "refused" by the model or collator; "leaking": a sequence sees another one, or padding; "cut": tokens are
        missing; "wrong loss": anything else, such as targets in padding or a mean of means; "not proven": nothing
        failed, but a claim had nothing to compare; else "sound".
        """
        failed = {finding.kind for finding in self.failed}
        if self.refused is not None:
            return "refused"
        if failed.intersection(LEAKS):
            return "leaking"
        if "cut" in failed:
            return "cut"
        if failed:
            return "wrong loss"
        return "not proven" if any(one.passed is None and one.applies for one in self.findings) else "sound"

    @property
    def failed(self) -> tuple[BatchClaim, ...]:
        return tuple(finding for finding in self.findings if finding.passed is False)

    @property
    def cause(self) -> str:
        """Advice of the gravest failure, as leaks explain the rest; empty without one."""
        failed = sorted(self.failed, key=lambda finding: finding.kind not in LEAKS)
        return next((finding.advice for finding in failed if finding.advice), "")

    def finding(self, kind: Kind) -> BatchClaim | None:
        """The finding of a kind; None if the proof ended before it."""
        return next((finding for finding in self.findings if finding.kind == kind), None)

    def lines(self) -> list[str]:
        """The certificate as lines for a terminal of 80 columns."""
        text = Certificate(tuple(finding.line() for finding in self.findings)).text() if self.findings else []
        notes = [part for note in self.notes for part in wrapped(f"note: {note}", columns())]
        refused = wrapped(f"refused: {self.refused}", columns()) if self.refused is not None else []
        targets = f", {self.num_targets} targets" if self.num_targets else ""
        size = f"{self.num_sequences} sequences, {self.num_tokens} tokens{targets}"
        return [*text[:-1], *notes, *refused, f"{self.verdict} in {self.precision}: {size}"]

    def to_dict(self) -> dict[str, Any]:
        """The certificate for JSON."""
        findings = [{**asdict(finding), "claim": finding.claim, "passed": finding.passed} for finding in self.findings]
        return {**asdict(self), "findings": findings, "verdict": self.verdict, "passed": self.passed}

    def __str__(self) -> str:
        return "\n".join(self.lines())


ALONE = "no batch of the update holds two sequences"
ALIKE = "all sequences of the update are alike, so mixing them up would change nothing"
CROSSING = "set the label of each sequence's first token to -100"
PADDING = "pad on the right, and set the labels of padding, and of each row's first real token, to -100"
LONGER = "raise the longest length, or leave them out"

SHARED_ROW = (
    "sequences share a row and the model does not keep them apart: leave attention_mask out, set position_ids that "
    "restart at 0, pass use_cache=False, or pad on the right"
)
SHARED_BATCH = "the model mixes the rows of a batch; one sequence per batch"
FILLER = "the model attends to padding: pass attention_mask with zeros there, and pad on the right"
POSITIONS = (
    "logits differ though nothing leaks: positions count from the padding or the row; pad on the right, or pass "
    "position_ids that begin at 0 with each sequence; or a row has pixels of another one"
)
STOPPED = "the loss is right and its gradient is not: a part of the model or of the step stops or scales it"
FOLLOWS = "follows from the findings above"
MEAN = "divide the sum over targets by the targets of the whole update (num_items_in_batch)"
OTHER_UPDATE = "{} is another loss than the mean cross-entropy over targets, and only that one is judged; {}"


@dataclass(frozen=True, eq=False)
class Measured:
    """An update in its batches and, as the truth, its sequences one at a time.

    Args:
        own: name of a loss that may be another than the mean cross-entropy, and then is not judged.
        doubt: why it cannot be told which targets are meant; empty for none.
    """

    update: Update
    truth: UpdateResults
    found: UpdateResults
    moves: Moves
    bounds: Errors
    own: str = ""
    doubt: str = ""

    @cached_property
    def errors(self) -> Errors:
        return self.found.errors(self.truth)


def findings(measured: Measured) -> tuple[BatchClaim, ...]:
    """Judge the measurements."""
    update, errors, bounds = measured.update, measured.errors, measured.bounds
    whole = update.whole or update
    labels = read_labels(whole)
    cut, num_cut = count_cut(whole)
    found: list[BatchClaim] = []

    def add(kind: Kind, value: float, bound: float, advice: str, gap: str = "") -> None:
        found.append(BatchClaim(kind, value, bound, "" if value <= bound else advice, gap, applies=gap != ALONE))

    add("cut", cut, 0, f"{cut} tokens of {num_cut} sequences are missing or apart; {LONGER}")
    add("unknown", labels.unknown_tokens, 0, "the collator adds tokens; prove with the sequences as it writes them")
    add("crossing", labels.crossing, 0, f"targets predicted from another document: {labels.crossing}; {CROSSING}")
    num, num_predicted = labels.padding_predicts, labels.padding_predicted
    padding = f"targets predicted from padding: {num}, and that are padding: {num_predicted}; {PADDING}"
    add("padding", num + num_predicted, 0, padding)
    add("targets", labels.missing + labels.added + labels.wrong, 0, _targets(whole, labels), measured.doubt)
    moved = measured.moves
    rows = [[row for _, row, _ in update.places(index)] for index in range(len(update.batches))]
    shared = SHARED_ROW if any(len(set(one)) < len(one) for one in rows) else SHARED_BATCH
    add("isolation", moved.others, bounds.logits, shared, ALONE if moved.itself is None else "")
    if moved.filler is not None:
        add("filler", moved.filler, bounds.logits, FILLER)
    failed = {finding.kind for finding in found if finding.passed is False}
    num_unlike = len({tuple(update.ids_of(piece)) for piece in update.pieces})
    alike = ALIKE if num_unlike < 2 and moved.itself is not None else ""
    add("logits", errors.logits, bounds.logits, FOLLOWS if failed.intersection(LEAKS) else POSITIONS, alike)
    failed |= {finding.kind for finding in found if finding.passed is False}
    if measured.own and (errors.loss > bounds.loss or errors.gradient > bounds.gradient):
        reason = OTHER_UPDATE.format(measured.own, MEAN)
        return (*found, *(BatchClaim(kind, 0, bounds.loss, gap=reason) for kind in ("loss", "gradient")))
    add("loss", errors.loss, bounds.loss, FOLLOWS if failed else _loss(measured))
    if gradient := list(measured.truth.gradient.values()):
        wrong = failed or errors.loss > bounds.loss
        gap = "the gradient of the sequences alone is 0" if is_zero(gradient) else alike
        add("gradient", errors.gradient, bounds.gradient, FOLLOWS if wrong else STOPPED, gap)
    return tuple(found)


def _targets(update: Update, labels: Labels) -> str:
    parts = []
    if labels.missing:
        parts.append(f"{labels.missing} of {update.num_wanted} targets have no label")
        if len(labels.missing_ids) == 1:
            token = next(iter(labels.missing_ids))
            parts.append(f"all of them are token {token}; is it also the padding? give padding a token of its own")
    if labels.added:
        parts.append(f"{labels.added} tokens that are no targets have labels")
    if labels.wrong:
        parts.append(f"{labels.wrong} labels are not the next token; are they shifted twice?")
    return "; ".join(parts)


def _loss(measured: Measured) -> str:
    """The most likely cause of a wrong loss with correct targets and logits."""
    num, found, truth = len(measured.update.batches), measured.found, measured.truth
    scale = found.loss / truth.loss if truth.loss else 1.0
    for factor, cause in ((num, "not divided"), (1 / num, "divided twice")):
        if num > 1 and abs(scale / factor - 1) < 0.05:  # means of micro-batches differ slightly
            return f"the loss is {scale:.3g} times the mean over targets: {cause} by the {num} micro-batches"
    return f"{MEAN}, not of a micro-batch; a loss with weights, smoothing or further terms is not judged"
