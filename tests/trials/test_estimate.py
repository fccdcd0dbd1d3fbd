"""Large data: a table over a sample comes first, the exact one when all is encoded, the search for duplicates last."""

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.helpers.toy import write_toy
from unpad.data.tokens import corpus
from unpad.recipes.file import load_recipe
from unpad.recipes.training import PlanSettings
from unpad.training.rehearsal import StepCost
from unpad.training.setup import Setup
from unpad.trials import preview as module
from unpad.trials.preview import estimates_of, preview
from unpad.trials.strategy_table import compare, padding_spread


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe of 54 texts and 36 conversations to train on, which count as large; 20 of a kind are drawn."""
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))  # in which no length is known yet
    monkeypatch.setattr(corpus, "LARGE_BYTES", 0)
    monkeypatch.setattr(corpus, "MOST", 20)
    return str(write_toy(tmp_path / "toy"))


def tried(setup: Setup, recipe: object, made: object) -> StepCost:
    return StepCost(1, 2.0, 1, 3 << 30, 0)


def shown(recipe: str, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> str:
    monkeypatch.setattr("unpad.trials.preview._try", tried)
    out = StringIO()
    try:
        preview(recipe, overrides, console=Console(file=out, width=200))
    finally:
        text = out.getvalue()
    return text


def test_the_estimate_comes_first_and_says_what_it_is_of(toy, monkeypatch):
    text = shown(toy, monkeypatch)
    first, exact = text.index("estimate from 20 of 54 documents"), text.index("training documents, ")
    assert first < text.index("estimate from 20 of 36 documents") < exact < text.index("\npretrain: 54", exact)
    assert "with a vocabulary learned from them alone" in " ".join(text[:exact].split())
    assert text.count("95 % intervals of the drawing: ") == text[:exact].count("95 % intervals of the drawing: ") == 2
    assert text.index("held out 10 documents: ") > text.rindex("predicted peak"), "the search comes last"


def test_the_table_is_that_of_the_drawn_documents_repeated(toy):
    for found, population in zip(estimates_of(load_recipe(toy, ["plan.strategy=bucket"])), (54, 36), strict=True):
        lengths = found.table.lengths
        assert (found.num, found.population, len(lengths)) == (20, population, population)
        assert np.array_equal(lengths, np.resize(lengths[:20], population))
        again = compare(lengths, found.table.settings, seed=0, max_tokens=64)
        assert [row.pad_share for row in again] == [row.pad_share for row in found.table.rows]


def test_a_stage_of_two_kinds_draws_the_same_share_of_both(toy, monkeypatch):
    stages = 'stages=[{"name": "all", "train": {"max_epochs": 1}}]'
    (found,) = estimates_of(load_recipe(toy, [stages]))
    assert (found.num, found.population) == (20 + round(20 / 54 * 36), 90)
    monkeypatch.setattr(module, "MOST_PLANNED", 50)
    (found,) = estimates_of(load_recipe(toy, [stages]))
    assert len(found.table.lengths) == 50
    assert "repeated to 50" in " ".join(found.lines())


def test_nothing_is_drawn_where_lengths_are_soon_known(toy, monkeypatch):
    recipe = load_recipe(toy, [])
    assert estimates_of(load_recipe(toy, ["plan.cross_documents=true"])) == []
    monkeypatch.setattr(corpus, "MOST", 54)
    assert estimates_of(recipe) == [], "all documents would be drawn"
    monkeypatch.setattr(corpus, "MOST", 20)
    assert len(estimates_of(recipe)) == 2
    shown(toy, monkeypatch)
    assert estimates_of(recipe) == [], "the cache has all documents"


def test_the_spread_is_that_of_samples_drawn_anew():
    rng, settings = np.random.default_rng(0), PlanSettings(tokens_per_step=2000)
    every = np.clip(rng.lognormal(3.5, 0.8, 20_000), 1, 400).astype(np.int64)
    samples = [rng.choice(every.size, 300, replace=False) for _ in range(20)]
    shares = [
        next(row.pad_share for row in compare(every, settings, seed=0, seq_ids=ids) if row.name == "dynamic")
        for ids in samples
    ]
    spread = padding_spread(every, settings, seed=0, seq_ids=samples[0])
    assert np.std(shares) / 2 < spread["dynamic"] < np.std(shares) * 2
    assert spread["pack"] == 0
