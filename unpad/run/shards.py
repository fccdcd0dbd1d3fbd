"""Files of a checkpoint that several processes write, each the rows of the tensors that it holds.

    model-00001-of-00002.safetensors  optim-00001-of-00002.safetensors
    model-00002-of-00002.safetensors  optim-00002-of-00002.safetensors

Plain safetensors. The header of a file has the place of each of its tensors in the whole one, as torch's
`HuggingFaceStorageWriter` writes it with `save_distributed`, so that torch's reader opens the folder too. A tensor that
is not divided is in the first file alone, and a process without rows of a tensor leaves it out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from unpad.errors import CheckpointError
from unpad.storage import parse_json

PLACES, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # names of torch's format
MOST_SHARDS = 99_999
_LENGTH_BYTES = 8  # before the header of a file, its length


def shard_name(name: str, number: int, num_shards: int) -> str:
    """Name of the file of one process, from 0, in place of the file `name` of a whole checkpoint."""
    stem, _, suffix = name.rpartition(".")
    return f"{stem}-{number + 1:05d}-of-{num_shards:05d}.{suffix}"


def places(tensors: Mapping[str, Tensor], rows: Mapping[str, int]) -> dict[str, str]:
    """Metadata of a file's header: where each of its tensors begins in the whole one.

    Args:
        rows: number of the first row by name; of a tensor that is not named, 0.
    """
    offsets = {
        name: {OFFSETS: [rows.get(name, 0), *(0 for _ in tensor.shape[1:])] if tensor.dim() else []}
        for name, tensor in tensors.items()
    }
    return {PLACES: json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}


def first_rows(path: Path, name: str, data: bytes) -> dict[str, int]:
    """Number of the first row of every tensor of a file, whose tensors have been read before.

    Raises:
        CheckpointError: the header does not say.
    """
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    header = parse_json(data[_LENGTH_BYTES : _LENGTH_BYTES + length], path / name)
    metadata = header.pop("__metadata__", {})
    found = parse_json(metadata.get(PLACES, "null").encode(), path / name)
    rows = {}
    for tensor in header:
        entry = found.get(tensor) if isinstance(found, dict) else None
        offsets = entry.get(OFFSETS) if isinstance(entry, dict) else None
        if not isinstance(offsets, list) or not all(type(value) is int and value >= 0 for value in offsets):
            raise _damaged(path, f"{name} does not say which rows of {tensor} it has")
        if any(offsets[1:]):
            raise _damaged(path, f"{name} has columns of {tensor}, and rows are what is divided")
        rows[tensor] = offsets[0] if offsets else 0
    return rows


def join_shards(path: Path, shards: Sequence[tuple[dict[str, Tensor], Mapping[str, int]]]) -> dict[str, Tensor]:
    """The whole tensors.

    Args:
        shards: the tensors of each file, and the number of the first row of each.

    Raises:
        CheckpointError: rows are missing, or there twice.
    """
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for tensors, rows in shards:
        for name, tensor in tensors.items():
            parts.setdefault(name, []).append((rows[name], tensor))
    return {name: _joined(path, name, found) for name, found in parts.items()}


def _joined(path: Path, name: str, parts: list[tuple[int, Tensor]]) -> Tensor:
    parts.sort(key=lambda part: part[0])
    end = 0
    for start, tensor in parts:
        if start != end or (len(parts) > 1 and not tensor.dim()):
            raise _damaged(path, f"row {end} of {name} is in no file, or rows are in several")
        end += len(tensor) if tensor.dim() else 1
    if len({(tensor.dtype, tensor.shape[1:]) for _, tensor in parts}) > 1:
        raise _damaged(path, f"parts of {name} have unlike types or shapes")
    return parts[0][1] if len(parts) == 1 else torch.cat([tensor for _, tensor in parts])


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(what, where=str(path), fix="use another copy")
