"""Documents of plain text: text files, arrays of strings, JSON lines, CSV, parquet."""

from collections.abc import Iterator
from typing import Any

from unpad.data.sources.example import BadRow, Example, Turn, Usable
from unpad.data.sources.files import SourceFile
from unpad.data.sources.jsonlines import RowFault, missing, type_name
from unpad.data.sources.rows import examples, optional_fields, require_text, usable
from unpad.recipes.data import DataSettings


def check(file: SourceFile, data: DataSettings) -> Iterator[Usable | BadRow]:
    """Yield each row of a file as usable, or its bad row."""
    return map(usable, read(file, data))


def read(file: SourceFile, data: DataSettings) -> Iterator[Example | BadRow]:
    """Yield each document of a file, or the row that cannot be one.

    A document keeps its text exactly, but for line breaks at its beginning and end. An object holds it in the field
    `text` (or the source's own), beside `split`, `group` and `keywords`.
    """
    name = file.field or "text"

    def convert(where: str, value: Any) -> Example:
        if type(value) is str:
            return Example(where, (Turn("text", require_text(value, "the text").strip("\r\n")),))
        if type(value) is not dict:
            raise RowFault(
                "E_NULL" if value is None else "E_TYPE", f"the text is {type_name(value)}, expected a string"
            )
        if name not in value:
            raise missing((name,), list(value))
        turns = (Turn("text", require_text(value[name], f'"{name}"').strip("\r\n")),)
        return Example(where, turns) if len(value) == 1 else Example(where, turns, *optional_fields(value))

    return examples(file, data, (name,), convert, "text")
