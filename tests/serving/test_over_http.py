"""The lines of the proof on HTTP: they compare every answer, and fail where one differs."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.families import Finished
from unpad.evaluation.family import HeldOutInputs
from unpad.inference.loaded import LoadedRun, load
from unpad.proof.passes import inputs_of
from unpad.proof.serving import Answering, prompts_of
from unpad.serving import over_http
from unpad.serving.over_http import numbers, streams
from unpad.serving.protocol import RequestError


@pytest.mark.parametrize("kind", ["conversations", "questions"])
def test_streams_of_a_server_are_what_each_request_gets_alone(finished, kind):
    loaded = load(finished(kind).run)
    subject = Answering.of(loaded, prompts_of(loaded, None)[:6])
    truth = subject.alone()
    line = streams(loaded, subject.requests, truth)
    assert line.passed, line
    assert line.measured == 0
    asked = [place for place, _, _ in over_http._bodies(loaded, subject.requests)]
    others = len(subject.requests) - len(asked)
    assert (line.kernel, f"{others} question" in line.note) == (f"{len(asked)} streams", others > 0)
    number = next(place for place in asked if truth[place].tokens())
    changed = truth[number].scores[0][0].clone()
    with torch.inference_mode():
        changed[truth[number].tokens()[0]] += 1e-3
    truth[number].scores[0][0] = changed
    broken = streams(loaded, subject.requests, truth)
    assert broken.passed is False
    assert f"1 of {len(asked)} answers differ" in broken.note


@pytest.mark.parametrize("status", [400, 500])
def test_what_the_server_refuses_is_not_proven_and_what_it_fails_at_is_no_answer(finished, monkeypatch, status):
    loaded = load(finished("conversations").run)
    subject = Answering.of(loaded, prompts_of(loaded, None)[:3])

    def refuses(ask: Any) -> None:
        raise RequestError("too long", status=status)

    monkeypatch.setattr("unpad.serving.served.Served.completion", lambda served, ask, *more: refuses(ask))
    if status == 500:
        with pytest.raises(over_http.ServerFaultError, match="too long"):
            streams(loaded, subject.requests, subject.alone())
        return
    line = streams(loaded, subject.requests, subject.alone())
    assert (line.passed, line.note) == (None, "3 of 3 were refused: too long")


def test_questions_about_several_images_are_said_not_to_be_asked(finished):
    loaded = load(finished("questions").run)
    data = loaded.data()
    rows = [row for row, example in enumerate(data.examples) if len(example.images) != 1][:3]
    line = streams(loaded, Answering.of(loaded, [data.prompts([row]) for row in rows]).requests, [])
    assert (line.passed, line.applies, "about one image" in line.note) == (None, True, True)


@pytest.fixture(scope="module")
def proved(finished: Finished) -> tuple[LoadedRun, HeldOutInputs]:
    loaded = load(finished("images").run)
    return loaded, inputs_of(loaded)


def test_numbers_of_a_server_are_those_of_each_input_alone(proved):
    loaded, subject = proved
    truth = subject.alone()
    line = numbers(loaded, subject, truth)
    assert line.passed, line
    assert (line.measured, line.kernel) == (0, f"{len(subject.inputs)} requests")
    for name in truth[1]:
        own = truth[1][name]
        truth[1] = {**truth[1], name: np.nextafter(own, np.inf)}
        broken = numbers(loaded, subject, truth)
        assert (broken.passed, broken.note) == (False, f"1 of {len(truth)} differ"), name
        truth[1] = {**truth[1], name: own}


@pytest.mark.nightly
def test_what_cannot_be_asked_through_http_is_not_proven(proved, monkeypatch):
    loaded, subject = proved
    own = over_http._post

    def refuses(port: int, route: str, body: Any) -> bytes:
        if body["inputs"] != first:
            return own(port, route, body)
        raise over_http.NotTakenError("no")

    first = None
    sent: list[Any] = []
    monkeypatch.setattr(over_http, "_post", lambda port, route, body: (sent.append(body), own(port, route, body))[1])
    truth = subject.alone()
    numbers(loaded, subject, truth)
    first = sent[0]["inputs"]
    monkeypatch.setattr(over_http, "_post", refuses)
    line = numbers(loaded, subject, truth)
    assert (line.passed, line.note) == (None, f"1 of {len(truth)} were refused: no")


def test_patients_are_not_asked_for_through_http(finished):
    loaded = load(finished("patients").run)
    line = numbers(loaded, inputs_of(loaded), [])
    assert (line.passed, line.applies, line.note) == (None, False, "patients are compared in the process alone")
