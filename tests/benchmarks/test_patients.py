"""The rates of training on patients: all sides compute the same, see the same patients, and end in a table."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.helpers.patients import NUM_CODES, random_patients, tiny_patients_model
from unpad.batching.batch import RaggedBatch, concatenate
from unpad.models.set_sequence.event_sets import EventSets

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LENGTHS = [1, 40, 0, 7, 3]


@pytest.fixture(scope="module")
def patients() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("patients")
        for name in ("patients", "padded_patients"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("lengths", [LENGTHS, [0], [1]])
@pytest.mark.parametrize("way", ["padded", "loop"])
def test_sides_compute_the_losses_and_gradients_of_our_own(patients: ModuleType, way: str, lengths: list[int]) -> None:
    model = tiny_patients_model()
    weights = dict.fromkeys(model.weights, 1.0)
    assert patients.disagreement(model, weights, random_patients(lengths), way) < 1e-9


def test_what_is_computed_otherwise_is_noticed(patients: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_patients_model()
    weights = dict.fromkeys(model.weights, 1.0)
    chamfer = patients.Padded.losses.__globals__["chamfer"]
    monkeypatch.setitem(patients.Padded.losses.__globals__, "chamfer", lambda *args: 1.001 * chamfer(*args))
    for way in ("padded", "loop"):
        assert patients.disagreement(model, weights, random_patients(LENGTHS), way) > 1e-4


def test_every_turn_is_the_same_patients_for_all_batch_sizes(
    patients: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [random_patients([n]) for n in (1, 2, 3, 4)]
    trained: list[RaggedBatch] = []
    monkeypatch.setattr(patients, "update", lambda bench, one, precision: trained.extend(one[1]))
    for size in (1, 2):
        joined = [concatenate(batches[i : i + size]) for i in range(0, 4, size)]
        side = patients.side(type("Bench", (), {"model": None}), "unpad", size, joined, "fp32", turns=2)
        assert sum(side.step().tokens for _ in range(side.cycle)) == 2
    assert [batch.total_tokens for batch in trained] == [1, 2, 3]


def test_a_long_patient_is_the_sets_of_many(patients: ModuleType) -> None:
    many = random_patients([5, 0, 9])
    one = patients.long_patient(many, 50)
    assert one.num_seqs == 1
    sets = one.require(EventSets)
    assert 50 <= one.total_tokens == sets.members.lengths().sum() == len(sets.values)
    assert bool((sets.times.diff() >= 0).all())
    terms = tiny_patients_model().losses(one)
    assert all(bool(torch.isfinite(total)) for total, _ in terms.values())
    assert int(one.input_ids.max()) < NUM_CODES


def test_the_page_has_a_table_per_precision(
    patients: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "patients.md"
    fields = ["--data", str(tmp_path / "none"), "--rounds", "1", "--patients", "1", "--long", "50", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["patients.py", *fields, "--sizes", "1"])
    patients.main()
    lines = out.read_text(encoding="utf-8").splitlines()
    tables = [line for line in lines if line.startswith("## ")]
    rows = [line.split("|") for line in lines if line.startswith("| 1 |")]
    assert len(rows) == len(tables) >= 1
    assert all(float(row[column]) > 0 for row in rows for column in (2, 4, 5))
    assert "differ by at most" in "\n".join(lines)
