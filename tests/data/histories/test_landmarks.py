"""Patients at several landmarks: every example reads and is followed from its own, and a patient counts once."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from tests.helpers.event_tables import FIRST_ID, Row, micro_of, opened, put, table
from unpad.batching.batch import RaggedBatch
from unpad.data.patients import EventData
from unpad.data.sources.split import Split
from unpad.errors import SourceError
from unpad.models.set_sequence.event_sets import EventSets

pytestmark = pytest.mark.promise("patients.landmarks")
TIMES = [24, 48, 72]
A, B, C, D = range(FIRST_ID, FIRST_ID + 4)
ENDS = {A: (0, 500.0), B: (1, 60.0), C: (1, 48.0), D: (0, 20.0)}  # whether the outcome came, and the last hour observed
ROWS: list[Row] = [
    *((A, hour, "pulse", hour + 1.0) for hour in (1.0, 24.0, 30.0, 48.5, 70.0, 90.0)),
    *((B, hour, "pulse", -hour) for hour in (2.0, 23.0, 47.0, 55.0)),
    (C, 40.0, "pulse", 7.0), (C, 40.0, "fever", None), (D, 5.0, "fever", None),
]  # fmt: skip


def study(
    folder: Path, landmark: Any, rows: list[Row] = ROWS, kept: dict[str, bytes] | None = None, **sections: Any
) -> EventData:
    """Patients in hours, with the outcomes of ENDS by 36 hours after a landmark."""
    path = put(folder / "events.parquet", table(rows))
    ends = {"id": list(ENDS), "died": [died for died, _ in ENDS.values()], "end": [end for _, end in ENDS.values()]}
    labels = {"path": str(put(folder / "labels.parquet", pa.table(ends))), "event": "died", "duration": "end"}
    events = {
        "landmark": landmark,
        "labels": {**labels, "horizon": 36, "censored": "keep"},
        **sections.pop("events", {}),
    }
    return opened({"path": str(path), "unit": "hours"}, kept, **{"data": {"holdout": 0}, "events": events, **sections})


def examples_of(data: EventData) -> list[tuple[int, float]]:
    return list(zip(data.ids.tolist(), data.landmarks.tolist(), strict=True))


def hours_of(data: EventData, seq: int) -> list[float]:
    sets = data.sets
    times = sets.times[sets.sets_of[seq] : sets.sets_of[seq + 1]] * 24
    return [round(float(time), 3) for time in times]


def test_a_patient_is_an_example_at_every_landmark_until_observation_ends(tmp_path):
    data = study(tmp_path, TIMES)
    assert examples_of(data) == [(A, 24), (A, 48), (A, 72), (B, 24), (B, 48), (C, 24), (C, 48)]
    assert data.cohort.left_out == {"whose observation ended before the landmark": 1 + 1 + 3}
    lines = "\n".join(data.lines())
    assert "7 examples of 3 patients: 7 to train on, 0 held out; 5 left out whose observation ended before" in lines
    assert data.unit == "examples"
    assert "warning" not in lines
    told = "warning: events.landmark: there is no example at 1,000, 2,000,000 hours"
    assert told in study(tmp_path, [24, 1000, 2000000]).lines()
    counts = data.report.counts
    assert len(data.code) + sum(counts.values()) == 3 * 6 + 2 * 4 + 2 * 2 + 1, "each event once in each example"
    assert counts == {
        "of patients who are left out": 1, "after the landmark": 4 + 3 + 1 + 2 + 1 + 2, "exact duplicates": 0,
        "beyond events.max_events": 0,
    }  # fmt: skip


def test_a_patient_without_a_label_is_one_fault_at_however_many_landmarks(tmp_path):
    with pytest.raises(SourceError, match=r"1 of \d+ rows cannot be used"):
        study(tmp_path, TIMES, [*ROWS, (FIRST_ID + 4, 1.0, "pulse", 1.0)])


@pytest.mark.parametrize("settings", [{}, {"max_events": 2}, {"window": 24}, {"max_events": 2, "keep": "earliest"}])
def test_an_example_is_that_of_a_recipe_with_its_landmark_alone(tmp_path, settings):
    several = study(tmp_path, TIMES, events=settings)
    for landmark in TIMES:
        alone = study(tmp_path, landmark, kept=several.files, events=settings)
        mine = [seq for seq, (_, at) in enumerate(examples_of(several)) if at == landmark]
        assert several.ids[mine].tolist() == alone.ids.tolist()
        assert alone.landmarks is None
        for seq, same in enumerate(mine):
            assert_equal(several.load(micro_of(several, [same])), alone.load(micro_of(alone, [seq])))
        assert_equal(several.load(micro_of(several, mine)), alone.load(micro_of(alone, range(len(mine)))))
    for seq in range(len(several.table)):
        assert_equal(
            several.load(micro_of(several, [seq])), several.alone(seq, 0, int(several.table.positions[seq]), 0)
        )


def assert_equal(a: RaggedBatch, b: RaggedBatch) -> None:
    assert torch.equal(a.input_ids, b.input_ids)
    assert torch.equal(a.seq_labels, b.seq_labels)
    one, other = a.require(EventSets), b.require(EventSets)
    for name in ("values", "has_value", "times", "durations", "cause"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    for layout in ("history", "members"):
        assert torch.equal(getattr(one, layout).cu_seqlens, getattr(other, layout).cu_seqlens)


def test_codes_and_scales_count_each_event_of_training_once(tmp_path):
    data = study(tmp_path, TIMES, events={"scale": "rank"})
    read = {row for row in ROWS if row[0] in (A, B, C) and row[1] <= {A: 72, B: 48, C: 48}[row[0]]}
    assert dict(zip(data.known.names, data.known.counts.tolist(), strict=True)) == {
        "<unknown>": 0,
        "pulse": sum(row[2] == "pulse" for row in read),
        "fever": 1,
    }
    values = [row[3] for row in read if row[3] is not None]
    assert data.known.mean[1] == pytest.approx(np.mean(values))
    assert data.known.std[1] == pytest.approx(np.std(values))


def many(num: int) -> tuple[list[Row], dict[str, list[Any]]]:
    rows = [(FIRST_ID + n, hour, "pulse", float(n)) for n in range(num) for hour in (1.0, 30.0, 60.0)]
    ends = [(30.0, 55.0, 100.0, 900.0)[n % 4] for n in range(num)]
    return rows, {"id": [FIRST_ID + n for n in range(num)], "died": [int(n % 5 == 0) for n in range(num)], "end": ends}


def big(folder: Path, **sections: Any) -> EventData:
    rows, ends = many(60)
    labels = {
        "path": str(put(folder / "ends.parquet", pa.table(ends))), "event": "died", "duration": "end", "horizon": 720,
    }  # fmt: skip
    source = {"path": str(put(folder / "many.parquet", table(rows))), "unit": "hours"}
    events = {"landmark": TIMES, "labels": labels, "censored": "keep", **sections.pop("events", {})}
    events["labels"]["censored"] = events.pop("censored")
    return opened(source, **{"data": {"holdout": 0.3}, "events": events, **sections})


@pytest.mark.parametrize("version", [1, 2])
def test_all_examples_of_a_patient_are_in_one_part_and_it_counts_once(tmp_path, version):
    for seed in range(3):
        data = big(tmp_path, data={"holdout": 0.3, "split_version": version}, train={"seed": seed})
        sides = {patient: set(data.table.split[data.ids == patient].tolist()) for patient in data.ids.tolist()}
        assert all(len(parts) == 1 for parts in sides.values())
        held_out = sum(parts == {Split.HOLDOUT} for parts in sides.values())
        assert held_out == 18 if version == 2 else 0 < held_out < 60
        assert (np.diff(data.table.group) >= 0).all()
        groups = set(zip(data.ids.tolist(), data.table.group.tolist(), strict=True))
        assert len(groups) == 60 == len({group for _, group in groups}), "intervals are taken over patients"


def test_declared_parts_hold_for_all_examples_and_those_of_the_test_part_are_counted(tmp_path):
    sides = [("train", "valid", "test")[n % 3] for n in range(60)]
    parts = pa.table({"id": [FIRST_ID + n for n in range(60)], "split": sides})
    data = big(tmp_path, events={"split": str(put(tmp_path / "parts.parquet", parts))})
    assert {(one - FIRST_ID) % 3 for one in data.ids.tolist()} == {0, 1}
    for patient, side in zip(data.ids.tolist(), data.table.split.tolist(), strict=True):
        assert side == (patient - FIRST_ID) % 3
    per_end = (1, 2, 3, 3)  # landmarks until the end of observation
    assert data.table.num_test == sum(per_end[n % 4] for n in range(60) if n % 3 == 2)


# --------------------------------------------------------------------------- rows of labels


def own(folder: Path, columns: dict[str, list[Any]], suffix: str = "parquet", **sections: Any) -> EventData:
    """Patients whose table of labels has a row per landmark, with a ready label."""
    path = put(folder / f"own.{suffix}", pa.table(columns))
    labels = {"path": str(path), "label": "worse", "missing": "exclude", **sections.pop("labels", {})}
    events = {"labels": labels, "landmark": "at"}
    source = {"path": str(put(folder / "events.parquet", table(ROWS))), "unit": "hours"}
    return opened(source, **{"data": {"holdout": 0}, "events": events, **sections})


def test_every_row_of_labels_is_an_example_with_its_own_label_and_landmark(tmp_path):
    rows = [(C, 40, 1), (A, 71, 1), (A, 24, 0), (B, 23, 0), (A, 48, 1), (B, 60, 1), (D, 6, 0)]
    columns = dict(zip(("id", "at", "worse"), map(list, zip(*rows, strict=True)), strict=True))
    for suffix in ("parquet", "csv"):
        data = own(tmp_path, columns, suffix)
        assert examples_of(data) == sorted((patient, at) for patient, at, _ in rows)
        assert data.labels.tolist() == [worse for _, _, worse in sorted(rows)]
        for seq, (patient, at) in enumerate(examples_of(data)):
            until = [hour - at for one, hour, _, _ in ROWS if one == patient and hour <= at]
            assert hours_of(data, seq) == sorted(set(until))
            row = rows.index((patient, int(at), data.labels[seq]))
            assert f"own.{suffix}:{row + (1 if suffix == 'parquet' else 2)} " in data.where(seq)
        backwards = own(tmp_path, {name: cells[::-1] for name, cells in columns.items()}, suffix)
        assert backwards.fingerprint() == data.fingerprint(), "the order of the rows does not count"


def test_a_row_of_labels_without_a_landmark_is_a_fault(tmp_path):
    with pytest.raises(SourceError) as caught:
        own(tmp_path, {"id": [A, B], "at": [24.0, None], "worse": [0, 1]})
    assert "own.parquet:2" in str(caught.value)
    assert 'there is no "at"' in str(caught.value)


def test_rows_with_an_end_of_their_own_are_followed_from_their_landmark(tmp_path):
    columns = {"id": [A, A, B], "at": [24, 48, 23], "worse": [0, 1, 1], "end": [60, 70, 40]}
    data = own(tmp_path, columns, labels={"label": None, "event": "worse", "duration": "end", "horizon": 20})
    assert (data.cohort.duration * 24).round(3).tolist() == [36, 22, 17]
    assert data.labels.tolist() == [0, 0, 1]


# --------------------------------------------------------------------------- recipes
