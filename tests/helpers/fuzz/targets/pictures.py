"""Targets: image files of every format; the size that is read from the header is that of the decoded pixels."""

import random
import struct
import zlib
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.helpers.fuzz.mutate import damage_bytes
from tests.helpers.fuzz.target import Target, WrongError
from tests.helpers.fuzz.targets.rows import picture
from unpad.data.pixels.decode import decode, probe
from unpad.data.pixels.formats import ImageError


def _saved(image: Image.Image, name: str, **options: Any) -> bytes:
    out = BytesIO()
    image.save(out, name, **options)
    return out.getvalue()


def seeds_of(name: str) -> list[bytes]:
    """Small files of a format in its modes and codings."""
    whole = picture(1, 12, 14)
    turned = Image.Exif()
    turned[274] = 6
    clear, other = whole.convert("RGBA"), whole.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    kinds: dict[str, list[tuple[Image.Image, dict[str, Any]]]] = {
        "PNG": [
            (whole, {}), (whole.convert("P"), {"transparency": 0}), (whole.convert("LA"), {}), (whole.convert("1"), {}),
            (Image.fromarray(np.full((9, 9), 3000, np.uint16)), {}),
            (whole, {"save_all": True, "append_images": [other]}),
        ],
        "JPEG": [
            (whole, {"exif": turned}), (whole, {"progressive": True}), (whole.convert("CMYK"), {}),
            (whole.convert("L"), {"restart_marker_blocks": 1}),
        ],
        "GIF": [
            (whole, {}), (whole, {"save_all": True, "append_images": [other], "transparency": 3}),
            (whole, {"interlace": 1}),
        ],
        "BMP": [(whole, {}), (whole.convert("P"), {}), (whole.convert("1"), {}), (clear, {})],
        "WEBP": [
            (whole, {}), (whole, {"lossless": True, "exif": turned}),
            (clear, {"save_all": True, "append_images": [clear.rotate(90)]}),
        ],
        "TIFF": [
            (whole, {}), (whole, {"compression": "tiff_lzw"}), (whole, {"compression": "tiff_adobe_deflate"}),
            (whole, {"compression": "jpeg"}), (whole.convert("1"), {"compression": "group4"}),
            (whole, {"save_all": True, "append_images": [other]}), (clear, {"compression": "packbits"}),
        ],
    }  # fmt: skip
    return [_saved(image, name, **options) for image, options in kinds[name]]


def _with_checksums(data: bytes) -> bytes:
    """A PNG with its checksums made right, so that damage reaches the decoder."""
    out, at = bytearray(data[:8]), 8
    while at + 12 <= len(data):
        size = struct.unpack(">I", data[at : at + 4])[0]
        if at + 12 + size > len(data):
            break
        out += data[at : at + 8 + size] + struct.pack(">I", zlib.crc32(data[at + 4 : at + 8 + size]))
        at += 12 + size
    return bytes(out) + data[at:]


def _format(name: str, folder: Path) -> Target:
    seeds = seeds_of(name)

    def make(rng: random.Random) -> bytes:
        data = damage_bytes(rng.choice(seeds), seeds, rng)
        return _with_checksums(data) if name == "PNG" and rng.random() < 0.7 else data

    return Target(make, check_picture, (ImageError,))


def check_picture(data: bytes) -> None:
    """Read the header and the pixels of an image, which must agree."""
    info = probe(data)
    plain = decode(data)
    if plain.pixels.shape != (info.height, info.width, 3) or (plain.notes, plain.mode) != (info.notes, info.mode):
        raise WrongError("the header and the pixels of an image differ", info, plain.pixels.shape, plain.notes)
    if plain.pixels.size < 1 << 18 and decode(data, opacity=True).pixels.shape != (info.height, info.width, 4):
        raise WrongError("opacity changes the size of an image")


def any_format(folder: Path) -> Target:
    """The beginning of one format and the rest of another."""
    seeds = [one for name in FORMATS for one in seeds_of(name)]

    def make(rng: random.Random) -> bytes:
        one, other = rng.choice(seeds), rng.choice(seeds)
        return damage_bytes(one[: rng.choice((4, 8, 16, 30, 60))] + other[rng.choice((0, 4, 8, 16)) :], seeds, rng)

    return Target(make, check_picture, (ImageError,))


FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF")
BUILDERS: dict[str, Callable[[Path], Target]] = {
    **{name.lower(): partial(_format, name) for name in FORMATS},
    "mixed_pictures": any_format,
}
