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
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from unpad.data.patients import EventData
from unpad.data.pixels.formats import ImageError
from unpad.inference.images import ReadImage
from unpad.inference.patients import batches, computed
from unpad.serving import protocol
from unpad.serving.limits import check_type, read_body
from unpad.serving.patients import explanations, predictions
from unpad.serving.pictures import classes_of, decoded, detailed, kept_patches, read_images
from unpad.serving.served import CHAT, CLASSIFY, COMPLETIONS, EXPLAIN, PREDICT, ModelPrompt, Notes, Served
from unpad.serving.service import Service

ABOUT = ["/health", "/metrics", "/v1/models"]  # routes of every server


def routes(service: Service, *, page: bool) -> list[Route]:
    """All routes of a server; `page`: whether `/` is one."""
    every = [
        Route("/health", partial(_health, service)),
        Route("/metrics", partial(_metrics, service)),
        Route("/v1/models", partial(_models, service)),
        Route("/v1/models/{id}", partial(_model, service)),
        Route(CHAT, partial(_chat, service), methods=["POST"]),
        Route(COMPLETIONS, partial(_completion, service), methods=["POST"]),
        Route(CLASSIFY, partial(_classify, service), methods=["POST"]),
        Route(PREDICT, partial(_predict, service), methods=["POST"]),
        Route(EXPLAIN, partial(_explain, service), methods=["POST"]),
        *(Route(path, partial(_not_here, service), methods=["POST"]) for path in ("/v1/embeddings", "/v1/responses")),
    ]
    if page:
        every.append(Route("/", _page))
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
    what = f"this server does not do {http.url.path}: use {' or '.join(service.ready().routes)}"
    raise protocol.RequestError(what, code="not_supported")


# --------------------------------------------------------------------------- texts


Read = TypeVar("Read")


async def _asked(service: Service, http: Request, route: str, read: Callable[[Served, dict[str, Any]], Read]) -> Read:
    """What a body asks for, read beside the event loop after the checks that routes share."""
    served = service.ready()
    served.check_route(route)
    check_type(http)
    content = await read_body(http, service.limits, service.max_body)
    return await service.prepare(lambda: read(served, protocol.parse_body(content)))


async def _chat(service: Service, http: Request) -> Response:
    def read(served: Served, body: dict[str, Any]) -> tuple[protocol.ChatAsk, ModelPrompt]:
        ask = protocol.ChatAsk.read(body)
        served.check_model(ask.model)
        return ask, served.chat(ask)

    def patches(prompts: Sequence[ModelPrompt]) -> list[dict[str, Any]]:
        return [kept_patches(service.ready().run, one.batch, one.grid) for one in prompts]

    ask, prompt = await _asked(service, http, CHAT, read)
    more = {}
    if ask.kept_patches:
        (kept,) = await while_listening(http.receive, service.once("patches", [prompt], patches))
        more = {"kept_patches": kept}
    return Answers(service, "chat", [prompt], ask, more)


async def _completion(service: Service, http: Request) -> Response:
    def read(served: Served, body: dict[str, Any]) -> tuple[protocol.CompletionAsk, list[ModelPrompt]]:
        ask = protocol.CompletionAsk.read(body)
        served.check_model(ask.model)
        return ask, served.completion(ask)

    ask, prompts = await _asked(service, http, COMPLETIONS, read)
    return Answers(service, "text", prompts, ask)


class Answers(Response):
    """Answers of the engine, streamed or whole; the rows are freed as soon as the client leaves.

    Args:
        more: what the field `unpad` has besides notes.
    """

    def __init__(
        self,
        service: Service,
        kind: str,
        prompts: Sequence[ModelPrompt],
        ask: protocol.TokensAsk,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        served = service.ready()
        name = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = protocol.Head(name, int(time.time()), served.name, service.fingerprint, kind)
        self._ask = ask
        notes, drawn = sum((prompt.notes for prompt in prompts), Notes()).to_json(), prompts[0].request.settings
        self._notes = {**notes, "seed": drawn.seed if drawn.temperature > 0 else None, **more}
        self._answering = service.ask(prompts, ask)
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
        choices = [protocol.WholeAnswer(index) for index in range(self._answering.num_answers)]
        async for piece in self._answering.pieces():
            choices[piece.index].add(piece)
        said = protocol.whole(self._head, choices, self._usage(), self._notes, with_tokens=self._ask.top is not None)
        await JSONResponse(said)(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events; the head waits for the first, so that an error before it has a status of its own."""
        pieces = self._answering.pieces()
        first = await anext(pieces)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"),
                   (b"x-accel-buffering", b"no")]  # fmt: skip
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        begun: set[int] = set()
        left = self._answering.num_answers
        parts = [self._event(first, begun, left := left - bool(first.finished))]
        try:
            await _send(send, b"".join(parts))
            async for piece in pieces:
                left -= bool(piece.finished)
                await _send(send, self._event(piece, begun, left))
            self._is_told = True
            await _send(
                send,
                (protocol.closing(self._head, self._usage()) if self._ask.stream_options.include_usage else b"")
                + protocol.DONE,
            )
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


async def _classify(service: Service, http: Request) -> Response:
    served = service.ready()
    served.check_route(CLASSIFY)
    is_json = check_type(http, takes_files=True)
    details = http.query_params.get("details") == "1"
    content = await read_body(http, service.limits, service.max_body)

    def read() -> tuple[bool, int, list[ReadImage | ImageError]]:
        if not is_json:
            return False, protocol.TOP_CLASSES, read_images(served.run, [content])
        body = protocol.parse_body(content)
        ask = protocol.ClassifyAsk.read(body)
        images = read_images(served.run, [decoded(image, "inputs") for image in ask.inputs])
        return type(body["inputs"]) is list, ask.parameters.top_k, images

    is_list, top, images = await service.prepare(read)
    for index, image in enumerate(images):
        if isinstance(image, ImageError) and not details:
            with protocol.refusals(f"inputs[{index}]" if is_list else "inputs"):
                raise image
    usable = [image for image in images if not isinstance(image, ImageError)]
    work = service.once("images", usable, partial(classes_of, served.run))
    answers = iter(await while_listening(http.receive, work))
    rows = [detailed(image if isinstance(image, ImageError) else next(answers), top) for image in images]
    said = rows if details else [row["top"] for row in rows]
    return JSONResponse(said if is_list else said[0])


async def _predict(service: Service, http: Request) -> Response:
    ask, data = await _patients(service, http, PREDICT)
    numbers = await _numbers(service, http, "predict", data)
    if "vector" in ask.outputs:
        vectors = await _numbers(service, http, "vector", data)
        numbers = [(places, {**one, **more}) for (places, one), (_, more) in zip(numbers, vectors, strict=True)]
    return JSONResponse({"predictions": predictions(service.ready().run, data, ask.instances, numbers)})


async def _explain(service: Service, http: Request) -> Response:
    ask, data = await _patients(service, http, EXPLAIN)
    numbers = await _numbers(service, http, "explain", data)
    return JSONResponse({"explanations": explanations(service.ready().run, data, ask.instances, numbers)})


async def _patients(service: Service, http: Request, route: str) -> tuple[protocol.PatientsAsk, EventData]:
    def read(served: Served, body: dict[str, Any]) -> tuple[protocol.PatientsAsk, EventData]:
        ask = protocol.PatientsAsk.read(body)
        served.tables.check(ask.instances)
        with protocol.refusals("instances"):
            return ask, served.tables.read(ask.instances)

    served = service.ready()
    served.check_route(route)
    served.check_model(http.path_params["id"])
    return await _asked(service, http, route, read)


async def _numbers(
    service: Service, http: Request, kind: str, data: EventData
) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Places of patients, and numbers of theirs from passes that other requests join."""
    run = service.ready().run
    made = await service.prepare(partial(batches, run, data, np.arange(len(data.table))))
    work = service.once(kind, [batch for _, batch in made], partial(computed, run, kind))
    numbers = await while_listening(http.receive, work)
    return [(places, numbers_of) for (places, _), numbers_of in zip(made, numbers, strict=True)]


# --------------------------------------------------------------------------- the page


def page() -> str:
    """Text of the page."""
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def content_security_policy(html: str) -> str:
    """Policy under which a browser runs the scripts and styles that stand in a page, as they are, and no others.

    The page asks its own server alone, shows pictures that it has itself, and cannot make markup of texts.
    """
    inline = {tag: re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL) for tag in ("script", "style")}
    return "; ".join(
        [
            "default-src 'none'",
            *(f"{tag}-src {' '.join(map(_source, texts))}" for tag, texts in inline.items()),
            "img-src data: blob:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )


def _source(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


async def _page(http: Request) -> Response:
    text = page()
    headers = {
        "Content-Security-Policy": content_security_policy(text), "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }  # fmt: skip
    return HTMLResponse(text, headers=headers)
