"""Patients from tables to batches: the same from every layout, cut at the landmark, scaled by training alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from tests.helpers.event_tables import (
    FIRST_ID,
    MEASURED,
    Row,
    draw_rows,
    micro_of,
    opened,
    put,
    put_folder,
    put_meds,
    recipe_of,
    table,
)
from tests.helpers.patients import tiny_patients_model
from unpad.batching.batch import RaggedBatch, concatenate
from unpad.batching.plan import plan
from unpad.data.histories.cohort import read_cohort, refuse_unlearnable
from unpad.data.histories.report import cohort_lines
from unpad.data.histories.tables import alias
from unpad.data.patients import EventData
from unpad.errors import RecipeError, SourceError
from unpad.models import model_config
from unpad.models.set_sequence.event_sets import EventSets
from unpad.recipes.recipe import Recipe
from unpad.recipes.training import PlanSettings, strategy_names

A, B, C = FIRST_ID, FIRST_ID + 1, FIRST_ID + 2


def long(root: Path, rows: list[Row], **source: Any) -> dict[str, Any]:
    return {"path": str(put(root / "long.parquet", table(rows))), "unit": "minutes", **source}


def on_the_first_day(root: Path, ids: list[int]) -> dict[str, Any]:
    """One event of each of these patients."""
    return long(root, [(patient, 1, "x", 1.0) for patient in ids], unit="days")


def whole(sources: Any, **events: Any) -> EventData:
    """All patients, none of them held out."""
    return opened(sources, data={"holdout": 0}, events=events)


def sides_of(rows: list[Row]) -> dict[int, str]:
    return {patient: ("train", "train", "valid")[n % 3] for n, patient in enumerate(sorted({row[0] for row in rows}))}


def split_file(path: Path, sides: dict[int, str]) -> dict[str, str]:
    put(path, pa.table({"id": list(sides), "split": list(sides.values())}))
    return {"split": str(path)}


def label_file(path: Path, **columns: list[Any]) -> str:
    return str(put(path, pa.table(columns)))


def of(data: EventData, patient: int) -> int:
    """The sequence of a patient."""
    return data.ids.tolist().index(patient if data.ids.dtype == np.int64 else str(patient))


def told(data: EventData, patient: int) -> list[tuple[float, list[tuple[str, float | None]]]]:
    """A patient as (time, [(code, value in its own unit)]) of every set."""
    seq, sets = of(data, patient), data.sets
    found = []
    for one in range(sets.sets_of[seq], sets.sets_of[seq + 1]):
        inside = []
        for event in range(sets.set_starts[one], sets.set_starts[one + 1]):
            code, value = data.code[event], float(data.values[event])
            own = value * data.known.std[code] + data.known.mean[code]
            inside.append((data.codes[code], None if np.isnan(value) else round(float(own), 2)))
        found.append((round(float(sets.times[one]) * 1440, 1), sorted(inside, key=str)))
    return found


# --------------------------------------------------------------------------- layouts


def in_a_folder(root: Path, rows: list[Row], sides: dict[int, str]) -> EventData:
    return opened(str(put_folder(root / "stays", rows, sides)))


def in_one_table(root: Path, rows: list[Row], sides: dict[int, str]) -> EventData:
    return opened(long(root, rows), events=split_file(root / "split.parquet", sides))


def in_csv(root: Path, rows: list[Row], sides: dict[int, str]) -> EventData:
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    path = put(root / "long.csv", table(shuffled, id="person", code="what"))
    source = {"path": str(path), "id": "person", "code": "what", "unit": "minutes"}
    return opened(source, events=split_file(root / "split.csv", sides))


def in_two_tables(root: Path, rows: list[Row], sides: dict[int, str]) -> EventData:
    measured = put(root / "measured.parquet", table([row for row in rows if row[2] in MEASURED]))
    hours = [(patient, minute / 60, code, None) for patient, minute, code, _ in rows if code not in MEASURED]
    noted = put(root / "noted.parquet", table(hours, code="event").drop_columns("value"))
    sources = [
        {"path": str(measured), "unit": "minutes"},
        {"path": str(noted), "unit": "hours", "code": "event", "value": None},
    ]
    return opened(sources, events=split_file(root / "split.parquet", sides))


def in_meds(root: Path, rows: list[Row], sides: dict[int, str]) -> EventData:
    return opened(str(put_meds(root / "meds", rows, (), {k: v.replace("valid", "tuning") for k, v in sides.items()})))


LAYOUTS = (in_a_folder, in_one_table, in_csv, in_two_tables, in_meds)


@pytest.mark.promise("patients.layouts")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_every_layout_gives_the_same_patients(layout: Callable[..., EventData], tmp_path: Path) -> None:
    rows = draw_rows(30)
    data = layout(tmp_path, rows, sides_of(rows))
    last = {row[0]: row[1] for row in rows}
    assert len(data.ids) == len(last)
    for patient, side in sides_of(rows).items():
        sets: dict[float, list[tuple[str, float | None]]] = {}
        for row in rows:
            if row[0] == patient:
                sets.setdefault(row[1] - last[patient], []).append(row[2:])
        assert told(data, patient) == [(minute, sorted(inside, key=str)) for minute, inside in sets.items()]
        assert data.table.split[of(data, patient)] == (side == "valid")
    commonest = {
        code: sum(row[2] == code and sides_of(rows)[row[0]] == "train" for row in rows) for code in data.codes[1:]
    }
    assert list(data.codes[1:]) == sorted(commonest, key=lambda code: (-commonest[code], code))
    assert data.codes[0] == "<unknown>"
    assert data.describe_outputs() == "6 codes"
    assert not any(str(patient) in "\n".join(data.lines()) for patient in last)


def test_facts_come_first_and_diagnoses_have_no_value(tmp_path: Path) -> None:
    static: list[Row] = [(A, 0, "GENDER//F", None), (A, 0, "HEIGHT", 170.0), (B, 0, "GENDER//M", None)]
    rows: list[Row] = [(A, 60, "glucose", 90.0), (A, 120, "fever", None)]
    data = opened(str(put_meds(tmp_path / "meds", rows, static)), data={"holdout": 0})
    assert told(data, A) == [
        (-60.0, [("GENDER//F", None), ("HEIGHT", 170.0)]), (-60.0, [("glucose", 90.0)]), (0.0, [("fever", None)])
    ]  # fmt: skip
    assert told(data, B) == [(0.0, [("GENDER//M", None)])]
    assert data.sets.timeless.tolist() == [True, False, False, True]
    sets = data.load(micro_of(data, [of(data, A)])).require(EventSets)
    assert sets.has_value.tolist() == [not np.isnan(value) for value in data.values[:4]]
    assert (sets.values[~sets.has_value] == 0).all()


# --------------------------------------------------------------------------- sets, landmark, cuts


def test_sets_go_by_time_by_window_or_by_number(tmp_path: Path) -> None:
    rows: list[Row] = [(A, m, c, None) for m, c in ((0, "a"), (50, "b"), (50, "a"), (70, "c"), (130, "a"))]
    assert [m for m, _ in told(whole(long(tmp_path, rows)), A)] == [-130, -80, -60, 0]
    windowed = whole(long(tmp_path, rows), window=60, landmark=130)
    # Windows end at the landmark: (-180, -120], (-120, -60], (-60, 0]; a set has the time of its last event.
    assert [(m, len(inside)) for m, inside in told(windowed, A)] == [(-130, 1), (-60, 3), (0, 1)]
    numbered = table(rows, time="minute", code="variable").drop_columns("id")
    numbered = numbered.append_column("set_index", pa.array([0, 0, 0, 1, 2]))
    stays = str(put(tmp_path / "stays" / f"{A}.parquet", numbered).parent)
    assert [(m, len(inside)) for m, inside in told(whole(stays), A)] == [(-80, 3), (-60, 1), (0, 1)]
    by_time = whole({"path": stays, "set": None})
    assert [len(inside) for _, inside in told(by_time, A)] == [1, 2, 1, 1]


def test_rows_that_go_back_in_time_are_sorted_and_duplicates_dropped_and_counted(tmp_path: Path) -> None:
    rows: list[Row] = [(A, 50, "b", 1.0), (A, 0, "a", None), (A, 50, "b", 1.0), (A, 50, "b", 2.0), (A, 0, "a", None)]
    data = whole(long(tmp_path, rows))
    assert [(m, len(inside)) for m, inside in told(data, A)] == [(-50, 1), (0, 2)]
    assert data.report.counts["exact duplicates"] == 2
    assert any("2 rows went back in time" in line for line in data.lines())
    assert whole(long(tmp_path, rows), duplicates="keep").table.positions.tolist() == [5]


def test_nothing_after_the_landmark_is_read_and_all_rows_are_accounted_for(tmp_path: Path) -> None:
    rows = draw_rows(30)
    whole = opened(long(tmp_path, rows), events={"landmark": 10_000})
    cut = opened(long(tmp_path, rows), events={"landmark": 90})
    assert cut.report.counts["after the landmark"] == sum(row[1] > 90 for row in rows) > 0
    assert len(cut.code) + sum(cut.report.counts.values()) == len(rows)
    assert float(cut.sets.times.max()) == 0.0
    assert float(whole.sets.times.max()) < 0
    later = [row if row[1] <= 90 else (row[0], row[1], "sepsis", None) for row in rows]
    after = opened(long(tmp_path, list(dict.fromkeys(later))), events={"landmark": 90})
    assert (after.fingerprint(), after.files) == (cut.fingerprint(), cut.files), "what comes later changes nothing"


@pytest.mark.promise("patients.max-events")
@pytest.mark.parametrize("keep", ["latest", "earliest"])
def test_max_events_leaves_out_whole_sets_and_counts_them(keep: str, tmp_path: Path) -> None:
    rows: list[Row] = [(A, m, c, None) for m in (0, 10, 20) for c in ("a", "b")] + [
        (B, 5, str(n), None) for n in range(9)
    ]
    facts = put(tmp_path / "facts.parquet", pa.table({"id": [A], "age": [70]}))
    sources = [long(tmp_path, rows), {"path": str(facts), "static": ["age"]}]
    data = whole(sources, max_events=6, keep=keep, landmark=20)
    stay = [-10, 0] if keep == "latest" else [-20, -10]
    assert [m for m, _ in told(data, A)] == [stay[0], *stay], "facts stay, and stand where the first set does"
    assert data.table.positions[of(data, B)] == 9, "a set is never split"
    assert data.report.counts["beyond events.max_events"] == 2
    fewest = whole(sources, max_events=1, keep=keep, landmark=20)
    assert fewest.table.positions[of(fewest, A)] == 3, "facts count, and stay, and so does one set"
    assert any("2 beyond events.max_events" in line for line in data.lines())
    with pytest.raises(RecipeError, match="cut through a set") as caught:
        opened(sources, model={"context": 8}, plan={"overflow": "split"})
    assert "events.max_events=8" in caught.value.fix
    longest = int(data.table.positions.max())  # the smaller of model.context and plan.max_tokens is the limit
    for context, most in ((longest, None), (longest, longest + 1), (longest + 1, longest)):
        opened(sources, model={"context": context}, plan={"overflow": "split", "max_tokens": most})
    for context, most in ((longest - 1, longest), (longest, longest - 1)):
        for overflow in ("drop", "error"):
            opened(sources, model={"context": context}, plan={"overflow": overflow, "max_tokens": most})
        with pytest.raises(RecipeError, match=f"{longest} events, more than {longest - 1}") as caught:
            opened(sources, model={"context": context}, plan={"overflow": "split", "max_tokens": most})
        assert f"events.max_events={longest - 1}" in caught.value.fix


# --------------------------------------------------------------------------- labels


def test_labels_by_the_horizon_equal_a_walk_over_people(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    num = 300
    ids = list(range(FIRST_ID, FIRST_ID + num))
    ends, dead = rng.integers(0, 60, num).tolist(), rng.integers(0, 2, num).tolist()
    ends[0], dead[0] = 40, 0  # watched to the very horizon
    rows: list[Row] = [(patient, day, "x", None) for patient in ids[::2] for day in (1, 9, 30)]
    path = label_file(tmp_path / "people.parquet", id=ids, end=ends, dead=dead)
    made = {"path": path, "event": "dead", "duration": "end", "horizon": 30}
    source = {**long(tmp_path, rows), "unit": "days"}
    data = opened(source, events={"labels": made, "landmark": 10})
    expected, why = {}, {"over": 0, "censored": 0}
    for patient, end, died in zip(ids, ends, dead, strict=True):
        if end < 10:
            why["over"] += 1
        elif died and end <= 40:
            expected[patient] = 1
        elif end >= 40:
            expected[patient] = 0
        else:
            why["censored"] += 1
    assert dict(zip(data.ids.tolist(), data.labels.tolist(), strict=True)) == expected
    assert data.cohort.left_out == {
        "whose observation ended before the landmark": why["over"], "censored before the horizon": why["censored"]
    }  # fmt: skip
    assert data.ids.tolist() == list(expected), "in the order of their ids"
    batch = data.load(micro_of(data, range(len(data.ids))))
    assert batch.attended.lengths().tolist() == data.table.attended.tolist(), "sets and a readout"
    sets = batch.require(EventSets)
    lengths = {patient: float(end - 10) for patient, end in zip(ids, ends, strict=True)}
    assert sets.durations.tolist() == [lengths[patient] for patient in expected]
    assert sets.cause.tolist() == [bool(dead[ids.index(patient)]) for patient in expected]
    empty = [patient for patient in expected if patient not in ids[::2]]
    assert int((data.table.positions == 0).sum()) == len(empty) > 0, "who has no event stays"
    kept = opened(source, events={"labels": {**made, "censored": "keep"}, "landmark": 10})
    assert kept.labels is not None
    assert int((kept.labels == -1).sum()) == why["censored"]
    binned = {"kind": "set_sequence", "bins": [0, 30]}
    learned = opened(source, events={"labels": made, "landmark": 10}, model=binned)
    assert learned.ids.tolist() == kept.ids.tolist(), "hazards learn from the censored too"
    without = opened(source, events={"labels": {**made, "censored": "exclude"}, "landmark": 10}, model=binned)
    assert without.ids.tolist() == data.ids.tolist()
    timed = {"labels": {k: v for k, v in made.items() if k != "horizon"}, "landmark": 10}
    only = opened(source, events=timed, model={"kind": "set_sequence", "bins": [0, 30]})
    assert (only.labels, len(only.ids)) == (None, num - why["over"])
    with pytest.raises(RecipeError, match="nothing learns the outcome") as caught:
        opened(source, events=timed)
    assert "events.labels.horizon" in caught.value.fix
    assert "model.bins" in caught.value.fix
    assert opened(source, kept=only.files, events=timed).labels is None, "a run that is trained can be used"


def test_a_landmark_of_their_own_and_labels_that_are_missing(tmp_path: Path) -> None:
    rows: list[Row] = [(p, m, "x", float(m)) for p in (A, B, C) for m in (0, 60, 120)]
    path = label_file(tmp_path / "labels.parquet", id=[A, B], dead=[True, False], at=[60, 120])
    made = {"path": path, "label": "dead"}
    data = whole(long(tmp_path, rows), labels={**made, "missing": "exclude"}, landmark="at")
    assert (data.ids.tolist(), data.labels is not None and data.labels.tolist()) == ([A, B], [1, 0])
    assert [m for m, _ in told(data, A)] == [-60, 0]
    assert data.cohort.left_out == {"without a label": 1}
    data = whole(long(tmp_path, rows), labels={**made, "missing": "keep"}, landmark=90)
    assert (data.ids.tolist(), data.labels is not None and data.labels.tolist()) == ([A, B, C], [1, 0, -1])
    assert data.table.num_targets.tolist() == [1, 1, 1]
    assert "1 with the outcome, 1 without, 1 without a label" in data.lines()


@pytest.mark.parametrize(("unit", "days"), [("days", 30.0), ("hours", 1.25)])
def test_the_data_decides_the_horizon_and_the_linear_path(tmp_path: Path, unit: str, days: float) -> None:
    path = label_file(tmp_path / "people.parquet", id=[A, B], end=[40, 50], dead=[1, 0])
    made = {"path": path, "event": "dead", "duration": "end", "horizon": 30}
    source = {**long(tmp_path, [(A, 0, "x", 1.0), (B, 0, "x", 2.0)]), "unit": unit}

    def completed(scale: str, **fields: object) -> dict[str, object]:
        settings = {"labels": made, "landmark": 0, "scale": scale}
        data = opened(source, data={"holdout": 0}, events=settings, model={"kind": "set_sequence", **fields})
        config = data.complete(model_config({"kind": "set_sequence", **fields})).model_dump()
        return {name: config[name] for name in ("horizon", "last_values")}

    assert completed("standard") == {"horizon": None, "last_values": False}
    assert completed("standard", bins=[0, 60]) == {"horizon": days, "last_values": False}
    assert completed("rank", bins=[0, 60], horizon=days) == {"horizon": days, "last_values": True}
    assert completed("log", last_values=False) == {"horizon": None, "last_values": False}
    with pytest.raises(RecipeError, match=f"model.horizon is 7, and the labels are of day {days:g}") as caught:
        completed("standard", bins=[0, 60], horizon=7.0)
    assert caught.value.where == "model.horizon"


@pytest.mark.promise("patients.competing")
@pytest.mark.parametrize(
    ("codes", "competing"),
    [
        ([0, 1, 2, 5], [5, 2]),
        (["alive", "1", "Discharged", "moved"], ["moved", "discharged"]),
        ([0.0, 1.0, 2.0, 5.0], ["5", 2]),
        (["0", "1.0", "2.0", "5"], ["5", 2.0]),
        (["0", "1", "Straße", "5"], [5, "STRASSE"]),
    ],
)
def test_who_had_a_competing_event_by_the_horizon_has_label_0_and_is_not_left_out(tmp_path, codes, competing):
    outcomes = [(cause, end) for cause in range(4) for end in (20, 40, 60)]  # the horizon is day 40
    ids = list(range(FIRST_ID, FIRST_ID + len(outcomes) + 1))
    status = [*(codes[cause] for cause, _ in outcomes), None]
    path = label_file(tmp_path / "people.parquet", id=ids, end=[*(end for _, end in outcomes), 60], status=status)
    made = {"path": path, "event": "status", "duration": "end", "horizon": 30, "competing": competing}
    made |= {"map": {"alive": 0}, "missing": "exclude", "censored": "keep"}
    data = whole(on_the_first_day(tmp_path, ids), labels=made, landmark=10)
    assert data.ids.tolist() == ids[:-1], "an empty status is a missing label"
    assert data.labels.tolist() == [-1, 0, 0, 1, 1, 0] + [0] * 6
    cause = data.load(micro_of(data, range(len(data.ids)))).require(EventSets).cause
    assert cause.tolist() == [0] * 3 + [1] * 3 + [3] * 3 + [2] * 3, "in the order in which competing names them"
    each = ", ".join(f"{word}: 3" for word in Recipe(events={"labels": made, "landmark": 0}).events.labels.competing)
    assert f"3 observed until the outcome, 6 until a competing event ({each}), followed" in "\n".join(data.lines())


@pytest.mark.promise("patients.competing")
def test_another_status_than_0_and_1_is_refused_with_the_way_to_declare_competing_events(tmp_path: Path) -> None:
    ids = [A, B, C]
    source = on_the_first_day(tmp_path, ids)
    made = {"event": "status", "duration": "end", "horizon": 30}

    def faults(status: list[object], **fields: object) -> list[tuple[str, str, str]]:
        path = label_file(tmp_path / "people.parquet", id=ids, end=[20, 30, 40], status=status)
        events = {"labels": {**made, "path": path, **fields, "missing": "exclude"}, "landmark": 0}
        data = opened(source, data={"holdout": 0, "on_bad_row": "quarantine", "max_bad": 1}, events=events)
        return [(bad.code, bad.what.partition(": ")[2], bad.fix) for bad in data.bad_rows]

    [(code, what, fix)] = faults([0, 1, 2])
    assert (code, what) == ("E_LABEL", '"status" is "2", neither 0 nor 1')
    assert "events.labels.competing=[2]" in fix
    assert faults([0, 1, 2], competing=[2]) == []
    own = "none of 0, 1, false, true, 2"
    said = {"3": '"3", ', "2.5": '"2.5", ', "dead": "", "90210001": ""}  # perhaps a name, an id
    for value, shown in said.items():
        [(code, what, fix)] = faults(["0", "1", value], competing=[2])
        assert (code, what) == ("E_LABEL", f'"status" is {shown}{own}')
        assert "map or competing in events.labels" in fix
    assert {what for _, what, _ in faults(["moved", "moved", "0"], competing=[2])} == {f'"status" is "moved", {own}'}


def people_with(tmp_path: Path, columns: dict[str, list[Any]], **fields: object) -> Recipe:
    """A recipe with events of patients and the table of labels of these columns; the landmark is day 10."""
    ids = list(range(A, A + len(next(iter(columns.values())))))
    path = label_file(tmp_path / "people.csv", id=ids, **columns)
    made = {"path": path, "event": "status", "duration": "end", "horizon": 30, "missing": "exclude", **fields}
    recipe = {"data": {"holdout": 0}, "events": {"labels": made, "landmark": 10}}
    return recipe_of(on_the_first_day(tmp_path, ids), **recipe)


@pytest.mark.promise("patients.competing")
def test_a_competing_value_that_nobody_has_is_counted_as_0(tmp_path: Path) -> None:
    columns = {"status": ["alive", "ill", "death", "death", "moved", "Ada"], "end": [40] * 6}
    meant = {"competing": ["dead", "moved"], "map": {"alive": 0, "ill": 1}}
    read = read_cohort(people_with(tmp_path, columns, **meant))
    assert "1 until a competing event (dead: 0, moved: 1)" in cohort_lines(read.cohort, ["dead", "moved"])[-1]


# --------------------------------------------------------------------------- several classes


def classes_of(root: Path, values: list[object], *, quarantine: bool = False, **labels: object) -> EventData:
    """Patients of these labels, one each."""
    ids = list(range(FIRST_ID, FIRST_ID + len(values)))
    path = label_file(root / "people.parquet", id=ids, where=values)
    made = {"path": path, "label": "where", "missing": "keep", **labels}
    policy: dict[str, Any] = {"on_bad_row": "quarantine", "max_bad": 1} if quarantine else {}
    return opened(on_the_first_day(root, ids), data={"holdout": 0, **policy}, events={"labels": made})


@pytest.mark.promise("patients.ready-labels")
@pytest.mark.parametrize(
    ("values", "classes"),
    [
        (["Home", "died", " rehab ", "died", None, "home"], ["home", "died", "rehab"]),
        (["home", "died", "rehab", "died", "lost", "home"], ["Home", "DIED", "rehab"]),
        ([0, 2, 1, 2, None, 0], [0, 2, 1]),
        ([0.0, 2.0, 1.0, 2.0, None, 0.0], [0, 2, 1]),
        (["7", "9.0", "8", "9", "", "7.0"], ["7", 9, 8.0]),
        (["i21.4", "none", "I10", "None", "NA", "I21.4"], ["I21.4", "none", "I10"]),
    ],
)
def test_values_of_several_classes_are_their_places_in_the_order_of_the_recipe(tmp_path, values, classes):
    data = classes_of(tmp_path, values, classes=classes, map={"lost": None})
    assert data.labels.tolist() == [0, 1, 2, 1, -1, 0]
    assert data.classes == tuple(str(word).lower().removesuffix(".0") for word in classes)
    assert data.load(micro_of(data, range(6))).seq_labels.tolist() == data.labels.tolist()
    told = ", ".join(f"{num} of class {name}" for num, name in zip((2, 2, 1), data.classes, strict=True))
    assert f"{told}, 1 without a label" in data.lines()
    assert data.class_labels() == (data.labels, data.classes)


@pytest.mark.promise("patients.ready-labels")
def test_a_value_of_no_class_is_refused_with_its_place_and_no_name_of_anybody(tmp_path: Path) -> None:
    def faults(values: list[object], **labels: object) -> list[tuple[str, str, str, str]]:
        data = classes_of(tmp_path, values, quarantine=True, **{"classes": ["home", "rehab", "died"], **labels})
        return [(bad.where, bad.code, bad.what.partition(": ")[2], bad.fix) for bad in data.bad_rows]

    [(where, code, what, fix)] = faults(["home", "rehap", "died"])
    assert where.endswith("people.parquet:2")
    assert (code, what) == ("E_LABEL", '"where" is "rehap", none of home, rehab, died')
    assert fix == "add the word to classes or map in events.labels, or leave the cell empty"
    assert [what for _, _, what, _ in faults(["home", "moved", "moved"])] == [
        '"where" is "moved", none of home, rehab, died'
    ] * 2
    [(_, _, what, _)] = faults(["home", "Erika Mustermann", "died"])
    assert what == '"where" is none of home, rehab, died'
    for value in ("0", "1", "true"):
        [(_, _, what, _)] = faults(["home", value, "died"])
        assert what.endswith("none of home, rehab, died"), "as an outcome has them"
    [(_, _, what, _)] = faults([0, 1, 3], classes=[0, 1, 2])
    assert what == '"where" is "3", none of 0, 1, 2'
    assert faults(["home", "moved", "died"], map={"Moved": None}) == []


@pytest.mark.promise("patients.ready-labels")
def test_every_class_has_its_share_of_the_held_out_part_and_one_that_lacks_is_told(tmp_path: Path) -> None:
    ids = list(range(FIRST_ID, FIRST_ID + 30))
    path = label_file(tmp_path / "people.parquet", id=ids, label=["a"] * 15 + ["b"] * 10 + ["c"] * 5)
    made = {"path": path, "label": "label", "classes": ["a", "b", "c", "d"]}
    data = opened(on_the_first_day(tmp_path, ids), data={"holdout": 0.2}, events={"labels": made})
    assert np.bincount(data.labels[data.table.split == 1]).tolist() == [3, 2, 1]
    assert {"  to train on: 0 of class d", "  held out: 0 of class d; its AUROC does not exist"} <= set(data.lines())
    learnt = data.recipe.model_copy(update={"losses": {}})
    alone = replace(data.cohort, label=np.where(data.labels == 1, 1, -1))
    with pytest.raises(SourceError, match="all training patients with a known label have label b"):
        refuse_unlearnable(learnt, alone)


# --------------------------------------------------------------------------- codes and scales


@pytest.mark.promise("patients.values")
def test_values_are_scaled_by_training_patients_alone(tmp_path: Path) -> None:
    rows = draw_rows(40, seed=5)
    sides = sides_of(rows)
    data = in_one_table(tmp_path, rows, sides)
    for code in MEASURED:
        values = [row[3] for row in rows if row[2] == code and sides[row[0]] == "train"]
        index = data.codes.index(code)
        assert data.known.mean[index] == pytest.approx(np.mean(values), abs=1e-9)
        assert data.known.std[index] == pytest.approx(np.std(values), abs=1e-9)
    changed = [(*row[:3], None if row[3] is None else row[3] * 50) if sides[row[0]] == "valid" else row for row in rows]
    again = in_one_table(tmp_path, changed, sides)
    assert again.files == data.files
    train = np.repeat(data.table.split, data.table.positions) == 0
    assert np.array_equal(again.values[train], data.values[train], equal_nan=True)
    assert not np.array_equal(again.values, data.values, equal_nan=True)


@pytest.mark.promise("patients.values")
def test_a_value_that_never_changes_does_not_divide_by_zero(tmp_path: Path) -> None:
    rows: list[Row] = [(p, p - A, c, v) for p in (A, B) for c, v in (("flag", 1.0), ("none", 0.0))]
    rows += [(C, 0, "flag", 0.0), (C, 0, "none", 2.0)]
    sides = {A: "train", B: "train", C: "holdout"}
    data = opened(long(tmp_path, rows), events={**split_file(tmp_path / "s.parquet", sides), "std_floor": 0.1})
    held = data.load(micro_of(data, [of(data, C)]))
    codes, values = [data.codes[c] for c in held.input_ids.tolist()], held.require(EventSets).values.tolist()
    assert dict(zip(codes, values, strict=True)) == {"flag": pytest.approx(-10.0), "none": 2.0}
    assert np.isfinite(data.values).all()


@pytest.mark.parametrize("policy", ["unknown", "skip"])
def test_codes_that_training_does_not_have_are_one_code_or_left_out(policy: str, tmp_path: Path) -> None:
    rows: list[Row] = [
        (A, 0, "a", 5.0), (A, 0, "b", None), (A, 9, "a", 7.0), (B, 0, "new", 3.0), (B, 9, "a", 6.0), (B, 9, "b", 1.0),
    ]  # fmt: skip
    sides = split_file(tmp_path / "s.parquet", {A: "train", B: "holdout"})
    data = opened(long(tmp_path, rows), events={**sides, "unknown_codes": policy, "min_count": 1})
    assert data.codes == ("<unknown>", "a", "b")
    assert told(data, B)[-1][1] == [("a", 6.0), ("b", None)], "b has no value in training, so nothing scales this one"
    if policy == "unknown":
        assert told(data, B)[0][1] == [("<unknown>", None)]
    else:
        assert (len(told(data, B)), data.report.counts["of unknown codes"]) == (1, 1)
    assert "not among them: new 1" in "\n".join(data.lines())
    seldom = opened(long(tmp_path, rows), events={**sides, "min_count": 2})
    assert seldom.codes == ("<unknown>", "a")
    assert seldom.known.counts.tolist() == [1, 2]


def test_a_run_that_starts_from_another_has_its_scale_or_is_refused(tmp_path: Path) -> None:
    source = long(tmp_path, [(A, 0, "x", 1.0), (B, 0, "x", 2.0)])
    kept = opened(source, data={"holdout": 0}, events={"scale": "rank"}).files
    again = opened(source, kept=kept, data={"holdout": 0}, events={"scale": "rank"})
    assert again.files == kept
    with pytest.raises(
        RecipeError, match="scales values by standard, and the run that it starts from by rank"
    ) as caught:
        opened(source, kept=kept, data={"holdout": 0})
    assert (caught.value.where, caught.value.fix) == ("events.scale", "set events.scale=rank, or train anew")


@pytest.mark.promise("patients.values")
def test_vectors_of_codes_stand_in_the_order_of_the_codes(tmp_path: Path) -> None:
    rows: list[Row] = [(A, 0, "a", None), (A, 1, "b", None), (A, 2, "b", None), (A, 2, "c", None)]
    (tmp_path / "v.csv").write_text("Key,0,1\na,1,2\nelse,9,9\nb,3,4\n", encoding="utf-8")
    chosen = {"code_embeddings": str(tmp_path / "v.csv")}
    data = opened(long(tmp_path, rows), data={"holdout": 0}, events=chosen)
    assert data.codes == ("<unknown>", "b", "a", "c")
    assert data.code_vectors.tolist() == [[0, 0], [3, 4], [1, 2], [0, 0]]
    assert any("1 code without a vector: c" in line for line in data.lines())
    bare, fitting, other = (
        tiny_patients_model(torch.float32, len(data.codes), **fields)
        for fields in ({}, {"code_vectors": 2}, {"code_vectors": 3})
    )
    data.initialize(fitting)
    torch.testing.assert_close(fitting.embedding.code_vectors[1], torch.tensor([0.6, 0.8]))
    opened(long(tmp_path, rows), data={"holdout": 0}).initialize(bare)
    for model in (bare, other):
        with pytest.raises(RecipeError, match="vectors of length 2") as caught:
            data.initialize(model)
        assert caught.value.fix == "set model.code_vectors=2"
    (tmp_path / "v.csv").write_text("Key,0,1\na,1,2\na,3,4\n", encoding="utf-8")
    with pytest.raises(SourceError, match="E_DUPKEY"):
        opened(long(tmp_path, rows), data={"holdout": 0}, events=chosen)


# --------------------------------------------------------------------------- batches and plans


def with_empty(root: Path, num: int = 14) -> EventData:
    """Patients with labels, every third of whom has no event."""
    rows = [row for row in draw_rows(num) if (row[0] - FIRST_ID) % 3]
    ids = list(range(FIRST_ID, FIRST_ID + num))
    columns = {"id": ids, "dead": [n % 2 for n in range(num)], "end": [500 + n for n in range(num)]}
    path = label_file(root / "labels.parquet", **columns)
    labels = {"path": path, "event": "dead", "duration": "end", "horizon": 600, "censored": "keep"}
    return opened(long(root, rows), events={"labels": labels, "landmark": 300})


def assert_equal(one: RaggedBatch, two: RaggedBatch) -> None:
    for name in ("input_ids", "position_ids", "labels", "loss_mask", "seq_ids", "seq_labels"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    assert torch.equal(one.layout.cu_seqlens, two.layout.cu_seqlens)
    ours, theirs = one.require(EventSets), two.require(EventSets)
    for name in ("values", "has_value", "times", "durations", "cause"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for name in ("members", "history"):
        assert torch.equal(getattr(ours, name).cu_seqlens, getattr(theirs, name).cu_seqlens), name


@pytest.mark.promise("patients.flat")
def test_a_batch_holds_what_each_patient_has_alone(tmp_path: Path) -> None:
    data = with_empty(tmp_path)
    ids = np.random.default_rng(0).permutation(len(data.ids)).tolist()
    assert {0, 1} < set(data.table.positions[ids].tolist())
    batch = data.load(micro_of(data, ids))
    assert batch.num_targets == batch.num_seqs == 14
    alone = [data.alone(seq, 0, int(data.table.positions[seq]), 0) for seq in ids]
    for place, one in enumerate(alone):
        assert_equal(batch.select([place]), one)
    assert_equal(batch, concatenate(alone))
    sets = batch.require(EventSets)
    for seq, times in zip(range(14), sets.times.split(sets.history.lengths().tolist()), strict=True):
        assert (times.diff() >= 0).all(), seq
    padded = data.load(micro_of(data, ids, pad_to=12))
    assert padded.total_tokens == 14 * 12
    assert torch.equal(padded.require(EventSets).values, sets.values)
    nothing = data.load(micro_of(data, []))
    assert (nothing.total_tokens, nothing.num_seqs, nothing.num_targets) == (0, 0, 0)
    assert nothing.require(EventSets).num_sets == 0


@pytest.mark.promise("patients.flat")
@pytest.mark.parametrize("strategy", strategy_names())
def test_plans_carry_patients_without_events(strategy: str, tmp_path: Path) -> None:
    data = with_empty(tmp_path)
    assert int((data.table.positions == 0).sum()) == 5
    settings = PlanSettings(strategy=strategy, tokens_per_step=12, tokens_per_micro=8, row_tokens=16, batch_size=3)
    made = plan(data.table.positions, settings, seed=0, epoch=0, targets=data.count_targets)
    batches = [data.load(micro) for step in range(made.num_steps) for micro in made.step(step)]
    seen = sorted(seq for batch in batches for seq in batch.seq_ids.tolist())
    assert seen == list(range(14))
    assert made.ledger.total == int(data.table.positions.sum())
    assert made.ledger.sequences["whole"] == 14
    assert made.ledger.dropped == {}
    assert not data.count_targets(np.array([0]), np.array([1]), np.array([2])).any(), "a patient counts once"


def test_who_has_neither_events_nor_a_label_is_no_target(tmp_path: Path) -> None:
    path = label_file(tmp_path / "labels.parquet", id=[A, B, C], dead=[1, None, None])
    labels = {"path": path, "label": "dead", "missing": "keep"}
    data = opened(long(tmp_path, [(B, 0, "x", None)]), data={"holdout": 0}, events={"labels": labels, "landmark": 0})
    assert data.table.num_targets.tolist() == [1, 1, 0]
    made = plan(data.table.positions, PlanSettings(), seed=0, epoch=0, targets=data.count_targets)
    assert made.ledger.sequences == {"whole": 2, "no_target": 1}


# --------------------------------------------------------------------------- splits


def test_patients_are_split_by_their_id_and_the_seed(tmp_path: Path) -> None:
    rows = draw_rows(60)
    data = opened(long(tmp_path, rows))
    assert int(data.table.split.sum()) == round(0.25 * len(data.table))
    earlier = {"holdout": 0.25, "split_version": 1}  # the rule by which other patients move nobody
    fewer = opened(long(tmp_path, [row for row in rows if row[0] % 2]), data=earlier)
    before = opened(long(tmp_path, rows), data=earlier)
    side = dict(zip(before.ids.tolist(), before.table.split.tolist(), strict=True))
    assert {p: s for p, s in zip(fewer.ids.tolist(), fewer.table.split.tolist(), strict=True) if side[p] != s} == {}
    assert not np.array_equal(opened(long(tmp_path, rows), train={"seed": 1}).table.split, data.table.split)
    sides = {patient: ("train", "holdout", "test")[n % 3] for n, patient in enumerate(data.ids.tolist()[:40])}
    fixed = opened(long(tmp_path, rows), events=split_file(tmp_path / "s.csv", sides))
    assert dict(zip(fixed.ids.tolist(), fixed.table.split.tolist(), strict=True)) == {
        patient: side == "holdout" for patient, side in sides.items() if side != "test"
    }
    assert fixed.cohort.left_out == {"in no part of events.split": 20, "as the test part": 13}
    assert "20 left out in no part of events.split" in fixed.lines()[1]
    split_file(tmp_path / "t.csv", sides)
    with (tmp_path / "t.csv").open("a", encoding="utf-8") as handle:
        handle.write(f'{A},"holdout"\n')
    with pytest.raises(SourceError, match=f"E_LEAK patient {alias(str(A))}"):
        opened(long(tmp_path, rows), events={"split": str(tmp_path / "t.csv")})


def test_the_fingerprint_follows_what_is_read(tmp_path: Path) -> None:
    rows = draw_rows(20)
    before = opened(long(tmp_path, rows))
    assert opened(long(tmp_path, rows[::-1])).fingerprint() == before.fingerprint(), "the order of rows is no content"
    for change in (
        [*rows[:-1], (rows[-1][0], rows[-1][1] + 1, *rows[-1][2:])],
        [*rows[:-1], (*rows[-1][:2], "else", None)],
        rows[:-1],
    ):
        assert opened(long(tmp_path, change)).fingerprint() != before.fingerprint()
    assert opened(long(tmp_path, rows), train={"seed": 4}).fingerprint() != before.fingerprint()
    assert [path for path, _ in before.table.file_hashes] == [str(tmp_path / "long.parquet")]
    stays = opened(str(put_folder(tmp_path / "stays", rows)))
    assert {path for path, _ in stays.table.file_hashes} == {f"{tmp_path / 'stays'}[{n}]" for n in range(20)}
    assert stays.where(3) == f"{tmp_path / 'stays'}[3]:1 (patient {alias(str(FIRST_ID + 3))})"


# --------------------------------------------------------------------------- packaged and real patients


def test_an_event_at_the_end_of_observation_is_history_and_one_after_it_is_refused(tmp_path: Path) -> None:
    rows = [(patient, minute, "x", 1.0) for patient in (A, B) for minute in (0, 10, 20)]
    labels = put(tmp_path / "labels.csv", pa.table({"id": [A, B], "dead": [1, 0], "at": [20.0, 20.0]}))
    asked = {"labels": {"path": str(labels), "label": "dead", "time": "at"}}
    data = whole(long(tmp_path, rows), **asked)
    assert data.table.positions.tolist() == [3, 3]
    put(tmp_path / "labels.csv", pa.table({"id": [A, B], "dead": [1, 0], "at": [19.0, 20.0]}))
    with pytest.raises(SourceError, match="E_LEAK"):
        whole(long(tmp_path, rows), **asked)


# --------------------------------------------------------------------------- what is left out is said


def test_patients_without_any_event_to_train_on_are_refused_and_counted(tmp_path: Path) -> None:
    rows = [(i, 5.0 + i, "a", 1.0) for i in range(12)]
    source = {"path": str(put(tmp_path / "e.parquet", table(rows))), "unit": "days"}
    data = opened([source], data={"holdout": 0.2}, events={"landmark": 0})
    with pytest.raises(SourceError, match="no patient to train on has an event: 12 after the landmark"):
        data.check_trainable()
    opened([source], data={"holdout": 0.2}, events={"landmark": 30}).check_trainable()


def test_a_code_whose_values_training_lacks_is_named(tmp_path: Path) -> None:
    rows = [(i, float(day), "a", None if i < 10 else 2.0) for i in range(12) for day in range(3)]
    file = put(tmp_path / "e.parquet", table(rows))
    sides = put(tmp_path / "s.parquet", pa.table({"id": range(12), "split": ["train"] * 10 + ["valid"] * 2}))
    data = opened([{"path": str(file), "unit": "days"}], events={"split": str(sides)})
    assert "warning: values left out, as their codes have none in training: 6 of a" in data.lines()


def test_a_file_without_numbers_of_sets_goes_by_the_time_beside_one_that_has_them(tmp_path: Path) -> None:
    numbered = table([(7, 0.0, code, 1.0) for code in "abc"]).append_column("set_index", pa.array([0, 1, 1]))
    put(tmp_path / "e" / "1.parquet", numbered.set_column(1, "time", pa.array([0.0, 1.0, 1.0])))
    put(tmp_path / "e" / "2.parquet", table([(8, 3.0, "a", 1.0), (8, 0.0, "b", 1.0), (8, 3.0, "c", 1.0)]))
    data = whole([{"path": str(tmp_path / "e"), "unit": "days"}])
    assert data.report.bad == []
    assert np.diff(data.sets.set_starts).tolist() == [1, 2, 1, 2]


def test_a_file_of_a_patient_is_not_named_where_its_column_has_another_name(tmp_path: Path) -> None:
    for patient in ("7001", "7002"):
        rows = [(1, float(day), "a", 1.0) for day in range(3)]
        put(tmp_path / "e" / f"{patient}.parquet", table(rows, time="minute", code="varname").drop_columns("id"))
    with pytest.raises(SourceError, match='no column "variable"') as caught:
        opened([{"path": str(tmp_path / "e")}])
    assert "7001" not in str(caught.value)
    assert "varname" in str(caught.value.fix) + caught.value.what
