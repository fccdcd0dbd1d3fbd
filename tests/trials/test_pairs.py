"""Previews of recipes of pairs keep the replies of a pair together."""

from pathlib import Path

import pytest

from tests.helpers.pairs import write_pairs
from unpad.trials.preview import preview


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return str(write_pairs(tmp_path, model={"dropout": 0.0}))


def test_a_preview_tries_every_strategy_on_whole_pairs(recipe):
    (stage,) = preview(recipe, ["plan.row_tokens=128"]).stages
    assert {row.name for row in stage.rows if not row.refused} == set(stage.trials)
    assert len(stage.trials) == 6
    assert {row.pieces for row in stage.rows} == {64}  # 32 pairs to train on
