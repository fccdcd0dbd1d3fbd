"""Measures of `serve.py`: answers equal to alone, tokens a second, gaps, processor time outside the model, clients that
are gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from statistics import NormalDist
from time import perf_counter
from typing import Any

import numpy as np
from serve_client import Address, Told, ask, metrics, request_bytes, wait_until_idle
from serve_sides import SPECIAL, VOCAB, Side

SHORTEST, MEDIAN, LONGEST, SIGMA = 4, 60, 400, 0.8  # tokens of prompts, log-normal as in generation.py
NUM_NEW = 32
ALIKE = 8  # prompts whose lengths cover the distribution; every load is a multiple of them
LONG_PROMPT, SHORT_PROMPT = 1500, 40  # tokens of prompts where one joins others
STEADY = 10  # tokens of every stream before that
PATIENCE = 120  # seconds until something that must come


class WrongAnswerError(Exception):
    """An answer that cannot be measured: not complete, or of another length than was asked for."""


def lengths(num: int) -> list[int]:
    """Tokens of prompts at equal steps of the distribution, 4 to 400, half of them below 60."""
    places = [NormalDist().inv_cdf((place + 0.5) / num) for place in range(num)]
    return [int(min(max(exp(log(MEDIAN) + SIGMA * place), SHORTEST), LONGEST)) for place in places]


def prompts(seed: int, num: int, sizes: Sequence[int]) -> list[list[int]]:
    """Random tokens that no other seed has, so that no beginning was read before."""
    draw = np.random.default_rng(seed)
    return [draw.integers(len(SPECIAL), VOCAB, sizes[index % len(sizes)]).tolist() for index in range(num)]


def spelled(ids: Sequence[int]) -> str:
    """The text that a prompt is read from."""
    return " ".join(map(str, ids))


def greedy(side: Side, prompt: Sequence[int] | str, new: int = NUM_NEW, **more: Any) -> dict[str, Any]:
    """The body of a streamed request whose answer has exactly so many tokens."""
    text = prompt if isinstance(prompt, str) else spelled(prompt)
    return {"model": side.model, "prompt": text, "max_tokens": new, "temperature": 0, "stream": True, **more}


WITH_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


# --------------------------------------------------------------------------- equal to alone


def differing(alone: Sequence[Told], among: Sequence[Told]) -> int:
    """Answers among others whose tokens, text or log probabilities are not those of the same request alone.

    An answer whose client left is compared as far as it came, which must be one token at least.
    """
    return sum(not _is_same(one, other) for one, other in zip(alone, among, strict=True))


def _is_same(alone: Told, among: Told) -> bool:
    if alone.ending != "complete" or among.ending not in ("complete", "left"):
        return False
    expected: tuple[Any, ...] = alone.content
    found: tuple[Any, ...] = among.content
    if among.ending == "complete":
        return expected == found
    num = len(found[0])
    return num > 0 and all(one[:num] == other for one, other in zip(expected[:3], found[:3], strict=True))


def scored(num: int, seed: int) -> list[dict[str, Any]]:
    """Bodies of streams with log probabilities: every other one drawn, the rest greedy."""
    bodies = []
    for index, ids in enumerate(prompts(seed, num, sorted(lengths(num), key=lambda size: size * 7919 % 101))):
        drawn = {"temperature": 1.0, "top_p": 0.95} if index % 2 else {"temperature": 0}
        bodies.append({"prompt": ids, "max_tokens": NUM_NEW, "logprobs": 2, "seed": index, "stream": True, **drawn})
    return bodies


async def one_by_one(side: Side, bodies: Sequence[Mapping[str, Any]]) -> list[Told]:
    return [await ask(side.address, body) for body in bodies]


async def joining(side: Side, bodies: Sequence[Mapping[str, Any]]) -> list[Told]:
    """Ask for all answers: the later half join one by one while the others stream, every eighth leaves after 10."""
    half = len(bodies) // 2
    told = [Told() for _ in bodies]
    turn = [asyncio.Event() for _ in bodies]

    async def first(index: int) -> None:
        asking = asyncio.create_task(client(index))
        after = 1 + index * 5 % (NUM_NEW - 4)  # tokens of this one when another joins
        while not asking.done() and len(told[index].parts) < after:
            await asyncio.sleep(0.002)
        if index + half < len(bodies):
            turn[index + half].set()
        await asking

    async def later(index: int) -> None:
        await turn[index].wait()
        await client(index)

    async def client(index: int) -> None:
        leave = 10 if index % 8 == 7 else None
        await ask(side.address, bodies[index], leave_after=leave, told=told[index])

    turn[-1].set()  # of an odd number, nobody lets the last one in
    await asyncio.gather(*(first(i) if i < half else later(i) for i in range(len(bodies))))
    return told


# --------------------------------------------------------------------------- tokens a second


@dataclass(frozen=True)
class Load:
    """What a server did: new tokens, seconds on the clock, and seconds of its processor time."""

    tokens: int
    seconds: float
    processor: float

    def rate(self, shared: bool) -> float:
        """Tokens a second; on a shared machine, a second of the server's processor time."""
        return self.tokens / (self.processor if shared else self.seconds)


async def load(side: Side, bodies: Sequence[Mapping[str, Any]], clients: int) -> Load:
    """So many clients ask, each for its next answer when it has the last one.

    Raises:
        WrongAnswerError: an answer has fewer tokens than were asked for.
    """
    waiting, told = iter(bodies), list[Told]()

    async def client() -> None:
        for body in waiting:
            told.append(await ask(side.address, body))

    before, began = side.processor_seconds(), perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds, processor = perf_counter() - began, side.processor_seconds() - before
    asked = sum(body["max_tokens"] for body in bodies)
    counts = [one.num_tokens if one.ending == "complete" else None for one in told]
    if None in counts or sum(filter(None, counts)) != asked:
        raise WrongAnswerError(f"{asked} tokens were asked for, the answers have {counts}")
    return Load(asked, seconds, processor)


async def loads(sides: Mapping[str, Side], clients: Sequence[int], rounds: int) -> dict[tuple[str, int], list[Load]]:
    """Loads of all sides by number of clients, in turn; all sides read the same prompts of a round."""
    found: dict[tuple[str, int], list[Load]] = {(name, num): [] for name in sides for num in clients}
    for number in range(rounds + 1):  # the first warms up
        for name in list(sides)[:: 1 if number % 2 else -1]:
            for num in clients:
                texts = prompts(1000 * number + num, ALIKE * max(1, num // 4), lengths(ALIKE))
                bodies = [greedy(sides[name], text, **WITH_USAGE) for text in texts]
                one = await load(sides[name], bodies, num)
                if number:
                    found[name, num].append(one)
    return found


# --------------------------------------------------------------------------- gaps


@contextmanager
def streams(side: Side, texts: Sequence[Sequence[int]], new: int) -> Iterator[list[Told]]:
    """Streams that go on until the context ends, and then leave."""
    told = [Told() for _ in texts]
    tasks = [
        asyncio.create_task(ask(side.address, greedy(side, text, new), told=one))
        for text, one in zip(texts, told, strict=True)
    ]
    try:
        yield told
    finally:
        for task in tasks:
            task.cancel()


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that must come.

    Raises:
        WrongAnswerError: it did not.
    """
    late = perf_counter() + PATIENCE
    while not condition():
        if perf_counter() > late:
            raise WrongAnswerError(f"{what} did not come in {PATIENCE} s")
        await asyncio.sleep(0.002)


def longest_gap(told: Sequence[Told], since: float, until: float) -> float:
    """Longest time between two events of one stream that touches an interval, in seconds."""
    pairs = [pair for one in told for pair in pairwise(time for time, _ in one.parts)]
    return max(late - early for early, late in pairs if late > since and early < until)


@dataclass(frozen=True)
class Joined:
    """A long prompt that joined streams: seconds.

    Args:
        without: longest gap of these before, while their own prompts join; steady: after that.
        gap: their longest gap while the long prompt is read.
        first: from the long prompt to its first token.
    """

    without: float
    steady: float
    gap: float
    first: float


async def join(side: Side, seed: int, num: int) -> Joined:
    """Let a prompt of 1,500 tokens join so many streams, which come at once."""
    (long,) = prompts(seed, 1, [LONG_PROMPT])
    with streams(side, prompts(seed + 1, num, [SHORT_PROMPT]), 1500) as told:
        began = perf_counter()
        await until(lambda: all(one.parts for one in told), "the streams")
        full = perf_counter()
        counts = [len(one.parts) for one in told]
        await until(lambda: all(len(o.parts) >= n + STEADY for o, n in zip(told, counts, strict=True)), "steady tokens")
        sent = perf_counter()
        answer = await ask(side.address, greedy(side, long, 1))
        if answer.ending != "complete":
            raise WrongAnswerError(f"the long prompt's answer was {answer.ending}")
        first = answer.times[0]
        await until(lambda: all(one.parts[-1][0] > first for one in told), "the streams after it")
        gaps = [longest_gap(told, *during) for during in ((began, sent), (full, sent), (sent, first))]
        found = Joined(gaps[0], gaps[1], gaps[2], first - sent)
    await wait_until_idle(side.address, PATIENCE)
    return found


# --------------------------------------------------------------------------- outside the model


async def outside(side: Side, seed: int, num: int) -> float:
    """Share of the server's processor time that is not its model's, of so many streams at once.

    Args:
        side: with a clock.
    """
    texts = prompts(seed, num, lengths(ALIKE))
    bodies = [greedy(side, "", **WITH_USAGE) | {"prompt": text} for text in texts]
    before = side.model_seconds()
    served = await load(side, bodies, num)
    return 1 - (side.model_seconds() - before) / served.processor


# --------------------------------------------------------------------------- clients that are gone


async def gone(side: Side, num: int, seed: int) -> tuple[float, float]:
    """Seconds until no row lives or waits, after so many clients with open streams hang up at once: of the clock, and
    of the server's processor time.
    """
    bodies = [greedy(side, text, 400) for text in prompts(seed, num, [8])]
    writers = await asyncio.gather(*(_opened(side.address, body) for body in bodies))
    try:
        late = perf_counter() + PATIENCE
        while (numbers := await metrics(side.address))["unpad_rows_live"] + numbers["unpad_rows_waiting"] < num:
            if perf_counter() > late:
                raise WrongAnswerError(f"of {num} requests {numbers} live and wait")
            await asyncio.sleep(0.1)
    finally:
        before, began = side.processor_seconds(), perf_counter()
        for writer in writers:
            writer.transport.abort()
    if rows := await wait_until_idle(side.address, PATIENCE):
        raise WrongAnswerError(f"{rows:.0f} rows of clients that are gone live or wait after {PATIENCE} s")
    return perf_counter() - began, side.processor_seconds() - before


async def _opened(address: Address, body: Mapping[str, Any]) -> asyncio.StreamWriter:
    """A connection whose answer is not read: what comes is kept by the system, or by the server."""
    _, writer = await asyncio.open_connection(*address)
    writer.write(request_bytes("/v1/completions", body))
    await writer.drain()
    return writer
