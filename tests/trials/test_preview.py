"""`unpad plan`: its table is a recount of the plans that training would run, and its ledger adds up to the token."""

import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import unpad.trials.preview as module
from tests.helpers.toy import write_toy
from unpad.batching.plan import Plan
from unpad.errors import OutOfMemoryError, RecipeError
from unpad.machine import Load, cores
from unpad.recipes.file import load_recipe
from unpad.recipes.training import strategy_names
from unpad.training import auto_size
from unpad.training.auto_size import StageMemory
from unpad.training.rehearsal import StepCost
from unpad.training.setup import Setup, prepare_setup
from unpad.training.stage import StageSetup, epoch_plan, num_epochs, run_length, stage_epochs
from unpad.trials.preview import Preview, measured_lines, planned, preview

pytestmark = pytest.mark.slow

ROWS = ["plan.row_tokens=64"]


def told(recipe: str, overrides: list[str]) -> tuple[Preview, str]:
    """A preview, and what it shows."""
    out = StringIO()
    return preview(recipe, overrides, console=Console(file=out, width=200)), out.getvalue()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Preview, str, str]:
    recipe = str(write_toy(tmp_path_factory.mktemp("preview")))
    return *told(recipe, ROWS), recipe


def setup_of(recipe: str, *overrides: str) -> Setup:
    return prepare_setup(load_recipe(recipe, [*ROWS, *overrides]), Path(), None)


@pytest.mark.promise("plan.table")
def test_every_number_equals_a_recount_over_the_plans_of_training(made):
    result, _, recipe = made
    for name in strategy_names():
        setup = setup_of(recipe, f"plan.strategy={name}")
        real = computed = 0
        for stage, part in zip(setup.stages, result.stages, strict=True):
            plan = epoch_plan(stage, 0)
            micros = [micro for index in range(plan.num_steps) for micro in plan.step(index)]
            tokens = [int((m.stops - m.starts).sum()) for m in micros]
            cells = [m.pad_to * len(m.starts) or m.fill_to or t for m, t in zip(micros, tokens, strict=True)]
            row = next(row for row in part.rows if row.name == name)
            assert (row.steps, row.micros) == (plan.num_steps, len(micros))
            assert (row.real_tokens, row.padded_tokens) == (sum(tokens), sum(cells))
            assert row.pad_share == pytest.approx(1 - sum(tokens) / sum(cells))
            real, computed = real + sum(tokens), computed + sum(cells)
        whole = next(row for row in result.to_json()["strategies"] if row["name"] == name)
        assert whole["pad_share"] == pytest.approx(1 - real / computed)


def test_the_time_of_a_stage_is_that_of_the_tokens_of_all_its_epochs(made):
    for stage, epochs in zip(made[0].stages, (2, 3), strict=True):
        for row in stage.rows:
            timed = replace(
                stage,
                trials={row.name: StepCost(tokens=100, seconds=2.5, peak_bytes=0, base_bytes=0)},
            )
            assert stage.epochs == epochs
            assert timed.estimated_seconds(row) == pytest.approx(0.025 * row.padded_tokens * epochs)


def test_ragged_plans_have_no_padding_and_padded_ones_have(made):
    shares = {row["name"]: row["pad_share"] for row in made[0].to_json()["strategies"]}
    assert shares["pack"] == 0
    assert shares["fixed"] > shares["dynamic"] > shares["bucket"] > 0
    assert shares["budget"] > 0


def test_the_ledger_adds_up_to_the_token(made):
    result, _, recipe = made
    setup = setup_of(recipe)
    positions = setup.data.table.positions
    values = result.to_json()
    total = 0
    for stage, part in zip(setup.stages, values["stages"], strict=True):
        ids = stage.train_ids
        for row in part["strategies"]:
            ledger = row["ledger"]
            columns = [sum(ledger[name].values()) for name in ("trained", "context", "truncated", "dropped")]
            assert sum(columns) == ledger["total"] == int(positions[ids].sum())
        everything = setup.data.count_targets(ids, np.zeros_like(ids), positions[ids])
        assert sum(part["ledger"]["trained"].values()) == int(everything.sum())
        total += int(positions[ids].sum())
    assert values["ledger"]["total"] == total
    assert values["corpus"]["tokens"] == int(setup.data.table.positions.sum())


@pytest.mark.promise("batch.too-long")
def test_what_is_cut_is_named_with_its_place(tmp_path):
    recipe = str(write_toy(tmp_path / "toy"))
    result, text = told(recipe, ["plan.max_tokens=20", "plan.overflow=drop", "plan.row_tokens=20"])
    assert result.to_json()["ledger"]["dropped"]["too_long"] > 0
    assert "too_long" in text
    assert "texts.jsonl:" in text
    cut = preview(recipe, ["plan.max_tokens=20", "plan.overflow=truncate_right", "plan.row_tokens=20"]).to_json()
    assert sum(cut["ledger"]["truncated"].values()) > 0


@pytest.mark.promise("run.min-steps")
def test_a_preview_has_the_epochs_and_steps_that_training_has(made):
    result, text, recipe = made
    length = run_length(result.setup.stages).last(0, 0).step
    lines = re.findall(r"^(\w+): about ([\d,]+) steps in (\d) epochs$", text, re.M)
    assert [(name, int(epochs)) for name, _, epochs in lines] == [("pretrain", 2), ("tune", 3)]
    assert abs(sum(int(steps) for _, steps, _ in lines) - length) <= 3
    stage = setup_of(recipe, "train.min_steps=100").stages[0]
    assert planned(stage).epochs == num_epochs(stage, stage_epochs(stage)) == 17


@pytest.mark.promise("cli.long-work")
def test_the_table_of_padding_is_there_before_anything_is_tried(tmp_path, monkeypatch):
    seen, out = list[str](), StringIO()

    def tried(setup: Setup, recipe: object, made: object) -> StepCost:
        seen.append(out.getvalue())
        return StepCost(1, 2.0, 3 << 30, 0)

    monkeypatch.setattr("unpad.trials.preview._try", tried)
    monkeypatch.setattr(module, "free_memory", lambda device: 10 << 30)
    preview(str(write_toy(tmp_path / "toy")), ROWS, console=Console(file=out, width=80))
    assert "padding" in seen[0]
    assert out.getvalue().index("held out 10 documents: ") > out.getvalue().rindex("predicted peak"), (
        "last, as it is slow"
    )
    assert [text.count("3.0 GiB") for text in seen] == list(range(len(seen)))
    monkeypatch.setattr(module, "TRIALS_SECONDS", 0.0)
    few, text = told(str(write_toy(tmp_path / "few", stages=[], train={"max_epochs": 1})), ROWS)
    rows = {row["name"]: row for row in few.to_json()["stages"][0]["strategies"]}
    assert [name for name, row in rows.items() if row["seconds"]] == ["pack"] == list(few.stages[0].trials)
    assert "not tried, as that took 0 s: rows, budget, bucket, dynamic, fixed" in text


def test_a_row_too_short_is_refused_in_its_own_line(tmp_path):
    result, text = told(str(write_toy(tmp_path / "toy")), ["plan.row_tokens=4"])
    rows = {row["name"]: row for row in result.to_json()["strategies"]}
    assert "does not fit a row of 4" in rows["rows"]["refused"]
    assert rows["pack"]["pad_share"] == 0
    assert "refused" in text


@pytest.mark.promise("install.packages")
@pytest.mark.parametrize("name", ["plan.png", "plan.pdf", "plan"])
def test_a_picture_of_another_format_is_refused_before_anything_is_read(tmp_path, name):
    with pytest.raises(RecipeError, match="is an SVG") as caught:
        preview("no recipe of this name", [], tmp_path / name)
    assert (caught.value.where, "end in .svg" in caught.value.fix) == (str(tmp_path / name), True)


@pytest.mark.promise("plan.batch-size")
def test_memory_advice_is_the_micro_batch_that_fits_what_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(auto_size, "process_bytes", lambda peak: peak)
    recipe = str(write_toy(tmp_path / "toy"))

    def advice(free: int) -> str:
        monkeypatch.setattr(module, "free_memory", lambda device: free)
        return " ".join(told(recipe, ROWS)[1].split())

    assert "up to about a whole update, 200 tokens in 80% of 10.0 GiB" in advice(10 << 30)
    found = re.search(
        r"up to about (\d+) tokens in 80% .* predicted peak [\d.]+ GiB, measured [\d.]+ GiB", advice(740_000)
    )
    setup = setup_of(recipe)
    memory = StageMemory.measured(setup.stages[0], setup.model, setup.device, setup.precision)
    assert 64 <= int(found[1]) < 200
    assert memory.needed_with(int(found[1])) <= 0.8 * 740_000


@pytest.mark.promise("plan.does-not-fit")
def test_a_strategy_that_does_not_fit_is_said_and_only_that_of_the_recipe_is_an_error(tmp_path, monkeypatch):
    padded = ["fixed"]

    def tried(setup: Setup, stage: StageSetup, made: Plan) -> StepCost:
        if made.strategy in padded:
            raise OutOfMemoryError("a micro-batch does not fit", where="here", fix="a smaller one")
        return StepCost(100, 1.0, 2 << 20, 1 << 20)

    monkeypatch.setattr(module, "_try", tried)
    recipe = str(write_toy(tmp_path, stages=[], train={"max_epochs": 1}))
    result, text = told(recipe, ROWS)
    assert re.search(r"^fixed +does not fit into memory$", text, re.M)
    rows = {row["name"]: row for row in result.to_json()["stages"][0]["strategies"]}
    assert (rows["fixed"]["peak_bytes"], rows["fixed"]["seconds"]) == (None, None)
    assert rows["pack"]["peak_bytes"] == 2 << 20
    padded.append("pack")
    with pytest.raises(OutOfMemoryError):
        preview(recipe, ROWS)


def test_times_that_were_measured_beside_other_programs_say_so() -> None:
    idle, busy = Load(own=cores(), others=0.4 * cores()), Load(own=0.0, others=0.6 * cores())
    assert measured_lines(idle) == measured_lines(None)
    assert f"while other programs kept {busy.others:.1f} of {cores()} cores busy" in " ".join(measured_lines(busy))
