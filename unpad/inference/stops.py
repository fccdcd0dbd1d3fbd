"""Texts before which an answer ends, looked for while it appears; several users read it (apart: pieces come and go)."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Text up to the one of `stops` that is complete first, also across pieces; a start of a stop is held back.

    `found` is True once one has occurred; nothing is pushed then.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._begun = [0] * len(stops)  # characters of each stop that the text so far ends with
        self._waiting = ""
        self.found = False

    def push(self, piece: str) -> str:
        """Add a piece, and return the text that is certain to come before any stop."""
        waiting = self._waiting + piece
        for end, letter in enumerate(piece, len(self._waiting) + 1):
            complete = 0
            for place, (stop, borders) in enumerate(self._stops):
                begun = self._begun[place]
                while begun and stop[begun] != letter:
                    begun = borders[begun - 1]
                self._begun[place] = begun = begun + (stop[begun] == letter)
                if begun == len(stop):
                    complete = max(complete, begun)
            if complete:
                self.found, self._waiting = True, ""
                return waiting[: end - complete]
        keep = len(waiting) - max(self._begun, default=0)
        self._waiting = waiting[keep:]
        return waiting[:keep]

    def rest(self) -> str:
        """The text that was held back, when nothing follows."""
        rest, self._waiting = self._waiting, ""
        return rest


def _borders(stop: str) -> list[int]:
    """For every place of a text, the length of the longest proper start that its beginning up to there ends with.

    Knuth, Morris and Pratt (1977), "Fast pattern matching in strings".
    """
    borders, length = [0], 0
    for letter in stop[1:]:
        while length and stop[length] != letter:
            length = borders[length - 1]
        length += stop[length] == letter
        borders.append(length)
    return borders
