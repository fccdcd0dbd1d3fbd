"""A server of the protocol for tests of the page: answers without a model, which a test can hold up or break."""

import json
import re
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

from unpad.serving.routes import content_security_policy, markdown, page

SETTINGS = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "max_tokens": 128, "seed": 7}
TEXTS = {"settings": SETTINGS, "context": 1024, "system": True}
FACTS: dict[str, dict[str, Any]] = {
    "chat": {"kind": "chat", **TEXTS},
    "text": {"kind": "text", **TEXTS, "system": False},
    "vqa": {"kind": "vqa", **TEXTS, "system": False, "kept_patches": True},
    "images": {"kind": "images", "classes": ["circle", "square", "star"]},
    "patients": {
        "kind": "patients",
        "routes": ["/v1/models/demo:predict", "/v1/models/demo:explain"],
        "columns": ["id", "time", "code", "value", "age", "sex"],
    },
}
MARKUP = "<script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\"><b>bold</b>"
MARKDOWN = "3. **bold**\n\n```py\nx = [1]\n```\n\n[link](https://example.org/)\n\n<b>[a](javascript:alert(1))"
PATCHES = {"grid": [3, 4], "blocks": [[[r, c] for r in range(3) for c in range(4)], [[1, 1], [1, 2], [2, 2]]]}


@dataclass
class Standin:
    """A run of one kind at an address, and what it was asked.

    Args:
        go_on: replies to "slow" and "reset" wait for it; left: the client went away meanwhile.
        token: that requests must bear, or "".
    """

    kind: str
    go_on: Event = field(default_factory=Event)
    left: Event = field(default_factory=Event)
    token: str = ""
    asked: list[tuple[str, Any]] = field(default_factory=list)
    port: int = 0
    _server: ThreadingHTTPServer | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        """Answer, at the port of before if there was one."""
        handler = type("Handler", (_Handler,), {"standin": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self.port = self._server.server_port
        Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Answer no more: connections are refused."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def bodies(self, path: str) -> list[Any]:
        """What was posted to a path, in order."""
        return [body for asked, body in self.asked if asked == path]


@contextmanager
def standing_in(kind: str, token: str = "") -> Iterator[Standin]:
    """A server for a run of one kind, as long as the context is open."""
    made = Standin(kind, token=token)
    made.start()
    try:
        yield made
    finally:
        made.go_on.set()
        made.stop()


class _Handler(BaseHTTPRequestHandler):
    """HTTP/1.0, so that no connection outlives its answer."""

    standin: Standin

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/":
            self._send(200, page().encode(), "text/html; charset=utf-8")
        elif self.path == "/health":
            self._json({"status": "ready"})
        elif not self._may():
            self._refuse(401, "this server asks for a token")
        elif self.path == "/v1/models":
            facts = {"id": "demo", "object": "model", "owned_by": "unpad", "unpad": FACTS[self.standin.kind]}
            self._json({"object": "list", "data": [facts]})
        else:
            self._refuse(404, "there is no such route")

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.loads(raw) if self.headers["Content-Type"] == "application/json" else raw
        self.standin.asked.append((self.path, body))
        with suppress(ConnectionError):
            if not self._may():
                self._refuse(401, "this server asks for a token")
            elif self.path == "/v1/chat/completions":
                self._reply(_text_of(body["messages"][-1]["content"]), body, "chat")
            elif self.path == "/v1/completions":
                self._reply(body["prompt"], body, "text")
            elif self.path == "/markdown":
                self._json(markdown(raw))
            elif not re.match("application/(json|octet-stream)|image/", self.headers["Content-Type"]):
                self._refuse(415, "the content type is not application/json")
            elif self.path == "/v1/classify?details=1":
                self._json(_classes(raw))
            elif self.path == "/v1/models/demo:predict":
                self._json({"predictions": [_prediction(one) for one in body["instances"]]})
            elif self.path == "/v1/models/demo:explain":
                self._json({"explanations": [_course(one) for one in body["instances"]]})

    def _may(self) -> bool:
        return self.headers.get("Authorization", "Bearer ") == f"Bearer {self.standin.token}"

    # ----------------------------------------------------------------------- answers

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", content_security_policy(page()))
        self.end_headers()
        self.wfile.write(content)

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _refuse(self, status: int, message: str, code: str | None = None) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        self._json({"error": error}, status)

    def _reply(self, asked: str, body: dict[str, Any], kind: str) -> None:
        """Stream the reply that a text asks for."""
        if asked == "refuse":
            what = "the message makes a prompt of 2,000 tokens, the model's context is 1,024"
            return self._refuse(400, what, "context_length_exceeded")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        pieces = _pieces(asked, body)
        for place, piece in enumerate(pieces):
            self._event({"choices": [_choice(kind, piece)]})
            if asked.endswith("slow") and place == 1 and not self._waited():
                return None
        if asked == "reset":
            self.standin.go_on.wait()
            return self._reset()
        if asked == "cut":
            return None
        if asked == "fail":
            return self._event({"error": {"message": "scores are not finite", "type": "server_error"}})
        reason = "length" if asked == "long" else "stop"
        notes = {"left_out_messages": 2 if asked == "long" else 0, "unknown_characters": 3 if asked == "????" else 0}
        notes |= {"warnings": [], **({"kept_patches": PATCHES} if body.get("kept_patches") else {})}
        self._event({"choices": [{**_choice(kind, ""), "finish_reason": reason}], "unpad": notes})
        self._event({"choices": [], "usage": {"completion_tokens": len(pieces)}})
        self.wfile.write(b"data: [DONE]\n\n")
        return None

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode())
        self.wfile.flush()

    def _waited(self) -> bool:
        """Wait for the test; False if the client goes away before."""
        while not self.standin.go_on.wait(0.02):
            if select.select([self.connection], [], [], 0)[0] and not self.connection.recv(1, socket.MSG_PEEK):
                self.standin.left.set()
                return False
        return True

    def _reset(self) -> None:
        """Break the connection off, as a process that dies does."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


def _text_of(content: Any) -> str:
    return content if isinstance(content, str) else next(part["text"] for part in content if part["type"] == "text")


def _pieces(asked: str, body: dict[str, Any]) -> list[str]:
    said = {
        "markup": MARKUP, "markdown": MARKDOWN, "slow": "one two three four",
        "中文": "中国最长的河流是长江。它全长约六千三百公里。",
        "empty": "", "essay": "\n".join(f"Line {n} of a long reply." for n in range(80)),
    }.get(asked.split("\n")[-1], f"You said: {asked}. Seed {body.get('seed')}.")  # fmt: skip
    return re.findall(r"\s*\S+|\s+$", said) if said.isascii() else list(said)


def _choice(kind: str, piece: str) -> dict[str, Any]:
    return {"index": 0, "finish_reason": None, **({"delta": {"content": piece}} if kind == "chat" else {"text": piece})}


def _classes(content: bytes) -> dict[str, Any]:
    if not content.startswith((b"\x89PNG", b"II")):
        return {"top": [], "notes": [], "mark": "", "fault": "E_FORMAT not an image; write it as PNG"}
    top = [("circle", 0.9021), ("square", 0.0862), ("star", 0.0117)]
    mark = "no image of training was so large" if len(content) > 4000 else ""
    return {"top": [{"label": name, "score": p} for name, p in top], "notes": [], "mark": mark, "fault": ""}


def _prediction(instance: dict[str, Any]) -> dict[str, Any]:
    num = len(instance["events"])
    unknown = sum(event.get("code") == "??" for event in instance["events"])
    found = {"probability": 1 - 0.8**num, "risk": num / 10, "events": num, "unknown_codes": unknown, "outside_range": 0}
    if _has_classes(instance):
        found = {"prediction": "rehab", "probability_home": 0.25, "probability_rehab": 0.75, "events": num}
    return {"id": instance["id"], **found, "mark": "unknown codes" if unknown else ""}


def _has_classes(instance: dict[str, Any]) -> bool:
    """Whether a patient gets the answers of a run of several classes."""
    return any(event.get("code") == "ward" for event in instance["events"])


def _course(instance: dict[str, Any]) -> dict[str, Any]:
    days = [event.get("time") for event in instance["events"]]
    num = len(days)
    p = [0.05 + 0.6 * (i / num) ** 2 + 0.05 * (i % 3) for i in range(num)]
    attention = [1 / num + 0.02 * (i % 3) for i in range(num)]
    classes = {"probability_home": [1 - one for one in p], "probability_rehab": p}
    found = classes if _has_classes(instance) else {"probability": p}
    return {"id": instance["id"], "days": days, **found, "attention": attention}
