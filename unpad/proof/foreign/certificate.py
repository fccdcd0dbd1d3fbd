"""The certificate for an external model, collator or trainer: findings, a verdict, and advice."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from unpad.proof.line import Certificate, Line, not_applicable
from unpad.terminal.table import columns, wrapped

Kind = Literal["cut", "unknown", "crossing", "padding", "targets", "isolation", "filler", "logits", "loss", "gradient"]
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
    "gradient": "gradient of the update = one at a time",
}
LEAKS: tuple[Kind, ...] = ("crossing", "isolation", "filler")
COUNTED: tuple[Kind, ...] = ("cut", "unknown", "crossing", "padding", "targets")
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

    def finding(self, kind: Kind) -> BatchClaim | None:
        """The finding of a kind; None if the proof ended before it."""
        return next((finding for finding in self.findings if finding.kind == kind), None)

    def lines(self) -> list[str]:
        """The certificate as lines for a terminal of 80 columns."""
        text = Certificate(tuple(finding.line() for finding in self.findings)).text() if self.findings else []
        notes = [part for note in self.notes for part in wrapped(f"note: {note}", columns())]
        refused = wrapped(f"refused: {self.refused}", columns()) if self.refused is not None else []
        size = f"{self.num_sequences} sequences, {self.num_tokens} tokens, {self.num_targets} targets"
        return [*text[:-1], *notes, *refused, f"{self.verdict} in {self.precision}: {size}"]

    def to_dict(self) -> dict[str, Any]:
        """The certificate for JSON."""
        findings = [{**asdict(finding), "claim": finding.claim, "passed": finding.passed} for finding in self.findings]
        return {**asdict(self), "findings": findings, "verdict": self.verdict, "passed": self.passed}

    def __str__(self) -> str:
        return "\n".join(self.lines())
