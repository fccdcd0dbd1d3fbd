"""Untrusted image files: their size from the header alone, their pixels, or a fault with a code.

This module parses the files; Pillow receives only the parts with pixels. So text and colour profiles are never
unpacked, a second header never replaces the one whose size was checked, and Pillow has no reason to warn. A process
that decodes one image at a time needs at most 512 MiB besides the file. This module needs neither torch nor the rest of
the package, so that such a process can be small. libtiff writes its messages about damaged TIFFs to stderr by itself.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unpad.errors import SourceError

MAX_PIXELS = 40_000_000
MAX_WEBP_PIXELS = 25_000_000  # libwebp and Pillow together have four copies of the canvas
MAX_SIDE = 16_384
MAX_BYTES = 1 << 28
MAX_METADATA = 1 << 24  # bytes of text, profiles and thumbnails in one file; profiles of printers have about 3 MB
WHITE = OPAQUE = 255
STRIP_PIXELS = 1 << 20  # converted to RGB at a time, so that a large image is in memory once in each form

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
class ImageInfo:
    """Header of an image: its size in pixels after EXIF orientation, format, and keys of NOTES."""

    width: int
    height: int
    format: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Decoded:
    """Decoded image: pixels (height, width, 3) uint8 RGB, upright, on white; and keys of NOTES.

    With opacity there is a fourth channel, 255 for opaque.
    """

    pixels: NDArray[np.uint8]
    notes: tuple[str, ...]


def probe(data: bytes) -> ImageInfo:
    """Read the size of an image and check that the file is whole, without decoding pixels.

    The parts of a PNG, JPEG or WebP are read to the end, and those of a GIF to the end of the first frame, so truncated
    ones are found. A truncated BMP or TIFF is found by decoding, like damage inside coded pixels.

    Raises:
        ImageError: E_EMPTY, E_FORMAT, E_TRUNCATED, E_PIXELS, E_METADATA, or E_DECODE: the header contradicts itself.
    """
    header = _read_header(data)
    size = (header.width, header.height) if header.orientation < 5 else (header.height, header.width)
    return ImageInfo(*size, header.format, header.notes)


def decode(data: bytes, opacity: bool = False) -> Decoded:
    """Decode an image to RGB: the first frame, upright by its EXIF orientation, transparent pixels on white.

    Samples of 16 bits keep their high byte. CMYK is converted without a colour profile.

    Args:
        opacity: return it as a fourth channel; the colours stay the same.

    Raises:
        ImageError: as `probe`; E_TRUNCATED or E_DECODE if the coded pixels are damaged.
    """
    header = _read_header(data)
    try:
        return Decoded(_upright(_load(header, opacity), header.orientation), header.notes)
    except ImageError:
        raise
    except MemoryError:
        raise ImageError("E_DECODE", f"not enough memory for {header.width} x {header.height} pixels") from None
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise ImageError(
            "E_TRUNCATED" if "truncated" in reason else "E_DECODE", f"cannot be decoded: {reason}"
        ) from None


# --------------------------------------------------------------------------- headers


@dataclass(frozen=True, slots=True)
class _Header:
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


_BMP_HEADERS = (12, 40, 52, 56, 64, 108, 124)
BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_REFUSED = (
    (b"<", "HTML, XML or SVG"),
    (b"%PDF", "PDF"),
    (b"%!PS", "EPS"),
    (b"\xc5\xd0\xd3\xc6", "EPS"),
    (b"SIMPLE  =", "FITS"),
    (b"PK\x03\x04", "zip"),
)


def sniff(head: bytes) -> str | None:
    """Name the format of an image by its first 18 bytes; None for other formats."""
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "WEBP"
    if head[:4] in BYTE_ORDERS:
        return "TIFF"
    return "BMP" if head.startswith(b"BM") and int.from_bytes(head[14:18], "little") in _BMP_HEADERS else None


def _read_header(data: bytes) -> _Header:
    if not data:
        raise ImageError("E_EMPTY", "the file is empty")
    if len(data) > MAX_BYTES:
        raise ImageError("E_PIXELS", f"{len(data):,} bytes, more than {MAX_BYTES:,}")
    name = sniff(data)
    if name is None:
        raise ImageError("E_FORMAT", f"the content is {_guess(data)}, not an image that is read")
    try:
        header = _PARSERS[name](data)
    except (struct.error, IndexError):
        raise _truncated(name, "it should") from None
    if min(header.width, header.height) < 1:
        raise ImageError("E_DECODE", f"its header says {header.width} x {header.height} pixels")
    most = MAX_WEBP_PIXELS if name == "WEBP" else MAX_PIXELS
    if max(header.width, header.height) > MAX_SIDE or header.width * header.height > most:
        limit = f"more than {most:,} in a {name} or {MAX_SIDE:,} a side"
        raise ImageError("E_PIXELS", f"{header.width:,} x {header.height:,} pixels, {limit}")
    return header


def _guess(data: bytes) -> str:
    if data[4:8] == b"ftyp":
        return "HEIC, AVIF or a film"
    start = data[:64].removeprefix(b"\xef\xbb\xbf").lstrip()
    return next((name for magic, name in _REFUSED if start.startswith(magic)), "of an unknown kind")


def _truncated(name: str, what: str) -> ImageError:
    return ImageError("E_TRUNCATED", f"the {name} ends before {what}")


def _check_metadata(num_bytes: int) -> None:
    if num_bytes > MAX_METADATA:
        raise ImageError("E_METADATA", f"{num_bytes:,} bytes of metadata, more than {MAX_METADATA:,}")


def _notes(animated: bool, trailing: bool) -> tuple[str, ...]:
    return ("W_ANIM",) * animated + ("W_TRAILING",) * trailing


# --------------------------------------------------------------------------- PNG


_PNG_PIXELS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_PNG_FRAMES = (b"acTL", b"fcTL", b"fdAT")


def png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield (kind, start, end) of every chunk, with its length and checksum, up to IEND."""
    kind, position = b"", 8
    while kind != b"IEND":
        start = position
        length, kind = struct.unpack_from(">I4s", data, start)
        position = start + 12 + length
        if position > len(data):
            raise _truncated("PNG", "its IEND chunk")
        if (kind == b"IHDR") != (start == 8):
            raise ImageError("E_DECODE", "its IHDR chunk is not the first and only one")
        yield kind, start, position


def _png(data: bytes) -> _Header:
    view = memoryview(data)
    parts, orientation, metadata, num_frames, end = [view[:8]], 1, 0, 1, 8
    for kind, start, end in png_chunks(data):
        if kind in _PNG_PIXELS:
            if zlib.crc32(view[start + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
                raise ImageError("E_DECODE", f"the checksum of its {kind.decode()} chunk is wrong")
            parts.append(view[start:end])
        elif kind == b"acTL":
            num_frames = int.from_bytes(view[start + 8 : start + 12], "big")
        elif kind not in _PNG_FRAMES:
            metadata += end - start
            if kind == b"eXIf":
                orientation = _orientation(data[start + 8 : end - 4])
    _check_metadata(metadata)
    width, height, bits = struct.unpack_from(">IIB", data, 16)
    notes = _notes(num_frames > 1, end < len(data))
    return _Header("PNG", width, height, tuple(parts), orientation, bits, notes)


# --------------------------------------------------------------------------- JPEG

# Markers that begin a segment or end the image. In coded pixels FF is followed by 00 or a restart, D0 to D7; 01 and a
# second beginning, D8, have no segment.
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
_END, _SCAN = 0xD9, 0xDA
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_APPLICATION = frozenset((*range(0xE0, 0xF0), 0xFE))


def jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start, end) of every segment, the end of the image last; coded pixels are between segments."""
    position = 2
    while marker := _MARKER.search(data, position):
        start, code = marker.start(), data[marker.start() + 1]
        if code == _END:
            yield code, start, start + 2
            return
        position = start + 2 + struct.unpack_from(">H", data, start + 2)[0]
        if position > len(data):
            break
        yield code, start, position
    raise _truncated("JPEG", "its end marker")


def _jpeg(data: bytes) -> _Header:
    view = memoryview(data)
    parts, width, height, orientation, scan, metadata, end = [view[:2]], 0, 0, 0, 0, 0, 0
    for code, start, end in jpeg_segments(data):
        if code in FRAMES:
            if width:
                raise ImageError("E_DECODE", "two headers of a frame")
            height, width = struct.unpack_from(">HH", data, start + 5)
        scan = start if code == _SCAN and not scan else scan
        name = data[start + 4 : start + 10] if code in _APPLICATION else b""
        if name:
            metadata += end - start
        if name == b"Exif\0\0" and not orientation:
            orientation = _orientation(data[start + 10 : end])
        # JFIF and Adobe define the colours of the samples.
        if not scan and (code not in _APPLICATION or name.startswith((b"JFIF", b"Adobe"))):
            parts.append(view[start:end])
    if not scan:
        raise ImageError("E_DECODE", "it holds no pixels")
    _check_metadata(metadata)
    parts.append(view[scan:end])
    return _Header("JPEG", width, height, tuple(parts), orientation or 1, notes=_notes(False, end < len(data)))


# --------------------------------------------------------------------------- GIF, BMP, WebP


def _gif(data: bytes) -> _Header:
    width, height = struct.unpack_from("<HH", data, 6)
    position, num_frames = 13 + gif_palette(data[10]), 0
    while position < len(data) and data[position] != 0x3B and num_frames < 2:
        if data[position] == 0x2C:
            left, top, columns, rows, flags = struct.unpack_from("<HHHHB", data, position + 1)
            num_frames += 1
            if num_frames == 1:  # a frame beyond the canvas enlarges it
                width, height = max(width, left + columns), max(height, top + rows)
                position = gif_blocks(data, position + 11 + gif_palette(flags))
        elif data[position] == 0x21:
            position = gif_blocks(data, position + 2)
        else:
            position += 1
    if num_frames == 0:
        raise _truncated("GIF", "its first frame")
    notes = _notes(num_frames > 1, num_frames == 1 and position + 1 < len(data))
    return _Header("GIF", width, height, (data,), notes=notes)


def gif_palette(flags: int) -> int:
    """Bytes of a palette."""
    return 6 << (flags & 7) if flags & 128 else 0


def gif_blocks(data: bytes, position: int) -> int:
    """Return the end of a run of blocks, each of which begins with its length."""
    while data[position]:
        position += data[position] + 1
    return position + 1


def _bmp(data: bytes) -> _Header:
    short = data[14] == 12
    width, height = struct.unpack_from("<HH" if short else "<ii", data, 18)
    return _Header("BMP", width, abs(height), (data,))  # a negative height counts rows from the top


def _webp(data: bytes) -> _Header:
    end = 8 + struct.unpack_from("<I", data, 4)[0]
    position, orientation, metadata, num_frames = 12, 1, 0, 0
    while position + 8 <= end:
        kind, length = struct.unpack_from("<4sI", data, position)
        start = position + 8
        position = start + length + length % 2
        if max(end, start + length) > len(data):
            raise _truncated("WebP", "its last chunk does")
        num_frames += kind == b"ANMF"
        metadata += length if kind in (b"ICCP", b"EXIF", b"XMP ") else 0
        if kind == b"EXIF":
            orientation = _orientation(data[start : start + length].removeprefix(b"Exif\0\0"))
    _check_metadata(metadata)
    notes = _notes(num_frames > 1, end + end % 2 < len(data))
    return _Header("WEBP", *_webp_size(data), (memoryview(data)[:end],), orientation, notes=notes)


def _webp_size(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L":
        packed = struct.unpack_from("<I", data, 21)[0]
        return (packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise ImageError("E_FORMAT", "the WebP begins with an unknown chunk")


# --------------------------------------------------------------------------- TIFF, and EXIF, which is one

_Entry = tuple[int, int, bytes]  # type, number of values, and the value or where it stands
_ORIENTATION = 274
_TIFF_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}
_TIFF_SINGLE = frozenset((256, 257, 259, 262, 266, 277, 278, 284, 292, 293, 317, 322, 323))
_TIFF_TAGS = _TIFF_SINGLE | {258, 273, 279, 320, 324, 325, 338, 339, 347, 530, 532}  # tags that the pixels depend on
_TIFF_COMPRESSIONS = (1, 2, 3, 4, 5, 7, 8, 32773, 32946)  # none, CCITT, LZW, JPEG, deflate, PackBits


def tiff_directory(data: bytes, order: str) -> tuple[dict[int, _Entry], bool]:
    """Read the entries of the first directory by tag, and whether another directory follows."""
    (start,) = struct.unpack_from(order + "I", data, 4)
    (num_entries,) = struct.unpack_from(order + "H", data, start)
    end = start + 2 + 12 * num_entries
    entries: dict[int, _Entry] = {}
    for position in range(start + 2, end, 12):
        tag, kind, count, field = struct.unpack_from(order + "HHI4s", data, position)
        entries.setdefault(tag, (kind, count, field))
    return entries, any(data[end : end + 4])


def first_value(data: bytes, entry: _Entry, order: str) -> int:
    """Return the first value of an entry of whole numbers; 0 for other types."""
    kind, count, field = entry
    layout = order + {1: "B", 3: "H", 4: "I"}.get(kind, "0s")
    if layout.endswith("s"):
        return 0
    if count * _TIFF_TYPE_BYTES[kind] > 4:
        return int(struct.unpack_from(layout, data, *struct.unpack(order + "I", field))[0])
    return int(struct.unpack_from(layout, field)[0])


def _orientation(exif: bytes) -> int:
    """EXIF orientation; 1, upright, if it is missing or damaged."""
    try:
        order = BYTE_ORDERS[exif[:4]]
        value = first_value(exif, tiff_directory(exif, order)[0][_ORIENTATION], order)
    except (KeyError, struct.error):
        return 1
    return value if 1 <= value <= 8 else 1


def _tiff(data: bytes) -> _Header:
    """Return the first page, behind a new directory of the tags that its pixels depend on."""
    order = BYTE_ORDERS[data[:4]]
    entries, more_pages = tiff_directory(data, order)
    kept = {tag: entries[tag] for tag in sorted(entries.keys() & _TIFF_TAGS) if entries[tag][0] in _TIFF_TYPE_BYTES}
    value = {tag: first_value(data, entry, order) for tag, entry in kept.items()}
    _check_tiff(data, order, kept, value)
    padding = bytes(len(data) % 2)
    directory = struct.pack(order + "H", len(kept))
    directory += b"".join(struct.pack(order + "HHI4s", tag, *entry) for tag, entry in kept.items()) + bytes(4)
    start = data[:4] + struct.pack(order + "I", len(data) + len(padding))
    return _Header(
        "TIFF",
        value.get(256, 0),
        value.get(257, 0),
        (start, memoryview(data)[8:], padding, directory),
        _orientation(data),
        value.get(258, 1),
        _notes(more_pages, False),
    )


def _check_tiff(data: bytes, order: str, kept: dict[int, _Entry], value: dict[int, int]) -> None:
    """Refuse files that Pillow or libtiff would read differently, warn about, or spend much memory on."""
    total = 0
    for tag, (kind, count, field) in kept.items():
        size = count * _TIFF_TYPE_BYTES[kind]
        total += size
        if size > 4 and struct.unpack(order + "I", field)[0] + size > len(data):
            raise _truncated("TIFF", f"the values of tag {tag} do")
        if tag in _TIFF_SINGLE and count != 1:
            raise ImageError("E_DECODE", f"tag {tag} has {count} values, expected one")
    if total > len(data) or value.get(277, 1) > 6:
        raise ImageError("E_DECODE", "its tags hold more than the file can")
    if value.get(259, 1) not in _TIFF_COMPRESSIONS:
        raise ImageError("E_FORMAT", f"the TIFF is compressed in way {value[259]}", "save it with LZW or deflate")
    if max(value.get(322, 0), value.get(323, 0)) > MAX_SIDE or value.get(322, 0) * value.get(323, 0) > MAX_PIXELS:
        raise ImageError("E_PIXELS", f"tiles of {value.get(322, 0):,} x {value.get(323, 0):,} pixels")
    bits = value.get(258, 1)
    if bits not in (1, 2, 4, 8, 16) or (bits == 16 and value.get(262, 0) == 0):  # Pillow leaves these dark or inverted
        raise ImageError(
            "E_DECODE", f"{bits} bits per sample of kind {value.get(262)}", "save it with 8 bits per sample"
        )


_PARSERS: dict[str, Callable[[bytes], _Header]] = {
    "PNG": _png, "JPEG": _jpeg, "GIF": _gif, "BMP": _bmp, "WEBP": _webp, "TIFF": _tiff,
}  # fmt: skip


# --------------------------------------------------------------------------- pixels


def _load(header: _Header, opacity: bool) -> NDArray[np.uint8]:
    """Decode pixels (height, width, 3 or with opacity 4) as they are stored."""
    image = Image.open(BytesIO(b"".join(header.parts)), formats=(header.format,))
    if image.size != (header.width, header.height):
        raise ImageError("E_DECODE", f"{header.width} x {header.height} pixels, or {image.size[0]} x {image.size[1]}")
    image.load()
    if "transparency" in image.info:
        image.info["transparency"] = _in_8_bits(image.info["transparency"], image.mode, header.bits)
    return _pixels(image, 4 if opacity else 3)


def _in_8_bits(transparency: object, mode: str, bits: int) -> object:
    """Scale the transparent grey or colour to the pixels; Pillow leaves it in the bits of the file."""
    if mode == "L" and bits < 8 and isinstance(transparency, int):
        return transparency * 255 // (2**bits - 1)
    if mode == "RGB" and bits == 16 and isinstance(transparency, tuple):
        return tuple(value >> 8 for value in transparency)
    return transparency


def _pixels(image: Image.Image, channels: int) -> NDArray[np.uint8]:
    """Convert an image of any mode to pixels (height, width, channels), strip by strip."""
    if image.mode == "I":  # signed, or of 32 bits
        raise ImageError("E_DECODE", "it holds numbers of no stated range", "save it with 8 or 16 bits per sample")
    width, height = image.size
    pixels = np.empty((height, width, channels), np.uint8)
    rows = max(1, STRIP_PIXELS // width)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        colours, opaque = _strip(image.crop((0, top, width, bottom)))
        pixels[top:bottom, :, :3] = colours
        pixels[top:bottom, :, 3:] = opaque
    return pixels


def _strip(image: Image.Image) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | int]:
    """Colours on white, (height, width, 3 or 1), and their opacity, (height, width, 1) or one number for all."""
    if image.mode.startswith("I;16"):
        values = np.asarray(image)[:, :, None]  # uint16
        grey = (values >> 8).astype(np.uint8)
        if "transparency" not in image.info:
            return grey, OPAQUE
        clear = values == image.info["transparency"]
        return np.where(clear, WHITE, grey), np.where(clear, 0, OPAQUE).astype(np.uint8)
    if image.mode == "La":
        image = image.convert("LA")
    if not image.has_transparency_data:
        return np.asarray(image.convert("RGB")), OPAQUE
    image = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image)
    return np.asarray(white), np.asarray(image)[:, :, 3:]


def _upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Rotate and mirror pixels (height, width, channels) by EXIF orientation 1 to 8."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)
