"""Image files by their parts: walked to the end, so that cut ones are noticed and Pillow receives no metadata."""

import math
import re
import struct
import tomllib
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unpad.errors import SourceError

MAX_PIXELS = 40_000_000
MAX_WEBP_PIXELS = 25_000_000  # libwebp and Pillow together have four copies of the canvas
MAX_SIDE = 16_384
MAX_BYTES = 1 << 28
MAX_METADATA = 1 << 24  # bytes of text, profiles and thumbnails in one file; profiles of printers have about 3 MB
MAX_PROFILE = 1 << 16  # bytes of a packed profile that are looked at
MAX_SCANS = 100  # of a JPEG; each costs a pass over all pixels, and programs write about ten
MAX_SCANNED = 500_000_000  # pixels of a JPEG, those of every scan

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FIXES, NOTES = _TABLE["fixes"], _TABLE["notes"]


class ImageError(SourceError):
    """An image that cannot be used: a stable code such as E_TRUNCATED, the fault, and the fix."""

    def __init__(self, code: str, what: str, fix: str = "", where: str = "") -> None:
        super().__init__(what, where=where, fix=fix or FIXES[code])
        self.code = code
        self.args = (code, what, self.fix, where)  # a worker process sends these back

    def __str__(self) -> str:
        return super().__str__().replace(": ", f": {self.code} ", 1)


@dataclass(frozen=True, slots=True)
class Stripped:
    """What Pillow needs of a file.

    Args:
        parts: joined they are a file without metadata.
        orientation: EXIF, 1 to 8.
        animated: there are more frames or pages than the first, as far as the walk sees them.
        trailing: there are bytes after the end.
        profile: the beginning of the colour profile, unpacked; b"" without one.
    """

    parts: tuple[bytes | memoryview, ...]
    orientation: int = 1
    animated: bool = False
    trailing: bool = False
    profile: bytes = b""

    @property
    def has_other_profile(self) -> bool:
        """True for a colour profile that does not call itself sRGB, or c2, which is a short one of it."""
        names = [name.encode(coding) for name in ("sRGB", "c2\0") for coding in ("ascii", "utf-16-be")]
        return bool(self.profile) and not any(name in self.profile for name in names)


_BMP_HEADERS = (12, 40, 52, 56, 64, 108, 124)
BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}


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


def walk(data: bytes, name: str) -> Stripped:
    """Walk a file of a format that `sniff` names to its end; GIF and BMP are left to Pillow.

    Raises:
        ImageError: E_TRUNCATED, E_METADATA, E_FORMAT, E_PIXELS, or E_DECODE: the parts contradict each other.
    """
    try:
        return _WALKS[name](data) if name in _WALKS else Stripped((data,))
    except (struct.error, IndexError):
        raise _truncated(name, "it should") from None


def _truncated(name: str, what: str) -> ImageError:
    return ImageError("E_TRUNCATED", f"the {name} ends before {what}")


def _check_metadata(num_bytes: int) -> None:
    if num_bytes > MAX_METADATA:
        raise ImageError("E_METADATA", f"{num_bytes:,} bytes of metadata, more than {MAX_METADATA:,}")


def _check_scans(number: int, num_pixels: int) -> None:
    if number > MAX_SCANS:
        raise ImageError("E_DECODE", f"{number:,} scans, more than {MAX_SCANS}")
    if number * num_pixels > MAX_SCANNED:
        raise ImageError("E_PIXELS", f"{number:,} scans of {num_pixels:,} pixels")


_PNG_PIXELS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_PNG_FRAMES = (b"acTL", b"fcTL", b"fdAT")


def _png(data: bytes) -> Stripped:
    view = memoryview(data)
    parts, orientation, metadata, num_frames, kind, end, profile = [view[:8]], 1, 0, 1, b"", 8, b""
    while kind != b"IEND":
        start = end
        length, kind = struct.unpack_from(">I4s", data, start)  # then the content and its checksum
        end = start + 12 + length
        if end > len(data):
            raise _truncated("PNG", "its IEND chunk")
        if (kind == b"IHDR") != (start == 8):
            raise ImageError("E_DECODE", "its IHDR chunk is not the first and only one")
        if kind in _PNG_PIXELS:
            if zlib.crc32(view[start + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
                raise ImageError("E_DECODE", f"the checksum of its {kind.decode()} chunk is wrong")
            parts.append(view[start:end])
        elif kind == b"acTL":
            num_frames = int.from_bytes(view[start + 8 : start + 12], "big")
        elif kind not in _PNG_FRAMES:
            metadata += end - start
            if kind == b"eXIf":
                orientation = _orientation_of(data[start + 8 : end - 4])
            elif kind == b"iCCP":  # a name, a zero, the way of packing
                with suppress(zlib.error):
                    packed = data[start + 8 : end - 4].partition(b"\0")[2][1:]
                    profile = zlib.decompressobj().decompress(packed, MAX_PROFILE)
    _check_metadata(metadata)
    return Stripped(tuple(parts), orientation, num_frames > 1, end < len(data), profile)


# Markers that begin a segment or end the image. In coded pixels FF is followed by 00 or a restart, D0 to D7; 01 and a
# second beginning, D8, have no segment.
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
_END, _SCAN = 0xD9, 0xDA
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_APPLICATION = frozenset((*range(0xE0, 0xF0), 0xFE))


def _jpeg(data: bytes) -> Stripped:
    view = memoryview(data)
    parts, orientation, scans, metadata, num_frames, end, profile = [view[:2]], 0, [], 0, 0, 2, b""
    num_pixels = 0
    while marker := _MARKER.search(data, end):
        start, code = marker.start(), data[marker.start() + 1]
        end = start + 2 + (0 if code == _END else struct.unpack_from(">H", data, start + 2)[0])
        if code == _END or end > len(data):
            break
        if code in _FRAMES:
            num_frames += 1
            num_pixels = math.prod(struct.unpack_from(">HH", data, start + 5))
        if code == _SCAN:
            scans.append(start)
        name = data[start + 4 : start + 10] if code in _APPLICATION else b""
        metadata += end - start if name else 0
        if name == b"Exif\0\0" and not orientation:
            orientation = _orientation_of(data[start + 10 : end])
        if name == b"ICC_PR" and not profile:
            profile = data[start + 18 : end]  # behind the name, a number and a count
        # JFIF and Adobe define the colours of the samples.
        if not scans and (code not in _APPLICATION or name.startswith((b"JFIF", b"Adobe"))):
            parts.append(view[start:end])
    if marker is None or end > len(data):
        raise _truncated("JPEG", "its end marker")
    if num_frames > 1 or not scans:
        raise ImageError("E_DECODE", "two headers of a frame" if num_frames > 1 else "it holds no pixels")
    _check_scans(len(scans), num_pixels)
    _check_metadata(metadata)
    return Stripped((*parts, view[scans[0] : end]), orientation or 1, trailing=end < len(data), profile=profile)


def _webp(data: bytes) -> Stripped:
    end = 8 + struct.unpack_from("<I", data, 4)[0]
    position, orientation, metadata, profile = 12, 1, 0, b""
    while position + 8 <= end:
        kind, length = struct.unpack_from("<4sI", data, position)
        start = position + 8
        position = start + length + length % 2
        if max(end, start + length) > len(data):
            raise _truncated("WebP", "its last chunk does")
        metadata += length if kind in (b"ICCP", b"EXIF", b"XMP ") else 0
        if kind == b"ICCP":
            profile = data[start : start + length]
        if kind == b"EXIF":
            orientation = _orientation_of(data[start : start + length].removeprefix(b"Exif\0\0"))
    _check_metadata(metadata)
    return Stripped((memoryview(data)[:end],), orientation, trailing=end + end % 2 < len(data), profile=profile)


_Entry = tuple[int, int, bytes]  # type, number of values, and the value or where it stands
_ORIENTATION, _BITS, _COMPRESSION, _PHOTOMETRIC, _SAMPLES, _TILE, _PROFILE = 274, 258, 259, 262, 277, (322, 323), 34675
_TIFF_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}
_TIFF_SINGLE = frozenset((256, 257, 259, 262, 266, 277, 278, 284, 292, 293, 317, 322, 323))
_TIFF_TAGS = _TIFF_SINGLE | {258, 273, 279, 320, 324, 325, 338, 339, 347, 530, 532}  # tags that the pixels depend on
_TIFF_COMPRESSIONS = (1, 2, 3, 4, 5, 7, 8, 32773, 32946)  # none, CCITT, LZW, JPEG, deflate, PackBits


def _directory(data: bytes, order: str) -> tuple[dict[int, _Entry], int]:
    """Read the entries of the first directory by tag, and where it ends."""
    (start,) = struct.unpack_from(order + "I", data, 4)
    end = start + 2 + 12 * struct.unpack_from(order + "H", data, start)[0]
    entries: dict[int, _Entry] = {}
    for position in range(start + 2, end, 12):
        tag, *entry = struct.unpack_from(order + "HHI4s", data, position)
        entries.setdefault(tag, (*entry,))
    return entries, end


def _value(data: bytes, order: str, entry: _Entry) -> int:
    """Return the first value of an entry of whole numbers; 0 for other types."""
    kind, count, field = entry
    layout = {1: "B", 3: "H", 4: "I"}.get(kind)
    if layout is None:
        return 0
    place = struct.unpack(order + "I", field)[0] if count * _TIFF_TYPE_BYTES[kind] > 4 else None
    return int(struct.unpack_from(order + layout, *((field,) if place is None else (data, place)))[0])


def _orientation_of(exif: bytes) -> int:
    """EXIF orientation; 1, upright, if it is missing or damaged."""
    try:
        order = BYTE_ORDERS[exif[:4]]
        value = _value(exif, order, _directory(exif, order)[0][_ORIENTATION])
    except (KeyError, struct.error):
        return 1
    return value if 1 <= value <= 8 else 1


def _tiff(data: bytes) -> Stripped:
    """Return the first page, behind a new directory of the tags that its pixels depend on.

    Files that Pillow or libtiff would read differently, warn about, or spend much memory on are refused.
    """
    order = BYTE_ORDERS[data[:4]]
    entries, end = _directory(data, order)
    kept = {tag: entry for tag, entry in sorted(entries.items()) if tag in _TIFF_TAGS and entry[0] in _TIFF_TYPE_BYTES}
    total = 0
    for tag, (kind, count, field) in kept.items():
        size = count * _TIFF_TYPE_BYTES[kind]
        total += size
        if size > 4 and struct.unpack(order + "I", field)[0] + size > len(data):
            raise _truncated("TIFF", f"the values of tag {tag} do")
        if tag in _TIFF_SINGLE and count != 1:
            raise ImageError("E_DECODE", f"tag {tag} has {count} values, expected one")

    def value(tag: int, missing: int) -> int:
        return _value(data, order, kept[tag]) if tag in kept else missing

    if total > len(data) or value(_SAMPLES, 1) > 6:
        raise ImageError("E_DECODE", "its tags hold more than the file can")
    if value(_COMPRESSION, 1) not in _TIFF_COMPRESSIONS:
        what = f"the TIFF is compressed in way {value(_COMPRESSION, 1)}"
        raise ImageError("E_FORMAT", what, "save it with LZW or deflate")
    width, height = (value(tag, 0) for tag in _TILE)
    if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        raise ImageError("E_PIXELS", f"tiles of {width:,} x {height:,} pixels")
    bits, kind = value(_BITS, 1), value(_PHOTOMETRIC, 0)
    if bits not in (1, 2, 4, 8, 16) or (bits == 16 and kind == 0):  # Pillow leaves these dark or inverted
        raise ImageError("E_DECODE", f"{bits} bits per sample of kind {kind}", "save it with 8 bits per sample")
    padding = bytes(len(data) % 2)
    directory = b"".join(struct.pack(order + "HHI4s", tag, *entry) for tag, entry in kept.items())
    parts = (
        data[:4] + struct.pack(order + "I", len(data) + len(padding)),
        memoryview(data)[8:],
        padding + struct.pack(order + "H", len(kept)) + directory + bytes(4),
    )
    _, size, place = entries.get(_PROFILE, (0, 0, bytes(4)))
    (first,) = struct.unpack(order + "I", place)
    return Stripped(parts, _orientation_of(data), any(data[end : end + 4]), profile=data[first : first + size])


_WALKS: dict[str, Callable[[bytes], Stripped]] = {"PNG": _png, "JPEG": _jpeg, "WEBP": _webp, "TIFF": _tiff}
