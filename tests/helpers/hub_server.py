"""A hub on this machine, which answers what huggingface_hub asks: what a repository holds, and its files or parts."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubServer:
    """A server and what it does.

    Args:
        repositories: contents of files by name, by repository.
        gated: repositories that ask for access; breaks: files whose first answer ends after so many bytes.
        asked: method, path and range of every request.
    """

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    breaks: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    address: str = ""

    def got(self) -> list[str]:
        """Names of the files whose contents were asked for."""
        return [path.rpartition("/")[2] for method, path, _ in self.asked if method == "GET" and "/resolve/" in path]


class _Handler(BaseHTTPRequestHandler):
    """Answers of one self.hub."""

    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.hub.asked.append((self.command, self.path, self.headers.get("Range", "")))
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/([^/?]+)(\?.*)?", self.path):
            name, revision = found[1], found[2]
            if self._may(name, revision):
                files = [{"rfilename": file} for file in self.hub.repositories[name]]
                self._send(json.dumps({"id": name, "sha": COMMIT, "siblings": files}).encode())
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path):
            if self._may(found[1], found[2]):
                self._send_file(found[3], self.hub.repositories[found[1]])
        else:
            self._refuse(404, "EntryNotFound")

    def _may(self, name: str, revision: str) -> bool:
        if name in self.hub.gated:
            self._refuse(403, "GatedRepo")
        elif name not in self.hub.repositories:
            self._refuse(404, "RepoNotFound")
        elif revision not in ("main", "v1", COMMIT):
            self._refuse(404, "RevisionNotFound")
        else:
            return True
        return False

    def _refuse(self, code: int, kind: str) -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", kind)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_file(self, file: str, files: dict[str, bytes]) -> None:
        if file not in files:
            self._refuse(404, "EntryNotFound")
            return
        data, start = files[file], 0
        if asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(asked[1])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            end = self.hub.breaks.pop(file, len(data))
            self.wfile.write(data[start:end])
            self.close_connection = end < len(data)

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """Serve until the end of the block, on a free port of the loopback device."""
    hub = HubServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
