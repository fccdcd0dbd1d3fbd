"""The line of `unpad prove --serve` on HTTP: concurrent streams of a real server get what each request gets alone."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

from unpad.batching.batch import RaggedBatch
from unpad.inference.engine import Request
from unpad.inference.heard import Heard
from unpad.inference.loaded import LoadedRun
from unpad.proof.line import Line, not_applicable
from unpad.proof.serving import HTTP
from unpad.serving.limits import Limits
from unpad.serving.server import Listening, Server, bound, run
from unpad.serving.service import Service
from unpad.serving.start import RunOpening

SECONDS = 600  # of a request


def over_http(loaded: LoadedRun, requests: Sequence[Request], truth: Sequence[Heard]) -> Line:
    """Ask a server for all answers at once, each as a stream; compare texts, and log probabilities bit for bit.

    Args:
        truth: what each request gets alone.
    """
    if any(isinstance(request.prompt, RaggedBatch) for request in requests):
        return not_applicable(HTTP, "prompts with images are compared within the engine")
    with serving(loaded) as port, ThreadPoolExecutor(len(requests)) as pool:
        told = list(pool.map(lambda request: _ask(port, request), requests))
    differ, largest = 0, 0.0
    for (text, logprobs), heard in zip(told, truth, strict=True):
        ids, scores = heard.tokens(), heard.scores[0]
        pairs = zip(ids, scores, strict=False)  # the last scores chose the end
        expected = [float(row.double().log_softmax(-1)[id]) for id, row in pairs]
        differ += text != loaded.tokenizer.decode(ids) or logprobs != expected
        apart = [abs(one - other) for one, other in zip(logprobs, expected, strict=False)]
        largest = max([largest, *apart])
    note = f"{differ} of {len(requests)} answers differ" if differ else ""
    measured = largest if largest or not differ else float("inf")
    few = "" if len(requests) > 1 else "fewer than two prompts"
    return Line(HTTP, f"{len(requests)} streams", measured, 0.0, not differ, note).unless(few)


@contextmanager
def serving(loaded: LoadedRun) -> Iterator[int]:
    """The port of a server of a run in a thread, until the context ends."""
    service = Service(Limits(timeout=SECONDS))
    server, opening = Server(service, Listening(page=False, logs=False)), RunOpening(loaded)
    ready, faults = threading.Event(), list[BaseException]()

    def answer() -> None:
        try:
            asyncio.run(run(service, server, opening, place, lambda lines: ready.set()))
        except BaseException as error:
            faults.append(error)
        finally:
            ready.set()

    with bound("127.0.0.1", 0) as place:
        thread = threading.Thread(target=answer, name="unpad-server")
        thread.start()
        try:
            ready.wait()
            if faults:
                raise faults[0]
            yield place.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def _ask(port: int, request: Request) -> tuple[str, list[float]]:
    """Text and log probabilities of an answer that is streamed."""
    settings = request.settings
    names = ("temperature", "top_p", "top_k", "repetition_penalty", "seed")
    prompt = [int(id) for id in request.prompt]  # type: ignore[union-attr]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": settings.max_new_tokens, "logprobs": 0, "stream": True}
    body |= {name: getattr(settings, name) for name in names}
    connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        lines = connection.getresponse().read().decode().split("\n\n")
    finally:
        connection.close()
    text, logprobs = "", list[float]()
    for line in lines:
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: ")).get("choices", []):
                text += choice["text"]
                logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
    return text, logprobs
