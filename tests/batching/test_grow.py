"""Updates grow with the epochs as the recipe says; schedules count the right steps, and a resumed run is the same."""

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.plans import contents
from tests.helpers.toy import LOOP, rows, run, same_tensors, weights, write_toy
from unpad.batching.plan import plan
from unpad.errors import Interrupted, PlanError, RecipeError, ResumeError
from unpad.recipes.file import load_recipe
from unpad.recipes.recipe import Recipe
from unpad.recipes.training import OptimSettings, PlanSettings
from unpad.training.optim import Epochs, Schedule

GROW = "plan.grow={3: 400, 4: 800}"
LENGTHS = np.random.default_rng(0).integers(1, 60, 200)


def one_stage(folder: Path, **sections: Any) -> Path:
    """Five epochs of texts; some five steps each while nothing grows."""
    fields = {"stages": [], "data": {"chat": None}, "train": {"threads": 1, "max_epochs": 5}, **sections}
    return write_toy(folder, **fields)


def assert_resumed(recipe: Path, folder: Path, growth: list[str], stops: tuple[int, ...]) -> None:
    """A run that is stopped at three steps and resumed has the bytes of `calm` in the folder."""
    real, count = LOOP.train_step, 0

    def step(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count in stops:
            signal.raise_signal(signal.SIGINT)
        return real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LOOP, "train_step", step)
        for attempt in range(3):
            with pytest.raises(Interrupted):
                run(recipe, folder / "run", *([] if attempt else growth), resume=attempt > 0)
        run(recipe, folder / "run", resume=True)
    assert (folder / "run/metrics.jsonl").read_bytes() == (folder / "calm/metrics.jsonl").read_bytes()
    assert same_tensors(weights(folder / "run"), weights(folder / "calm"))


@pytest.mark.promise("plan.grow")
@pytest.mark.parametrize("strategy", ["pack", "rows", "budget", "bucket", "dynamic", "fixed"])
def test_an_epoch_is_that_of_the_size_that_holds_in_it(strategy):
    base = {"strategy": strategy, "tokens_per_step": 200, "tokens_per_micro": 80, "row_tokens": 64, "batch_size": 2}
    growing = PlanSettings(**base, grow={3: 400, 6: 800})
    for epoch, tokens in enumerate([200, 200, 400, 400, 400, 800, 800]):
        wanted = PlanSettings(**{**base, "tokens_per_step": tokens})
        found = [contents(plan(LENGTHS, one, seed=0, epoch=epoch)) for one in (growing, wanted)]
        assert found[0] == found[1], epoch


@pytest.mark.promise("plan.grow")
@pytest.mark.parametrize("strategy", ["pack", "rows", "budget", "bucket", "dynamic", "fixed"])
def test_steps_grow_within_an_epoch_and_every_sequence_is_planned_once(strategy):
    base = {"strategy": strategy, "tokens_per_step": 200, "tokens_per_micro": 80, "row_tokens": 64, "batch_size": 2}
    made = plan(LENGTHS, PlanSettings(**base, grow={4: 400, 8: 800}, grow_per="step"), seed=0, epoch=0)
    steps = [made.step(index) for index in range(made.num_steps)]
    assert sorted(i for step in steps for micro in step for i in micro.seq_ids.tolist()) == list(range(len(LENGTHS)))
    tokens = [sum(int((micro.stops - micro.starts).sum()) for micro in step) for step in steps]
    low, high = (0.5, 1.0) if strategy in ("pack", "rows") else (1.0, 1.6)  # up to the size, or until it is reached
    for sizes, size in ((tokens[:3], 200), (tokens[3:7], 400), (tokens[7:-1], 800)):
        assert sizes
        assert all(low * size <= found <= high * size for found in sizes)
    plain = plan(LENGTHS, PlanSettings(**base), seed=0, epoch=0)
    first = [[micro.seq_ids.tolist() for micro in plain.step(index)] for index in range(3)]
    assert [[micro.seq_ids.tolist() for micro in step] for step in steps[:3]] == first
    assert made.ledger.to_json() == plain.ledger.to_json()


def test_an_epoch_begins_with_the_size_of_its_first_step():
    growing = PlanSettings(tokens_per_step=200, grow={4: 400, 8: 800}, grow_per="step")
    for first_step, tokens in ((3, 400), (7, 800), (100, 800)):
        assert growing.parts(5, first_step)[0][1].tokens_per_step == tokens
    assert [(count, part.tokens_per_step) for count, part in growing.parts(0, 2)] == [(1, 200), (4, 400), (None, 800)]
    late = contents(plan(LENGTHS, growing, seed=0, epoch=1, first_step=7))
    assert late == contents(plan(LENGTHS, PlanSettings(tokens_per_step=800), seed=0, epoch=1))


def test_a_short_last_step_is_that_of_the_size_in_which_the_epoch_ends():
    growing = PlanSettings(tokens_per_step=200, grow={4: 400}, grow_per="step", drop_last=True)
    made = plan(np.full(97, 10), growing, seed=0, epoch=0)
    assert made.num_steps == 3  # 3 * 200, and 370 that would be a full step of 200
    assert made.ledger.tokens("dropped") == 370
    with pytest.raises(ValueError, match="give one of them"):
        PlanSettings(strategy="dynamic", batches_per_step=2, grow={4: 400})


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 20)), min_size=1, max_size=4), st.integers(0, 20))
@settings(deadline=None, max_examples=60)
def test_epochs_and_updates_are_counted_as_by_hand(parts, epoch):
    lengths = [steps for num, steps in parts for _ in range(num)]  # of every epoch; the last goes on
    first = np.cumsum([0, *(num for num, _ in parts[:-1])])
    epochs = Epochs(tuple(first.tolist()), tuple(steps for _, steps in parts))
    lengths += [parts[-1][1]] * 21
    assert epochs.steps_before(epoch) == sum(lengths[:epoch])
    for within in range(lengths[epoch]):
        at = epochs.epochs_before(sum(lengths[:epoch]) + within)
        assert int(at) == epoch
        assert at == pytest.approx(epoch + within / lengths[epoch])


def test_rates_by_epoch_and_by_decay_follow_epochs_of_any_length():
    epochs, epoch_of = Epochs((0, 1), (4, 2)), [0, 0, 0, 0, 1, 1, 2, 2]

    def rates(settings: OptimSettings) -> list[float]:
        schedule = Schedule(settings, epochs, 8)
        return [schedule.rate(step, epoch) for step, epoch in enumerate(epoch_of)]

    by_epoch = OptimSettings(lr=1.0, schedule="exponential", decay=0.5, decay_epochs=1, per="epoch")
    assert rates(by_epoch) == [1] * 4 + [0.5] * 2 + [0.25] * 2
    found = rates(by_epoch.model_copy(update={"per": "update"}))
    assert found == pytest.approx(
        [0.5 ** (step / 4) for step in range(4)] + [0.5 ** (1 + step / 2) for step in range(4)]
    )
    cosine = OptimSettings(lr=1.0, schedule="cosine", warmup=0, floor=0.5, per="epoch")
    assert rates(cosine) == [1] * 4 + [0.75] * 2 + [0.5] * 2


@pytest.mark.promise("plan.grow")
@pytest.mark.slow
def test_a_run_grows_by_steps_and_a_resumed_one_is_the_uninterrupted_one(tmp_path):
    recipe = one_stage(tmp_path, optim={"lr": 0.01, "warmup": 0, "schedule": "cosine", "floor": 0.1})
    growth = ["plan.grow={8: 400, 11: 800}", "plan.grow_per=step"]
    run(recipe, tmp_path / "calm", *growth)
    found = rows(tmp_path / "calm", "train")
    per_epoch = [[row["tokens"] for row in found if row["epoch"] == epoch] for epoch in range(1, 6)]
    assert all(100 < tokens <= 200 for row in found[:5] if (tokens := row["tokens"]))
    assert 200 < found[7]["tokens"] <= 400 < found[10]["tokens"] <= 800
    assert found[7]["epoch"] == found[6]["epoch"], "the size changes within an epoch"
    assert len({sum(tokens) for tokens in per_epoch}) == 1, "every epoch has all tokens"
    assert len(per_epoch[0]) > len(per_epoch[-1])
    assert found[0]["lr"] == 0.01
    assert found[-1]["lr"] == pytest.approx(0.001), "the schedule ends with the run"
    assert found[-2]["lr"] > 0.001
    assert_resumed(recipe, tmp_path, growth, (3, 8, 12))  # before, at and after a change of size


@pytest.mark.promise("plan.grow")
@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    recipe = one_stage(tmp_path)
    run(recipe, tmp_path / "calm", GROW, "optim.per=epoch")
    found = rows(tmp_path / "calm", "train")
    first, rates = [row["epoch"] for row in found], {(row["epoch"], row["lr"]) for row in found}
    sizes = [max(row["tokens"] for row in found if row["epoch"] == epoch) for epoch in range(1, 6)]
    assert sizes[1] <= 200 < sizes[2] <= 400 < min(sizes[3:]) <= max(sizes[3:]) <= 800
    assert [rate for _, rate in sorted(rates)] == pytest.approx([0.01, 0.01, 0.007525, 0.002575, 0.0001])
    stops = (2, first.index(3) + 1, first.index(4) + 1)  # within the first epoch, and where two sizes begin
    assert_resumed(recipe, tmp_path, [GROW, "optim.per=epoch"], stops)
    with pytest.raises(ResumeError, match=r"plan\.grow\.3: 400 in the run, 500 now"):
        run(recipe, tmp_path / "run", "plan.grow={3: 500, 4: 800}", resume=True)


def test_epochs_are_read_as_numbers_wherever_they_stand(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("plan:\n  grow: {3: 400, '6': 800}\n", encoding="utf-8")
    wanted = {3: 400, 6: 800}
    assert load_recipe(str(file)).plan.grow == wanted
    assert load_recipe("zh_chat", ["plan.grow={3: 400, 6: 800}"]).plan.grow == wanted
    assert load_recipe("zh_chat", ["plan.grow.3=400", "plan.grow.6=800"]).plan.grow == wanted
    saved = tmp_path / "saved.yaml"
    saved.write_text(load_recipe(str(file)).to_yaml(), encoding="utf-8")
    assert load_recipe(str(saved)).plan.grow == wanted
    staged = Recipe(**yaml.safe_load("stages: [{name: a, plan: {grow: {2: 50}}}]"))
    assert staged.for_stage(staged.stages[0]).plan.grow == {2: 50}


@pytest.mark.parametrize("value", ["{1: 400}", "{3: 0}", "{x: 400}", "{3: many}", "[400]"])
def test_what_is_no_growth_is_refused_by_its_field(value):
    with pytest.raises(RecipeError) as caught:
        load_recipe("zh_chat", [f"plan.grow={value}"])
    assert "plan.grow" in caught.value.where


def test_growth_past_the_data_is_refused_before_training(tmp_path):
    recipe = one_stage(tmp_path)
    with pytest.raises(PlanError, match="no step from epoch 3 on"):
        run(recipe, tmp_path / "run", "plan.grow={3: 1000000}", "plan.drop_last=true")
    run(recipe, tmp_path / "run", "plan.grow={9: 1000000}", "plan.drop_last=true", "train.max_epochs=1")  # never comes
