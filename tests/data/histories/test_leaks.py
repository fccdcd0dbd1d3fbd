"""What alone tells the label is named before training, and figures that are too good after it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.families import patients
from unpad.data.histories.leaks import PatientEvents, worst_leak
from unpad.evaluation.binary import auroc


def with_events(folder: Path, code: str, days: Sequence[int], num: int = 160, **sections: Any) -> Path:
    """A recipe of patients, a third of them ill, who alone have a code on some days, counted from the landmark."""
    recipe = patients(folder, num, **sections)
    tests, people = folder / "tables" / "tests.parquet", folder / "tables" / "people.parquet"
    ids = [row["id"] for row in pq.read_table(people).to_pylist() if row["id"] % 3 == 0]
    rows = [{"id": one, "days": day, "test": code, "value": None} for one in ids for day in days]
    pq.write_table(pa.Table.from_pylist(pq.read_table(tests).to_pylist() + rows), tests)
    return recipe


ALONE = "warning: the code hospice (100% of the patients with the label, 0.0% of the others) alone tells label 1"


@pytest.mark.promise("doctor.patients")
@pytest.mark.parametrize(
    ("code", "days", "said"),
    [("hospice", [-1], ALONE), ("a", range(-12, 0), "warning: the number of events (at the median "),
     ("hospice", [1], ""), ("a", [], "")],
)  # fmt: skip
def test_what_alone_tells_the_label_is_said_by_data_check(code, days, said, unpad, tmp_path):
    path, table = with_events(tmp_path / "p", code, days), tmp_path / "p" / "tables" / "tests.parquet"
    lines = unpad("data", "check", path, code=0).out
    assert said in lines
    rows = pq.read_table(table).to_pylist()
    pq.write_table(pa.Table.from_pylist([*rows, rows[0] | {"test": ""}]), table)
    assert said in unpad("data", "check", path, "data.on_bad_row=quarantine", code=3).out, "beside an allowed bad row"
    assert f"`unpad data check {path} data.holdout=0.1`" in unpad("train", path, "data.holdout=0.1", code=3).err
    assert ("alone tells label 1: if it is known after the prediction alone, leave it out" in lines) == bool(said)


@pytest.mark.slow
@pytest.mark.promise("doctor.patients")
@pytest.mark.parametrize("leaks", [True, False])
def test_figures_that_are_too_good_are_said_by_every_evaluation(leaks, unpad, tmp_path):
    settings = {"optim": {"lr": 2e-2}, "train": {"max_epochs": 4, "threads": 1}}
    path = with_events(tmp_path / "p", "hospice", [-1] * leaks, 600, **settings)
    trained = unpad("train", path, "--out", "run", code=0)
    assert (trained.out + trained.err).count("alone tells label 1") == leaks
    said = "auroc 1.0000 is too good to be trusted: look for a leak: unpad doctor "
    assert unpad("eval", "run", code=0).out.count(f"warning: {said}run") == leaks


def test_the_area_by_ranks_is_the_auroc():
    ids, labels = np.arange(200), np.arange(200) % 2
    values = np.where(labels == 1, ids + 200.0, -ids)
    values[:2] = 201  # of both
    events = PatientEvents(ids, ids, np.ones(200, np.int64), values, np.full(200, np.nan), ("", "x"))
    leak = worst_leak(events, labels, ())
    assert leak is not None
    assert leak.share == pytest.approx(float(auroc(labels, values)))
    assert leak.what[0] == "the value of x"
    assert worst_leak(events, np.where(labels == 1, -1, labels), ()) is None
