"""A run on a card, by a stand-in: it trains, stops and goes on as on the processor, and no tensor is on the other."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.card import train_and_go_on
from tests.helpers.families import FAMILIES, SHORT
from tests.helpers.toy import rows
from unpad.nn.native import library

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["questions", "conversations", "images", "pairs", "patients", "text"])
def test_a_run_trains_on_a_card(family, tmp_path):
    recipe = FAMILIES[family](tmp_path, **SHORT)
    with library.switched_off():  # which a card does not have
        train_and_go_on(recipe, tmp_path / "here")
    # Of its own process: threads for the gradients of a card begin with the first backward pass of any.
    command = [sys.executable, "-m", "tests.helpers.card", str(recipe), str(tmp_path / "there")]
    subprocess.run(command, check=True)
    here, there = rows(tmp_path / "here"), rows(tmp_path / "there")
    assert [(row["kind"], row["rows"]) for row in there] == [(row["kind"], row["rows"]) for row in here]
    assert [row["loss"] for row in there] == pytest.approx([row["loss"] for row in here], rel=1e-4)
