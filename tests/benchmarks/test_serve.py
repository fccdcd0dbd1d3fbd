"""The judgement of the benchmark of the server: what must not pass does not."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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


def test_answers_are_equal_to_alone_by_every_bit_of_their_log_probabilities(serve):
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
