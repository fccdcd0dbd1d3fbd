"""Tables of hospitals as they are written: dates of any layout, outcomes in words, and ids under other names."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.helpers.shell import Shell
from unpad.data.check import check
from unpad.data.histories.cohort import PatientTables, read_cohort
from unpad.errors import SourceError
from unpad.recipes.file import load_recipe

HEAD = "mrn,taken_at,test,result\n"
GERMAN = "%d.%m.%Y %H:%M"
TABLE = {"path": "e.csv", "id": "mrn", "time": "taken_at", "code": "test", "value": "result"}
ROWS = "".join(f"{n % 4},{n + 1:02}.12.2023 14:0{n},Na,{n}.5\n" for n in range(8))


def tables(folder: Path, rows: str = ROWS, labels: str = "", events: Any = None, **source: Any) -> PatientTables:
    """The tables of a recipe: events, and labels where there are some."""
    return read_cohort(load_recipe(str(recipe(folder, rows, labels, events, **source))))


def recipe(folder: Path, rows: str = ROWS, labels: str = "", events: Any = None, **source: Any) -> Path:
    (folder / "e.csv").write_text(HEAD + rows, encoding="utf-8")
    (folder / "l.csv").write_text(labels, encoding="utf-8")
    told = {"data": {"events": [TABLE | source], "root": str(folder)}, "events": events or {}}
    path = folder / "r.yaml"
    path.write_text(yaml.safe_dump({**told, "model": {"kind": "set_sequence"}}), encoding="utf-8")
    return path


# --------------------------------------------------------------------------- dates


@pytest.mark.promise("patients.long-table")
@pytest.mark.parametrize(
    ("text", "layout", "iso"),
    [
        ("31.12.2023 14:05", GERMAN, "2023-12-31 14:05:00"),
        ("1.2.2023 4:05", GERMAN, "2023-02-01 04:05:00"),
        ("12/31/2023 02:05 PM", "%m/%d/%Y %I:%M %p", "2023-12-31 14:05:00"),
        ("31DEC23", "%d%b%y", "2023-12-31"),
        ("31.12.2023 14:05 +0200", "%d.%m.%Y %H:%M %z", "2023-12-31 12:05:00"),
    ],
)
def test_a_date_in_a_format_is_the_same_time_as_in_that_of_iso(
    tmp_path: Path, text: str, layout: str, iso: str
) -> None:
    mine = tables(tmp_path, f"1,{text},Na,1\n1,{text},K,\n", format=layout)
    plain = tables(tmp_path, f"1,{iso},Na,1\n1,{iso},K,\n", unit="timestamp")
    assert np.array_equal(mine.rows.days, plain.rows.days)
    assert not mine.bad


@pytest.mark.promise("patients.long-table")
@pytest.mark.parametrize("unit", ["auto", "timestamp"])
def test_dates_of_a_common_layout_are_proposed_and_the_first_is_shown(tmp_path: Path, unit: str) -> None:
    rows = ROWS.replace("01.12.2023", "31.12.2023")
    if unit == "auto":
        with pytest.raises(SourceError) as caught:
            tables(tmp_path, rows)
        what, fix = caught.value.what, caught.value.fix
        assert "holds dates that need a format" in what
    else:
        worst = tables(tmp_path, rows, unit=unit).bad[0]
        what, fix = worst.what, worst.fix
    assert ': "31.12.2023 14:00"' in what
    assert f'unit: timestamp, format: "{GERMAN}"' in fix
    assert not tables(tmp_path, rows, unit="timestamp", format=GERMAN).bad


@pytest.mark.promise("patients.long-table")
def test_days_and_months_that_no_row_tells_apart_are_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        tables(tmp_path, "1,01/02/2023,Na,1\n1,03/04/2023,Na,2\n")
    assert '"%d/%m/%Y" or "%m/%d/%Y": no row tells the day from the month' in caught.value.fix


def test_times_of_labels_have_a_format_of_their_own(tmp_path: Path) -> None:
    known = "mrn,died,known\n0,1,12/31/2023\n1,0,12/31/2023\n"
    labels = {"path": "l.csv", "id": "mrn", "label": "died", "time": "known", "missing": "keep"}
    assert tables(tmp_path, labels=known, events={"labels": labels}, format=GERMAN).bad[0].code == "E_UNIT"
    read = tables(tmp_path, labels=known, events={"labels": {**labels, "format": "%m/%d/%Y"}}, format=GERMAN)
    assert (read.bad, int(read.labels.usable.sum()) if read.labels else 0) == ([], 2)


# --------------------------------------------------------------------------- outcomes in words


@pytest.mark.promise("patients.long-table")
def test_outcomes_in_words_are_labels_by_a_map(tmp_path: Path, unpad: Shell) -> None:
    words = "mrn,state\n0,alive\n1,Dead\n2, alive\n3,lost\n"
    labels = {"path": "l.csv", "id": "mrn", "label": "state", "missing": "keep"}
    refused = unpad(
        "data",
        "check",
        recipe(tmp_path, labels=words.replace(",lost", ",dead"), events={"labels": labels}, format=GERMAN),
    )
    change = "events.labels.map={alive: 0, dead: 1}"
    assert f"'{change}'" in refused.out
    mine = recipe(tmp_path, labels=words.replace(",lost", ",dead"), events={"labels": labels}, format=GERMAN)
    assert unpad("data", "check", mine, change).code == 0
    beside = unpad("data", "check", tmp_path / "l.csv", change)
    assert "must be given\n  at: command line: events.labels.path" in beside.err
    told = {"labels": {**labels, "map": {"ALIVE": 0, "dead": 1, "lost": None}}}
    read = tables(tmp_path, labels=words, events=told, format=GERMAN)
    assert not read.bad
    assert read.cohort.label.tolist() == [0, 1, 0, -1]
    del told["labels"]["map"]["lost"]
    (worst,) = tables(tmp_path, labels=words, events=told, format=GERMAN).bad
    assert (worst.code, worst.where.rpartition(":")[2]) == ("E_LABEL", "5")
    assert "lost" not in worst.what


@pytest.mark.promise("patients.long-table")
def test_words_that_may_name_somebody_are_in_no_message(tmp_path: Path) -> None:
    names = "mrn,state\n" + "".join(f"{n},{name}\n" for n, name in enumerate(("Miller", "Smith", "Jones", "Brown")))
    labels = {"path": "l.csv", "id": "mrn", "label": "state"}
    said = str([row for row in tables(tmp_path, labels=names, events={"labels": labels}, format=GERMAN).bad])
    assert "E_TYPE" in said
    assert not [name for name in ("miller", "smith", "jones") if name in said.lower()]


@pytest.mark.promise("patients.long-table")
def test_labels_that_contradict_each_other_are_told_from_repeated_ones(tmp_path: Path) -> None:
    twice = "mrn,died\n0,1\n1,0\n0,0\n1,0\n2,1\n"
    labels = {"path": "l.csv", "id": "mrn", "label": "died", "missing": "keep"}
    bad = tables(tmp_path, labels=twice, events={"labels": labels}, format=GERMAN).bad
    assert [("contradict" in row.what, row.where.rpartition(":")[2]) for row in bad] == [
        (True, "2"), (False, "3"), (True, "4"), (False, "5"),
    ]  # fmt: skip


# --------------------------------------------------------------------------- ids


@pytest.mark.promise("patients.long-table")
@pytest.mark.parametrize("given", [{"id": "patient"}, {"id": "mnr"}, {"id": "auto"}])
def test_a_mistyped_id_is_named_and_never_makes_a_file_of_one_patient(tmp_path: Path, given: dict[str, str]) -> None:
    with pytest.raises(SourceError) as caught:
        tables(tmp_path, format=GERMAN, **given)
    assert caught.value.what.startswith("E_MISSING no column")
    assert caught.value.fix == "name yours with `id:` in data.events; did you mean mrn?"


@pytest.mark.promise("patients.long-table")
@pytest.mark.parametrize("field", ["time", "code", "value", "label", "event", "duration", "static"])
def test_a_mistyped_column_is_named_by_the_field_that_has_it(tmp_path: Path, field: str) -> None:
    labels: dict[str, Any] = {"path": "l.csv", "id": "mrn", "event": "died", "duration": "until"}
    source: dict[str, Any] = {"format": GERMAN}
    if field == "label":
        labels = {"path": "l.csv", "id": "mrn", "label": "dyed"}
    elif field in labels:
        labels[field] = "dyed" if field == "event" else "untill"
    else:
        source |= {"static": ["tests"]} if field == "static" else {field: "tests"}
    with pytest.raises(SourceError, match="E_MISSING") as caught:
        tables(tmp_path, labels="mrn,died,until\n0,1,3\n", events={"labels": labels, "landmark": None}, **source)
    assert f"name yours with `{field}:`" in caught.value.fix
    assert "did you mean" in caught.value.fix


@pytest.mark.promise("patients.long-table")
def test_an_id_among_the_facts_is_warned_of(tmp_path: Path, unpad: Shell) -> None:
    facts = "mrn,nhs,sex\n" + "".join(f"{n},X{n},{'mf'[n % 2]}\n" for n in range(30))
    path = recipe(tmp_path, labels=facts, format=GERMAN)
    told = yaml.safe_load(path.read_text())
    told["data"]["events"].append({"path": "l.csv", "id": "mrn", "static": ["mrn", "nhs", "sex"]})
    path.write_text(yaml.safe_dump(told))
    outcome = unpad("data", "check", path, code=0)
    assert 'warning: l.csv: "mrn" is the id of the patient, and also one of the facts' in outcome.out
    assert '"nhs" has a word of its own for nearly every patient' in outcome.out
    assert '"sex"' not in outcome.out
    assert sum(note.startswith("warning") for note in check(path).notes) == 2
