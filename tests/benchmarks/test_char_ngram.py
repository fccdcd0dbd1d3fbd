"""The character n-gram that a language model is compared with is a proper code."""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.corpus import prepare
from tests.helpers.toy import run, write_toy
from unpad.evaluation.metrics import EQUAL_GROUPS
from unpad.recipes.file import parse_recipe

TEXTS = [
    "春天来了，花开了。", "春天的花开得很好。", "天来了", "秋天来了，叶落了。", "花", "花开花落，春去秋来。",
    "abab" * 9,
]  # fmt: skip


def _load() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "char_ngram.py"
    spec = importlib.util.spec_from_file_location("char_ngram", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["char_ngram"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


ngram = _load()


def _total(model: Any, context: str) -> float:
    return sum(model.probability(symbol, context) for symbol in [*model.alphabet, ngram.UNKNOWN])


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("context", ["", "春", "春天", "春天来", "春天来了", "没见过", "见春天", "abab"])
def test_probabilities_sum_to_one_after_every_context(order, context):
    model = ngram.fit(TEXTS, order)
    for before in (context, ngram.START + context):
        assert _total(model, before) == pytest.approx(1, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text("abc", max_size=12), min_size=1, max_size=12), st.text("abcd", max_size=5), st.integers(1, 5))
def test_any_corpus_gives_a_distribution(texts, context, order):
    model = ngram.fit(texts, order)
    values = [model.probability(symbol, ngram.START + context) for symbol in [*model.alphabet, ngram.UNKNOWN]]
    assert min(values) > 0
    assert sum(values) == pytest.approx(1, abs=1e-12)


def test_shorter_contexts_count_the_symbols_that_come_before():
    """ "ab" and "cb" occur often, "xd" and "yd" and "zd" once: d follows more symbols than b, so it wins alone."""
    model = ngram.fit(["ab" * 8 + "cb" * 8, "xd", "yd", "zd"], 2)
    assert model.counts[0]["b"] == 2
    assert model.counts[0]["d"] == 3
    assert model.counts[1]["ab"] == 8
    assert model.counts[0][ngram.START] == 0
    assert model.probability("d", "?") > model.probability("b", "?")


def test_discounts_follow_chen_and_goodman():
    counts = dict(zip("abcdefghij", [1, 1, 1, 1, 2, 2, 2, 3, 3, 4], strict=True))
    share = 4 / (4 + 2 * 3)
    expected = (0, 1 - 2 * share * 3 / 4, 2 - 3 * share * 2 / 3, 3 - 4 * share * 1 / 2)
    assert ngram._discounts(counts) == pytest.approx(expected)


def test_bits_count_every_character_and_the_end():
    model = ngram.fit(TEXTS, 3)
    context, expected = ngram.START, 0.0
    for symbol in [*"春天来了", ngram.END]:
        expected -= math.log2(model.probability(symbol, context))
        context += symbol
    assert model.bits("春天来了") == pytest.approx(expected, rel=1e-12)


def test_an_unseen_character_costs_its_bytes_besides_the_unknown_symbol():
    model = ngram.fit(TEXTS, 3)
    assert model.bits("é") - model.bits("龘") == pytest.approx(-8)
    assert model.bits("龘") > -math.log2(model.probability(ngram.UNKNOWN, ngram.START)) + 24


def test_texts_are_those_of_the_run_in_its_order(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n\n".join(f"第{i}段。" + "好" * i for i in range(40)), encoding="utf-8")
    recipe = parse_recipe(
        {"data": {"text": str(path), "holdout": 0.3}, "tokenizer": {"kind": "bpe", "vocab_size": 320},
         "augment": {"multiplier": 1}}
    )  # fmt: skip
    tokens, tokenizer, _ = prepare(recipe, cache=tmp_path / "cache")
    texts = ngram.read_texts(recipe, tokens)
    assert tokens.copy.any()
    for i, text in enumerate(texts):
        if tokens.copy[i] == 0:
            assert tokenizer.decode(tokens.tokens(i)[1:-1].tolist()) == text


def test_difference_is_paired():
    """A document that is long and cheap for both models widens each interval and not the difference."""
    rng = np.random.default_rng(0)
    chars = np.array([10_000, *rng.integers(50, 200, 60)])
    nats = chars * np.array([1.0, *rng.uniform(3, 6, 60)])

    def sums(values: np.ndarray) -> Any:
        return ngram.DocumentSums(values, chars + 1, chars, chars * 3)

    gap = ngram.difference(sums(nats - 0.1 * chars), sums(nats))
    assert gap.value == pytest.approx(-0.1 / math.log(2))
    assert math.isnan(gap.low)
    assert gap.note == EQUAL_GROUPS


@pytest.mark.slow
def test_a_run_of_texts_is_measured_beside_its_ngrams(tmp_path, capsys):
    run(write_toy(tmp_path, stages=[], data={"chat": []}, train={"max_steps": 1}), tmp_path / "run")
    ngram.main(str(tmp_path / "run"))
    assert "the run less order" in capsys.readouterr().out
