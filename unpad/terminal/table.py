"""Tables of text for a terminal of 80 columns: what does not fit side by side becomes two tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence

WIDTH = 80
GAP = 2
LONGEST_NAME = 28  # cells of a first column; a longer name has a line to itself


def text_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[int] = (0,),
    width: int = WIDTH,
    gap: int = GAP,
) -> list[str]:
    """Lay out rows in columns; columns that do not fit into the width follow in further tables with the same names.

    Args:
        head: titles of the columns, the first of which names the rows.
        rows: cells, as many as there are titles; a row with fewer has nothing in the last columns.
        left: columns aligned left; the others are aligned right.
        width: of the terminal, in cells; a Chinese character takes two.
        gap: blanks between columns.
    """
    full = [[*row, *[""] * (len(head) - len(row))] for row in rows]
    lines = [list(head), *full]
    widths = [max(map(cells, column)) for column in zip(*lines, strict=True)]
    widths[0] = max([cells(head[0]), *(cells(row[0]) for row in full if cells(row[0]) <= LONGEST_NAME)])
    blocks: list[list[int]] = [[]]
    room = width - widths[0]
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
    """One row of a table; with a line before it for a name that is wider than its column."""
    name = row[0]
    alone = cells(name) > widths[0]
    parts = [_padded("" if alone else name, widths[0], 0 in left)]
    parts += [_padded(row[column], widths[column], column in left) for column in columns[1:]]
    return [*([name] if alone else []), (" " * gap).join(parts).rstrip()]


def _padded(text: str, width: int, is_left: bool) -> str:
    blank = " " * (width - cells(text))
    return text + blank if is_left else blank + text


def described(names: Sequence[str], texts: Sequence[str], *, width: int = WIDTH) -> list[str]:
    """Lay out names with a text each, which continues below itself where it does not fit into the width."""
    column = max([cells(name) for name in names if cells(name) <= LONGEST_NAME], default=0) + GAP
    lines = []
    for name, text in zip(names, texts, strict=True):
        first, *more = wrapped(text, width - column)
        if cells(name) > column - GAP:
            lines += [name, " " * column + first]
        else:
            lines.append((_padded(name, column, True) + first).rstrip())
        lines += [" " * column + line for line in more]
    return lines


def wrapped(text: str, width: int = WIDTH) -> list[str]:
    """Break a text into lines at its spaces; a word wider than the width stays whole, so that paths can be copied."""
    lines, here = [], ""
    for word in text.split():
        if here and cells(f"{here} {word}") > width:
            lines.append(here)
            here = word
        else:
            here = f"{here} {word}".strip()
    return [*lines, here]


def cells(text: str) -> int:
    """Columns of a terminal that a text takes."""
    from rich.cells import cell_len  # imported here, as most commands print no table

    return cell_len(text)
