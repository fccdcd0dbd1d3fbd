"""Checkpoints: weights, optimizer, counters and plan position, in safetensors and JSON.

    checkpoints/step-00000120/   model.safetensors  optim.safetensors  state.json  MANIFEST.json
    checkpoints/best/            the same four files

Processes that each hold some rows of the tensors write files of their own, model-00001-of-00002.safetensors and so on,
which are read here too. The header of such a file has the place of each tensor in the whole one, in the format of
torch's `HuggingFaceStorageWriter` with `save_distributed`, so that torch's reader opens the folder too. An unsharded
tensor is only in the first file, and a process without rows of a tensor omits it.

A folder is complete or absent, and is verified by sha256 whenever it is read. Nothing is ever unpickled.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from fnmatch import fnmatch, fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from unpad import storage
from unpad.errors import CheckpointError, ForeignCheckpointError, NonFiniteError, is_memory_error, needs_memory
from unpad.models.adapters import kept_weights, load_kept
from unpad.processes.divided import divided_like, from_own_rows, is_divided, own_part
from unpad.run import upgrade
from unpad.run.folder import STATE, refuse_foreign
from unpad.storage import check_space, parse_json

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


# --------------------------------------------------------------------------- a whole checkpoint


MODEL, OPTIM = "model.safetensors", "optim.safetensors"
MODEL_FILES, OPTIM_FILES = "model*.safetensors", "optim*.safetensors"  # also in checkpoints by several processes
STATE_FORMAT, SHARDED_FORMAT = 1, 2  # of state.json; the second if several processes wrote the tensors
COPY = "a copy of weights and optimizer, which a checkpoint is written from,"
SAVE_FIX = "lower the sizes of the model section, or plan.tokens_per_micro, and resume from the checkpoint before"
PREFIX = "model."  # of the names of a model's tensors among those of a checkpoint
WEIGHTS = [PREFIX + "*"]  # pattern of those names
_STEP_FOLDER = re.compile(r"(\.old-)?(step-(\d{8,18}))")


@dataclass
class State:
    """Saved state of a run: everything it needs to continue.

    Args:
        step: steps done.
        tensors: by flat name: those of `model_tensors`, and others such as "optim.<parameter>.exp_avg".
        values: JSON values: stage, epoch, position in the plan, counters, fingerprints. Numbers are finite, keys text.
    """

    step: int
    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]


def model_tensors(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's weights by their names in a checkpoint."""
    return {PREFIX + name: tensor for name, tensor in weights.items()}


def model_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors of the model by their names in the model."""
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}


# --------------------------------------------------------------------------- save


def save(folder: Path, state: State, keep: int) -> Path:
    """Write `folder/step-<step>` and then delete the oldest checkpoints, so that the newest `keep` up to it remain.

    Age is by step number, never by modification time. Checkpoints of later steps, left by a run that fell back to an
    earlier one, are neither counted nor deleted.

    Args:
        folder: the run's checkpoints folder; made if missing.
        keep: checkpoints that remain, the new one included; at least 1.

    Returns:
        The new folder.

    Raises:
        NonFiniteError: a parameter is NaN or infinite, or a value of the state is; nothing is written.
        DiskError: it does not fit or cannot be written; the older checkpoints are untouched.
    """
    target = step_folder(folder, state.step)
    _write(target, state)
    remove_old(folder, state.step, keep)
    return target


def step_folder(folder: Path, step: int) -> Path:
    """Place of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def remove_old(folder: Path, step: int, keep: int) -> None:
    """Delete the oldest checkpoints up to this step, so that the newest `keep` remain."""
    assert keep >= 1, keep
    with storage.disk_errors(folder):
        steps = _step_folders(folder)
    done = sorted(other for other in steps if other <= step)
    for old in done[:-keep]:
        for path in (steps[old], storage.replaced(steps[old])):
            if path.exists():
                storage.remove_folder(path)


def save_named(folder: Path, name: str, state: State) -> Path:
    """Write `folder/<name>`, such as "best", replacing the previous one.

    At every instant `load(folder / name)` loads the old or the new one.

    Raises:
        NonFiniteError, DiskError: as `save`; the previous one is untouched.
    """
    target = folder / name
    _write(target, state)
    return target


def _write(target: Path, state: State) -> None:
    files = {**tensor_files(state), STATE: state_file(state)}
    storage.make_folder(target.parent)
    storage.clean_leftovers(target.parent, alone=True)
    check_space(target, sum(map(len, files.values())))
    storage.replace_folder(target, files)


def copied(state: State) -> State:
    """The state with copies of its tensors in the processor's memory, which training no longer changes.

    Raises:
        NonFiniteError: a parameter is NaN or infinite.
    """
    _refuse_non_finite(state)
    with needs_memory(COPY, SAVE_FIX):
        return replace(state, tensors={name: one.detach().to("cpu", copy=True) for name, one in state.tensors.items()})


def _refuse_non_finite(state: State) -> None:
    for name, tensor in model_weights(state.tensors).items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise NonFiniteError(
                f"the parameter {name} holds NaN or infinite values; it is not saved",
                where=f"step {state.step}",
                fix="start again from the checkpoint before with train.init_from=RUN and a lower optim.lr",
            )


def tensor_files(
    state: State, headers: Callable[[Mapping[str, Tensor]], dict[str, str]] | None = None
) -> dict[str, bytes]:
    """Serialize tensors that are on the CPU and share no memory.

    Args:
        headers: metadata of a file with these tensors; default none.

    Raises:
        NonFiniteError: a parameter is NaN or infinite.
    """
    _refuse_non_finite(state)
    parts: dict[str, dict[str, torch.Tensor]] = {MODEL: {}, OPTIM: {}}
    seen: set[int] = set()
    for name, tensor in state.tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        if memory in seen:  # tied weights: the format refuses two names for one storage
            tensor = tensor.clone()
        seen.add(memory)
        parts[MODEL if name.startswith(PREFIX) else OPTIM][name.removeprefix(PREFIX)] = tensor
    with needs_memory(COPY, SAVE_FIX):
        # The serializing library aborts the process when memory runs out: request as much memory first.
        size = sum(tensor.numel() * tensor.element_size() for part in parts.values() for tensor in part.values())
        _reserve(2 * size)
        return {name: tensors_to_bytes(part, headers and headers(part)) for name, part in parts.items()}


def state_file(state: State, num_shards: int | None = None) -> bytes:
    """Serialize the values of a state.

    Args:
        num_shards: number of processes that wrote files of the tensors; None: one process wrote all.

    Raises:
        NonFiniteError: a number is NaN or infinite.
    """
    record: dict[str, Any] = {"format": STATE_FORMAT, "step": state.step, "values": state.values}
    if num_shards is not None:
        record |= {"format": SHARDED_FORMAT, "shards": num_shards}
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, indent=1)
    except ValueError as error:
        raise NonFiniteError(
            f"the training state holds a number that JSON cannot: {error}",
            where=f"step {state.step}",
            fix="resume from the checkpoint before",
        ) from None
    return (text + "\n").encode()


def _reserve(num_bytes: int) -> None:
    """Raise torch's out-of-memory error unless this many bytes can be allocated; nothing is written into them."""
    torch.empty(num_bytes, dtype=torch.uint8)


# --------------------------------------------------------------------------- load


def load_newest(folder: Path, held: Held = nothing_held) -> tuple[State, list[str]] | None:
    """Load the newest checkpoint that verifies.

    Args:
        held: as of `load`.

    Returns:
        The state, and a message for each newer, damaged checkpoint; None without any checkpoint.

    Raises:
        CheckpointError: all checkpoints are damaged, and each is named; or the folder cannot be read.
        ForeignCheckpointError: the newest that verifies belongs to another run.
    """
    saved = saved_steps(folder)
    damages: list[str] = []
    for step, path in saved:
        try:
            state = load(path, held=held)
            if state.step != step:
                raise CheckpointError(f"it holds step {state.step}", where=str(path))
        except ForeignCheckpointError:
            raise  # it is intact: only the user knows why it is here, and what to do with it
        except CheckpointError as error:
            damages.append(f"checkpoint {path.name} is damaged: {error.what}")
        else:
            return state, [f"{damage}; using {path.name}" for damage in damages]
    if not saved:
        return None
    raise CheckpointError("; ".join(damages), where=str(folder), fix="restore a copy, or start a new run with --out")


def load(path: Path, names: Iterable[str] | None = None, *, held: Held = nothing_held) -> State:
    """Load one checkpoint folder, verified.

    Safe while a run is writing: a folder that is replaced during reading is read again.

    Args:
        path: the folder, such as checkpoints/best.
        names: patterns of tensor names to load, default all. If all start with "model.", the optimizer's file is not
            read and may be missing.
        held: returns this process's tensor for a name in the checkpoint, to shard the loaded tensor like it; None to
            load it whole. Files are read one by one, and rows of other processes are dropped.

    Raises:
        CheckpointError: missing, damaged or written by a newer version; names the file.
        ForeignCheckpointError: it belongs to another run than the one that contains it.
    """
    patterns = None if names is None else list(names)
    while True:
        identity = _identity(path)
        try:
            state = _read(storage.replaced(path) if identity is None else path, patterns, held)
            refuse_foreign(path, state.values)
            return state
        except CheckpointError as error:
            if _identity(path) != identity:
                continue
            if identity is None and not storage.replaced(path).exists():
                raise CheckpointError(
                    "there is no checkpoint here", where=str(path), fix="check the path, or let the run save one first"
                ) from None
            raise error


def _read(path: Path, patterns: list[str] | None, held: Held) -> State:
    only_model = patterns is not None and all(pattern.startswith(PREFIX) for pattern in patterns)
    names = [STATE, MODEL_FILES] if only_model else [STATE, MODEL_FILES, OPTIM_FILES]
    with closing(storage.each_file(path, names)) as files:
        step, values, num_shards = _parse_state(path, next(files)[1])
        tensors = _all_tensors(path, files, [MODEL] if only_model else [MODEL, OPTIM], num_shards, held)
    if patterns is not None:
        tensors = {name: t for name, t in tensors.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}
    return State(step, tensors, values)


def _parse_state(path: Path, data: bytes) -> tuple[int, dict[str, Any], int | None]:
    """Step and values of a state, and the number of processes that wrote the tensors; None if one wrote all."""
    record = parse_json(data, path / STATE)
    if not isinstance(record, dict) or type(record.get("format")) is not int:
        raise CheckpointError(f"{STATE} has no format number", where=str(path), fix="use another copy")
    if record["format"] not in (STATE_FORMAT, SHARDED_FORMAT):
        raise CheckpointError(
            f"{STATE} has format {record['format'] % 10**9}, this version reads {STATE_FORMAT} and {SHARDED_FORMAT}",
            where=str(path),
            fix="install the version of unpad that wrote it, or a newer one",
        )
    step, values = record.get("step"), record.get("values")
    if type(step) is not int or not 0 <= step < 1 << 60 or not isinstance(values, dict):
        raise CheckpointError(f"{STATE} holds no step and values", where=str(path), fix="use another copy")
    values = upgrade.state(values)
    if record["format"] == STATE_FORMAT:
        return step, values, None
    num_shards = record.get("shards")
    if type(num_shards) is not int or not 1 <= num_shards <= MOST_SHARDS:
        raise CheckpointError(f"{STATE} has no valid number of shards", where=str(path), fix="use another copy")
    return step, values, num_shards


def _all_tensors(
    path: Path, files: Iterable[tuple[str, bytes]], parts: Sequence[str], num_shards: int | None, held: Held
) -> dict[str, torch.Tensor]:
    """The tensors of files, each possibly split among several processes."""
    missing: dict[str, str] = {}
    joined = JoinedRows(path, held)
    for part in parts:
        numbers = range(num_shards or 1)
        missing |= {part if num_shards is None else shard_name(part, number, num_shards): part for number in numbers}
    for name, data in files:
        if (part := missing.pop(name, "")) == "":
            continue  # written by another number of processes
        tensors, rows = _tensors(path, name, data), {} if num_shards is None else first_rows(path, name, data)
        for tensor, values in tensors.items():
            joined.add(PREFIX + tensor if part == MODEL else tensor, values, rows.get(tensor, 0))
    for name in missing:
        raise CheckpointError(f"{name} is missing", where=str(path), fix="use another copy")
    return joined.tensors()


def _tensors(path: Path, name: str, data: bytes) -> dict[str, torch.Tensor]:
    try:
        return tensors_from_bytes(data)
    # A hand-made file fails in the parser, in the dtype table or when torch allocates the shape.
    except (SafetensorError, ValueError, TypeError, KeyError, AssertionError, RuntimeError, OverflowError) as error:
        if is_memory_error(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise CheckpointError(f"{name} is not usable: {reason}", where=str(path), fix="use another copy") from None


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Key that tells a folder from another in its place; None for no folder.

    With the time of its last change: a writer that replaces a folder twice may have the number of the first one again.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns


def saved_steps(folder: Path) -> list[tuple[int, Path]]:
    """The numbered checkpoints and their steps, the newest first.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    try:
        return sorted(_step_folders(folder).items(), reverse=True)
    except OSError as error:
        fix = "see that the folder is yours and its disk is well"
        raise CheckpointError(f"the folder cannot be read: {error.strerror}", where=str(folder), fix=fix) from None


def _step_folders(folder: Path) -> dict[int, Path]:
    """The checkpoints by step. If the replacement of one was interrupted, it counts under its own name, as `load` finds
    it."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return {}
    matches = map(_STEP_FOLDER.fullmatch, names)
    return {int(match[3]): folder / match[2] for match in matches if match}


def newest_weights(folder: Path) -> tuple[dict[str, Tensor], State]:
    """The best weights by held-out value, or the newest if nothing was held out; also their checkpoint."""
    checkpoints = folder / "checkpoints"
    if (checkpoints / "best").exists() or (checkpoints / ".old-best").exists():
        state = load(checkpoints / "best", WEIGHTS)
    else:
        loaded = load_newest(checkpoints)
        if loaded is None:
            raise CheckpointError(
                "the run has no checkpoint yet", where=str(checkpoints), fix="let it train for longer"
            )
        state = loaded[0]
    return model_weights(state.tensors), state


def put_weights(
    model: torch.nn.Module, weights: dict[str, Tensor], where: str, additions: Sequence[str] = ()
) -> list[str]:
    """Load weights that must match those that a run keeps of the model in every name and shape.

    Args:
        additions: name patterns (fnmatch) of parameters that may be missing; the model then keeps its own.

    Returns:
        Names of the missing parameters.

    Raises:
        CheckpointError: names the first parameter that does not fit.
    """
    parameters = kept_weights(model)
    fresh = [
        name for name in parameters if name not in weights and any(fnmatch(name, pattern) for pattern in additions)
    ]
    expected = {name: tuple(p.shape) for name, p in parameters.items() if name not in fresh}
    shapes = {name: tuple(p.shape) for name, p in weights.items()}
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            raise CheckpointError(
                f"parameter {name}: {shapes.get(name, 'missing')} there, {expected.get(name, 'missing')} in the model",
                where=where,
                fix="use the model section and the tokenizer that these weights were trained with",
            )
    load_kept(model, {name: divided_like(parameters[name], values) for name, values in weights.items()})
    return fresh
