"""Rows that a family takes from the files of a recipe: read, divided, chosen and counted, perhaps with a class each."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import pydantic
from numpy.typing import NDArray
from pydantic import AfterValidator
from typing_extensions import TypedDict

from unpad.data.family import Data, SequenceTable, sequence_table
from unpad.data.sources import split as splits
from unpad.data.sources.bad_rows import apply_policy, fault_lines, refuse_empty
from unpad.data.sources.example import BadRow, SplitName, Unread, count_bad
from unpad.data.sources.files import SourceFile, expand, resolve_path
from unpad.data.sources.reader import collect
from unpad.data.sources.split import Split, Wanted
from unpad.errors import SourceError
from unpad.recipes.data import DataSettings, Source
from unpad.recipes.recipe import Recipe
from unpad.storage import sha256_file
from unpad.storage.reading import shaped
from unpad.terminal.table import number_of


class PlacedRow(Protocol):
    """A frozen dataclass with the content of a row, its place, and the part that it may declare."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def where(self) -> str:
        """The place."""

    @property
    def split(self) -> SplitName | None:
        """The part; None leaves it to the seed."""


R = TypeVar("R", bound=PlacedRow)


@dataclass(frozen=True, eq=False)
class ListedRows(Generic[R]):
    """Rows of all files of a kind of data, in order.

    Args:
        kind: section of the recipe's `data`.
        rows: those that can be used; sources: index of the source of each; bad: those that cannot.
    """

    recipe: Recipe
    kind: str
    files: list[SourceFile]
    rows: list[R]
    sources: list[int]
    bad: list[BadRow]

    @property
    def unread(self) -> Unread:
        """Fields of the rows that nobody read."""
        return Unread.of([file.unread for file in self.files])


def list_rows(
    recipe: Recipe,
    kind: str,
    read_all: Callable[[SourceFile, DataSettings], tuple[list[R], list[BadRow]]] | None = None,
    list_files: Callable[[list[Source], Callable[[str], Path]], list[SourceFile]] = expand,
) -> ListedRows[R]:
    """Read the files of a kind of data.

    Args:
        read_all: reads one file to its usable and its bad rows; default by `read` of `sources/<kind>.py`.

    Raises:
        SourceError: a file is missing or unusable, or bad rows are refused.
    """
    read_all = read_all or partial(_read_all, kind)
    files = list_files(getattr(recipe.data, kind), partial(resolve_path, recipe.data))
    listed = ListedRows[R](recipe, kind, files, [], [], [])
    for file in files:
        rows, bad = read_all(file, recipe.data)
        listed.rows.extend(rows)
        listed.sources.extend([file.source] * len(rows))
        listed.bad.extend(bad)
    checked = "RECIPE.yaml" if any(file.annotations for file in files) else ""  # one is not checked without the other
    apply_policy(listed.bad, len(listed.rows) + count_bad(listed.bad), recipe.data, checked, files)
    return listed


def _read_all(kind: str, file: SourceFile, data: DataSettings) -> tuple[list[Any], list[BadRow]]:
    return collect(import_module(f"unpad.data.sources.{kind}").read(file, data), file.path)


@dataclass(frozen=True, eq=False)
class ChosenRows(Generic[R]):
    """Rows that are asked for.

    Args:
        listed: rows of every part.
        parts: (num_listed,) uint8 of `Split`; units: (num_listed,) int64, rows of one number belong together.
        index: (num_rows,) int64 into these, of the rows that are asked for.
        shared_groups: groups with rows both in training and in another part.
    """

    listed: ListedRows[R]
    wanted: Wanted
    parts: NDArray[np.uint8]
    units: NDArray[np.int64]
    index: NDArray[np.int64]
    shared_groups: int

    @cached_property
    def rows(self) -> list[R]:
        """Those that are asked for."""
        return [self.listed.rows[row] for row in self.index.tolist()]

    @property
    def split(self) -> NDArray[np.uint8]:
        """Part of each row, (num_rows,) of `Split`."""
        return self.parts[self.index]

    @property
    def num_test(self) -> int:
        """Rows of the test part that are left out of those to learn from."""
        return int((self.parts == Split.TEST).sum()) if self.wanted is Wanted.LEARNING else 0

    def sides(self) -> dict[Split, NDArray[np.bool_]]:
        """Rows of every part among all that were listed, (num_listed,) bool; no parts where all rows are new."""
        return {} if self.wanted is Wanted.NEW else {part: self.parts == part for part in Split}

    def only(self, mask: NDArray[np.bool_]) -> "ChosenRows[R]":
        """Leave out the rows where a mask, (num_rows,), is False."""
        return replace(self, index=self.index[mask])

    def refuse_empty(self) -> None:
        """Refuse data without a row that is asked for.

        Raises:
            SourceError: there is none.
        """
        refuse_empty(len(self.index), self.listed.kind, self.listed.files)

    def file_hashes(self) -> list[tuple[str, str]]:
        """Path and sha256 of every file."""
        return [(str(path), sha256_file(path)) for file in self.listed.files for path in file.paths]

    def table(
        self, positions: np.ndarray, file_hashes: Sequence[tuple[str, str]], num_targets: np.ndarray | None = None
    ) -> SequenceTable:
        """Build the table of the rows, a sequence each; see `sequence_table`."""
        return sequence_table(
            positions,
            self.split,
            num_targets=num_targets,
            source=np.array(self.listed.sources, np.int16)[self.index],
            weights=tuple(source.weight for source in getattr(self.listed.recipe.data, self.listed.kind)),
            file_hashes=tuple(file_hashes),
            num_test=self.num_test,
            group=self.units[self.index],
        )

    def lines(self, what: str, details: str, others: int = 0, why: str = "") -> list[str]:
        """Lines on the rows that were read, on their parts, and on those that belong together.

        Args:
            what: name of the rows, plural.
            details: what else is to be said beside the numbers of the parts.
            others: rows that are left out for another reason; why: the reason.
        """
        used, bad = len(self.index), count_bad(self.listed.bad)
        return [
            f"{number_of(used + bad + self.num_test + others, what)} read = {used:,} used + {bad:,} quarantined"
            + (f" + {self.num_test:,} of the test part, for `unpad eval` alone" if self.num_test else "")
            + (f" + {others:,} {why}" if others else ""),
            f"{splits.describe_split(self.split)}; {details}",
            *self.listed.unread.lines(),
            *splits.describe_groups(self.units[self.index], self.shared_groups, what),
        ]


def choose_rows(
    listed: ListedRows[R],
    wanted: Wanted,
    keys: Iterable[int],
    *,
    groups: Sequence[str] = (),
    links: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]] = (),
    classes: Sequence[str] | None = None,
) -> ChosenRows[R]:
    """Divide rows into parts, and choose those that `wanted` asks for.

    Args:
        keys: 64-bit hash of the content of each row.
        groups: group of each row, "" for none.
        links: further ties between rows, as of `split.assign`.
        classes: class of each row; every class gives its share to each part.
    """
    recipe = listed.recipe
    hashes, declared = np.array(list(keys), np.uint64), splits.declared_splits(row.split for row in listed.rows)
    numbers = splits.numbered(groups or [""] * len(hashes))
    ties = [(np.arange(len(hashes)), numbers), *links]
    labels = None if classes is None else np.unique(classes, return_inverse=True)[1].astype(np.int64)
    parts = splits.divide(hashes, declared, recipe.data, recipe.train.seed, wanted, links=ties, classes=labels)
    index, shared = np.flatnonzero(splits.taken(parts, wanted)), splits.groups_on_both_sides(numbers, parts)
    return ChosenRows(listed, wanted, parts, splits.units(hashes, ties), index, shared)


def row_key(content: object) -> int:
    """64-bit hash of what a row holds, by its representation."""
    return int(sha256(repr(content).encode()).hexdigest()[:16], 16)


@dataclass(frozen=True, eq=False)
class RowData(Data, Generic[R]):
    """Data with one sequence per row of a file.

    Args:
        chosen: the rows, by number of their sequence.
    """

    table: SequenceTable
    chosen: ChosenRows[R]

    @property
    def bad_rows(self) -> Sequence[BadRow]:
        return self.chosen.listed.bad

    def where(self, seq_id: int) -> str:
        return self.chosen.rows[seq_id].where

    def fingerprint(self) -> str:
        """By default a hash of all fields of the rows but their places."""
        content = [replace(row, where="") for row in self.chosen.rows]
        return sha256(repr((content, self.table.split.tolist())).encode()).hexdigest()

    def facts(self) -> dict[str, Any]:
        return self.chosen.listed.unread.facts

    def lines(self) -> list[str]:
        counts = self.chosen.lines("rows", self.describe_outputs())
        return [*counts, *fault_lines(self.bad_rows, "  quarantined: ")]


CLASSES = "classes.json"


class LabelledRow(PlacedRow, Protocol):
    """A row with a class."""

    @property
    def label(self) -> str:
        """Name of the class."""


L = TypeVar("L", bound=LabelledRow)


@dataclass(frozen=True, eq=False)
class ClassData(RowData[L]):
    """Rows of a run that have a class each.

    Args:
        classes: names in the order of the model's outputs.
        labels: (num_rows,) int64, index into `classes`.
    """

    classes: tuple[str, ...]
    labels: np.ndarray

    @property
    def num_outputs(self) -> int:
        return len(self.classes)

    @property
    def files(self) -> dict[str, bytes]:
        return {CLASSES: json.dumps({"classes": self.classes}, ensure_ascii=False, indent=1).encode()}

    def class_labels(self) -> tuple[np.ndarray, tuple[str, ...]]:
        return self.labels, self.classes

    def describe_outputs(self) -> str:
        return number_of(len(self.classes), "classes")


def _each_once(names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise ValueError("names a class twice")
    return names


class _Classes(TypedDict):
    classes: Annotated[list[str], pydantic.Field(min_length=1), AfterValidator(_each_once)]


def read_classes(files: dict[str, bytes]) -> tuple[str, ...]:
    """Names of the classes of a run, in the order of the model's outputs.

    Raises:
        CheckpointError: the file is damaged.
    """
    return tuple(shaped(files[CLASSES], _Classes, Path(CLASSES))["classes"])


def num_classes(files: dict[str, bytes]) -> int:
    """Number of classes of a run."""
    return len(read_classes(files))


def label_rows(chosen: ChosenRows[L], kept: dict[str, bytes] | None) -> tuple[tuple[str, ...], np.ndarray]:
    """Return `classes` and `labels` of `ClassData`.

    Args:
        kept: files of an earlier run; without classes, or None, they are those of the rows.

    Raises:
        SourceError: all rows are of one class, or a class is unknown to the run.
    """
    kind = chosen.listed.kind
    files = kept or {}
    classes = read_classes(files) if CLASSES in files else tuple(sorted({row.label for row in chosen.rows}))
    if len(classes) < 2:
        what, fix = f"all {kind} are of one class, {classes[0]}", f"give {kind} of two classes or more"
        raise SourceError(what, where=f"data.{kind}", fix=fix)
    number = {name: index for index, name in enumerate(classes)}
    for row in chosen.rows:
        if row.label not in number:
            what = f'the class "{row.label}" is none of the run: {", ".join(classes[:8])}'
            fix = f"train again, put back the {kind} of the run, or with train.init_from set train.new_head=true"
            raise SourceError(what, where=row.where, fix=fix)
    return classes, np.array([number[row.label] for row in chosen.rows], np.int64)
