"""Pairs of replies in the forms that public sets and trainers have."""

import json
from pathlib import Path
from typing import Any

import pytest

from unpad.data.check import check
from unpad.data.sources.example import BadRow, Example
from unpad.data.sources.files import expand
from unpad.data.sources.pairs import read
from unpad.recipes.data import DataSettings, Source

U, A = "user", "assistant"


def messages(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def items(path: Path, field: str | None = None) -> list[Example | BadRow]:
    (file,) = expand([Source(path=str(path), field=field)], Path)
    return list(read(file, DataSettings()))


def pair(item: Example | BadRow) -> dict[str, Any] | str:
    if isinstance(item, BadRow):
        return item.code
    assert item.turns[-1].role == item.rejected.role == A
    turns = [[turn.role, turn.content] for turn in item.turns[:-1]]
    return {"turns": turns, "chosen": item.turns[-1].content, "rejected": item.rejected.content}


ASKED = messages((U, "问"))
# A row each, and its turns and both replies, or the code of its fault.
CASES = [json.loads(line) for line in Path(__file__).with_name("pair_rows.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.promise("pairs.forms")
@pytest.mark.parametrize("case", CASES)
def test_a_row_is_a_pair_or_a_fault(tmp_path: Path, case: dict[str, Any]) -> None:
    (item,) = items(write(tmp_path / "pairs.jsonl", [case["row"]]))
    assert pair(item) == case["expected"]
    if isinstance(item, BadRow):
        assert item.where.endswith(":1")
        assert item.fix


@pytest.mark.promise("pairs.forms")
def test_pairs_of_one_prompt_are_one_group_unless_they_name_another(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "问", "chosen": "好", "rejected": "坏"},
        {"messages": ASKED, "chosen": "更好", "rejected": "坏", "split": "valid"},
        {"prompt": "另问", "chosen": "好", "rejected": "坏"},
        {"prompt": "问", "chosen": "好", "rejected": "坏", "group": "mine"},
    ]
    found = [item for item in items(write(tmp_path / "pairs.jsonl", rows)) if isinstance(item, Example)]
    groups = [item.group for item in found]
    assert groups[0] == groups[1] != groups[2]
    assert groups[3] == "mine"
    assert [item.split for item in found] == [None, "holdout", None, None]


@pytest.mark.promise("pairs.forms")
def test_data_check_knows_pairs_and_counts_what_it_puts_aside(tmp_path: Path) -> None:
    good = {"prompt": "问", "chosen": "好", "rejected": "坏的"}
    rows = [good, {**good, "rejected": "好"}, good, {**good, "rejected": "更坏"}]
    report = check(write(tmp_path / "pairs.jsonl", rows))
    (file,) = report.files
    assert (file.kind, file.num_rows, file.num_used, file.num_repeated) == ("pairs", 4, 3, 1)
    assert file.characters.tolist() == [4, 4, 4]
    assert [(row.code, row.where.rpartition(":")[2]) for row in report.bad] == [("E_EQUAL", "2")]
