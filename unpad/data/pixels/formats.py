"""Image files by their headers: walked to the end for their size, their mode, and the parts that Pillow needs."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator
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


_BMP_HEADERS = (12, 40, 52, 56, 64, 108, 124)


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
            raise truncated("PNG", "its IEND chunk")
        if (kind == b"IHDR") != (start == 8):
            raise ImageError("E_DECODE", "its IHDR chunk is not the first and only one")
        yield kind, start, position


def _png(data: bytes) -> Header:
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
                orientation = orientation_of(data[start + 8 : end - 4])
    check_metadata(metadata)
    width, height, bits = struct.unpack_from(">IIB", data, 16)
    notes = notes_of(num_frames > 1, end < len(data))
    return Header("PNG", width, height, tuple(parts), orientation, bits, notes)


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
    raise truncated("JPEG", "its end marker")


def _jpeg(data: bytes) -> Header:
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
            orientation = orientation_of(data[start + 10 : end])
        # JFIF and Adobe define the colours of the samples.
        if not scan and (code not in _APPLICATION or name.startswith((b"JFIF", b"Adobe"))):
            parts.append(view[start:end])
    if not scan:
        raise ImageError("E_DECODE", "it holds no pixels")
    check_metadata(metadata)
    parts.append(view[scan:end])
    return Header("JPEG", width, height, tuple(parts), orientation or 1, notes=notes_of(False, end < len(data)))


# --------------------------------------------------------------------------- GIF, BMP, WebP


def _gif(data: bytes) -> Header:
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
        raise truncated("GIF", "its first frame")
    notes = notes_of(num_frames > 1, num_frames == 1 and position + 1 < len(data))
    return Header("GIF", width, height, (data,), notes=notes)


def gif_palette(flags: int) -> int:
    """Bytes of a palette."""
    return 6 << (flags & 7) if flags & 128 else 0


def gif_blocks(data: bytes, position: int) -> int:
    """Return the end of a run of blocks that each begin with their length."""
    while data[position]:
        position += data[position] + 1
    return position + 1


def _bmp(data: bytes) -> Header:
    short = data[14] == 12
    width, height = struct.unpack_from("<HH" if short else "<ii", data, 18)
    return Header("BMP", width, abs(height), (data,))  # a negative height counts rows from the top


def _webp(data: bytes) -> Header:
    end = 8 + struct.unpack_from("<I", data, 4)[0]
    position, orientation, metadata, num_frames = 12, 1, 0, 0
    while position + 8 <= end:
        kind, length = struct.unpack_from("<4sI", data, position)
        start = position + 8
        position = start + length + length % 2
        if max(end, start + length) > len(data):
            raise truncated("WebP", "its last chunk does")
        num_frames += kind == b"ANMF"
        metadata += length if kind in (b"ICCP", b"EXIF", b"XMP ") else 0
        if kind == b"EXIF":
            orientation = orientation_of(data[start : start + length].removeprefix(b"Exif\0\0"))
    check_metadata(metadata)
    notes = notes_of(num_frames > 1, end + end % 2 < len(data))
    return Header("WEBP", *_webp_size(data), (memoryview(data)[:end],), orientation, notes=notes)


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


BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
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


def orientation_of(exif: bytes) -> int:
    """EXIF orientation; 1, upright, if it is missing or damaged."""
    try:
        order = BYTE_ORDERS[exif[:4]]
        value = first_value(exif, tiff_directory(exif, order)[0][_ORIENTATION], order)
    except (KeyError, struct.error):
        return 1
    return value if 1 <= value <= 8 else 1


def tiff(data: bytes) -> Header:
    """Return the first page, behind a new directory of the tags that its pixels depend on."""
    order = BYTE_ORDERS[data[:4]]
    entries, more_pages = tiff_directory(data, order)
    copied = {tag: entries[tag] for tag in sorted(entries.keys() & _TIFF_TAGS) if entries[tag][0] in _TIFF_TYPE_BYTES}
    value = {tag: first_value(data, entry, order) for tag, entry in copied.items()}
    _check_tiff(data, order, copied, value)
    padding = bytes(len(data) % 2)
    directory = struct.pack(order + "H", len(copied))
    directory += b"".join(struct.pack(order + "HHI4s", tag, *entry) for tag, entry in copied.items()) + bytes(4)
    start = data[:4] + struct.pack(order + "I", len(data) + len(padding))
    return Header(
        "TIFF",
        value.get(256, 0),
        value.get(257, 0),
        (start, memoryview(data)[8:], padding, directory),
        orientation_of(data),
        value.get(258, 1),
        notes_of(more_pages, False),
    )


def _check_tiff(data: bytes, order: str, copied: dict[int, _Entry], value: dict[int, int]) -> None:
    """Refuse files that Pillow or libtiff would read differently, warn about, or spend much memory on."""
    total = 0
    for tag, (kind, count, field) in copied.items():
        size = count * _TIFF_TYPE_BYTES[kind]
        total += size
        if size > 4 and struct.unpack(order + "I", field)[0] + size > len(data):
            raise truncated("TIFF", f"the values of tag {tag} do")
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


PARSERS: dict[str, Callable[[bytes], Header]] = {
    "PNG": _png, "JPEG": _jpeg, "GIF": _gif, "BMP": _bmp, "WEBP": _webp, "TIFF": tiff,
}  # fmt: skip

GREY, COLOUR, PALETTE, CMYK = "grey", "colour", "palette", "CMYK"
_PNG = {0: GREY, 2: COLOUR, 3: PALETTE, 4: GREY, 6: COLOUR}
_TIFF = {0: GREY, 1: GREY, 3: PALETTE, 5: CMYK}
_JPEG = {1: GREY, 4: CMYK}
PHOTOMETRIC, BITS, EXTRA_SAMPLES = 262, 258, 338  # tags of TIFF
BITFIELDS = 3  # of BMP


def mode_of(data: bytes) -> str:
    """Name the mode in which an image file holds its pixels, such as "grey with alpha" or "colour of 16 bits".

    A transparent colour counts as alpha. Grey pictures in a file of colours are colour.

    Args:
        data: a file that `probe` or `decode` accepts.
    """
    parsers = {
        "PNG": _png_mode,
        "JPEG": _jpeg_mode,
        "GIF": _gif_mode,
        "BMP": _bmp_mode,
        "WEBP": _webp_mode,
        "TIFF": _tiff_mode,
    }
    base, alpha, bits = parsers[sniff(data) or ""](data)
    return base + (" with alpha" if alpha else "") + (" of 16 bits" if bits == 16 else "")


def _png_mode(data: bytes) -> tuple[str, bool, int]:
    bits, kind = data[24], data[25]
    alpha = kind in (4, 6)
    for name, _, _ in png_chunks(data):
        alpha |= name == b"tRNS"
        if name == b"IDAT":
            break
    return _PNG.get(kind, COLOUR), alpha, bits


def _jpeg_mode(data: bytes) -> tuple[str, bool, int]:
    start = next(start for code, start, _ in jpeg_segments(data) if code in FRAMES)
    return _JPEG.get(data[start + 9], COLOUR), False, 8


def _gif_mode(data: bytes) -> tuple[str, bool, int]:
    position, alpha = 13 + gif_palette(data[10]), False
    while data[position] != 0x2C:  # the first frame
        if data[position] == 0x21:
            alpha |= data[position + 1] == 0xF9 and bool(data[position + 3] & 1)
            position = gif_blocks(data, position + 2)
        else:
            position += 1
    return PALETTE, alpha, 8


def _bmp_mode(data: bytes) -> tuple[str, bool, int]:
    size = int.from_bytes(data[14:18], "little")
    bits = int.from_bytes(data[24:26] if size == 12 else data[28:30], "little")
    masked = size >= 56 and int.from_bytes(data[30:34], "little") == BITFIELDS
    return PALETTE if bits <= 8 else COLOUR, masked and any(data[66:70]), 8


def _webp_mode(data: bytes) -> tuple[str, bool, int]:
    kind = data[12:16]
    alpha = kind == b"VP8X" and bool(data[20] & 16)
    if kind == b"VP8L":
        alpha = bool(struct.unpack_from("<I", data, 21)[0] >> 28 & 1)
    return COLOUR, alpha, 8


def _tiff_mode(data: bytes) -> tuple[str, bool, int]:
    order = BYTE_ORDERS[data[:4]]
    entries = tiff_directory(data, order)[0]
    value = {
        tag: first_value(data, entries[tag], order) for tag in (PHOTOMETRIC, BITS, EXTRA_SAMPLES) if tag in entries
    }
    return _TIFF.get(value.get(PHOTOMETRIC, 0), COLOUR), value.get(EXTRA_SAMPLES, 0) > 0, value.get(BITS, 1)
