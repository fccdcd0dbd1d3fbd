"""Runs with train.min_steps: longer on small data, unchanged on larger, and told of before they begin."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.helpers.toy import quiet, rows, run, same_tensors, weights, write_toy
from unpad.errors import Stopped
from unpad.training.loop import train

pytestmark = pytest.mark.promise("run.min-steps")


def one_stage(folder: Path, **settings: Any) -> Path:
    """A recipe of one stage, of two epochs."""
    train = {"threads": 1, "max_epochs": 2, **settings}
    return write_toy(folder, stages=[], data={"chat": []}, train=train, checkpoint={"every": None})


def same_run(a: Path, b: Path) -> bool:
    """Whether two runs have equal metrics and weights."""
    return rows(a) == rows(b) and same_tensors(weights(a), weights(b))


@pytest.mark.nightly
def test_larger_data_keeps_its_bits_and_small_data_has_those_of_more_epochs(tmp_path):
    plain = run(one_stage(tmp_path), tmp_path / "plain")
    assert run(one_stage(tmp_path, min_steps=plain.step), tmp_path / "enough").step == plain.step
    assert same_run(tmp_path / "enough", tmp_path / "plain")

    lengthened = one_stage(tmp_path, min_steps=2 * plain.step - 1)
    longer = run(lengthened, tmp_path / "longer")
    run(one_stage(tmp_path, max_epochs=4, eval_every=plain.step), tmp_path / "four")
    assert longer.step == 2 * plain.step
    assert rows(tmp_path / "longer", "train") == rows(tmp_path / "four", "train")  # the schedule with it
    assert [row["step"] for row in rows(tmp_path / "longer", "eval")] == [plain.step, 2 * plain.step]

    with pytest.raises(Stopped):
        train(str(lengthened), tmp_path / "resumed", [], console=quiet(), after_evaluation=lambda *_: True)
    assert run(lengthened, tmp_path / "resumed", resume=True).after_step == plain.step
    assert same_run(tmp_path / "resumed", tmp_path / "longer")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_steps": 4},
         ["train: 4 steps, then train.max_steps=4 ends it",
          "warning: train has few steps: there is not much to learn in so few; raise train.max_steps, or lower "
          "plan.tokens_per_step"]),
        ({"max_steps": 11, "min_steps": 12},
         ["train: 11 steps, then train.max_steps=11 ends it",
          "warning: train has few steps: fewer than train.min_steps=12; raise train.max_steps, or lower "
          "plan.tokens_per_step"]),
        ({"max_steps": 11}, ["train: 11 steps, then train.max_steps=11 ends it"]),
        ({"min_steps": 12}, ["train: about 12 steps in 2 epochs"]),
        ({},
         ["train: about 12 steps in 2 epochs",
          "note: 12 updates in all are few, 1,000 and more are usual: lower plan.tokens_per_step=200, or raise "
          "train.max_epochs"]),
    ],
)  # fmt: skip
def test_a_run_tells_its_steps_and_where_they_are_few(settings, expected, tmp_path):
    out = StringIO()
    train(str(one_stage(tmp_path, **settings)), tmp_path / "run", [], console=Console(file=out, width=300))
    assert [
        line for line in out.getvalue().splitlines() if line.startswith(("train: ", "warning: ", "note: "))
    ] == expected
