"""Requests to an engine, and all that is heard of them."""

from typing import Any

from unpad.inference.engine import Collected, Engine, Request


def everything(heard: Collected) -> tuple[dict[int, list[int]], dict[int, list[bytes]], dict[int, Any]]:
    """Tokens, scores bit by bit, and reasons, by answer."""
    scores = {answer: [one.numpy().tobytes() for one in rows] for answer, rows in heard.scores.items()}
    return {answer: heard.tokens(answer) for answer in heard.reasons}, scores, heard.reasons


def alone(engine: Engine, request: Request, leave: int | None = None) -> Collected:
    """A request in an engine with nothing else to do."""
    heard = Collected(leave)
    engine.submit(request, heard)
    engine.run()
    return heard
