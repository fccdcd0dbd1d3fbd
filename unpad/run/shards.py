"""Files of a checkpoint written by several processes, each with its own rows of the tensors.

    model-00001-of-00002.safetensors  optim-00001-of-00002.safetensors
    model-00002-of-00002.safetensors  optim-00002-of-00002.safetensors

Plain safetensors. The header of a file has the place of each tensor in the whole one, in the format of torch's
`HuggingFaceStorageWriter` with `save_distributed`, so that torch's reader opens the folder too. An unsharded tensor is
only in the first file, and a process without rows of a tensor omits it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unpad.errors import CheckpointError
from unpad.processes.divided import from_own_rows, is_divided, own_part
from unpad.storage import parse_json

PLACES, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # names of torch's format
MOST_SHARDS = 99_999
_LENGTH_BYTES = 8  # before the header of a file, its length
Held = Callable[[str], Tensor | None]


def nothing_held(name: str) -> None:
    """The `Held` function for loading whole tensors."""


@dataclass(frozen=True)
class _Part:
    """Rows of a tensor: the index of the first, the number in the file, and the rows that are kept."""

    first: int
    num_rows: int
    kept: Tensor


def shard_name(name: str, number: int, num_shards: int) -> str:
    """Name of the file of one process, from 0, in place of the file `name` of a whole checkpoint."""
    stem, _, suffix = name.rpartition(".")
    return f"{stem}-{number + 1:05d}-of-{num_shards:05d}.{suffix}"


def places(tensors: Mapping[str, Tensor], rows: Mapping[str, int]) -> dict[str, str]:
    """Metadata of a file's header: where each of its tensors begins in the whole one.

    Args:
        rows: index of the first row by name; 0 for a missing name.
    """
    offsets = {
        name: {OFFSETS: [rows.get(name, 0), *(0 for _ in tensor.shape[1:])] if tensor.dim() else []}
        for name, tensor in tensors.items()
    }
    return {PLACES: json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}


def first_rows(path: Path, name: str, data: bytes) -> dict[str, int]:
    """Index of the first row of every tensor of a file that has been read before.

    Raises:
        CheckpointError: the header lacks it.
    """
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    header = parse_json(data[_LENGTH_BYTES : _LENGTH_BYTES + length], path / name)
    metadata = header.pop("__metadata__", {})
    first_of = parse_json(metadata.get(PLACES, "null").encode(), path / name)
    rows = {}
    for tensor in header:
        entry = first_of.get(tensor) if isinstance(first_of, dict) else None
        offsets = entry.get(OFFSETS) if isinstance(entry, dict) else None
        if not isinstance(offsets, list) or not all(type(value) is int and value >= 0 for value in offsets):
            raise _damaged(path, f"{name} does not say which rows of {tensor} it has")
        if any(offsets[1:]):
            raise _damaged(path, f"{name} has columns of {tensor}, and rows are what is divided")
        rows[tensor] = offsets[0] if offsets else 0
    return rows


class JoinedRows:
    """Whole tensors, or this process's rows of them, joined from several files.

    Args:
        held: returns this process's tensor by name, to shard the result like it; None for whole tensors.
    """

    def __init__(self, path: Path, held: Held) -> None:
        self._path, self._held = path, held
        self._parts: dict[str, list[_Part]] = {}

    def add(self, name: str, values: Tensor, first: int) -> None:
        """Add a part of a tensor, given the index of its first row."""
        held = self._held(name)
        part = own_part(held, values, first) if held is not None and is_divided(held) and values.dim() else values
        self._parts.setdefault(name, []).append(_Part(first, len(values) if values.dim() else 1, part))

    def tensors(self) -> dict[str, Tensor]:
        """The joined tensors.

        Raises:
            CheckpointError: rows are missing or duplicate, or parts do not fit.
        """
        return {name: self._joined(name, parts) for name, parts in self._parts.items()}

    def _joined(self, name: str, parts: list[_Part]) -> Tensor:
        parts.sort(key=lambda part: part.first)
        end = 0
        for part in parts:
            if part.first != end or (len(parts) > 1 and not part.kept.dim()):
                raise _damaged(self._path, f"row {end} of {name} is in no file, or rows are in several")
            end += part.num_rows
        if len({(part.kept.dtype, part.kept.shape[1:]) for part in parts}) > 1:
            raise _damaged(self._path, f"parts of {name} have unlike types or shapes")
        values = parts[0].kept if len(parts) == 1 else torch.cat([part.kept for part in parts])
        held = self._held(name)
        if held is None or not is_divided(held) or not values.dim():
            return values
        if (end, *values.shape[1:]) != tuple(held.shape):
            what = f"{name} has the shape {(end, *values.shape[1:])} there, {tuple(held.shape)} in the model"
            raise CheckpointError(what, where=str(self._path), fix="use the model section that it was trained with")
        return from_own_rows(held, values)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(what, where=str(path), fix="use another copy")
