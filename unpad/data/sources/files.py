"""Files of a recipe's sources: their paths on this machine, in natural order, and their formats."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Literal

from unpad.data.sources.example import Unread
from unpad.errors import SourceError
from unpad.recipes.data import PACKAGED, ChatSource, DataSettings, QuestionSource, Source
from unpad.storage.paths import RENAME, is_special, is_utf8
from unpad.storage.remote import address_of, data_path, fetched
from unpad.terminal.printing import escaped

PACKAGE = Path(__file__).parents[2]
OURS, DRAWN, SIMULATED = PACKAGED


def resolve_path(data: DataSettings, path: str) -> Path:
    """Resolve a path of the recipe.

    `unpad:` starts inside the package. `drawn:shapes.jsonl` is a small set of pictures and `simulated:patients` one of
    patients; both are drawn at the first use.

    Raises:
        RecipeError: it is no path of this machine, or starts in the home of a user whom the machine does not have.
    """
    # Imported where they are drawn: the libraries for pictures and tables take long to load.
    if path.startswith((DRAWN, SIMULATED)):
        from unpad.examples.drawn import drawn_folder, simulated_folder

        folder = drawn_folder() if path.startswith(DRAWN) else simulated_folder()
        return folder / path.partition(":")[2]
    if path.startswith(OURS):
        return PACKAGE / path.removeprefix(OURS)
    expanded = data_path(path)
    if expanded.is_absolute() or data.root is None:
        return expanded
    return data_path(str(Path(data.root) / expanded))


Format = Literal["text", "json", "jsonl", "parquet", "csv"]

FORMATS: dict[str, Format] = {
    ".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "text", ".md": "text", ".parquet": "parquet",
    ".csv": "csv", ".tsv": "csv",
}  # fmt: skip
TABLE_SUFFIXES = (".parquet", ".csv", ".tsv")
PATH_FIX = "check the path; relative paths start at data.root, or else at the working directory"


@dataclass(frozen=True, slots=True)
class Annotations:
    """The file of annotations that belongs to one of questions, the folder of their images, and their part."""

    path: Path
    images: Path
    part: str | None


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source.

    Args:
        field: the field or column that holds the text, or None for the default of the data kind.
        weight: the source's epochs per epoch of the run.
        source: index of the source in the recipe's list.
        by_ending: whether the format is that of the name's ending, rather than of the recipe.
        annotations: of questions as VQAv2 has them; None for other files.
        named: path of the source, as messages name it; "" is that of the file.
        prompt, reply: fields of the request and of the reply; None for the usual names.
        ignore: fields that are left out knowingly; unread: those that nobody read, once its rows were.
    """

    path: Path
    format: Format
    field: str | None
    weight: float
    source: int
    by_ending: bool = False
    annotations: Annotations | None = None
    named: str = ""
    prompt: str | None = None
    reply: str | None = None
    ignore: tuple[str, ...] = ()
    unread: Unread = dataclass_field(default_factory=Unread, compare=False)

    @property
    def fields(self) -> dict[str, str]:
        """Fields that the source names, by what they are."""
        named = {"field": self.field, "prompt": self.prompt, "reply": self.reply}
        return {what: name for what, name in named.items() if name is not None}

    @property
    def paths(self) -> tuple[Path, ...]:
        """The file, and that of its annotations."""
        return (self.path,) if self.annotations is None else (self.path, self.annotations.path)


def expand(sources: list[Source], resolve: Callable[[str], Path]) -> list[SourceFile]:
    """List the files of `sources`: a file, a folder (recursive) or a glob each, in natural order within a source.

    Raises:
        SourceError: a path does not exist, or has no usable file.
    """
    return [
        SourceFile(
            path,
            FORMATS.get(path.suffix.lower(), "text") if source.format == "auto" else source.format,
            source.field,
            source.weight,
            index,
            source.format == "auto",
            _annotations(source, resolve),
            str(resolve(source.path)),
            *((source.prompt, source.reply) if isinstance(source, ChatSource) else (None, None)),
            tuple(source.ignore),
        )
        for index, source in enumerate(sources)
        for path in list_paths(resolve(source.path))
    ]


def _annotations(source: Source, resolve: Callable[[str], Path]) -> Annotations | None:
    if not isinstance(source, QuestionSource) or source.annotations is None or source.images is None:
        return None
    files, images = list_paths(resolve(source.annotations)), resolve(source.images)
    if len(files) > 1:
        what = f"annotations are one file, and this names {len(files):,}"
        raise SourceError(what, where=str(files[0].parent), fix="give every file of questions its own annotations")
    if not images.is_dir():
        raise SourceError("there is no such folder of images", where=str(images.absolute()), fix=PATH_FIX)
    return Annotations(files[0], images, source.part)


def unreadable(error: OSError, where: str) -> SourceError:
    """The error of a file that the system does not read: missing, not permitted, no file, or a fault of the disk."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return SourceError("there is no such file", where=where, fix=PATH_FIX)
    if isinstance(error, IsADirectoryError):
        return SourceError("it is a folder, not a file", where=where, fix="name a file")
    fix = "check the file's permissions" if isinstance(error, PermissionError) else "check the disk, and copy the file"
    return SourceError(f"cannot be read: {error.strerror or error}", where=where, fix=fix)


def refuse_special(path: Path, where: str) -> None:
    """Refuse a pipe, a device or a socket, which reading might never end.

    Raises:
        SourceError: it is one.
    """
    if is_special(path):
        raise SourceError("it is a pipe or a device, not a file", where=where, fix="name a file")


def natural_key(path: Path) -> list[tuple[list[str | int], str]]:
    """Sort key that compares numbers in names as numbers, folder by folder: p2 before p10."""
    return [
        ([int(s) if s.isdecimal() else s.casefold() for s in re.split(r"(\d+)", name)], name) for name in path.parts
    ]


def list_paths(path: Path, suffixes: Collection[str] = tuple(FORMATS)) -> list[Path]:
    """List the files of a path: a file, the files of a folder with one of these suffixes, or the matches of a pattern.

    Raises:
        SourceError: there is none, or the name of one is not UTF-8.
    """
    try:
        paths = _list_paths(path, suffixes)
    except OSError as error:  # a folder that may not be entered, or a name too long for its file system
        raise unreadable(error, str(path.absolute())) from None
    refuse_names(paths)
    return paths


def refuse_names(paths: Iterable[Path]) -> None:
    """Refuse file names that are not UTF-8, as some zip files leave them: no file of a run could name them.

    Raises:
        SourceError: names the first.
    """
    for path in paths:
        if not is_utf8(str(path)):
            raise SourceError("E_NAME the file's name is not UTF-8", where=escaped(str(path)), fix=RENAME)


def _list_paths(path: Path, suffixes: Collection[str]) -> list[Path]:
    if path.is_file():
        return [path]
    if address := address_of(str(path)):
        return sorted(fetched(address), key=lambda file: natural_key(Path(str(file))))
    tried = path.absolute()
    refuse_system(path)
    if path.is_dir():
        inside = [p for p in path.rglob("*") if p.suffix.lower() in suffixes and p.is_file()]
        paths = [p for p in inside if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        if not paths:
            what = f"the folder holds no {', '.join('*' + suffix for suffix in suffixes)}"
            raise SourceError(what, where=str(tried), fix="put data files into it, or name another folder")
        return sorted(paths, key=natural_key)
    if glob.has_magic(str(path)):
        paths = [p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file()]
        if paths:
            return sorted(paths, key=natural_key)
        what = "no file matches the pattern"
    elif path.name == "-":
        fix = "write it to a file, and name that"
        raise SourceError("standard input is not read", where=str(path), fix=fix)
    else:
        what = "neither a file nor a folder" if path.exists() else "there is no such file or folder"
    raise SourceError(what, where=f"{tried} (working directory {Path.cwd()})", fix=PATH_FIX)


def skipped_files(path: Path, suffixes: Collection[str] = tuple(FORMATS)) -> list[tuple[Path, str]]:
    """List the files of a folder that are not read, in natural order, with the reason; hidden ones are no data."""
    if not path.is_dir():
        return []
    reason = "its ending is not one of data"
    inside = (file for file in files_below(path) if file.suffix.lower() not in suffixes)
    return [(file, reason) for file in sorted(inside, key=natural_key)]


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files at any depth; hidden files and folders, and folders that may not be entered, are skipped."""
    for here, names, inside in os.walk(folder):
        names[:] = [name for name in names if not name.startswith(".")]
        yield from (Path(here, name) for name in inside if not name.startswith("."))


def refuse_system(path: Path) -> None:
    """Refuse the whole file system, and the folders in which a system shows its own state as files.

    Raises:
        SourceError: it is one.
    """
    real = path.resolve()
    if str(real) in ("/", "/proc", "/sys", "/dev") or (len(real.parts) > 2 and real.parts[1] in ("proc", "sys")):
        fix = "name the folder of your data"
        raise SourceError("it is a folder of the system, not one of data", where=str(path), fix=fix)
