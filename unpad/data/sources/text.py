"""Documents of plain text: text files, arrays of strings, JSON lines, CSV, parquet."""

import re
from collections.abc import Iterator

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
