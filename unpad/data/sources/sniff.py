"""What a file is by its bytes: its encoding, or what else it is, and the format of its text."""

import codecs
import json
import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from unpad.data.sources.fields import COLUMNS, folded

HEAD_BYTES = 1 << 16  # enough of a file to guess its encoding
SAMPLE_BYTES = 1 << 24  # of a file, to guess its encoding
BOM = codecs.BOM_UTF8
MAX_SNIFFED = 20  # lines of a file that show what it is
MAGIC = {
    b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\x00": "xz",
    b"BZh91AY&SY": "bzip2", b"7z\xbc\xaf\x27\x1c": "7z", b"PAR1": "parquet", b"%PDF-": "PDF", b"{\\rtf": "RTF",
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "a document of old Word or Excel",
    b"SQLite format 3\0": "a database of SQLite", codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32", codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16",
}  # fmt: skip
FILM = "HEIC, AVIF or a film"
_ATOMS = (b"ftyp", b"moov", b"mdat")  # at byte 4
# What stands in a zip file that is a document.
OFFICE = {
    b"word/": "a document of Word", b"xl/": "a workbook of Excel", b"ppt/": "slides of PowerPoint",
    b"mimetypeapplication/vnd.oasis.opendocument": "an OpenDocument file", b"mimetypeapplication/epub": "EPUB",
}  # fmt: skip
AS_TEXT, AS_CSV, UNPACK = "save it as plain text in UTF-8", "save it as CSV in UTF-8", "unpack the file first"
REMEDIES = {
    **dict.fromkeys(("gzip", "zip", "zstd", "xz", "bzip2", "7z"), UNPACK),
    **dict.fromkeys(("RTF", "EPUB", *OFFICE.values()), AS_TEXT),
    "a workbook of Excel": AS_CSV,
    "a database of SQLite": AS_CSV,
    "a document of old Word or Excel": f"{AS_TEXT}, or as CSV",
    FILM: "save a photo as JPEG; films are not read",
    "PDF": "save its text in UTF-8, for example with `pdftotext FILE NEW.txt`",
    "parquet": "name it .parquet or set format: parquet",
}
# Bytes of Latin-1 and Windows-1252 that are letters or typographic signs; the last three are seldom either.
_LATIN = frozenset([0x85, *range(0x91, 0x98), 0xA0, 0xA3, 0xA7, 0xAB, 0xB0, 0xBB, *range(0xC0, 0xFD)]) - {0xD7, 0xF7}
FORMAT_NAMES = {"jsonl": "JSON lines", "json": "one JSON array", "csv": "CSV", "text": "plain text"}
_OTHERS = {"jsonl": ("csv", "text"), "csv": ("jsonl",), "text": ("jsonl", "json", "csv")}  # formats that each refuses


def mistaken(head: bytes, format: str, encoding_alone: bool = False) -> tuple[str, str] | None:
    """What a file is in place of one in UTF-8 and of a format, and the fix; None where it may be that.

    Args:
        head: its beginning; format: a key of FORMAT_NAMES.
    """
    if guess := guess_encoding(head):
        what = f"the file is not {'plain' if guess in REMEDIES else 'UTF-8'} text; it seems to be {guess}"
        return what, REMEDIES.get(guess) or f"iconv -f {guess} -t UTF-8 FILE > NEW"
    seems = "" if encoding_alone else format_of(head)
    if format == "jsonl" and seems not in _OTHERS[format] and _is_one_array(head.removeprefix(BOM).lstrip()):
        seems = "json"
    elif seems not in _OTHERS.get(format, ()):
        return None
    fix = f"name it .{'txt' if seems == 'text' else seems} or set format: {seems}"
    fix += "; format: text reads it as it stands" if format == "text" else ""
    return f"the file seems to be {FORMAT_NAMES[seems]}, not {FORMAT_NAMES[format]}", fix


def format_of(head: bytes) -> str:
    """The format of a file by its beginning, in UTF-8: a key of FORMAT_NAMES, or "" for none of them."""
    body = head.removeprefix(BOM).lstrip()
    lines = [line.strip() for line in body.splitlines() if line.strip()]
    lines = (lines[:-1] if len(head) >= HEAD_BYTES else lines)[:MAX_SNIFFED]  # the last one may be cut off
    if lines and all(line.startswith(b"{") for line in lines) and all(map(_parses, lines[:3])):
        return "jsonl"
    if re.match(rb'\[\s*\{\s*"', body) or (body.startswith(b"[") and _parses(body)):
        return "json"
    if len(lines) > 1 and any(_is_delimited(lines, delimiter) for delimiter in (b",", b";", b"\t")):
        return "csv"
    looks_like_json = any(re.match(rb"""[\[{"']|//|#|-?\d|(null|true|false|None|NaN)\b""", line) for line in lines)
    return "text" if len(lines) > 1 and not looks_like_json else ""


def _is_delimited(lines: list[bytes], delimiter: bytes) -> bool:
    """True if lines have as many delimiters each as the first, which names a known field."""
    names = {folded(name.decode("utf-8", "replace").strip('" ')) for name in lines[0].split(delimiter)}
    is_even = all(line.count(delimiter) == lines[0].count(delimiter) for line in lines)
    return len(names) > 1 and bool(names & COLUMNS) and is_even


def _is_one_array(body: bytes) -> bool:
    """True if a whole file, and not its first row alone, begins like an array."""
    if not body.startswith(b"["):
        return False
    first, *others = body.splitlines()
    others = [line for line in others if line.strip()]
    return not (others and (_parses(first) or (first.strip() != b"[" and _parses(others[0]))))


def _parses(line: bytes) -> bool:
    with suppress(ValueError, RecursionError):
        json.loads(line)
        return True
    return False


def guess_encoding(head: bytes) -> str | None:
    """Guess the encoding of a file that is not UTF-8 text, or what else it is, from its beginning; None if it may be
    UTF-8."""
    for magic, name in MAGIC.items():
        if head.startswith(magic):
            inside = (office for mark, office in OFFICE.items() if mark in head)
            return next(inside, name) if name == "zip" else name
    if head[4:8] in _ATOMS:
        return FILM
    if len(head) >= 4 and (head[0] == head[2] == 0 or head[1] == head[3] == 0) and head[:4].count(0) == 2:
        return "UTF-16"
    with suppress(UnicodeDecodeError):
        codecs.getincrementaldecoder("utf-8")().decode(head)  # a character cut off at the end is not a fault
        return None
    # One stray byte in good UTF-8 is a bad row; only a file that is mostly invalid has another encoding.
    return "GB18030" if not _mostly_utf8(head) and _is_chinese(head) else None


def _mostly_utf8(raw: bytes) -> bool:
    """True if as many characters beyond ASCII are valid as are not."""
    attempt = raw.decode("utf-8", "replace")
    invalid = attempt.count("\ufffd")
    return invalid <= sum(char > "\x7f" for char in attempt) - invalid


def _is_chinese(raw: bytes) -> bool:
    """True if bytes that are not UTF-8 are mostly Chinese in GB18030."""
    try:
        text = codecs.getincrementaldecoder("gb18030")().decode(raw)
    except UnicodeDecodeError:
        return False
    wide = [char for char in text if char > "\x7f"]
    chinese = sum("\u3000" <= char <= "\u9fff" or "\uff00" <= char <= "\uffef" for char in wide)
    return chinese >= 2 and chinese * 2 > len(wide)


@lru_cache(maxsize=16)
def encoding_of(path: Path) -> str | None:
    """Guess the encoding of a file of text that is not UTF-8, as iconv and Python name it; None without a guess.

    The beginning of a long one is looked at.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as handle:
        raw = handle.read(SAMPLE_BYTES)
    if (guess := guess_encoding(raw)) == "UTF-16" and not raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16BE" if raw[0] == 0 else "UTF-16LE"
    if guess or _mostly_utf8(raw):
        return guess
    # Languages of Windows-1252 have few letters beyond ASCII, and seldom several in a row.
    high, in_rows = [byte for byte in raw if byte > 0x7F], sum(map(len, re.findall(rb"[\x80-\xff]{3,}", raw)))
    in_latin = sum(byte in _LATIN for byte in high)
    return "WINDOWS-1252" if 2 * in_rows <= len(high) and in_latin >= 0.9 * len(high) else None
