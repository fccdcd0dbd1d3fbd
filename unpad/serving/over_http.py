"""Lines of `unpad prove --serve` on HTTP: concurrent requests to a real server get what each request gets alone."""

import asyncio
import base64
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from typing import Any, cast

import numpy as np

from unpad.batching.batch import RaggedBatch
from unpad.data.images import ImageData
from unpad.data.rows import read_classes
from unpad.data.sources.images import read_bytes
from unpad.data.vqa import VqaData
from unpad.evaluation.family import HeldOutInputs, Numbers
from unpad.inference.chat import speaker_stops
from unpad.inference.engine import Collected, Request
from unpad.inference.loaded import LoadedRun
from unpad.proof import passes
from unpad.proof.line import Line, not_applicable
from unpad.proof.passes import line_of_numbers
from unpad.proof.serving import HTTP
from unpad.serving.limits import Limits, bound
from unpad.serving.protocol import SAMPLING, Fields
from unpad.serving.served import CHAT, CLASSIFY, COMPLETIONS, RunOpening, opened
from unpad.serving.server import Listening, Server, run
from unpad.serving.service import Service
from unpad.terminal.table import number_of

SECONDS = 600  # of a request
NAME = "run"  # of the model


class NotTakenError(Exception):
    """The server refused a request of the proof, as it does with inputs that it cannot use."""


class ServerFaultError(Exception):
    """The server failed to answer."""


def streams(
    loaded: LoadedRun,
    requests: Sequence[Request],
    truth: Sequence[Collected],
    name: str = HTTP,
    talks: Sequence[Sequence[Fields]] = (),
) -> Line:
    """Ask a server for all answers at once, each as a stream; compare texts, and log probabilities bit for bit.

    Args:
        truth: what each request gets alone.
        talks: messages of conversations that are asked in place of the prompts; a text of the user ends their answers.
    """
    chats = [{"messages": talk, "logprobs": True} | _settings(requests[place]) for place, talk in enumerate(talks)]
    asked = [(place, CHAT, chat) for place, chat in enumerate(chats)] or _bodies(loaded, requests)
    if not asked:
        return Line(name, "", None, None, None, "no held-out question is about one image, as those of a request are")
    results = _all_at_once(loaded, lambda port, one: _ask(port, *one[1:]), asked)
    differ, largest = 0, 0.0
    stops = speaker_stops(loaded.tokenizer, loaded.recipe.data.template) if talks else []
    for (place, _, _), answer in zip(asked, results, strict=True):
        if isinstance(answer, NotTakenError):
            continue
        text, logprobs = answer
        ids, scores = truth[place].tokens(), truth[place].scores[0]
        pairs = zip(ids, scores, strict=False)  # the last scores chose the end
        expected = [float(row.double().log_softmax(-1)[id]) for id, row in pairs]
        whole = loaded.tokenizer.decode(ids)
        cut = min((whole.partition(stop)[0] for stop in stops), key=len, default=whole)
        differ += text != cut or logprobs != expected[: None if cut == whole else len(logprobs)]
        apart = [abs(one - other) for one, other in zip(logprobs, expected, strict=False)]
        largest = max([largest, *apart])
    others = len(requests) - len(asked)
    note = f"{number_of(others, 'questions')} about several images or none: HTTP has no form for them" if others else ""
    note = f"{differ} of {len(asked)} answers differ" if differ else note
    measured = largest if largest or not differ else float("inf")
    gap = _refusals(results) or ("" if len(asked) > 1 else "fewer than two prompts")
    return Line(name, f"{len(asked)} streams", measured, 0.0, not differ, note).unless(gap)


def _all_at_once(loaded: LoadedRun, work: Callable[[int, Any], Any], given: Sequence[Any]) -> list[Any]:
    """Results of requests to a server, each in a thread of its own; the error of one that was refused.

    Args:
        work: asks the server at a port.
    """

    def asked(one: Any) -> Any:
        try:
            return work(port, one)
        except NotTakenError as error:
            return error

    with serving(loaded) as port, ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(asked, given))


def _refusals(results: Sequence[Any]) -> str:
    """Number of requests that were refused, and why the first was; "" for none."""
    refused = [str(one) for one in results if isinstance(one, NotTakenError)]
    return f"{len(refused)} of {len(results)} were refused: {refused[0]}" if refused else ""


def _bodies(loaded: LoadedRun, requests: Sequence[Request]) -> list[tuple[int, str, dict[str, Any]]]:
    """Place, route and body of every request that HTTP has a form for: one question has one image there."""
    data, made = None, []
    for place, request in enumerate(requests):
        if not isinstance(request.prompt, RaggedBatch):
            asked = {"prompt": [int(id) for id in request.prompt], "logprobs": 0}
            made.append((place, COMPLETIONS, asked | _settings(request)))
            continue
        data = cast(VqaData, loaded.data()) if data is None else data
        assert request.prompt.seq_ids is not None, "rows of the data"
        example = data.examples[int(request.prompt.seq_ids[0])]
        if len(example.images) == 1:
            content = read_bytes(data.album.images[example.images[0]])
            url = f"data:image/png;base64,{_base64(content)}"
            parts = [{"type": "text", "text": example.question}, {"type": "image_url", "image_url": {"url": url}}]
            asked = {"messages": [{"role": "user", "content": parts}], "logprobs": True}
            made.append((place, CHAT, asked | _settings(request)))
    return made


def _settings(request: Request) -> dict[str, Any]:
    settings = request.settings
    sampling = {name: getattr(settings, name) for name in (*SAMPLING, "top_k")}
    return {"max_tokens": settings.max_new_tokens, "stream": True, **sampling}


def numbers(loaded: LoadedRun, subject: HeldOutInputs, truth: Sequence[Numbers]) -> Line:
    """Ask a server for all inputs at once, each in a request of its own; compare every number bit for bit.

    Args:
        truth: the numbers of each input alone.
    """
    name = passes.HTTP
    if opened(loaded, NAME, 0).kind != "images":
        return not_applicable(name, "patients are compared in the process alone")
    examples = cast(ImageData, subject.data).examples
    given = [read_bytes(examples[row]) for row in subject.seq_ids]
    results = _all_at_once(loaded, partial(_classes, read_classes(loaded.files)), given)
    answered = [place for place, result in enumerate(results) if not isinstance(result, NotTakenError)]
    line = line_of_numbers(
        name, f"{len(results)} requests", [results[place] for place in answered], [truth[place] for place in answered]
    )
    return line.unless(_refusals(results) or passes.few(subject))


def _classes(classes: Sequence[str], port: int, content: bytes) -> Numbers:
    body = {"inputs": _base64(content), "parameters": {"top_k": len(classes)}}
    scores = {one["label"]: one["score"] for one in json.loads(_post(port, CLASSIFY, body))}
    return {"score": np.array([scores[name] for name in classes])}


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


@contextmanager
def serving(loaded: LoadedRun) -> Iterator[int]:
    """The port of a server of a run in a thread, until the context ends."""
    service = Service(Limits(timeout=SECONDS))
    server, opening = Server(service, Listening(page=False, logs=False)), RunOpening(loaded, NAME)
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


def _ask(port: int, route: str, body: Mapping[str, Any]) -> tuple[str, list[float]]:
    """Text and log probabilities of an answer that is streamed."""
    text, logprobs = "", list[float]()
    for line in _post(port, route, body).decode().split("\n\n"):
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line.removeprefix("data: ")).get("choices", []):
            reported = choice["logprobs"] or {}
            if route == CHAT:
                text += choice["delta"].get("content", "")
                logprobs += [one["logprob"] for one in reported.get("content", [])]
            else:
                text += choice["text"]
                logprobs += reported.get("token_logprobs", [])
    return text, logprobs


def _post(port: int, route: str, body: Mapping[str, Any]) -> bytes:
    """The content of an answer.

    Raises:
        NotTakenError: an error that is the request's.
        ServerFaultError: an error of the server.
    """
    connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("POST", route, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        kind = NotTakenError if answer.status < 500 else ServerFaultError
        raise kind(json.loads(content)["error"]["message"])
    return content
