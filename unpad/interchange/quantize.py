"""`unpad export --int8` and `--int4`: a run with weights of 8 or 4 bits in place of 32, for less memory.

Matrices of linear layers and embeddings are quantized. Layers outside blocks, embeddings and heads among them, become
int8 in either case.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from torch import Tensor, nn

from unpad.data.family import family_of
from unpad.errors import RecipeError
from unpad.models import build_model, model_config
from unpad.models.contract import Model
from unpad.nn.native.quantized import GROUP, MOST_INPUTS, Kind
from unpad.run.base import fingerprint, stored_weights, write_derived
from unpad.run.folder import MADE_BY, find_run, refuse_run, run_recipe
from unpad.run.kept import open_files
from unpad.run.quantized import KEY, quantized_tensors, read_quantized

LEAST_INPUTS = 32  # of a weight that is quantized: with fewer a scale for each output takes much of what is saved


def quantize_run(name: str, out: Path, kind: Kind) -> list[str]:
    """Write a run with quantized weights, which all verbs that only read weights open; adapters are merged.

    Args:
        kind: int8, or int4 for the layers of blocks.

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
    kinds = weight_kinds(model, kind)
    tensors = quantized_tensors(weights, kinds, kind)
    values = {KEY: {"weights": kind, "original": str(folder.resolve()), "sha256": fingerprint(weights)}}
    write_derived(folder, out, tensors, state, {MADE_BY: f"unpad export {folder} --{kind}"}, values)
    before, after = (sum(tensor.nbytes for tensor in each.values()) for each in (weights, tensors))
    counts = Counter(kinds.values())
    return [
        f"{' and '.join(f'{counts[one]} {one} weights' for one in sorted(counts)) or 'no weights'}; "
        f"{before:,} bytes become {after:,}, {after / before:.3f} times as many",
        *_unchanged(model, weights, kinds),
        f"written to {out}",
    ]


def weight_kinds(model: Model, kind: Kind) -> dict[str, Kind]:
    """The weights of a model that are quantized, by name, and how."""
    kinds: dict[str, Kind] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear | nn.Embedding):
            continue
        width = layer.weight.shape[1]
        if LEAST_INPUTS <= width <= MOST_INPUTS:
            fits = "blocks" in name.split(".") and width % GROUP == 0
            kinds[f"{name}.weight"] = kind if fits else "int8"
    return kinds


def _unchanged(model: Model, weights: dict[str, Tensor], kinds: dict[str, Kind]) -> list[str]:
    """A line that counts the numbers that stay in fp32 by their kinds of layers."""
    counts = Counter[str]()
    for name, tensor in weights.items():
        if name not in kinds:
            layer, _, last = name.rpartition(".")
            counts[f"{type(model.get_submodule(layer)).__name__}.{last}"] += tensor.numel()
    shown = ", ".join(f"{number:,} of {layer}" for layer, number in counts.most_common())
    return [f"in fp32 as before: {shown}"] if shown else []
