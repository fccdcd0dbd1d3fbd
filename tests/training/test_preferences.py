"""Whole runs that learn from pairs of replies."""

import json
import math
import shutil
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.helpers.pairs import rows, write_pairs
from tests.helpers.toy import quiet, run, write_toy
from unpad.errors import CheckpointError, RecipeError, SourceError, Stopped
from unpad.evaluation.metrics import Metric
from unpad.evaluation.run import evaluate_run
from unpad.proof.recipe import prove_recipe
from unpad.run.kept import REFERENCE, read_reference
from unpad.training.loop import train

STILL = {"dropout": 0.0, "embed_dropout": 0.0}


def write_rows(path: Path, made: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made), encoding="utf-8")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of conversations, `start`, and one that learned pairs from it, `tuned`."""
    folder = tmp_path_factory.mktemp("pairs")
    pairs = [{**row, "split": "test"} if i < 4 else row for i, row in enumerate(rows())]
    recipe = write_pairs(folder, pairs, model=STILL, train={"max_epochs": 6, "beta": 0.3}, optim={"lr": 3e-3})
    # The words of the pairs are in the vocabulary, as those of a large run would be.
    texts = [{"text": row["chosen"] + row["rejected"] + row["messages"][-1]["content"]} for row in pairs]
    write_rows(folder / "texts.jsonl", texts)
    data = {"text": str(folder / "texts.jsonl")}
    run(write_toy(folder / "chats", model=STILL, stages=[], data=data, train={"max_epochs": 2}), folder / "start")
    run(recipe, folder / "tuned", f"train.init_from={folder / 'start'}")
    return folder


def metrics_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


@pytest.mark.promise("pairs.reference")
def test_training_begins_at_the_reference_and_prefers_chosen_replies_in_the_end(place):
    steps, checks = metrics_of(place / "tuned", "train"), metrics_of(place / "tuned", "eval")
    first = steps[0]["values"]
    assert first["preference"] == pytest.approx(math.log(2), rel=1e-6)
    assert first["margin"] == pytest.approx(0, abs=1e-5)
    assert steps[0]["loss"] == first["nll"] == first["preference"]
    assert steps[0]["targets"] * 2 == steps[0]["sequences"]
    assert steps[0]["padded_tokens"] == steps[0]["tokens"]
    last = [row["values"] for row in steps if row["epoch"] == 6]
    assert mean(values["margin"] for values in last) > 0.5
    assert mean(values["accuracy"] for values in last) > 0.8
    assert set(checks[-1]["values"]) == {"accuracy", "margin"}
    assert checks[-1]["targets"] == round(0.2 * 36)
    log = (place / "tuned" / "log.jsonl").read_text(encoding="utf-8")
    assert "log-probabilities of 80 replies under the weights it starts from, computed once" in log


@pytest.mark.promise("pairs.reference")
def test_a_killed_run_resumes_with_equal_bits(place, cache, monkeypatch):
    start = f"train.init_from={place / 'start'}"
    recipe, halted = place / "toy.yaml", place / "halted"
    with pytest.raises(Stopped):
        train(str(recipe), halted, [start], console=quiet(), after_evaluation=lambda *_: True)
    assert "from the cache" in (halted / "log.jsonl").read_text(encoding="utf-8")
    monkeypatch.setattr("unpad.training.reference.log_probabilities_of_pairs", lambda *_: pytest.fail("computed again"))
    shutil.rmtree(cache / "references")
    assert len(metrics_of(halted, "train")) < len(metrics_of(place / "tuned", "train")) / 2
    run(recipe, halted, start, resume=True)
    assert (halted / "metrics.jsonl").read_bytes() == (place / "tuned" / "metrics.jsonl").read_bytes()


def test_a_run_without_its_reference_does_not_go_on(place):
    start, recipe, halted = f"train.init_from={place / 'start'}", place / "toy.yaml", place / "no_reference"
    run(recipe, halted, start, "train.max_steps=3")
    (halted / REFERENCE).write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=REFERENCE):
        run(recipe, halted, start, "train.max_steps=5", resume=True)


def shown(found: dict[str, Metric]) -> dict[str, float]:
    return {name: metric.value for name, metric in found.items()}


@pytest.mark.promise("pairs.eval")
def test_eval_has_accuracy_and_margin_with_intervals(place):
    held, _ = evaluate_run(str(place / "tuned"), part="valid")
    best = next(row for row in reversed(metrics_of(place / "tuned", "eval")) if row["best"])
    assert 0 <= held.pop("simple_accuracy").value <= 1
    assert shown(held) == pytest.approx(
        {"loss": best["loss"], "accuracy": best["values"]["accuracy"], "margin": best["values"]["margin"]}, rel=1e-6
    )
    assert held["margin"].low < held["margin"].value < held["margin"].high
    assert held["accuracy"].num == best["targets"]
    test, _ = evaluate_run(str(place / "tuned"), part="test")
    assert test["accuracy"].num == 4


@pytest.mark.promise("pairs.eval")
def test_new_pairs_are_compared_with_the_weights_that_training_started_from(place):
    own, _ = evaluate_run(str(place / "tuned"), part="test")
    new = place / "new.jsonl"
    write_rows(new, rows()[:4])
    found, _ = evaluate_run(str(place / "tuned"), data=new)
    assert shown(found) == pytest.approx(shown(own), rel=1e-4)
    shutil.move(place / "start", place / "away")
    try:
        with pytest.raises(SourceError, match="not at hand"):
            evaluate_run(str(place / "tuned"), data=new)
    finally:
        shutil.move(place / "away", place / "start")


@pytest.mark.promise("pairs.reference")
def test_a_stage_of_pairs_starts_from_the_weights_of_the_stage_before(place):
    stages = [
        {"name": "tune", "use": ["chat"], "train": {"max_epochs": 1}},
        {"name": "prefer", "use": ["pairs"], "train": {"max_epochs": 1, "beta": 0.5}},
    ]
    data = {"pairs": str(place / "pairs.jsonl"), "text": []}
    recipe = write_toy(place / "staged", model=STILL, data=data, stages=stages)
    run(recipe, place / "two_stages")
    steps = [row for row in metrics_of(place / "two_stages", "train") if row["stage"] == "prefer"]
    assert steps[0]["values"]["preference"] == pytest.approx(math.log(2), rel=1e-6)
    assert list(metrics_of(place / "two_stages", "train")[0]["values"]) == ["cross_entropy", "nll"]
    assert read_reference(place / "two_stages")[0].stage == "prefer"
    new = place / "new.jsonl"
    write_rows(new, rows()[:4])
    found, _ = evaluate_run(str(place / "two_stages"), data=new)
    assert found["accuracy"].num == 4


@pytest.mark.nightly
@pytest.mark.promise("pairs.eval")
@pytest.mark.slow  # imports peft
def test_adapters_learn_pairs_against_their_base(place, cache):
    start, recipe, folder = f"train.init_from={place / 'start'}", place / "toy.yaml", place / "adapted"
    tuning = [start, "lora.r=3", "train.max_epochs=2"]
    with pytest.raises(Stopped):
        train(str(recipe), folder, tuning, console=quiet(), after_evaluation=lambda *_: True)
    shutil.rmtree(cache / "references", ignore_errors=True)
    run(recipe, folder, *tuning, resume=True)
    run(recipe, place / "adapted_at_once", *tuning)
    assert (folder / "metrics.jsonl").read_bytes() == (place / "adapted_at_once" / "metrics.jsonl").read_bytes()
    steps = metrics_of(folder, "train")
    assert steps[0]["values"]["preference"] == pytest.approx(math.log(2), rel=1e-6)
    assert steps[-1]["values"]["margin"] > 0.01
    own, _ = evaluate_run(str(folder), part="test")
    new = place / "new.jsonl"
    write_rows(new, rows()[:4])
    found, _ = evaluate_run(str(folder), data=new)
    assert shown(found) == pytest.approx(shown(own), rel=1e-4)
    certificate = prove_recipe(str(recipe), tuning)
    assert certificate.passed, [line.name for line in certificate.lines if line.passed is False]


@pytest.mark.promise("pairs.reference")
def test_without_learned_weights_to_start_from_it_is_refused(place):
    with pytest.raises(RecipeError, match="random"):
        run(place / "toy.yaml", place / "random")
    assert not (place / "random").exists()


def test_replies_beyond_the_context_are_refused_or_dropped_with_their_pair(place):
    start, recipe = f"train.init_from={place / 'start'}", place / "toy.yaml"
    with pytest.raises(RecipeError, match="never cut"):
        run(recipe, place / "cut", start, "plan.max_tokens=30")
    run(recipe, place / "dropped", start, "plan.max_tokens=30", "plan.overflow=drop", "train.max_steps=2")
    log = (place / "dropped" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    (stage,) = [row for row in map(json.loads, log) if row["kind"] == "stage"]
    assert stage["ledger"]["dropped"]["too_long"] > 0


def test_a_source_may_be_drawn_in_part_with_both_replies_of_each_pair(place):
    start, recipe = f"train.init_from={place / 'start'}", place / "toy.yaml"
    sources = f"data.pairs=[{{path: {place / 'pairs.jsonl'}, weight: 1.5}}]"
    run(recipe, place / "drawn", start, sources, "train.max_epochs=1")
    steps = metrics_of(place / "drawn", "train")
    assert sum(row["targets"] for row in steps) * 2 == sum(row["sequences"] for row in steps)
    assert 30 < sum(row["targets"] for row in steps) < 50
