"""A resumed run takes the changes it can, refuses the others by name, and survives a damaged checkpoint."""

import json
import math
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.toy import LOOP, events, rows, run, same_tensors, scripted_heldout, weights, write_toy
from unpad.batching.plan import Plan, plan
from unpad.errors import CheckpointError, Interrupted, RecipeError, ResumeError, UnpadError
from unpad.recipes.file import load_recipe
from unpad.run import checkpoint
from unpad.run.folder import COMMAND, RECIPE
from unpad.training import progress
from unpad.training import stage as stages
from unpad.training.progress import resumed_recipe


def one_stage(folder: Path, **sections: object) -> Path:
    """Six steps an epoch at a constant rate."""
    return write_toy(folder, **{"stages": [], "optim": {"lr": 0.01, "schedule": "constant"}, **sections})


def damage(path: Path) -> None:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "limits", [("train.max_steps=7", "train.max_steps=14"), ("train.max_epochs=1", "train.max_epochs=2")]
)
def test_a_finished_run_goes_on_when_its_end_is_moved(tmp_path, limits):
    recipe = one_stage(tmp_path)
    short, long = limits
    run(recipe, tmp_path / "long", long)
    whole = run(recipe, tmp_path / "run", short)
    first = rows(tmp_path / "run", "train")
    resumed = run(recipe, tmp_path / "run", long, resume=True)
    covered = f"times are of this process, which took steps {whole.step + 1} to {resumed.step} of the run"
    assert resumed.time_lines()[-1] == covered
    assert covered[:5] not in "\n".join(whole.time_lines())
    page = (tmp_path / "run/report.html").read_text()
    assert f"process that took steps {whole.step + 1} to {resumed.step} of" in page
    assert rows(tmp_path / "run", "train")[: len(first)] == first
    assert rows(tmp_path / "run", "train") == rows(tmp_path / "long", "train")
    assert same_tensors(weights(tmp_path / "run"), weights(tmp_path / "long"))
    [event] = events(tmp_path / "run", "resumed")
    key, value = long.split("=")
    assert event["message"].endswith(f"{key} is {value}, was {short.split('=')[1]}")  # a constant rate stays


def test_a_moved_end_recomputes_the_schedule(tmp_path):
    recipe = one_stage(tmp_path, optim={"lr": 0.01, "warmup": 0, "schedule": "cosine"})
    run(recipe, tmp_path / "run", "train.max_steps=6")
    run(recipe, tmp_path / "run", "train.max_steps=12", resume=True)
    rates = [row["lr"] for row in rows(tmp_path / "run", "train")]
    assert rates[5] == rates[11] == pytest.approx(0.0001)
    assert rates[6] == pytest.approx(0.0001 + 0.0099 * (1 + math.cos(6 / 11 * math.pi)) / 2)
    assert "train.max_steps is 12, was 6: schedule recomputed" in events(tmp_path / "run", "resumed")[0]["message"]
    run(recipe, tmp_path / "run", "train.max_steps=12", "checkpoint.every_seconds=600", resume=True)
    assert "checkpoint.every_seconds is 600.0, was not set" in events(tmp_path / "run", "resumed")[-1]["message"]


def test_a_run_of_an_earlier_version_goes_on_as_it_was(tmp_path):
    """It kept the packaged sources beside a given one, and let stages shadow a field of its command."""
    recipe = one_stage(tmp_path)
    run(recipe, tmp_path / "run", "train.max_steps=6")
    saved = yaml.safe_load((tmp_path / "run/recipe.yaml").read_text(encoding="utf-8"))
    own = saved["data"]["chat"][0]["path"]
    mine = tmp_path / "staged.yaml"
    values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    values["data"]["chat"] = ["unpad:examples/zh/chat.jsonl"]
    values["stages"] = [{"name": "all", "train": {"weights": "best"}}]
    mine.write_text(yaml.safe_dump(values), encoding="utf-8")
    saved["data"]["chat"] = [{**saved["data"]["chat"][0], "path": "unpad:examples/zh/chat.jsonl"}]
    saved["stages"] = [{"name": "all", "train": {"weights": "best"}}]
    (tmp_path / "run/recipe.yaml").write_text(yaml.safe_dump(saved), encoding="utf-8")
    text = saved["data"]["text"][0]["path"]
    given = ["train.max_steps=6", f"data.text={text}", "train.weights=best"]
    (tmp_path / "run" / COMMAND).write_text(json.dumps({"recipe": str(mine), "overrides": given}), encoding="utf-8")
    together, settings, _ = resumed_recipe(str(mine), ["train.max_steps=7"], tmp_path / "run")
    assert settings.data.chat[0].path == "unpad:examples/zh/chat.jsonl"
    assert together == [*given[1:], "train.max_steps=7"]
    with pytest.raises(ResumeError, match=r"data\.chat"):
        resumed_recipe(str(mine), [f"data.chat={own}"], tmp_path / "run")


def test_a_run_that_ended_within_its_first_stage_goes_on_there(tmp_path):
    recipe = write_toy(tmp_path, optim={"lr": 0.01, "schedule": "constant"})
    run(recipe, tmp_path / "calm")
    run(recipe, tmp_path / "run", "train.max_steps=8")
    assert [row["stage"] for row in rows(tmp_path / "run", "train")] == ["pretrain"] * 8
    run(recipe, tmp_path / "run", "train.max_steps=1000", resume=True)
    assert rows(tmp_path / "run", "train") == rows(tmp_path / "calm", "train")
    assert same_tensors(weights(tmp_path / "run"), weights(tmp_path / "calm"))


def test_without_held_out_data_the_newest_weights_are_the_best(tmp_path):
    recipe = one_stage(tmp_path, data={"holdout": 0})
    run(recipe, tmp_path / "long", "train.max_epochs=2")
    run(recipe, tmp_path / "run", "train.max_epochs=1")
    before = weights(tmp_path / "run")
    run(recipe, tmp_path / "run", "train.max_epochs=2", resume=True)
    assert same_tensors(weights(tmp_path / "run"), weights(tmp_path / "long"))
    assert not same_tensors(weights(tmp_path / "run"), before)


def test_logging_evaluation_and_checkpoint_fields_may_change(tmp_path):
    recipe = one_stage(tmp_path)
    run(recipe, tmp_path / "run", "train.max_steps=6")
    more = ["train.max_steps=12", "train.log_every=1", "train.eval_every=2", "checkpoint.every=1", "checkpoint.keep=5"]
    run(recipe, tmp_path / "run", *more, resume=True)
    assert [row["step"] for row in rows(tmp_path / "run", "eval")] == [6, 8, 10, 12]
    assert len(list((tmp_path / "run/checkpoints").glob("step-*"))) == 5
    run(recipe, tmp_path / "run", "train.max_steps=13", resume=True)  # what an earlier resume changed still holds
    assert [row["step"] for row in rows(tmp_path / "run", "eval")][-1] == 13


@pytest.mark.promise("run.resumed")
@pytest.mark.parametrize(
    ("change", "old"),
    [
        ("optim.lr=0.02", "0.01"), ("model.width=32", "16"), ("train.seed=1", "0"), ("precision=bf16", "'fp32'"),
        ("data.holdout=0.2", "0.1"), ("plan.tokens_per_step=100", "200"), ("train.patience=3", "None"),
    ],
)  # fmt: skip
def test_any_other_change_is_refused_by_key_with_both_values(tmp_path, change, old):
    recipe = one_stage(tmp_path)
    run(recipe, tmp_path / "run", "train.max_steps=2")
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    key, value = change.split("=")
    with pytest.raises(ResumeError, match=f"{key}: {old} in the run, '?{value}'? now") as caught:
        run(recipe, tmp_path / "run", change, resume=True)
    assert caught.value.exit_code == 9
    run(recipe, tmp_path / "run", resume=True)  # the directory is as it was
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_a_run_whose_recipe_lacks_a_newer_field_of_the_model_goes_on(tmp_path):
    recipe = one_stage(tmp_path)
    run(recipe, tmp_path / "run", "train.max_steps=2")
    path = tmp_path / "run" / "recipe.yaml"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    assert sum(line.startswith("  tied:") for line in lines) == 1
    path.write_text("".join(line for line in lines if not line.startswith("  tied:")), encoding="utf-8")
    run(recipe, tmp_path / "run", "train.max_steps=3", resume=True)
    assert len(rows(tmp_path / "run", "train")) == 3


def test_a_run_of_a_packaged_recipe_goes_on_as_it_began_when_the_recipe_is_another(tmp_path):
    values = load_recipe("events").model_dump(mode="json")
    values["events"]["scale"] = "standard"
    values["events"]["labels"]["censored"] = "exclude"
    values["model"] |= {"horizon": None, "last_values": None}
    (tmp_path / RECIPE).write_text(yaml.safe_dump(values), encoding="utf-8")
    (tmp_path / "run.json").write_text('{"recipe": "events", "overrides": []}', encoding="utf-8")
    _, settings, saved = resumed_recipe("events", ["train.max_epochs=90"], tmp_path)
    assert (settings.events, settings.model) == (saved.events, saved.model)
    assert settings.events.scale == "standard"
    assert settings.train.max_epochs == 90
    with pytest.raises(ResumeError, match=r"events\.scale: 'standard' in the run, 'rank' now"):
        resumed_recipe("events", ["events.scale=rank"], tmp_path)


@pytest.mark.parametrize("by_name", [True, False])
def test_what_the_data_decided_needs_no_repetition_to_go_on(tmp_path, by_name):
    recipe = load_recipe("events")
    values = recipe.model_dump(mode="json")
    values["model"] |= {"horizon": 365.0, "last_values": True}
    (tmp_path / RECIPE).write_text(yaml.safe_dump(values), encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    asked = "events" if by_name else str(tmp_path / "mine.yaml")
    (tmp_path / "run.json").write_text(json.dumps({"recipe": asked, "overrides": []}), encoding="utf-8")
    _, settings, saved = resumed_recipe(asked, [], tmp_path)
    assert settings.model == saved.model
    with pytest.raises(ResumeError, match=r"model\.horizon"):
        resumed_recipe(asked, ["model.horizon=30"], tmp_path)


def test_changed_data_is_refused_by_file(tmp_path):
    recipe = one_stage(tmp_path)
    run(recipe, tmp_path / "run", "train.max_steps=2")
    chats = tmp_path / "chats.jsonl"
    original = chats.read_text(encoding="utf-8")
    chats.write_text(original.replace("一座桥", "两座桥"), encoding="utf-8")
    with pytest.raises(ResumeError, match=r"the data changed .*chats\.jsonl") as caught:
        run(recipe, tmp_path / "run", resume=True)
    assert "texts.jsonl" not in str(caught.value)
    assert caught.value.exit_code == 9
    chats.write_text(original, encoding="utf-8")
    assert run(recipe, tmp_path / "run", resume=True).step == 2


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    recipe = write_toy(tmp_path, checkpoint={"every": 100})
    first = run(recipe, tmp_path / "run")
    kept = ("metrics.jsonl", "metrics.csv", "checkpoints/best/MANIFEST.json", "checkpoints/step-00000024/MANIFEST.json")
    before = [(tmp_path / "run" / name).read_bytes() for name in kept]
    for _ in range(2):
        again = run(recipe, tmp_path / "run", resume=True)
        assert (again.step, again.epochs, again.heldout_loss) == (first.step, first.epochs, first.heldout_loss)
    assert [(tmp_path / "run" / name).read_bytes() for name in kept] == before
    assert [event["step"] for event in events(tmp_path / "run", "resumed")] == [24, 24]


def test_resuming_a_run_that_ended_within_its_first_stage_keeps_its_best(tmp_path, monkeypatch):
    recipe = write_toy(tmp_path)
    monkeypatch.setattr(LOOP, "held_out", scripted_heldout([3.0, 5.0]))  # best at step 6 of 8
    run(recipe, tmp_path / "run", "train.max_steps=8")
    best = weights(tmp_path / "run", "best-pretrain")
    assert same_tensors(weights(tmp_path / "run"), best)
    run(recipe, tmp_path / "run", resume=True)
    assert same_tensors(weights(tmp_path / "run"), best)


def test_a_damaged_newest_checkpoint_is_passed_over_and_this_is_said(tmp_path):
    recipe = write_toy(tmp_path, optim={"lr": 0.01, "schedule": "constant"})
    run(recipe, tmp_path / "calm")
    run(recipe, tmp_path / "run", "train.max_steps=11")
    shutil.copytree(tmp_path / "run", tmp_path / "broken")
    damage(tmp_path / "run/checkpoints/step-00000011")
    run(recipe, tmp_path / "run", "train.max_steps=24", resume=True)
    [warning] = events(tmp_path / "run", "warning")
    said = "checkpoint step-00000011 is damaged: model.safetensors sha256 mismatch; using step-00000009"
    assert warning["message"] == said
    assert events(tmp_path / "run", "resumed")[0]["step"] == 9
    assert rows(tmp_path / "run", "train")[11:] == rows(tmp_path / "calm", "train")[11:]
    for name in ("step-00000011", "step-00000009"):
        damage(tmp_path / "broken/checkpoints" / name)
    with pytest.raises(CheckpointError, match=r"step-00000011 is damaged.*step-00000009 is damaged") as caught:
        run(recipe, tmp_path / "broken", "train.max_steps=24", resume=True)
    assert caught.value.exit_code == 4


def test_a_new_run_starts_from_the_weights_and_the_tokenizer_of_another(tmp_path):
    run(write_toy(tmp_path), tmp_path / "first")
    other = write_toy(tmp_path / "other", data={"holdout": 0.5})  # another split would give another vocabulary
    start = f"train.init_from={tmp_path / 'first'}"
    run(other, tmp_path / "second", start, "stages.tune.train.max_epochs=1", "optim.lr=1e-9")
    assert (tmp_path / "second/tokenizer.json").read_bytes() == (tmp_path / "first/tokenizer.json").read_bytes()
    final, start_weights = weights(tmp_path / "second"), weights(tmp_path / "first")
    assert all((final[name] - start_weights[name]).abs().max() < 1e-6 for name in final)
    assert rows(tmp_path / "second", "train")[0]["loss"] < rows(tmp_path / "first", "train")[0]["loss"] - 1


def _interrupt(*args: object, **options: object) -> None:
    raise Interrupted("before the first step")


def test_a_run_that_stopped_before_its_first_step_resumes(tmp_path, monkeypatch):
    recipe = write_toy(tmp_path)
    run(recipe, tmp_path / "calm")
    with monkeypatch.context() as patch:
        patch.setattr(LOOP, "train_step", _interrupt)
        with pytest.raises(Interrupted):
            run(recipe, tmp_path / "run")
    assert checkpoint.load_newest(tmp_path / "run/checkpoints") is None
    run(recipe, tmp_path / "run", resume=True)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (tmp_path / "calm/metrics.jsonl").read_bytes()


@pytest.mark.promise("run.keepsakes")
def test_a_run_that_ended_after_its_last_checkpoint_gets_what_is_made_at_the_end(tmp_path, monkeypatch):
    recipe = write_toy(tmp_path)
    run(recipe, tmp_path / "calm", "train.max_steps=4")
    run(recipe, tmp_path / "calm", "train.max_steps=8", resume=True)
    run(recipe, tmp_path / "run", "train.max_steps=4")
    with monkeypatch.context() as patch:
        patch.setattr("unpad.training.loop._keep_samples", _interrupt)
        with pytest.raises(Interrupted):
            run(recipe, tmp_path / "run", "train.max_steps=8", resume=True)
    with (tmp_path / "run/samples.jsonl").open("a") as file:
        file.write('{"step": 8, "prompt": "')  # as a version that appended them may have left it
    run(recipe, tmp_path / "run", resume=True)
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert steps == [4] * 3 + [8] * 3
    made = (tmp_path / "run/samples.jsonl").stat().st_ino
    for _ in range(2):
        for name in ("samples.jsonl", "metrics.csv"):
            assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "calm" / name).read_bytes()
        assert "<h2>Replies</h2>" in (tmp_path / "run/report.html").read_text()
        run(recipe, tmp_path / "run", resume=True)
    assert (tmp_path / "run/samples.jsonl").stat().st_ino == made  # and not made again


@pytest.mark.promise("run.keepsakes")
def test_a_run_that_ended_as_soon_as_it_was_one_keeps_the_files_of_the_model_that_it_began_from(tmp_path, monkeypatch):
    recipe, steps = write_toy(tmp_path), "train.max_steps=1"
    run(recipe, tmp_path / "first", steps)
    (tmp_path / "first/hf").mkdir()
    (tmp_path / "first/hf/config.json").write_text('{"model_type": "llama"}')
    with monkeypatch.context() as patch:
        patch.setattr("unpad.training.loop._open_monitor", _interrupt)
        with pytest.raises(Interrupted):
            run(recipe, tmp_path / "second", steps, f"train.init_from={tmp_path / 'first'}")
    (tmp_path / "second/recipe.yaml").unlink()
    run(recipe, tmp_path / "second", steps)  # another run in its place, from random weights
    assert not (tmp_path / "second/hf").exists()
    written: list[str] = []
    real = progress.storage.write_atomic

    def last(path: Path, *args: Any, **options: Any) -> None:
        written.append(path.name)
        real(path, *args, **options)
        if path.name == "recipe.yaml":
            raise Interrupted("right after it has become a run")

    with monkeypatch.context() as patch:
        patch.setattr(progress.storage, "write_atomic", last)
        with pytest.raises(Interrupted):
            run(recipe, tmp_path / "third", steps, f"train.init_from={tmp_path / 'first'}")
    run(recipe, tmp_path / "third", resume=True)
    assert "recipe.yaml" in written
    assert (tmp_path / "third/hf/config.json").read_text() == '{"model_type": "llama"}'


def test_a_new_run_does_not_overwrite_one(tmp_path):
    recipe = write_toy(tmp_path)
    run(recipe, tmp_path / "run", "train.max_steps=1")
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    with pytest.raises(RecipeError, match="holds a run already") as caught:
        run(recipe, tmp_path / "run")
    assert caught.value.exit_code == 2
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_a_run_that_lost_a_file_is_not_mixed_with_another(tmp_path):
    recipe = one_stage(tmp_path)
    whole = tmp_path / "whole"
    run(recipe, whole, "train.max_steps=2")
    for name in [path.name for path in whole.iterdir()]:
        for resume in (False, True):
            copy = tmp_path / f"{name}-{resume}"
            shutil.copytree(whole, copy)
            path = copy / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            with suppress(UnpadError):
                run(recipe, copy, "optim.lr=0.05", "train.max_steps=3", resume=resume)
            if name != "checkpoints":
                assert same_tensors(weights(copy), weights(whole)), (name, resume)
            if name != "metrics.jsonl":
                assert rows(copy, "train") == rows(whole, "train"), (name, resume)


def test_what_is_left_of_a_killed_start_is_no_run_and_its_id_goes(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / COMMAND).write_text('{"recipe": "toy", "overrides": [], "id": "0123456789abcdef"}')
    run(one_stage(tmp_path), tmp_path / "run", "train.max_steps=1")
    assert json.loads((tmp_path / "run" / COMMAND).read_text())["id"] != "0123456789abcdef"


@pytest.mark.promise("batch.windows")
def test_a_run_resumed_within_a_window_is_the_same_and_plans_no_other(tmp_path, monkeypatch):
    recipe = one_stage(tmp_path, plan={"tokens_per_step": 150, "window": 30}, train={"max_epochs": 2})
    run(recipe, tmp_path / "whole")
    expected, planned = rows(tmp_path / "whole", "train"), list[tuple[int, int]]()

    def watched(*given: Any, **known: Any) -> Plan:
        planned.append((known["epoch"], known["window"]))
        return plan(*given, **known)

    run(recipe, tmp_path / "run", f"train.max_steps={len(expected) * 3 // 4}")
    monkeypatch.setattr(stages, "plan", watched)
    run(recipe, tmp_path / "run", "train.max_steps=null", resume=True)
    assert set(planned) == {(0, 0), (1, 1), (1, 2)}
    assert rows(tmp_path / "run", "train") == expected
    assert same_tensors(weights(tmp_path / "run"), weights(tmp_path / "whole"))
