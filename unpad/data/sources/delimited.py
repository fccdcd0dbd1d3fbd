"""Rows of CSV and TSV files with a header, and the header itself."""

import csv
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from unpad.data.sources.example import BadRow
from unpad.data.sources.faults import RowFault, bad_utf8, columns_of
from unpad.data.sources.fields import Advise
from unpad.data.sources.row import Row
from unpad.data.sources.sniff import HEAD_BYTES, mistaken

SAMPLE_ROWS, SAMPLE = 100, 200  # rows that show what a file is, and characters of each of their cells
DELIMITERS = ",;\t"
MAX_CHARACTERS = 1 << 28  # of a cell, and of the first line
NOT_UTF8 = re.compile("[\udc80-\udcff]")  # bytes, as "surrogateescape" decodes them


def csv_records(path: Path) -> Iterator[tuple[int, list[str], int]]:
    """Yield (line from 1, cells, number of lines) of the header and of every row; no cells where quotes are wrong.

    Bytes that are not UTF-8 are half characters. The delimiter is the commonest of comma, semicolon and tab in the
    header.

    Raises:
        RowFault: at the header: the file is not UTF-8, or has none that can be read.
        OSError: it cannot be read.
    """
    with path.open("rb") as raw:
        if wrong := mistaken(raw.read(HEAD_BYTES), "csv"):
            raise RowFault("E_ENCODING", *wrong)
    csv.field_size_limit(MAX_CHARACTERS)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as handle:
        first = handle.readline(MAX_CHARACTERS)
        if not first.strip():
            raise RowFault("E_EMPTY", "the file has no header", "begin with the names of the columns")
        preferred = DELIMITERS[::-1] if path.suffix.lower() == ".tsv" else DELIMITERS
        delimiter = max(preferred, key=first.count)
        reader = csv.reader(itertools.chain([first], handle), delimiter=delimiter, strict=True)
        while True:
            before = reader.line_num
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if not before:
                    raise RowFault("E_CSV", f"the header cannot be read: {error}") from None
                yield before + 1, [], reader.line_num - before
                continue
            if cells:
                yield before + 1, cells, reader.line_num - before


def read_delimited(
    path: Path, wanted: tuple[str, ...], optional: tuple[str, ...] = (), advise: Advise | None = None
) -> Iterator[Row | BadRow]:
    """Yield every row, with its cells by column, or the bad row; empty lines are skipped.

    Cells that are empty are left out unless their column is wanted. A quote without its end takes along the lines
    that it swallows.

    Args:
        wanted: the file must have one of these columns; optional: others, also read under near spellings.
        advise: what to do about a file without any of them, from its first rows.
    """
    records = csv_records(path)
    try:
        names = next(records)[1]
    except RowFault as fault:
        yield fault.at(f"{path}:1", num_rows=1 if fault.code == "E_EMPTY" else None)
        return
    try:
        known = {column: name for name, column in columns_of(names, wanted, optional).items()}
    except RowFault as refused:
        first = itertools.islice(records, SAMPLE_ROWS)
        sample = [dict(zip(names, (cell[:SAMPLE] for cell in cells), strict=False)) for _, cells, _ in first]
        if advise and refused.code == "E_MISSING":
            refused.fix = advise([dict.fromkeys(names, ""), *sample]) or refused.fix
        yield refused.at(f"{path}:1", num_rows=max(len(sample) + sum(1 for _ in records), 1))
        return
    names = [known[name] for name in names]
    for line, cells, num_lines in records:
        where, row_fault = f"{path}:{line}", _fault_of_row(path, names, cells, num_lines)
        if row_fault:
            yield row_fault.at(where, ",".join(cells), num_rows=num_lines if not cells else 1)
        else:
            pairs = zip(names, cells, strict=True)
            yield Row(where, {name: cell for name, cell in pairs if cell or name in wanted})


def _fault_of_row(path: Path, names: list[str], cells: list[str], num_lines: int) -> RowFault | None:
    if not cells:
        return RowFault("E_CSV", f"a quote of this line does not end well; it takes along {num_lines} lines")
    for cell in cells:
        if match := NOT_UTF8.search(cell):
            return bad_utf8(ord(match[0]) - 0xDC00, "of a cell", path)
    if len(cells) != len(names):
        return RowFault("E_CSV", f"the row has {len(cells)} fields, the header {len(names)}")
    return None
