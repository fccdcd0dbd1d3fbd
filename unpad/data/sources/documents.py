"""Documents of plain text files, read through a buffer that grows with the longest document only."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from unpad.data.sources.example import BadRow
from unpad.data.sources.faults import RowFault, around, bad_utf8
from unpad.data.sources.files import SourceFile
from unpad.data.sources.row import Row
from unpad.data.sources.sniff import BOM, HEAD_BYTES, mistaken
from unpad.recipes.data import DataSettings

END_OF_TEXT = "<|endoftext|>"
READ_BYTES = 1 << 18
BY_LINE = "'data.separator=\"\\n\"'"  # as it is typed in a shell
JOINED = "data.join=8000 joins them to documents of so many bytes, so that replies go on"
BETWEEN = b" \t\n"  # what a run of blank lines consists of
_BLANK_LINES = re.compile(rb"\n[ \t]*(?:\n[ \t]*)*\n")


def read_documents(path: Path, separator: str, *, join: int = 0, by_ending: bool = False) -> Iterator[Row | BadRow]:
    r"""Split plain text at the separator; yield each document as a row, or the bad row.

    Line ends of all kinds become \n; \r alone does so only in a file without any \n. Blank documents are skipped.

    Args:
        separator: `data.separator`; auto is <|endoftext|> where it occurs in the file, else blank lines.
        join: bytes that a document has at least, but for the last; separators before do not end it.
        by_ending: whether nobody has said that it is plain text; then JSON and CSV under such a name are refused.
    """
    with path.open("rb") as handle:
        head = handle.read(HEAD_BYTES)
        if wrong := mistaken(head, "text", encoding_alone=not by_ending):
            yield RowFault("E_ENCODING", *wrong).at(f"{path}:1", head, num_rows=None)
            return
        handle.seek(0)
        has_line_feed, has_end_of_text = _survey(handle)
        if separator == "auto" and has_end_of_text:
            separator = END_OF_TEXT
        blank_lines = separator == "auto"
        pattern = _BLANK_LINES if blank_lines else re.compile(re.escape(separator.encode()))
        handle.seek(len(BOM) if head.startswith(BOM) else 0)
        buffer, line, ended = b"", 1, False  # line: that of the buffer's first byte
        carriage = b""  # a \r that may be half a line end
        while not ended:
            raw = handle.read(max(READ_BYTES, len(buffer)))
            ended = not raw
            raw, carriage = carriage + raw, b""
            if raw.endswith(b"\r") and has_line_feed and not ended:
                raw, carriage = raw[:-1], b"\r"
            buffer += raw.replace(b"\r\n", b"\n") if has_line_feed else raw.replace(b"\r", b"\n")
            # A run of blank lines at the buffer's end may go on.
            limit = len(buffer.rstrip(BETWEEN)) if blank_lines and not ended else len(buffer)
            begin = counted = 0
            spans = [match.span() for match in pattern.finditer(buffer, 0, limit)]
            for end, following in [*spans, (limit, limit)] if ended else spans:
                if end - begin < join and end < limit:
                    continue
                document = buffer[begin:end].strip(b"\n")
                if document and not document.isspace():
                    start = buffer.index(document, begin)
                    line, counted = line + buffer.count(b"\n", counted, start), start
                    yield _document(path, line, document)
                begin = following
            line += buffer.count(b"\n", counted, begin)
            buffer = buffer[begin:]


class Shape(NamedTuple):
    """What a plain text is when it is no list of documents, and the setting that makes it one."""

    what: str
    fix: str


def single_document(file: SourceFile, data: DataSettings, num_documents: int) -> Shape | None:
    """Describe a plain text of several lines that is a single document, with the setting that splits it."""
    if file.format != "text" or data.separator != "auto" or num_documents != 1:
        return None
    with file.path.open("rb") as handle:
        num_lines = sum(not line.isspace() for line in handle)
    if num_lines < 2:
        return None
    fix = "a smaller data.join makes several" if data.join else f"{BY_LINE} makes a document of each line"
    return Shape(f"{file.path} is one document of {num_lines:,} lines", fix)


LEAST_PARAGRAPHS, MOST_CHARACTERS = 200, 600  # of a book: documents, and characters of the middle one


def describe_book(file: SourceFile, data: DataSettings, characters: Sequence[int]) -> Shape | None:
    """Describe a plain text that seems to be one text in paragraphs, such as a book.

    Args:
        characters: of each document.
    """
    if file.format != "text" or data.separator != "auto" or data.join or len(characters) < LEAST_PARAGRAPHS:
        return None
    middle = sorted(characters)[len(characters) // 2]
    with file.path.open("rb") as handle:
        if middle >= MOST_CHARACTERS or _survey(handle)[1]:
            return None
    what = f"{file.path}: {len(characters):,} documents, median {middle:,} characters"
    return Shape(f"{what}: looks like one text in paragraphs, so replies will end with a paragraph", JOINED)


def _survey(handle: BinaryIO) -> tuple[bool, bool]:
    r"""Look through a whole file for a \n and for <|endoftext|>."""
    mark, tail = END_OF_TEXT.encode(), b""
    has_line_feed = has_end_of_text = False
    while raw := handle.read(READ_BYTES):
        has_line_feed = has_line_feed or b"\n" in raw
        has_end_of_text = has_end_of_text or mark in tail + raw
        tail = (tail + raw)[-len(mark) :]
    return has_line_feed, has_end_of_text


def _document(path: Path, line: int, document: bytes) -> Row | BadRow:
    try:
        text = document.decode()
    except UnicodeDecodeError as error:
        inside = document.count(b"\n", 0, error.start)
        near, place = around(document, error.start), f"at byte {error.start} of the document"
        return bad_utf8(document[error.start], place, path).at(f"{path}:{line + inside}", near)
    if "\0" in text:
        inside = text.count("\n", 0, text.index("\0"))
        return RowFault("E_CTRL", "a NUL character in plain text").at(f"{path}:{line + inside}", text)
    return Row(f"{path}:{line}", text)
