"""Rows with the columns of public sets and of bug reports: read as they are meant, refused by name, or named."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.corpus import messages
from unpad.data.check import check
from unpad.data.sources.example import Example
from unpad.data.sources.files import expand
from unpad.data.sources.reader import read_rows
from unpad.errors import SourceError
from unpad.recipes.data import DataSettings, Source

ASK, SAY = "What is the capital of France?", "Paris."
TALK = messages(ASK, SAY)
GPT = [{"from": "human", "value": ASK}, {"from": "gpt", "value": SAY}]
HH = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Bye\n\nAssistant:"
READ, KIND = ([ASK, SAY], {}), "E_KIND"

REPORTS: list[tuple[str, dict[str, Any], Any]] = [
    ("train false", {"messages": [*messages("2+2?", "5"), *TALK]}, (["2+2?", "5", ASK, SAY], {})),
    ("weight half", {"messages": [TALK[0], {**TALK[1], "weight": 0.5}]}, "weight"),
    ("context", {"instruction": ASK, "context": "On it.", "response": SAY}, ([f"{ASK}\nOn it.", SAY], {})),
    ("kto", {"prompt": ASK, "completion": "Rome.", "label": False}, "label"),
    ("tools", {"messages": TALK, "tools": [{"type": "function"}]}, "tools"),
    ("pairs", {"instruction": "Do", "input": "it", "chosen": "yes", "rejected": "no"}, (["Do\nit", "yes"], {})),
    ("two replies", {"question": ASK, "response": "Well, Paris.", "answer": SAY}, "answer"),
    ("null", {"messages": None, "conversations": GPT}, READ),
    ("json text", {"messages": json.dumps(TALK)}, READ),
    ("hh", {"chosen": f"{HH} Bye.", "rejected": f"{HH} No."}, (["Hi", "Hello.", "Bye", "Bye."], {})),
    (
        "tool call",
        {"messages": [TALK[0], {"role": "assistant", "tool_calls": [{"id": 1}]}, TALK[1]]},
        "tools' messages",
    ),
    ("role tool", {"messages": [TALK[0], {"role": "tool", "content": "x"}, TALK[1]]}, "tools' messages"),
    ("keywords", {"messages": TALK, "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    ("a user's weight", {"messages": [{**TALK[0], "weight": 0}, {**TALK[1], "weight": 1}]}, READ),
    ("completions", {"prompt": ASK, "completions": [SAY, "No."], "labels": [True, False]}, KIND),
    ("llava", {"id": "1", "image": "a.png", "conversations": GPT}, "conversations"),
]
PUBLIC: list[tuple[str, dict[str, Any], Any]] = [
    ("oasst", {"message_id": "a1", "parent_id": None, "text": ASK, "role": "prompter", "deleted": False},
     {"role", "deleted"}),
    ("ultrachat", {"prompt": ASK, "prompt_id": "9f", "messages": TALK}, READ),
    ("openhermes", {"conversations": GPT, "source": "x", "category": None, "system_prompt": "Be brief."},
     (["Be brief.", ASK, SAY], {})),
    ("capybara", {"source": "x", "conversation": [{"input": ASK, "output": SAY}]}, KIND),
    ("helpsteer", {"prompt": ASK, "response": SAY, "helpfulness": 3, "verbosity": 2},
     (READ[0], {"helpfulness": 1.0, "verbosity": 1.0})),
    ("shp", {"post_id": "x", "history": ASK, "human_ref_A": SAY, "human_ref_B": "No.", "labels": 1}, KIND),
    ("webgpt", {"question": {"full_text": ASK}, "answer_0": SAY, "answer_1": "No.", "score_0": 1.0}, KIND),
    ("mmlu", {"question": ASK, "subject": "geography", "choices": ["Paris", "Rome"], "answer": 0}, "answer"),
    ("mmlu letters", {"question": ASK, "choices": ["Paris", "Rome"], "answer": "A"}, "choices"),
    ("squad", {"id": "1", "title": "F", "context": "On it.", "question": ASK, "answers": {"text": [SAY]}}, KIND),
    ("ms marco", {"query": ASK, "passages": {"passage_text": ["On it."]}, "answers": [SAY]}, KIND),
    ("aya", {"inputs": ASK, "targets": SAY, "language": "English", "annotation_type": "original"}, KIND),
    ("belle", {"instruction": ASK, "input": "", "output": SAY}, READ),
    ("firefly", {"kind": "QA", "input": ASK, "target": SAY}, KIND),
    ("coig", {"instruction": ASK, "input": "", "output": SAY, "task_type": {"major": ["QA"]}, "copyright": "x"},
     (READ[0], {"task_type": 1.0})),
    ("dolly", {"instruction": ASK, "context": "", "response": SAY, "category": "open_qa"}, READ),
    ("gsm8k", {"question": ASK, "answer": SAY}, READ),
    ("xlam", {"id": 0, "query": ASK, "answers": "[]", "tools": '[{"name": "f"}]'}, KIND),
    ("toolace", {"system": "You have f.", "conversations": [*GPT, {"from": "tool", "value": "1"}]}, "tools' messages"),
    ("magpie", {"uuid": "x", "instruction": ASK, "response": SAY, "conversations": GPT, "knowledge": "Geo."},
     ([ASK, SAY], {"knowledge": 1.0})),
    ("lima", {"conversations": [ASK, SAY], "source": "x"}, "conversations"),
    ("no robots", {"prompt": ASK, "prompt_id": "x", "messages": TALK, "category": "QA"}, READ),
    ("ultrafeedback", {"source": "x", "instruction": ASK, "models": ["a"], "completions": [{"response": SAY}]}, KIND),
    ("binarized", {"prompt": ASK, "prompt_id": "x", "messages": TALK, "chosen": TALK, "rejected": messages(ASK, "No."),
                   "score_chosen": 9.0, "score_rejected": 0.5},
     (READ[0], {"score_chosen": 1.0, "score_rejected": 1.0})),
    ("nectar", {"prompt": f"\n\nHuman: {ASK}\n\nAssistant: ", "answers": [{"answer": SAY}], "turns": 1}, KIND),
    ("full hh", {"prompt": HH, "response": " Bye.", "chosen": " Bye.", "rejected": " No."},
     (["Hi", "Hello.", "Bye", " Bye."], {})),
    ("orca", {"id": "x", "system_prompt": "Be brief.", "question": ASK, "response": SAY},
     (["Be brief.", ASK, SAY], {})),
    ("tulu", {"id": "x", "messages": TALK, "source": "x"}, READ),
    ("wildchat", {"conversation_hash": "x", "conversation": [{**turn, "toxic": False} for turn in TALK]}, KIND),
    ("openr1", {"problem": ASK, "messages": TALK, "generations": ["a"], "correctness": [True, False]}, "correctness"),
]  # fmt: skip


@pytest.mark.promise("data.fields")
@pytest.mark.parametrize(
    ("row", "expected"), [case[1:] for case in REPORTS + PUBLIC], ids=[c[0] for c in REPORTS + PUBLIC]
)
def test_no_row_is_learnt_as_something_else(tmp_path: Path, row: dict[str, Any], expected: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    if expected == KIND:
        with pytest.raises(SourceError, match="E_KIND"):
            check(path)
        return
    report = check(path)
    if isinstance(expected, str):
        assert expected in report.bad[0].what
        return
    assert not report.bad
    unread = report.to_json()["files"][0]["not_read"]
    if isinstance(expected, set):
        assert unread.keys() == expected
        return
    (file,) = expand([Source(path=str(path))], Path)
    (example,) = read_rows(str(report.files[0].kind), file, DataSettings())
    assert isinstance(example, Example)
    assert ([turn.content for turn in example.turns], unread) == expected
