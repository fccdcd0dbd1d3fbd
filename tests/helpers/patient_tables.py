"""Tables of patients from which a model learns who is ill."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

MODEL = {"kind": "set_sequence", "width": 16, "heads": 2, "hidden": 24, "blocks": 1, "levels": 1, "latent": 4}
FIRST, PEOPLE = 987_654_000, 60  # ids that no number of a report looks like


def write_tables(folder: Path, ids: np.ndarray) -> None:
    """Measurements and outcomes of people; who is ill has higher values. The same id gives the same person."""
    folder.mkdir()
    tests: dict[str, list[object]] = {"id": [], "days": [], "test": [], "value": []}
    people: dict[str, list[object]] = {"id": [], "age": [], "futime": [], "status": []}
    for person in ids.tolist():
        rng = np.random.default_rng(person)
        ill = person % 3 == 0
        for key, one in zip(people, (person, int(rng.integers(30, 90)), 100 if ill else 900, int(ill)), strict=True):
            people[key].append(one)
        for day in sorted(rng.integers(-500, 1, rng.integers(0, 8)).tolist()):
            row = (person, day, str(rng.choice(["a", "b", "c"])), float(rng.normal() + 3 * ill))
            for key, cell in zip(tests, row, strict=True):
                tests[key].append(cell)
    pq.write_table(pa.table(tests), folder / "tests.parquet")
    pq.write_table(pa.table(people), folder / "people.parquet")
