"""Families of data: one file each in this folder, named by the model that reads it.

A model file says `DATA = "text"`, and `data/text.py` then has

    KINDS                      sections of the recipe's `data` that it reads
    UNITS                      what people call a sequence, and what its length counts
    FILES                      names of the files a run keeps so that it can be used without its data
    num_outputs(files)         channels of the model's head: vocabulary or classes
    open_data(recipe, kept)    a `Data`; `kept` are the files of an earlier run, None makes them
    next_command(recipe, run)  what to type to use a run of it
    NO_TEXT                    what to tell who asks a run of it for text, and the fix; where FILES has no tokenizer

and `evaluate/text.py` measures a model on it.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from unpad.batching.batch import RaggedBatch
from unpad.batching.plan import Micro
from unpad.errors import RecipeError
from unpad.models import model_module
from unpad.recipes.data import KINDS
from unpad.recipes.recipe import Recipe


class Data(Protocol):
    """The sequences of a run. Arrays are (num_sequences,), integers.

    Attributes:
        family: name of the file in `data/` and in `evaluate/`.
        kinds: sections of the recipe's `data` that it reads; a stage may use some of them.
        positions: positions the model sees per sequence.
        attended: how many vectors of a sequence attend to each other, where those are not its positions; None where
            they are. The model's context is then a mere bound, and a plan cannot count the cells of attention.
        kind: index into `kinds`.
        source: index into `weights`.
        split: 0 training, 1 held out.
        num_targets: targets per sequence.
        weights: epochs of each source per epoch of the run.
        file_hashes: (path, sha256) of every source file.
        num_outputs: channels of the model's head.
        files: what the run keeps, by name.
    """

    @property
    def family(self) -> str: ...

    @property
    def kinds(self) -> tuple[str, ...]: ...

    @property
    def weights(self) -> list[float]: ...

    @property
    def file_hashes(self) -> tuple[tuple[str, str], ...]: ...

    @property
    def positions(self) -> np.ndarray: ...

    @property
    def attended(self) -> np.ndarray | None: ...

    @property
    def kind(self) -> np.ndarray: ...

    @property
    def source(self) -> np.ndarray: ...

    @property
    def split(self) -> np.ndarray: ...

    @property
    def num_targets(self) -> np.ndarray: ...

    @property
    def num_outputs(self) -> int: ...

    @property
    def files(self) -> dict[str, bytes]: ...

    def count_targets(self, seq_ids: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Targets inside spans of sequences, (n,) int64."""
        ...

    def lengths(self, epoch_seed: tuple[int, int]) -> np.ndarray:
        """Positions per sequence in the epoch of this seed and number; `positions` where no epoch draws sizes anew."""
        ...

    def load(self, micro: Micro) -> RaggedBatch:
        """One micro-batch of a plan; called from the loader's own thread."""
        ...

    def alone(self, seq_id: int, start: int, stop: int, first_target: int) -> RaggedBatch:
        """One piece of a plan as a batch of its own, made past everything that batches; the proof's truth."""
        ...

    def where(self, seq_id: int) -> str:
        """The place of a sequence in its file."""
        ...

    def fingerprint(self) -> str:
        """sha256 that changes with which sequences there are, what they hold and how they are split."""
        ...

    def lines(self) -> list[str]:
        """What was read, used, set aside and held out, as text."""
        ...

    def describe_outputs(self) -> str:
        """What the channels of the head are, such as "vocabulary 3,000"."""
        ...


def family_name(recipe: Recipe) -> str:
    """Name of the family that the recipe's model reads."""
    name: str = model_module(recipe.model["kind"]).DATA
    return name


@runtime_checkable
class HasCodeVectors(Protocol):
    """Data whose codes may come with vectors."""

    @property
    def code_vectors(self) -> np.ndarray | None:
        """(num_codes, dim), or None."""
        ...


def family_of(recipe: Recipe) -> ModuleType:
    """The module of `data/` that holds what the recipe's model reads."""
    return import_module(f"unpad.data.{family_name(recipe)}")


def open_data(recipe: Recipe, kept: dict[str, bytes] | None) -> Data:
    """Read a recipe's data.

    Args:
        kept: what an earlier run of the same kind kept; None makes them from the data.

    Raises:
        RecipeError: the recipe names data that its model does not read, or a stage uses such.
        SourceError: the data cannot be used.
    """
    family = family_of(recipe)
    given = [name for name in KINDS if getattr(recipe.data, name)]
    for name in given:
        if name not in family.KINDS:
            kind = recipe.model["kind"]
            fix = f"a {kind} reads " + " and ".join(f"data.{kind}" for kind in family.KINDS)
            raise RecipeError(f"a model of kind {kind} does not read data.{name}", where=f"data.{name}", fix=fix)
    for stage in recipe.stages:
        for name in stage.use or ():
            if name not in family.KINDS:
                fix = "this model reads " + " and ".join(family.KINDS)
                raise RecipeError(f'stage {stage.name} uses "{name}"', where="stages", fix=fix)
    data: Any = family.open_data(recipe, kept)
    return data
