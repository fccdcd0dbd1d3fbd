"""Every planted trouble is found first or second, and healthy recipes have no finding above a note."""

import re
import time
from typing import Any

import pytest

from tests.doctor.examining import codes, examined, quiet_machine
from tests.doctor.troubles import SEEN, TRIED
from tests.helpers.families import FAMILIES
from tests.helpers.toy import SMALL_MODEL
from unpad import machine
from unpad.doctor import trials
from unpad.doctor.examine import look
from unpad.doctor.finding import Finding, ranked
from unpad.doctor.subject import TimeBudget, open_subject
from unpad.interchange.origin import open_recipe

SETTING = re.compile(r"\b([a-z_]+(?:\.[\w-]+)+)=(\S+)")


@pytest.fixture(autouse=True)
def _short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in {"RATES": 30, "REPEATS": 30, "LEAST_REPEATS": 30, "CARRY_STEPS": 140}.items():
        monkeypatch.setattr(trials, name, number)  # these models are small, and their losses smooth
    monkeypatch.setattr(machine, "SHORTEST", 0.0)


def advised(findings: list[Finding]) -> list[list[str]]:
    """The settings that each finding's advice prints, such as optim.lr=1e-3."""
    texts = [one.sentences("en")[1] for one in findings]
    return [[f"{name}={value.rstrip('.,;:)')}" for name, value in SETTING.findall(text) if not value.isupper()]
            for text in texts]  # fmt: skip


@pytest.mark.promise("doctor.troubles")
@pytest.mark.promise("doctor.patients")
@pytest.mark.parametrize("trouble", SEEN, ids=lambda trouble: trouble.name)
def test_a_planted_trouble_of_rows_or_settings_is_found_first_or_second(trouble, tmp_path):
    recipe = trouble.recipe(tmp_path, **trouble.sections)
    found = ranked(look(open_subject(str(recipe), (), TimeBudget(600.0, time.monotonic))))
    listed = [one.code for one in found if one.severity != "note"]
    assert trouble.code in listed[:2], listed
    for settings in advised(found):
        open_recipe(str(recipe), settings)


@pytest.mark.slow
@pytest.mark.promise("doctor.troubles")
@pytest.mark.parametrize("trouble", TRIED, ids=lambda trouble: trouble.name)
def test_a_planted_trouble_that_trials_show_is_found_first_or_second(trouble, tmp_path, monkeypatch):
    recipe = trouble.recipe(tmp_path, **trouble.sections)
    if trouble.plant is not None:
        trouble.plant(monkeypatch)
    found = examined(recipe, system=quiet_machine(**trouble.readings))
    assert trouble.code in codes(found)[:2], codes(found)
    for language in ("en", "zh"):
        assert found.lines(language)
    for settings in advised(found.findings):
        open_recipe(str(recipe), settings)


STAGES = [
    {"name": "pretrain", "use": ["text"], "train": {"max_epochs": 12}},
    {"name": "tune", "use": ["chat"], "optim": {"lr_scale": 0.5}, "train": {"max_epochs": 12}},
]
OLDER = {"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True}
HEALTHY: list[tuple[str, dict[str, Any]]] = [
    ("text", {"plan": {"strategy": "bucket", "tokens_per_micro": 200}}),
    ("text", {"stages": STAGES}),
    ("text", {"precision": "bf16"}),
    ("text", {"model": {**SMALL_MODEL, **OLDER, "blocks": 2}}),
    ("images", {"model": {"pool": "attention", "norm": "rmsnorm", "activation": "swiglu"}}),
    ("images", {"images": {"flip": 0.5, "zoom": 0.2}, "train": {"label_smoothing": 0.1}, "model": {"blocks": 3}}),
    ("patients", {"losses": {"reconstruction": 0.1, "made_code": 0.1, "next_code": 0.1, "next_time": 0.05}}),
    ("patients", {"model": {"levels": 2, "bins": [0, 90, 365]}, "events": {"max_events": 6}}),
]


@pytest.mark.slow
@pytest.mark.promise("doctor.troubles")
@pytest.mark.parametrize("family", ["text", "conversations", "pairs", "images", "questions", "patients"])
def test_a_healthy_recipe_has_no_finding_above_a_note(family, tmp_path):
    assert codes(examined(FAMILIES[family](tmp_path))) == []


@pytest.mark.parametrize(("family", "sections"), HEALTHY)
def test_rows_and_settings_of_other_healthy_recipes_have_none(family, sections, tmp_path):
    recipe = FAMILIES[family](tmp_path, **sections)
    found = look(open_subject(str(recipe), (), TimeBudget(600.0, time.monotonic)))
    assert [one.code for one in found if one.severity != "note"] == []
