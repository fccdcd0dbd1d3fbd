"""Untrusted image files: their size and mode from the header, their pixels, or a fault with a code.

`formats.py` beside this file walks the files; Pillow receives only the parts with pixels. So text and colour profiles
are never unpacked, a second header never replaces the one with the checked size, and Pillow has no reason to warn. A
process that decodes one image at a time needs at most 512 MiB besides the file. Both modules need neither torch nor the
rest of the package, so that such a process can be small. libtiff writes its messages about damaged TIFFs to stderr by
itself.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from unpad.data.pixels.formats import MAX_BYTES, MAX_PIXELS, MAX_SIDE, MAX_WEBP_PIXELS, ImageError, sniff, walk

WHITE = OPAQUE = 255
STRIP_PIXELS = 1 << 20  # converted to RGB at a time, so that a large image is in memory once in each form
_REFUSED = (
    (b"<", "HTML, XML or SVG"),
    (b"%PDF", "PDF"),
    (b"%!PS", "EPS"),
    (b"\xc5\xd0\xd3\xc6", "EPS"),
    (b"SIMPLE  =", "FITS"),
    (b"PK\x03\x04", "zip"),
)
# `Image.open` would choose among these, warn of many pixels, and look for the metadata of several formats.
_READERS: dict[str, type[ImageFile]] = {
    "PNG": PngImageFile, "JPEG": JpegImageFile, "GIF": GifImageFile, "BMP": BmpImageFile, "WEBP": WebPImageFile,
    "TIFF": TiffImageFile,
}  # fmt: skip
_PALETTES = ("GIF", "BMP")  # Pillow calls their palettes of greys grey
_MODES = {"1": "grey", "L": "grey", "LA": "grey", "I": "grey", "P": "palette", "PA": "palette", "CMYK": "CMYK"}


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """Header of an image.

    Args:
        width: pixels after EXIF orientation; `height` likewise.
        mode: how the file holds its pixels, such as "grey with alpha" or "colour of 16 bits". A transparent colour
            counts as alpha. Grey pictures in a file of colours are colour.
        notes: keys of NOTES.
    """

    width: int
    height: int
    format: str
    mode: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Decoded:
    """Decoded image: pixels (height, width, 3) uint8 RGB, upright, on white; keys of NOTES, and the mode of the file.

    With opacity there is a fourth channel, 255 for opaque.
    """

    pixels: NDArray[np.uint8]
    notes: tuple[str, ...]
    mode: str


def probe(data: bytes) -> ImageInfo:
    """Read the size of an image and check that the file is whole, without decoding pixels.

    The parts of a PNG, JPEG or WebP are read to the end, so truncated ones are found. A truncated GIF, BMP or TIFF is
    found by decoding, like damage inside coded pixels.

    Raises:
        ImageError: E_EMPTY, E_FORMAT, E_TRUNCATED, E_PIXELS, E_METADATA, or E_DECODE: the header contradicts itself.
    """
    return _open(data)[0]


def decode(data: bytes, opacity: bool = False, grey_bits: int = 16) -> Decoded:
    """Decode an image to RGB: the first frame, upright by its EXIF orientation, transparent pixels on white.

    Samples of 16 bits keep their high byte. CMYK is converted without a colour profile.

    Args:
        opacity: return it as a fourth channel; the colours stay the same.
        grey_bits: of grey samples of 16 bits, those that are in use, 8 to 16; larger values are white.

    Raises:
        ImageError: as `probe`; E_TRUNCATED or E_DECODE if the coded pixels are damaged.
    """
    info, image, orientation, bits = _open(data)
    with _faults_of_pillow():
        image.load()
        if "transparency" in image.info:
            image.info["transparency"] = _in_8_bits(image.info["transparency"], image.mode, bits)
        pixels = _upright(_pixels(image, 4 if opacity else 3, grey_bits), orientation)
    return Decoded(pixels, info.notes, info.mode)


def _open(data: bytes) -> tuple[ImageInfo, ImageFile, int, int]:
    """Check an image as far as its header and parts tell; return its header, the image that Pillow has opened but not
    loaded, its EXIF orientation, and bits per sample."""
    if not data:
        raise ImageError("E_EMPTY", "the file is empty")
    if len(data) > MAX_BYTES:
        raise ImageError("E_PIXELS", f"{len(data):,} bytes, more than {MAX_BYTES:,}")
    name = sniff(data)
    if name is None:
        raise ImageError("E_FORMAT", f"the content is {_guess(data)}, not an image that is read")
    parts = walk(data, name)
    with _faults_of_pillow():
        stream = BytesIO(b"".join(parts.parts))
        image = _READERS[name](stream)
        animated = parts.animated or getattr(image, "is_animated", False)  # of a GIF, this reads its first frame
        trailing = parts.trailing or (name == "GIF" and not animated and stream.tell() < len(data))
    width, height = image.size
    if min(width, height) < 1:
        raise ImageError("E_DECODE", f"its header says {width} x {height} pixels")
    most = MAX_WEBP_PIXELS if name == "WEBP" else MAX_PIXELS
    if max(width, height) > MAX_SIDE or width * height > most:
        limit = f"more than {most:,} in a {name} or {MAX_SIDE:,} a side"
        raise ImageError("E_PIXELS", f"{width:,} x {height:,} pixels, {limit}")
    bits = data[24] if name == "PNG" else 16 if ";16" in str(image.tile) else 8
    notes = {"W_ANIM": animated, "W_PROFILE": parts.has_other_profile, "W_TRAILING": trailing}
    base = _MODES.get(image.mode.partition(";")[0], "colour")
    mode = "palette" if name in _PALETTES and base == "grey" else base
    mode += (" with alpha" if image.has_transparency_data else "") + (" of 16 bits" if bits == 16 else "")
    size = (width, height) if parts.orientation < 5 else (height, width)
    info = ImageInfo(*size, name, mode, tuple(note for note, holds in notes.items() if holds))
    return info, image, parts.orientation, bits


@contextmanager
def _faults_of_pillow() -> Iterator[None]:
    """Give what Pillow raises a code."""
    try:
        yield
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError("E_PIXELS", str(error)) from None
    except MemoryError:
        raise ImageError("E_DECODE", "not enough memory for its pixels") from None
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        cut = "truncated" in reason.lower() or isinstance(error.__cause__ or error, EOFError | struct.error)
        raise ImageError("E_TRUNCATED" if cut else "E_DECODE", f"cannot be decoded: {reason}") from None


def _guess(data: bytes) -> str:
    if data[4:8] == b"ftyp":
        return "HEIC, AVIF or a film"
    start = data[:64].removeprefix(b"\xef\xbb\xbf").lstrip()
    return next((name for magic, name in _REFUSED if start.startswith(magic)), "of an unknown kind")


# --------------------------------------------------------------------------- pixels


def _in_8_bits(transparency: object, mode: str, bits: int) -> object:
    """Scale the transparent grey or colour to the pixels; Pillow leaves it in the bits of the file."""
    if mode == "L" and bits < 8 and isinstance(transparency, int):
        return transparency * 255 // (2**bits - 1)
    if mode == "RGB" and bits == 16 and isinstance(transparency, tuple):
        return tuple(value >> 8 for value in transparency)
    return transparency


def _pixels(image: Image.Image, channels: int, grey_bits: int) -> NDArray[np.uint8]:
    """Convert an image of any mode to pixels (height, width, channels), strip by strip."""
    if image.mode == "I":  # signed, or of 32 bits
        raise ImageError("E_DECODE", "it holds numbers of no stated range", "save it with 8 or 16 bits per sample")
    width, height = image.size
    pixels = np.empty((height, width, channels), np.uint8)
    rows = max(1, STRIP_PIXELS // width)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        colours, opaque = _strip(image.crop((0, top, width, bottom)), grey_bits)
        pixels[top:bottom, :, :3] = colours
        pixels[top:bottom, :, 3:] = opaque
    return pixels


def _strip(image: Image.Image, grey_bits: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | int]:
    """Colours on white, (height, width, 3 or 1), and their opacity, (height, width, 1) or one number for all."""
    if image.mode.startswith("I;16"):
        values = np.asarray(image)[:, :, None]  # uint16
        grey = (values >> (grey_bits - 8)).clip(max=WHITE).astype(np.uint8)
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
