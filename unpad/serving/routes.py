"""The routes: a body becomes an ask, the ask a place in the queue, and what comes back an answer of the protocol."""

import asyncio
import re
import time
import uuid
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from unpad.batching.batch import RaggedBatch
from unpad.data.patients import EventData
from unpad.data.pixels.formats import ImageError
from unpad.inference.engine import Request as EngineRequest
from unpad.inference.patients import batches, computed, explained, parts_of_course
from unpad.serving import protocol
from unpad.serving.limits import check_type, read_body
from unpad.serving.patients import Passes, check_sets, explanations, predictions
from unpad.serving.pictures import classes_of, decoded, detailed, kept_patches, read_or_fault
from unpad.serving.served import CHAT, CLASSIFY, COMPLETIONS, EXPLAIN, PREDICT, ModelPrompt, Notes, Served
from unpad.serving.service import Service, too_late

ABOUT = ["/health", "/metrics", "/v1/models"]  # routes of every server
# Sets of a patient: a prediction takes time by their square, an explanation by their cube.
MOST_SETS, MOST_EXPLAINED = 2048, 256
MARKDOWN = "/markdown"  # of the page
MOST_MARKDOWN = 16_000  # characters; the slowest texts of this size take half a second
PLACES_TOGETHER = 2048  # sets and readouts of one request in a pass
IMAGES_TOGETHER = 8  # of one request in a pass
# What a page may do besides running its own scripts and styles: ask its server, and show pictures that it has itself.
POLICY = "default-src 'none'; img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'"
# Nor can it be framed, or make markup of texts.
POLICY += "; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

Answering = Callable[[Service, Served, Request, bytes], Awaitable[Response]]


def routes(service: Service, *, page: bool) -> list[Route]:
    """All routes of a server; `page`: whether `/` is one."""
    every = [
        Route("/health", partial(_health, service)),
        Route("/metrics", partial(_metrics, service)),
        Route("/v1/models", partial(_models, service)),
        Route("/v1/models/{id}", partial(_model, service)),
        *(Route(path, partial(_asked, service, path, answer), methods=["POST"]) for path, answer in ANSWERS.items()),
        *(Route(path, partial(_not_here, service), methods=["POST"]) for path in ("/v1/embeddings", "/v1/responses")),
    ]
    if page:
        every += [Route("/", _page), Route(MARKDOWN, partial(_markdown, service), methods=["POST"])]
    return [_noting(route) for route in every]


def _noting(route: Route) -> Route:
    """The route, which tells its path to the log; the path that was asked for may hold anything."""
    inner = route.app

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["seen"].route = route.path
        await inner(scope, receive, send)

    route.app = app
    return route


# --------------------------------------------------------------------------- what the server says of itself


async def _health(service: Service, http: Request) -> Response:
    return JSONResponse({"status": service.state}, 200 if service.state == "ready" else 503)


async def _metrics(service: Service, http: Request) -> Response:
    return Response(await service.numbers(), media_type=service.metrics.content_type)


async def _models(service: Service, http: Request) -> Response:
    return JSONResponse({"object": "list", "data": [service.ready().to_json()]})


async def _model(service: Service, http: Request) -> Response:
    served = service.ready()
    served.check_model(http.path_params["id"])
    return JSONResponse(served.to_json())


async def _not_here(service: Service, http: Request) -> Response:
    served = service.ready()
    what = f"this server does not do {http.url.path}: use {' or '.join(served.routes)}"
    if served.kind in ("chat", "text"):
        what += f"; or {protocol.OTHER_ENGINE}"
    raise protocol.RequestError(what, code="not_supported")


# --------------------------------------------------------------------------- what bounds every question


async def _asked(service: Service, route: str, answer: Answering, http: Request) -> Response:
    """Read and answer a request: as one of the most that are taken, in its time, and while its client listens."""
    served = service.ready()
    served.check_route(route)
    if "id" in http.path_params:
        served.check_model(http.path_params["id"])
    check_type(http, takes_files=route == CLASSIFY)
    return await _bounded(service, http, service.max_body, partial(answer, service, served, http))


async def _bounded(
    service: Service, http: Request, most: int, answer: Callable[[bytes], Awaitable[Response]]
) -> Response:
    """Read a body of at most so many bytes, and answer."""
    try:
        with service.place() as count:
            async with asyncio.timeout_at(_began(http) + service.limits.timeout):  # a loop's clock is time.monotonic
                content = await read_body(http, service.limits, most, count)
                return await while_listening(http.receive, answer(content))
    except TimeoutError:
        raise too_late(service.limits) from None


def _began(http: Request) -> float:
    """When a request arrived."""
    began: float = http.scope["state"]["seen"].began
    return began


# --------------------------------------------------------------------------- texts


async def _chat(service: Service, served: Served, http: Request, content: bytes) -> Response:
    def read() -> tuple[protocol.ChatAsk, ModelPrompt]:
        ask = protocol.ChatAsk.read(protocol.parse_body(content))
        served.check_model(ask.model)
        return ask, served.chat(ask)

    def patches(prompts: Sequence[ModelPrompt]) -> list[dict[str, Any]]:
        return [kept_patches(served.run, one.batch, one.grid) for one in prompts]

    ask, prompt = await service.prepare(read)
    kept = await service.once("patches", [prompt], patches) if ask.kept_patches else []
    return Answers(service, http, [prompt], ask, **({"kept_patches": kept[0]} if kept else {}))


async def _completion(service: Service, served: Served, http: Request, content: bytes) -> Response:
    def read() -> tuple[protocol.CompletionAsk, EngineRequest]:
        ask = protocol.CompletionAsk.read(protocol.parse_body(content))
        served.check_model(ask.model)
        return ask, served.request_of(ask)

    ask, request = await service.prepare(read)
    made = partial(served.completion, ask, request)
    # One by one, so that many leave room for those of other requests.
    prompts = [await service.prepare(partial(made, place)) for place in range(len(ask.prompt))]
    return Answers(service, http, prompts, ask)


class Answers(Response):
    """Answers of the engine, streamed or whole; the rows are freed as soon as the client leaves.

    Args:
        more: what the field `unpad` has besides notes.
    """

    def __init__(
        self, service: Service, http: Request, prompts: Sequence[ModelPrompt], ask: protocol.TokensAsk, **more: Any
    ) -> None:
        served, kind = service.ready(), "chat" if isinstance(ask, protocol.ChatAsk) else "text"
        name = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = protocol.Head(name, int(time.time()), served.name, service.fingerprint, kind)
        self._ask = ask
        notes, drawn = sum((prompt.notes for prompt in prompts), Notes()).to_json(), prompts[0].request.settings
        self._notes = {**notes, "seed": drawn.seed if drawn.temperature > 0 else None, **more}
        # Who waits for a guess of what another asked learns nothing from its time, nor from `cached_tokens`.
        owner = http.headers.get("authorization", "").partition(" ")[2].strip() if service.limits.tokens else ""
        self._answering = service.ask(prompts, ask, _began(http), owner)
        self._is_told = False  # whether the last event of a stream was handed over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tell = self._stream(scope, receive, send) if self._ask.stream else self._whole(scope, receive, send)
        seen = scope["state"]["seen"]
        try:
            await while_listening(receive, tell)
        except ClientDisconnect:  # nobody hears the answer
            if seen.status and not self._is_told:
                seen.broke = "client left"
        finally:
            self._answering.cancel()
            seen.tokens = f"{self._answering.num_read}+{self._answering.num_made} tokens"

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers = [list[protocol.TextPiece]() for _ in range(self._answering.num_answers)]
        async for piece in self._answering.pieces():
            answers[piece.index].append(piece)
        said = protocol.whole(self._head, answers, self._usage(), self._notes, with_tokens=self._ask.top is not None)
        await JSONResponse(said)(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events; the head waits for the first, so that an error before it has a status of its own."""
        pieces = self._answering.pieces()
        first = await anext(pieces)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"),
                   (b"x-accel-buffering", b"no")]  # fmt: skip
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        begun, left = set[int](), self._answering.num_answers - bool(first.finished)
        try:
            await _send(send, self._event(first, begun, left))
            async for piece in pieces:
                left -= bool(piece.finished)
                await _send(send, self._event(piece, begun, left))
            self._is_told = True
            counts = protocol.closing(self._head, self._usage()) if self._ask.stream_options.include_usage else b""
            await _send(send, counts + protocol.DONE)
        except protocol.RequestError as error:
            self._is_told = True
            scope["state"]["seen"].broke = f"error:{error.code or error.kind}"
            await _send(send, protocol.failure(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _event(self, piece: protocol.TextPiece, begun: set[int], left: int) -> bytes:
        """The event of a piece, after the opening of its answer; the last one has the notes."""
        head = b""
        if self._head.kind == "chat" and piece.index not in begun:
            head = protocol.opening(self._head, piece.index)
            begun.add(piece.index)
        notes = None if left else self._notes
        return head + protocol.chunk(self._head, piece, with_tokens=self._ask.top is not None, notes=notes)

    def _usage(self) -> Mapping[str, Any]:
        return protocol.usage(self._answering.num_read, self._answering.num_cached, self._answering.num_made)


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def while_listening(receive: Receive, work: Awaitable[Any]) -> Any:
    """Result of some work, which ends at once if the client leaves.

    Raises:
        ClientDisconnect: it left.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# --------------------------------------------------------------------------- images and patients


async def _classify(service: Service, served: Served, http: Request, content: bytes) -> Response:
    details = http.query_params.get("details") == "1"

    def read() -> tuple[bool, int, list[bytes]]:
        if not check_type(http, takes_files=True):
            return False, protocol.TOP_CLASSES, [content]
        body = protocol.parse_body(content)
        ask = protocol.ClassifyAsk.read(body)
        return type(body["inputs"]) is list, ask.parameters.top_k, [decoded(image, "inputs") for image in ask.inputs]

    is_list, top, files = await service.prepare(read)
    images = [await service.prepare(partial(read_or_fault, served.run, file)) for file in files]  # as prompts
    for index, image in enumerate(images):
        if isinstance(image, ImageError) and not details:
            with protocol.refusals(f"inputs[{index}]" if is_list else "inputs"):
                raise image
    usable = [image for image in images if not isinstance(image, ImageError)]
    answers = iter(await service.once("images", usable, partial(classes_of, served.run), IMAGES_TOGETHER))
    rows = [detailed(image if isinstance(image, ImageError) else next(answers), top) for image in images]
    said = rows if details else [row["top"] for row in rows]
    return JSONResponse(said if is_list else said[0])


async def _predict(service: Service, served: Served, http: Request, content: bytes) -> Response:
    ask, data = await _patients(service, served, content, MOST_SETS)
    numbers = await _numbers(service, served, "predict", data)
    if "vector" in ask.outputs:
        vectors = await _numbers(service, served, "vector", data)
        numbers = [(places, {**one, **more}) for (places, one), (_, more) in zip(numbers, vectors, strict=True)]
    return JSONResponse({"predictions": predictions(served.run, data, ask.instances, numbers)})


async def _explain(service: Service, served: Served, http: Request, content: bytes) -> Response:
    ask, data = await _patients(service, served, content, MOST_EXPLAINED)
    made = await _batches(service, served, data, 1)
    parts = [(int(place), batch, part) for (place,), batch in made for part in parts_of_course(batch)]
    work = partial(explained, served.run)
    numbers = await service.once("explain", [part[1:] for part in parts], work, number=len(made))
    found = [(place, one) for (place, *_), one in zip(parts, numbers, strict=True)]
    return JSONResponse({"explanations": explanations(served.run, data, ask.instances, found)})


async def _patients(
    service: Service, served: Served, content: bytes, most_sets: int
) -> tuple[protocol.PatientsAsk, EventData]:
    def read() -> tuple[protocol.PatientsAsk, EventData]:
        ask = protocol.PatientsAsk.read(protocol.parse_body(content))
        served.tables.check(ask.instances)
        with protocol.refusals("instances"):
            data = served.tables.read(ask.instances)
        check_sets(data, most_sets)
        return ask, data

    return await service.prepare(read)


async def _numbers(service: Service, served: Served, kind: str, data: EventData) -> Passes:
    """Places of patients, and numbers of theirs from passes that other requests join."""
    made = await _batches(service, served, data, PLACES_TOGETHER)
    numbers = await service.once(kind, [batch for _, batch in made], partial(computed, served.run, kind))
    return [(places, numbers_of) for (places, _), numbers_of in zip(made, numbers, strict=True)]


async def _batches(
    service: Service, served: Served, data: EventData, places: int
) -> list[tuple[np.ndarray, RaggedBatch]]:
    """Batches of patients with about so many sets and readouts together, or of one, as a pass over all takes long."""
    cuts = np.flatnonzero(np.diff((np.diff(data.sets.sets_of) + 1).cumsum() // places)) + 1
    parts = np.split(np.arange(len(data.table)), cuts)
    return [one for part in parts for one in await service.prepare(partial(batches, served.run, data, part))]


ANSWERS = {CHAT: _chat, COMPLETIONS: _completion, CLASSIFY: _classify, PREDICT: _predict, EXPLAIN: _explain}


# --------------------------------------------------------------------------- the page


def page() -> str:
    """Text of the page."""
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def content_security_policy(html: str) -> str:
    """Policy under which a browser runs the scripts and styles that stand in a page, as they are, and no others."""
    inline = {tag: re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL) for tag in ("script", "style")}
    own = [f"{tag}-src {' '.join(map(_source, texts))}" for tag, texts in inline.items()]
    return "; ".join([*own, POLICY])


def _source(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


async def _page(http: Request) -> Response:
    text = page()
    headers = {
        "Content-Security-Policy": content_security_policy(text), "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }  # fmt: skip
    return HTMLResponse(text, headers=headers)


async def _markdown(service: Service, http: Request) -> Response:
    async def answer(content: bytes) -> Response:
        return JSONResponse(await service.prepare(partial(markdown, content)))

    check_type(http, takes_files=False)
    return await _bounded(service, http, 6 * MOST_MARKDOWN, answer)  # six bytes, as JSON may escape a character


def markdown(content: bytes) -> list[Any]:
    """The field `text` of a body, in Markdown, as elements: the page shows them without making markup of texts."""
    text = protocol.parse_body(content).get("text")
    if not isinstance(text, str) or len(text) > MOST_MARKDOWN:
        raise protocol.RequestError(f"text is not a string of at most {MOST_MARKDOWN:,} characters", param="text")
    return _elements(SyntaxTreeNode(MarkdownIt("js-default").disable("image").parse(text)))


def _elements(node: SyntaxTreeNode) -> list[Any]:
    """What a node of Markdown holds: texts, and elements as `{"tag": ..., "attributes": {...}, "children": [...]}`."""
    held = list[Any]()
    for child in node.children:
        if child.type == "inline" or (child.type == "paragraph" and child.hidden):
            held += _elements(child)
        elif not child.tag:
            held.append(child.content)
        else:
            tag = "pre" if child.type in ("fence", "code_block") else child.tag
            attributes = {name: value for name, value in child.attrs.items() if name in ("href", "start")}
            inner = _elements(child) if child.children else [child.content]
            held.append({"tag": tag, "attributes": attributes, "children": inner})
    return held
