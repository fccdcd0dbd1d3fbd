"""The line of `unpad prove --serve` about HTTP: answers to concurrent streams equal those of each request alone."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from unpad.errors import ProofError
from unpad.inference.engine import Request
from unpad.inference.loaded import LoadedRun
from unpad.proof.line import Line
from unpad.proof.serving import HTTP, Heard, token_ids
from unpad.serving.limits import Limits
from unpad.serving.replies import FINISHED
from unpad.serving.server import Listening, Server, bound, run
from unpad.serving.service import Service
from unpad.serving.start import RunOpening

PATIENCE_S = 120.0
CLIENTS = 8


@dataclass
class _Streamed:
    """An answer as a client puts it together."""

    text: str = ""
    logprobs: tuple[float, ...] = ()
    finished: str | None = None


def over_http(model: LoadedRun, overrides: Sequence[str], requests: Sequence[Request], truth: Sequence[Heard]) -> Line:
    """Ask for all requests through a server of the run, some at a time, as streams.

    Texts, reasons and the log probability of every token are compared, digit by digit.
    """
    expected = [_expected(model, heard) for heard in truth]
    with _server(str(model.folder), overrides) as (port, name), ThreadPoolExecutor(CLIENTS) as clients:
        found = list(clients.map(lambda request: _ask(port, name, request), requests))
    differ = sum(one != other for one, other in zip(found, expected, strict=True))
    note = f"{differ} of {len(found)} answers differ" if differ else ""
    return Line(HTTP, "", float(differ), 0.0, not differ, note)


def _expected(model: LoadedRun, heard: Heard) -> _Streamed:
    tokens, scores = heard.tokens[0], heard.scores[0]
    logprobs = tuple(
        float(row.double().log_softmax(-1)[token]) for token, row in zip(tokens, scores, strict=False)
    )  # the scores of an end have no token
    return _Streamed(model.tokenizer.decode(tokens), logprobs, FINISHED[heard.reasons[0]])


def _ask(port: int, name: str, request: Request) -> _Streamed:
    settings = request.settings
    asked = {
        "model": name, "prompt": list(token_ids(request)), "max_tokens": settings.max_new_tokens,
        "temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k, "seed": settings.seed,
        "repetition_penalty": settings.repetition_penalty, "logprobs": 0, "stream": True,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise ProofError(f"the server answered {answer.status}: {answer.read(300).decode(errors='replace')}")
        return _put_together(json.loads(line[6:]) for line in answer if line.startswith(b"data: {"))
    finally:
        connection.close()


def _put_together(events: Iterator[dict[str, Any]]) -> _Streamed:
    made = _Streamed()
    for event in events:
        if "error" in event:
            raise ProofError(f"the stream ended with an error: {event['error']['message']}")
        for choice in event["choices"]:
            made.text += choice["text"]
            made.logprobs += tuple((choice["logprobs"] or {}).get("token_logprobs", ()))
            made.finished = choice["finish_reason"] or made.finished
    return made


@contextmanager
def _server(folder: str, overrides: Sequence[str]) -> Iterator[tuple[int, str]]:
    """A server of the run in a thread: its port, and the name of the model."""
    service, opening = Service(Limits()), RunOpening(folder, overrides=tuple(overrides), proves=False)
    failed: list[BaseException] = []

    def serve() -> None:
        try:
            asyncio.run(run(service, server, opening, place))
        except BaseException as error:
            failed.append(error)

    with bound("127.0.0.1", 0) as place:
        server, until = Server(service, Listening(page=False, log=False)), time.monotonic() + PATIENCE_S
        thread = threading.Thread(target=serve, name="unpad-server")
        thread.start()
        try:
            while service.state != "ready":
                if failed or time.monotonic() > until:
                    raise ProofError(f"the server did not start: {failed}", fix="see `unpad serve`")
                time.sleep(0.01)
            assert service.served is not None, "it is ready"
            yield place.getsockname()[1], service.served.name
        finally:
            server.should_exit = True
            thread.join()
