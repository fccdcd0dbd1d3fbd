"""The line of the proof on HTTP: it compares every answer, and fails where one differs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from unpad.inference.loaded import load
from unpad.proof.serving import Answering, prompts_of
from unpad.serving.over_http import over_http

if TYPE_CHECKING:
    from tests.helpers.families import Finished


def test_streams_of_a_server_are_what_each_request_gets_alone(finished: Finished) -> None:
    loaded = load(finished("conversations").run)
    subject = Answering.of(loaded, prompts_of(loaded, None)[:6])
    truth = subject.alone()
    line = over_http(loaded, subject.requests, truth)
    assert line.passed, line
    assert line.measured == 0
    number = next(place for place, heard in enumerate(truth) if heard.tokens())
    changed = truth[number].scores[0][0].clone()
    with torch.inference_mode():
        changed[truth[number].tokens()[0]] += 1e-3
    truth[number].scores[0][0] = changed
    broken = over_http(loaded, subject.requests, truth)
    assert broken.passed is False
    assert "1 of 6 answers differ" in broken.note
