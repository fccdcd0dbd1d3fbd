import json
import os
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from unpad.data.check import check
from unpad.data.pixels.decode import decode
from unpad.data.pixels.formats import ImageError
from unpad.data.sources.example import BadRow
from unpad.data.sources.images import ImageExample, content_key, expand, read, read_bytes
from unpad.data.sources.split import assign
from unpad.errors import SourceError
from unpad.recipes.data import DataSettings, Source


def png(width: int = 5, height: int = 3, colour: int = 7) -> bytes:
    buffer = BytesIO()
    Image.new("RGB", (width, height), (colour, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def put(path: Path, content: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content or png())
    return path


def items(path: Path, field: str | None = None) -> list[ImageExample | BadRow]:
    (file,) = expand([Source(path=str(path), field=field)], Path)
    return list(read(file, DataSettings()))


def listed(path: Path, field: str | None = None) -> list[tuple[str, str]]:
    """(place, label) of every image, (place, code) of every bad row; places without the path of the source."""
    return [
        (item.where.removeprefix(str(path)), item.label if isinstance(item, ImageExample) else item.code)
        for item in items(path, field)
    ]


def manifest(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "images.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def only(path: Path) -> ImageExample:
    (item,) = items(path)
    return item


# --------------------------------------------------------------------------- folders


@pytest.mark.promise("images.classes")
def test_each_sub_folder_is_a_class_in_natural_order(tmp_path: Path) -> None:
    for name in ("Dog/10.jpg", "Dog/9.jpg", "Cat/1.png", "Cat/deep/er/2.webp", "Cat/noextension"):
        put(tmp_path / name)
    for name in (".hidden/x.png", "Cat/.x.png", "Cat/.git/x.png", "Cat/Thumbs.db", "README.md", ".DS_Store"):
        put(tmp_path / name, b"no image")
    assert listed(tmp_path) == [
        ("/Cat/1.png", "Cat"),
        ("/Cat/deep/er/2.webp", "Cat"),
        ("/Cat/noextension", "Cat"),
        ("/Dog/9.jpg", "Dog"),
        ("/Dog/10.jpg", "Dog"),
    ]


@pytest.mark.promise("images.classes")
def test_what_is_no_image_in_a_class_is_named(tmp_path: Path) -> None:
    put(tmp_path / "Cat/a.png", b"<html>")
    put(tmp_path / "Cat/b.png", png()[:-20])
    (tmp_path / "Cat/c.png").touch()
    put(tmp_path / "lost.png")
    os.mkfifo(tmp_path / "Cat/d.png")
    assert listed(tmp_path) == [
        ("/Cat/a.png", "E_FORMAT"),
        ("/Cat/b.png", "E_TRUNCATED"),
        ("/Cat/c.png", "E_EMPTY"),
        ("/Cat/d.png", "E_MISSING"),
        ("/lost.png", "E_LABEL"),
    ]


def test_links_stay_inside_or_are_bad_rows(tmp_path: Path) -> None:
    root = tmp_path / "data"
    outside = put(tmp_path / "outside/x.png")
    inside = put(root / "Cat/a.png")
    (root / "Cat/b.png").symlink_to(inside)
    (root / "Cat/c.png").symlink_to(outside)
    (root / "Cat/d").symlink_to(outside.parent)
    (root / "Dog").symlink_to(outside.parent)
    (root / "Cat/loop.png").symlink_to("loop.png")
    assert listed(root) == [
        ("/Cat/a.png", "Cat"),
        ("/Cat/b.png", "Cat"),
        ("/Cat/c.png", "E_PATH"),
        ("/Cat/d", "E_PATH"),
        ("/Cat/loop.png", "E_MISSING"),
        ("/Dog", "E_PATH"),
    ]


def test_a_folder_without_classes_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "a.png")
    with pytest.raises(SourceError, match="sub-folder"):
        expand([Source(path=str(tmp_path))], Path)


# --------------------------------------------------------------------------- manifests


@pytest.mark.promise("images.classes")
def test_a_manifest_gives_labels_splits_and_sizes(tmp_path: Path) -> None:
    put(tmp_path / "images/a.png")
    put(tmp_path / "images/b.png", png(2, 9, 8))
    path = manifest(
        tmp_path,
        {"image": "images/a.png", "label": "cat", "split": "val", "width": 5, "height": 3},
        {"image": "images/./b.png", "label": 3, "split": "train", "sha256": sha256(png(2, 9, 8)).hexdigest().upper()},
        {"image": "images/a.png", "label": "猫", "split": "test"},
        {"image": "images/a.png", "label": "dog", "split": "holdout", "width": None},
        {"image": "images/a.png", "label": "dog"},
    )
    found = [item for item in items(path) if isinstance(item, ImageExample)]
    assert [item.where for item in found] == [f"{path}:{line}" for line in range(1, 6)]
    assert [item.label for item in found] == ["cat", "3", "猫", "dog", "dog"]
    assert [item.split for item in found] == ["holdout", "train", "test", "holdout", None]
    assert [(item.width, item.height) for item in found] == [(5, 3), (2, 9), (5, 3), (5, 3), (5, 3)]
    assert read_bytes(found[1]) == png(2, 9, 8)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"image": "../a.png"}, "E_PATH"),
        ({"image": "images/../../a.png"}, "E_PATH"),
        ({"image": "images\\..\\..\\a.png"}, "E_PATH"),
        ({"image": "\\\\server\\a.png"}, "E_PATH"),
        ({"image": "data:image/png;base64,AAAA"}, "E_PATH"),
        ({"image": "link.png"}, "E_PATH"),
        ({"image": "linked/a.png"}, "E_PATH"),
        ({"image": "a\0.png"}, "E_NUL"),
        ({"image": "images"}, "E_MISSING"),
        ({"image": " "}, "E_EMPTY"),
        ({"label": None}, "E_LABEL"),
        ({"label": " "}, "E_LABEL"),
        ({"label": True}, "E_LABEL"),
        ({"split": "eval"}, "E_SPLIT"),
        ({"width": 6}, "E_CHANGED"),
        ({"width": "5"}, "E_TYPE"),
        ({"sha256": 7}, "E_TYPE"),
    ],
)
def test_a_row_that_is_no_image_is_named(tmp_path: Path, fields: dict[str, Any], code: str) -> None:
    folder = tmp_path / "data"
    put(folder / "images/a.png")
    put(tmp_path / "a.png")
    (folder / "link.png").symlink_to(tmp_path / "a.png")
    (folder / "linked").symlink_to(tmp_path)
    path = manifest(folder, {"image": "images/a.png", "label": "x"}, {"image": "images/a.png", "label": "x", **fields})
    assert listed(path) == [(":1", "x"), (":2", code)]


def test_sizes_are_those_after_exif_turns_the_image(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = 6
    Image.new("RGB", (40, 30)).save(tmp_path / "a.jpg", exif=exif)
    found = only(manifest(tmp_path, {"image": "a.jpg", "label": "x", "width": 30, "height": 40}))
    assert (found.width, found.height) == (30, 40)
    assert decode(read_bytes(found)).pixels.shape == (40, 30, 3)


# --------------------------------------------------------------------------- parquet


@pytest.mark.promise("images.classes")
def test_parquet_holds_bytes_or_hugging_faces_struct(tmp_path: Path) -> None:
    pictures = [png(width, 3) for width in range(1, 8)]
    labels = [0, 1, 0, 1, 0, 1, 0]
    plain, nested = tmp_path / "plain.parquet", tmp_path / "nested.parquet"
    pq.write_table(pa.table({"image": pictures, "label": labels}), plain, row_group_size=3)
    structs = [{"bytes": content, "path": f"{n}.png"} for n, content in enumerate(pictures)]
    pq.write_table(pa.table({"picture": structs, "label": ["c", *"abcabc"], "extra": labels}), nested, row_group_size=2)
    for path, field in ((plain, None), (nested, "picture")):
        found = [item for item in items(path, field) if isinstance(item, ImageExample)]
        assert [item.where for item in found] == [f"{path}:{row}" for row in range(1, 8)]
        assert [item.width for item in found] == list(range(1, 8))
        assert [read_bytes(item) for item in reversed(found)] == pictures[::-1]
    assert check(nested, "images", "picture").files[0].unread.shares == {"extra": 1.0}


# --------------------------------------------------------------------------- what was listed


def test_an_image_changed_after_listing_is_not_read(tmp_path: Path) -> None:
    image = put(tmp_path / "a.png")
    found = only(manifest(tmp_path, {"image": "a.png", "label": "x"}))
    for change, code in ((lambda: put(image, png(6)), "E_CHANGED"), (image.unlink, "E_MISSING")):
        change()
        with pytest.raises(ImageError) as caught:
            read_bytes(found)
        assert caught.value.code == code
        assert caught.value.where


def test_copies_of_a_picture_share_a_side(tmp_path: Path) -> None:
    for number in range(40):
        put(tmp_path / f"Cat/{number}.png", png(colour=number % 20))
    found = [item for item in items(tmp_path) if isinstance(item, ImageExample)]
    keys = np.array([content_key(item) for item in found], np.uint64)
    side = assign(keys, np.full(40, -1, np.int8), 0.3, seed=0)
    assert 0 < side.sum() < 40
    for key in np.unique(keys):
        assert np.unique(side[keys == key]).size == 1
    assert np.unique(keys).size == 20
