"""What cannot be used in tables of events has a code, a place and a remedy, and nobody's id."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.event_tables import FIRST_ID, Row, draw_rows, opened, put, put_folder, put_meds, table
from tests.helpers.shell import Shell
from unpad.data.check import check
from unpad.data.histories.event_rows import EventTable, join, read_source
from unpad.data.histories.tables import alias
from unpad.errors import SourceError, UnpadError
from unpad.recipes.data import EventSettings, EventSource

A, B = FIRST_ID, FIRST_ID + 1
ROWS: list[Row] = [(A, 0, "glucose", 90.0), (A, 30, "fever", None), (B, 10, "glucose", 110.0), (B, 20, "glucose", 95.0)]


def read(path: Path, settings: EventSettings | None = None, **source: Any) -> EventTable:
    return read_source(EventSource(path=str(path), **source), settings or EventSettings(), Path)


def long(root: Path, rows: list[Row], **source: Any) -> dict[str, Any]:
    return {"path": str(put(root / "long.parquet", table(rows))), "unit": "minutes", **source}


def csv(root: Path, *lines: str, **source: Any) -> dict[str, Any]:
    path = root / "long.csv"
    path.write_text("id,time,code,value\n" + "".join(line + "\n" for line in lines), encoding="utf-8")
    return {"path": str(path), "unit": "minutes", **source}


def labels(root: Path, ids: list[int], values: list[Any], **more: list[Any]) -> dict[str, Any]:
    path = put(root / "labels.parquet", pa.table({"id": ids, "dead": values, **more}))
    return {"path": str(path), "label": "dead"}


@dataclass(frozen=True)
class Case:
    """A faulty set of patients: what a recipe says of it, and what has to be answered."""

    name: str
    make: Callable[[Path], tuple[Any, dict[str, Any]]]  # -> data.events, the section events
    code: str
    where: str
    fix: str


CASES = [
    Case("EV-04 two files of one patient",
         lambda p: (str(put(put_folder(p / "stays", ROWS) / f"{A}.parquet",
                            table([], time="minute", code="variable").drop_columns("id")).parent), {}),
         "E_DUPLICATE", "stays[1]", "into one file"),
    Case("EV-05 on both sides",
         lambda p: (str(put_folder(put_folder(p / "s", ROWS, {A: "train", B: "train"}), ROWS[:1], {A: "valid"})), {}),
         "E_LEAK", "valid[0]", "on one side"),
    Case("EV-06 event after the outcome",
         lambda p: (long(p, ROWS), {"labels": {**labels(p, [A, B], [1, 0], at=[20.0, 20.0]), "time": "at"}}),
         "E_LEAK", "long.parquet:2", "set events.landmark"),
    Case("EV-06 label before the landmark",
         lambda p: (long(p, ROWS),
                    {"landmark": 60, "labels": {**labels(p, [A, B], [1, 0], at=[50.0, 60.0]), "time": "at"}}),
         "E_LEAK", "labels.parquet:1", "an earlier landmark"),
    Case("EV-06 outcome among the facts",
         lambda p: ([long(p, ROWS), {"path": labels(p, [A, B], [1, 0])["path"], "static": ["dead"]}],
                    {"labels": labels(p, [A, B], [1, 0])}),
         "E_LEAK", "static", "remove it"),
    Case("EV-06 time of the outcome among the facts",
         lambda p: ([long(p, ROWS), {"path": labels(p, [A, B], [1, 0], at=[50.0, 60.0])["path"], "static": ["at"]}],
                    {"labels": {**labels(p, [A, B], [1, 0], at=[50.0, 60.0]), "time": "at"}}),
         "E_LEAK", "static", "remove it"),
    Case("EV-09 patient without events",
         lambda p: (str(put(put_folder(p / "stays", ROWS) / f"{B + 1}.parquet",
                            table([], time="minute", code="variable").drop_columns("id")).parent), {}),
         "E_EMPTY", "stays[2]", "remove it"),
    Case("EV-12 label missing", lambda p: (long(p, ROWS), {"labels": labels(p, [A], [1])}),
         "E_LABEL", "long.parquet:3", "events.labels.missing"),
]  # fmt: skip


@pytest.mark.promise("patients.layouts")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_fault_has_a_code_a_place_and_a_remedy_and_names_nobody(case: Case, tmp_path: Path) -> None:
    sources, events = case.make(tmp_path)
    with pytest.raises(UnpadError) as caught:
        opened(sources, events=events)
    said = str(caught.value)
    assert case.code in said
    assert case.where in said
    assert caught.value.exit_code == (2 if case.where == "static" else 3)
    assert not any(str(patient) in said for patient in (A, B, B + 1))
    if case.code not in ("E_ID", "E_CODE", "E_WIDTH") and case.where != "static":
        assert any(alias(str(patient)) in said for patient in (A, B, B + 1))
    fixes = caught.value.fix + "".join(row.fix for row in rows_told(sources, events))
    assert case.fix in fixes


def rows_told(sources: Any, events: dict[str, Any]) -> list[Any]:
    """The bad rows that setting aside as many as there are leaves."""
    data = {"events": sources, "on_bad_row": "quarantine", "max_bad": 1.0}
    try:
        return opened(sources, data=data, events=events).report.bad
    except UnpadError:
        return []


def test_bad_rows_are_set_aside_up_to_the_limit_and_patients_stay(tmp_path: Path) -> None:
    source = csv(tmp_path, f"{A},1,glucose,90", f"{A},2,glucose,<5", f"{B},1,glucose,80", "x,y", "", f"{B},3,,7")
    with pytest.raises(SourceError, match="3 of 5 rows cannot be used") as caught:
        opened(source)
    assert "unpad data check RECIPE.yaml" in caught.value.fix
    other = put(tmp_path / "other.parquet", pa.table({"id": [A], "time": [1.0], "code": [""], "value": [1.0]}))
    with pytest.raises(SourceError, match="most rows of a file fail") as caught:
        opened([long(tmp_path, ROWS), {"path": str(other), "unit": "minutes"}])
    assert "max_bad" not in caught.value.fix
    data = opened(source, data={"events": source, "on_bad_row": "quarantine", "max_bad": 0.6})
    assert [(row.where.rpartition(":")[2], row.code) for row in data.report.bad] == [
        ("5", "E_CSV"),
        ("3", "E_TYPE"),
        ("7", "E_EMPTY"),
    ]
    assert data.table.positions.tolist() == [1, 1]
    assert data.lines()[0].startswith("5 rows read, 3 quarantined; 2 events = 2 used")


def test_an_event_after_the_outcome_that_is_set_aside_moves_no_landmark(tmp_path: Path) -> None:
    """Without events.landmark it is a patient's last event, here that before the outcome at minute 20."""
    source, known = long(tmp_path, ROWS), {**labels(tmp_path, [A, B], [1, 0], at=[20.0, 20.0]), "time": "at"}
    loose = {"events": source, "on_bad_row": "quarantine", "max_bad": 0.5, "holdout": 0}
    data = opened(source, data=loose, events={"labels": known})
    assert [row.code for row in data.report.bad] == ["E_LEAK"]
    minutes = dict(zip(data.ids.tolist(), (data.cohort.landmark * 1440).tolist(), strict=True))
    assert minutes == pytest.approx({A: 0.0, B: 20.0})


def test_an_id_is_the_same_in_every_type(tmp_path: Path) -> None:
    one = put(tmp_path / "a.parquet", table(ROWS))
    two = put(tmp_path / "b.parquet", pa.table({"id": [float(A), float(B)], "time": [5.0, 6.0], "code": ["x", "y"]}))
    three = tmp_path / "c.csv"
    three.write_text(f"id,age\n{A},70\n{B}.0,\n007,50\n8.00,60\n", encoding="utf-8")
    parts = [
        read(one, unit="minutes"), read(two, unit="minutes", value=None), read(three, static=["age"]),
    ]  # fmt: skip
    rows, _ = join(parts)
    assert rows.patients.to_pylist() == [str(A), str(B), "007", "8.00"], "what no program writes for a number is a text"
    assert [part.whole_ids for part in parts] == [True, True, False]
    assert [(rows.names[code], value) for code, value in zip(rows.code[-2:], rows.values[-2:], strict=True)] == [
        ("age", 50.0), ("age", 60.0)
    ]  # fmt: skip
    broken = put(
        tmp_path / "d.parquet", pa.table({"id": [1.5, None, 2.0**53], "time": [1.0, 2.0, 3.0], "code": list("xyz")})
    )
    # From 2**53 on two ids may be one float.
    assert [row.code for row in read(broken, unit="days", value=None).bad] == ["E_ID", "E_NULL", "E_ID"]


def test_the_unit_of_time_is_told_or_asked_for(tmp_path: Path) -> None:
    minutes = put(tmp_path / "a.parquet", table(ROWS, time="minute"))
    assert read(minutes, time="minute").days.tolist() == [0, 30 / 1440, 10 / 1440, 20 / 1440]
    assert read(minutes, time="minute", unit="hours").days.tolist() == [0, 30 / 24, 10 / 24, 20 / 24]
    with pytest.raises(SourceError, match="does not say what it counts") as caught:
        read(put(tmp_path / "b.parquet", table(ROWS)))
    assert "this item of data.events, as {path: a/events.csv, unit: hours}" in caught.value.fix
    dates = tmp_path / "c.csv"
    texts = ("1970-01-02", "1970-01-02 12:00", "1970-01-03T06:00:00.000", "1970-02-30")
    dates.write_text("id,time,code,value\n" + "".join(f"{A},{text},x,1\n" for text in texts), encoding="utf-8")
    part = read(dates)
    assert (part.unit, part.days.tolist()) == ("timestamp", [1.0, 1.5, 2.25])
    assert [(row.code, row.where[-2:]) for row in part.bad] == [("E_UNIT", ":5")]
    zoned = pa.array([0, 86_400], pa.timestamp("s", tz="Asia/Shanghai"))
    moments = pa.table({"id": [A, A], "time": zoned, "code": ["x", "y"]})
    assert read(put(tmp_path / "d.parquet", moments), value=None).days.tolist() == [0.0, 1.0]
    with pytest.raises(SourceError, match=r"E_UNIT .* holds timestamps, expected minutes"):
        read(tmp_path / "d.parquet", value=None, unit="minutes")
    with pytest.raises(SourceError, match=r"E_UNIT .* holds double, expected timestamps"):
        read(tmp_path / "b.parquet", unit="timestamp")


@pytest.mark.promise("patients.missing")
def test_a_wrong_table_is_refused_as_a_whole(tmp_path: Path) -> None:
    path = put(tmp_path / "a.parquet", table(ROWS, time="day"))
    with pytest.raises(SourceError, match=r'E_MISSING no column "time"; there is "id", "day"') as caught:
        read(path)
    assert "time:" in caught.value.fix
    with pytest.raises(SourceError, match="E_MISSING"):
        read(path, time="day", value="score")
    (tmp_path / "b.parquet").write_bytes(path.read_bytes()[:-40])
    with pytest.raises(SourceError, match="E_PARQUET"):
        read(tmp_path / "b.parquet")
    (tmp_path / "c.csv").write_bytes("id,time,code,value\n1,2,发烧,\n".encode("gb18030"))
    with pytest.raises(SourceError, match=r"E_ENCODING|E_CSV"):
        read(tmp_path / "c.csv", unit="days")
    with pytest.raises(SourceError, match="no such file"):
        read(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"holds no \*\.parquet, \*\.csv"):
        read(tmp_path / "empty")
    put_folder(tmp_path / "stays", ROWS)
    (tmp_path / "stays" / f"{A + 5}.parquet").write_bytes(b"no parquet")
    with pytest.raises(SourceError, match="E_PARQUET") as caught:
        read(tmp_path / "stays")
    assert str(A + 5) not in str(caught.value)
    assert "stays[2]" in str(caught.value)


def test_texts_that_are_not_utf8_are_bad_rows(tmp_path: Path) -> None:
    codes = pa.array([b"fever", b"\xff\xfe", b"cough"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"id": [A, A, B], "day": [1, 2, 3], "code": codes}), tmp_path / "a.parquet")
    part = read(tmp_path / "a.parquet", time="day", value=None)
    assert [(row.code, row.where[-2:]) for row in part.bad] == [("E_UTF8", ":2")]
    assert part.codes.to_pylist() == ["fever", "cough"]


@pytest.mark.promise("patients.layouts")
def test_meds_is_read_as_its_schema_says(tmp_path: Path) -> None:
    static: list[Row] = [(A, 0, "GENDER//F", None), (B, 0, "HEIGHT", 170.0)]
    root = put_meds(tmp_path / "meds", ROWS, static, {A: "train", B: "tuning"})
    part = read(root)
    assert part.unit == "timestamp"
    assert sorted(part.codes.to_pylist()) == ["GENDER//F", "HEIGHT", "fever", "glucose", "glucose", "glucose"]
    assert int(np.isnan(part.days).sum()) == 2
    ids, sides = part.declared.ids, part.declared.side
    assert dict(zip(ids.to_pylist(), sides.tolist(), strict=True)) == {str(A): 0, str(B): 1}
    for shard in ("0", "1"):  # a subject may stand in one shard only
        pq.write_table(pq.read_table(root / "data" / "any" / "0.parquet"), root / "data" / "any" / f"{shard}.parquet")
    with pytest.raises(SourceError, match="E_DUPLICATE"):
        read(root)


@pytest.mark.promise("patients.layouts")
def test_data_check_names_every_bad_row_of_events(unpad: Shell, tmp_path: Path) -> None:
    good = put(tmp_path / "good.parquet", table(draw_rows(), time="time"))
    path = tmp_path / "bad.csv"
    path.write_text(f"subject_id,time,code,numeric_value\n{A},2024-01-01,x,<5\n{B},2024-01-01,x,5\n", encoding="utf-8")
    outcome = unpad("data", "check", path, code=3)
    assert f"{path}:2: E_TYPE patient {alias(str(A))}" in outcome.out
    assert "rows read 2 = rows used 1 + bad rows 1" in outcome.out
    assert str(A) not in outcome.out + outcome.err
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"data: {{events: {{path: {good}, unit: minutes}}}}\n", encoding="utf-8")
    fine = unpad("data", "check", recipe)
    assert (fine.code, "rows used" in fine.out) == (0, True)
    put(tmp_path / "labels.parquet", pa.table({"id": [A], "dead": [1]}))
    recipe.write_text(
        f"data: {{events: {{path: {good}, unit: minutes}}}}\n"
        f"events: {{labels: {{path: {tmp_path / 'labels.parquet'}, label: dead}}}}\n", encoding="utf-8",
    )  # fmt: skip
    outcome = unpad("data", "check", recipe, code=3)
    assert "faults: 11 E_LABEL" in outcome.out
    assert not any(str(FIRST_ID + n) in outcome.out for n in range(12))
    assert check(put_folder(tmp_path / "stays", ROWS)).passed
    assert check(put_meds(tmp_path / "meds", ROWS)).num_used == len(ROWS)
