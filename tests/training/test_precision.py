"""Whole runs in fp16: they learn as in fp32, and go on as if they had not been stopped."""

import pytest

from tests.helpers.toy import rows, run, same_tensors, weights, write_toy

STAGE = [{"name": "train", "use": ["text", "chat"], "train": {"max_epochs": 3}}]


@pytest.mark.promise("train.precisions")
@pytest.mark.nightly
def test_fp16_reaches_the_held_out_loss_of_fp32_and_resumes_to_the_bit(tmp_path):
    recipe = write_toy(tmp_path, stages=STAGE, train={"threads": 1, "eval_every": 10}, optim={"schedule": "constant"})
    for precision in ("fp32", "fp16"):
        run(recipe, tmp_path / precision, f"precision={precision}", "train.max_steps=40")
    exact, half = (rows(tmp_path / precision, "eval") for precision in ("fp32", "fp16"))
    assert half[-1]["loss"] < 0.8 * half[0]["loss"], "nothing was learned"
    assert [row["loss"] for row in half] == pytest.approx([row["loss"] for row in exact], rel=0.01)
    assert [row["loss"] for row in half] != [row["loss"] for row in exact]

    run(recipe, tmp_path / "stopped", "precision=fp16", "train.max_steps=17")
    run(recipe, tmp_path / "stopped", "train.max_steps=40", resume=True)
    assert rows(tmp_path / "stopped", "train") == rows(tmp_path / "fp16", "train")
    assert same_tensors(weights(tmp_path / "stopped"), weights(tmp_path / "fp16"))
