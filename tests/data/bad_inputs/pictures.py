"""I: files of pictures in folders of classes, and rows that name pictures."""

import io
import struct
import zlib

import numpy as np
from PIL import Image

from tests.data.bad_inputs.case import Bad, row

PICTURE = Image.fromarray(np.random.default_rng(1).integers(0, 255, (24, 30, 3), dtype=np.uint8))


def encoded(picture: Image.Image, form: str, **options: object) -> bytes:
    content = io.BytesIO()
    picture.save(content, form, **options)
    return content.getvalue()


PNG, JPEG = encoded(PICTURE, "PNG"), encoded(PICTURE, "JPEG")


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def blank(width: int, height: int) -> bytes:
    """A PNG of one bit per pixel, small however many pixels it has."""
    body = zlib.compress(b"\0" * ((width // 8 + 1) * height), 9)
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


def in_class(kind: str, content: bytes, code: str = "", name: str = "odd.png") -> Bad:
    """A file in the folder of a class, beside two good ones."""
    files = {"set/circle/a.png": PNG, "set/square/b.png": PNG, f"set/circle/{name}": content}
    place = f"set/circle/{name}" if code else ""
    return Bad(kind, files, "images", code, place, 2 if code else 3, 1 if code else 0, 3 if code else 0, folder="set")


def named(kind: str, code: str, **fields: object) -> Bad:
    """A row of a list of pictures between two good ones."""
    good = {"image": "a.png", "label": "c"}
    files = {"a.jsonl": row(**good) + row(**{**good, **fields}) + row(**good), "a.png": PNG}
    return Bad(kind, files, "images", code, "a.jsonl:2", 2, 1)


turned = Image.Exif()
turned[274] = 6
PICTURES = [
    in_class("I-01", b"", "E_EMPTY"),
    in_class("I-02", JPEG[:-30], "E_TRUNCATED", "odd.jpg"),
    in_class("I-03", PNG[:-20], "E_TRUNCATED"),
    in_class("I-04", b"<!doctype html><html>", "E_FORMAT", "odd.jpg"),
    in_class("I-05", encoded(PICTURE.convert("CMYK"), "JPEG"), name="odd.jpg"),
    in_class("I-06", encoded(PICTURE.convert("P"), "PNG", transparency=0)),
    in_class("I-07", encoded(Image.fromarray(np.full((20, 20), 30000, np.uint16)), "PNG")),
    in_class("I-08", encoded(PICTURE.convert("1"), "PNG")),
    in_class("I-09", encoded(PICTURE.convert("LA"), "PNG")),
    in_class("I-10", encoded(PICTURE, "GIF", save_all=True, append_images=[PICTURE.rotate(90)]), name="odd.gif"),
    in_class("I-11", encoded(PICTURE, "JPEG", exif=turned), name="odd.jpg"),
    in_class("I-12", blank(9000, 9000), "E_PIXELS"),
    in_class("I-13", encoded(PICTURE.resize((1, 1)), "PNG")),
    in_class("I-13 high", encoded(PICTURE.resize((1, 20000)), "PNG"), "E_PIXELS"),
    in_class("I-14 svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "E_FORMAT"),
    in_class("I-14 heic", b"\0\0\0\x18ftypheic", "E_FORMAT"),
    in_class("I-14 fits", b"SIMPLE  =  T" + b" " * 100, "E_FORMAT"),
    in_class("I-14 pdf", b"%PDF-1.4", "E_FORMAT"),
    in_class("I-14 eps", b"%!PS-Adobe", "E_FORMAT"),
    in_class("I-15", PNG[:33] + chunk(b"iCCP", b"p\0\0" + bytes(17 << 20)) + PNG[33:], "E_METADATA"),
    in_class("I-16", JPEG),
    named("I-17", "E_MISSING", image="gone.png"),
    named("I-18", "E_CHANGED", sha256="0" * 64),
    named("I-18 size", "E_CHANGED", width=7),
    in_class("I-19", JPEG + b"PK\x03\x04" + b"x" * 100, name="odd.jpg"),
    in_class("I-20", flipped(PNG, 80), "E_DECODE"),
]
