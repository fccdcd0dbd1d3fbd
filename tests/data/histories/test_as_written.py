"""Tables of hospitals as they are written: dates of any layout, outcomes in words, and ids under other names."""

import re
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
def test_a_date_in_a_format_is_the_same_time_as_in_that_of_iso(tmp_path, text, layout, iso):
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


@pytest.mark.promise("patients.long-table")
@pytest.mark.parametrize("field", ["time", "landmark", "events"])
@pytest.mark.parametrize(("zone", "layout"), [("Z", None), ("+02:00", None), (" +0200", "%Y-%m-%d %H:%M%z")])
def test_times_with_a_zone_are_not_compared_with_times_without(tmp_path, field, zone, layout):
    def cohort(zone: str, at: str = "2024-01-02 10:00") -> PatientTables:
        rows = "".join(f"{n},2024-01-01 10:00{zone},Na,1\n" for n in range(4))
        labels = "mrn,died,at\n" + "".join(f"{n},{n % 2},{at}\n" for n in range(4))
        named = {"time": "at"} if field == "time" else {}
        events: dict[str, Any] = {"labels": {"path": "l.csv", "id": "mrn", "label": "died", **named}}
        events |= {"landmark": "at"} if field == "landmark" else {}
        path = recipe(tmp_path, rows, labels, events, unit="timestamp", format=layout if zone else None)
        read = yaml.safe_load(path.read_text())
        if field == "events":
            read["data"]["events"].append({"path": "l.csv", "id": "mrn", "time": "at", "code": "died", "value": None})
        path.write_text(yaml.safe_dump(read))
        return read_cohort(load_recipe(str(path)))

    assert not cohort("").bad
    if field == "time" and layout is None:
        assert not cohort(zone, at="").bad, "no time has no zone"
    with pytest.raises(
        SourceError, match=r'E_UNIT the times of "taken_at" .* have a zone, and those of "at"'
    ) as caught:
        cohort(zone.strip() if layout is None else zone)
    assert caught.value.fix == "write the zone of every time, or of none"


# --------------------------------------------------------------------------- numbers


@pytest.mark.promise("patients.long-table")
@pytest.mark.parametrize(
    ("text", "what", "fixes"),
    [
        ("1,5", 'has a decimal comma: "1,5"', {'decimal: ","': 1.5}),
        ("-0,25", "has a decimal comma", {'decimal: ","': -0.25}),
        ("1.250,5", "has a decimal comma", {'decimal: ","': 1250.5}),
        ("1,250", 'is "1,250", 1250 or 1.25', {'decimal: "."': 1250, 'decimal: ","': 1.25}),
        ("1,250.5", "has commas between thousands", {'decimal: "."': 1250.5}),
        ("1.250.000", "has points between thousands", {'decimal: ","': 1250000}),
        ("12,345,678", "has commas between thousands", {'decimal: "."': 12345678}),
        ("<5", 'is the limit "<5"', {"limits: half": 2.5, "limits: bound": 5}),
        ("≤ 0.5", "is the limit", {"limits: half": 0.25, "limits: bound": 0.5}),
        (">100", "is the limit", {"limits: half": 100, "limits: bound": 100}),
    ],
)
@pytest.mark.parametrize("static", [False, True])
def test_a_number_of_two_readings_is_refused_and_each_setting_reads_what_its_message_says(
    tmp_path, static, text, what, fixes
):
    rows = f'1,01.12.2023,Na,"{text}"\n2,01.12.2023,Na,7\n'
    source: dict[str, Any] = {"format": "%d.%m.%Y"}
    if static:
        source = {"static": ["result"]}
    (worst,) = (row for row in tables(tmp_path, rows, **source).bad if row.code != "E_EMPTY")
    assert what in worst.what
    for setting, value in fixes.items():
        assert setting in worst.fix
        read = tables(tmp_path, rows, **source, **yaml.safe_load(setting))
        assert (read.bad, read.rows.values.tolist()) == ([], [value, 7])


@pytest.mark.parametrize(
    ("texts", "warns"),
    [(("950", "1.250"), True), (("950", "1.250", "0.5"), False), (("1.250", "2.125"), False), (("95", "1.250"), False)],
)
def test_a_point_that_may_be_between_thousands_is_named(tmp_path: Path, texts: tuple[str, ...], warns: bool) -> None:
    rows = "".join(f"{n},01.12.2023,Na,{text}\n" for n, text in enumerate(texts))
    notes = tables(tmp_path, rows, format="%d.%m.%Y").notes
    assert [note.startswith('e.csv: "result" has 1.250 beside whole numbers') for note in notes] == [True] * warns


@pytest.mark.promise("patients.long-table")
def test_a_point_beside_decimal_commas_is_refused_unless_it_is_between_thousands(tmp_path: Path) -> None:
    rows = "".join(f'{n},01.12.2023,Na,"{text}"\n' for n, text in enumerate(("1.5", "1.250", "2,5")))
    read = tables(tmp_path, rows, format="%d.%m.%Y", decimal=",")
    assert [row.what.partition(": ")[2] for row in read.bad] == ['"result" is "1.5", and decimal is ","']
    assert read.rows.values.tolist() == [1250, 2.5]
    limits = tables(tmp_path, '1,01.12.2023,Na,"<0,5"\n', format="%d.%m.%Y", limits="half")
    assert 'set decimal: ","' in limits.bad[0].fix
    words = tables(tmp_path, rows, format="%d.%m.%Y", words="code")
    assert [row.where[-2:] for row in words.bad] == [":4"], "a number never becomes a part of a code"


@pytest.mark.promise("patients.long-table")
@pytest.mark.parametrize(
    ("column", "other"),
    [("unit", "mg/dL"), ("ValueUOM", "mg/dL"), ("Unit of measure", "µmol/L"), ("dose_unit", "g"), ("unit_id", "8840")],
)
def test_a_code_in_two_units_is_named_and_may_be_two_codes(tmp_path, unpad, column, other):
    lines = [f"{n % 4},0{n % 9 + 1}.12.2023 14:00,{code},{n}" for n in range(40) for code in ("glucose", "Na")]
    units = ["mmol/L", *["MMOL/L"] * 29, *[other] * 10]
    rows = "".join(f"{line},{units[n // 2] if n % 2 == 0 else 'mmol/L'}\n" for n, line in enumerate(lines))
    path = recipe(tmp_path, rows, format=GERMAN)
    (tmp_path / "e.csv").write_text(HEAD.replace("\n", f",{column}\n") + rows, encoding="utf-8")
    said = unpad("data", "check", path, code=0).out
    assert f'warning: e.csv: "{column}" of glucose has mmol/L in 30 rows and {other} in 10 rows; convert' in said
    (note,) = read_cohort(load_recipe(str(path))).notes
    setting = yaml.safe_load(re.search("value_unit: .*(?= beside)", note)[0])
    change = [f"data.events={yaml.safe_dump(TABLE | setting | {'format': GERMAN}, default_flow_style=True)}"]
    split = read_cohort(load_recipe(str(path), change))
    assert split.rows.names == sorted(["Na [mmol/l]", "glucose [mmol/l]", f"glucose [{other.lower()}]"])
    assert not split.notes


@pytest.mark.promise("patients.long-table")
@pytest.mark.parametrize(
    ("header", "row", "says"),
    [
        ("Patient No;Taken at;Test;Result", "P{n};01.03.2024;Na;13{n},5", 'format: "%d.%m.%Y", decimal: ","}'),
        ("Patient No;Taken at;Test;Result", "P{n};01.03.2024;Na;1,25{n}", 'format: "%d.%m.%Y"}'),
        ("id;Date;stars", "P{n};01.03.2024;{m}", ""),
        ("Subject;Sent;From", "Re: {m};01.03.2024;a{m}", ""),
        ("Patient No;Ward", "P{n};W{m}", ""),
        ("picture;site", "{n}.png;{n}", "rename the column of the classes to label (one class a picture), and "),
        ("Subject;Body;Status", "Re: {m};a mail of {n} words;{m}", "prompt: COLUMN, reply: COLUMN}'"),
        ("Patient No;Date;Note", "P{n};01.03.2024;note {n} of many words", 'if "Note" is the text'),
    ],
)
def test_a_table_of_a_hospital_says_what_it_may_be(tmp_path, unpad, header, row, says):
    lines = [row.format(n=n, m=n % 3) for n in range(9)]
    (tmp_path / "t.csv").write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    said = unpad("data", "check", "t.csv", code=3).err
    assert says in said
    assert ("of patients" in said) == says.endswith(("}", "dropna()"))


# --------------------------------------------------------------------------- outcomes in words


@pytest.mark.promise("patients.long-table")
def test_outcomes_in_words_are_labels_by_a_map(tmp_path: Path, unpad: Shell) -> None:
    words = "mrn,state\n0,alive\n1,Dead\n2, alive\n3,lost\n"
    labels = {"path": "l.csv", "id": "mrn", "label": "state", "missing": "keep"}
    mine = recipe(tmp_path, labels=words.replace(",lost", ",dead"), events={"labels": labels}, format=GERMAN)
    refused = unpad("data", "check", mine)
    change = "events.labels.map={alive: ?, dead: ?}"
    said = "of alive (2), dead (2), say which is 0, 1 or null (not known), in place of each ?: "
    assert f"{said}'{change}'" in refused.out
    assert "in place of each ?" in unpad("data", "check", mine, change, code=2).err
    change = change.replace("?", "0", 1).replace("?", "1")
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
def test_all_words_of_an_outcome_are_listed_with_their_rows(tmp_path: Path) -> None:
    counts = {"Died": 3, "Home": 4, "Nursing home": 2, "Lost (week 2)": 2, "Miller": 1, "": 1}
    words = [word for word, rows in counts.items() for _ in range(rows)]
    labels = {"path": "l.csv", "id": "mrn", "label": "state", "missing": "keep"}
    text = "mrn,state\n" + "".join(f"{n},{word}\n" for n, word in enumerate(words))
    bad = tables(tmp_path, labels=text, events={"labels": labels}, format=GERMAN).bad
    assert len(bad) == 12
    (fix,) = {row.fix for row in bad}
    assert fix.startswith("of home (4), died (3), nursing home (2), lost (week 2) (2) and 1 other, say which")
    classes = fix.partition("'events.labels.classes=")[2].strip("'")
    assert yaml.safe_load(classes) == ["home", "died", "nursing home", "lost (week 2)"]
    assert "miller" not in str(bad).lower()


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
def test_facts_that_are_ids_or_numbers_beside_words_are_warned_of(tmp_path: Path, unpad: Shell) -> None:
    columns = (f"{n},X{n},{'mf'[n % 2]},{n + 40 if n else 'unknown'},{n % 4 if n > 3 else 'x'}" for n in range(30))
    facts = "mrn,nhs,sex,age,stage\n" + "\n".join(columns) + "\n"
    path = recipe(tmp_path, labels=facts, format=GERMAN)
    told = yaml.safe_load(path.read_text())
    told["data"]["events"].append({"path": "l.csv", "id": "mrn", "static": ["mrn", "nhs", "sex", "age", "stage"]})
    path.write_text(yaml.safe_dump(told))
    outcome = unpad("data", "check", path, code=0)
    assert 'warning: l.csv: "mrn" is the id of the patient, and also one of the facts' in outcome.out
    assert '"nhs" has a word of its own for nearly every patient' in outcome.out
    assert 'warning: l.csv: "age" has words in 1 row, so that its numbers are read as words too; empty' in outcome.out
    assert '"sex"' not in outcome.out
    assert '"stage"' not in outcome.out
    assert sum(note.startswith("warning") for note in check(path).notes) == 3
