"""Quantized weights in a checkpoint, and the refusal to train them.

    NAME.int8, int8 (out, in)       and  NAME.scale (out,)
    NAME.int4, uint8 (out, in / 2)  and  NAME.scale (out, in / 32), as `nn.native.quantized.to_int4` has them

in place of the tensor NAME. The value `quantized` of the checkpoint's state says which weights they were made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unpad.errors import CheckpointError, RecipeError
from unpad.nn.native.quantized import GROUP, MOST, MOST_INPUTS, PACKED, Kind, QuantizedWeight, to_int4, to_int8
from unpad.run.checkpoint import State
from unpad.storage.reading import known_fields, misfit

KEY = "quantized"  # of the record among the values of a checkpoint
SCALE = ".scale"
ANOTHER = "use another copy of the run, or quantize the original again"
# Types of numbers; and of scales.
NUMBERS: dict[Kind, torch.dtype] = {"int8": torch.int8, "int4": torch.uint8}
SCALES: dict[Kind, tuple[torch.dtype, ...]] = {"int8": (torch.float32, torch.float16), "int4": (torch.float16,)}


@dataclass(frozen=True)
class Quantized:
    """Record of quantized weights in their checkpoint.

    Args:
        weights: kind that was asked for; int4 runs have some of int8.
        original: folder of the run, absolute, that they were made of.
        sha256: of its weights.
    """

    weights: str
    original: str
    sha256: str


def read_quantized(state: State, folder: Path) -> Quantized | None:
    """The record of a checkpoint; None if its weights are not quantized.

    Raises:
        CheckpointError: it is damaged.
    """
    if KEY not in state.values:
        return None
    if fault := misfit(state.values[KEY], Quantized):
        what = f"the record of its quantized weights is damaged: {fault}"
        raise CheckpointError(what, where=f"{folder}, {KEY}", fix=ANOTHER)
    return Quantized(**known_fields(Quantized, state.values[KEY]))


def refuse_training(record: Quantized | None, folder: Path) -> None:
    """Refuse to train quantized weights.

    Raises:
        RecipeError: they are; names the original.
    """
    if record is not None:
        what = f"its weights are {record.weights}, which cannot be trained"
        raise RecipeError(what, where=str(folder), fix=f"train from the original: train.init_from={record.original}")


def quantized_tensors(weights: Mapping[str, Tensor], kinds: Mapping[str, Kind], asked: Kind) -> dict[str, Tensor]:
    """Tensors of a checkpoint with quantized weights.

    Args:
        kinds: of the weights to quantize, by name.
        asked: kind of the run; in one of int4 all scales are fp16, as in GGUF.
    """
    tensors = {}
    for name, tensor in weights.items():
        if name not in kinds:
            tensors[name] = tensor
        elif kinds[name] == "int4":
            tensors[f"{name}.int4"], tensors[name + SCALE] = to_int4(tensor.float())
        else:
            scale_dtype = torch.float16 if asked == "int4" else torch.float32
            tensors[f"{name}.int8"], tensors[name + SCALE] = to_int8(tensor.float(), scale_dtype)
    return tensors


def packed_weights(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Weights by name, of a checkpoint with quantized ones.

    Raises:
        CheckpointError: a scale or numbers are missing, of another shape or type, or impossible; names the tensor.
    """
    left, weights = dict(tensors), dict[str, Tensor]()
    for kind in NUMBERS:
        for name in [name.removesuffix(f".{kind}") for name in tensors if name.endswith(f".{kind}")]:
            numbers, scales = left.pop(f"{name}.{kind}"), left.pop(name + SCALE, None)
            if fault := _fault(name, kind, numbers, scales):
                raise CheckpointError(fault, where=str(folder), fix=ANOTHER)
            assert scales is not None
            weights[name] = PACKED[kind].pack(numbers, scales)
    return weights | left


def _fault(name: str, kind: Kind, numbers: Tensor, scales: Tensor | None) -> str:
    """The fault of a weight's tensors, with the name of the one; "" without any."""
    shown = f"{name}.{kind}", name + SCALE
    if numbers.dtype != NUMBERS[kind] or numbers.dim() != 2 or numbers.shape[1] % (GROUP // 2 if kind == "int4" else 1):
        return f"{shown[0]} is {numbers.dtype} of shape {tuple(numbers.shape)}, which no {kind} weight is"
    if kind == "int8" and numbers.shape[1] > MOST_INPUTS:
        return f"{shown[0]} has {numbers.shape[1]:,} inputs, {MOST_INPUTS:,} are the most"
    if kind == "int8" and bool((numbers < -MOST).any()):
        return f"{shown[0]} holds numbers below {-MOST}"
    if scales is None:
        return f"{shown[1]} is missing"
    expected = (len(numbers),) if kind == "int8" else (len(numbers), numbers.shape[1] // (GROUP // 2))
    if scales.dtype not in SCALES[kind] or tuple(scales.shape) != expected:
        return f"{shown[1]} is {scales.dtype} of shape {tuple(scales.shape)}, expected shape {expected}"
    if not bool(torch.isfinite(scales).all()):
        return f"{shown[1]} holds NaN or infinite values"
    if kind == "int8" and bool((scales < 0).any()):
        return f"{shown[1]} holds negative values"
    return ""


def widened(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Plain tensors of weights of which some are quantized."""
    return {name: w.widened() if isinstance(w, QuantizedWeight) else w for name, w in weights.items()}


def hold_quantized(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a model that only computes its quantized weights, in place of the widened parameters."""
    for name, weight in weights.items():
        if isinstance(weight, QuantizedWeight):
            layer, _, last = name.rpartition(".")
            setattr(model.get_submodule(layer), last, torch.nn.Parameter(weight, requires_grad=False))
