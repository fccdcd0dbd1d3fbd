"""Mode of an image file by its header: grey, colour, palette or CMYK, with or without alpha, of 8 or 16 bits."""

from __future__ import annotations

import struct

from unpad.data.pixels.formats import FRAMES, gif_blocks, gif_palette, jpeg_segments, png_chunks, sniff
from unpad.data.pixels.tiff import BYTE_ORDERS, first_value, tiff_directory

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
    parsers = {"PNG": _png, "JPEG": _jpeg, "GIF": _gif, "BMP": _bmp, "WEBP": _webp, "TIFF": _tiff}
    base, alpha, bits = parsers[sniff(data) or ""](data)
    return base + (" with alpha" if alpha else "") + (" of 16 bits" if bits == 16 else "")


def _png(data: bytes) -> tuple[str, bool, int]:
    bits, kind = data[24], data[25]
    alpha = kind in (4, 6)
    for name, _, _ in png_chunks(data):
        alpha |= name == b"tRNS"
        if name == b"IDAT":
            break
    return _PNG.get(kind, COLOUR), alpha, bits


def _jpeg(data: bytes) -> tuple[str, bool, int]:
    start = next(start for code, start, _ in jpeg_segments(data) if code in FRAMES)
    return _JPEG.get(data[start + 9], COLOUR), False, 8


def _gif(data: bytes) -> tuple[str, bool, int]:
    position, alpha = 13 + gif_palette(data[10]), False
    while data[position] != 0x2C:  # the first frame
        if data[position] == 0x21:
            alpha |= data[position + 1] == 0xF9 and bool(data[position + 3] & 1)
            position = gif_blocks(data, position + 2)
        else:
            position += 1
    return PALETTE, alpha, 8


def _bmp(data: bytes) -> tuple[str, bool, int]:
    size = int.from_bytes(data[14:18], "little")
    bits = int.from_bytes(data[24:26] if size == 12 else data[28:30], "little")
    masked = size >= 56 and int.from_bytes(data[30:34], "little") == BITFIELDS
    return PALETTE if bits <= 8 else COLOUR, masked and any(data[66:70]), 8


def _webp(data: bytes) -> tuple[str, bool, int]:
    kind = data[12:16]
    alpha = kind == b"VP8X" and bool(data[20] & 16)
    if kind == b"VP8L":
        alpha = bool(struct.unpack_from("<I", data, 21)[0] >> 28 & 1)
    return COLOUR, alpha, 8


def _tiff(data: bytes) -> tuple[str, bool, int]:
    order = BYTE_ORDERS[data[:4]]
    entries = tiff_directory(data, order)[0]
    value = {
        tag: first_value(data, entries[tag], order) for tag in (PHOTOMETRIC, BITS, EXTRA_SAMPLES) if tag in entries
    }
    return _TIFF.get(value.get(PHOTOMETRIC, 0), COLOUR), value.get(EXTRA_SAMPLES, 0) > 0, value.get(BITS, 1)
