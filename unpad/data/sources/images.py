"""Labelled images: a folder with one sub-folder per class, perhaps inside train/ and val/, a manifest in JSON lines, or
parquet with the bytes inside.

Listing reads every file, checks that it is whole and hashes it, but decodes no pixels.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from itertools import islice
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING

from unpad.data.pixels.decode import ImageInfo, probe
from unpad.data.pixels.formats import MAX_BYTES, ImageError, sniff
from unpad.data.sources import files
from unpad.data.sources.example import SPLIT_NAMES, BadRow, SplitName
from unpad.data.sources.faults import RowFault, excerpt, type_name
from unpad.data.sources.fields import PICTURES
from unpad.data.sources.files import SourceFile, natural_key, refuse_names
from unpad.data.sources.parquet import GrowthError, ParquetRows, column_named, open_parquet
from unpad.data.sources.reader import collect, examples
from unpad.data.sources.row import Row
from unpad.errors import SourceError
from unpad.recipes.data import DataSettings, Source

if TYPE_CHECKING:
    import pyarrow as pa

FIELDS = ("label", "split", "group", "width", "height", "sha256")
SUFFIXES = PICTURES
LITTER = ("thumbs.db", "desktop.ini")  # what Windows writes into folders of pictures
WINDOW = 128  # images read at a time


@dataclass(frozen=True, slots=True)
class ImageExample:
    """One labelled image, as its header describes it.

    Args:
        where: the image file in a folder, otherwise "file:row" of the manifest or parquet file, rows from 1.
        split: part that the row declares, or None to let the seed decide; rows of "test" are only evaluated.
        width: pixels after EXIF orientation; `height` likewise.
        notes: keys of `formats.NOTES`.
        sha256: of the image's bytes, in hex.
        path: the image file, or the parquet file that holds it.
        row: (row group, row in that group, column) of a parquet file.
        group: that the row declares, or "".
        mode: mode of the file, as in `ImageInfo`.
    """

    where: str
    label: str
    split: SplitName | None
    width: int
    height: int
    notes: tuple[str, ...]
    sha256: str
    path: Path
    row: tuple[int, int, str] | None = None
    group: str = ""
    mode: str = ""


def content_key(example: ImageExample) -> int:
    """64-bit hash of an image's bytes for `split.assign`, so that copies of a picture share a side."""
    return int(example.sha256[:16], 16)


def expand(sources: list[Source], resolve: Callable[[str], Path]) -> list[SourceFile]:
    """List the files of `sources`: a folder of classes is one entry; files and globs are as in `files.expand`.

    Raises:
        SourceError: a path does not exist, or a folder has no sub-folders.
    """
    listed = []
    for index, source in enumerate(sources):
        path = resolve(source.path)
        if not path.is_dir():
            listed += [replace(file, source=index) for file in files.expand([source], resolve)]
            continue
        if not any(inside.is_dir() and not inside.name.startswith(".") for inside in path.iterdir()):
            what = "the folder holds no sub-folder, which would be a class"
            fix = "put the images of a class into a folder of its name, or name a manifest (.jsonl, .csv) or parquet"
            raise SourceError(what, where=str(path.absolute()), fix=fix)
        listed.append(SourceFile(path, "text", source.field, source.weight, index, named=str(path)))
    return listed


def read(file: SourceFile, data: DataSettings) -> Iterator[ImageExample | BadRow]:
    """Yield each image of a folder, manifest or parquet file in order, or its bad row.

    A manifest has the fields `image` (or the source's own), a path that stays within the manifest's folder, `label`,
    and may have `split`, `group`, and `width`, `height` and `sha256`, which must agree with the file. Columns of
    parquet are the same, with bytes or Hugging Face's {bytes, path} for `image`.

    Raises:
        OSError: the folder, manifest or parquet file cannot be read.
    """
    rows_to_examine = _in_folder(file.path) if file.path.is_dir() else _in_table(file, data)
    with ThreadPoolExecutor() as pool:
        while window := list(islice(rows_to_examine, WINDOW)):
            yield from pool.map(examine, window)


def read_all(file: SourceFile, data: DataSettings) -> tuple[list[ImageExample], list[BadRow]]:
    """Read one source to the end; every image is in exactly one of the two lists.

    Raises:
        SourceError: it cannot be opened or read.
    """
    return collect(read(file, data), file.path)


def read_bytes(example: ImageExample) -> bytes:
    """Read the bytes of a listed image again.

    Raises:
        ImageError: E_MISSING, or E_CHANGED if they differ from the listed ones.
    """
    if example.row is None:
        content = file_bytes(example.path)
    else:
        import pyarrow as pa

        group, row, column = example.row
        try:
            content = _image_of(_column(example.path, group, column)[row].as_py())
        except (pa.ArrowException, GrowthError, OSError, LookupError, RowFault) as error:
            what = f"the image cannot be read: {excerpt(str(error))}"
            raise ImageError("E_MISSING", what, "check the parquet file", example.where) from None
    if sha256(content).hexdigest() != example.sha256:
        fix = "start again, so that the images are listed again"
        raise ImageError("E_CHANGED", "the image is not the one that was listed", fix, example.where)
    return content


@lru_cache(maxsize=2)
def _column(path: Path, group: int, name: str) -> pa.ChunkedArray:
    import pyarrow as pa

    with open_parquet(path) as table:
        batches = ParquetRows(path, table, [column_named(table, name)]).batches(group, WINDOW)
        return pa.chunked_array([batch.column(0) for batch in batches])


# --------------------------------------------------------------------------- one image


@dataclass(frozen=True, slots=True)
class ImageRow:
    """A row with an image that is still to be examined.

    Args:
        root: the real folder that must contain the image.
        declared: width, height and sha256 of the row; None for each that is missing.
        content: the image's bytes, if they are in the row.
        group: that the row declares, or "".
    """

    where: str
    label: str
    path: Path
    root: str
    split: SplitName | None = None
    declared: tuple[int | None, int | None, str | None] = (None, None, None)
    row: tuple[int, int, str] | None = None
    content: bytes | None = None
    group: str = ""


def examine(row: ImageRow | BadRow) -> ImageExample | BadRow:
    if isinstance(row, BadRow):
        return row
    try:
        content = contained_bytes(row.path, row.root) if row.content is None else row.content
        info, digest = probe(content), sha256(content).hexdigest()
        _check_unchanged(row.declared, info, digest)
    except (ImageError, RowFault) as error:
        return BadRow(row.where, error.code, error.what, error.fix, excerpt(str(row.path)))
    size = info.width, info.height
    return ImageExample(
        row.where, row.label, row.split, *size, info.notes, digest, row.path, row.row, row.group, info.mode
    )


def contained_bytes(path: Path, root: str) -> bytes:
    """Contents of an image file that a folder contains, also by links.

    Args:
        root: its real path.

    Raises:
        ImageError: as `file_bytes`.
        RowFault: the folder does not contain it.
    """
    real = os.path.realpath(path)
    if not Path(real).is_relative_to(root):
        raise RowFault("E_PATH", f"the link leads out of {root}", "copy the image into the folder")
    return file_bytes(Path(real))


def file_bytes(path: Path) -> bytes:
    """Contents of an image file.

    Raises:
        ImageError: it cannot be read, is no file but a pipe or a device, or is larger than any image that is decoded.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
            raise ImageError("E_MISSING", "it is not a file", "name an image file")
        if status.st_size > MAX_BYTES:
            raise ImageError("E_PIXELS", f"the file has {status.st_size:,} bytes, more than {MAX_BYTES:,}")
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ImageError("E_MISSING", f"the image cannot be read: {reason}", "check the path", str(path)) from None


def _check_unchanged(declared: tuple[int | None, int | None, str | None], info: ImageInfo, digest: str) -> None:
    width, height, known = declared
    if known is not None and known.lower() != digest:
        raise RowFault("E_CHANGED", f"the image's sha256 is {digest}, the row says {known}", "write the row again")
    if width not in (None, info.width) or height not in (None, info.height):
        what = f"the image has {info.width} x {info.height} pixels as EXIF turns it, the row says {width} x {height}"
        raise RowFault("E_CHANGED", what, "write the row again")


# --------------------------------------------------------------------------- folders


def _in_folder(root: Path) -> Iterator[ImageRow | BadRow]:
    """Yield every visible file below a sub-folder, which is its class; images beside the sub-folders have none.

    Sub-folders named train, val and the like are parts of a split, with the classes inside.
    """
    real = os.path.realpath(root)
    paths = sorted(_visible(root), key=lambda path: natural_key(path.relative_to(root)))
    refuse_names(paths)
    by_split = _is_split(root, [path.relative_to(root).parts for path in paths])
    for path in paths:
        parts = path.relative_to(root).parts
        split = SPLIT_NAMES[parts[0].lower()] if by_split and len(parts) > 1 else None
        label, *inside = parts[1:] if split is not None else parts
        if inside or path.is_dir():
            yield ImageRow(str(path), label, path, real, split)
        elif is_image(path):
            what = "the image stands beside the folders of the classes"
            yield BadRow(str(path), "E_LABEL", what, "move it into the folder of its class")


def _is_split(root: Path, parts: list[tuple[str, ...]]) -> bool:
    """Decide whether the sub-folders are parts of a split rather than classes.

    Raises:
        SourceError: two or more are, and others are not.
    """
    names = {path[0] for path in parts if len(path) > 1}
    sides = sorted(name for name in names if name.lower() in SPLIT_NAMES)
    nested = {path[0] for path in parts if len(path) > 2}
    others = sorted(names - set(sides))
    if len(nested & set(sides)) > 1 and others:
        what = f"the folders {', '.join(sides)} are parts of a split, and {', '.join(others[:3])} beside them is not"
        raise SourceError(what, where=str(root), fix="keep either classes or parts of a split in the folder")
    return bool(sides) and not others


def _visible(root: Path) -> Iterator[Path]:
    """Yield files at any depth, and links to folders without following them; hidden files and folders are skipped."""
    for folder, names, inside in os.walk(root, onerror=_fail):
        names[:] = [name for name in names if not name.startswith(".")]
        links = [name for name in names if os.path.islink(os.path.join(folder, name))]
        for name in (*inside, *links):
            if not name.startswith(".") and name.lower() not in LITTER:
                yield Path(folder, name)


def _fail(error: OSError) -> None:
    raise error


def is_image(path: Path) -> bool:
    """Check that a file begins like an image."""
    if not path.is_file():
        return False
    with path.open("rb") as handle:
        return sniff(handle.read(18)) is not None


# --------------------------------------------------------------------------- manifests and parquet


def _in_table(file: SourceFile, data: DataSettings) -> Iterator[ImageRow | BadRow]:
    name, folder = file.field or "image", file.path.parent
    root = os.path.realpath(folder)

    def convert(row: Row) -> ImageRow:
        if row.place is None:
            path, inside, content, place = folder / checked_path(row.text(name)), root, None, None
        else:
            path, inside, content, place = file.path, "", _image_of(row[name]), (*row.place, name)
        declared = _declared(row, in_words=file.format == "csv")
        return ImageRow(row.where, _label(row), path, inside, row.split(), declared, place, content, row.group())

    return examples(file, data, (name,), convert, "images", FIELDS)


def _image_of(value: object) -> bytes:
    """Return the bytes of a parquet cell: bytes, or an object with them as `bytes`."""
    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes):
        raise RowFault("E_MISSING", "the row holds no bytes of an image", "write the images into the parquet file")
    return content


# --------------------------------------------------------------------------- fields of a row


def checked_path(text: str) -> str:
    """Refuse a path that is an address, absolute, or leaves the folder; links are checked when the file is opened."""
    fix = "write a path that starts at the manifest's folder and stays in it"
    if "://" in text or text.startswith(("file:", "data:")):
        raise RowFault("E_PATH", "the path is an address; only files are read", fix)
    windows = PureWindowsPath(text)  # Windows takes / and \ for separators
    if PurePosixPath(text).is_absolute() or windows.drive or windows.root:
        raise RowFault("E_PATH", "the path is absolute", fix)
    if ".." in windows.parts:
        raise RowFault("E_PATH", "the path climbs out with ..", fix)
    return text


def _label(row: Row) -> str:
    label = row.get("label")
    if type(label) is int:
        return str(label)
    if type(label) is str and label.strip():
        return label
    what = "is blank" if type(label) is str else f"is {type_name(label)}" if "label" in row else "is missing"
    fix = "add the label or remove the row; `unpad predict` needs none"
    raise RowFault("E_LABEL", f'"label" {what}, expected a name or a whole number', fix)


def _declared(row: Row, in_words: bool = False) -> tuple[int | None, int | None, str | None]:
    """Read width, height and sha256 of a row; `in_words` if its numbers are texts, as in CSV."""
    width, height, sha256 = row.get("width"), row.get("height"), row.get("sha256")
    if in_words:
        width, height = (int(side) if side and side.isdecimal() else side for side in (width, height))
    for name, value, kind in (("width", width, int), ("height", height, int), ("sha256", sha256, str)):
        if value is not None and type(value) is not kind:
            expected = "a whole number" if kind is int else "a string"
            raise RowFault("E_TYPE", f'"{name}" is {type_name(value)}, expected {expected}')
    return width, height, sha256


_SCALE = re.compile(r"@\d(\.\d)?x$")
_SIZED = re.compile(r"(.*?[^\d])(\d{1,4})(?:x(\d{1,4}))?")  # name_16, name-32x32
_FOLDER = re.compile(r"\d{1,4}(x\d{1,4})?(@\dx?)?")  # 16, 32x32, 16x16@2x


def group_names(examples: Sequence[ImageExample]) -> list[str]:
    """Group of every picture: the one that its row declares, or the name of its file if it occurs at several sizes.

    A number at the end of a name that is the picture's own width or height is no part of the name, nor is "@2x":
    16/x.png, 32/x.png, x_64.png and x@2x.png are one thing. Names of numbers alone, such as 0001.jpg, count as names
    only in folders that are named after sizes. Names that end in a number, as cameras write them, mean the same thing
    only within a class, or within a folder of pictures without classes.

    Returns:
        One name per picture, "" for a picture that is in no group.
    """
    keys = [None if example.group or example.row is not None else _key(example) for example in examples]
    sizes: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for example, key in zip(examples, keys, strict=True):
        if key is not None:
            sizes.setdefault(key, set()).add((example.width, example.height))
    return [
        example.group or (f"{key[0]}/{key[1]}" if key is not None and len(sizes[key]) > 1 else "")
        for example, key in zip(examples, keys, strict=True)
    ]


def _key(example: ImageExample) -> tuple[str, str] | None:
    """Scope and name of the thing that a file shows; None for a name that is a mere number."""
    name = _SCALE.sub("", example.path.stem)
    sized = _SIZED.fullmatch(name)
    if sized is not None and {int(number) for number in sized.groups()[1:] if number} & {example.width, example.height}:
        name = sized[1].rstrip("-_ .@") or name
    folder = example.path.parent.name
    if not any(letter.isalpha() for letter in name) and _FOLDER.fullmatch(folder) is None:
        return None
    return (example.label or str(example.path.parent)) if name[-1].isdigit() else "", name
