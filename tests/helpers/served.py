"""Requests to an engine, and all that is heard of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from unpad.errors import UnpadError
from unpad.inference.engine import Engine, NewToken, Reason, Request, Ticket


@dataclass
class Heard:
    """What a listener heard.

    Args:
        leave: tokens after which an answer is left with the reason "stop"; None to hear all.
    """

    leave: int | None = None
    cached: int | None = None
    echoed: tuple[NewToken, ...] = ()
    steps: dict[int, list[NewToken]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[int, Reason] = field(default_factory=dict)
    errors: dict[int, UnpadError | None] = field(default_factory=dict)
    scores: dict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))

    def read(self, cached: int, echoed: tuple[NewToken, ...]) -> None:
        assert self.cached is None, "a prompt is read once"
        self.cached, self.echoed = cached, echoed

    def step(self, step: NewToken) -> bool:
        assert step.answer not in self.reasons, "an ended answer goes on"
        self.steps[step.answer].append(step)
        return self.leave is None or len(self.steps[step.answer]) < self.leave

    def ended(self, answer: int, reason: Reason, error: UnpadError | None) -> None:
        assert answer not in self.reasons, "an answer ends once"
        self.reasons[answer], self.errors[answer] = reason, error

    def tokens(self, answer: int = 0) -> list[int]:
        return [step.token for step in self.steps[answer]]

    def all(self) -> tuple[dict[int, list[int]], dict[int, list[bytes]], dict[int, Reason]]:
        """Tokens, scores bit by bit, and reasons, by answer."""
        return {i: self.tokens(i) for i in self.reasons}, dict(self.scores), self.reasons


def watch(ticket: Ticket, answer: int, scores: torch.Tensor) -> None:
    """Keep the scores with what is heard of the request."""
    assert isinstance(ticket.listener, Heard)
    ticket.listener.scores[answer].append(scores.numpy().tobytes())


def alone(engine: Engine, request: Request, leave: int | None = None) -> Heard:
    """A request in an engine with nothing else to do."""
    heard = Heard(leave)
    engine.submit(request, heard)
    engine.run()
    return heard
