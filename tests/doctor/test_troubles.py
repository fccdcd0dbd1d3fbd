"""Every planted trouble is found first or second, and healthy recipes have no finding above a note."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.examining import codes, examined, quiet_machine
from tests.doctor.missed import MISSED
from tests.doctor.troubles import TROUBLES, Trouble
from tests.helpers.families import FAMILIES
from tests.helpers.toy import SMALL_MODEL
from unpad.doctor.data import rows
from unpad.doctor.examine import Examination
from unpad.doctor.trials import carry, overfit, steps, sweep
from unpad.doctor.words import sentences
from unpad.interchange.origin import open_recipe
from unpad.machine import load

pytestmark = pytest.mark.slow
SETTING = re.compile(r"\b([a-z_]+(?:\.[\w-]+)+)=(\S+)")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sweep, "STEPS", 30)  # these models are small, and their losses smooth
    monkeypatch.setattr(overfit, "STEPS", 30)
    monkeypatch.setattr(overfit, "LEAST_STEPS", 30)
    monkeypatch.setattr(carry, "STEPS", 60)
    monkeypatch.setattr(carry, "FIRST_STEPS", 60)
    monkeypatch.setattr(carry, "EVERY", 10)
    monkeypatch.setattr(steps, "STEPS", 3)
    monkeypatch.setattr(load, "SHORTEST", 0.0)
    monkeypatch.setattr(rows, "SAMPLE", 60)


@pytest.mark.promise("doctor.troubles")
@pytest.mark.parametrize(
    "trouble", [one for one in (*TROUBLES, *MISSED) if not one.is_more], ids=lambda trouble: trouble.name
)
def test_a_planted_trouble_is_found_first_or_second(
    trouble: Trouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = trouble.recipe(tmp_path, **trouble.sections)
    if trouble.plant is not None:
        trouble.plant(monkeypatch)
    found = examined(recipe, system=quiet_machine(**trouble.readings))
    assert trouble.code in codes(found)[:2], codes(found)
    for language in ("en", "zh"):
        assert found.lines(language)
    for settings in advised(found):
        open_recipe(str(recipe), settings)


def advised(found: Examination) -> list[list[str]]:
    """The settings that each finding's advice prints, such as optim.lr=1e-3."""
    texts = [sentences(one, "en")[1] for one in found.findings]
    return [
        [f"{name}={value.rstrip('.,;:)')}" for name, value in SETTING.findall(text) if not value.isupper()]
        for text in texts
    ]


STAGES = [
    {"name": "pretrain", "use": ["text"], "train": {"max_epochs": 12}},
    {"name": "tune", "use": ["chat"], "optim": {"lr_scale": 0.5}, "train": {"max_epochs": 12}},
]
OLDER = {"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True}
# Those without changes are tried here, all of them by benchmarks/doctor.py.
HEALTHY: list[tuple[str, dict[str, Any]]] = [
    ("text", {}),
    ("text", {"plan": {"strategy": "bucket", "tokens_per_micro": 200}}),
    ("text", {"stages": STAGES}),
    ("text", {"precision": "bf16"}),
    ("text", {"model": {**SMALL_MODEL, **OLDER, "blocks": 2}}),
    ("conversations", {}),
    ("pairs", {}),
    ("images", {}),
    ("images", {"model": {"pool": "attention", "norm": "rmsnorm", "activation": "swiglu"}}),
    ("images", {"images": {"flip": 0.5, "zoom": 0.2}, "train": {"label_smoothing": 0.1}, "model": {"blocks": 3}}),
    ("questions", {}),
    ("patients", {}),
    ("patients", {"losses": {"reconstruction": 0.1, "made_code": 0.1, "next_code": 0.1, "next_time": 0.05}}),
    ("patients", {"model": {"levels": 2, "bins": [0, 90, 365]}, "events": {"max_events": 6}}),
]


@pytest.mark.promise("doctor.troubles")
@pytest.mark.parametrize(("family", "sections"), [one for one in HEALTHY if not one[1]])
def test_a_healthy_recipe_has_no_finding_above_a_note(family: str, sections: dict[str, Any], tmp_path: Path) -> None:
    assert codes(examined(FAMILIES[family](tmp_path, **sections))) == []
