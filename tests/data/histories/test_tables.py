"""Tables as people write them: lines of CSV, times with a zone, dates that are placeholders, results in words."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.helpers.event_tables import FIRST_ID, opened, put
from unpad.data.histories.event_rows import EventTable, read_source
from unpad.data.histories.tables import TableFile, open_table
from unpad.errors import SourceError
from unpad.recipes.data import EventSettings, EventSource

A, B = FIRST_ID, FIRST_ID + 1
DAY = 86_400


def read(path: Path, **source: Any) -> EventTable:
    return read_source(EventSource(path=str(path), **source), EventSettings(), Path)


def csv_of(folder: Path, *lines: str, header: str = "id,time,code,value") -> Path:
    path = folder / "a.csv"
    path.write_bytes("".join(line + "\n" for line in (header, *lines)).encode())
    return path


def faults(table: EventTable) -> list[tuple[str, str]]:
    return [(row.where.rpartition(":")[2], row.code) for row in table.bad]


def test_a_row_of_csv_is_named_by_its_line_whatever_quotes_hold(tmp_path: Path) -> None:
    rng = random.Random(0)
    path = tmp_path / "a.csv"
    kinds: list[tuple[str, int, bool | None]] = [  # a row, its lines, whether it is good; None: no row
        ('{},"a\nb\r\nc",{}', 3, True),
        ('{},"q""r",2', 1, True),
        ('{},"x\ny"', 2, False),
        ("{},1,2,3", 1, False),
        ("", 1, None),
    ]
    for _ in range(60):
        end = rng.choice(["\n", "\r\n"])
        text, line, good, bad = f'id,"co\nde",v{end}', 3, list[int](), list[int]()
        for number in range(rng.randint(1, 9)):
            row, lines, fits = rng.choice(kinds)
            text += row.format(number, number) + end
            if fits is not None:
                (good if fits else bad).append(line)
            line += lines
        path.write_bytes(text.encode())
        table = open_table([TableFile(path, "a.csv")], {"id": ("id",), "v": ("v",)})
        assert table.row.tolist() == good
        assert [int(row.where.rpartition(":")[2]) for row in table.bad] == bad


def test_line_ends_in_quotes_may_fall_between_blocks(tmp_path: Path) -> None:
    path = csv_of(tmp_path, *(f'{i},"{"z" * (i % 97)}\nw",{i}' for i in range(40_000)), header="id,note,v")
    table = open_table([TableFile(path, "a.csv")], {"id": ("id",), "v": ("v",)})
    assert (len(table), table.bad, table.row[-1]) == (40_000, [], 80_000)


def test_a_header_may_be_longer_than_what_is_read_to_guess(tmp_path: Path) -> None:
    more = ",".join(f"column{i}" for i in range(12_000))
    path = csv_of(tmp_path, f"{A},1,a,1{',' * 12_000}", header=f"id,time,code,value,{more}")
    assert len(read(path, unit="days").codes) == 1


@pytest.mark.parametrize(
    ("column", "num_bad"),
    [
        (pa.array([0, DAY * 1000, 9_300_000_000_000_000], pa.timestamp("ms")), 1),
        (pa.array([0, DAY, 2**50], pa.timestamp("s")), 1),
        (pa.array([0, 1, 2**30], pa.date32()), 1),
        (pa.array([0, DAY * 10**9, 2**63 - 1], pa.timestamp("ns")), 0),
        (["2020-01-01", "2110-05-01", "9999-12-31"], 1),
        (["2020-01-01", "0001-01-01", "2020-01-02"], 1),
    ],
    ids=["ms", "s", "date", "ns", "last day", "first day"],
)
def test_dates_that_cannot_be_meant_are_refused_and_none_wraps(tmp_path: Path, column: Any, num_bad: int) -> None:
    columns = {"id": [A] * 3, "code": ["a"] * 3, "value": [1.0] * 3, "time": column}
    table = read(put(tmp_path / "a.parquet", pa.table(columns)))
    assert [row.code for row in table.bad] == ["E_RANGE"] * num_bad
    assert np.abs(table.days).max() < 120_000


def test_times_with_a_zone_are_the_same_moment(tmp_path: Path) -> None:
    times = ["2024-01-31T12:30:00+08:00", "2024-01-31 04:30Z", "2024-01-30 23:00:00.5-0530", "2024-02-30 01:00+01:00"]
    table = read(csv_of(tmp_path, *(f"{A},{time},a,1" for time in times)))
    first, second, third = table.days.tolist()
    assert first == second
    assert third == pytest.approx(first + 0.5 / DAY)
    assert faults(table) == [("5", "E_UNIT")]
    for zone in ("+08:00", "Z"):
        mixed = read(csv_of(tmp_path, f"{A},2024-01-31 12:30{zone},a,1", f"{A},2024-01-31 12:30,a,1"))
        assert faults(mixed) == [("3", "E_UNIT")]
        assert "no zone" in mixed.bad[0].what


def test_labels_may_be_true_and_false(tmp_path: Path) -> None:
    path = csv_of(tmp_path, *(f"{A + n},1,a,1" for n in range(4)))
    told = tmp_path / "labels.csv"
    told.write_text("id,dead\n" + "".join(f"{A + n},{word}\n" for n, word in enumerate(["True", "FALSE", "1", "0"])))
    data = opened({"path": str(path), "unit": "days"}, events={"labels": {"path": str(told), "label": "dead"}})
    assert data.labels.tolist() == [1, 0, 1, 0]


def test_a_quote_without_its_end_never_swallows_rows(tmp_path: Path) -> None:
    lines = [f"{A},1,a,1,x", f'{A},2,a,2,"x', f"{A},3,a,3,x", f'{A},4,a,4,"y"']
    with pytest.raises(SourceError, match="would take along 3 lines") as caught:
        read(csv_of(tmp_path, *lines, header="id,time,code,value,note"), unit="days")
    assert caught.value.where.endswith("a.csv:3")
