"""Parameters that nothing of the data reaches are no fault of the recipe."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.doctor.examining import codes, examined
from tests.helpers.families import patients

pytestmark = pytest.mark.slow


def test_a_model_of_values_may_learn_from_codes_alone(tmp_path: Path) -> None:
    tables = tmp_path / "tables"
    events = [{"path": "tests.parquet", "time": "days", "code": "test", "value": None}]
    recipe = patients(tmp_path, data={"events": events}, model={"blocks": 1, "hidden": 8})
    table = pq.read_table(tables / "tests.parquet").to_pylist()
    rows = [{"id": row["id"], "days": row["days"], "test": f"{row['test']}{row['value'] > 1.5}"} for row in table]
    pq.write_table(pa.Table.from_pylist(rows), tables / "tests.parquet")
    assert "frozen" not in codes(examined(recipe))
