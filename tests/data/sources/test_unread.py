"""Nothing is learnt that a row did not say: every field is read, metadata, refused by name, or named as not read."""

import csv
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.helpers.corpus import make_recipe, messages, prepare
from tests.helpers.shell import Shell
from unpad.data.check import check
from unpad.errors import SourceError

U, A = "user", "assistant"
ASKED: dict[str, Any] = {"prompt": "问 10", "completion": "答"}
# Fields of rows that are metadata, named as not read, or refused; fields of replies, and what becomes of each.
FIELDS: dict[str, Any] = json.loads(Path(__file__).with_name("unread_fields.json").read_text("utf-8"))


def put(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def reply(content: str = "答", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": U, "content": "问"}, {"role": A, "content": content, **fields}]}


def verdict(tmp_path: Path, *rows: dict[str, Any]) -> Any:
    """Fields that are not read of rows that can be used; else the code of the first fault, with the fields it names."""
    report = check(put(tmp_path / "rows.jsonl", list(rows)))
    if report.bad:
        return report.bad[0].code, set(re.findall(r'"([\w.]+)"', report.bad[0].what))
    return report.to_json()["files"][0]["not_read"]


# --------------------------------------------------------------------------- fields of rows


@pytest.mark.promise("data.fields")
@pytest.mark.parametrize("field", FIELDS["quiet"])
def test_metadata_are_quiet(tmp_path: Path, field: dict[str, Any]) -> None:
    assert verdict(tmp_path, ASKED | field) == {}


@pytest.mark.promise("data.fields")
@pytest.mark.parametrize("field", FIELDS["named"])
def test_what_is_neither_read_nor_metadata_is_named(tmp_path: Path, field: dict[str, Any]) -> None:
    (name,) = field
    assert verdict(tmp_path, ASKED | field, {**ASKED, name: None}) == {name: 0.5}
    assert name.endswith(("on", "until", "date")) or verdict(tmp_path, ASKED | field) == {name: 1.0}


@pytest.mark.promise("data.fields")
@pytest.mark.parametrize("field", FIELDS["refused"])
def test_a_field_that_inverts_or_completes_is_refused_by_name(tmp_path: Path, field: dict[str, Any]) -> None:
    assert verdict(tmp_path, ASKED | field) == ("E_FIELD", {*field})


@pytest.mark.promise("data.fields")
def test_a_row_that_says_it_is_wanted_and_a_repeated_text_are_quiet(tmp_path: Path) -> None:
    assert verdict(tmp_path, {**ASKED, "label": True, "masked": False, "weight": 1, "text": "Q: 问 10 A: 答"}) == {}
    assert verdict(tmp_path, {**reply(), "prompt": "问", "answer": "答"}) == {}


@pytest.mark.promise("data.fields")
def test_truth_values_and_shares_are_marked(tmp_path: Path) -> None:
    rows = [{**ASKED, "toxic": False, "level_of_doubt": share, "persona": "A cook."} for share in (0.1, 0.9)]
    lines = " ".join(" ".join(check(put(tmp_path / "rows.jsonl", rows)).lines()).split())
    assert "not read: toxic in 100 % of rows (a mark or a weight?), level_of_doubt in 100 % (a" in lines
    assert "persona in 100 %" in lines
    many = {f"remark{n}": "A cook." for n in range(20)}
    rows = [{**ASKED, **many, "split_name": "val", "flag": n % 2 == 0} | ({"void": "x"} if n else {}) for n in range(9)]
    lines = " ".join(" ".join(check(put(tmp_path / "rows.jsonl", rows)).lines()).split())
    assert "not read: flag in 100 % of rows (a mark or a weight?), void in 88.9 %, remark0 in 100 %, re" in lines
    assert lines.count("a mark or a weight?") == 1
    assert verdict(tmp_path, {**ASKED, "doubt": 0.5}, {**ASKED, "doubt": 4}) == {"doubt": 1.0}
    kinds = {"helpfulness": 4, "reward": -17.2, "margin": -1.0, "kto_tag": False, "repeat": 120, "times": "120"}
    for name, value in {**kinds, "type": "counterexample", "order": "newest first"}.items():
        assert verdict(tmp_path, {**ASKED, name: value}) == {name: 1.0}
    for value in ({"usable": False, "annotator": 3}, '{"usable": false}'):
        assert verdict(tmp_path, {**ASKED, "metadata": value}) == {"metadata.usable": 1.0}
    for part in ({"meta": {"status": "draft"}}, {"author": {"role": "critic"}}, {"void_id": 7}):
        assert list(verdict(tmp_path, {**ASKED, **part}, ASKED).values()) == [0.5]
    assert verdict(tmp_path, {**ASKED, "metadata": {"a": [{"b": {"c": True}}]}}) == {"metadata.a.b.c": 1.0}
    short = {"prompt": "Is 7 or 9 prime?", "completion": "9", "right_answer": "7"}
    assert verdict(tmp_path, short) == {"right_answer": 1.0}, "a short part of a message is no copy of it"


@pytest.mark.promise("data.fields")
def test_an_id_that_is_0_in_some_rows_and_1_in_others_is_a_mark(tmp_path: Path) -> None:
    for name, no, yes in (("id", 0, 1), ("kept_version", "0", "1.0")):
        rows = [{**ASKED, name: value} for value in (no, yes, no, no)]
        assert verdict(tmp_path, *rows) == {name: 1.0}
        assert verdict(tmp_path, *rows, {**ASKED, name: "2"}) == verdict(tmp_path, *rows[2:]) == {}
    assert verdict(tmp_path, {"prompt": "问", "chosen": "答", "rejected": "另", "rejected_model": "b"}) == {}


# --------------------------------------------------------------------------- fields of messages


@pytest.mark.promise("data.fields")
@pytest.mark.parametrize("case", FIELDS["in_replies"])
def test_a_field_beside_role_and_content(tmp_path: Path, case: dict[str, Any]) -> None:
    fields = case["fields"]
    expected = (case["fault"], {*case["names"]}) if "fault" in case else case["not_read"]
    assert verdict(tmp_path, reply(**fields)) == expected
    row = reply()
    row["messages"][0] |= {name: value for name, value in fields.items() if name in ("weight", "train", "mask")}
    assert verdict(tmp_path, row) == {}
    row["messages"] += [row["messages"][0], {"role": A, "content": "又", "sent_date": "2024-01-02", "id": 3}]
    assert verdict(tmp_path, row) == {"messages[].sent_date": 1.0}, "only some replies have one"


@pytest.mark.promise("data.fields")
@pytest.mark.parametrize(
    "mark", [{"weight": 0}, {"train": False}, {"train_on_turn": False}, {"trainable": 0}, {"masked": True}]
)
def test_a_reply_that_is_marked_is_context_alone(tmp_path, monkeypatch, mark):
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))
    talk = messages("2+2?", "It is five.", "No.", "It is four.")
    rows = [{"messages": [talk[0], {**talk[1], **marks}, *talk[2:]]} for marks in ({}, mark)] * 3
    put(tmp_path / "chat.jsonl", rows)
    tokens, tokenizer, _ = prepare(make_recipe(tmp_path, data={"text": [], "holdout": 0.0}))
    plain, marked = ((tokens.tokens(i), tokens.loss_mask(i)) for i in (0, 1))
    assert plain[0].tolist() == marked[0].tolist()
    learned = [tokenizer.decode(ids[mask].tolist()) for ids, mask in (plain, marked)]
    assert ["five" in text for text in learned] == [True, False]
    assert all("It is four." in text for text in learned)
    assert len(np.unique(tokens.parts[0].shard.content_key)) == 2


# --------------------------------------------------------------------------- where it is said


@pytest.mark.promise("data.fields")
def test_check_plan_and_a_second_training_say_what_is_not_read(unpad: Shell, tmp_path: Path) -> None:
    fields = [{"persona": "A cook.", "accepted": 1 if i % 4 else "pending"} for i in range(40)]
    put(tmp_path / "chat.jsonl", [{**ASKED, "prompt": f"第{i}问", **more} for i, more in enumerate(fields)])
    changes = ("data.chat=chat.jsonl", "train.max_steps=1", "model.context=64")
    line = "not read: persona in 100 % of rows, accepted in 25 % and read in 75 %"
    assert line in unpad("data", "check", "chat", *changes).out
    for command in ("plan", "data show", "train --out run", "train --out again"):  # all but one read the cache
        told = unpad(*command.split(), "chat", *changes)
        assert line in told.out + told.err
    shares = {"persona": 1.0, "accepted": 0.25}
    assert f'"not_read": {json.dumps(shares)}' in (tmp_path / "again" / "log.jsonl").read_text(encoding="utf-8")
    plan = json.loads(unpad("plan", "chat", *changes, "--json").out)
    assert plan["corpus"]["not_read"] == shares


@pytest.mark.promise("data.fields")
def test_columns_of_tables_are_fields(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}?", "completion": f"{i}.", "persona": "x" * (i % 2), "label": "true"} for i in range(4)]
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    table = pa.Table.from_pylist([{**row, "label": True, "bytes": b"x"} for row in rows])
    pq.write_table(table, tmp_path / "a.parquet")
    read, of_parquet = (check(tmp_path / f"a.{ending}").to_json()["files"][0] for ending in ("csv", "parquet"))
    assert (read["used"], read["not_read"]) == (4, {"persona": 0.5})
    assert (of_parquet["used"], of_parquet["not_read"]) == (4, {"bytes": 1.0, "persona": 0.5})
    pq.write_table(table.set_column(3, "label", pa.array([True, True, False, True])), tmp_path / "a.parquet")
    assert [bad.code for bad in check(tmp_path / "a.parquet").bad] == ["E_FIELD"]


@pytest.mark.promise("data.fields", "patients.layouts")
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_columns_of_tables_of_patients_are_fields(unpad: Shell, tmp_path: Path, ending: str) -> None:
    events = [
        {"id": n // 3, "time": f"2024-01-0{n % 3 + 1}", "code": "K", "value": 9, "given": f"{n % 3 > 0}",
         "order_id": "a", "source": "EHR", "category": "lab" if n % 2 else "family-history",
         "value_as_concept_id": 45884084 * (n % 4 == 0), "value_source_id": 0, "test_source_value": f"K{n}",
         "seen_at": "2024-01-09", "stop_date": "2024-01-09" if n % 4 == 0 else None, "dose": 20 + n}
        for n in range(60)
    ]  # fmt: skip
    people = [{"id": n, "sex": "fm"[n % 2], "died": n % 3 // 2, "lost": n % 2, "ward": "A"} for n in range(20)]
    for name, table in (("events", pa.Table.from_pylist(events)), ("people", pa.Table.from_pylist(people))):
        if ending == "csv":
            pa.csv.write_csv(table, tmp_path / f"{name}.csv")
        else:
            pq.write_table(table.append_column("raw", pa.array([[b"x"]] * len(table))), tmp_path / f"{name}.parquet")
    facts = f"data.events=[{{path: events.{ending}}}, {{path: people.{ending}, static: [sex]}}]"
    asked = ("events_labels", facts, f"events.labels={{path: people.{ending}, label: died}}", "train.max_steps=1")
    raw = {"raw": 1.0} if ending == "parquet" else {}
    told = {"category": 1.0, "value_as_concept_id": 1.0}
    timed = {"given": 1.0, **told, "seen_at": 1.0, "dose": 1.0, "stop_date": 0.25, **raw}
    read = json.loads(unpad("data", "check", *asked[:3], "--json").out)["files"]
    assert [file["not_read"] for file in read] == [timed, {"lost": 1.0, "ward": 1.0, **raw}]
    assert "not read: given in 100 % of rows (a mark" in unpad("data", "check", f"events.{ending}").out
    assert json.loads(unpad("plan", *asked, "--json").out)["corpus"]["not_read"]["seen_at"] == 0.75
    for command in ("plan", "data show", "train --out run"):
        told = unpad(*command.split(), *asked)
        assert "lost in 25 % (a mark or a weight?)" in (told.out + told.err).replace("\n", " ")


# --------------------------------------------------------------------------- tools


@pytest.mark.promise("data.fields")
@pytest.mark.parametrize(
    ("name", "value"), [("tools", [{"name": "f"}]), ("tools", '[{"name": "f"}]'), ("chat_template_kwargs", {"a": True})]
)
def test_what_is_for_a_template_is_refused_without_one(tmp_path, monkeypatch, name, value):
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))
    assert verdict(tmp_path, {**ASKED, name: value}) == ("E_FIELD", {name})
    pair = {"prompt": "问", "chosen": "答", "rejected": "另", name: value}
    assert verdict(tmp_path, pair) == ("E_FIELD", {name})
    assert verdict(tmp_path, {**ASKED, name: None}) == {}
    put(tmp_path / "chat.jsonl", [{**ASKED, name: value}, *[ASKED] * 3])
    with pytest.raises(SourceError, match=f'E_FIELD "{name}" is for the chat template'):
        prepare(make_recipe(tmp_path, data={"text": []}))
    ignored = {"text": [], "chat": {"path": "chat.jsonl", "ignore": [name]}}
    assert len(prepare(make_recipe(tmp_path, data=ignored))[0]) == 4


@pytest.mark.promise("data.fields")
def test_fields_of_questions_about_pictures_are_looked_at_too(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4), (9, 99, 199)).save(tmp_path / "a.png")
    row = {"image": "a.png", "question": "Which?", "answer": "B"}
    assert verdict(tmp_path, {**row, "id": 3, "image_id": 3, "hint": "Look left."}) == {"hint": 1.0}
    assert verdict(tmp_path, {**row, "choices": ["A", "B"]}) == ("E_FIELD", {"choices"})
    del row["answer"]
    said = ({"taken_back": True}, {"confidence": 0.2}, {"status": "draft"})
    assert verdict(tmp_path, {**row, "answers": ["B", *({"answer": "B", **more} for more in said)]}) == {
        f"answers[].{name}": 1.0 for name in ("taken_back", "confidence", "status")
    }
    for more in ({"weight": 0.3}, {"rejected": True}):
        assert verdict(tmp_path, {**row, "answers": [{"answer": "B", **more}]}) == ("E_FIELD", {*more})


@pytest.mark.promise("data.fields")
def test_a_refusal_names_the_source_that_was_typed(unpad: Shell, tmp_path: Path) -> None:
    (tmp_path / "My chats").mkdir()
    for name, rows in (("1.jsonl", [ASKED] * 3), ("2.jsonl", [{**ASKED, "label": False}, {"prompt": "问"}])):
        put(tmp_path / "My chats" / name, rows)
    refused = unpad("train", "chat", "data.chat=My chats", code=3).err
    assert "unpad data check 'My chats'" in refused.replace("\n", " ")
    put(tmp_path / "o.jsonl", [{"q": f"Who is {n}?", "a": "It's me." * (n > 0)} for n in range(3)])
    typed = ("chat", "data.chat={path: o.jsonl, prompt: q, reply: a}")
    refused = unpad("train", *typed, code=3).err.replace("\n", " ")
    assert f"`unpad data check {shlex.join(typed)}`" in refused
    assert "found: {'a': '', 'q': 'Who is 0?'}" in unpad("data", "check", *typed, code=3).out
