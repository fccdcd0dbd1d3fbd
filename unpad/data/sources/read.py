"""Files of texts, conversations and pairs of replies, read by the module of this folder that their kind names."""

from collections.abc import Iterator
from importlib import import_module
from typing import Protocol

from unpad.data.sources.example import BadRow, Example
from unpad.data.sources.files import SourceFile
from unpad.data.sources.rows import collect
from unpad.recipes.data import DataSettings

TEXT_KINDS = ("text", "chat", "pairs")  # sections of a recipe's `data` that become tokens
PAIRS = "pairs"  # the one of them with two sequences per document


class TextReader(Protocol):
    """Members of a module such as `sources/chat.py`."""

    def read(self, file: SourceFile, data: DataSettings) -> Iterator[Example | BadRow]:
        """Yield every row of a file as an example or as a bad row."""


def read_file(kind: str, file: SourceFile, data: DataSettings) -> tuple[list[Example], list[BadRow]]:
    """Read one file to the end; every row is in exactly one of the two lists.

    Args:
        kind: one of TEXT_KINDS.

    Raises:
        SourceError: the file cannot be opened or read.
    """
    return collect(read_rows(kind, file, data), file.path)


def read_rows(kind: str, file: SourceFile, data: DataSettings) -> Iterator[Example | BadRow]:
    """Yield the rows of one file in order, as a stream; see `read_file`.

    Raises:
        OSError: the file cannot be opened or read.
    """
    reader: TextReader = import_module(f"unpad.data.sources.{kind}")
    return reader.read(file, data)
