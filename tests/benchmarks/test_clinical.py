"""The comparison of a model of patients with gradient boosting: the table that boosting reads, and the pairing."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.evaluation.scikit_learn import FILE


@pytest.fixture(scope="module")
def clinical() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "clinical.py"
    spec = importlib.util.spec_from_file_location("clinical", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["clinical"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty people; those of even numbers were followed for too short a time, and nobody knows of person 3."""
    folder = tmp_path_factory.mktemp("tables")
    rng = np.random.default_rng(0)
    ids = np.arange(1, 31)
    status = (ids % 3 == 0).astype(int)
    subjects = {"id": ids, "age": rng.integers(20, 90, 30), "male": ids % 2, "status": status}
    pq.write_table(pa.table({**subjects, "futime": np.where(ids % 2 == 0, 1824, 1825)}), folder / "subjects.parquet")
    whose = rng.choice(np.delete(ids, 2), 300)
    tests = {"test": rng.choice(["a", "b"], 300), "value": rng.normal(size=300), "days": rng.integers(-900, 400, 300)}
    pq.write_table(pa.table({"id": whose, **tests}), folder / "measurements.parquet")
    events = {"id": [1, 1, 5, 6], "days": [-1, 0, 1, -5], "event": ["x", "y", "x", "y"]}
    pq.write_table(pa.table(events), folder / "events.parquet")
    return folder


@pytest.mark.parametrize("kind", ["plain", "ties"])
def test_the_log_loss_equals_that_of_scikit_learn(clinical: ModuleType, kind: str) -> None:
    known = json.loads(FILE.read_text(encoding="utf-8"))[kind]
    labels, p, times = (np.array(known[name]) for name in ("labels", "p", "times"))
    assert clinical.log_loss(labels, p) == pytest.approx(known["scores"]["log_loss"], abs=1e-12)
    assert clinical.log_loss(labels, p, times) == pytest.approx(known["weighted"]["log_loss"], abs=1e-12)


def test_probabilities_of_exactly_0_and_1_cost_much_and_not_everything(clinical: ModuleType) -> None:
    assert 10 < clinical.log_loss(np.array([1, 0, 1, 0]), np.array([0.0, 1.0, 1.0, 0.0])) < 20


def test_people_are_those_of_known_outcome(clinical: ModuleType, folder: Path) -> None:
    people = clinical.load_people(folder)
    assert people.ids.tolist() == [i for i in range(1, 31) if i % 2 or i % 3 == 0]
    assert people.died.tolist() == [int(i % 3 == 0) for i in people.ids]
    assert people.flags[people.ids == 1].tolist() == [[1, 1]]
    assert people.flags[people.ids == 5].tolist() == [[0, 0]]  # after the index date
    assert people.flags[people.ids == 6].tolist() == [[0, 1]]
    assert people.days.max() <= 0


def test_features_are_those_of_every_persons_own_measurements(clinical: ModuleType, folder: Path) -> None:
    people, rows = clinical.load_people(folder), pq.read_table(folder / "measurements.parquet").to_pylist()
    x = clinical.features(people)
    assert x.shape == (20, 2 + 2 + 2 * 6)
    assert np.array_equal(x[:, :4], np.concatenate([people.basics, people.flags], 1))
    for row, person in enumerate(people.ids.tolist()):
        for test, name in enumerate(people.tests):
            mine = [r for r in rows if r["id"] == person and r["test"] == name and r["days"] <= 0]
            mine.sort(key=lambda r: r["days"])
            count, first, last, mean, spread, slope = x[row, 4 + 6 * test : 10 + 6 * test]
            assert count == len(mine)
            values, years = [r["value"] for r in mine], [r["days"] / 365.25 for r in mine]
            if mine:
                assert (first, last) == (values[0], values[-1])
                assert mean == pytest.approx(np.mean(values))
            assert np.isnan(spread) == np.isnan(slope) == (len(mine) < 2)
            if len(mine) > 1:
                assert spread == pytest.approx(np.std(values, ddof=1))
                assert slope == pytest.approx(np.polyfit(years, values, 1)[0])


def test_every_split_tests_a_fifth(clinical: ModuleType) -> None:
    train, test = clinical.split_people(100, 3)
    assert sorted([*train, *test]) == list(range(100))
    assert len(test) == 20
    assert np.array_equal(np.concatenate([train, test]), np.random.RandomState(3).permutation(100))


def test_a_side_equals_itself_and_the_intervals_hold_the_difference(
    clinical: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clinical, "TRAIN_SHARE", 0.2)
    people, rng = clinical.load_people(folder), np.random.default_rng(0)
    noise = [rng.random(16) for _ in clinical.SEEDS]
    better = [p + people.died[clinical.split_people(20, s)[1]] for s, p in zip(clinical.SEEDS, noise, strict=True)]
    assert clinical.paired(people, clinical.auroc, noise, noise)[0] == "+0.0000"
    mean, by_split, by_person, each = clinical.paired(people, clinical.auroc, better, noise)
    assert float(mean) == pytest.approx(np.mean([float(value) for value in each.split()]), abs=1e-4)
    for interval in (by_split, by_person):
        low, high = map(float, interval.split(" to "))
        assert low <= float(mean) <= high
    page = clinical.markdown(people, {clinical.OURS: better, clinical.BOOSTING: noise}, "")
    assert f"| AUROC | {mean} |" in page


def test_the_interval_over_splits_is_students(clinical: ModuleType) -> None:
    """With 4 degrees of freedom its distribution has a closed form."""
    t, degrees = clinical.STUDENT, len(clinical.SEEDS) - 1
    assert degrees == 4
    x = t / math.sqrt(4 + t * t)
    assert 0.5 + (3 * x - x**3) / 4 == pytest.approx(0.975, abs=1e-9)
