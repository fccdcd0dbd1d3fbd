from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from unpad.data.sources.files import expand
from unpad.data.sources.reader import read
from unpad.data.sources.row import Row
from unpad.recipes.data import DataSettings, Source


def test_a_row_knows_which_of_its_fields_nobody_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"Text": "a b", "group": null, "note": 1, "split": "train"}', encoding="utf-8")
    (tmp_path / "b.csv").write_text("Text,group,note,split\na b,,1,train\n", encoding="utf-8")
    table = {"Text": ["a b"], "group": pa.nulls(1, pa.string()), "note": [1], "split": ["train"]}
    pq.write_table(pa.table(table), tmp_path / "c.parquet")
    for file in expand([Source(path=str(tmp_path))], Path):
        (row,) = read(file, DataSettings(), ("text",))
        assert isinstance(row, Row)
        empty = [] if file.format == "csv" else ["group"]  # an empty cell is no field
        assert sorted(row.unread()) == [*empty, "note", "split", "text"]
        assert row.text("text") == "a b"
        assert row.declared() == ("train", "", ())
        assert list(row.unread()) == ["note"]
