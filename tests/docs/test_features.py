"""docs/internals/features.md and the tests name the same promises."""

import re
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

TOOL: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "promises.py"))
TEXT = TOOL["PAGE"].read_text(encoding="utf-8")
IDS = [name for name, _ in TOOL["promises"](TEXT)]


@pytest.fixture(scope="module")
def shown() -> dict[str, list[str]]:
    found: dict[str, list[str]] = TOOL["tests"]()
    return found


def test_every_promise_has_an_id_that_no_other_has():
    assert len(IDS) == len(re.findall(r"^- ", TEXT, flags=re.MULTILINE))
    assert [name for name, count in Counter(IDS).items() if count > 1] == []
    assert len(IDS) >= 263  # shortened, never left out


def test_ids_of_a_section_begin_with_its_topic_and_those_of_no_other_do():
    topics = [{name.partition(".")[0] for name, _ in TOOL["promises"](part)} for part in TEXT.split("\n## ")[1:]]
    assert [len(topic) for topic in topics] == [1] * len(topics)
    assert len(set.union(*topics)) == len(topics)


def test_every_promise_has_a_test(shown):
    assert sorted(set(IDS) - set(shown)) == []


def test_every_promise_that_a_test_names_is_on_the_page(shown):
    assert {name: tests for name, tests in shown.items() if name not in IDS} == {}


def test_promises_are_listed_with_their_tests_by_the_beginning_of_their_ids(capsys):
    assert TOOL["main"](["batch.mean", "doctor.disk"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == ["batch.mean-loss", "doctor.disk"]
    assert "  tests/doctor/test_machine.py::test_a_disk_that_lies_is_a_fault" in lines
    assert TOOL["main"](["xyz"]) == 1
