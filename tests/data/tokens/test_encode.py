"""Encoding in several processes gives what one gives, and fails as one fails."""

import os
import signal
import sys
from typing import Any

import numpy as np
import pytest

from unpad.data.sources.example import Example, Turn
from unpad.data.tokens import encode
from unpad.data.tokens.tokenizer import Tokenizer, train_tokenizer
from unpad.errors import OutOfMemoryError, SourceError
from unpad.recipes.data import Template
from unpad.recipes.file import parse_recipe

forks = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
TEXTS = ["今天天气很好，我们去公园散步吧。", "what is a batch?", "第二句话。", "", "用户：", "a\nb"]


def examples(num: int) -> list[Example]:
    """Texts and conversations of one to three messages, each said otherwise."""
    found = []
    for i in range(num):
        content = f"{TEXTS[i % len(TEXTS)]} {i % 97}"
        talk = (Turn("user", content), Turn("assistant", TEXTS[i % 4]), Turn("user", TEXTS[4]))[: 1 + i % 3]
        turns = (Turn("text", content),) if i % 2 else talk
        found.append(Example(f"data.jsonl:{i + 1}", turns))
    return found


@pytest.fixture(params=["bpe", "words"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    settings = parse_recipe({"data": {"text": "x.jsonl"}, "tokenizer": {"kind": request.param}}).tokenizer
    return train_tokenizer(settings, dict.fromkeys(TEXTS * 3), encode.reserved_texts(Template()))


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two processes for little work; the first example of every part that was encoded in this one."""
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.setattr(encode, "WORTH_A_PROCESS", 100)
    monkeypatch.setattr(encode, "EXAMPLES_AT_ONCE", 50)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    here, encode_part = [], encode._encode_part

    def watched(job: Any, span: encode.ExampleSpan) -> encode.Encoded:
        here.append(span[0])
        return encode_part(job, span)

    monkeypatch.setattr(encode, "_encode_part", watched)
    return here


@pytest.mark.promise("data.parallel")
@forks
def test_processes_give_what_one_gives(tokenizer, processes, monkeypatch):
    rows = examples(430)
    several = encode.encode_examples(rows, tokenizer, Template())
    assert processes == [], "other processes did it"
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    one = encode.encode_examples(rows, tokenizer, Template())
    assert sorted(processes) == [*range(0, 430, 50)]
    for a, b in zip(several[:3], one[:3], strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)
    assert not several[3].counts
    alone = [encode.encode_examples([row], tokenizer, Template())[0] for row in rows]
    assert np.array_equal(np.concatenate(alone), several[0])


@forks
@pytest.mark.parametrize("tokenizer", ["bpe"], indirect=True)
def test_an_error_in_a_process_is_the_error_of_the_row(tokenizer: Tokenizer, processes: list[int]) -> None:
    rows = [*examples(200), Example("data.jsonl:201", (Turn("text", "\ud800"),))]
    with pytest.raises(SourceError, match="half of a surrogate pair") as found:
        encode.encode_examples(rows, tokenizer, Template())
    assert found.value.fix == "write the text as valid UTF-8"


@pytest.mark.promise("data.parallel")
@forks
def test_a_process_that_is_killed_is_told_in_words(tokenizer, processes, monkeypatch):
    encode_part = encode._encode_part

    def killed(job: Any, span: encode.ExampleSpan) -> encode.Encoded:
        if span[0] == 50:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode_part(job, span)

    monkeypatch.setattr(encode, "_encode_part", killed)
    with pytest.raises(OutOfMemoryError, match="ended from outside"):
        encode.encode_examples(examples(200), tokenizer, Template())
    assert "TOKENIZERS_PARALLELISM" not in os.environ


@forks
def test_processes_are_begun_for_much_work_alone(processes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = parse_recipe({"data": {"text": "x.jsonl"}, "tokenizer": {"kind": "bpe"}}).tokenizer
    tokenizer, rows = train_tokenizer(settings, dict.fromkeys(TEXTS * 3), []), examples(200)
    for name, value in (("WORTH_A_PROCESS", 2_000_000), ("EXAMPLES_AT_ONCE", 4000)):
        with monkeypatch.context() as little:
            little.setattr(encode, name, value)
            encode.encode_examples(rows, tokenizer, Template())
        assert processes, f"{name}={value} leaves nothing to share"
        processes.clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    encode.encode_examples(rows, tokenizer, Template())
    assert processes
