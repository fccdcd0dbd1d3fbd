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

U, A, S = "user", "assistant", "system"
Turns = list[tuple[str, str]]


def messages(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def items(path: Path, field: str | None = None) -> list[Example | BadRow]:
    (file,) = expand([Source(path=str(path), field=field)], Path)
    return list(read(file, DataSettings()))


def pair(item: Example | BadRow) -> tuple[Turns, str, str] | str:
    if isinstance(item, BadRow):
        return item.code
    assert item.turns[-1].role == item.rejected.role == A
    return [(turn.role, turn.content) for turn in item.turns[:-1]], item.turns[-1].content, item.rejected.content


ASKED, LONG = messages((U, "问")), messages((S, "规"), (U, "问"), (A, "答"), (U, "再问"))
LONG_TURNS = [(S, "规"), (U, "问"), (A, "答"), (U, "再问")]
CASES: list[tuple[dict[str, Any], Any]] = [
    ({"messages": ASKED, "chosen": "好", "rejected": "坏"}, ([(U, "问")], "好", "坏")),
    ({"messages": LONG, "chosen": " 好\n", "rejected": "坏"}, (LONG_TURNS, " 好\n", "坏")),
    ({"prompt": "问", "chosen": "好", "rejected": "坏"}, ([(U, "问")], "好", "坏")),
    ({"question": "问", "chosen": "好", "rejected": "坏", "system": "规"}, ([(S, "规"), (U, "问")], "好", "坏")),
    (
        {"prompt": LONG, "chosen": messages((A, "好")), "rejected": messages((A, "坏"))},
        (LONG_TURNS, "好", "坏"),
    ),
    # The prompt once more before each reply, with a system message or without.
    (
        {"prompt": "问", "chosen": [*ASKED, *messages((A, "好"))], "rejected": [*ASKED, *messages((A, "坏"))]},
        ([(U, "问")], "好", "坏"),
    ),
    (
        {"prompt": LONG, "chosen": [*LONG[1:], *messages((A, "好"))], "rejected": messages((A, "坏"))},
        (LONG_TURNS, "好", "坏"),
    ),
    # No prompt: what both begin with.
    ({"chosen": [*LONG, *messages((A, "好"))], "rejected": [*LONG, *messages((A, "坏"))]}, (LONG_TURNS, "好", "坏")),
    ({"instruction": "译", "input": "hi", "chosen": "好", "rejected": "坏"}, ([(U, "译\nhi")], "好", "坏")),
    (
        {"prompt": "再问", "chosen": "好", "rejected": "坏", "history": [["问", "答"]]},
        ([(U, "问"), (A, "答"), (U, "再问")], "好", "坏"),
    ),
    ({"messages": None, "prompt": "问", "chosen": "好", "rejected": "坏"}, ([(U, "问")], "好", "坏")),
    ({"prompt": "问", "question": "另问", "chosen": "好", "rejected": "坏"}, "E_FIELD"),
    (
        {"prompt": "问", "messages": (best := [*ASKED, *messages((A, "好"))]), "chosen": best, "rejected": "坏"},
        ([(U, "问")], "好", "坏"),
    ),
    ({"chosen": "好", "rejected": "坏"}, "E_MISSING"),
    ({"prompt": "问", "chosen": "好"}, "E_MISSING"),
    ({"prompt": "问", "chosen": "好", "rejected": "好"}, "E_EQUAL"),
    ({"prompt": "问", "chosen": "好", "rejected": ""}, "E_EMPTY"),
    ({"prompt": "问", "chosen": None, "rejected": "坏"}, "E_NULL"),
    ({"prompt": " ", "chosen": "好", "rejected": "坏"}, "E_EMPTY"),
    ({"prompt": LONG[:3], "chosen": "好", "rejected": "坏"}, "E_ROLE"),
    ({"prompt": "问", "chosen": messages((A, "好"), (U, "再问"), (A, "好")), "rejected": "坏"}, "E_ROLE"),
    ({"prompt": "问", "chosen": messages((U, "问")), "rejected": "坏"}, "E_ROLE"),
    ({"prompt": "问", "chosen": [*messages((U, "另问")), *messages((A, "好"))], "rejected": "坏"}, "E_ROLE"),
    ({"prompt": "问", "chosen": messages(("wizard", "好")), "rejected": "坏"}, "E_ROLE"),
]


@pytest.mark.promise("pairs.forms")
@pytest.mark.parametrize(("row", "wanted"), CASES)
def test_a_row_is_a_pair_or_a_fault(tmp_path: Path, row: dict[str, Any], wanted: Any) -> None:
    (item,) = items(write(tmp_path / "pairs.jsonl", [row]))
    assert pair(item) == wanted
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
