"""`unpad serve`: listens, loads the run, answers, and ends what is open when it is told to; and the application, what
every request passes through before the routes."""

import asyncio
import json
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from unpad.errors import nearest
from unpad.machine import limit_of
from unpad.serving.limits import Limits, check_headers
from unpad.serving.metrics import REQUEST_ID, log_draining, log_fault, log_request
from unpad.serving.protocol import RequestError, unavailable
from unpad.serving.routes import ABOUT, routes
from unpad.serving.served import RunOpening
from unpad.serving.service import Service, failed
from unpad.terminal.printing import print_text
from unpad.terminal.progress import held

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
    front, origins = Front(inner, service, logs=logs), service.limits.origins
    return CORSMiddleware(front, origins, allow_methods=("GET", "POST"), allow_headers=["*"]) if origins else front


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
        seen = _Sent(send, f"req-{uuid.uuid4().hex}")
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
        try:
            check_headers(Headers(scope=scope), scope["path"], self._service.limits)
        except RequestError as error:
            await answer_of(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _note(self, scope: Scope, seen: "_Sent") -> None:
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

    def __init__(self, send: Send, id: str) -> None:
        self._send, self.id = send, id
        self.route, self.status, self.tokens, self.began = UNKNOWN, 0, "0+0 tokens", time.monotonic()
        self.broke = ""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers.update({"X-Request-Id": self.id, "X-Content-Type-Options": "nosniff"})
        await self._send(message)


SIGNALS = (signal.SIGINT, signal.SIGTERM)
MOST_CONNECTIONS, OTHER_FILES = 4096, 64  # and descriptors that the limit on open files leaves for all else
LATE = 5  # seconds after the end of draining in which connections have to be closed


@dataclass(frozen=True)
class Listening:
    """Settings of how a server listens and ends.

    Args:
        drain: seconds that open answers may go on after a signal.
        page: whether it shows the page; logs: whether every request has a line in the log.
    """

    drain: float = 30
    page: bool = True
    logs: bool = True


def serve(opening: RunOpening, limits: Limits, listening: Listening, place: socket.socket) -> None:
    """Serve a run at a socket until a signal ends it; raises UnpadError if the run cannot be loaded."""
    with held():
        service = Service(limits)
        asyncio.run(run(service, Server(service, listening), opening, place, show))


def show(lines: list[str]) -> None:
    """Print lines at once, also into a file."""
    print_text("".join(f"{line}\n" for line in lines))


async def run(
    service: Service, server: "Server", opening: RunOpening, place: socket.socket, tell: Callable[[list[str]], None]
) -> None:
    """Answer at a socket while the run is loaded, and then until the server is told to end.

    Args:
        tell: shows lines on the server when it is ready.

    Raises:
        UnpadError: the run cannot be loaded.
    """
    asyncio.get_running_loop().set_exception_handler(FaultsOnce())
    running = asyncio.create_task(server.serve(sockets=[place]))
    loading = asyncio.create_task(service.open(opening.load))
    try:
        await asyncio.wait((running, loading), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            tell([address_of(place), *opening.lines(service.served)])
            broken = asyncio.create_task(service.broken())
            await asyncio.wait((running, broken), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                broken.result()
            broken.cancel()
    finally:
        server.should_exit = True
        await asyncio.gather(running, return_exceptions=True)
        await service.close()
        loading.cancel()


def address_of(place: socket.socket) -> str:
    """URL of a listening socket."""
    host, port = place.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class FaultsOnce:
    """Logs what goes wrong on an event loop outside of requests, each kind once: some kinds come thousands of times."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception") or RuntimeError()
        kind = f"on the event loop, said once: {context['message'][:40]}"
        if kind not in self._said:
            self._said.add(kind)
            log_fault(kind, error)


def most_connections() -> int:
    """Connections for which the limit on open files leaves room."""
    soft = limit_of("NOFILE")
    return MOST_CONNECTIONS if soft is None else max(8, min(MOST_CONNECTIONS, soft - OTHER_FILES))


class Server(uvicorn.Server):
    """uvicorn's server with signals, and an end, of its own."""

    def __init__(self, service: Service, listening: Listening) -> None:
        config = uvicorn.Config(
            application(service, page=listening.page, logs=listening.logs),
            http=partial(Connection, service.limits.arrival, most_connections(), {}),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=int(listening.drain) + LATE,
            backlog=128,  # asyncio takes as many connections in a row, and complains for each if it cannot
        )
        super().__init__(config)
        self._service, self._drain, self._logs = service, listening.drain, listening.logs

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals inside, if this is the main thread's; none is raised again afterwards."""
        try:
            before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        except ValueError:  # another thread
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; a second signal ends the process at once."""
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second; end connections whose clients do not read."""
        for connection in list(self.server_state.connections) if counter % 10 == 0 else ():
            assert isinstance(connection, Connection), "the server makes no others"
            connection.end_unread(time.monotonic())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, and end open answers after the time for draining."""
        self._service.drain()
        if self._logs:
            log_draining(self._service.num_open, self._drain)
        ends: list[asyncio.Task[None]] = []
        late = asyncio.get_running_loop().call_later(
            self._drain, lambda: ends.append(asyncio.ensure_future(self._service.close()))
        )
        await super().shutdown(sockets)
        late.cancel()
        await asyncio.gather(*ends)


class Connection(H11Protocol):
    """A connection on which headers have to arrive in time, and answers have to be read; every error has the protocol's
    form.

    Args:
        arrival: seconds for headers, and for some bytes of an answer to be read.
        most: connections of the server; beyond, the one that waits longest for headers makes room.
        waiting: connections that wait for headers, shared by all, in their order.
    """

    def __init__(
        self, arrival: float, most: int, waiting: dict["Connection", None], *args: Any, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._arrival, self._most, self._waiting = arrival, most, waiting
        self._late: asyncio.TimerHandle | None = None
        self._unread = (0, 0.0)  # bytes of answers that the client did not take, and since when it is so many

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect()
        if len(self.connections) > self._most:
            next(iter(self._waiting)).make_room()

    def make_room(self) -> None:
        """End a connection that waits for headers."""
        what = f"more than {self._most} connections are open: ask again later"
        self._refuse("503 Service Unavailable", unavailable(what, code="too_many_connections"))

    def end_unread(self, now: float) -> None:
        """End a connection whose client has taken nothing of an answer for too long; for a clock."""
        num_bytes, since = self.transport.get_write_buffer_size(), self._unread[1]
        if not num_bytes or num_bytes != self._unread[0]:
            self._unread = (num_bytes, now)
        elif now - since > self._arrival:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._expect_nothing()

    def _expect(self) -> None:
        """Wait for the headers of a request while none is being answered."""
        if self.conn.their_state is not h11.IDLE:
            self._expect_nothing()
        elif self._late is None:
            self._waiting[self] = None
            self._late = self.loop.call_later(self._arrival, self._end)

    def _expect_nothing(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
            del self._waiting[self]

    def _end(self) -> None:
        if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
            what = f"the headers did not arrive in {self._arrival:g} seconds: send them again"
            self._refuse("408 Request Timeout", RequestError(what, status=408, code="timeout"))

    def send_400_response(self, msg: str) -> None:
        self._refuse("400 Bad Request", RequestError("the request is not HTTP/1.1 that can be read: send it again"))

    def _refuse(self, status: str, error: RequestError) -> None:
        body = json.dumps(error.to_json()).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self._expect_nothing()
        self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        self.transport.close()
