"""Header data of an image file, and the faults that end its reading."""

from __future__ import annotations

from dataclasses import dataclass

from unpad.errors import SourceError

MAX_PIXELS = 40_000_000
MAX_WEBP_PIXELS = 25_000_000  # libwebp and Pillow together have four copies of the canvas
MAX_SIDE = 16_384
MAX_BYTES = 1 << 28
MAX_METADATA = 1 << 24  # bytes of text, profiles and thumbnails in one file; profiles of printers have about 3 MB

FIXES = {
    "E_EMPTY": "remove the file, or copy it again",
    "E_FORMAT": "save it as PNG, JPEG, WebP, GIF, BMP or TIFF",
    "E_TRUNCATED": "copy the file again from where it came",
    "E_PIXELS": "make it smaller",
    "E_METADATA": "save it again without its metadata",
    "E_DECODE": "save it again with an image program",
}
NOTES = {
    "W_ANIM": "an animation or several pages; the first is used",
    "W_TRAILING": "bytes after the end of the image are ignored",
}


class ImageError(SourceError):
    """An image that cannot be used: a stable code such as E_TRUNCATED, the fault, and the fix."""

    def __init__(self, code: str, what: str, fix: str = "", where: str = "") -> None:
        super().__init__(what, where=where, fix=fix or FIXES[code])
        self.code = code
        self.args = (code, what, self.fix, where)  # a worker process sends these back

    def __str__(self) -> str:
        return super().__str__().replace(": ", f": {self.code} ", 1)


@dataclass(frozen=True, slots=True)
class Header:
    """Header data of a file.

    Args:
        width: pixels as stored, before EXIF orientation; `height` likewise.
        parts: the bytes that Pillow needs, in order; joined they are a file without metadata.
        orientation: EXIF, 1 to 8.
        bits: per sample, if known.
    """

    format: str
    width: int
    height: int
    parts: tuple[bytes | memoryview, ...]
    orientation: int = 1
    bits: int = 8
    notes: tuple[str, ...] = ()


def truncated(name: str, what: str) -> ImageError:
    return ImageError("E_TRUNCATED", f"the {name} ends before {what}")


def check_metadata(num_bytes: int) -> None:
    if num_bytes > MAX_METADATA:
        raise ImageError("E_METADATA", f"{num_bytes:,} bytes of metadata, more than {MAX_METADATA:,}")


def notes_of(animated: bool, trailing: bool) -> tuple[str, ...]:
    return ("W_ANIM",) * animated + ("W_TRAILING",) * trailing
