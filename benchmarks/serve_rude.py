"""Clients of `serve.py` that behave badly: hostile requests, clients that leave, and a server that is told to end."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from serve_client import CHATS, COMPLETIONS, DONE, Address, Told, ask, get, metrics, request_bytes, wait_until_quiet
from serve_measures import PATIENCE, differing, lengths, one_by_one, prompts, scored, spelled, until
from serve_sides import Side

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.helpers.fuzz.mutate import TOKENS, damage_bytes, damage_json
from unpad.serving.protocol import CHAT, COMPLETION

AT_ONCE = 16  # hostile requests; fewer than rows, so that none is refused for load
LEAVING, PLACES = 100, 64 + 256  # clients that leave at a time, more than rows; answers that a server has places for
IMPATIENT = 1.5  # seconds for a request that may be incomplete, to which a server need not say anything yet
LONGEST_STAY = 20  # seconds of a client that waits for so much of an answer
MOST_GROWTH = 0.05
NUM_EQUAL = 16
HELLO = {"role": "user", "content": "7 8 9"}


@dataclass
class Verdict:
    """What was seen, and what must not be so."""

    lines: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.faults

    def say(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)

    def refuse(self, wrong: bool, fault: str) -> None:
        """Note a fault, if there is one."""
        if wrong:
            self.faults.append(fault)
            self.say(f"FAILED: {fault}")


# --------------------------------------------------------------------------- hostile requests


@dataclass(frozen=True)
class Case:
    """A hostile request as bytes; `is_framed`: whether it is a whole one, which must be answered."""

    sent: bytes
    is_framed: bool


VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 16, 17, 2**31, 2**63, 2**70, 1.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"),
    "", "x", "none", "text", "\ud800", "中" * 50, "\0", "\x1b[31m", "user", "x" * 70_000, [], [[]], {}, {"a": 1},
    [None], [1, "a"], ["a"] * 300, [[1]] * 300, [2**31], [-1], [16_000], {"type": "text"}, {"include_usage": 1},
    [{"role": "user"}], [{"role": None, "content": []}], [HELLO, HELLO], [{"role": "user", "content": [{"type": {}}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}],
)  # fmt: skip
NAMES = (*sorted(CHAT | COMPLETION), "temprature", "", "__class__", "\0", "n" * 5000)
HEADERS = (
    "Host: evil.org", "Host: 127.0.0.1.evil.org", "Host:", "Host: 127.0.0.1\r\nHost: b", "Origin: https://evil.org",
    "Origin: null", "Content-Type: text/plain", "Content-Type: application/json; charset=utf-16",
    "Content-Type: multipart/form-data; boundary=x", "Content-Type:", "Authorization: Bearer x", "Authorization: \xff",
    "Content-Length: -1", "Content-Length: 99999999999", "Content-Length: 5\r\nContent-Length: 6",
    "Content-Length: 0x5", "Transfer-Encoding: chunked", "Transfer-Encoding: gzip",
    "Transfer-Encoding: chunked, chunked", "Expect: 100-continue",
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x", "Connection: keep-alive, close, x",
    "X: " + "y" * 100_000, "\r\n".join(f"X-{n}: y" for n in range(500)), "X : y", "X", ": y", "X: a\r\n b", "X: \0",
    "Accept-Encoding: gzip;q=nan", "Cookie: " + "a=b;" * 4000, "X-Forwarded-For: 1.1.1.1", "Range: bytes=0-1",
)  # fmt: skip
PATHS = (
    "/", "/health", "/metrics", "/v1/models", "/v1/models/random", "/v1/models/%00", "/v1/models/" + "%ff" * 300, "//",
    "/v1/classify", "/v1/embeddings", "/v1/responses", "/v1/models/random:predict", "/v1/models/x:explain", "*",
    "http://evil.org/v1/models", "/v1/../../etc/passwd", "/v1/chat/completions/", "/v1/completions?stream=1", "/%",
    "/" + "a" * 60_000, "/é", "/v1/chat/completions#x", "", "/v1//models", "/metrics?x=" + "y" * 9000,
)  # fmt: skip
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "CONNECT", "TRACE", "get", "X" * 500, "", "\0")
VERSIONS = ("HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/9.9", "HTTP/1.1 x", "")


def valid_body(rng: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    """A request that is answered, with a few tokens, and its route."""
    body: dict[str, Any] = {"model": model, "max_tokens": rng.randint(1, 3), "temperature": rng.choice((0, 1))}
    more = {
        "seed": 5, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1, "stop": ["77"], "n": 2, "stream": True,
        "stream_options": {"include_usage": True}, "user": "x", "presence_penalty": 0, "response_format": None,
    }  # fmt: skip
    body |= {name: more[name] for name in rng.sample(sorted(more), rng.randint(0, 5))}
    if "stream_options" in body:
        body["stream"] = True
    if rng.random() < 0.5:
        said = [
            HELLO,
            {"role": "assistant", "content": "10"},
            {"role": "user", "content": [{"type": "text", "text": "5"}]},
        ]
        return CHATS, {**body, "messages": said[: rng.choice((1, 3))], "logprobs": True, "top_logprobs": 3}
    prompt = rng.choice(("7 8 9", ["7", "8 9"], [7, 8], [[7], [8, 9]]))
    return COMPLETIONS, {**body, "prompt": prompt, "logprobs": 2, "echo": rng.random() < 0.5}


def case(number: int, model: str) -> Case:
    """A hostile request, decided by its number alone."""
    rng = random.Random(f"serve/{number}")
    path, body = valid_body(rng, model)
    drawn = rng.random()
    if drawn < 0.4:
        return Case(_request(path, damage_json(body, rng, rng.choice((0.05, 0.1, 0.3)))), True)
    if drawn < 0.6:
        changed = body | {rng.choice(NAMES): rng.choice(VALUES) for _ in range(rng.randint(1, 3))}
        return Case(_request(path, json.dumps(changed).encode()), True)
    content = json.dumps(body).encode()
    if drawn < 0.72:
        return Case(_request(path, damage_bytes(content, [content, *TOKENS], rng)), True)
    if drawn < 0.95:
        return Case(_hostile_head(rng, path, content), False)
    return Case(_request(path, content), True)


def _request(path: str, content: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def _hostile_head(rng: random.Random, path: str, content: bytes) -> bytes:
    """A request whose line or headers are wrong, as far as its body may look incomplete."""
    drawn = rng.random()
    if drawn < 0.4:
        whole = _request(path, content)
        at = whole.index(b"\r\n\r\n")
        return damage_bytes(whole[:at], [whole, *TOKENS], rng) + whole[at:]
    if drawn < 0.7:
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        lines = head + "".join(f"{rng.choice(HEADERS)}\r\n" for _ in range(rng.randint(1, 3)))
        end = f"Content-Length: {len(content)}\r\n" if rng.random() < 0.7 else ""
        return (lines + end + "\r\n").encode("latin-1", "replace") + content
    line = f"{rng.choice(METHODS)} {rng.choice((*PATHS, path))} {rng.choice(VERSIONS)}\r\n"
    kept = content if rng.random() < 0.5 else b""
    return f"{line}Host: 127.0.0.1\r\nContent-Length: {len(kept)}\r\n\r\n".encode() + kept


@dataclass(frozen=True)
class Heard:
    """What came back: statuses of all answers, "closed" without one, "waits" for more of an incomplete request."""

    statuses: tuple[str, ...]
    fault: str = ""


async def send(address: Address, one: Case, patience: float = PATIENCE) -> Heard:
    """Send a case and hear what comes, until the server closes the connection."""
    reader, writer = await asyncio.open_connection(*address)
    data, is_late = b"", False
    try:
        writer.write(one.sent)
        async with asyncio.timeout(patience if one.is_framed else IMPATIENT):
            while part := await reader.read(1 << 16):
                data += part
    except TimeoutError:
        is_late = True
    except OSError:
        pass  # closed while it was sent
    finally:
        writer.transport.abort()
    return judged(data, one, is_late)


def judged(data: bytes, one: Case, is_late: bool) -> Heard:
    """The verdict on all bytes that came.

    503 with the code of memory is the answer to a request that is larger than the memory this server was given, and no
    fault of it; every other status from 500 on is one, and so is a stream that ends with an error of the server.
    """
    statuses = tuple(status.decode() for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", data))
    if one.is_framed and (is_late or not statuses):
        return Heard(statuses, "no answer in time" if is_late else "closed without an answer")
    is_memory = b'"out_of_memory"' in data
    if any(status >= "500" and not (status == "503" and is_memory) for status in statuses):
        return Heard(statuses, f"status {max(statuses)}")
    if re.search(rb'"type": ?"server_error"', data) and not is_memory:
        return Heard(statuses, "a stream ended with an error of the server")
    return Heard(statuses or (("waits",) if is_late else ("closed",)))


async def fuzzed(side: Side, num: int, thousand: int = 1000) -> Verdict:
    """Send hostile requests; memory is compared between the second and the last `thousand` of them."""
    verdict, bodies = Verdict(), scored(NUM_EQUAL, seed=21)
    before = await one_by_one(side, bodies)
    seen, memory, numbers = Counter[str](), dict[int, list[int]](), iter(range(num))
    began = perf_counter()

    async def client() -> None:
        for number in numbers:
            heard = await send(side.address, case(number, side.model))
            seen.update(heard.statuses)
            verdict.refuse(bool(heard.fault), f"case {number}: {heard.fault}")
            memory.setdefault(number // thousand, []).append(side.memory_bytes())

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    said = ", ".join(f"{count:,} {status}" for status, count in sorted(seen.items()))
    verdict.say(f"{num:,} hostile requests in {perf_counter() - began:.0f} s: {said}.")
    rows = await wait_until_quiet(side.address, PATIENCE)
    verdict.refuse(rows > 0, f"{rows:.0f} rows live or wait after all clients are gone")
    _judge_memory(verdict, memory)
    await _judge_afterwards(verdict, side, bodies, before)
    return verdict


async def _judge_afterwards(verdict: Verdict, side: Side, bodies: list[dict[str, Any]], before: Sequence[Told]) -> None:
    """Compare answers with those before, and look for faults in the log."""
    wrong = differing(before, await one_by_one(side, bodies))
    verdict.say(f"{NUM_EQUAL - wrong} of {NUM_EQUAL} answers afterwards equal those before.")
    verdict.refuse(wrong > 0, "answers afterwards are not those before")
    faults = side.faults()
    verdict.refuse(bool(faults), f"the log has {len(faults)} faults: {', '.join(faults[:3])}")


def _judge_memory(verdict: Verdict, memory: Mapping[int, list[int]]) -> None:
    """Compare medians of the memory, by thousand."""
    mib = [median(memory[thousand]) / 2**20 for thousand in sorted(memory)]
    verdict.say(f"Memory by thousand, MiB: {', '.join(f'{one:.0f}' for one in mib)}.")
    if len(mib) < 3:
        verdict.say("Growth of memory is not judged: it takes three thousand requests.")
        return
    growth = mib[-1] / mib[1] - 1
    verdict.say(f"It grew by {growth:+.1%} between the second and the last (at most {MOST_GROWTH:.0%}).")
    verdict.refuse(growth > MOST_GROWTH, f"memory grew by {growth:.1%}")


# --------------------------------------------------------------------------- clients that leave


async def cancelled(side: Side, num: int) -> Verdict:
    """Clients that leave while they send, wait, are read for or are answered, streamed and not."""
    verdict, bodies = Verdict(), scored(NUM_EQUAL, seed=22)
    before = await one_by_one(side, bodies)
    made_before = (await metrics(side.address))["unpad_tokens_made_total"]
    numbers, began = iter(range(num)), perf_counter()

    async def client() -> None:
        for number in numbers:
            await leave(side, number)

    await asyncio.gather(*(client() for _ in range(min(num, LEAVING))))
    said = f"{num:,} clients left at random moments in {perf_counter() - began:.0f} s"
    rows = await wait_until_quiet(side.address, PATIENCE)
    made = (await metrics(side.address))["unpad_tokens_made_total"] - made_before
    verdict.say(f"{said}, with {made:,.0f} tokens made for them: {rows:.0f} rows live or wait afterwards.")
    verdict.refuse(rows > 0, "rows of clients that left are not free")
    short = [{**body, "max_tokens": 1, "stream": False} for body in _cycled(bodies, PLACES)]
    told = await asyncio.gather(*(ask(side.address, body) for body in short))
    complete = sum(one.ending == "complete" for one in told)
    verdict.say(f"{complete} of {PLACES} requests at once, as many as it has places for, are answered then.")
    verdict.refuse(complete < PLACES, "places of clients that left are not free")
    await _judge_afterwards(verdict, side, bodies, before)
    return verdict


def _cycled(bodies: list[dict[str, Any]], num: int) -> Iterator[dict[str, Any]]:
    return (bodies[index % len(bodies)] for index in range(num))


async def leave(side: Side, number: int) -> None:
    """Ask, and hang up at a moment that is decided by the number alone."""
    rng = random.Random(f"leave/{number}")
    text = spelled(prompts(5000 + number, 1, [rng.choice(lengths(8))])[0])
    body = {"model": side.model, "max_tokens": rng.randint(1, 200), "temperature": 1, "n": rng.choice((1, 1, 1, 3))}
    body |= {"stream": rng.random() < 0.5}
    chat = rng.random() < 0.5
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    sent = request_bytes(CHATS if chat else COMPLETIONS, body)
    try:
        reader, writer = await asyncio.open_connection(*side.address)
    except OSError:
        return
    try:
        writer.write(sent[: rng.randrange(len(sent))] if rng.random() < 0.1 else sent)
        # Half leave after some time, wherever the server is then; half when so much of the answer has come.
        seconds, parts = (rng.uniform(0, 1), 1000) if rng.random() < 0.5 else (LONGEST_STAY, rng.randint(1, 20))
        async with asyncio.timeout(seconds):
            while parts and await reader.read(1 << 12):
                parts -= 1
    except (TimeoutError, OSError):
        pass
    finally:
        if rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()


# --------------------------------------------------------------------------- the end of a server


async def drained(side: Side, process: subprocess.Popen[str], num: int = 90) -> Verdict:
    """Tell a server to end while it answers, reads and lets wait; every third answer is not streamed."""
    verdict, rng = Verdict(), random.Random("drain")
    told = [Told() for _ in range(num)]
    tasks = []
    for number, one in enumerate(told):
        body = {
            "model": side.model, "prompt": spelled(prompts(7000 + number, 1, [rng.choice(lengths(8))])[0]),
            "max_tokens": rng.choice((3, 10, 40, 400, 1200)), "temperature": 1, "seed": number,
            "stream": number % 3 != 2,
        }  # fmt: skip
        tasks.append(asyncio.create_task(ask(side.address, body, told=one)))
    await until(lambda: sum(len(one.parts) > 1 for one in told) >= num // 3, "streams under load")
    is_open = [not task.done() for task in tasks]
    process.send_signal(signal.SIGTERM)
    sent = perf_counter()
    await asyncio.wait(tasks, timeout=PATIENCE)
    code = await asyncio.to_thread(_exit_code, process)
    seconds = perf_counter() - sent
    judge_drain(verdict, [one for one, was_open in zip(told, is_open, strict=True) if was_open], code, seconds)
    verdict.refuse(await _takes_new(side.address), "a connection is taken after the end")
    faults = side.faults()
    verdict.refuse(bool(faults), f"the log has {len(faults)} faults: {', '.join(faults[:3])}")
    return verdict


def judge_drain(verdict: Verdict, told: list[Told], code: int | None, seconds: float) -> None:
    """The verdict on answers that were open when the signal came."""
    endings = Counter(ending_of(one) for one in told)
    said = ", ".join(f"{count} {ending}" for ending, count in sorted(endings.items()))
    verdict.say(f"SIGTERM with {len(told)} open answers: {said}; exit code {code} after {seconds:.1f} s.")
    verdict.refuse(not told, "no answer was open")
    verdict.refuse(endings["cut"] > 0, f"{endings['cut']} answers were cut")
    verdict.refuse(code != 0, f"the exit code is {code}")


def ending_of(one: Told) -> str:
    """How an answer ended; a stream is complete with its last mark, and ended by an error in its last event."""
    if one.ending == "complete" and len(one.parts) > 1 and one.parts[-1][1] != DONE:
        return "cut"
    if one.ending == "error" and "error" not in one.values[-1]:
        return "cut"
    return one.ending


def _exit_code(process: subprocess.Popen[str]) -> int | None:
    try:
        return process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        return None


async def _takes_new(address: Address) -> bool:
    try:
        await get(address, "/health")
    except (OSError, asyncio.IncompleteReadError):
        return False
    return True
