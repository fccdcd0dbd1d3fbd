"""Files that a run keeps: those of its data, and log-probabilities of its pairs; and the commands that use it.

A file of log-probabilities has the sha256 of its content, then a line of JSON with the origin of the numbers, then the
numbers.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from unpad.data.family import OPTIONAL_FILES, family_of, next_command
from unpad.data.tokens.cache import read_sealed, write_sealed
from unpad.errors import CheckpointError, SourceError
from unpad.recipes.recipe import Recipe
from unpad.run.folder import RUNS, made_by, run_recipe
from unpad.storage.reading import known_fields, read_file, shaped


def open_files(recipe: Recipe, folder: Path) -> dict[str, bytes]:
    """Read the data files that a run kept, {name: bytes}.

    Args:
        recipe: recipe of a run of the same family; it names the files.

    Raises:
        CheckpointError: a file is missing or cannot be read.
    """
    files = {}
    for name in family_of(recipe).FILES:
        if not os.path.exists(folder / name):
            fix = "the run ended before its first step; train again"
            raise CheckpointError(f"{name} is missing", where=str(folder), fix=fix)
        files[name] = read_file(folder / name)
    return files | {name: read_file(folder / name) for name in OPTIONAL_FILES if os.path.exists(folder / name)}


def refuse_without_data(recipe: Recipe, folder: Path, fix: str) -> None:
    """Refuse an imported run if its own data is requested.

    Raises:
        SourceError: it has none; `fix` is the advice.
    """
    if not any(getattr(recipe.data, kind) for kind in family_of(recipe).KINDS) and (command := made_by(folder)):
        raise SourceError(f'"{command}" made this run, which names no data', where=str(folder), fix=fix)


def what_next(folder: Path) -> list[str]:
    """Commands that use a run, each once, as lines to print after training."""
    name = folder.name if folder.parent.resolve() == RUNS.resolve() else str(folder)
    commands = dict.fromkeys([next_command(run_recipe(folder), name), f"unpad eval {name}", f"unpad runs {name}"])
    return [f"{'' if index else 'next:':<7}{command}" for index, command in enumerate(commands)]


REFERENCE = "reference.bin"  # in a run directory


@dataclass(frozen=True)
class Named:
    """Origin of the numbers in a file: hashes of the weights and the data, and the stage."""

    weights: str
    data: str
    stage: str


def write_reference(path: Path, named: Named, values: np.ndarray) -> None:
    """Write (num_sequences,) float64 values, durably.

    Raises:
        DiskError: the file cannot be written.
    """
    write_sealed(path, json.dumps(asdict(named)).encode() + b"\n" + values.astype("<f8").tobytes())


def find_reference(path: Path) -> tuple[Named, np.ndarray] | None:
    """Read a file of `write_reference`; None if it is missing or damaged."""
    content = read_sealed(path)[0]
    if content is None:
        return None
    head, _, body = content.partition(b"\n")
    try:
        named = Named(**known_fields(Named, shaped(head, Named, path)))
        return named, np.frombuffer(body, "<f8").astype(np.float64)
    except (CheckpointError, ValueError):
        return None


def read_reference(folder: Path) -> tuple[Named, np.ndarray]:
    """Read the values that a run keeps.

    Raises:
        CheckpointError: they are missing or damaged.
    """
    reference = find_reference(folder / REFERENCE)
    if reference is None:
        raise CheckpointError(
            f"{REFERENCE}, the log-probabilities of its pairs under the weights it started from, is missing or damaged",
            where=str(folder),
            fix="put the file back, or train again",
        )
    return reference
