"""Parquet files of a few bytes whose rows would fill the memory, and files of the same kind that are sound."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.shell import Shell
from unpad.data.check import check
from unpad.data.sources import parquet
from unpad.data.sources.parquet import GrowthError, ParquetRows, open_parquet

LONG = "ab" * 20_000


def repeated(num_rows: int, text: str = LONG) -> pa.Array:
    """One text of a dictionary, named by every row."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(num_rows, np.int32)), pa.array([text]))


def bomb(kind: str, path: Path) -> tuple[Path, int]:
    """Write a bomb of about 40 MB, and return its path and its number of rows."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": LONG}]
    table, encoded = {
        "dictionary": (pa.table({"text": repeated(1000)}), True),
        "nested": (pa.table({"messages": pa.array([messages] * 1000)}), True),
        "pages": (pa.table({"text": ["a" * 40_000_000]}), False),
        "rows": (pa.table({"text": ["ab c"] * 500_000}), True),
    }[kind]
    pq.write_table(table, path, compression="zstd", use_dictionary=encoded, row_group_size=100_000)
    return path, table.num_rows


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds so low that small bombs exceed them."""
    monkeypatch.setattr(parquet, "MOST_FREE", 1 << 20)
    monkeypatch.setattr(parquet, "MOST_AT_ONCE", 1 << 19)


@pytest.mark.promise("input.parquet")
@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("kind", ["dictionary", "nested", "pages", "rows"])
def test_a_bomb_is_refused_before_it_takes_memory_and_its_rows_are_counted(kind, tmp_path, monkeypatch):
    path, num_rows = bomb(kind, tmp_path / "bomb.parquet")
    assert path.stat().st_size < 20_000
    decoded: list[int] = []
    before = pa.total_allocated_bytes()
    refuse = ParquetRows._refuse

    def watch(self: ParquetRows, num_bytes: int) -> None:
        decoded.append(pa.total_allocated_bytes() - before)
        refuse(self, num_bytes)

    monkeypatch.setattr(ParquetRows, "_refuse", watch)
    report = check(path, "chat" if kind == "nested" else "text")
    assert {row.code for row in report.bad} == {"E_PARQUET"}
    assert "times the" in report.bad[0].what
    assert report.num_rows == num_rows == report.num_used + sum(row.num_rows or 0 for row in report.bad)
    assert max(decoded) < 4 << 20, "bytes of a batch or two, of forty million"


@pytest.mark.promise("input.parquet")
@pytest.mark.usefixtures("strict")
def test_a_bomb_among_tables_of_patients_is_refused(tmp_path: Path, unpad: Shell) -> None:
    numbers = np.arange(40_000)
    events = {"id": numbers // 100, "time": numbers % 100, "code": repeated(40_000), "value": numbers * 0.5}
    pq.write_table(pa.table(events), tmp_path / "e.parquet", compression="zstd")
    done = unpad("data", "check", "e.parquet", "--kind", "events")
    assert (done.code, done.err.splitlines()[1]) == (3, "  at: e.parquet")
    assert "E_PARQUET the rows would take" in done.err


@pytest.mark.promise("input.parquet")
def test_sound_files_of_every_form_are_read_whole(tmp_path: Path) -> None:
    words = [f"word {number % 7} of a text" for number in range(3000)]
    for number, (table, options) in enumerate(
        [
            (pa.table({"text": words}), {}),
            (pa.table({"text": pa.array(words).dictionary_encode()}), {}),
            (pa.table({"text": pa.array(words, pa.large_string())}), {"use_dictionary": False}),
            (pa.table({"text": words[:0]}), {}),
            (pa.table({"text": [*words, LONG]}), {"row_group_size": 500}),
        ]
    ):
        pq.write_table(table, tmp_path / f"{number}.parquet", **options)
        with open_parquet(tmp_path / f"{number}.parquet") as file:
            rows = ParquetRows(tmp_path / f"{number}.parquet", file, ["text"])
            groups = range(file.num_row_groups)
            read = [text for group in groups for one in rows.batches(group) for text in one.column(0).to_pylist()]
        assert read == table.column("text").to_pylist()


@pytest.mark.promise("input.parquet")
def test_batches_get_shorter_where_every_row_may_be_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "MOST_AT_ONCE", 5 * len(LONG))
    path, _ = bomb("dictionary", tmp_path / "bomb.parquet")
    monkeypatch.setattr(parquet, "MOST_FREE", 20 * len(LONG))
    with open_parquet(path) as file:
        sizes = []
        with pytest.raises(GrowthError, match="1,000 times"):
            sizes += [batch.num_rows for batch in ParquetRows(path, file, ["text"]).batches(0)]
        assert sizes == []
        taken = ParquetRows(path, file, ["text"]).batches(0)
        assert [next(taken).num_rows for _ in range(3)] == [5, 5, 5]
