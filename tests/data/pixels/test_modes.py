"""The mode of an image file is read from its header, in every format and as Pillow understands the file."""

import struct
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.ImageCms import ImageCmsProfile, createProfile

from unpad.data.pixels.decode import decode, probe

COLOURS = np.random.default_rng(0).integers(0, 255, (9, 7, 4)).astype(np.uint8)
RGB, RGBA = Image.fromarray(COLOURS[..., :3]), Image.fromarray(COLOURS)
DEEP = Image.fromarray((np.arange(63).reshape(9, 7) * 1000).astype(np.uint16))
GREY, PALETTE = RGB.convert("L"), RGB.quantize(16)


def saved(image: Image.Image, name: str, **options: Any) -> bytes:
    out = BytesIO()
    image.save(out, name, **options)
    return out.getvalue()


FILES = {
    "png grey": (saved(GREY, "PNG"), "grey"),
    "png bits": (saved(RGB.convert("1"), "PNG"), "grey"),
    "png grey alpha": (saved(RGBA.convert("LA"), "PNG"), "grey with alpha"),
    "png grey transparent": (saved(GREY, "PNG", transparency=3), "grey with alpha"),
    "png 16": (saved(DEEP, "PNG"), "grey of 16 bits"),
    "png colour": (saved(RGB, "PNG"), "colour"),
    "png alpha": (saved(RGBA, "PNG"), "colour with alpha"),
    "png palette": (saved(PALETTE, "PNG"), "palette"),
    "png palette alpha": (saved(PALETTE, "PNG", transparency=1), "palette with alpha"),
    "jpeg colour": (saved(RGB, "JPEG"), "colour"),
    "jpeg grey": (saved(GREY, "JPEG", progressive=True), "grey"),
    "jpeg cmyk": (saved(RGB.convert("CMYK"), "JPEG"), "CMYK"),
    "gif": (saved(PALETTE, "GIF"), "palette"),
    "gif transparent": (saved(PALETTE, "GIF", transparency=1), "palette with alpha"),
    "bmp": (saved(RGB, "BMP"), "colour"),
    "bmp palette": (saved(PALETTE, "BMP"), "palette"),
    "webp": (saved(RGB, "WEBP"), "colour"),
    "webp alpha": (saved(RGBA, "WEBP"), "colour with alpha"),
    "webp lossless": (saved(RGB, "WEBP", lossless=True), "colour"),
    "webp lossless alpha": (saved(RGBA, "WEBP", lossless=True), "colour with alpha"),
    "tiff": (saved(RGB, "TIFF"), "colour"),
    "tiff grey": (saved(GREY, "TIFF"), "grey"),
    "tiff alpha": (saved(RGBA, "TIFF"), "colour with alpha"),
    "tiff 16": (saved(DEEP, "TIFF"), "grey of 16 bits"),
    "tiff palette": (saved(PALETTE, "TIFF"), "palette"),
    "tiff cmyk": (saved(RGB.convert("CMYK"), "TIFF"), "CMYK"),
}


@pytest.mark.promise("llm.your-data")
@pytest.mark.parametrize("name", FILES)
def test_the_mode_of_a_file_is_that_of_its_pixels(name):
    data, mode = FILES[name]
    assert decode(data).mode == probe(data).mode == mode
    image = Image.open(BytesIO(data))
    assert image.has_transparency_data == ("alpha" in mode)
    assert (image.mode == "P") == ("palette" in mode)
    assert image.mode.startswith("I;16") == ("16 bits" in mode)


def test_a_bitmap_with_a_mask_of_alpha_has_alpha():
    masks = (0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    header = struct.pack("<IiiHHIIiiII4I", 56, 7, 9, 1, 32, 3, 252, 0, 0, 0, 0, *masks)
    data = b"BM" + struct.pack("<IHHI", 70 + 252, 0, 0, 70) + header + COLOURS.tobytes()
    assert Image.open(BytesIO(data)).mode == "RGBA"
    assert probe(data).mode == "colour with alpha"
    assert probe(data[:66] + bytes(4) + data[70:]).mode == "colour"


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize(("profile", "notes"), [("sRGB", ()), ("other", ("W_PROFILE",)), ("", ())])
def test_a_profile_other_than_srgb_is_noted_and_moves_no_pixel(name: str, profile: str, notes: tuple[str, ...]) -> None:
    packed = ImageCmsProfile(createProfile("sRGB")).tobytes()
    options = {"lossless": True} if name == "WEBP" else {}
    profiles = {"sRGB": packed, "other": packed.replace(b"s\0R\0G\0B", b"D\0P\0-\x003"), "": b""}
    data = saved(RGB, name, **options, **({"icc_profile": profiles[profile]} if profile else {}))
    assert (probe(data).notes, decode(data).notes) == (notes, notes)
    assert np.array_equal(decode(data).pixels, decode(saved(RGB, name, **options)).pixels)
