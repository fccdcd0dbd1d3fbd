"""Files of a source of events, the names of their columns, and the splits that they declare."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from unpad.data.histories.columns import Faults
from unpad.data.histories.tables import TableFile, alias, column_names, open_table
from unpad.data.sources.fields import ID_LIKE, folded
from unpad.data.sources.files import TABLE_SUFFIXES, files_below, list_paths, natural_key
from unpad.data.sources.split import WRITE_SPLIT, Split, split_number
from unpad.errors import SourceError
from unpad.recipes.data import EventSource

ID_NAMES = ("id", "subject_id")
AUTO: dict[str, dict[str, tuple[str, ...]]] = {
    "table": {"id": ID_NAMES, "time": ("time",), "code": ("code",), "value": ("value", "numeric_value")},
    "patients": {"id": (), "time": ("minute",), "code": ("variable",), "value": ("value",)},
    "meds": {"id": ("subject_id",), "time": ("time",), "code": ("code",), "value": ("numeric_value",)},
}  # fmt: skip


def find_files(source: EventSource, path: Path) -> tuple[list[TableFile], str]:
    """Find the files of a source in natural order, and its layout: table, patients or meds."""
    is_meds = (path / "data").is_dir() and ((path / "metadata").is_dir() or source.layout == "meds")
    base = path / "data" if is_meds else path
    paths = list_paths(base, TABLE_SUFFIXES)
    layout = _layout(source, paths, path)
    folder = base if base.is_dir() else None
    sides = [_side(file, folder) for file in paths]
    if layout != "patients":
        return [TableFile(file, str(file), None, side) for file, side in zip(paths, sides, strict=True)], layout
    found, numbers = [], Counter[Path]()
    for file, side in zip(paths, sides, strict=True):
        shown = f"{file.parent}[{numbers[file.parent]}]"
        found.append(TableFile(file, shown, _owner(file, shown), side))
        numbers[file.parent] += 1
    return found, layout


def looks_like_events(path: Path) -> bool:
    """Check that a file, or the first readable one of a folder, has the columns of a layout under their own names."""
    paths = [path] if path.is_file() and path.suffix.lower() in TABLE_SUFFIXES else []
    if path.is_dir():
        inside = (file for file in files_below(path) if file.suffix.lower() in TABLE_SUFFIXES)
        paths = sorted(inside, key=natural_key)
    for file in paths:
        with suppress(SourceError):
            present = {*map(folded, column_names(file, ""))}
            if any({*map(folded, (*names["time"], *names["code"]))} <= present for names in AUTO.values()):
                return True
    return False


def _layout(source: EventSource, paths: list[Path], path: Path) -> str:
    """Return the layout that a source asks for, or that the columns of its first readable file show."""
    if source.layout != "auto":
        return source.layout
    fault = None
    for file in paths:
        try:
            names = column_names(file, str(path))
        except SourceError as error:
            fault = fault or error  # where another file can be read, reading all of them names it
            continue
        present, known = {folded(name) for name in names}, AUTO["meds"]
        if source.id == "auto" and {*map(folded, (*known["id"], *known["time"], *known["code"]))} <= present:
            return "meds"
        # A column of ids that the recipe names, or that has a name of theirs, is never the same patient throughout.
        has_id = source.id != "auto" or bool(present & ID_LIKE)
        code = folded("variable" if source.code == "auto" else source.code)
        # Files of patients one of whose columns has another name.
        are_many = len(paths) > 1 and not {*map(folded, (*AUTO["table"]["time"], *AUTO["table"]["code"]))} & present
        return "table" if has_id or source.static or not (code in present or are_many) else "patients"
    assert fault is not None, "a source has a file"
    raise fault


def _side(path: Path, folder: Path | None) -> int:
    """Return the split that a folder between the source and the file is named after."""
    parts = path.relative_to(folder).parts[:-1] if folder is not None else ()
    sides = (split_number(part) for part in parts)
    return next((side for side in sides if side != Split.UNDECLARED), Split.UNDECLARED)


def _owner(path: Path, shown: str) -> str:
    """Return the patient whom a file is named after; 7.0.parquet is of patient 7."""
    name = re.sub(r"^(-?\d+)\.0$", r"\1", path.stem)
    if name != name.strip() or re.search("[\uff10-\uff19]", name):
        what = "E_ID the name of the file has white space around it or full-width digits"
        raise SourceError(what, where=shown, fix="name it by the id in plain digits or letters")
    return name


# --------------------------------------------------------------------------- sides of the split


@dataclass(frozen=True, eq=False)
class Sides:
    """Parts of the split that patients are declared to be of; a patient may occur several times.

    Args:
        ids: (num,) strings; side: (num,) int8 of `Split`.
    """

    ids: pa.Array
    side: np.ndarray

    @classmethod
    def of_rows(cls, ids: pa.Array, side: np.ndarray) -> Sides:
        """Sides that rows declare, each once; rows without one add nothing."""
        declaring = np.flatnonzero(side != Split.UNDECLARED)
        first = declaring[np.unique(number(ids)[declaring] * 4 + side[declaring], return_index=True)[1]]
        return cls(ids.take(pa.array(first)).cast(pa.string()), side[first])

    @classmethod
    def of_files(cls, files: list[TableFile], ids: pa.Array, file_of: np.ndarray) -> Sides:
        """Sides of the patients with a file in the folder of a part.

        Args:
            ids: (num_rows,) strings, patient of every row; file_of: (num_rows,) int, index into `files`.

        Raises:
            SourceError: a patient is in two files.
        """
        pairs, first = np.unique(number(ids) * len(files) + file_of, return_index=True)
        if len(twice := np.flatnonzero(np.diff(pairs // len(files)) == 0)):
            one, other = files[file_of[first[twice[0]]]], files[file_of[first[twice[0] + 1]]]
            who = alias(ids[int(first[twice[0]])].as_py())
            if one.split != other.split:
                raise _on_two_sides(who, other.shown, f", also in {one.shown}")
            fix = "put all of a patient into one file; tables to be joined are items of data.events of their own"
            what = f"E_DUPLICATE patient {who} is in two files, also in {one.shown}"
            raise SourceError(what, where=other.shown, fix=fix)
        return cls.of_rows(ids, np.array([file.split for file in files], np.int8)[file_of])

    @classmethod
    def of_table(cls, path: Path) -> Sides:
        """Read a table of patients and their parts.

        Raises:
            SourceError: it cannot be read, a row names no part, or a patient is in two.
        """
        table = open_table([TableFile(path, str(path))], {"id": ID_NAMES, "split": ("split",)}, (), "the table")
        faults = Faults(table)
        sides = cls(faults.read_ids()[0], faults.column("split").sides())
        faults.add(sides.side == Split.UNDECLARED, "E_SPLIT", "the row names no part of the split", WRITE_SPLIT)
        faults.refuse_any()
        sides.refuse_two(str(path))
        return sides

    @classmethod
    def joined(cls, parts: Sequence[Sides]) -> Sides:
        """All of several sides."""
        return cls(pa.concat_arrays([part.ids for part in parts]), np.concatenate([part.side for part in parts]))

    def refuse_two(self, where: str) -> None:
        """Refuse a patient on two sides.

        Raises:
            SourceError: names the first.
        """
        pairs, first = np.unique(number(self.ids) * 4 + self.side, return_index=True)
        if len(twice := np.flatnonzero(np.diff(pairs // 4) == 0)):
            raise _on_two_sides(alias(self.ids[int(first[twice[0]])].as_py()), where)

    def of(self, patients: pa.Array) -> np.ndarray:
        """Side of each of some patients, (num_patients,) int8, UNDECLARED where there is none."""
        sides = dict(zip(self.ids.to_pylist(), self.side.tolist(), strict=True))
        return np.array([sides.get(patient, Split.UNDECLARED) for patient in patients.to_pylist()], np.int8)


def _on_two_sides(who: str, where: str, more: str = "") -> SourceError:
    what = f"E_LEAK patient {who} is on two sides of the split{more}"
    return SourceError(what, where=where, fix="leave each patient on one side")


def number(ids: pa.Array) -> np.ndarray:
    """Number the different ids by first appearance, (num_ids,) int64."""
    return np.asarray(ids.dictionary_encode().indices).astype(np.int64)
