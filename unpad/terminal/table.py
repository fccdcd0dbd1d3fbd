"""Tables of text for 80 columns, or a narrower terminal, where wide ones become two; and tables as CSV."""

import csv
import io
import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from typing import Any

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a cell that begins so is a formula in Excel and LibreOffice


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows of cells as CSV; an apostrophe in front of a text that would be a formula makes it plain text.

    Numbers are written with all digits, as in JSON, and None as an empty cell.
    """
    return "".join(_csv_line([f"'{cell}" if _is_formula(cell) else cell for cell in row]) for row in (head, *rows))


def _csv_line(cells: Sequence[Any]) -> str:
    out = io.StringIO()
    csv.writer(out).writerow(cells)  # with its "\r\n" at the end, for which it quotes cells with either
    return out.getvalue().removesuffix("\r\n") + "\n"


def _is_formula(cell: Any) -> bool:
    """True for a text that begins like a formula and is no number."""
    if not isinstance(cell, str) or not cell.startswith(FORMULA):
        return False
    try:
        float(cell)
    except ValueError:
        return True
    return not cell.isprintable()  # such as "\t1", which float reads


WIDTH = 80
NARROWEST = 40  # a narrower terminal breaks lines itself
GAP = 2
LONGEST_NAME = 28  # cells of the first column; a longer name gets its own line
CLOSING, OPENING = "，。；：、！？）》」』”’,.;:!?)", "（《「『“‘("
_PATH = re.compile(r"[!-~]*/[^，。；：、！？（）《》「」]*")


def columns() -> int:
    """Columns to write in: 80, or those of a narrower terminal."""
    return max(min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns), NARROWEST)


def number_of(number: int, plural: str) -> str:
    """A number with its noun, such as "1 file", "1 class", "1 reply" or "2,000 files"."""
    if number != 1:
        return f"{number:,} {plural}"
    if plural.endswith(("sses", "ches", "shes")):
        return f"1 {plural.removesuffix('es')}"
    return f"1 {plural[:-3]}y" if plural.endswith("ies") else f"1 {plural.removesuffix('s')}"


def text_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[int] = (0,),
    width: int | None = None,
    gap: int = GAP,
) -> list[str]:
    """Lay out rows in columns; columns that do not fit follow in further tables with the same row names.

    Args:
        head: titles of the columns; the first column names the rows.
        rows: cells, as many as there are titles; a row with fewer has nothing in the last columns.
        left: columns aligned left; the others are aligned right.
        width: in cells (a Chinese character takes two); default: the terminal's, at most 80.
        gap: blanks between columns.
    """
    full = [[*row, *[""] * (len(head) - len(row))] for row in rows]
    lines = [list(head), *full]
    widths = [max(map(cells, column)) for column in zip(*lines, strict=True)]
    widths[0] = max([cells(head[0]), *(cells(row[0]) for row in full if cells(row[0]) <= LONGEST_NAME)])
    blocks: list[list[int]] = [[]]
    room = (width or columns()) - widths[0]
    for column in range(1, len(head)):
        taken = sum(widths[other] + gap for other in blocks[-1])
        if blocks[-1] and taken + widths[column] + gap > room:
            blocks.append([])
        blocks[-1].append(column)
    tables = []
    for number, block in enumerate(blocks):
        tables += [""] if number else []
        for row in lines:
            tables += _line(row, [0, *block], widths, left, gap)
    return tables


def _line(row: list[str], columns: list[int], widths: list[int], left: Collection[int], gap: int) -> list[str]:
    """One row of a table; a name that is wider than its column gets a line above."""
    name = row[0]
    alone = cells(name) > widths[0]
    parts = [_padded("" if alone else name, widths[0], 0 in left)]
    parts += [_padded(row[column], widths[column], column in left) for column in columns[1:]]
    return [*([name] if alone else []), (" " * gap).join(parts).rstrip()]


def _padded(text: str, width: int, is_left: bool) -> str:
    blank = " " * (width - cells(text))
    return text + blank if is_left else blank + text


def described(names: Sequence[str], texts: Sequence[str], *, width: int | None = None) -> list[str]:
    """Lay out names with a text each, wrapped to the terminal in its own column."""
    column = max([cells(name) for name in names if cells(name) <= LONGEST_NAME], default=0) + GAP
    lines = []
    for name, text in zip(names, texts, strict=True):
        first, *more = wrapped(text, (width or columns()) - column)
        if cells(name) > column - GAP:
            lines += [name, " " * column + first]
        else:
            lines.append((_padded(name, column, True) + first).rstrip())
        lines += [" " * column + line for line in more]
    return lines


def folded(line: str, width: int) -> list[str]:
    """Break a line at spaces where it is too wide, and keep the other spaces; continuation lines are indented by
    two."""
    if cells(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    lines, here = [], indent
    for part in re.findall(r"\S+\s*", line):
        if here.strip() and cells(here + part.rstrip()) > width:
            lines.append(here.rstrip())
            here = f"{indent}  "
        here += part
    return [*lines, here.rstrip()]


def wrapped(text: str, width: int | None = None, *, indent: int = 0) -> list[str]:
    """Break a text into lines at its spaces and between Chinese characters, which take two cells each; no line begins
    with a mark that closes or ends with one that opens. A word or path wider than a line stays whole, for copying.

    Args:
        width: in cells, indent included; default: the terminal's, at most 80.
        indent: blanks before each line.
    """
    room = (width or columns()) - indent
    lines, here = [], ""
    for word in text.split():
        gap = " " if here else ""
        for part in _parts(word):
            if here and cells(here + gap + part) > room:
                lines.append(here)
                here = gap = ""
            here, gap = here + gap + part, ""
    return [" " * indent + line if line else "" for line in [*lines, here]]


def _parts(word: str) -> list[str]:
    """Parts of a word between which a line may end: a path, runs of narrow letters, and each Chinese character."""
    if word.isascii():
        return [word]
    path = _PATH.match(word)
    parts = [path[0] if path else word[0]]
    for letter in word[len(parts[0]) :]:
        before = parts[-1][-1]
        if before in OPENING or letter in CLOSING or max(cells(before), cells(letter)) < 2 or cells(letter) == 0:
            parts[-1] += letter
        else:
            parts.append(letter)
    return parts


def cells(text: str) -> int:
    """Columns of a terminal that a text takes."""
    from rich.cells import cell_len  # imported here, as most commands print no table

    return cell_len(text)


def short(value: float) -> str:
    """Write a number in at most five characters or so: 1234 as 1,234, 12345678 as 12.3M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / min(size, 1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def span(seconds: float) -> str:
    """Write a duration: 8.1s, 1m12s, 3h05m."""
    if seconds < 60:
        return f"{seconds:.0f}s" if seconds >= 10 else f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"
