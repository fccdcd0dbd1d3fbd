"""Documents of plain text: text files, arrays of strings, JSON lines, CSV, parquet."""

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

    def convert(row: Row) -> Example:
        if type(row.value) is not dict:
            return Example(row.where, (Turn("text", require_text(row.value, "the text").strip("\r\n")),))
        return Example(row.where, (Turn("text", row.text(name).strip("\r\n")),), *row.declared())

    return examples(file, data, (name,), convert, "text")
