"""Rows with a class each: the classes of a run, and the data of a family that learns them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

import numpy as np
from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from unpad.data.rows import ChosenRows, PlacedRow, RowData
from unpad.errors import SourceError
from unpad.storage.reading import shaped
from unpad.terminal.table import number_of

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
    classes: Annotated[list[str], Field(min_length=1), AfterValidator(_each_once)]


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
        kept: files of an earlier run, which has the classes; None takes those of the rows.

    Raises:
        SourceError: all rows are of one class, or a class is unknown to the run.
    """
    kind = chosen.listed.kind
    classes = tuple(sorted({row.label for row in chosen.rows})) if kept is None else read_classes(kept)
    if len(classes) < 2:
        what, fix = f"all {kind} are of one class, {classes[0]}", f"give {kind} of two classes or more"
        raise SourceError(what, where=f"data.{kind}", fix=fix)
    number = {name: index for index, name in enumerate(classes)}
    for row in chosen.rows:
        if row.label not in number:
            what = f'the class "{row.label}" is none of the run: {", ".join(classes[:8])}'
            fix = f"train again, or put back the {kind} that the run was trained on"
            raise SourceError(what, where=row.where, fix=fix)
    return classes, np.array([number[row.label] for row in chosen.rows], np.int64)
