"""The judgement of the benchmark of the server: what must not pass does not."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.helpers.families import Finished

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def serve() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("serve")
        for script in BENCHMARKS.glob("*.py"):
            sys.modules.pop(script.stem, None)


def _told(*events: dict[str, Any] | bytes, left: bool = False, status: int = 200, whole: bool = True) -> Any:
    """What a client was told by these events, one a second."""
    client = sys.modules["serve_client"]
    parts = [(float(n), one if isinstance(one, bytes) else json.dumps(one).encode()) for n, one in enumerate(events)]
    return client.Told(status=status, parts=parts, is_whole=whole and not left, has_left=left)


def _token(token: str, logprob: float, reason: str | None = None) -> dict[str, Any]:
    said = {"tokens": [token], "token_logprobs": [logprob], "top_logprobs": [{token: logprob}]}
    return {"choices": [{"text": token, "logprobs": said, "finish_reason": reason}]}


A, B, DONE = _token("a", -1.5), _token("b", -0.25, "length"), b"[DONE]"


def test_answers_are_equal_to_alone_by_every_bit_of_their_log_probabilities(serve: Any) -> None:
    alone = [_told(A, B, DONE)]
    assert serve.differing(alone, [_told(A, B, DONE)]) == 0
    assert serve.differing(alone, [_told(A, left=True)]) == 0, "as far as it came"
    for other in (
        _told(A, _token("b", -0.25000000000000006, "length"), DONE),
        _told(A, _token("c", -0.25, "length"), DONE),
        _told(A, _token("b", -0.25, "stop"), whole=False),
        _told(_token("a", -1.0), left=True),
        _told(left=True),
        _told({"error": {"message": "x"}}),
    ):
        assert serve.differing(alone, [other]) == 1
    assert serve.equal("x", 1, 32).holds is False
    assert serve.equal("x", 0, 32).holds is True


def test_rates_are_of_the_clock_or_of_processor_time_and_what_was_not_measured_does_not_hold(serve: Any) -> None:
    def found(rate: float) -> list[Any]:
        return [serve.Load(100, 100 / rate, 10 / rate)] * 3

    loads = {("unpad", num): found(rate) for num, rate in ((1, 10), (8, 26), (32, 29))}
    held = {row.what: row.holds for row in serve.speed_rows(loads, False, False)}
    assert held["8 clients against one, times"] is True
    assert held["32 clients against one, times"] is False, "2.9 of 3"
    assert held["against transformers, 8 clients, times"] is False, "not measured"
    loads |= {("transformers", num): found(20) for num in (1, 8, 32)}
    held = {row.what: row.holds for row in serve.speed_rows(loads, True, False)}
    assert held["against transformers, 1 client, times"] is False
    assert held["against transformers, 32 clients, times"] is True
    assert not {row.what: row.holds for row in serve.speed_rows(loads, False, True)}["8 clients against one, times"]
    assert found(10)[0].rate(shared=True) == pytest.approx(100)


def test_a_gap_is_the_longest_of_one_stream_that_touches_the_interval(serve: Any) -> None:
    measures, told = sys.modules["serve_measures"], _told(*[A] * 3)
    told.parts = [(time, part) for time, (_, part) in zip((0.0, 5.0, 6.0), told.parts, strict=True)]
    assert measures.longest_gap([told], 5.5, 9) == 1
    assert measures.longest_gap([told, _told(A, A)], 4.9, 9) == 5
    joined = serve.Joined
    pieces, whole = [joined(0.1, 0.02, 0.2, 1.0)], [joined(0.1, 0.02, 0.4, 0.5)]
    assert [row.holds for row in serve.gap_rows(pieces, whole, pieces)] == [None, False, None, False, None, True]
    slow, short = [joined(0, 0, 0.6, 0.7)], [joined(0.1, 0.1, 0.21, 1)]
    assert [row.holds for row in serve.gap_rows(pieces, slow, short)][1::2] == [True, True, False]


@pytest.mark.parametrize(
    ("data", "framed", "late", "fault"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n{}", True, False, ""),
        (b"HTTP/1.1 500 Internal Server Error\r\n\r\n{}", True, False, "status 500"),
        (b"HTTP/1.1 503 \r\n\r\n{}", False, False, "status 503"),
        (b'HTTP/1.1 503 \r\n\r\n{"code":"out_of_memory"}', True, False, ""),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error":{"type":"server_error"}}', True, False, "ended with an error"),
        (b"", True, True, "no answer in time"),
        (b"", True, False, "closed without an answer"),
        (b"", False, True, ""),
    ],
)
def test_an_answer_of_500_or_none_to_a_whole_request_is_a_fault(
    serve: Any, data: bytes, framed: bool, late: bool, fault: str
) -> None:
    rude = sys.modules["serve_rude"]
    found = rude.judged(data, rude.Case(b"", framed), late).fault
    assert (bool(found), fault in found) == (bool(fault), True), found


def test_memory_that_grows_is_a_fault(serve: Any) -> None:
    rude = sys.modules["serve_rude"]
    for last, holds in ((104, True), (106, False)):
        verdict = rude.Verdict()
        rude._judge_memory(verdict, {0: [10], 2: [last << 20] * 3, 1: [100 << 20]})
        assert verdict.holds is holds


def test_a_server_that_ends_leaves_no_answer_cut(serve: Any) -> None:
    rude = sys.modules["serve_rude"]
    complete, failed = _told(A, B, DONE), _told(A, {"error": {"code": "draining"}})
    refused, whole = _told({"error": {"code": "draining"}}, status=503), _told(B)
    for told, code, holds in (
        ([complete, failed, refused, whole], 0, True),
        ([complete, failed], 1, False),
        ([_told(A, B)], 0, False),  # a stream without its last mark
        ([_told(A, whole=False)], 0, False),
        ([_told({"error": {}}, A)], 0, False),
        ([], 0, False),
    ):
        verdict = rude.Verdict()
        rude.judge_drain(verdict, told, code, 0.1)
        assert verdict.holds is holds, verdict.lines


def test_sections_of_the_page_stay_in_their_order(serve: Any, tmp_path: Path) -> None:
    page = tmp_path / "serve.md"
    first, second = serve.TITLES[:2]
    serve.write_section(page, second, "b", ["old"])
    serve.write_section(page, first, "a", ["| x |"])
    serve.write_section(page, second, "c", ["new"])
    text = page.read_text("utf-8")
    assert text.index(first) < text.index("| x |") < text.index(second) < text.index("    c\n") < text.index("new")
    assert "old" not in text


def test_a_server_that_answers_500_or_keeps_a_place_is_found(
    serve: Any, finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.helpers.serving import running
    from unpad.serving import routes
    from unpad.serving.limits import Limits
    from unpad.serving.service import Service

    rude, sides = sys.modules["serve_rude"], sys.modules["serve_sides"]
    bodies = [{"prompt": [5], "max_tokens": 1, "logprobs": 0}] * 2
    for name, value in {
        "scored": lambda num, seed: bodies,
        "IMPATIENT": 0.02,
        "LONGEST_STAY": 0.5,
        "NUM_EQUAL": 2,
        "PLACES": 4,
    }.items():
        monkeypatch.setattr(rude, name, value)
    monkeypatch.setattr(sys.modules["serve_client"], "QUIET", 0.01)
    (log := tmp_path / "log").write_text("")

    def verdict_of(mode: Any) -> Any:
        return asyncio.run(mode(sides.Side(sides.Address("127.0.0.1", made.port), "demo", os.getpid(), log), 12))

    with running(finished("conversations").run, Limits(rows=2, waiting=2), name="demo", rows=2) as made:
        sound = verdict_of(rude.fuzzed), verdict_of(rude.cancelled)
        assert [one.faults for one in sound] == [[], []]
        with monkeypatch.context() as patch:
            patch.setattr(routes, "read_chat", lambda body: body["messages"][0]["content"])
            broken = verdict_of(rude.fuzzed)
        monkeypatch.setattr(Service, "end", lambda service: None)
        kept = verdict_of(rude.cancelled)
    assert any("status 500" in fault for fault in broken.faults), broken.lines
    assert "places of clients that left are not free" in kept.faults, kept.lines
