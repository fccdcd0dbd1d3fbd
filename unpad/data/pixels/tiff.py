"""TIFF files, and EXIF, which is one."""

from __future__ import annotations

import struct

from unpad.data.pixels.header import MAX_PIXELS, MAX_SIDE, Header, ImageError, notes_of, truncated

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
