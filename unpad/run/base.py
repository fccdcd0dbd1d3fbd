"""Runs made of another: with adapters, whose base is a run that is not copied; `export --merge`, which adds them; and
`export --int8`, with weights of 8 bits.

A checkpoint with adapters holds these alone; its value `base` has the other run's folder and the sha256 of its weights.
Quantized are matrices of linear layers and embeddings: in place of a tensor NAME there are

    NAME.int8, int8 (out, in)  and  NAME.scale (out,)

and the value `quantized` of the checkpoint's state says which weights they were made of.
"""

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from unpad import storage
from unpad.data.family import family_of
from unpad.errors import CheckpointError, RecipeError
from unpad.models import build_model, model_config
from unpad.models.adapters import merged
from unpad.models.contract import Model
from unpad.nn.native.quantized import MOST, MOST_INPUTS, QuantizedWeight, to_int8
from unpad.nn.precision import DTYPES, Precision
from unpad.recipes.recipe import Recipe
from unpad.run import checkpoint
from unpad.run import folder as run_folder
from unpad.run.checkpoint import State, model_tensors, newest_weights
from unpad.run.folder import MADE_BY, find_run, refuse_run, run_recipe
from unpad.run.kept import open_files
from unpad.storage.disk import is_private
from unpad.storage.reading import known_fields, misfit, shown

KEY, QUANTIZED = "base", "quantized"  # of records among the values of a checkpoint


@dataclass(frozen=True)
class Base:
    """Record of a base in the checkpoints of its adapters.

    Args:
        run: folder of the base's run, absolute.
        sha256: of its weights.
        scaling: factor on the adapters' outputs.
        precision: one of `DTYPES`, the dtype of the weights in `lowered` while the adapters trained.
    """

    run: str
    sha256: str
    scaling: Annotated[float, Field(gt=-1e30, lt=1e30)]
    precision: Annotated[Precision, Field(pattern=rf"^({'|'.join(DTYPES)})$")]
    lowered: list[str]


def read_base(state: State, folder: Path) -> Base:
    """The record of a run's base in its checkpoint, which must have one.

    Raises:
        CheckpointError: it is damaged.
    """
    values = state.values[KEY]
    if fault := misfit(values, Base):
        raise _damaged(fault, folder)
    return Base(**known_fields(Base, values) | {"scaling": float(values["scaling"])})


def _damaged(fault: str, folder: Path) -> CheckpointError:
    what, fix = f"the record of its base is damaged: {fault}", "use another copy of the run"
    return CheckpointError(what, where=f"{folder}, base", fix=fix)


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """sha256 of weights, over names, types, shapes and numbers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def start_weights(recipe: Recipe) -> tuple[Path, dict[str, Tensor]]:
    """The run to train adapters on, and its weights.

    Raises:
        RecipeError: the recipe names no run, or there is none.
    """
    if recipe.train.init_from is None:
        what = "adapters need a trained model, and the recipe starts from random weights"
        raise RecipeError(what, where="lora", fix="name the model's run: train.init_from=RUN")
    folder = run_folder.find_run(recipe.train.init_from)
    return folder, trainable_weights(folder)


def trainable_weights(folder: Path) -> dict[str, Tensor]:
    """`run_weights` for a training that starts from them.

    Raises:
        RecipeError: they are quantized.
    """
    weights, state = run_weights(folder)
    refuse_training(read_quantized(state, folder), folder)
    return weights


def run_weights(folder: Path) -> tuple[dict[str, Tensor], State]:
    """Weights of a run as a plain model, adapters merged, in fp32; also their checkpoint.

    The best by held-out value, or the newest if nothing was held out.

    Raises:
        CheckpointError: there is no usable checkpoint, or the base of its adapters is missing or has changed.
    """
    weights, state = stored_weights(folder)
    return widened(weights), state


def stored_weights(folder: Path) -> tuple[dict[str, Tensor], State]:
    """`run_weights`, in which quantized weights stay so."""
    trained, state = newest_weights(folder)
    if read_quantized(state, folder) is not None:
        return packed_weights(trained, folder), state
    if KEY not in state.values:
        return trained, state
    base = read_base(state, folder)
    weights, dtype = _base_weights(base, folder), DTYPES[base.precision]
    if unknown := [name for name in base.lowered if name not in weights]:
        raise _damaged(f'"lowered" names {shown(unknown[0])}, which the base does not have', folder)
    lowered = {name: weights[name].to(dtype).to(weights[name].dtype) for name in base.lowered}
    return merged({**weights, **lowered}, trained, base.scaling), state


def places_of(recorded: str, folder: Path) -> list[Path]:
    """Runs in a recorded folder, and of its name beside the run's `folder`, in case both were copied."""
    named = Path(recorded), folder.parent / Path(recorded).name
    return [place for place in named if os.path.isfile(place / run_folder.RECIPE)]  # False for a name of any length


def _base_weights(base: Base, folder: Path) -> dict[str, Tensor]:
    """Weights of a base, from one of its `places`."""
    places = places_of(base.run, folder)
    for place in places:
        weights, _ = run_weights(place)
        if fingerprint(weights) == base.sha256:
            return weights
    if places:
        what = f"the weights of {places[0]} are not those that the adapters were trained on"
        raise CheckpointError(what, where=str(folder), fix="put that run's weights back, or tune the new ones")
    fix = "put that run back, or beside this one"
    raise CheckpointError(f"the adapters were trained on the run {base.run}, which is gone", where=str(folder), fix=fix)


# Files that are not copied.
LEFT = (storage.LOCK, run_folder.RECIPE, run_folder.COMMAND, "report.html", "evaluations.jsonl", "evaluation.json")


def merge_run(name: str | Path, out: Path) -> Path:
    """Write a run without adapters that is equivalent to a run with adapters, and needs neither peft nor the base.

    Its logits differ from the adapted model's by the rounding of fp32. It has the best weights, and cannot be resumed.

    Args:
        name: run directory, or its name under runs/.
        out: directory of the new run.

    Returns:
        `out`.

    Raises:
        RecipeError: the run has no adapters, or `out` holds a run already.
        CheckpointError: the base of the adapters is missing or has changed.
        RunInUseError: another process writes to `out`.
    """
    folder = run_folder.find_run(name)
    run_folder.refuse_run(out)
    weights, state = run_weights(folder)
    if KEY not in state.values:
        raise RecipeError("this run has no adapters to merge", where=str(folder), fix="use it as it is")
    write_derived(folder, out, weights, state, {run_folder.MADE_BY: f"unpad export {folder} --merge"})
    return out


def write_derived(
    folder: Path,
    out: Path,
    tensors: Mapping[str, Tensor],
    state: State,
    about: Mapping[str, str],
    values: Mapping[str, object] | None = None,
) -> None:
    """Write a run with the files and the recipe of another, with other weights and without adapters.

    Args:
        tensors: of the model in its checkpoint.
        state: checkpoint of the weights that they were made of.
        about: fields of its `run.json`, MADE_BY among them.
        values: further values of its checkpoint.
    """
    recipe, command = run_folder.run_recipe(folder), run_folder.read_command(folder)
    storage.make_folder(out, private=is_private(folder))
    others = {key: value for key, value in state.values.items() if key not in (KEY, run_folder.OF_RUN)}
    kept = {**others, **(values or {})}
    command.pop(run_folder.RUN_ID, None)
    command |= about
    with storage.RunLock(out):
        for path in sorted(folder.iterdir()):
            if path.is_file() and path.name not in LEFT:
                storage.write_atomic(out / path.name, path.read_bytes(), private=is_private(path))
        if (folder / run_folder.KEPT).is_dir():
            storage.write_folder(out / run_folder.KEPT, storage.read_folder(folder / run_folder.KEPT))
        checkpoint.save_named(out / run_folder.CHECKPOINTS, "best", State(state.step, model_tensors(tensors), kept))
        storage.write_atomic(out / run_folder.COMMAND, json.dumps(command, ensure_ascii=False, indent=1) + "\n")
        # Last: now it is a run.
        storage.write_atomic(out / run_folder.RECIPE, recipe.model_copy(update={"lora": None}).to_yaml())


LEAST_INPUTS = 32  # of a weight that is quantized: with fewer a scale for each output takes much of what is saved


def quantize_run(name: str, out: Path) -> list[str]:
    """Write a run with quantized weights, which all verbs that only read weights open; adapters are merged.

    Returns:
        Lines on what was written.

    Raises:
        RecipeError: there is no such run, it is quantized already, or `out` holds a run.
        CheckpointError: its weights cannot be used.
        NonFiniteError: a scale is beyond the numbers of fp16; names it.
        DiskError: it cannot be written.
    """
    folder = find_run(name)
    refuse_run(out)
    weights, state = stored_weights(folder)
    if (record := read_quantized(state, folder)) is not None:
        fix = f"quantize the original: {record.original}"
        raise RecipeError(f"its weights are {record.weights} already", where=str(folder), fix=fix)
    recipe = run_recipe(folder)
    model = build_model(model_config(recipe.model), family_of(recipe).num_outputs(open_files(recipe, folder)))
    names = quantized_names(model)
    tensors = quantized_tensors(weights, names)
    values = {QUANTIZED: {"weights": KIND, "original": str(folder.resolve()), "sha256": fingerprint(weights)}}
    write_derived(folder, out, tensors, state, {MADE_BY: f"unpad export {folder} --{KIND}"}, values)
    before, after = (sum(tensor.nbytes for tensor in each.values()) for each in (weights, tensors))
    return [
        f"{len(names) or 'no'} {KIND} weights; {before:,} bytes become {after:,}, {after / before:.3f} times as many",
        f"written to {out}",
    ]


def quantized_names(model: Model) -> set[str]:
    """Names of the weights of a model that are quantized."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Embedding)}
    return {f"{name}.weight" for name, each in layers.items() if LEAST_INPUTS <= each.weight.shape[1] <= MOST_INPUTS}


# --------------------------------------------------------------------------- quantized weights in a checkpoint


KIND = "int8"
NUMBERS, SCALE = f".{KIND}", ".scale"
ANOTHER = "use another copy of the run, or quantize the original again"


@dataclass(frozen=True)
class Quantized:
    """Record of quantized weights in their checkpoint.

    Args:
        weights: their kind, int8.
        original: folder of the run, absolute, that they were made of.
        sha256: of its weights.
    """

    weights: str
    original: str
    sha256: str


def read_quantized(state: State, folder: Path) -> Quantized | None:
    """The record of a checkpoint; None if its weights are not quantized.

    Raises:
        CheckpointError: it is damaged, or of a kind that is no longer read.
    """
    if QUANTIZED not in state.values:
        return None
    if fault := misfit(state.values[QUANTIZED], Quantized):
        what = f"the record of its quantized weights is damaged: {fault}"
        raise CheckpointError(what, where=f"{folder}, {QUANTIZED}", fix=ANOTHER)
    record = Quantized(**known_fields(Quantized, state.values[QUANTIZED]))
    if record.weights != KIND:
        fix = f"export {record.original} again, with --int8 or as a file .gguf with --type q4_0"
        raise CheckpointError(f"its weights are {record.weights}, which no verb reads", where=str(folder), fix=fix)
    return record


def refuse_training(record: Quantized | None, folder: Path) -> None:
    """Refuse to train quantized weights.

    Raises:
        RecipeError: they are; names the original.
    """
    if record is not None:
        what = f"its weights are {record.weights}, which cannot be trained"
        raise RecipeError(what, where=str(folder), fix=f"train from the original: train.init_from={record.original}")


def quantized_tensors(weights: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """Tensors of a checkpoint in which the weights of these names are quantized."""
    tensors = {name: tensor for name, tensor in weights.items() if name not in names}
    for name in names:
        tensors[name + NUMBERS], tensors[name + SCALE] = to_int8(weights[name].float())
    return tensors


def packed_weights(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Weights by name, of a checkpoint with quantized ones.

    Raises:
        CheckpointError: a scale or numbers are missing, of another shape or type, or impossible; names the tensor.
    """
    left, weights = dict(tensors), dict[str, Tensor]()
    for name in [name.removesuffix(NUMBERS) for name in tensors if name.endswith(NUMBERS)]:
        numbers, scales = left.pop(name + NUMBERS), left.pop(name + SCALE, None)
        if fault := _fault(name, numbers, scales):
            raise CheckpointError(fault, where=str(folder), fix=ANOTHER)
        assert scales is not None
        weights[name] = QuantizedWeight.pack(numbers, scales)
    return weights | left


def _fault(name: str, numbers: Tensor, scales: Tensor | None) -> str:
    """The fault of a weight's tensors, with the name of the one; "" without any."""
    shown = name + NUMBERS, name + SCALE
    if numbers.dtype != torch.int8 or numbers.dim() != 2:
        return f"{shown[0]} is {numbers.dtype} of shape {tuple(numbers.shape)}, which no {KIND} weight is"
    if numbers.shape[1] > MOST_INPUTS:
        return f"{shown[0]} has {numbers.shape[1]:,} inputs, {MOST_INPUTS:,} are the most"
    if bool((numbers < -MOST).any()):
        return f"{shown[0]} holds numbers below {-MOST}"
    if scales is None:
        return f"{shown[1]} is missing"
    if scales.dtype != torch.float32 or tuple(scales.shape) != (len(numbers),):
        return f"{shown[1]} is {scales.dtype} of shape {tuple(scales.shape)}, expected fp32 of shape {(len(numbers),)}"
    usable = bool((torch.isfinite(scales) & (scales >= 0)).all())
    return "" if usable else f"{shown[1]} holds NaN, infinite or negative values"


def widened(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Plain tensors of weights of which some are quantized."""
    return {name: w.widened() if isinstance(w, QuantizedWeight) else w for name, w in weights.items()}


def hold_quantized(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a model that only computes its quantized weights, in place of the widened parameters."""
    for name, weight in weights.items():
        if isinstance(weight, QuantizedWeight):
            layer, _, last = name.rpartition(".")
            setattr(model.get_submodule(layer), last, torch.nn.Parameter(weight, requires_grad=False))
