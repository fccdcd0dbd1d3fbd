"""Files of log-probabilities of a run's pairs under the weights at the start of their stage, in the run and in the
cache.

A file has the sha256 of its content, then a line of JSON with the origin of the numbers, then the numbers.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from unpad.data.tokens.cache import read_sealed, write_sealed
from unpad.errors import CheckpointError
from unpad.storage.reading import known_fields, shaped

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
