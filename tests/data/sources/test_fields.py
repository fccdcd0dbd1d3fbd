"""Names of columns as people write them, and messages with the whole setting that reads another name."""

import json
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.helpers.event_tables import put
from tests.helpers.shell import Shell
from unpad.data.check import check, guess_kind
from unpad.data.sources.bad_rows import apply_policy
from unpad.data.sources.fields import SpellingError, advice, folded, setting, spelling
from unpad.data.sources.files import expand
from unpad.data.sources.reader import read_file
from unpad.errors import SourceError
from unpad.recipes.data import ChatSource, DataSettings, Source
from unpad.recipes.overrides import apply_override

REVIEWS = "id,comment,stars\n" + "".join(f"{n},The {n}. one was a nice one.,4\n" for n in range(30))


def read(path: Path, kind: str = "text", **fields: Any) -> tuple[list[Any], list[Any]]:
    (file,) = expand([(ChatSource if kind == "chat" else Source)(path=str(path), **fields)], Path)
    return read_file(kind, file, DataSettings())


def put_text(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


# --------------------------------------------------------------------------- near names


@pytest.mark.promise("data.field-names")
@pytest.mark.parametrize("name", ["Text", " text ", "TEXT", "te xt", "Ｔｅｘｔ", "\ufefftext", "_text"])
def test_a_name_is_read_whatever_its_capitals_blanks_and_underscores(tmp_path: Path, name: str) -> None:
    assert folded(name) == "text"
    rows = pa.table({name: ["a b c", "d e f"], "Split": ["train", "test"]})
    paths = [put(tmp_path / "a.parquet", rows), put(tmp_path / "a.csv", rows)]
    paths.append(put_text(tmp_path / "a.json", json.dumps(rows.to_pylist())))
    paths.append(put_text(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows.to_pylist())))
    for path in paths:
        used, bad = read(path)
        assert ([one.turns[0].content for one in used], bad) == (["a b c", "d e f"], [])
        assert [one.split for one in used] == ["train", "test"]
        assert guess_kind(path) == "text"


@pytest.mark.promise("data.field-names")
def test_the_exact_name_comes_first_and_of_two_near_ones_none_is_chosen() -> None:
    assert spelling(("Text", "text"), ("text",)) == {}
    assert spelling(("Question", "ANSWER"), ("question", "answer")) == {"Question": "question", "ANSWER": "answer"}
    with pytest.raises(SpellingError):
        spelling(("Text", "TEXT"), ("text",))


# --------------------------------------------------------------------------- the setting for another name


@pytest.mark.promise("data.field-names")
@pytest.mark.parametrize("path", ["my reviews.csv", "a,b: {c}.csv", "it's.csv", "no", "-x.csv", "评论.csv", "12"])
@pytest.mark.parametrize("field", ["comment", "no", "my text", "a: b", 'say "x"', "1"])
def test_a_setting_that_is_printed_names_the_file_and_the_field(path: str, field: str) -> None:
    (word,) = shlex.split(setting("text", Path(path), field=field))
    assert apply_override({}, word).value == {"path": path, "field": field}


@pytest.mark.promise("data.field-names")
def test_a_table_of_other_names_leads_to_the_setting_that_works(unpad: Shell, tmp_path: Path) -> None:
    path = put_text(tmp_path / "reviews.csv", REVIEWS)
    wanted = f"'data.text={{path: {path}, field: comment}}'"
    refused = unpad("data", "check", path)
    assert (refused.code, f"unpad train small {wanted}" in refused.err) == (3, True), refused.err
    assert len(refused.err.splitlines()) == 3
    told = unpad("data", "check", path, "--field", "comment")
    assert (told.code, "text, 30 of 30 rows usable" in told.out.replace("\n", " ")) == (0, True)
    _, bad = read(path)
    with pytest.raises(SourceError) as caught:  # as `train` says it
        apply_policy(bad, 30, DataSettings())
    assert caught.value.fix == f'if "comment" is the text: {wanted}'
    assert "max_bad" not in str(caught.value)
    assert len(read(path, field="Comment")[0]) == 30
    assert read(path, field="coment")[1][0].fix == f'did you mean "comment"? {wanted}'


@pytest.mark.promise("patients.long-table")
def test_a_table_without_a_header_names_none_of_its_values(unpad: Shell, tmp_path: Path) -> None:
    path = put_text(tmp_path / "a.csv", "90210001,Na,5.5\n90210002,K,3.5\n")
    for kind in ((), ("--kind", "text"), ("--kind", "events")):
        told = unpad("data", "check", path, *kind)
        assert (told.code, "first row looks like data" in told.out + told.err) == (3, True)
        assert "90210001" not in told.out + told.err


ASK_BOTH, WRITE = "prompt: COLUMN, reply: COLUMN}'; name the column of a text", "write rows with prompt and completion"


@pytest.mark.promise("data.field-names")
@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"article": "A long one.", "highlights": "A short one.", "id": "f00"}, 'if "article" is the request'),
        ({"premise": "He sleeps.", "hypothesis": "He is awake.", "label": 2}, f"{ASK_BOTH}: unpad train small"),
        ({"history": "Why is it so?", "ref_A": "It is not.", "ref_B": "It is."}, ASK_BOTH),
        ({"conversation": [{"input": "a", "output": "b"}]}, WRITE),
        ({"turns": [1]}, WRITE),
        ({"a": [{"role": "user", "content": "a"}], "b": [{"from": "human", "value": "a"}]}, "name the better chosen"),
        ({"mrn": 1, "time": "2024-01-01", "code": "K", "value": 1}, "write it as CSV, with columns mrn, time, code"),
        ({"chosen": "yes", "rejected": "no", "input": "Is it?"}, "'data.pairs={path: rows.jsonl, field: COLUMN}'"),
        ({"question": "Who?", "answer": ["A", "B"]}, 'write a text, or a list of messages with "role" and "content"'),
        ({"question": "Who?", "answer": 2}, "write the text that it stands for"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a row of image, question and answer"),
    ],
)
def test_columns_are_proposed_where_it_is_clear_which_is_which(unpad, tmp_path, row, told):
    talk = {"prompt": "a", "completion": "b"} if "turns" in row else row
    put_text(tmp_path / "rows.jsonl", f"{json.dumps(talk)}\n{json.dumps(row)}\n")
    checked = unpad("data", "check", "rows.jsonl", code=3)
    assert told in checked.out + checked.err


# --------------------------------------------------------------------------- one table of a hospital


@pytest.mark.promise("patients.long-table")
@pytest.mark.parametrize(
    ("header", "row", "item"),
    [
        ("Fallnummer;Abnahme;Untersuchung;Messwert", "F{p};0{n}.12.2023;Na;13,{n}", 'format: "%d.%m.%Y", decimal: ","'),
        ("编号,检查日,检验,检验值", "{p},2024-01-0{n},{n}号,{n}.5", "time: 检查日, code: 检验, value: 检验值"),
        ("mrn;taken_at;test;result", "P{p};0{n}.07.2023 14:05;Na;{n}.5", 'format: "%d.%m.%Y %H:%M"'),
        ("measurement_id,person_id,measurement_concept_id,measurement_date,value_as_number",
         "{p}{n},{p},300{n},2024-01-0{n},{n}", "code: measurement_concept_id, value: value_as_number"),
    ],
)  # fmt: skip
def test_events_are_known_by_the_names_of_their_columns(unpad, tmp_path, header, row, item):
    rows = [row.format(p=p, n=n).replace("Na", "NaK"[n % 2 :]) for p in (1, 2, 3) for n in (1, 2, 3, 4)]
    path = put_text(tmp_path / "t.csv", "\n".join([header, *rows]))
    refused = unpad("data", "check", path, code=3).err
    assert item in refused
    assert "docs/patients.md" in refused
    words = shlex.split(refused.partition("unpad train ")[2].partition(";")[0])
    report = check(Path(words[0]), overrides=words[1:])
    assert (report.num_used, report.bad) == (12, ())


@pytest.mark.promise("data.field-names")
@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ('{"version": 1, "da\'ta": [{"text": "a"}, {"text": "b"}]}', """has its rows in the list "da'ta\""""),
        ('{"train": [{"text": "a"}], "test": [{"text": "b"}]}', "is one object"),
        ('{"question": ["a", "b"], "answer": ["c", "d"]}', "is one object"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "is one object"),
        ('{"questions": [{"question": "a"}]}', "annotations: FILE.json"),
        ('{"text": "a"}\n{"text": "b"}', "one object per line? set format: jsonl"),
    ],
)
def test_a_file_of_one_object_says_where_its_rows_are_and_what_to_write(unpad, tmp_path, rows, told):
    refused = unpad("data", "check", put_text(tmp_path / "it's.json", rows), code=3).out
    assert told in refused.replace("\n", " ")
    assert ("write one row a line, as JSON lines" in refused) == told.startswith(("has", "is one"))


@pytest.mark.promise("patients.long-table")
@pytest.mark.parametrize(
    ("name", "unit"), [("minute", "minutes"), ("Days", "days"), ("Stunde", "hours"), ("zeit", "hours")]
)
def test_the_unit_of_numbered_times_is_that_of_the_columns_name(name: str, unit: str) -> None:
    rows = [{"Fallnr": "007", name: at, "Parameter": "Na +", "Wert": 3.5} for at in (2, 3)]
    assert f"time: {name}, code: Parameter, value: Wert, unit: {unit}}}" in advice("", Path("a.csv"), rows)


# --------------------------------------------------------------------------- columns of questions and answers


@pytest.mark.promise("data.field-names")
@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_a_table_of_questions_and_answers_leads_to_the_setting_that_reads_it(unpad, tmp_path, ending):
    rows = pa.table(
        {
            "Ticket ID": [f"T-{n}" for n in range(30)],
            "Customer Message (first)": [f"Where is my order number {n}?" for n in range(30)],
            "Agent's reply": [f"It is on its way, number {n}.\nThanks for asking." for n in range(30)],
        }
    )
    path = tmp_path / f"my tickets.{ending}"
    if ending == "jsonl":
        put_text(path, "".join(json.dumps(row) + "\n" for row in rows.to_pylist()))
    else:
        put(path, rows)
    line = setting("chat", path, prompt="Customer Message (first)", reply="Agent's reply")
    assert f"unpad train chat {line}; if " in unpad("data", "check", path, code=3).err
    refused = unpad("train", "chat", f"data.chat={path}", code=3).err
    assert f"the reply: {line}" in refused.replace("\n", " ")
    (word,) = shlex.split(line)
    assert "30 of 30 rows usable" in unpad("data", "check", "chat", word, code=0).out.replace("\n", " ")
    used, _ = read(path, "chat", prompt="Customer Message (first)", reply="Agent's reply")
    assert [turn.content for turn in used[1].turns] == [rows[1][1].as_py(), rows[2][1].as_py()]
    _, bad = read(path, "chat", prompt="Customer Mesage (first)", reply="Agent's reply")
    assert bad[0].fix == f'did you mean "Customer Message (first)"? {line}'
