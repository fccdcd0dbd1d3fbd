"""What is refused, and by which status: strangers, sizes, times, load; and clients and servers that leave."""

import asyncio
import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import httpx
import pytest

from tests.helpers.families import Finished
from tests.helpers.serving import Running, heard, received, running, wait_for
from unpad.errors import NonFiniteError, OutOfMemoryError, RecipeError, SourceError
from unpad.inference import engine
from unpad.inference.engine import Collected, Engine, Request
from unpad.serving import service
from unpad.serving.limits import Limits, check_headers, check_origins, check_reach, read_tokens
from unpad.serving.metrics import Metrics
from unpad.serving.protocol import ChatAsk, RequestError
from unpad.serving.served import Served
from unpad.serving.server import FaultsOnce

TOKEN = "secret-1"
SAMPLED = {"temperature": 1, "max_tokens": 50}
ASK = {"messages": [{"role": "user", "content": "小猫"}], **SAMPLED}
CHAT = "/v1/chat/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def strict(finished: Finished) -> Iterator[Running]:
    """A server with small limits, a token and an allowed origin."""
    limits = Limits(
        rows=2, waiting=1, arrival=0.4, max_body=2000, tokens=("other", TOKEN), hosts=("model.lan",),
        origins=("https://a.org",),
    )  # fmt: skip
    with running(finished("conversations").run, limits, name="demo", rows=2) as made:
        yield made


def refusal(headers: dict[str, str], path: str, limits: Limits) -> tuple[int, str] | None:
    """Status and way out of what the headers of a request are refused with; None where they are not."""
    try:
        check_headers(headers, path, limits)
    except RequestError as error:
        return error.status, re.findall(r"--allow-\w+", str(error))[0]
    return None


def error(answer: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    """The error of an answer, which has the protocol's form."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == code
    assert answer.headers["x-request-id"].startswith("req-")
    found: dict[str, Any] = body["error"]
    return found


# --------------------------------------------------------------------------- who may ask


@pytest.mark.promise("serving.strangers")
@pytest.mark.parametrize(
    ("host", "served", "is_own"),
    [
        ("127.0.0.1:8000", "127.0.0.1", True), ("localhost:9000", "127.0.0.1", True),
        ("localhost.:1", "127.0.0.1", True), ("[::1]:1", "127.0.0.1", True),
        ("LOCALHOST", "127.0.0.1", True), ("evil.org", "127.0.0.1", False), ("", "127.0.0.1", False),
        ("127.0.0.1.evil.org", "127.0.0.1", False), ("model.lan:80", "127.0.0.1", True),
        ("192.168.1.5:8000", "0.0.0.0", True), ("evil.org:8000", "0.0.0.0", False), ("[fe80::1]:80", "::", True),
        ("192.168.1.5", "192.168.1.5", True), ("192.168.1.6", "192.168.1.5", False), ("[fd00::2]", "fd00::2", True),
    ],
)  # fmt: skip
def test_a_name_that_was_rebound_to_this_address_is_refused(host, served, is_own):
    found = refusal({"host": host}, "/v1/models", Limits(host=served, hosts=("model.lan",)))
    assert found == (None if is_own else (403, "--allow-host"))


@pytest.mark.promise("serving.strangers")
@pytest.mark.parametrize(
    ("origin", "is_own"),
    [("http://127.0.0.1:80", True), ("https://127.0.0.1:80", True), ("https://a.org", True), ("null", False),
     ("https://evil.org", False), ("http://127.0.0.1:81", False), ("", False), ("file://127.0.0.1:80", False)],
)  # fmt: skip
def test_a_page_of_another_origin_is_refused(origin, is_own):
    found = refusal({"host": "127.0.0.1:80", "origin": origin}, "/", Limits(origins=("https://a.org",)))
    assert found == (None if is_own else (403, "--allow-origin"))


def test_a_page_that_may_ask_is_told_so(strict):
    asked = {"Origin": "https://a.org"}
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    before = httpx.options(strict.url + CHAT, headers={**asked, **wanted})
    assert (before.status_code, before.headers["access-control-allow-origin"]) == (200, "https://a.org")
    assert "authorization" in before.headers["access-control-allow-headers"]
    refused = httpx.options(strict.url + CHAT, headers={"Origin": "https://b.org", **wanted})
    assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (400, False)
    answer = strict.get("/v1/models", headers={**asked, **BEARER})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://a.org")
    error(strict.get("/v1/models", headers={"Origin": "https://b.org", **BEARER}), 403, "origin_not_allowed")
    assert "access-control-allow-origin" not in strict.get("/health").headers


@pytest.mark.promise("serving.strangers")
@pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {TOKEN}", "Bearer", TOKEN, f"Bearer {TOKEN}x"])
def test_without_a_valid_token_nothing_but_the_page_and_the_health_is_told(strict, header):
    headers = {} if header is None else {"Authorization": header}
    for answer in (strict.post(CHAT, ASK, headers=headers), strict.get("/metrics", headers=headers)):
        error(answer, 401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert strict.get("/health", headers=headers).json() == {"status": "ready"}
    assert strict.get("/", headers=headers).status_code == 200


def test_a_file_of_tokens_has_one_a_line_of_which_each_is_valid(strict, tmp_path):
    for token in ("other", TOKEN):
        assert strict.get("/v1/models", headers={"Authorization": f"bearer {token}"}).status_code == 200
    path = tmp_path / "tokens"
    path.write_text("one\n\n two \n", encoding="utf-8")
    assert read_tokens(path) == ("one", "two")
    for content in ("", "\n", "a b\n", "密\n"):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(SourceError, match="no token"):
            read_tokens(path)
    with pytest.raises(SourceError):
        read_tokens(tmp_path / "absent")


def test_kept_beginnings_belong_to_a_token_so_that_no_user_learns_what_another_asked(strict, chats, monkeypatch):
    owners, inner = [], Engine.submit
    monkeypatch.setattr(
        Engine, "submit", lambda one, asked, *to: (owners.append(asked.owner), inner(one, asked, *to))[1]
    )
    for server, token in ((strict, TOKEN), (strict, "other"), (chats, "any")):
        body, headers = {**ASK, "max_tokens": 1}, {"Authorization": f"bearer  {token}"}
        assert server.post(CHAT, body, headers=headers).status_code == 200
    assert owners == [TOKEN, "other", ""]


def test_a_network_is_served_with_a_token_or_on_purpose():
    for host in ("0.0.0.0", "::", "192.168.1.5", "my.host"):
        with pytest.raises(RecipeError, match="reached from other machines") as caught:
            check_reach(host, (), no_token=False)
        assert "--token-file" in caught.value.fix
        assert "--no-token" in caught.value.fix
        check_reach(host, ("x",), no_token=False)
        check_reach(host, (), no_token=True)
    for host in ("127.0.0.1", "::1", "localhost", "127.0.0.9"):
        check_reach(host, (), no_token=False)


@pytest.mark.parametrize(
    ("origin", "written"),
    [
        ("a.org", "https://a.org"), ("https://a.org/", "https://a.org"), ("http://a.org:8080/page", "http://a.org:8080"),
        ("https://A.org", "https://a.org"), (" https://a.org", "https://a.org"), ("https://a.org:443", "https://a.org"),
        ("https://a b.org", "https://a.org"), ("*", "https://a.org"), ("null", "https://a.org"), ("", "https://a.org"),
    ],
)  # fmt: skip
def test_an_origin_that_no_browser_sends_is_refused_at_the_start(unpad, origin, written):
    told = unpad("serve", "demo", "--allow-origin", "https://b.org", "--allow-origin", origin)
    assert (told.code, told.err.splitlines()[1]) == (2, "  at: --allow-origin")
    assert told.err.endswith(f"such as {written}\n")


def test_origins_that_browsers_send_are_taken():
    check_origins(["https://a.org", "http://127.0.0.1:5173", "http://[::1]:8080", "app://x.y"])


# --------------------------------------------------------------------------- routes and bodies


def test_unknown_routes_and_methods_name_what_there_is(chats):
    assert "/v1/models" in error(chats.get("/v1/model"), 404, "not_found")["message"]
    assert chats.get("/v1/chat/completions").headers["allow"] == "POST"
    error(chats.get("/v1/chat/completions"), 405, "method_not_allowed")
    error(chats.get("/v1/models/other"), 404, "model_not_found")
    for path in ("/v1/responses", "/v1/embeddings"):
        told = error(chats.post(path, {}), 400, "not_supported")["message"]
        assert told.startswith(f"this server does not do {path}: use /v1/chat/completions")
        assert "--engine llama.cpp" in told
    assert "/v1/chat/completions" in error(chats.post("/v1/classify", {}), 404, "wrong_route")["message"]
    for path in ("/v1/classifi", "/v1/model/demo:predict", "/x"):  # near routes that this run refuses
        told = error(chats.post(path, {}), 404, "not_found")["message"]
        assert "classify" not in told
        assert ":predict" not in told


def test_the_pages_markdown_becomes_elements_and_no_markup(chats):
    text = "- a *b*\n- `c`\n\n<i>![d](e)\nf [g](javascript:h)"
    items = [["a ", {"tag": "em", "attributes": {}, "children": ["b"]}]]
    items += [[{"tag": "code", "attributes": {}, "children": ["c"]}]]
    made = [{"tag": "li", "attributes": {}, "children": children} for children in items]
    link = {"tag": "a", "attributes": {"href": "e"}, "children": ["d"]}
    line = {"tag": "br", "attributes": {}, "children": [""]}
    expected = [{"tag": "ul", "attributes": {}, "children": made}]
    expected += [{"tag": "p", "attributes": {}, "children": ["<i>!", link, line, "f [g](javascript:h)"]}]
    assert chats.client.post("/markdown", json={"text": text}).json() == expected
    error(chats.client.post("/markdown", json={"text": "a" * 16_001}), 400, None)
    error(chats.client.post("/markdown", content=json.dumps({"text": text})), 415, "unsupported_media_type")


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "image/png"]
)
def test_what_a_page_of_another_site_can_send_unasked_is_no_request(chats, kind):
    content = json.dumps(ASK).encode()
    answer = chats.client.post(CHAT, content=content, headers={"Content-Type": kind})
    error(answer, 415, "unsupported_media_type")
    error(chats.client.post(CHAT, content=content), 415, "unsupported_media_type")
    charset = {"Content-Type": "application/json; charset=utf-8"}
    assert chats.client.post(CHAT, content=content, headers=charset, timeout=60).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (CHAT, {**ASK, "temprature": 1}, "temprature", "did you mean temperature?"),
        (CHAT, {"messages": []}, "messages", "no message of the user"),
        ("/v1/completions", {"prompt": [10**6]}, "prompt", "the model knows 0 to"),
        ("/v1/completions", {"prompt": [[1], [10**6]]}, "prompt[1]", "the model knows 0 to"),
        ("/v1/completions", {"prompt": "小" * 99}, "prompt", "the model's context is 64"),
        ("/v1/completions", {}, "prompt", "no prompt"),
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content", "no images"),
    ],
)  # fmt: skip
def test_a_body_that_cannot_be_answered_names_the_field(chats, path, body, param, said):
    answer = chats.post(path, body)
    found = error(answer, 400, answer.json()["error"]["code"])
    assert (found["param"], said in found["message"]) == (param, True), found


def test_a_large_body_is_refused_before_it_is_read(strict):
    error(strict.post(CHAT, {**ASK, "user": "x" * 3000}, headers=BEARER), 413, "request_too_large")
    chunked = httpx.post(
        strict.url + CHAT, content=iter([b"x" * 1500] * 2), headers={**BEARER, "Content-Type": "application/json"}
    )
    error(chunked, 413, "request_too_large")
    assert chunked.headers["connection"] == "close"
    long = strict.post(CHAT, {"messages": [{"role": "user", "content": "x" * 1900}]}, headers=BEARER)
    assert "cannot fit into the context" in error(long, 400, "context_length_exceeded")["message"]


def test_a_body_with_two_lengths_is_refused_and_ends_its_connection(chats):
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 2\r\n"
    with chats.connect(f"{head}Transfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n".encode()) as connection:
        said = received(connection)
    assert said.startswith(b"HTTP/1.1 400")
    assert b"send one of them" in said


@pytest.mark.parametrize(
    "sent",
    [
        b"", b"POST /v1/models HT", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow:",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer secret-1\r\nContent-Length: 99\r\n\r\n{",
    ],
)  # fmt: skip
def test_headers_or_a_body_that_do_not_arrive_end_the_connection(strict, sent):
    with strict.connect(sent) as connection:
        told = received(connection)  # returns when the server has closed it
    assert told.startswith(b"HTTP/1.1 408 ")
    assert json.loads(told.partition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"


def test_a_connection_is_kept_between_requests(strict):
    with httpx.Client(base_url=strict.url) as client:
        for _ in range(2):
            assert client.get("/health").status_code == 200


def test_what_is_not_http_gets_an_error_of_the_protocol(strict):
    with strict.connect(b"\x16\x03\x01 hello\r\n\r\n") as connection:
        told = received(connection)
    assert told.startswith(b"HTTP/1.1 400 ")
    assert "error" in json.loads(told.partition(b"\r\n\r\n")[2])


# --------------------------------------------------------------------------- load


@contextmanager
def prepared(server: Running, number: int) -> Iterator[threading.Event]:
    """So many of the two threads that prepare requests wait inside, until the event is set."""
    go_on, begun = threading.Event(), threading.Semaphore(0)
    for _ in range(number):
        server.service._preparing.submit(lambda: (begun.release(), go_on.wait(60)))
    for _ in range(number):
        begun.acquire()
    try:
        yield go_on
    finally:
        go_on.set()


def test_a_long_preparation_holds_up_no_other_request_and_one_whose_client_left_is_not_begun(chats, monkeypatch):
    asked, gone = [], chats.service.metrics.requests.labels(CHAT, "499")._value
    inner, left = ChatAsk.read, gone.get()
    monkeypatch.setattr(ChatAsk, "read", lambda body: (asked.append(body["seed"]), inner(body))[1])
    with prepared(chats, 1):
        assert chats.post(CHAT, {**ASK, "seed": 1}).status_code == 200
    with prepared(chats, 2):
        chats.connect(chats.request(CHAT, {**ASK, "seed": 2})).close()
        wait_for(lambda: gone.get() == left + 1)
    assert chats.post(CHAT, {**ASK, "seed": 3}).status_code == 200
    assert asked == [1, 3]


def test_prompts_of_one_request_are_prepared_in_turn_with_other_requests(chats, monkeypatch):
    made, inner = [], Served.completion
    monkeypatch.setattr(
        Served, "completion", lambda run, ask, *more: (made.append(len(ask.prompt)), inner(run, ask, *more))[1]
    )
    with prepared(chats, 1), ThreadPoolExecutor() as pool:
        with prepared(chats, 1):
            many = pool.submit(chats.post, "/v1/completions", {"prompt": ["小", "猫"] * 20, "max_tokens": 1})
            wait_for(chats.service._preparing._work_queue.qsize)
            one = pool.submit(chats.post, "/v1/completions", {"prompt": "小", "max_tokens": 1})
            wait_for(lambda: chats.service._preparing._work_queue.qsize() == 2)
        assert (one.result().status_code, many.result().status_code) == (200, 200)
    assert made.index(1) < 3, "not after the forty of the other"


def test_a_request_of_many_prompts_leaves_half_of_the_rows_to_others(chats):
    worker, half = chats.service._worker, chats.service.limits.rows // 2
    with ThreadPoolExecutor() as pool:
        with chats.held():
            many = pool.submit(chats.post, "/v1/completions", {"prompt": ["小"] * 2 * half, "max_tokens": 3})
            wait_for(lambda: worker._inbox.qsize() == half)
            left = chats.connect(chats.request("/v1/completions", {"prompt": ["猫"] * 2 * half, "max_tokens": 3}))
            wait_for(lambda: worker._inbox.qsize() == 2 * half)
            left.close()
            wait_for(lambda: worker._inbox.qsize() >= 3 * half)  # told of its end
        assert len(many.result().json()["choices"]) == 2 * half
    wait_for(lambda: chats.service.num_open == 0)


def test_a_request_of_many_prompts_has_few_tokens_before_those_of_others(chats, monkeypatch):
    monkeypatch.setattr(service, "READ_AHEAD", 8)
    with ThreadPoolExecutor() as pool:
        with chats.held():
            many = pool.submit(chats.post, "/v1/completions", {"prompt": [[5] * 4] * 10, "max_tokens": 1})
            wait_for(lambda: chats.service.num_open == 10)
            assert chats.get("/health").status_code == 200  # the loop has done what it was at
            assert chats.service._worker._inbox.qsize() == 2
        assert len(many.result().json()["choices"]) == 10


def test_requests_that_are_read_count_among_those_that_wait(strict):
    with prepared(strict, 2) as go_on, ThreadPoolExecutor() as pool:
        asked = [pool.submit(strict.post, CHAT, {**ASK, "max_tokens": 1}, headers=BEARER) for _ in range(3)]
        wait_for(lambda: strict.service.num_read == 3)
        error(strict.post(CHAT, ASK, headers=BEARER), 429, "too_many_requests")
        go_on.set()
        assert {one.result().status_code for one in asked} == {200}
    assert strict.service.num_read == 0


def test_bodies_have_a_bound_together_and_short_ones_find_room_beside_it(chats, monkeypatch):
    monkeypatch.setattr(service, "MOST_BODIES", service.FREE_BODY)
    long = chats.request(CHAT, {**ASK, "user": "x" * 150_000})
    with chats.connect(long[:120_000]):
        wait_for(lambda: chats.service._num_bytes > 50_000)
        # Refused by its last bytes: a body that is not read to its end may end the connection before the answer.
        error(chats.post(CHAT, {**ASK, "user": "x" * 80_000}), 503, "too_many_bytes")
        assert chats.post(CHAT, {**ASK, "user": "x" * 1000, "max_tokens": 1}).status_code == 200
    wait_for(lambda: chats.service._num_bytes == 0)


def test_connections_have_a_bound_and_the_one_that_waits_longest_makes_room(finished, monkeypatch):
    monkeypatch.setattr("unpad.serving.server.most_connections", lambda: 4)
    with running(finished("conversations").run) as made, ExitStack() as stack:
        made.client.close()
        idle = [stack.enter_context(made.connect(b"GET /hea")) for _ in range(4)]
        wait_for(lambda: len(made.server.server_state.connections) == 4)
        with made.connect(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") as asking:
            assert received(asking).startswith(b"HTTP/1.1 200 ")
        assert b"too_many_connections" in received(idle[0])
        idle[1].sendall(b"lth HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert received(idle[1]).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_does_not_read_is_left(strict):
    (listening,) = strict.server.servers[0].sockets
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of the connections that it accepts
    before = len(strict.server.server_state.connections)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", strict.port))
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_for(lambda: len(strict.server.server_state.connections) == before + 1)
        wait_for(lambda: len(strict.server.server_state.connections) == before)


def test_what_goes_wrong_outside_of_requests_is_logged_once(capfd):
    async def fail() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(FaultsOnce())
        for number in range(9):
            loop.call_exception_handler({"message": "socket.accept() out of", "exception": OSError(number)})

    asyncio.run(fail())
    assert capfd.readouterr().err.count("socket.accept() out of: OSError") == 1


@pytest.mark.promise("serving.load")
def test_more_than_may_wait_are_told_when_to_come_back(strict):
    error(strict.post(CHAT, {**ASK, "n": 4}, headers=BEARER), 400)
    with strict.held(), strict.connect(b"") as waiting:
        head, _, content = strict.request(CHAT, {**ASK, "n": 3, "max_tokens": 2}).partition(b"\r\n\r\n")
        waiting.sendall(head + b"\r\nAuthorization: Bearer secret-1\r\nConnection: close\r\n\r\n" + content)
        wait_for(lambda: strict.service.num_open == 3)
        answer = strict.post(CHAT, ASK, headers=BEARER)
        error(answer, 429, "too_many_requests")
        assert 1 <= int(answer.headers["retry-after"]) <= 60
    with waiting:
        pass
    wait_for(lambda: strict.service.num_open == 0)
    assert strict.post(CHAT, {**ASK, "max_tokens": 1}, headers=BEARER).status_code == 200


def test_an_answer_that_takes_too_long_is_a_timeout_before_its_first_token(chats, monkeypatch):
    monkeypatch.setattr(chats.service, "limits", Limits(timeout=0.05))
    for stream in (False, True):
        with chats.held():  # the engine says nothing
            error(chats.post(CHAT, {**ASK, "stream": stream}), 408, "timeout")
        wait_for(lambda: chats.service.num_open == 0)
        with prepared(chats, 2):
            error(chats.post(CHAT, {**ASK, "stream": stream}), 408, "timeout")


def test_a_stream_that_takes_too_long_ends_with_an_error_event(chats, monkeypatch, capfd):
    steps, step = [], Engine._step

    def slow(engine: Engine) -> None:
        step(engine)
        steps.append(1)
        if len(steps) == 2:
            threading.Event().wait(0.5)

    monkeypatch.setattr(Engine, "_step", slow)
    monkeypatch.setattr(chats.service, "limits", Limits(timeout=0.4))
    broken = f'unpad_broken_answers_total{{reason="error:timeout",route="{CHAT}"}}'
    capfd.readouterr()
    events = chats.events(CHAT, {**ASK, "seed": 3})
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1]["error"]["code"] == "timeout"
    heard(capfd, f"POST {CHAT} 200 error:timeout ")
    assert chats.metric(broken) == 1


# --------------------------------------------------------------------------- faults


@pytest.mark.promise("serving.load")
@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [(NonFiniteError("the model's scores are not finite", fix="use fp32"), 500, "scores_not_finite"),
     (OutOfMemoryError("no room", fix="ask for fewer tokens"), 503, "out_of_memory")],
)  # fmt: skip
def test_what_one_request_suffers_is_told_to_it_alone(chats, monkeypatch, fault, status, code):
    alone, report = chats.texts(**SAMPLED, seed=1), Engine._report

    def fails(engine: Engine, answer: Any, token: int, logits: Any) -> None:
        if answer.ticket.request.settings.seed == 13:
            engine._end(answer.ticket, answer.index, "failed", fault)
        else:
            report(engine, answer, token, logits)

    monkeypatch.setattr(Engine, "_report", fails)
    with ThreadPoolExecutor() as pool:
        other = pool.submit(chats.texts, **SAMPLED, seed=1)
        answer = chats.post(CHAT, {**ASK, "seed": 13})
    error(answer, status, code)
    assert ("retry-after" in answer.headers) == (status == 503)
    assert other.result() == alone


@pytest.mark.parametrize("where", ["_draw", "_report"])
def test_a_fault_that_one_request_made_ends_that_one_alone_and_is_logged_under_its_id(chats, monkeypatch, capfd, where):
    body = {**SAMPLED, "seed": 1}
    alone, holder = chats.texts(**body), Engine if where == "_report" else engine
    real = getattr(holder, where)

    def breaks(*args: Any) -> Any:
        answers = [args[1]] if where == "_report" else args[0]
        return 1 / 0 if any(one.ticket.request.settings.top_k == 7 for one in answers) else real(*args)

    with monkeypatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setattr(holder, where, breaks)
        with chats.held():
            others = [pool.submit(chats.texts, **body) for _ in range(3)]
            broken = pool.submit(chats.post, CHAT, {**ASK, "top_k": 7, "n": 2})
            wait_for(lambda: chats.service.num_open == 5)
        answer = broken.result()
        assert [other.result() for other in others] == [alone] * 3
    error(answer, 500)
    place = f"fault in the thread of the model {answer.headers['x-request-id']}: "
    assert place in heard(capfd, f"{place}ZeroDivisionError")


def test_a_fault_of_the_program_is_500_with_an_id_that_the_log_has_and_the_next_request_is_answered(
    chats, monkeypatch, capfd
):
    before, broken = chats.texts(max_tokens=3, seed=1), chats.service._worker.engine

    def breaks(engine: Engine) -> None:
        raise ValueError("the patient's name")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_step", breaks)
        answer = chats.post(CHAT, ASK)
    assert "ValueError" not in error(answer, 500)["message"]
    log = heard(capfd, answer.headers["x-request-id"])
    assert "ValueError" in log
    assert "breaks" in log
    assert "the patient's name" not in log
    assert answer.headers["x-request-id"] in log
    assert chats.texts(max_tokens=3, seed=1) == before
    assert chats.service._worker.engine is not broken, "what the broken one had read is not trusted"


def test_a_fault_in_a_route_is_500(chats, monkeypatch):
    monkeypatch.setattr("unpad.serving.protocol.parse_body", lambda body: 1 / 0)
    assert "log" in error(chats.post(CHAT, ASK), 500)["message"]


# --------------------------------------------------------------------------- who leaves


@pytest.mark.promise("serving.load")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_rows_also_while_it_waits(chats, stream):
    made, gone = chats.metric("unpad_tokens_made_total"), chats.service.metrics.requests.labels(CHAT, "499")._value
    left = gone.get()
    body = {**ASK, "n": 8, "max_tokens": 60, "stream": stream, "seed": 2}
    with chats.held():
        for _ in range(4):
            chats.connect(chats.request(CHAT, body)).close()
        wait_for(lambda: gone.get() == left + 4)  # asked, and cancelled
    wait_for(lambda: chats.service.num_open == 0)
    assert chats.metric("unpad_rows_live ") == 0
    assert chats.metric("unpad_tokens_made_total") == made, "nothing was decoded for them"


def test_a_client_that_leaves_a_stream_frees_its_rows_and_is_told_from_one_that_hears_the_end(
    chats, monkeypatch, capfd
):
    made, worker = chats.metric("unpad_tokens_made_total"), chats.service._worker
    step, go_on, steps = Engine._step, threading.Event(), count()

    def held(engine: Engine) -> None:
        step(engine)
        if next(steps):  # the first token begins the answer
            go_on.wait(60)

    capfd.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_step", held)
        asked = chats.request(CHAT, {**ASK, "n": 16, "max_tokens": 60, "stream": True, "seed": 4})
        with chats.connect(asked) as connection:
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
            wait_for(lambda: len(worker.engine._live) == 16)
        wait_for(lambda: worker._inbox.qsize() or not worker.engine._live)  # the server noticed, and asked for its rows
        go_on.set()
        heard(capfd, f"POST {CHAT} 200 client left ")
    wait_for(lambda: chats.service.num_open == 0)
    assert chats.metric("unpad_rows_live ") == 0
    assert chats.metric("unpad_tokens_made_total") - made < 16 * 30
    assert chats.metric(f'unpad_broken_answers_total{{reason="client left",route="{CHAT}"}}') == 1
    chats.events(CHAT, {**ASK, "max_tokens": 2})
    assert f"POST {CHAT} 200 " in (log := heard(capfd, f"POST {CHAT} 200 "))
    assert "left" not in log


@pytest.mark.promise("serving.load")
def test_a_server_that_drains_ends_open_answers_and_takes_none(finished, capfd):
    capfd.readouterr()
    with running(finished("conversations").run, drain=0.3, name="demo") as made:
        asked = made.request(CHAT, ASK)
        with made.held():  # before they ask, so that the thread of the model takes none
            one, other = made.connect(asked), made.connect(asked)
            wait_for(lambda: made.service._worker._inbox.qsize() == 2)
            made.server.should_exit = True
            wait_for(lambda: made.service.state == "draining")
            heard(capfd, "draining: 2 answers open, for at most 0.3 s; another signal ends it now\n")
            wait_for(lambda: made.service._worker._inbox.qsize() == 3)  # and its end when the time is over
        with one, other:
            told = [received(one), received(other)]
        made.thread.join(60)
    assert not made.thread.is_alive()
    for answer in told:
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "draining"


# --------------------------------------------------------------------------- what is told of it


@pytest.mark.promise("serving.private")
def test_every_request_has_a_line_in_the_log_without_its_text(chats, capfd):
    answer = chats.chat("密语", max_tokens=3)
    chats.get("/secret/path")
    log = heard(capfd, " GET other 404 ")
    mine = next(line for line in log.splitlines() if answer.headers["x-request-id"] in line)
    usage = answer.json()["usage"]
    assert f"POST {CHAT} 200 {usage['prompt_tokens']}+{usage['completion_tokens']} tokens" in mine
    assert "密语" not in log
    assert "secret" not in log


def test_metrics_count_requests_tokens_and_rows(chats):
    name = f'unpad_requests_total{{route="{CHAT}",status="200"}}'
    made = chats.metric("unpad_tokens_made_total")
    chats.chat(max_tokens=2)
    wait_for(lambda: name in chats.get("/metrics").text)
    before = chats.metric(name)
    answer = chats.chat(max_tokens=2).json()
    wait_for(lambda: chats.metric(name) == before + 1)  # counted once it was sent
    assert chats.metric("unpad_tokens_made_total") - made == 2 * answer["usage"]["completion_tokens"]
    assert chats.metric("unpad_first_token_seconds_count") > 1
    assert chats.metric("unpad_token_seconds_count") > 1
    assert chats.metric("unpad_rows_live ") == 0
    engine = chats.service._worker._make()
    assert 0 < engine._memory < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "a bound by default"
    engine.submit(Request(list(range(4, 36)), chats.service.served.settings, [], n=3), Collected())
    found = [Metrics.of(engine)]
    engine.turn()
    found.append(Metrics.of(engine))
    assert [(one["waiting"], one["live"], one["kept_bytes"]) for one in found] == [(1, 0, 0), (0, 3, 0)]


def test_the_page_is_served_with_a_policy_unless_it_is_not_wanted(chats):
    answer = chats.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
