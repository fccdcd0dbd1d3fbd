"""A run under `precision=auto` goes on in the precision that it was begun in, whatever a later measurement says."""

import json
from pathlib import Path

import pytest

from tests.helpers.toy import events, rows, run, same_tensors, weights, write_toy
from unpad.nn import product_speed
from unpad.nn.product_speed import Speed, Speeds
from unpad.run.folder import COMMAND


def machine(monkeypatch: pytest.MonkeyPatch, faster: str) -> None:
    """A processor that has both precisions; `faster` has the faster products."""
    gain = 2.0 if faster == "bf16" else 0.5
    monkeypatch.setattr(product_speed, "multiplies_bf16", lambda: True)
    speed = Speed(fp32_seconds=gain, bf16_seconds=1.0)
    monkeypatch.setattr(product_speed, "product_speeds", lambda: Speeds(training=speed, decoding=speed))


def forget(folder: Path) -> None:
    """Leave the command as an earlier version wrote it, without a precision."""
    command = json.loads((folder / COMMAND).read_text())
    del command["precision"]
    (folder / COMMAND).write_text(json.dumps(command))


@pytest.mark.nightly
@pytest.mark.promise("train.precision-auto")
@pytest.mark.parametrize(("begun", "later"), [("bf16", "fp32"), ("fp32", "bf16")])
@pytest.mark.parametrize("earlier_version", [False, True])
def test_a_resumed_run_keeps_its_bits_when_the_measurement_has_changed(
    tmp_path, monkeypatch, begun, later, earlier_version
):
    recipe = write_toy(tmp_path, precision="auto", stages=[], optim={"schedule": "constant"})
    machine(monkeypatch, begun)
    run(recipe, tmp_path / "whole", "train.max_steps=8")
    run(recipe, tmp_path / "run", "train.max_steps=4")
    machine(monkeypatch, later)
    if earlier_version:
        forget(tmp_path / "run")
    run(recipe, tmp_path / "run", "train.max_steps=8", resume=True)
    assert rows(tmp_path / "run", "train") == rows(tmp_path / "whole", "train")
    assert same_tensors(weights(tmp_path / "run"), weights(tmp_path / "whole"))
    first, last = events(tmp_path / "run", "environment")
    assert first["precision"] == last["precision"] == begun
    assert last["precision_reason"].startswith(f"as this run was begun; a new one here would take {later}")
    assert events(tmp_path / "run", "warning") == []


def test_a_run_that_was_stopped_before_its_first_checkpoint_keeps_its_precision(tmp_path, monkeypatch):
    recipe = write_toy(tmp_path, precision="auto", stages=[], optim={"schedule": "constant"})
    machine(monkeypatch, "bf16")
    run(recipe, tmp_path / "run", "train.max_steps=2")
    (tmp_path / "run" / "log.jsonl").unlink()
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")
    machine(monkeypatch, "fp32")
    run(recipe, tmp_path / "run", resume=True)
    assert {row["precision"] for row in events(tmp_path / "run", "environment")} == {"bf16"}


def test_a_recipe_that_names_a_precision_is_followed(tmp_path, monkeypatch):
    recipe = write_toy(tmp_path, precision="fp32", stages=[])
    machine(monkeypatch, "bf16")
    run(recipe, tmp_path / "run", "train.max_steps=2")
    run(recipe, tmp_path / "run", "train.max_steps=4", resume=True)
    assert {row["precision_reason"] for row in events(tmp_path / "run", "environment")} == {"as the recipe says"}
