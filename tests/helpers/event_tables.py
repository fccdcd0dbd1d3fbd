"""Small sets of patients in every layout, for tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from unpad.batching.plan import Micro
from unpad.data.patients import EventData, open_data
from unpad.recipes.recipe import Recipe

Row = tuple[int, float, str, float | None]  # id, minute, code, value
FIRST_ID = 90_210_001  # ids that occur nowhere else, so that messages can be searched for them
MEASURED = ("glucose", "sodium", "lactate")
NOTED = ("fever", "sepsis")


def draw_rows(num: int = 12, seed: int = 0, most: int = 9) -> list[Row]:
    """Events of patients, in the order of time; every one has at least one, the first has one only."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for patient in range(num):
        size = 1 if patient == 0 else int(rng.integers(1, most))
        minutes = np.sort(rng.integers(0, 6, size)) * 45  # several events share a minute
        seen = set()
        for minute in minutes.tolist():
            code = str(rng.choice([*MEASURED, *NOTED]))
            if (minute, code) not in seen:
                seen.add((minute, code))
                value = round(float(rng.normal(100, 20)), 2) if code in MEASURED else None
                rows.append((FIRST_ID + patient, float(minute), code, value))
    return rows


def table(rows: Sequence[Row], **names: str) -> pa.Table:
    """A long table; `names` are other names of its columns id, time, code and value."""
    columns = list(zip(*rows, strict=True)) if rows else [[], [], [], []]
    kinds = {"id": pa.int64(), "time": pa.float64(), "code": pa.string(), "value": pa.float64()}
    arrays = {names.get(n, n): pa.array(c, kind) for (n, kind), c in zip(kinds.items(), columns, strict=True)}
    return pa.table(arrays)


def put(path: Path, content: pa.Table) -> Path:
    """Write a table as its suffix says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        pa_csv.write_csv(content, path)
    else:
        pq.write_table(content, path)
    return path


def put_folder(root: Path, rows: Sequence[Row], folders: dict[int, str] | None = None) -> Path:
    """One file per patient, named 90210001.0.parquet, in the folder that `folders` says."""
    for patient in sorted({row[0] for row in rows}):
        mine = table([row for row in rows if row[0] == patient], time="minute", code="variable").drop_columns("id")
        put(root / (folders or {}).get(patient, "") / f"{patient}.0.parquet", mine)
    return root


def put_meds(root: Path, rows: Sequence[Row], static: Sequence[Row] = (), splits: dict[int, str] | None = None) -> Path:
    """A MEDS dataset of two shards."""
    start = np.datetime64("2130-01-01T00:00:00", "us")
    patients = sorted({row[0] for row in [*rows, *static]})
    for shard in (0, 1):
        mine = [row for patient in patients[shard::2] for row in [*static, *rows] if row[0] == patient]
        facts = {id(row) for row in static}
        times = [None if id(row) in facts else start + np.timedelta64(int(row[1] * 60), "s") for row in mine]
        put(root / "data" / "any" / f"{shard}.parquet", pa.table({
            "subject_id": pa.array([row[0] for row in mine], pa.int64()),
            "time": pa.array(times, pa.timestamp("us")),
            "code": pa.array([row[2] for row in mine], pa.string()),
            "numeric_value": pa.array([row[3] for row in mine], pa.float32()),
        }))  # fmt: skip
    (root / "metadata").mkdir(exist_ok=True)
    if splits is not None:
        ids, sides = pa.array(list(splits), pa.int64()), pa.array(list(splits.values()), pa.string())
        put(root / "metadata" / "subject_splits.parquet", pa.table({"subject_id": ids, "split": sides}))
    return root


def recipe_of(sources: Any, **sections: Any) -> Recipe:
    values: dict[str, Any] = {
        "data": {"events": sources, "holdout": 0.25},
        "model": {"kind": "vit", "context": 2_000_000},  # any model with a length; its data is opened directly
        "plan": {"overflow": "error"},
        "losses": {"classification": 0},  # so few patients may all have one label
    }
    for name, fields in sections.items():
        values[name] = {**values.get(name, {}), **fields}
    return Recipe(**values)


def opened(sources: Any, kept: dict[str, bytes] | None = None, **sections: Any) -> EventData:
    return open_data(recipe_of(sources, **sections), kept)


def micro_of(data: EventData, ids: Sequence[int], pad_to: int = 0) -> Micro:
    seqs = np.array(ids, np.int64)
    stops = data.table.positions[seqs].astype(np.int32)
    return Micro(seqs, np.zeros_like(stops), stops, np.zeros_like(stops), pad_to, 0)
