"""`unpad embed --data`: what the run does not know of new patients is counted, warned of and marked in their rows."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.helpers.event_tables import draw_rows, opened, put, table
from tests.helpers.patient_tables import MODEL
from tests.helpers.shell import Shell
from tests.helpers.toy import quiet, write_recipe
from unpad.data.histories.assemble import QUANTILES, load_codes
from unpad.data.patient_marks import beyond, mark_patients, unknown_lines
from unpad.data.patients import EventData
from unpad.training.loop import train

pytestmark = pytest.mark.slow

USUAL = {"temperature": (37.0, 0.5), "pulse": (80.0, 12.0), "lactate": (1.5, 0.4)}


def write(
    path: Path, first: int, num: int = 40, factor: float = 1.0, shift: float = 0.0, stretch: float = 1, **renamed: str
) -> Path:
    """Measurements of patients before day 0, six of each kind; the values are `factor`, and the days `stretch` times
    the usual ones."""
    path.parent.mkdir(exist_ok=True)
    rng = np.random.default_rng(first)
    rows = [
        (person, stretch * -float(day) + shift, renamed.get(code, code), float(rng.normal(mean, sd)) * factor)
        for person in range(first, first + num)
        for code, (mean, sd) in USUAL.items()
        for day in rng.permutation(200)[:6]
    ]
    columns = [pa.array(column) for column in zip(*rows, strict=True)]
    pq.write_table(pa.table(columns, names=["id", "days", "code", "value"]), path)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps on 80 patients."""
    root = tmp_path_factory.mktemp("marks")
    source = {"path": str(write(root / "tests.parquet", 0, 80)), "time": "days"}
    recipe = {
        "data": {"holdout": 0.1, "events": [source]},
        "events": {"landmark": 0},
        "model": MODEL,
        "plan": {"tokens_per_step": 400, "tokens_per_micro": 400},
        "train": {"max_steps": 2, "threads": 1},
        "precision": "fp32",
    }
    write_recipe(root / "recipe.yaml", recipe)
    train(str(root / "recipe.yaml"), root / "run", [], console=quiet())
    return root / "run"


@dataclass(frozen=True)
class Embedded:
    code: int
    out: str
    err: str
    rows: dict[str, list[Any]]

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.out.splitlines() if line.startswith("warning: ")]


def embedded(unpad: Shell, run: Path, data: Path, level: str = "patient") -> Embedded:
    file = data.with_name("out.parquet")
    told = unpad("embed", run, "--data", data, "--out", file, "--level", level)
    return Embedded(told.code, told.out, told.err, pq.read_table(file).to_pydict() if file.exists() else {})


@pytest.mark.promise("patients.embed")
def test_patients_like_those_of_training_are_read_without_a_warning(unpad: Shell, run: Path, tmp_path: Path) -> None:
    found = embedded(unpad, run, write(tmp_path / "new.parquet", 500))
    assert found.code == 0
    assert found.warnings == []
    assert "720 rows read, 0 quarantined; 720 events = 720 used" in found.out
    assert "40 patients\n" in found.out, "they have no side of a split"
    assert "0 of 720 events have codes unknown to the run (0.0%)" in found.out
    assert "0 of 40 patients have no event to read (0.0%)" in found.out
    assert found.rows["events"] == [18] * 40
    assert found.rows["unknown_codes"] == found.rows["after_landmark"] == [0] * 40
    assert found.rows["mark"] == [""] * 40
    assert 0 <= sum(found.rows["outside_range"]) < 30


@pytest.mark.promise("patients.embed")
def test_values_of_another_unit_are_noticed(unpad: Shell, run: Path, tmp_path: Path) -> None:
    found = embedded(unpad, run, write(tmp_path / "new.parquet", 500, factor=88))
    assert found.code == 0
    assert "720 of 720 values are beyond the least and the most of their code in training (100.0%)" in found.out
    for code, (mean, _) in USUAL.items():
        (line,) = [
            line for line in found.warnings if line.startswith(f"warning: {code}: 240 of 240 values outside of ")
        ]
        assert line.endswith("is this another unit?")
        median = float(line.partition("their median is ")[2].partition(",")[0])
        assert median == pytest.approx(88 * mean, rel=0.1)
    assert found.rows["outside_range"] == [18] * 40
    assert found.rows["mark"] == ["unusual values"] * 40


@pytest.mark.promise("patients.embed")
@pytest.mark.parametrize(
    ("stretch", "warns", "mark"), [(24, True, "unusual times"), (1 / 24, True, ""), (1, False, "")]
)
def test_days_that_are_hours_are_noticed(unpad, run, tmp_path, stretch, warns, mark):
    found = embedded(unpad, run, write(tmp_path / "new.parquet", 500, stretch=stretch))
    said = [line for line in found.warnings if "times of events from the landmark have a median of -" in line]
    assert len(said) == warns
    assert set(found.rows["mark"]) == {mark}
    assert not warns or said[0].endswith("in training -97: is this another unit?")


def test_durations_that_are_hours_are_noticed(tmp_path: Path) -> None:
    rows = [(person, -float(day), "a", 1.0) for person in range(40) for day in range(5)]
    events = {"path": str(put(tmp_path / "e.parquet", table(rows))), "unit": "days"}
    labels = {"path": str(tmp_path / "l.parquet"), "event": "died", "duration": "end", "horizon": 10}

    def read(factor: float, kept: dict[str, bytes] | None = None) -> EventData:
        ends = [factor * (30.0 + person) for person in range(40)]
        put(tmp_path / "l.parquet", pa.table({"id": range(40), "died": [i % 2 for i in range(40)], "end": ends}))
        return opened(events, kept=kept, data={"holdout": 0.1}, events={"landmark": 0, "labels": labels})

    known = read(1).files
    for factor in (1, 24):
        data = read(factor, known)
        lines = [line for line in unknown_lines(data, mark_patients(data)) if "durations from the landmark" in line]
        assert len(lines) == (factor > 1)


def test_an_evaluation_of_new_patients_says_what_the_run_does_not_know(unpad: Shell, run: Path, tmp_path: Path) -> None:
    usual = write(tmp_path / "usual" / "tests.parquet", 500).parent
    strange = write(tmp_path / "strange" / "tests.parquet", 500, factor=88, pulse="LOINC-pulse").parent
    found = unpad("eval", run, "--data", usual)
    assert (found.code, "warning: " in found.out) == (0, False), found.err
    assert "40 patients: 40 to evaluate\n" in found.out
    found = unpad("eval", run, "--data", strange, code=0)
    assert "warning: 240 of 720 events have codes unknown to the run (33.3%)" in found.out
    assert "warning: lactate: 240 of 240 values outside of " in found.out
    unknown = write(tmp_path / "unknown" / "tests.parquet", 500, **{name: f"LOINC-{name}" for name in USUAL}).parent
    refused = unpad("eval", run, "--data", unknown)
    assert (refused.code, "E_CODE" in refused.err) == (3, True)


def test_a_file_that_is_not_named_parquet_is_refused(unpad: Shell, run: Path, tmp_path: Path) -> None:
    refused = unpad("embed", run, "--out", tmp_path / "vectors.csv", code=2)
    assert "name it vectors.parquet" in refused.err
    assert not (tmp_path / "vectors.csv").exists()


@pytest.mark.promise("patients.embed")
def test_a_table_of_unknown_codes_is_refused_and_some_are_marked(unpad: Shell, run: Path, tmp_path: Path) -> None:
    renamed = {name: f"LOINC-{name}" for name in USUAL}
    refused = embedded(unpad, run, write(tmp_path / "new.parquet", 500, **renamed))
    assert refused.code == 3
    assert refused.rows == {}, "nothing is written"
    assert "E_CODE none of the 720 events has a code that the run knows: LOINC-" in refused.err
    del renamed["pulse"]
    some = embedded(unpad, run, write(tmp_path / "some.parquet", 500, **renamed))
    assert some.code == 0
    assert "warning: 480 of 720 events have codes unknown to the run (66.7%)" in some.warnings
    assert some.rows["unknown_codes"] == [12] * 40
    assert some.rows["mark"] == ["unknown codes"] * 40


@pytest.mark.promise("patients.embed")
def test_patients_without_events_before_the_landmark_are_marked_or_refused(unpad, run, tmp_path):
    late = write(tmp_path / "late.parquet", 500, 10, shift=300)
    refused = embedded(unpad, run, late)
    assert refused.code == 3
    assert "none of the 180 events can be read: all are after the landmark" in refused.err
    on_time, after = write(tmp_path / "on_time.parquet", 900, 30), write(tmp_path / "after.parquet", 900, 5, shift=300)
    both = pa.concat_tables([pq.read_table(path) for path in (late, on_time, after)])
    pq.write_table(both, tmp_path / "both.parquet")
    found = embedded(unpad, run, tmp_path / "both.parquet")
    assert found.code == 0
    what = "10 of 40 patients have no event to read, 10 of them because all are after the landmark (25.0%)"
    assert f"warning: {what}" in found.warnings
    assert found.rows["after_landmark"] == [18] * 15 + [0] * 25, "five of them have other events too"
    assert found.rows["mark"] == ["no events before the landmark"] * 10 + [""] * 30


def test_patients_of_whom_only_facts_are_known_are_marked(tmp_path: Path) -> None:
    rows = [(1, 5.0, "a", 1.0), (1, 9.0, "a", 2.0), (2, 70.0, "a", 1.0)]
    events = {"path": str(put(tmp_path / "e.parquet", table(rows, time="minute"))), "time": "minute"}
    people = pa.table({"id": [1, 2, 3], "age": [30.0, 40.0, 50.0]})
    facts = {"path": str(put(tmp_path / "people.parquet", people)), "static": ["age"]}
    data = opened([events, facts], data={"holdout": 0}, events={"landmark": 60, "unit": "minutes"})
    marks = mark_patients(data)
    assert marks.events.tolist() == [3, 1, 1]
    assert marks.texts() == ["", "no events before the landmark", "no events"]
    put(tmp_path / "e.parquet", table(rows[:2], time="minute"))
    on_time = opened([events, facts], data={"holdout": 0}, events={"landmark": 60, "unit": "minutes"})
    assert mark_patients(on_time).texts() == ["", "no events", "no events"], "where others have them"
    alone = opened([facts], data={"holdout": 0}, events={"landmark": 60, "unit": "minutes"})
    assert mark_patients(alone).texts() == ["", "", ""], "where facts are all there is, nobody lacks events"


@pytest.mark.promise("patients.embed")
def test_a_fact_that_is_miscoded_or_out_of_range_marks_its_patient(tmp_path: Path) -> None:
    rows = [(i, -float(day), "a", 1.0 + day % 3) for i in range(40) for day in range(60)]
    events = {"path": str(put(tmp_path / "e.parquet", table(rows))), "unit": "days"}
    facts = {"path": str(tmp_path / "people.parquet"), "static": ["age", "sex"]}

    def people(age: float, sex: str) -> None:
        sexes = [sex if i % 2 else "female" for i in range(40)]
        ages = [age + i % 5 for i in range(40)]
        put(tmp_path / "people.parquet", pa.table({"id": range(40), "age": ages, "sex": sexes}))

    people(30, "male")
    known = opened([events, facts], data={"holdout": 0.1}, events={"landmark": 0}).files
    unlike = ((30, "male", "", 0), (30, "M", "unknown codes", 20), (400, "male", "unusual values", 40))
    for age, sex, mark, share in unlike:
        people(age, sex)
        data = opened([events, facts], kept=known, data={"holdout": 0.1}, events={"landmark": 0})
        marks = mark_patients(data)
        assert marks.texts()[1::2] == [mark] * 20
        what = f"{share} of 40 patients have mostly unknown codes or unusual values, or such a fact"
        assert any(line.startswith("warning: " * bool(share) + what) for line in unknown_lines(data, marks))


def test_sets_are_marked_one_by_one(unpad: Shell, run: Path, tmp_path: Path) -> None:
    content = pq.read_table(write(tmp_path / "new.parquet", 500, 3)).to_pydict()
    content["value"] = [
        value * (88 if day > -100 else 1) for value, day in zip(content["value"], content["days"], strict=True)
    ]
    pq.write_table(pa.table(content), tmp_path / "new.parquet")
    found = embedded(unpad, run, tmp_path / "new.parquet", "set").rows
    recent = [day > -100 for day in found["days_from_landmark"]]
    assert any(recent)
    assert not all(recent)
    for is_recent, events, outside, mark in zip(
        recent, found["events"], found["outside_range"], found["mark"], strict=True
    ):
        if is_recent:
            assert (outside, mark) == (events, "unusual values")
    assert sum(outside for is_recent, outside in zip(recent, found["outside_range"], strict=True) if not is_recent) < 4


def test_a_run_that_records_no_values_says_so(unpad: Shell, run: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(run, old)
    kept = json.loads((old / "events.json").read_text())
    del kept["quantiles"]
    (old / "events.json").write_text(json.dumps(kept, ensure_ascii=False, indent=1))
    found = embedded(unpad, old, write(tmp_path / "new.parquet", 500, factor=88))
    assert "does not record the values of training, so values of another unit go unnoticed" in found.out
    assert found.rows["outside_range"] == [None] * 40
    assert found.rows["mark"] == [""] * 40


def test_values_are_unusual_beyond_the_middle_98_percent_on_both_sides(tmp_path: Path) -> None:
    rows = [(person, float(person), "a", float(person)) for person in range(200)]
    data = opened({"path": str(put(tmp_path / "e.parquet", table(rows))), "unit": "minutes"}, data={"holdout": 0})
    for margin, unusual in ((0, []), (1, [0, 1, 198, 199])):
        found = beyond(data, margin)
        assert found is not None
        values = data.values[found] * data.known.std[data.code[found]] + data.known.mean[data.code[found]]
        assert np.sort(values).round().tolist() == unusual


def test_quantiles_are_those_of_the_values_of_training_patients(tmp_path: Path) -> None:
    rows = draw_rows(60, seed=3)
    source = {"path": str(put(tmp_path / "e.parquet", table(rows))), "unit": "minutes"}
    data = opened(source, data={"holdout": 0}, events={"duplicates": "keep"})
    for index, name in enumerate(data.known.names):
        values = [value for _, _, code, value in rows if code == name and value is not None]
        expected = [sorted(values)[round(share * (len(values) - 1))] if values else 0.0 for share in QUANTILES]
        assert data.known.quantiles[index].tolist() == expected, name
    days = np.sort([at - max(day for who, day, *_ in rows if who == person) for person, at, *_ in rows]) / 1440
    assert data.known.times == pytest.approx([days[round(share * (len(days) - 1))] for share in QUANTILES])
    assert data.known.durations is None
    again = load_codes(data.known.to_bytes())
    assert again.to_bytes() == data.known.to_bytes()
    without = json.loads(data.known.to_bytes())
    del without["quantiles"], without["times"]
    old = json.dumps(without, ensure_ascii=False, indent=1).encode()
    assert load_codes(old).to_bytes() == old, "the fingerprint of an old run stays"


@pytest.mark.promise("data.near-duplicates")
@pytest.mark.parametrize("rule", ["together", "refuse"])
def test_a_new_run_of_patients_refuses_a_rule_for_near_duplicates_and_an_earlier_one_is_read(
    unpad, run, tmp_path, rule
):
    refused = unpad(
        "train", run.parent / "recipe.yaml", f"data.near_duplicates={rule}", "--out", tmp_path / "new", code=2
    )
    assert f"{rule} does not apply" in refused.err
    old = tmp_path / "old"
    shutil.copytree(run, old)
    kept = old / "recipe.yaml"
    values = yaml.safe_load(kept.read_text("utf-8"))
    values["data"]["near_duplicates"] = rule
    kept.write_text(yaml.safe_dump(values), "utf-8")
    assert unpad("eval", old).code == 0
