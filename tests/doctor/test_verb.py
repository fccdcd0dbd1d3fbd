"""`unpad doctor`: what it prints and writes, and its exit code."""

import json
from xml.etree import ElementTree

import pytest

from tests.doctor.examining import quiet_machine
from tests.helpers.families import text
from unpad import machine
from unpad.doctor import examine
from unpad.errors import DOCTOR_FOUND_TROUBLE
from unpad.terminal.table import WIDTH, cells

pytestmark = pytest.mark.slow


@pytest.mark.promise("doctor.findings")
def test_a_trouble_is_told_in_both_languages_drawn_and_written_and_is_the_exit_code(unpad, tmp_path, monkeypatch):
    monkeypatch.setattr(examine, "System", lambda: quiet_machine(cores=lambda: 2))
    monkeypatch.setattr(machine, "SHORTEST", 0.0)  # this recipe is examined in less
    monkeypatch.setenv("COLUMNS", "80")
    recipe = text(tmp_path / "toy")
    before = sorted(path.name for path in (tmp_path / "toy").iterdir())
    told = unpad("doctor", recipe, "--lang", "zh", "--out", "rates.svg", "--json", "found.json")
    assert (told.code, told.err) == (DOCTOR_FOUND_TROUBLE, "")
    assert "警告  train.threads" in told.out
    assert max(map(cells, told.out.splitlines())) <= max(WIDTH, len(str(recipe)) + 80)
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert [one["code"] for one in found["findings"]] == ["threads"]
    assert found["by_heart"]["learnt"]
    assert len(found["sweep"]["rates"]) == len(found["sweep"]["losses"])
    assert ElementTree.parse(tmp_path / "rates.svg").getroot().tag.endswith("svg")
    assert "本配方" in (tmp_path / "rates.svg").read_text(encoding="utf-8")
    assert sorted(path.name for path in (tmp_path / "toy").iterdir()) == before


def test_what_cannot_be_examined_ends_as_training_it_would(unpad):
    absent = unpad("doctor", "absent")
    assert (absent.code, absent.err.splitlines()[0]) == (2, 'RecipeError: there is no run and no recipe "absent"')
    refused = unpad("doctor", "zh_chat", "--lang", "fr")
    assert (refused.code, refused.err.splitlines()[0]) == (2, 'RecipeError: there is no language "fr"')
