"""Folders of config.json and safetensors: read, checked and written.

The `Table` of a family of models (`families.py`) maps the tensors of a folder to the parameters here. Every tensor is
read from its mapped file directly into its parameter, so weights are never held twice.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from unpad import storage
from unpad.data.tokens.folder_tokenizer import CHAT_TEMPLATE, most_bytes
from unpad.errors import CheckpointError, needs_memory
from unpad.models import build_model
from unpad.models.contract import Model, ModelConfig
from unpad.storage.reading import opened, read_file

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
JSON_FILES = (
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "chat_template.json", "processor_config.json", "preprocessor_config.json",
)  # fmt: skip
OTHERS = (CHAT_TEMPLATE, "tokenizer.model", "merges.txt")  # small files besides those in JSON
BUFFERS = (".position_ids", ".inv_freq", ".attn.bias", ".attn.masked_bias")  # of older versions; not parameters
COMPILED = "_orig_mod."  # in names of models that were saved as torch.compile wraps them
SPARE_HEAD = "lm_head.weight"  # may be stored beside the embedding that it is tied to
FLOATS = ("F16", "BF16", "F32", "F64")
SHARD_BYTES = 5 << 30  # of a weight file; larger models are written as several with an index
ANOTHER_COPY = "use another copy"
MOST_HEADER_BYTES = 1 << 25  # of a weight file: 200,000 tensors
MOST_SHOWN = 200  # characters of a value in a message
MOST_NAME_BYTES = 255
Fields = dict[str, Any]  # of config.json


@dataclass(frozen=True)
class Change:
    """The way from a tensor of theirs to part of a parameter here: rows left out, transposed, multiplied and
    added to, in this order."""

    skip_rows: int = 0
    transposed: bool = False
    scale: float = 1.0
    shift: float = 0.0

    def shape_there(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor that becomes one of `shape`."""
        there = shape[::-1] if self.transposed else shape
        return (there[0] + self.skip_rows, *there[1:])

    def fill(self, target: Tensor, theirs: Tensor) -> None:
        """Write a tensor of theirs into a part of a parameter, in the parameter's dtype, without a copy beside it."""
        theirs = theirs[self.skip_rows :] if self.skip_rows else theirs
        target.copy_((theirs.t() if self.transposed else theirs).reshape(target.shape))
        if self.scale != 1:
            target.mul_(self.scale)
        if self.shift:
            target.add_(self.shift)

    def undone(self, ours: Tensor) -> Tensor:
        """Return the tensor of theirs that `fill` would read; omitted rows are zeros."""
        theirs = ours if (self.scale, self.shift) == (1, 0) else (ours - self.shift) / self.scale
        theirs = theirs.t() if self.transposed else theirs
        if self.skip_rows:
            theirs = torch.cat([theirs.new_zeros(self.skip_rows, *theirs.shape[1:]), theirs])
        return theirs.contiguous()


@dataclass(frozen=True)
class TensorPart:
    """A tensor of theirs and its place in a parameter here.

    Args:
        name: as in `Architecture.canonical`.
        rows: rows of the parameter that it fills; parts follow each other.
        shape: of the tensor.
    """

    name: str
    rows: int
    shape: tuple[int, ...]
    change: Change = Change()


Table = dict[str, tuple[TensorPart, ...]]  # every parameter here -> the tensors that it stacks


class Architecture(Protocol):
    """Models of one architecture there, and their form here.

    Args:
        architecture: class that reads such a folder in transformers.
        kind: `model.kind` of models that may be of the family.
        embedding: parameter here that a tied head shares.
    """

    architecture: str
    kind: str
    embedding: str

    def config(self, given: Fields) -> tuple[ModelConfig, int]:
        """The model's config, and its vocabulary size.

        Raises:
            CheckpointError: a field of config.json is missing or not covered; names it, without a place.
        """

    def fields(self, model: Model, given: Fields) -> Fields:
        """All of config.json for a model.

        Args:
            given: fields of the folder that the model was read from; kept unless the model determines them.

        Raises:
            CheckpointError: the family cannot hold the model; names the field.
        """

    def table(self, config: ModelConfig, vocab_size: int, fields: Fields) -> Table:
        """Tensors of every parameter; `fields` are those of config.json."""

    def canonical(self, name: str) -> str:
        """Name in `table` of a tensor of any version."""

    def written(self, name: str) -> str:
        """Name in the file that is written, given the name in `table`."""
        return name

    def unused(self, name: str) -> bool:
        """True for tensors that such a folder may hold but that do not affect outputs."""
        return False

    def constants(self, model: Model) -> dict[str, Tensor]:
        """Additional tensors to write."""
        return {}

    def weights(self, model: Model) -> Mapping[str, Tensor]:
        """The parameters to write, by the names in `table`."""
        return model.state_dict()


# --------------------------------------------------------------------------- read


def read_json_files(folder: Path) -> Fields:
    """Read the JSON files of a model, its tokenizer and its image processor, by name; only config.json is required.

    Raises:
        CheckpointError: a file cannot be read or is not JSON, or config.json is missing.
    """
    paths = [folder / name for name in JSON_FILES if (folder / name).exists()]
    files = {path.name: storage.parse_json(read_bytes(path), path) for path in paths}
    if CONFIG not in files:
        raise CheckpointError(f"there is no {CONFIG}", where=str(folder), fix="name the folder that holds it")
    return files


def read_bytes(path: Path) -> bytes:
    """Read a file of a folder.

    Raises:
        CheckpointError: it cannot be read, is not a regular file, or is larger than any such file.
    """
    return read_file(path, most=most_bytes(path.name), fix=ANOTHER_COPY)


def load_model(folder: Path, family: Architecture, given: Fields, dtype: torch.dtype = torch.float32) -> Model:
    """Load a model of a family from a folder, saved in any precision.

    Args:
        given: fields of config.json.
        dtype: of the model's parameters.

    Returns:
        The model, in evaluation mode.

    Raises:
        CheckpointError: a file is missing or damaged, a field of config.json is not covered, or a tensor is missing,
            unknown or of another shape; names the file and the field or tensor.
    """
    config, vocab_size = read_config(folder, family, given)
    table = family.table(config, vocab_size, given)
    with torch.device("meta"):  # weights are loaded, not initialized
        model = build_model(config, vocab_size)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items() if name in table}
    model.load_state_dict(_read_state(folder, family, table, shapes, dtype), strict=False, assign=True)
    return model.eval()


def read_config(folder: Path, family: Architecture, given: Fields) -> tuple[ModelConfig, int]:
    """The config of the model in a folder, and its vocabulary size.

    Raises:
        CheckpointError: a field of config.json is missing or not covered; names it.
    """
    where = str(folder / CONFIG)
    try:
        return family.config(given)
    except CheckpointError as error:
        damaged_or_other = _trained_there(folder) if isinstance(error, NotCovered) else ANOTHER_COPY
        raise CheckpointError(error.what, where=where, fix=error.fix or damaged_or_other) from None
    except (TypeError, AttributeError, ValueError, LookupError, ArithmeticError) as error:
        what = f"a field has a value of another kind than models here have: {str(error)[:MOST_SHOWN]}"
        raise CheckpointError(what, where=where, fix=ANOTHER_COPY) from None


def _trained_there(folder: Path) -> str:
    """Advice for a valid model that cannot be read here."""
    prove = shlex.join(["unpad", "prove", "--hf", str(folder)])
    return f"train it under transformers as it is: unpad.hf.attach proves it first, and `{prove}` judges its batches"


def weight_files(folder: Path, architecture: str = "AutoModelForCausalLM") -> list[Path]:
    """Find the safetensors files as transformers does: one file, the files of an index, or else all.

    Args:
        architecture: class that reads the folder in transformers, for advice if there is no such file.

    Raises:
        CheckpointError: there is none, or the index is damaged.
    """
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if (folder / INDEX).exists():
        index = storage.parse_json(read_bytes(folder / INDEX), folder / INDEX)
        names = index.get("weight_map") if isinstance(index, dict) else None
        if isinstance(names, dict) and all(map(_is_file_name, names.values())):
            return [folder / name for name in sorted(set(names.values()))]
        what = "weight_map is no list of files of this folder"
        raise CheckpointError(what, where=str(folder / INDEX), fix=ANOTHER_COPY)
    if not (paths := sorted(folder.glob("*.safetensors"))):
        place = str(folder)
        code = f"from transformers import {architecture} as Model; "
        code += f"Model.from_pretrained({place!r}).save_pretrained({place!r})"
        what = "there are no safetensors files; pickled weights are not read"
        fix = f"let transformers write them: python -c {shlex.quote(code)}"
        raise CheckpointError(what, where=str(folder), fix=fix)
    return paths


def _is_file_name(name: object) -> bool:
    """True for a name that a file of a folder can have on every system, and no path."""
    if not isinstance(name, str) or Path(name).name != name or "\0" in name:
        return False
    return len(name.encode("utf-8", "surrogatepass")) <= MOST_NAME_BYTES and name.isprintable()


def _read_state(
    folder: Path, family: Architecture, table: Table, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Read every parameter of the table, after a check that the folder holds exactly its tensors."""
    state: dict[str, Tensor] = {}
    with ExitStack() as stack:
        found = _open_tensors(folder, family, stack)
        _check_names(found, table, family, folder)
        for ours, parts in table.items():
            state[ours] = target = torch.empty(shapes[ours], dtype=dtype)
            for part, rows in zip(parts, target.split([part.rows for part in parts]), strict=True):
                with _damage(folder):
                    part.change.fill(rows, found[part.name][:])
        if SPARE_HEAD in found and all(part.name != SPARE_HEAD for parts in table.values() for part in parts):
            embedding, head = state[family.embedding], found[SPARE_HEAD][:]
            if head.shape != embedding.shape or not torch.equal(head.to(embedding.dtype), embedding):
                what = "tie_word_embeddings is true, but the head differs from the embedding"
                fix = "set tie_word_embeddings to false in every section"
                raise CheckpointError(what, where=str(folder / CONFIG), fix=fix)
    return state


def _open_tensors(folder: Path, family: Architecture, stack: ExitStack) -> dict[str, Any]:
    """Open the weight files, and return slices of their tensors, which are mapped when read, by
    `Architecture.canonical`."""
    found: dict[str, Any] = {}
    for path in weight_files(folder, family.architecture):
        _check_header(path)
        with _damage(path):
            with needs_memory(f"the map of {path.name}", "use a machine with more memory"):
                file = stack.enter_context(safe_open(path, framework="pt"))
            for name in (name for name in file.keys() if not name.endswith(BUFFERS)):  # noqa: SIM118 - it is no dict
                canonical = family.canonical(name.replace(COMPILED, ""))
                if canonical in found:
                    raise CheckpointError(f"there are two of {name}", where=str(path), fix=ANOTHER_COPY)
                found[canonical] = stored = file.get_slice(name)
                if stored.get_dtype() not in FLOATS:
                    what = f"{name} is of dtype {stored.get_dtype()}, which is not covered"
                    what += f"; expected {' or '.join(FLOATS)}"
                    raise CheckpointError(what, where=str(path), fix="use weights that are not quantised")
    return found


def _check_header(path: Path) -> None:
    """Raise CheckpointError unless a file is a regular one, with a header of a size that the library may read."""
    with opened(path, fix=ANOTHER_COPY) as file:
        size = int.from_bytes(file.read(8), "little")
    if size > MOST_HEADER_BYTES:
        what = f"its header has {size:,} bytes; at most {MOST_HEADER_BYTES:,} are read"
        raise CheckpointError(f"not usable: {what}", where=str(path), fix=ANOTHER_COPY)


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Turn errors of reading a file into a CheckpointError."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise CheckpointError(f"not usable: {reason}", where=str(path), fix=ANOTHER_COPY) from None


def _check_names(found: Mapping[str, Any], table: Table, family: Architecture, folder: Path) -> None:
    """Raise CheckpointError unless the files hold exactly the tensors that the config describes."""
    shapes = {part.name: part.shape for parts in table.values() for part in parts}
    problems = [f"{family.written(name)} is missing" for name in shapes if name not in found]
    for name, stored in found.items():
        wanted, shape = shapes.get(name), tuple(stored.get_shape())
        if wanted is not None and shape != wanted:
            problems.append(f"{family.written(name)} has shape {shape}, expected {wanted}")
        if wanted is None and not family.unused(name) and name != SPARE_HEAD:
            problems.append(f"{family.written(name)} is unknown")
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        what = "tensors do not fit config.json: " + "; ".join(problems[:3]) + more
        raise CheckpointError(what, where=str(folder), fix="use the config.json that was saved with them")


# --------------------------------------------------------------------------- write


def save_model(model: Model, folder: Path, family: Architecture, files: Mapping[str, Any] | None = None) -> None:
    """Save a model so that transformers loads it with the same logits, in the precision of its parameters.

    Args:
        folder: created; an existing one must be empty.
        files: contents of the JSON files besides the weights, and bytes of others, by name. Fields of config.json
            that do not describe the model stay.

    Raises:
        CheckpointError: the family cannot hold the model; names the field.
        DiskError: the folder cannot be written, or holds other contents.
    """
    contents = dict(files or {})
    contents[CONFIG] = fields = family.fields(model, contents.get(CONFIG, {}))
    data = {name: value if isinstance(value, bytes) else _json_bytes(value) for name, value in contents.items()}
    storage.make_folder(folder.parent)
    storage.write_folder(folder, data | _weight_bytes(their_tensors(model, family, fields)))


def their_tensors(model: Model, family: Architecture, fields: Fields) -> dict[str, Tensor]:
    """The tensors of a folder that holds the model, by their names in it."""
    values = family.weights(model)
    config, vocab_size = family.config(fields)
    tensors: dict[str, Tensor] = {}
    for ours, parts in family.table(config, vocab_size, fields).items():
        rows = values[ours].detach().cpu().split([part.rows for part in parts])
        for part, own in zip(parts, rows, strict=True):
            tensors[part.name] = part.change.undone(own).reshape(part.shape)
    tensors |= family.constants(model)
    return {family.written(name): tensor for name, tensor in tensors.items()}


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode()


def _weight_bytes(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Files of tensors: one, or several of at most SHARD_BYTES with their index."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    numbered = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    names = numbered if len(shards) > 1 else [WEIGHTS]
    files = {
        name: tensors_to_bytes(shard, metadata={"format": "pt"}) for name, shard in zip(names, shards, strict=True)
    }
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
        }
        files[INDEX] = _json_bytes(index)
    return files


# --------------------------------------------------------------------------- fields of config.json


# Most blocks, positions and tokens that are read from config.json.
MOST_BLOCKS, MOST_CONTEXT, MOST_VOCABULARY = 2_000, 1 << 24, 1 << 22
MOST = {
    "num_hidden_layers": MOST_BLOCKS, "n_layer": MOST_BLOCKS, "vocab_size": MOST_VOCABULARY,
    "max_position_embeddings": MOST_CONTEXT, "n_positions": MOST_CONTEXT, "sliding_window": 2**31 - 1,
    "original_max_position_embeddings": MOST_CONTEXT,
}  # fmt: skip


def largest(size: str) -> int:
    """Largest accepted size of a model, about ten times the largest released one; lists of blocks and tables of
    positions are created before any weight is read."""
    return MOST.get(size, 1 << 20)


def shown(value: object) -> str:
    """A value as a message shows it: on one line, and cut where it is long."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 1] + "…"


class NotCovered(CheckpointError):  # noqa: N818
    """A field of config.json with a valid value that models here do not support."""


def refuse(field: str, value: object, expected: str, fix: str = "") -> NotCovered:
    """The error for a field of config.json that is not covered; the reader of the folder adds the place, and advice if
    `fix` is empty."""
    return NotCovered(f"{field} is {shown(value)}, which is not covered; expected {expected}", fix=fix)


def check_covered(rules: Sequence[tuple[str, object, Sequence[object]]], fix: str = "") -> None:
    """Raise CheckpointError at the first field, of (field, value, covered values), that is not covered."""
    for field, value, covered in rules:
        if value not in covered:
            raise refuse(field, value, " or ".join(map(repr, covered)), fix)


def with_defaults(defaults: Fields, given: object, name: str) -> Fields:
    """Complete a section with the values of fields that are missing or null."""
    if not isinstance(given, dict):
        raise CheckpointError(f"{name} is not a JSON object", fix=ANOTHER_COPY)
    return {**defaults, **{key: value for key, value in given.items() if value is not None}}


def merged(old: Fields, new: Fields) -> Fields:
    """Merge the new fields with the old fields that they do not replace."""
    both = {**old, **new}
    for key, value in new.items():
        # Positions are replaced as a whole, or parts of another method would stay.
        if isinstance(value, dict) and isinstance(old.get(key), dict) and key != "rope_parameters":
            both[key] = merged(old[key], value)
    # Other names of written fields, and the former precision of the file.
    dropped = ("image_token_id", "dtype", "torch_dtype")
    return {key: value for key, value in both.items() if key in new or key not in dropped}


def dtype_name(model: Model) -> str:
    """Name of the dtype of a model's parameters, as in config.json."""
    return str(next(model.parameters()).dtype).removeprefix("torch.")
