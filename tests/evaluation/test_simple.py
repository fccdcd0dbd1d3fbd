"""What simple methods get on held-out rows, and what is said of a model beside them."""

import json
import math
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.evaluation.scikit_learn import FILE, sample_pictures
from unpad.evaluation import simple
from unpad.evaluation.rows import GROUP, ExampleRows, Ratio

END = chr(0x10FFFF)  # of a text, in the reference


def spelled(texts: list[str]) -> np.ndarray:
    return np.array([symbol for text in texts for symbol in (simple.START, *map(ord, text), ord(END))])


def bits_of(texts: list[str], asked: list[str]) -> dict[int, np.ndarray]:
    symbols, num = spelled(texts + asked), len(spelled(texts))
    is_asked = np.arange(len(symbols)) >= num
    return simple.ngram_bits(symbols, ~is_asked & (symbols != simple.START), is_asked & (symbols != simple.START))


def probability(texts: list[str], order: int, symbol: str, context: str) -> float:
    """Interpolated Kneser-Ney by its definition: the longest n-grams are counted as they occur,
    shorter ones by the symbols before them, or as they occur where a text begins with them."""
    whole = [chr(simple.START >> 1) + text + END for text in texts]
    counts = Counter(text[i : i + order] for text in whole for i in range(len(text) - order + 1))
    levels = [counts]
    for size in range(order - 1, 0, -1):
        counts = Counter(gram[1:] for gram in levels[0]) + Counter(text[:size] for text in whole if len(text) >= size)
        levels.insert(0, counts)
    del levels[0][chr(simple.START >> 1)]
    p = 1 / (len({*"".join(texts), END}) + 1)
    for size, counts in enumerate(levels[: len(context) + 1], 1):
        cuts = simple.discounts(np.array(list(counts.values()), np.int64))
        after = {gram[-1]: num for gram, num in counts.items() if gram[:-1] == context[len(context) - size + 1 :]}
        taken = {char: cuts[min(num, 3)] for char, num in after.items()}
        if after:
            rest = sum(taken.values()) * p
            p = (after.get(symbol, 0) - taken.get(symbol, 0) + rest) / sum(after.values())
    return p


@settings(deadline=None, max_examples=25)
@given(st.lists(st.text("ab春", min_size=1, max_size=9), min_size=1, max_size=5), st.text("ab春", max_size=6))
def test_ngrams_are_kneser_ney_of_any_texts(texts, asked):
    found = bits_of(texts, [asked])
    for order in (3, 5):
        context, expected = chr(simple.START >> 1), []
        for symbol in asked + END:
            p = probability(texts, order, symbol, context[-(order - 1) :])
            expected.append(-math.log2(p) + 8 * len(symbol.encode()) * (symbol not in "".join(texts) + END))
            context += symbol
        np.testing.assert_allclose(found[order], expected, rtol=1e-9)


def test_ngrams_are_a_code_in_which_a_new_character_costs_its_bytes():
    texts = ["春天来了，花开了。" * 3, "abab" * 30, "花开花落，春去秋来。", "abcabcd" * 9, *"abcde"]
    asked = [*sorted({*"".join(texts)}), "é", ""]
    for context in ("", "ab", "春天来", "?x"):
        ends = np.cumsum([len(context + each) + 1 for each in asked])
        places = ends - [len(each) + 1 for each in asked]
        for bits in bits_of(texts, [context + each for each in asked]).values():
            assert np.exp2(16 * np.array([each == "é" for each in asked]) - bits[places]).sum() == pytest.approx(1)


def test_discounts_follow_chen_and_goodman():
    counts = np.array([0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 7])
    share = 4 / (4 + 2 * 3)
    expected = (0, 1 - 2 * share * 3 / 4, 2 - 3 * share * 2 / 3, 3 - 4 * share * 1 / 2)
    assert simple.discounts(counts) == pytest.approx(expected)


def test_classes_are_those_of_scikit_learn():
    expected = json.loads(FILE.read_text(encoding="utf-8"))["simple"]
    x, labels, asked = sample_pictures()
    assert [one.tolist() for one in simple.ridge(x, labels, asked)] == expected["ridge"]
    nearest, five = simple.neighbours(x, labels, asked)
    assert nearest.tolist() == expected["nearest"]
    order = ((asked[:, None] - x) ** 2).sum(2).argsort(1)[:, :5]
    for row, chosen in zip(labels[order], five, strict=True):
        most = Counter(row.tolist()).most_common()
        assert Counter(row.tolist())[chosen] == most[0][1]


@pytest.mark.parametrize("method", ["ridge", "nearest"])
def test_pictures_are_classified_by_what_the_valid_ones_show(method):
    """Classes by a lighter part of plain pictures of any shade; or near copies of a few pictures of noise."""
    rng = np.random.default_rng(0)
    labels = np.arange(160) % 8
    noise = rng.integers(0, 256, (160, 20, 30, 3))
    part = np.arange(20)[:, None] // 10 * 4 + np.arange(30) // 8
    shades = 200 * rng.random((160, 1, 1, 3)) + 50 * (part == labels[:, None, None])[..., None]
    copies = np.clip(noise[np.arange(160) % 40] // 2 + noise // 8, 0, 255)
    labels = labels if method == "ridge" else rng.integers(0, 8, 40)[np.arange(160) % 40]
    looks = [
        simple.thumbnails(list(part))
        for part in np.split((shades if method == "ridge" else copies).astype(np.uint8), (80, 120))
    ]
    right = np.split(labels, (80, 120))
    found, classes = simple.classify(looks[0], right[0], looks[1], right[1], looks[2])
    assert found.startswith(method)
    assert (classes == right[2]).mean() > 0.9


@pytest.mark.parametrize(
    ("measure", "step", "better", "told"),
    [
        ("accuracy", 0.3, "model", "better than a simple method"),
        ("accuracy", -0.3, "simple", "a simple method is better on these rows"),
        ("bits_per_char", 0.3, "simple", "a simple method is better on these rows"),
        ("bits_per_char", -0.3, "model", "better than a simple method"),
        ("accuracy", 0.0, "neither", "not shown to be better than a simple method"),
    ],
)
def test_a_model_is_judged_by_the_difference_on_the_rows_of_both(measure, step, better, told):
    rng = np.random.default_rng(0)
    theirs = rng.random(60)
    ours = theirs + step + rng.normal(0, 0.2, 60)
    guess = simple.Guesses(measure, "n-gram of order 5", {"value": np.where(np.arange(60) < 50, theirs, np.nan)})
    found = simple.beside(ExampleRows({"value": ours, GROUP: np.arange(60) // 2}, {measure: Ratio("value")}), guess)
    assert (found.better, found.theirs.num, found.gap.num_groups) == (better, 50, 25)
    assert found.ours - found.theirs.value == pytest.approx(found.gap.value)
    start = f"{measure.replace('_', ' ')} {found.ours:.4f}, n-gram of order 5 {found.theirs.value:.4f} (difference "
    assert found.sentence().startswith(start)
    assert found.sentence().endswith(f"): {told}")


def test_shares_of_few_rows_and_their_difference_stay_in_bounds():
    columns = {"right": np.array([1.0, 0.0, 1.0, 1.0]), GROUP: np.arange(4)}
    guess = simple.Guesses("accuracy", "nearest neighbours", {"right": np.array([0.0, 1.0, 0.0, 0.0])})
    found = simple.beside(ExampleRows(columns, {"accuracy": Ratio("right", share=True)}), guess)
    assert 0 <= found.theirs.low < found.theirs.high <= 1
    assert -1 <= found.gap.low < found.gap.high == 1


def test_a_sample_is_bounded_and_fixed():
    rows = np.arange(100, 200)
    assert len(chosen := simple.sampled(rows, np.full(100, 10), 305)) == 30
    assert np.all(np.diff(chosen) > 0)
    assert simple.sampled(rows, np.full(100, 999), 5).shape == (1,)
    assert simple.sampled(rows, np.ones(100), 100).tolist() == rows.tolist()


@pytest.mark.parametrize("family", ["images", "text", "pairs", "questions", "patients"])
def test_eval_shows_a_simple_method_below_each_measure_and_judges_by_it(finished, unpad, tmp_path, monkeypatch, family):
    made = finished(family)
    monkeypatch.setenv("UNPAD_CACHE", str(made.cache))
    run = Path(shutil.copytree(made.run, tmp_path / "run"))
    shown = unpad("eval", run).out.splitlines()
    values = json.loads(unpad("eval", run, "--json").out)
    names, page = list(values), (run / "report.html").read_text(encoding="utf-8")
    simple = {name: one for name, one in values.items() if name.startswith("simple_")}
    for name, one in simple.items():
        assert names[names.index(name) - 1] == name.removeprefix("simple_")
        assert one["difference"]["num"] == one["num"]
        assert one["sentence"][1:] in page
        assert one["sentence"] in " ".join(shown)
    assert " ".join(shown).endswith(list(simple.values())[-1]["sentence"])
    on_train = json.loads(unpad("eval", run, "--json", "--split", "train").out)
    assert not [name for name in on_train if name.startswith("simple_")]
