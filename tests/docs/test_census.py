"""The census page is made of its saved results, and those are of every class."""

import json
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def census(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("census")


@pytest.mark.promise("hf.census")
def test_the_page_is_that_of_the_saved_results(census):
    results = json.loads(census.SAVED.read_text(encoding="utf-8"))
    assert census.PAGE.read_text(encoding="utf-8") == census.page(results)
    for number in results["versions"].values():
        assert number in census.page(results).partition("## Summary")[0]


@pytest.mark.promise("hf.census")
def test_every_class_has_a_verdict_of_every_way_or_a_reason(census):
    results = json.loads(census.SAVED.read_text(encoding="utf-8"))
    if results["versions"]["transformers"] == version("transformers"):
        assert sorted(results["classes"]) == census.causal_types()
    made = {kind: found for kind, found in results["classes"].items() if "stopped" not in found}
    assert len(made) >= 150
    assert [kind for kind, found in made.items() if list(found["ways"]) != census.WAYS] == []
    assert all(found["stopped"] for kind, found in results["classes"].items() if kind not in made)
