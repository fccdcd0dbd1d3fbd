"""What is measured and predicted on a card equals what it is on the processor; no tensor is left on the other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch.utils._pytree import tree_leaves

from tests.helpers.card import card
from tests.helpers.families import Finished
from tests.helpers.processes import in_child
from unpad.evaluation import run as evaluation
from unpad.inference.loaded import load

pytestmark = pytest.mark.slow


def data_of(finished: Finished, family: str, folder: Path) -> Path | None:
    """Rows to predict; None for the run's own."""
    pictures = finished(family).recipe.parent / "pictures"
    if family == "patients":
        return None
    if family == "images":
        return pictures
    rows: list[dict[str, str]] = [{"prompt": text} for text in ("你好", "小猫在哪里?", "a")]
    if family == "questions":
        image = next(pictures.rglob("*.png"))
        shutil.copy(image, folder)
        rows = [{"image": image.name, "question": row["prompt"]} for row in rows]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def leaves(value: Any) -> tuple[list[Any], list[float]]:
    """What is no fraction, and the fractions."""
    found = tree_leaves(value)
    return [one for one in found if not isinstance(one, float)], [one for one in found if isinstance(one, float)]


@pytest.mark.parametrize("family", ["questions", "conversations", "images", "patients"])
def test_a_run_is_measured_and_predicts_on_a_card(finished: Finished, family, tmp_path):
    run, data = finished(family).run, data_of(finished, family, tmp_path)

    def found() -> tuple[list[Any], list[float]]:
        return leaves([evaluation.score(str(run), 2).evaluation.to_json(), load(run).predict(data)])

    here, numbers = found()

    def on_card() -> None:
        with card():
            assert load(run).notes[:1] == ["note: computes on card:0"]
            assert found() == (here, pytest.approx(numbers, rel=1e-4, abs=1e-6, nan_ok=True))

    assert in_child(on_card) == 0
