"""All that is heard of a request to an engine: tokens, scores and ends of its answers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from torch import Tensor

from unpad.errors import UnpadError
from unpad.inference.engine import Finished, NewToken, Reason, Ticket


@dataclass
class Heard:
    """A listener that keeps everything.

    Args:
        leave: tokens after which an answer is left, with the reason "stop"; None to hear all.

    Attributes:
        cached: tokens of the prompt that were kept from earlier requests; None until it was read.
        scores: by answer, (vocab_size,) for each token, of an engine with `watch`.
    """

    leave: int | None = None
    cached: int | None = None
    echoed: tuple[NewToken, ...] = ()
    steps: dict[int, list[NewToken]] = field(default_factory=lambda: defaultdict(list))
    scores: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[int, Reason] = field(default_factory=dict)
    errors: dict[int, UnpadError] = field(default_factory=dict)

    def read(self, cached: int, echoed: tuple[NewToken, ...]) -> None:
        assert self.cached is None, "a prompt is read once"
        self.cached, self.echoed = cached, echoed

    def step(self, step: NewToken) -> bool:
        assert step.answer not in self.reasons, "an ended answer makes no tokens"
        self.steps[step.answer].append(step)
        return self.leave is None or len(self.steps[step.answer]) < self.leave

    def ended(self, answer: int, reason: Reason, error: UnpadError | None) -> None:
        assert answer not in self.reasons, "an answer ends once"
        self.reasons[answer] = reason
        if error is not None:
            self.errors[answer] = error

    def tokens(self, answer: int = 0) -> list[int]:
        """Tokens of an answer so far.

        Raises:
            UnpadError: the answer failed.
        """
        if answer in self.errors:
            raise self.errors[answer]
        return [step.token for step in self.steps[answer]]

    def finished(self, answer: int = 0) -> Finished:
        """The reason of an answer that nobody ended."""
        reason = self.reasons[answer]
        assert reason == "eos" or reason == "length" or reason == "context", reason
        return reason


def watch(ticket: Ticket, answer: int, scores: Tensor) -> None:
    """Keep scores with what is heard of their request: `watch` of an engine."""
    assert isinstance(ticket.listener, Heard), "requests that are watched are heard whole"
    ticket.listener.scores[answer].append(scores.clone())
