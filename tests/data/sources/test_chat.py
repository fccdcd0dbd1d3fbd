import json
from pathlib import Path
from typing import Any

import pytest

from unpad.data.sources.chat import read
from unpad.data.sources.example import Example
from unpad.data.sources.files import expand
from unpad.data.sources.split import content_key
from unpad.errors import SourceError
from unpad.recipes.data import DataSettings, Source

U, A = "user", "assistant"


def conversations(path: Path) -> list[Any]:
    """[(role, content), ...] of each conversation, the code of each bad row."""
    (file,) = expand([Source(path=str(path))], Path)
    items = list(read(file, DataSettings()))
    return [[[t.role, t.content] for t in i.turns] if isinstance(i, Example) else i.code for i in items]


def messages(*turns: tuple[Any, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


# A row each, and its turns as roles and contents, or the code of its fault.
CASES = [json.loads(line) for line in Path(__file__).with_name("chat_rows.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.promise("data.conversations")
@pytest.mark.parametrize("case", CASES)
def test_a_row_becomes_turns_or_is_named(tmp_path: Path, case: dict[str, Any]) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(case["row"], ensure_ascii=False) + "\n", encoding="utf-8")
    assert conversations(path) == [case["expected"]]


@pytest.mark.promise("models.thoughts")
@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_of_a_reply_are_read_from_their_field(tmp_path: Path, key: str) -> None:
    path = tmp_path / "c.jsonl"
    replies = [{"role": A, "content": "答", key: value} for value in ("想", "", None)]
    rows = [{"messages": [{"role": U, "content": "问"}, reply]} for reply in replies]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (file,) = expand([Source(path=str(path))], Path)
    found = [item for item in read(file, DataSettings()) if isinstance(item, Example)]
    assert [one.turns[1].thoughts for one in found] == ["想", "", ""]
    assert content_key(found[0]) != content_key(found[1]) == content_key(found[2])


def test_a_row_states_its_fact_keywords_and_split_and_a_source_its_field(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    row = {"talk": messages((U, "问"), (A, "答"))["messages"], "fact": "f1", "keywords": ["答"], "split": "holdout"}
    path.write_text(json.dumps(row), encoding="utf-8")
    (file,) = expand([Source(path=str(path), field="talk")], Path)
    (example,) = read(file, DataSettings())
    assert (example.group, example.keywords, example.split) == ("f1", ("答",), "holdout")
    assert example.where == f"{path}:1"


@pytest.mark.promise("data.conversations")
def test_a_field_that_is_ignored_is_left_out_of_rows_and_messages(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    talk = messages((U, "问"), (A, "答"))["messages"]
    talk[1]["tool_calls"] = [{"id": 1}]
    rows = [
        {"question": "问", "response": "想，答", "answer": "答"},
        {"messages": talk},
        {"messages": json.dumps(talk)},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (file,) = expand([Source(path=str(path))], Path)
    bad = next(item for item in read(file, DataSettings()) if not isinstance(item, Example))
    assert bad.fix.endswith(f"'data.chat={{path: {path}, ignore: [answer]}}'")
    (file,) = expand([Source(path=str(path), ignore=["answer", "tool_calls"])], Path)
    replies = [item.turns[-1].content for item in read(file, DataSettings()) if isinstance(item, Example)]
    assert replies == ["想，答", "答", "答"]
    (file,) = expand([Source(path=str(path), ignore=["answr"])], Path)
    with pytest.raises(SourceError, match='no row has the field "answr"'):
        list(read(file, DataSettings()))
