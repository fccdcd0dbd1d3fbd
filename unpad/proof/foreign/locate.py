"""Places of sequences in the batches of a collator, found by their content.

Nothing is assumed about the batch: padding on either side, any order, several sequences in a row, cut or split
sequences are all found. Whole sequences are placed first, longest first, where they best fill a gap between boundaries;
the other cells then go to the longest runs of the remaining sequences.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LEAST_RUN = 3  # tokens of a piece of a sequence; shorter ones match by chance


@dataclass(frozen=True)
class Span:
    """A run of one sequence's tokens in a row.

    Args:
        sequence: index of the sequence.
        offset: position in the sequence of the first token.
        row, start: cell of the first token.
        length: in tokens.
    """

    sequence: int
    offset: int
    row: int
    start: int
    length: int


class Cells:
    """Rows of tokens; some cells may be taken.

    Args:
        rows: token ids of each row; None for a cell without a token, such as masked padding.
        starts: (row, column) of cells at which a sequence may start, from restarting positions.
    """

    def __init__(self, rows: Sequence[Sequence[int | None]], starts: Iterable[tuple[int, int]] = ()) -> None:
        self._rows = [list(row) for row in rows]
        self._hints = set(starts)
        self._pairs: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self._singles: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for r, row in enumerate(self._rows):
            for c, token in enumerate(row):
                following = row[c + 1] if c + 1 < len(row) else None
                if token is not None:
                    self._singles[token].append((r, c))
                    if following is not None:
                        self._pairs[token, following].append((r, c))

    def candidates(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Cells where these tokens start, compared up to the first two."""
        return self._singles[tokens[0]] if len(tokens) == 1 else self._pairs[tokens[0], tokens[1]]

    def run(self, tokens: Sequence[int], row: int, start: int) -> int:
        """Number of free cells from `start` on that hold the tokens."""
        length, cells = 0, self._rows[row]
        while length < len(tokens) and start + length < len(cells) and cells[start + length] == tokens[length]:
            length += 1
        return length

    def fit(self, row: int, start: int, length: int) -> int:
        """Number of the ends of a run, 0 to 2, that lie at a boundary, less the boundaries inside of it.

        Boundaries are ends of the row, taken cells, and hints.
        """
        cells, end = self._rows[row], start + length
        first = start == 0 or cells[start - 1] is None or (row, start) in self._hints
        last = end == len(cells) or cells[end] is None or (row, end) in self._hints
        return first + last - sum((row, column) in self._hints for column in range(start + 1, end))

    def take(self, row: int, start: int, length: int) -> None:
        self._rows[row][start : start + length] = [None] * length


def locate(cells: Cells, sequences: Sequence[Sequence[int]]) -> list[Span]:
    """Find the sequences; pieces of whole sequences come first.

    A missing sequence has no piece.
    """
    pieces: list[Span] = []
    left = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
    for least in (2, -math.inf):  # exactly between two boundaries, then anywhere
        waiting, left = left, []
        for index in waiting:
            place = _whole(cells, sequences[index], least)
            if place is None:
                left.append(index)
            else:
                pieces.append(Span(index, 0, *place, len(sequences[index])))
                cells.take(*place, len(sequences[index]))
    for index in left:
        pieces += _torn(cells, index, sequences[index])
    return pieces


def _whole(cells: Cells, tokens: Sequence[int], least: float) -> tuple[int, int] | None:
    """The best free place of a whole sequence that fits so well, the first of equally good ones."""
    found = [place for place in cells.candidates(tokens) if cells.run(tokens, *place) == len(tokens)]
    best = max(found, key=lambda place: cells.fit(place[0], place[1], len(tokens)), default=None)
    return None if best is None or cells.fit(*best, len(tokens)) < least else best


def _torn(cells: Cells, index: int, tokens: Sequence[int]) -> list[Span]:
    """Longest runs of a sequence, then of what remains before and after each."""
    pieces, spans = [], [(0, len(tokens))]
    while spans:
        low, high = spans.pop()
        best: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)  # (length, fit, -offset, row, column)
        for offset in range(low, high - 1):
            if high - offset < best[0]:
                break
            for row, column in cells.candidates(tokens[offset : offset + 2]):
                length = cells.run(tokens[offset:high], row, column)
                if length >= best[0]:
                    best = max(best, (length, cells.fit(row, column, length), -offset, row, column))
        length, _, negative, row, column = best
        if length >= LEAST_RUN:
            pieces.append(Span(index, -negative, row, column, length))
            cells.take(row, column, length)
            spans += [(low, -negative), (-negative + length, high)]
    return pieces
