"""Read files of texts and conversations, and decide what bad rows mean, of any kind of data."""

from unpad.data.sources import chat, text
from unpad.data.sources.example import BadRow, Example
from unpad.data.sources.files import SourceFile
from unpad.errors import SourceError
from unpad.recipes.data import DataSettings

READERS = {"text": text.read, "chat": chat.read}  # by kind of data
KINDS = tuple(READERS)


def read_file(kind: str, file: SourceFile, data: DataSettings) -> tuple[list[Example], list[BadRow]]:
    """Read one file to the end; every row is in exactly one of the two lists.

    Args:
        kind: one of KINDS.

    Raises:
        SourceError: the file cannot be opened or read.
    """
    used: list[Example] = []
    bad: list[BadRow] = []
    try:
        for item in READERS[kind](file, data):
            if isinstance(item, Example):
                used.append(item)
            else:
                bad.append(item)
    except OSError as error:
        raise SourceError(
            f"cannot be read: {error.strerror or error}",
            where=str(file.path.absolute()),
            fix="check the file's permissions",
        ) from None
    return used, bad
