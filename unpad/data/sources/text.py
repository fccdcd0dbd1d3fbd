"""Documents of plain text: text files, arrays of strings, JSON lines, CSV, parquet."""

import re
from collections.abc import Iterator, Sequence

from unpad.data.sources.example import BadRow, Example, Turn
from unpad.data.sources.files import SourceFile
from unpad.data.sources.reader import examples
from unpad.data.sources.row import Row, require_text
from unpad.recipes.data import DataSettings


def read(file: SourceFile, data: DataSettings) -> Iterator[Example | BadRow]:
    """Yield each document of a file, or the row that cannot be one.

    A document keeps its text exactly, but for line breaks at its beginning and end. An object holds it in the field
    `text` (or the source's own), beside `split`, `group` and `keywords`.
    """
    name = file.field or "text"

    def clean(text: str) -> str:
        return unwrapped(text.strip("\r\n")) if data.unwrap else text.strip("\r\n")

    def convert(row: Row) -> Example:
        if type(row.value) is not dict:
            return Example(row.where, (Turn("text", clean(require_text(row.value, "the text"))),))
        return Example(row.where, (Turn("text", clean(row.text(name))),), *row.declared())

    return examples(file, data, (name,), convert, "text")


_WIDE = "[\u2e80-\ua4cf\uf900-\ufaff\uff00-\uffef]"  # letters and punctuation of scripts without spaces
_LINE_END = re.compile(rf"(?<={_WIDE})\r?\n(?={_WIDE})|(?<=\S)[ \t]*\r?\n(?=\S)")


def unwrapped(text: str) -> str:
    """Join lines, but for blank and indented ones, as `data.unwrap` says."""
    return _LINE_END.sub(lambda end: "" if re.match(_WIDE, text[end.start() - 1]) else " ", text)


def line_ends(text: str) -> list[tuple[int, int]]:
    """The line ends that `unwrapped` joins: characters of each line, and as many with the next line's first word."""
    ends, begin = list[tuple[int, int]](), 0
    for end in _LINE_END.finditer(text):
        word = re.match(r"\S+", text[end.end() : end.end() + 40])
        ends.append((end.start() - begin, end.start() - begin + 1 + len(word[0] if word else "")))
        begin = end.end()
    return ends


LEAST_ENDS, LEAST_WIDTH, FORCED = 100, 50, 0.75


def wrapped_width(ends: Sequence[tuple[int, int]]) -> int | None:
    """The width at which texts seem to be hard-wrapped: most lines end where the next word would not have fitted; None
    for other texts.

    Args:
        ends: `line_ends` of some texts.
    """
    if len(ends) < LEAST_ENDS:
        return None
    width = sorted(length for length, _ in ends)[len(ends) * 95 // 100]
    forced = sum(needed > width for _, needed in ends) / len(ends)
    return width if width >= LEAST_WIDTH and forced >= FORCED else None
