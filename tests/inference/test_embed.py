"""`unpad embed`: a row for everyone it says there is, under the id of the data, as each would be alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.helpers.families import Finished
from tests.helpers.shell import Shell
from tests.helpers.untrained_patients import Guess, Patients, draw
from unpad.batching.plan import Micro
from unpad.errors import SourceError
from unpad.inference.embed import embed, embed_file, trained
from unpad.models.set_sequence.event_sets import EventSets
from unpad.recipes.data import EventLabels
from unpad.recipes.training import PlanSettings


def opened(monkeypatch: pytest.MonkeyPatch, data: Any, tokens_per_micro: int = 50) -> Any:
    """A run of patients with a model that needs no training."""
    source = SimpleNamespace(id="subject")
    labels = EventLabels(
        path="people.csv", event="died", duration="until", horizon=9 if data.labels is not None else None
    )
    recipe = SimpleNamespace(
        plan=PlanSettings(tokens_per_micro=tokens_per_micro),
        data=SimpleNamespace(events=[source]),
        events=SimpleNamespace(labels=labels if data.timed else None),
    )
    return SimpleNamespace(folder=Path("runs/r"), model=Guess(), recipe=recipe, files={}, data=lambda: data)


def test_patients_stand_under_their_ids_in_the_order_of_the_data(tmp_path, monkeypatch):
    data = draw(25)
    lines = embed_file(opened(monkeypatch, data), None, "patient", tmp_path / "out.parquet")
    assert lines == [f"25 patients, 3 numbers each: {tmp_path / 'out.parquet'}"]
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["subject", "probability", "risk", "split", "label", "embedding"]
    assert table["subject"].to_pylist() == data.ids.tolist()
    vectors = np.array(table["embedding"].to_pylist())
    for seq in range(25):
        stop = data.table.positions[seq : seq + 1]
        alone = data.load(Micro(np.array([seq]), 0 * stop, stop, 0 * stop, 0, 0))
        assert vectors[seq] == pytest.approx(Guess().vectors(alone, "patient")[0].numpy(), abs=1e-5)
        p = float(Guess().classify(alone).double().softmax(-1)[0, 1])
        assert table["probability"][seq].as_py() == pytest.approx(p, abs=1e-6)
    assert table.schema.field("embedding").type.list_size == 3
    assert table["label"].to_pylist() == [None if label < 0 else label for label in data.labels.tolist()]
    assert table["split"].to_pylist() == [("train", "valid")[side] for side in data.table.split.tolist()]


def test_only_what_was_trained_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = {"classification": 1.0, "hazard": 1.0}
    cases = [({"hazard": 1.0}, True, ["risk"]), ({"reconstruction": 1.0}, True, []), (every, True, ["risk"])]
    for weights, timed, columns in [*cases, (every, False, [])]:  # the last two have a head without a label
        run = opened(monkeypatch, draw(9, labelled=False, timed=timed))
        run.model = Guess(True, **weights)
        embed_file(run, None, "patient", tmp_path / "out.parquet")
        assert pq.read_table(tmp_path / "out.parquet").column_names == ["subject", *columns, "split", "embedding"]


def test_patients_without_a_set_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Patients([[2, 1], [], [3], []], None)
    lines = embed_file(opened(monkeypatch, data), None, "set", tmp_path / "out.parquet")
    assert lines[0].startswith("3 sets of 2 patients, ")
    assert lines[1] == "no row for 2 other patients without a set"


def test_sets_stand_in_the_order_of_time_with_their_number_and_day(tmp_path, monkeypatch):
    data = draw(25)
    embed_file(opened(monkeypatch, data), None, "set", tmp_path / "out.parquet")
    table = pq.read_table(tmp_path / "out.parquet").to_pydict()
    assert list(table) == ["subject", "set_index", "days_from_landmark", "embedding"]
    expected = [(data.ids[i], at) for i, sizes in enumerate(data.set_sizes) for at in range(len(sizes))]
    assert list(zip(table["subject"], table["set_index"], strict=True)) == expected
    row = 0
    for seq, sizes in enumerate(data.set_sizes):
        stop = data.table.positions[seq : seq + 1]
        alone = data.load(Micro(np.array([seq]), 0 * stop, stop, 0 * stop, 0, 0))
        mine = slice(row, row + len(sizes))
        days = alone.require(EventSets).times.tolist()
        assert table["days_from_landmark"][mine] == ([None, *days[1:]] if seq % 3 == 0 else days), "facts have no time"
        assert np.array(table["embedding"][mine]) == pytest.approx(Guess().vectors(alone, "set").numpy(), abs=1e-5)
        row += len(sizes)


@pytest.mark.parametrize("level", ["patient", "set"])
def test_vectors_do_not_depend_on_the_batches(monkeypatch: pytest.MonkeyPatch, level: Any) -> None:
    data = draw(25)
    one, many = (embed(opened(monkeypatch, data, size), data, level) for size in (1, 400))
    assert np.array_equal(one.patient, many.patient)
    assert one.embedding == pytest.approx(many.embedding, abs=1e-5)


def test_who_trained_the_run_is_unknown_where_its_data_cannot_be_read() -> None:
    def gone() -> Any:
        raise SourceError("there is no such file", where="people.csv", fix="put it back")

    def known_to(ids_by_part: Any) -> tuple[list[bool | None], str]:
        people = SimpleNamespace(identities=lambda: ["7", "8", "9"])
        column, line = trained(SimpleNamespace(ids_by_part=ids_by_part), people)
        return column.to_pylist(), line

    why = "not compared by id with those of the run: the run's own data cannot be read: there is no such file"
    assert known_to(gone) == ([None] * 3, why)
    parts = {"train": {"7", "1"}, "valid": {"9"}}
    assert known_to(lambda: parts) == ([True, False, False], "the run trained on 1 of 3 patients, by id")


def test_a_run_of_texts_is_refused(unpad: Shell, finished: Finished, tmp_path: Path) -> None:
    run = finished("text").run
    refused = unpad("embed", run, "--out", tmp_path / "out.parquet", code=2)
    assert "this run is not one of patients" in refused.err
    assert not (tmp_path / "out.parquet").exists()
    wrong = unpad("embed", run, "--out", tmp_path / "out.parquet", "--level", "event", code=2)
    assert "patient" in wrong.err
