"""Quantized weights in a checkpoint, and the refusal to train them.

    NAME.int8, int8 (out, in)  and  NAME.scale (out,)

in place of the tensor NAME. The value `quantized` of the checkpoint's state says which weights they were made of.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unpad.errors import CheckpointError, RecipeError
from unpad.nn.native.quantized import MOST, MOST_INPUTS, QuantizedWeight, to_int8
from unpad.run.checkpoint import State
from unpad.storage.reading import known_fields, misfit

KEY = "quantized"  # of the record among the values of a checkpoint
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
    if KEY not in state.values:
        return None
    if fault := misfit(state.values[KEY], Quantized):
        what = f"the record of its quantized weights is damaged: {fault}"
        raise CheckpointError(what, where=f"{folder}, {KEY}", fix=ANOTHER)
    record = Quantized(**known_fields(Quantized, state.values[KEY]))
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
