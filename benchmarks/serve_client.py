"""HTTP clients of `serve.py`: one request a connection over asyncio, answers noted event by event as they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal, NamedTuple

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
DONE = b"[DONE]"
LARGEST = 1 << 24  # bytes of a line or a body
QUIET = 1.0  # seconds in which a server does nothing, if it has nothing left to do
Ending = Literal["complete", "error", "cut", "left"]


class Address(NamedTuple):
    """An address of this machine."""

    host: str
    port: int


@dataclass
class Told:
    """What a client was told, filled while it comes.

    Args:
        parts: when each event of a stream came, in seconds of `perf_counter`, and its data; or the one body.
        is_whole: the last byte of the answer came.
        has_left: the client closed the connection before.
    """

    began: float = 0.0
    status: int = 0
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    is_whole: bool = False
    has_left: bool = False

    @property
    def values(self) -> list[dict[str, Any]]:
        """The events, or the body, as objects."""
        return [json.loads(part) for _, part in self.parts if part != DONE]

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for value in self.values for choice in value.get("choices", ())]

    @property
    def times(self) -> list[float]:
        """When each piece of text came."""
        return [time for time, part in self.parts if part != DONE and _has_text(json.loads(part))]

    @property
    def num_tokens(self) -> int | None:
        """Tokens of the answer, as the server counted them."""
        counts = [value["usage"]["completion_tokens"] for value in self.values if value.get("usage")]
        return counts[-1] if counts else None

    @property
    def ending(self) -> Ending:
        """How the answer ended: `error` by an event or a status that says so, `cut` by a closed connection."""
        if self.has_left:
            return "left"
        if not self.is_whole:
            return "cut"
        if self.status != 200 or any("error" in value for value in self.values):
            return "error"
        return "complete" if any(choice.get("finish_reason") for choice in self.choices) else "cut"

    @property
    def content(self) -> tuple[list[str], list[float], list[dict[str, float]], str]:
        """Tokens, their log probabilities, the likeliest ones with theirs, and the text of a completion."""
        said = [choice.get("logprobs") or {} for choice in self.choices]
        tokens = [token for one in said for token in one.get("tokens", ())]
        logprobs = [number for one in said for number in one.get("token_logprobs", ())]
        likeliest = [top for one in said for top in one.get("top_logprobs", ())]
        return tokens, logprobs, likeliest, "".join(choice["text"] for choice in self.choices)


def _has_text(value: Mapping[str, Any]) -> bool:
    return any(choice.get("text") or choice.get("delta", {}).get("content") for choice in value.get("choices", ()))


def request_bytes(path: str, body: Mapping[str, Any]) -> bytes:
    """A request as it is sent."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def ask(
    address: Address,
    body: Mapping[str, Any],
    *,
    path: str = COMPLETIONS,
    leave_after: int | None = None,
    told: Told | None = None,
) -> Told:
    """Ask, and note the answer.

    Args:
        leave_after: close the connection after so many events.
        told: what is filled; it can be looked at while the answer comes.
    """
    told = Told() if told is None else told
    told.began = perf_counter()
    writer = None
    try:
        reader, writer = await asyncio.open_connection(*address, limit=LARGEST)
        writer.write(request_bytes(path, body))
        told.status, headers = await read_head(reader)
        if not headers.get("content-type", "").startswith("text/event-stream"):
            content = await read_content(reader, headers)
            told.parts.append((perf_counter(), content))
            told.is_whole = True
            return told
        async for event in _events(reader):
            told.parts.append((perf_counter(), event))
            if leave_after is not None and len(told.parts) >= leave_after:
                told.has_left = True
                return told
        told.is_whole = True
    except (OSError, asyncio.IncompleteReadError, ValueError):
        pass  # what came stays noted, and is not whole
    except asyncio.CancelledError:
        told.has_left = True
        raise
    finally:
        if writer is not None:
            writer.transport.abort()
    return told


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers of an answer."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
    return int(lines[0].split(" ")[1]), headers


async def read_content(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    """The body of an answer."""
    if headers.get("transfer-encoding") == "chunked":
        return b"".join([part async for part in _chunks(reader)])
    return await reader.readexactly(int(headers.get("content-length", 0)))


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Data of the events of a stream, each when it is complete."""
    kept = b""
    async for part in _chunks(reader):
        *whole, kept = (kept + part).split(b"\n\n")
        for event in whole:
            if event.strip() and not event.startswith(b":"):  # a comment, which keeps the connection open
                yield event.strip().removeprefix(b"data: ")
    if kept.strip():
        raise ValueError("the stream ends within an event")


async def get(address: Address, path: str) -> tuple[int, bytes]:
    """Status and body of a route; raises OSError where nobody answers."""
    reader, writer = await asyncio.open_connection(*address, limit=LARGEST)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        status, headers = await read_head(reader)
        return status, await read_content(reader, headers)
    finally:
        writer.transport.abort()


async def metrics(address: Address) -> dict[str, float]:
    """Numbers of /metrics by their names, those without labels."""
    _, body = await get(address, "/metrics")
    lines = [line.rpartition(" ") for line in body.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines if "{" not in name}


async def wait_until_idle(address: Address, seconds: float) -> float:
    """Rows that live or wait: 0 once there is none, or their number after so many seconds."""
    until = perf_counter() + seconds
    while True:
        numbers = await metrics(address)
        rows = numbers["unpad_rows_live"] + numbers["unpad_rows_waiting"]
        if not rows or perf_counter() > until:
            return rows
        await asyncio.sleep(0.02)


async def wait_until_quiet(address: Address, seconds: float) -> float:
    """As `wait_until_idle`, and until no request of before is left that the server has not read or done."""
    until, before = perf_counter() + seconds, -1.0
    while True:
        rows = await wait_until_idle(address, seconds)
        _, body = await get(address, "/metrics")
        done = [line for line in body.decode().splitlines() if line.startswith("unpad_requests_total")]
        count = sum(float(line.rpartition(" ")[2]) for line in done if '"/metrics"' not in line)
        if rows or count == before or perf_counter() > until:
            return rows
        before = count
        await asyncio.sleep(QUIET)
