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

U, A, S = "user", "assistant", "system"


def conversations(path: Path, field: str | None = None) -> list[Any]:
    """[(role, content), ...] of each conversation, the code of each bad row."""
    (file,) = expand([Source(path=str(path), field=field)], Path)
    items = list(read(file, DataSettings()))
    return [[(t.role, t.content) for t in i.turns] if isinstance(i, Example) else i.code for i in items]


def messages(*turns: tuple[Any, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def sharegpt(*turns: tuple[Any, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": content} for role, content in turns]}


CASES: list[tuple[Any, Any]] = [
    (messages((U, "问"), (A, " 答\n")), [(U, "问"), (A, " 答\n")]),
    (messages((S, "规"), (U, "问"), (A, "答"), (U, "再问")), [(S, "规"), (U, "问"), (A, "答"), (U, "再问")]),
    (sharegpt(("system", "规"), ("human", "问"), ("gpt", "答")), [(S, "规"), (U, "问"), (A, "答")]),
    (sharegpt(("user", "问"), ("assistant", "答")), [(U, "问"), (A, "答")]),
    ({"text": "用户：你好！助手：好。"}, [(U, "你好！"), (A, "好。")]),
    (
        {"text": " 用户:问 \n助手: 答\n1) 甲\n用户：再问助手：再答"},
        [(U, "问"), (A, "答\n1) 甲"), (U, "再问"), (A, "再答")],
    ),
    ({"text": "系统：规。用户：问助手：答"}, [(S, "规。"), (U, "问"), (A, "答")]),
    ({"text": "User: hi\nAssistant: ho"}, [(U, "hi"), (A, "ho")]),
    (
        {"instruction": "Human:a\nAssistant:b\nHuman:c\nAssistant:", "output": "d"},
        [(U, "a"), (A, "b"), (U, "c"), (A, "d")],
    ),
    ({"prompt": "Human: a\nHuman: b\n\nAssistant:", "completion": "c"}, [(U, "a\nHuman: b"), (A, "c")]),
    ({"prompt": "Human: a\nHuman: b\nAssistant:", "completion": "c"}, "E_ROLE"),
    ({"text": "User：hi Assistant：ho"}, [(U, "hi"), (A, "ho")]),
    ({"text": "用户：写英文助手：User: x"}, [(U, "写英文"), (A, "User: x")]),
    ({"text": "User: a SuperUser: b Assistant: c"}, [(U, "a SuperUser: b"), (A, "c")]),
    (
        {"instruction": "译", "input": "hi", "output": "你好", "text": "Below is an instruction"},
        [(U, "译\nhi"), (A, "你好")],
    ),
    ({"instruction": "问", "input": " ", "output": "答"}, [(U, "问"), (A, "答")]),
    ({"instruction": "", "input": "问", "output": "答"}, [(U, "问"), (A, "答")]),
    ({"prompt": "问", "response": "答", "system": "规"}, [(S, "规"), (U, "问"), (A, "答")]),
    ({"question": "问", "answer": "答"}, [(U, "问"), (A, "答")]),
    (
        {"instruction": "再问", "output": "再答", "history": [["问", "答"]]},
        [(U, "问"), (A, "答"), (U, "再问"), (A, "再答")],
    ),
    ({"prompt": [{"role": U, "content": "问"}], "completion": [{"role": A, "content": "答"}]}, [(U, "问"), (A, "答")]),
    ({**sharegpt(("human", "问"), ("gpt", "答")), "system": "规"}, [(S, "规"), (U, "问"), (A, "答")]),
    (messages(("developer", "规"), (U, "问"), (A, "答")), [(S, "规"), (U, "问"), (A, "答")]),
    ({**messages((U, "问"), (A, "答")), "conversations": None, "prompt": ""}, [(U, "问"), (A, "答")]),
    ({"messages": None, **sharegpt(("human", "问"), ("gpt", "答"))}, [(U, "问"), (A, "答")]),
    ({**messages((U, "问"), (A, "答")), **sharegpt(("human", "问"), ("gpt", "答"))}, [(U, "问"), (A, "答")]),
    ({**messages((U, "问"), (A, "答")), **sharegpt(("human", "问"), ("gpt", "另"))}, "E_FIELD"),
    ({"messages": [], "prompt": None, "question": "问", "answer": "答"}, [(U, "问"), (A, "答")]),
    ({"question": "问", "response": "答", "answer": "答"}, [(U, "问"), (A, "答")]),
    ({"question": "问", "response": "想一想，答", "answer": "答"}, "E_FIELD"),
    ({"question": "问", "prompt": "另问", "answer": "答"}, "E_FIELD"),
    ({"messages": json.dumps(messages((U, "问"), (A, "答"))["messages"])}, [(U, "问"), (A, "答")]),
    ({"prompt": "[1, 2]", "completion": "[2]"}, [(U, "[1, 2]"), (A, "[2]")]),
    ({"prompt": [{"role": U, "content": "问"}], "completion": "答"}, [(U, "问"), (A, "答")]),
    ({"instruction": "问", "context": "文", "response": "答"}, [(U, "问\n文"), (A, "答")]),
    ({"instruction": "问", "context": "文", "input": "另", "response": "答"}, "E_FIELD"),
    ({"question": "问", "response": "答", "system_prompt": "规"}, [(S, "规"), (U, "问"), (A, "答")]),
    ({"instruction": "问"}, "E_MISSING"),
    ({"instruction": "问", "input": 3, "output": "答"}, "E_TYPE"),
    ({"instruction": "问", "output": "答", "history": ["问"]}, "E_TYPE"),
    ({"messages": [{"role": U, "content": "问"}, {"role": A, "content": "答", "weight": 0}]}, "E_NO_TARGET"),
    ({"messages": [{"role": U, "content": "问"}, {"role": A, "content": "答", "tool_calls": [{"id": 1}]}]}, "E_TYPE"),
    (
        {"messages": [{"role": U, "content": "问"}, {"role": A, "content": "答", "tool_calls": None}]},
        [(U, "问"), (A, "答")],
    ),
    ({"messages": [{"role": U, "content": "问", "thinking": "想"}, {"role": A, "content": "答"}]}, "E_TYPE"),
    ({"messages": [{"role": U, "content": "问"}, {"role": A, "content": "答", "reasoning_content": 3}]}, "E_TYPE"),
    (
        {"messages": [{"role": U, "content": "问"}, {"role": A, "content": "答", "thinking": "a", "reasoning": "b"}]},
        "E_TYPE",
    ),
    (messages((None, "x")), "E_ROLE"),
    (messages((A, "答"), (U, "问")), "E_ROLE"),
    (messages((U, "问"), (U, "问"), (A, "答")), "E_ROLE"),
    (messages((U, "问"), (S, "规"), (A, "答")), "E_ROLE"),
    (messages((S, "规"), (S, "规"), (U, "问"), (A, "答")), "E_ROLE"),
    ({"text": "用户：一用户：二助手：三"}, "E_ROLE"),
    (messages((U, "问"), (A, " \n")), "E_EMPTY"),
    (messages((U, "问"), (A, "\u200b")), "E_EMPTY"),
    ({"text": "用户：问助手："}, "E_EMPTY"),
    (messages((S, "规")), "E_NO_TARGET"),
    ({"text": "用户：问"}, "E_NO_TARGET"),
    ({"messages": "用户"}, "E_ROLE"),
    ({"messages": None}, "E_NULL"),
    ({"messages": {"role": U}}, "E_TYPE"),
    (messages((U, ["问"]), (A, "答")), "E_TYPE"),
    (messages((U, "问"), (A, None)), "E_NULL"),
    (messages((U, "问\0"), (A, "答")), "E_NUL"),
    ({"messages": [{"content": "问"}]}, "E_MISSING"),
    ({"messages": [{"role": U, "text": "问"}]}, "E_MISSING"),
    ({**messages((U, "问"), (A, "答")), "split": "some"}, "E_SPLIT"),
]


@pytest.mark.promise("data.conversations")
@pytest.mark.parametrize(("row", "expected"), CASES)
def test_a_row_becomes_turns_or_is_named(tmp_path: Path, row: Any, expected: Any) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert conversations(path) == [expected]


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
