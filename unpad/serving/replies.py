"""Answers in OpenAI's form: whole ones, the events of streams, numbers of tokens and log probabilities; pure functions.

Events of a stream are `data:` lines of JSON; equal answers have equal bytes, but for their id and the time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unpad.serving.protocol import RequestError

DONE = b"data: [DONE]\n\n"
# Reasons of the engine, as clients know them.
FINISHED = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


@dataclass(frozen=True)
class Head:
    """Fields that every part of one answer begins with; `kind` is "chat" or "text"."""

    id: str
    created: int
    model: str
    fingerprint: str
    kind: str

    def to_json(self, *, streamed: bool) -> dict[str, Any]:
        of_chat = "chat.completion.chunk" if streamed else "chat.completion"
        return {
            "id": self.id,
            "object": of_chat if self.kind == "chat" else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass(frozen=True)
class Spelled:
    """A token with its log probability; `spelling` are its bytes, `offset` its first character in the answer.

    Args:
        logprob: None for the first token of a text, before which nothing predicts it.
        top: the likeliest tokens with their log probabilities, descending.
    """

    name: str
    spelling: bytes
    logprob: float | None
    top: tuple[Spelled, ...] = ()
    offset: int = 0


@dataclass(frozen=True)
class TextPiece:
    """The next part of one answer: text and tokens; `finished` is the reason why it ended, on its last piece."""

    index: int
    text: str = ""
    tokens: tuple[Spelled, ...] = ()
    finished: str | None = None


@dataclass
class WholeAnswer:
    """One answer, put together from its pieces."""

    index: int
    text: str = ""
    tokens: list[Spelled] = field(default_factory=list)
    finished: str | None = None

    def add(self, piece: TextPiece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        self.finished = piece.finished or self.finished


def spelling(name: str, text: bytes) -> str:
    """A token as a text: its own if it has whole characters, otherwise `bytes:\\xe4\\xbd`; its name if it has none."""
    if not text:
        return name
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def usage(num_read: int, num_cached: int, num_made: int) -> dict[str, Any]:
    """Numbers of tokens: of prompts, of these that were kept from earlier requests, and of answers."""
    return {
        "prompt_tokens": num_read,
        "completion_tokens": num_made,
        "total_tokens": num_read + num_made,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def whole(
    head: Head,
    choices: Sequence[WholeAnswer],
    counts: Mapping[str, Any],
    notes: Mapping[str, Any],
    *,
    with_tokens: bool,
) -> dict[str, Any]:
    """An answer that is not streamed.

    Args:
        counts: of `usage`.
        notes: the field `unpad`.
        with_tokens: whether log probabilities were asked for.
    """
    written = []
    for choice in choices:
        reported = logprobs(head.kind, choice.tokens) if with_tokens else None
        said = (
            {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
            if head.kind == "chat"
            else {"text": choice.text}
        )
        written.append({"index": choice.index, **said, "logprobs": reported, "finish_reason": choice.finished})
    return {**head.to_json(streamed=False), "choices": written, "usage": dict(counts), "unpad": dict(notes)}


def logprobs(kind: str, tokens: Sequence[Spelled]) -> dict[str, Any]:
    """Log probabilities in the form of chats, or in that of completions."""
    if kind == "chat":
        return {"content": [_of_chat(one) for one in tokens], "refusal": None}
    return {
        "tokens": [spelling(one.name, one.spelling) for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": [None if one.logprob is None else _likeliest(one) for one in tokens],
        "text_offset": [one.offset for one in tokens],
    }


def _of_chat(token: Spelled) -> dict[str, Any]:
    return {**_entry(token), "top_logprobs": [_entry(one) for one in token.top]}


def _entry(token: Spelled) -> dict[str, Any]:
    name = spelling(token.name, token.spelling)
    return {"token": name, "logprob": token.logprob, "bytes": list(token.spelling) or None}


def _likeliest(token: Spelled) -> dict[str, float | None]:
    """The likeliest tokens by their text; of several with one text, the likeliest."""
    found: dict[str, float | None] = {}
    for one in token.top:
        found.setdefault(spelling(one.name, one.spelling), one.logprob)
    return found


# --------------------------------------------------------------------------- streams


def event(value: Mapping[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def opening(head: Head, index: int) -> bytes:
    """The first event of a chat's answer, which names its role."""
    choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return event({**head.to_json(streamed=True), "choices": [choice]})


def chunk(head: Head, piece: TextPiece, *, with_tokens: bool, notes: Mapping[str, Any] | None = None) -> bytes:
    """The event of a piece of an answer; `notes` are added as the field `unpad`."""
    said = {"delta": {"content": piece.text} if piece.text else {}} if head.kind == "chat" else {"text": piece.text}
    reported = logprobs(head.kind, piece.tokens) if with_tokens and piece.tokens else None
    choice = {"index": piece.index, **said, "logprobs": reported, "finish_reason": piece.finished}
    more = {} if notes is None else {"unpad": dict(notes)}
    return event({**head.to_json(streamed=True), "choices": [choice], **more})


def closing(head: Head, counts: Mapping[str, Any]) -> bytes:
    """The event with the numbers of tokens, which has no choices."""
    return event({**head.to_json(streamed=True), "choices": [], "usage": dict(counts)})


def failure(error: RequestError) -> bytes:
    """The event that ends a stream which cannot go on."""
    return event(error.to_json())
