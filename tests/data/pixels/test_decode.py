"""Images drawn here, whole and broken: what comes out of each, by listing it and decoding what was listed."""

import json
import os
import random
import struct
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from unpad.data.pixels.decode import decode, probe
from unpad.data.pixels.formats import FIXES, MAX_METADATA, MAX_PIXELS, NOTES, ImageError
from unpad.data.sources.example import BadRow
from unpad.data.sources.files import SourceFile
from unpad.data.sources.images import ImageExample, read, read_bytes
from unpad.recipes.data import DataSettings

Pixels = NDArray[np.uint8]
MEMORY = 512 << 20


# --------------------------------------------------------------------------- drawing


def picture(height: int = 16, width: int = 24) -> Pixels:
    """A different colour in every corner, and no symmetry."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 // (width - 1), y * 255 // (height - 1), (x + 2 * y) * 5 % 256], -1).astype(np.uint8)


def blocks() -> Pixels:
    """Four flat squares, which JPEG keeps, in 32 x 48 pixels."""
    colours = np.array([[[250, 10, 10], [10, 240, 20], [20, 20, 240]], [[240, 240, 20], [0, 0, 0], [255, 255, 255]]])
    return colours.repeat(16, 0).repeat(16, 1).astype(np.uint8)


def encoded(image: Image.Image | Pixels, format: str, **options: Any) -> bytes:
    buffer = BytesIO()
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(buffer, format, **options)
    return buffer.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, bits: int, colour: int, row: bytes, *chunks: bytes) -> bytes:
    """A PNG whose rows are all `row`, in memory row by row."""
    packer = zlib.compressobj(1)
    pixels = b"".join(packer.compress(b"\0" + row) for _ in range(height)) + packer.flush()
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def black_png(width: int, height: int) -> bytes:
    return png(width, height, 1, 0, bytes((width + 7) // 8))


def ycck() -> bytes:
    """A JPEG whose Adobe segment says that its four components are YCCK."""
    content = bytearray(encoded(Image.fromarray(picture()).convert("CMYK"), "JPEG"))
    content[content.index(b"Adobe") + 11] = 2
    return bytes(content)


def webp(width: int, height: int) -> bytes:
    return encoded(Image.new("RGB", (width, height), (9, 99, 199)), "WEBP", lossless=True, quality=0, method=0)


def webp_header(width: int, height: int) -> bytes:
    return webp(1, 1)[:21] + struct.pack("<I", width - 1 | height - 1 << 14)


def on_white(pixels: NDArray[Any], alpha: NDArray[Any]) -> NDArray[np.float64]:
    """The definition, in fp64: colour times alpha, plus white times the rest."""
    share = alpha[..., None] / 255
    return pixels * share + 255 * (1 - share)


def alpha_of(height: int, width: int) -> Pixels:
    return np.linspace(0, 255, height * width).astype(np.uint8).reshape(height, width)


def turned(orientation: int) -> Image.Image:
    """blocks(), stored so that `orientation` turns it upright again."""
    way = Image.Transpose
    undo = {2: way.FLIP_LEFT_RIGHT, 3: way.ROTATE_180, 4: way.FLIP_TOP_BOTTOM, 5: way.TRANSPOSE,
            6: way.ROTATE_90, 7: way.TRANSVERSE, 8: way.ROTATE_270}  # fmt: skip
    image = Image.fromarray(blocks())
    return image if orientation == 1 else image.transpose(undo[orientation])


def with_orientation(orientation: int, format: str) -> bytes:
    exif = Image.Exif()
    exif[274] = orientation
    options: dict[str, Any] = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"lossless": True}}.get(format, {})
    return encoded(turned(orientation), format, exif=exif, **options)


def frames(format: str, **options: Any) -> bytes:
    first, second = Image.fromarray(blocks()), Image.new("RGB", (48, 32), (9, 9, 9))
    return encoded(first, format, save_all=True, append_images=[second], **options)


# --------------------------------------------------------------------------- the table of faults


@dataclass(frozen=True)
class Seen:
    """What an image must decode to, within `within` levels; None leaves the pixels to another test."""

    pixels: NDArray[Any] | None
    notes: tuple[str, ...] = ()
    within: float = 0


def fault_of_jpeg_profile() -> bytes:
    jpeg = encoded(blocks(), "JPEG")
    segment = b"\xff\xe2" + struct.pack(">H", 65_535) + b"ICC_PROFILE\0\1\1" + bytes(65_519)
    return jpeg[:2] + segment * (MAX_METADATA // 65_535 + 1) + jpeg[2:]


def profile_bomb() -> bytes:
    """A profile of 64 MB in 64 kB, which Pillow refuses and nobody needs."""
    packer = zlib.compressobj(9)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(64)) + packer.flush()
    whole = encoded(picture(), "PNG")
    return whole[:33] + chunk(b"iCCP", b"x\0\0" + bomb) + whole[33:]


def with_text(num_bytes: int) -> bytes:
    whole = encoded(picture(), "PNG")
    return whole[:33] + chunk(b"tEXt", b"x\0" + b"y" * num_bytes) + whole[33:]


def palette_with_alpha() -> bytes:
    image = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3) % 3, "P")
    image.putpalette([250, 0, 0, 0, 200, 0, 0, 0, 100])
    return encoded(image, "PNG", transparency=bytes([255, 128, 0]))


PALETTE_SEEN = on_white(
    np.array([[[250, 0, 0], [0, 200, 0], [0, 0, 100]]] * 2), np.array([[255, 128, 0]] * 2, np.uint8)
)
GREY = picture()[:, :, 0]
BITS = (picture()[:, :, 2] > 99).astype(np.uint8) * 255


def two_headers(format: str) -> bytes:
    """A second header, of another size in a PNG, behind the one that is checked."""
    whole = encoded(picture(), format)
    if format == "PNG":
        return whole[:33] + chunk(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)) + whole[33:]
    frame = whole.index(b"\xff\xc0")
    return whole[:frame] + whole[frame : frame + 19] * 2 + whole[frame + 19 :]


def of_scans(number: int, side: int | None = None) -> bytes:
    """A progressive JPEG whose last scan stands in it as often as makes `number` in all, and whose header may lie."""
    whole = encoded(picture(), "JPEG", progressive=True)
    last = whole.rindex(b"\xff\xda")
    whole = whole[:last] + whole[last:-2] * (number - whole.count(b"\xff\xda") + 1) + whole[-2:]
    size = whole.index(b"\xff\xc2") + 5
    return whole if side is None else whole[:size] + struct.pack(">HH", side, side) + whole[size + 4 :]


Case = tuple[str, Callable[[], bytes | None], str | Seen]
FAULTS: list[Case] = [
    ("I-02 truncated JPEG", lambda: encoded(picture(), "JPEG")[:-20], "E_TRUNCATED"),
    ("I-03 truncated PNG", lambda: encoded(picture(), "PNG")[:-20], "E_TRUNCATED"),
    ("I-05 CMYK TIFF", lambda: encoded(Image.fromarray(picture()).convert("CMYK"), "TIFF"), Seen(picture())),
    ("I-05 CMYK JPEG", lambda: encoded(Image.fromarray(blocks()).convert("CMYK"), "JPEG", quality=95),
     Seen(blocks(), within=6)),
    ("I-06 palette and alpha", palette_with_alpha, Seen(PALETTE_SEEN, within=1)),
    ("I-07 16-bit grey", lambda: encoded(Image.fromarray(GREY.astype(np.uint16) * 257), "PNG"),
     Seen(np.stack([GREY] * 3, -1))),
    ("I-07 16-bit colour", lambda: png(3, 2, 16, 2, struct.pack(">9H", *range(1000, 60_000, 6_600))),
     Seen(np.array([range(1000, 60_000, 6_600)] * 2).reshape(2, 3, 3) / 257, within=1)),
    ("I-07 16-bit TIFF", lambda: encoded(Image.fromarray(GREY.astype(np.uint16) * 257), "TIFF"),
     Seen(np.stack([GREY] * 3, -1))),
    ("I-09 grey and alpha", lambda: encoded(Image.fromarray(np.stack([GREY, alpha_of(16, 24)], -1), "LA"), "PNG"),
     Seen(on_white(np.stack([GREY] * 3, -1), alpha_of(16, 24)), within=1)),
    ("I-09 colour and alpha", lambda: encoded(np.dstack([picture(), alpha_of(16, 24)]), "PNG"),
     Seen(on_white(picture(), alpha_of(16, 24)), within=1)),
    ("I-10 animated GIF", lambda: frames("GIF"), Seen(blocks(), ("W_ANIM",))),
    ("I-10 animated PNG", lambda: frames("PNG"), Seen(blocks(), ("W_ANIM",))),
    ("I-10 animated WebP", lambda: frames("WEBP", lossless=True), Seen(blocks(), ("W_ANIM",))),
    ("I-10 TIFF of two pages", lambda: frames("TIFF"), Seen(blocks(), ("W_ANIM",))),
    *[(f"I-11 EXIF {o} {f}", lambda o=o, f=f: with_orientation(o, f), Seen(blocks(), within=8 * (f == "JPEG")))
      for o in range(1, 9) for f in ("JPEG", "PNG", "WEBP", "TIFF")],
    ("I-12 196 million pixels", lambda: black_png(14_000, 14_000), "E_PIXELS"),
    ("I-13 1 x 20,000", lambda: black_png(1, 20_000), "E_PIXELS"),
    ("I-14 SVG", lambda: b'<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"/>', "E_FORMAT"),
    ("I-14 AVIF", lambda: struct.pack(">I", 24) + b"ftypavif" + bytes(100), "E_FORMAT"),
    ("two headers of a PNG", lambda: two_headers("PNG"), "E_DECODE"),
    ("two headers of a JPEG", lambda: two_headers("JPEG"), "E_DECODE"),
    ("101 scans", lambda: of_scans(101), "E_DECODE"),
    ("20 scans of 36 million pixels", lambda: of_scans(20, 6000), "E_PIXELS"),
    ("I-15 huge text", lambda: with_text(MAX_METADATA), "E_METADATA"),
    ("I-15 huge profile", fault_of_jpeg_profile, "E_METADATA"),
    ("I-15 packed profile of 64 MB", profile_bomb, Seen(picture(), ("W_PROFILE",))),
    ("I-18 same path, other content", lambda: encoded(picture(17), "PNG"), "E_CHANGED"),
    ("I-19 JPEG and zip", lambda: encoded(blocks(), "JPEG", quality=95, subsampling=0) + b"PK\x05\x06" + bytes(18),
     Seen(blocks(), ("W_TRAILING",), within=8)),
]  # fmt: skip


@pytest.mark.promise("images.classes")
@pytest.mark.parametrize(("name", "make", "expected"), FAULTS, ids=[name for name, _, _ in FAULTS])
def test_every_fault_of_an_image_has_its_code_and_place(tmp_path, name, make, expected):
    content = make()
    if content is not None:
        (tmp_path / "one.jpg").write_bytes(content)
    row = {"image": "one.jpg", "label": "x"}
    if expected == "E_CHANGED":
        row["sha256"] = sha256(encoded(picture(), "PNG")).hexdigest()
    manifest = tmp_path / "images.jsonl"
    manifest.write_text(json.dumps(row) + "\n")
    (found,) = read(SourceFile(manifest, "jsonl", None, 1.0, 0), DataSettings())
    if isinstance(expected, str):
        assert isinstance(found, BadRow)
        assert (found.code, found.where) == (expected, f"{manifest}:1")
        assert str(tmp_path / "one.jpg").startswith(found.excerpt.removesuffix("…")) or "one.jpg" in found.excerpt
        assert found.fix
        return
    assert isinstance(found, ImageExample)
    image = decode(read_bytes(found))
    assert image.notes == found.notes == expected.notes
    assert set(image.notes) <= set(NOTES)
    assert (found.height, found.width) == image.pixels.shape[:2]
    assert image.pixels.dtype == np.uint8
    assert np.abs(image.pixels.astype(float) - expected.pixels).max() <= expected.within


# --------------------------------------------------------------------------- memory


CHILD = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
from unpad.data.pixels.decode import decode
from unpad.data.pixels.formats import ImageError
assert "torch" not in sys.modules, "it needs more than the limit"
results = []
for path in sys.argv[2:]:
    with open(path, "rb") as file:
        data = file.read()
    try:
        results.append(decode(data).pixels.shape)
    except ImageError as error:
        results.append(error.code)
print(json.dumps(results))
"""


@pytest.mark.nightly
def test_the_largest_images_and_the_bombs_fit_into_half_a_gigabyte(tmp_path):
    side = int(MAX_PIXELS**0.5)
    large = Image.new("RGB", (side, side), (9, 99, 199))
    contents = {
        "81 million pixels": black_png(9_000, 9_000),
        "196 million pixels": black_png(14_000, 14_000),
        "more than 25 million pixels of WebP": webp_header(5_000, 5_001) + webp(1, 1)[25:],
        "profile": profile_bomb(),
        "text": with_text(MAX_METADATA),
        "largest PNG": png(side, side, 8, 6, bytes(side * 4)),
        "largest 16-bit PNG": png(side, side, 16, 0, bytes(side * 2)),
        "largest JPEG": encoded(large, "JPEG", progressive=True, subsampling=0),
        "largest WebP": webp(5_000, 5_000),
    }
    paths = []
    for name, content in contents.items():
        paths.append(tmp_path / name)
        paths[-1].write_bytes(content)
    command = [sys.executable, "-c", CHILD, str(MEMORY), *map(str, paths)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    output = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (output.returncode, output.stderr) == (0, "")
    largest = [side, side, 3]
    expected = [
        "E_PIXELS", "E_PIXELS", "E_PIXELS", [16, 24, 3], "E_METADATA", largest, largest, largest, [5_000, 5_000, 3],
    ]  # fmt: skip
    assert json.loads(output.stdout) == expected


# --------------------------------------------------------------------------- whole and cut off


SAMPLES: dict[str, Callable[[], bytes]] = {
    "PNG": lambda: encoded(picture(), "PNG"),
    "PNG, palette": palette_with_alpha,
    "APNG": lambda: frames("PNG"),
    "JPEG": lambda: with_orientation(6, "JPEG"),
    "JPEG, YCCK": ycck,
    "JPEG, progressive": lambda: encoded(picture(), "JPEG", progressive=True),
    "GIF": lambda: frames("GIF"),
    "BMP": lambda: encoded(picture(), "BMP"),
    "BMP, palette": lambda: encoded(Image.fromarray(picture()).convert("P"), "BMP"),
    "WebP": lambda: encoded(picture(), "WEBP"),
    "WebP, lossless": lambda: with_orientation(6, "WEBP"),
    "TIFF": lambda: encoded(picture(), "TIFF"),
    "TIFF, LZW": lambda: encoded(picture(), "TIFF", compression="tiff_lzw"),
    "TIFF, deflate": lambda: encoded(picture(), "TIFF", compression="tiff_adobe_deflate"),
    "TIFF, JPEG": lambda: encoded(picture(), "TIFF", compression="jpeg"),
    "TIFF, PackBits": lambda: encoded(picture(), "TIFF", compression="packbits"),
    "TIFF, fax": lambda: encoded(Image.fromarray(BITS).convert("1"), "TIFF", compression="group4"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_pixels_are_what_pillow_reads(name):
    content = SAMPLES[name]()
    if name == "PNG, palette":
        pytest.skip("Pillow keeps the transparency; the table of faults has its own truth")
    expected = np.asarray(ImageOps.exif_transpose(Image.open(BytesIO(content)).convert("RGB")))
    image, info = decode(content), probe(content)
    np.testing.assert_array_equal(image.pixels, expected)
    assert (info.height, info.width) == expected.shape[:2]
    assert name.upper().startswith(info.format) or name == "APNG"


@pytest.mark.parametrize("name", ["PNG", "APNG", "JPEG", "JPEG, progressive", "WebP", "WebP, lossless"])
def test_a_file_cut_off_anywhere_is_known_from_its_parts(name):
    content = SAMPLES[name]()
    for length in range(16, len(content)):
        with pytest.raises(ImageError) as caught:
            probe(content[:length])
        assert caught.value.code == "E_TRUNCATED", length


@pytest.mark.parametrize("name", SAMPLES)
def test_changed_bytes_give_an_image_or_a_fault_but_no_warning(name, capfd):
    content, generator, codes = SAMPLES[name](), random.Random(name), set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(300):
            changed = bytearray(content)
            for _ in range(generator.choice((1, 1, 2, 8))):
                changed[generator.randrange(min(len(changed), generator.choice((64, 1 << 20))))] = generator.randrange(
                    256
                )
            try:
                info = probe(bytes(changed))
                assert decode(bytes(changed)).pixels.shape == (info.height, info.width, 3)
            except ImageError as error:
                codes.add(error.code)
    assert codes <= set(FIXES)
    assert not caught, [str(warning.message) for warning in caught]
    if not name.startswith("TIFF, "):  # libtiff writes to stderr by itself
        assert capfd.readouterr() == ("", "")


def test_a_transparent_grey_or_colour_is_white_at_any_depth():
    cases = [
        png(4, 1, 2, 0, b"\x1b", chunk(b"tRNS", b"\0\1")),  # greys 0 1 2 3 of 3, the second transparent
        png(4, 1, 8, 0, bytes([0, 85, 170, 255]), chunk(b"tRNS", b"\0\x55")),
        png(4, 1, 16, 0, bytes([0, 0, 85, 85, 170, 170, 255, 255]), chunk(b"tRNS", b"\x55\x55")),
        png(4, 1, 16, 2, b"".join(bytes([v, 9] * 3) for v in (0, 85, 170, 255)), chunk(b"tRNS", b"\x55\x09" * 3)),
    ]
    for content in cases:
        assert decode(content).pixels[0].tolist() == [[v] * 3 for v in (0, 255, 170, 255)]


@pytest.mark.promise("images.own-size")
def test_opacity_comes_as_a_fourth_channel_beside_the_same_colours():
    picture = Image.new("RGBA", (3, 2), (200, 100, 50, 0))
    picture.putpixel((1, 0), (10, 20, 30, 128))
    picture.putpixel((2, 1), (1, 2, 3, 255))
    grey = Image.new("LA", (3, 2), (40, 7))
    palette = Image.new("P", (3, 2), 1)
    palette.putpalette([9, 9, 9, 8, 8, 8])
    one_clear = png(4, 1, 16, 0, bytes([0, 0, 85, 85, 170, 170, 255, 255]), chunk(b"tRNS", b"\x55\x55"))
    for content, opacity in (
        (encoded(picture, "PNG"), [[0, 128, 0], [0, 0, 255]]),
        (encoded(grey, "PNG"), [[7] * 3] * 2),
        (encoded(palette, "PNG", transparency=1), [[0] * 3] * 2),
        (one_clear, [[255, 0, 255, 255]]),
        (encoded(Image.new("RGB", (3, 2), "red"), "JPEG"), [[255] * 3] * 2),
    ):
        found = decode(content, opacity=True).pixels
        assert found[:, :, 3].tolist() == opacity
        assert np.array_equal(found[:, :, :3], decode(content).pixels)
