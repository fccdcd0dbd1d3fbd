"""A real server of a run in a thread, and clients of it."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pyarrow.parquet as pq
import pytest

from tests.helpers.families import PatientsRun
from unpad.inference.embed import embed_file
from unpad.inference.loaded import load
from unpad.proof.serving import OverHttp, prove_serving
from unpad.serving.limits import Limits
from unpad.serving.over_http import numbers, streams
from unpad.serving.served import RunOpening
from unpad.serving.server import Listening, Server, address_of, bound, run
from unpad.serving.service import Service

PATIENCE = 60  # seconds until a condition that must come


@dataclass
class Running:
    """A server that answers, and what a test may ask it."""

    url: str
    service: Service
    server: Server
    opening: RunOpening
    thread: threading.Thread
    client: httpx.Client

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """An answer to JSON."""
        return self.client.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def chat(self, text: str = "小猫", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def texts(self, **fields: Any) -> list[str]:
        """The text of every answer to a chat."""
        return [choice["message"]["content"] for choice in self.chat(**fields).json()["choices"]]

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """What a stream sends, without its end."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]" or "error" in lines[-1]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def metric(self, name: str) -> float:
        """A number of /metrics."""
        lines = self.get("/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(name))

    def connect(self, sent: bytes) -> socket.socket:
        """A connection on which something was sent."""
        made = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        made.sendall(sent)
        return made

    def request(self, path: str, body: dict[str, Any]) -> bytes:
        """A whole request as bytes."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content

    @contextmanager
    def held(self) -> Iterator[None]:
        """The thread of the model waits inside, so that what is asked for waits too."""
        go_on, waits = threading.Event(), threading.Event()

        def wait() -> None:
            waits.set()
            go_on.wait(PATIENCE)

        self.service._worker._inbox.put(wait)
        assert waits.wait(PATIENCE)
        try:
            yield
        finally:
            go_on.set()

    def end(self) -> None:
        self.server.should_exit = True
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


def instances(folder: Path, number: int = 9) -> list[dict[str, Any]]:
    """The first patients of tables of a folder, as a client sends them."""
    tests, people = (pq.read_table(folder / f"{name}.parquet").to_pylist() for name in ("tests", "people"))
    rows = {person["id"]: [{"age": person["age"]}] for person in people[:number]}
    for row in tests:
        if row["id"] in rows:
            rows[row["id"]].append({name: row[name] for name in ("days", "test", "value")})
    return [{"id": id, "events": events} for id, events in rows.items()]


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def wait_for(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, "what must come did not"
        time.sleep(0.01)


def heard(capture: pytest.CaptureFixture[str], said: str) -> str:
    """What a server logged until a line that it writes after an answer."""
    log = ""

    def has_come() -> bool:
        nonlocal log
        log += capture.readouterr().err
        return said in log

    wait_for(has_come)
    return log


@contextmanager
def running(folder: Path, limits: Limits | None = None, *, drain: float = 30, **opening: Any) -> Iterator[Running]:
    """A server of a run, until the context ends."""
    service = Service(limits or Limits())
    with bound("127.0.0.1", 0) as place:
        opened = RunOpening(str(folder), **opening)
        server = Server(service, Listening(drain=drain))
        thread = threading.Thread(
            target=lambda: asyncio.run(run(service, server, opened, place, lambda lines: None)), daemon=True
        )
        url = address_of(place)
        client = httpx.Client(base_url=url, timeout=PATIENCE, verify=False)  # reading certificates takes a while
        made = Running(url, service, server, opened, thread, client)
        thread.start()
        wait_for(lambda: service.state == "ready" or not thread.is_alive())
        assert thread.is_alive(), "the run cannot be served"
        try:
            yield made
        finally:
            client.close()
            made.end()


class Served(NamedTuple):
    """Answers about patients, facts of the run, and the rows that `unpad embed` writes for the same tables."""

    predictions: list[dict[str, Any]]
    explanations: list[dict[str, Any]]
    facts: dict[str, Any]
    rows: list[dict[str, Any]]


def served(made: PatientsRun, asked: list[dict[str, Any]], folder: Path) -> Served:
    """Ask a server about patients of the run's tables; the certificate of serving holds."""
    loaded = load(made.run)
    certificate = prove_serving(loaded, over_http=OverHttp(streams, numbers))
    assert [line for line in certificate.lines if line.passed is not True and line.applies] == []
    embed_file(loaded, made.tables, "patient", folder / "new.parquet")
    with running(made.run, name="events") as server:
        told = server.post("/v1/models/events:predict", {"instances": asked}).json()["predictions"]
        courses = server.post("/v1/models/events:explain", {"instances": asked}).json()["explanations"]
        facts = server.get("/v1/models/events").json()["unpad"]
    return Served(told, courses, facts, pq.read_table(folder / "new.parquet").to_pylist())
