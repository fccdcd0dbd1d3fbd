"""The application: what every request passes through, and the routes behind it."""

from __future__ import annotations

import time
import uuid
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unpad.errors import nearest
from unpad.serving.limits import allowing, check_headers
from unpad.serving.metrics import REQUEST_ID, log_fault, log_request
from unpad.serving.protocol import RequestError
from unpad.serving.routes import ABOUT, routes
from unpad.serving.service import Service, failed

UNKNOWN = "other"  # route of a request that fits none, whose path may hold anything
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE")
LEFT = 499  # status in the log of a request whose client left before its answer began


def application(service: Service, *, page: bool = True, logs: bool = True) -> ASGIApp:
    """The application around a service.

    Args:
        page: whether it shows the page at `/`; logs: whether every request has a line in the log.
    """
    handlers: dict[Any, Any] = {
        RequestError: _failed,
        HTTPException: partial(_no_route, [*ABOUT, *(["/"] if page else [])], service),
        ClientDisconnect: _left,
        Exception: _failed,
    }
    inner = Starlette(routes=routes(service, page=page), exception_handlers=handlers)
    return Front(inner, service, logs=logs)


async def _failed(http: Request, error: Exception) -> Response:
    return answer_of(failed(error))


async def _left(http: Request, error: Exception) -> Response:
    return Response(status_code=LEFT)


def answer_of(error: RequestError) -> Response:
    return JSONResponse(error.to_json(), error.status, error.headers)


async def _no_route(others: list[str], service: Service, http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "GET")
        what = f"this route does not take {http.method}: use {allowed}"
        return answer_of(RequestError(what, status=405, code="method_not_allowed", headers={"Allow": allowed}))
    answering = [] if service.served is None else service.served.routes
    hint = nearest(http.url.path[:60], [*others, *answering])
    return answer_of(RequestError(f"there is no such route: {hint}", status=404, code="not_found"))


class Front:
    """The part that every request passes through: who may ask, an id, a line in the log, numbers, answers to faults."""

    def __init__(self, app: ASGIApp, service: Service, *, logs: bool) -> None:
        self._app, self._service, self._logs = app, service, logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server takes nothing else"
        cross = allowing(Headers(scope=scope).get("origin", ""), self._service.limits)
        seen = _Sent(send, f"req-{uuid.uuid4().hex}", cross)
        scope.setdefault("state", {})["seen"] = seen
        REQUEST_ID.set(seen.id)
        try:
            await self._answer(scope, receive, seen.send)
        except Exception as error:
            log_fault(f"in {seen.id}", error)
            if seen.status:
                seen.broke = "error:fault"
            else:
                await answer_of(failed(error))(scope, receive, seen.send)
        self._note(scope, seen)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            if scope["method"] == "OPTIONS" and "origin" in headers:  # asks whether it may ask, without a token
                check_headers(headers, "/", self._service.limits)
                await Response(status_code=204)(scope, receive, send)
                return
            check_headers(headers, scope["path"], self._service.limits)
        except RequestError as error:
            await answer_of(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _note(self, scope: Scope, seen: _Sent) -> None:
        status = str(seen.status or LEFT)
        self._service.metrics.requests.labels(seen.route, status).inc()
        if seen.broke:
            self._service.metrics.broken.labels(seen.route, seen.broke).inc()
            status = f"{status} {seen.broke}"
        if not self._logs:
            return
        method = scope["method"] if scope["method"] in METHODS else UNKNOWN
        log_request(seen.id, f"{method} {seen.route}", status, seen.tokens, time.monotonic() - seen.began)


class _Sent:
    """The part of one answer that was sent; `route`, `tokens` and `broke` are written by the route.

    Attributes:
        broke: why an answer that had begun is not whole, "error:CODE" or "client left"; "" for one that is.
    """

    def __init__(self, send: Send, id: str, headers: dict[str, str]) -> None:
        self._send, self.id, self._headers = send, id, headers
        self.route, self.status, self.tokens, self.began = UNKNOWN, 0, "0+0 tokens", time.monotonic()
        self.broke = ""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers.update({"X-Request-Id": self.id, "X-Content-Type-Options": "nosniff", **self._headers})
        await self._send(message)
