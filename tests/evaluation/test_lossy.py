"""A tokenizer that loses characters says so at every verb, and gets no bits per character."""

import json
import math
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.helpers.tokenizers import dropping_bpe, word_pieces
from tests.helpers.toy import DOES, WHAT, WHO, events, rows, write_toy
from unpad.data.tokens.lost import LostCharacters
from unpad.errors import SourceError
from unpad.evaluation.metrics import metric_lines
from unpad.evaluation.text import DocumentSums, summarise
from unpad.inference.loaded import load
from unpad.training.loop import train

pytestmark = pytest.mark.slow

# Knows every character of the toy corpus but those of these words.
LETTERS = "".join(dict.fromkeys("".join([*WHO, *DOES, *WHAT, "。第篇、0123456789用户：助手系统"])))
UNKNOWN = "".join(WHO)
STEPS = ["train.max_steps=2", "train.eval_every=1"]


def lossy(folder: Path, data: bytes) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(data)
    return write_toy(folder, tokenizer={"kind": "file", "path": str(folder / "tokenizer.json"), "vocab_size": 400})


def without(characters: str) -> bytes:
    return dropping_bpe("".join(letter for letter in LETTERS if letter not in characters))


@pytest.mark.promise("llm.unknown")
def test_every_verb_says_what_is_lost_and_gives_no_bits(unpad, tmp_path):
    recipe = lossy(tmp_path / "toy", without(UNKNOWN))
    for again in range(2):  # read, and from the cache
        screen = StringIO()
        train(str(recipe), tmp_path / f"run{again}", STEPS, console=Console(file=screen, soft_wrap=True))
        assert "warning: " in screen.getvalue()
        assert "are lost to unknown tokens, such as " in screen.getvalue()
        held_out = [line for line in screen.getvalue().splitlines() if line.startswith("held out at")]
        assert held_out, screen.getvalue()
        assert all("bits per char - (" in line and "% of the characters are lost" in line for line in held_out)
        assert all(row["values"]["bits_per_char"] is None for row in rows(tmp_path / f"run{again}", "eval"))
        (fact,) = events(tmp_path / f"run{again}", "data")
        assert 0.01 * fact["characters"] < fact["lost_characters"] < fact["characters"]
    assert "are lost to unknown tokens" in unpad("plan", recipe).out
    corpus = json.loads(unpad("plan", recipe, "--json").out)["corpus"]
    assert 0 < corpus["lost_characters"] < corpus["characters"]
    checked = unpad("data", "check", recipe, code=0)
    assert "warning: " in checked.out
    assert "60 of 60 rows usable" in " ".join(checked.out.split())
    told = unpad("eval", tmp_path / "run0")
    assert "warning: " in told.out
    for name in ("bits_per_char", "bits_per_byte"):
        found = told.out.partition(f"\n{name} ")[2].split(maxsplit=12)
        assert found[0] == "-"
        assert "are lost to unknown tokens" in " ".join(found)
    metrics = json.loads(unpad("eval", tmp_path / "run0", "--json").out)
    assert metrics["bits_per_char"]["value"] is None
    assert "lost to unknown tokens" in metrics["bits_per_char"]["reason"]
    assert metrics["loss"]["value"] > 0
    page = (tmp_path / "run0" / "report.html").read_text(encoding="utf-8")
    assert page.count("of the characters are lost to unknown tokens") >= 2, "where the interval would be"
    compared = unpad("compare", tmp_path / "run0", tmp_path / "run1", code=0)
    assert "bits per char there" in compared.out


def test_bits_of_a_tokenizer_that_loses_little_are_of_the_characters_it_keeps():
    columns = [np.array([10.0, 30.0]), np.array([5, 15]), np.array([8, 12]), np.array([24, 36])]
    whole = summarise(DocumentSums(*columns))
    little = summarise(DocumentSums(*columns, LostCharacters(1, 2000)))
    much = summarise(DocumentSums(*columns, LostCharacters(21, 2000)))
    assert repr(little) == repr(whole), "a bound that is nan equals nothing"
    assert {name for name, metric in much.items() if math.isnan(metric.value)} == {"bits_per_char", "bits_per_byte"}
    assert much["loss"] == whole["loss"]
    assert "1.1% of the characters are lost to unknown tokens" in " ".join("".join(metric_lines(much)).split())


@pytest.mark.promise("llm.unknown")
def test_training_is_refused_when_next_to_nothing_survives(unpad, tmp_path):
    recipe = lossy(tmp_path / "toy", dropping_bpe("ab"))
    with pytest.raises(SourceError, match="next to nothing of the text survives"):
        train(str(recipe), tmp_path / "run", STEPS, console=Console(file=StringIO()))
    assert not (tmp_path / "run").exists()
    assert unpad("train", recipe, "--out", tmp_path / "run").code == 3
    assert unpad("data", "check", recipe).code == 3


def test_new_text_is_refused_when_next_to_nothing_survives(unpad, tmp_path):
    recipe = lossy(tmp_path / "toy", without(UNKNOWN))
    train(str(recipe), tmp_path / "run", STEPS, console=Console(file=StringIO()))
    new = tmp_path / "new.jsonl"
    new.write_text('{"text": "龘靐齉齾爩"}\n{"text": "麤灪籱虋靏喜"}\n', encoding="utf-8")
    refused = unpad("eval", tmp_path / "run", "--data", new, code=3)
    assert "next to nothing of the text survives: 10 of 11 characters" in refused.err
    assert f"at: {new}" in refused.err
    assert "tokenizer.kind" not in refused.err, "the run has its tokenizer"
    new.write_text('{"text": "龘靐齉齾爩喜欢"}\n', encoding="utf-8")
    assert "warning: 5 of 7 characters" in unpad("eval", tmp_path / "run", "--data", new, code=0).out


@pytest.mark.promise("llm.unknown")
def test_a_prompt_with_unknown_characters_is_warned_of_and_marked(unpad, tmp_path):
    recipe = lossy(tmp_path / "toy", without(UNKNOWN))
    train(str(recipe), tmp_path / "run", STEPS, console=Console(file=StringIO()))
    told = unpad("generate", tmp_path / "run", "--prompt", "小猫老师", "--prompt", "喜欢小")
    assert told.err.count("warning: the prompt is mostly unknown: 4 of 4 characters") == 1
    assert told.err.count("warning: a part of the prompt is unknown: 1 of 3 characters") == 1
    found = json.loads(unpad("generate", tmp_path / "run", "--prompt", "小猫老师", "--prompt", "喜欢小", "--json").out)
    assert [row["unknown_characters"] for row in found] == [4, 1]
    assert [row["mostly_unknown"] for row in found] == [True, False]
    asked = unpad("chat", tmp_path / "run", stdin="小猫\n喜欢小\n喜欢\n")
    assert len(asked.out.splitlines()) == 3
    assert asked.err.count("mostly unknown") == asked.err.count("a part of the prompt is unknown") == 1


def test_old_runs_of_lossy_tokenizers_open(tmp_path):
    recipe = lossy(tmp_path / "toy", word_pieces(LETTERS))
    train(str(recipe), tmp_path / "run", STEPS, console=Console(file=StringIO()))
    assert load(tmp_path / "run").generate(["月亮"], max_new_tokens=2)
