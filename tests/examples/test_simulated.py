"""Tests of the simulated patients with ready labels, and of the packaged recipe that reads them."""

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from unpad.data.patients import open_data
from unpad.examples.drawn import DAY_0, HORIZON, PATIENTS_VERSION, simulated_folder
from unpad.recipes.file import load_recipe


def test_the_ready_labels_are_of_the_same_patients_and_no_event_follows_day_0(tmp_path, monkeypatch):
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path))
    old = tmp_path / f"simulated-{PATIENTS_VERSION}" / "patients"
    old.mkdir(parents=True)
    (old / "patients.parquet").touch()  # of an earlier version, which had no labels
    patients, history, labels = (
        pq.read_table(simulated_folder() / "patients" / f"{name}.parquet") for name in ("patients", "history", "labels")
    )
    assert history["time"].to_numpy().max() < DAY_0
    assert set(labels["id"].to_pylist()) == set(history["id"].to_pylist())
    last, died = (
        np.asarray(pc.take(patients[name], pc.index_in(labels["id"], patients["id"].combine_chunks())))
        for name in ("days", "died")
    )
    assert ((last >= HORIZON) | (died == 1)).all(), "the outcome of every patient is known"
    assert (labels["label"].to_numpy() == ((died == 1) & (last <= HORIZON))).all()
    assert labels["label"].to_pylist().count(1) == 247


@pytest.mark.promise("patients.ready-labels")
def test_the_packaged_recipe_of_ready_labels_reads_every_event_and_label():
    data = open_data(load_recipe("events_labels"), None)
    assert np.bincount(data.labels).tolist() == [452, 247]
    assert not data.report.bad
    assert data.report.num_late.sum() == 0
    assert data.cohort.duration is None
