"""PNG, JPEG, GIF, BMP and WebP files: walked to the end for their size and the parts that Pillow needs."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator

from unpad.data.pixels.header import Header, ImageError, check_metadata, notes_of, truncated
from unpad.data.pixels.tiff import BYTE_ORDERS, orientation_of, tiff

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


PARSERS: dict[str, Callable[[bytes], Header]] = {
    "PNG": _png, "JPEG": _jpeg, "GIF": _gif, "BMP": _bmp, "WEBP": _webp, "TIFF": tiff,
}  # fmt: skip
