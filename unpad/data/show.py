"""A sequence as the model gets it, for people: text with the learnt tokens marked, pictures, a table, and facts."""

import base64
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from unpad.terminal.printing import escaped
from unpad.terminal.table import text_table

if TYPE_CHECKING:
    from rich.text import Text

    from unpad.data.tokens.tokenizer import Tokenizer

CONTEXT_TOKENS = 8  # before a span, by which a decoder tells whether it begins with a space
MOST_CHARACTERS, MOST_ROWS = 600, 40  # of a span, and of a table, in a terminal that shows several sequences
LEARNT, COLOUR = ("[[", "]]"), "green"


@dataclass(frozen=True)
class TextSpan:
    """Neighbouring tokens as text.

    Args:
        learnt: whether their prediction counts in the loss.
        special: whether they are special tokens by their names, or stand for a picture.
    """

    text: str
    learnt: bool = False
    special: bool = False


@dataclass(frozen=True, eq=False)
class Shown:
    """A sequence, or the piece of one that the model gets at once.

    Args:
        where: place of its row; facts: lines on it.
        spans: its text.
        pictures: (height, width, 3) uint8 each.
        heads, rows: a table.
    """

    where: str
    facts: tuple[str, ...] = ()
    spans: tuple[TextSpan, ...] = ()
    pictures: tuple[np.ndarray, ...] = ()
    heads: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Fields by name; pictures as data URLs of PNG."""
        spans = [asdict(span) for span in self.spans]
        return {**vars(self), "spans": spans, "pictures": [data_url(picture) for picture in self.pictures]}

    def lines(self, *, coloured: bool, whole: bool) -> "list[tuple[int, Text]]":
        """The sequence for a terminal, without its pictures: lines to be wrapped, each with its indentation.

        Args:
            coloured: mark learnt tokens by colour; else by brackets.
            whole: leave nothing of long texts out.
        """
        from rich.text import Text

        rows = self.rows if whole else self.rows[:MOST_ROWS]
        table = text_table(self.heads, rows, left=range(len(self.heads))) if rows else []
        more = [f"and {len(self.rows) - len(rows):,} more: --row has all"] if len(rows) < len(self.rows) else []
        plain = [(2, fact) for fact in self.facts] + [(4, line) for line in (*table, *more)]
        text = Text()
        for learnt, spans in groupby(self.spans, lambda span: span.learnt):
            said = escaped("".join(span.text if whole else _short(span.text) for span in spans), keep="\n\t")
            said = said if coloured or not learnt else said.join(LEARNT)
            text.append(said, COLOUR if coloured and learnt else "")
        head = Text(escaped(self.where), "bold" if coloured else "")
        return [(0, head), *((indent, Text(escaped(line))) for indent, line in plain), *([(4, text)] if text else [])]


def _short(text: str) -> str:
    """A text without the middle of a long one."""
    if len(text) <= MOST_CHARACTERS:
        return text
    begin, end = text[: MOST_CHARACTERS // 2], text[-MOST_CHARACTERS // 4 :]
    return f"{begin} ... {len(text) - len(begin) - len(end):,} characters ... {end}"


def data_url(picture: np.ndarray) -> str:
    """PNG of a picture, (height, width, 3) uint8, as the address of an image."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def spans_of(tokenizer: "Tokenizer", ids: Sequence[int], learnt: Sequence[bool]) -> tuple[TextSpan, ...]:
    """Tokens as text, special ones by their names.

    Args:
        learnt: of each token, whether its prediction counts in the loss.
    """
    spans, start, names = list[TextSpan](), 0, tokenizer.specials
    for (counts, special), tokens in groupby(zip(ids, learnt, strict=True), lambda one: (one[1], one[0] in names)):
        here = [id for id, _ in tokens]
        stop = start + len(here)
        if special:
            text = "".join(names[id] for id in here)
        else:
            before = ids[max(start - CONTEXT_TOKENS, 0) : start]
            prefix, both = tokenizer.decode(before), tokenizer.decode([*before, *here])
            text = both[len(prefix) :] if both.startswith(prefix) else tokenizer.decode(here)
        spans.append(TextSpan(text, counts, special))
        start = stop
    return tuple(spans)
