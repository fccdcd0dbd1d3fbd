"""`unpad export --int8`: a run with weights of 8 bits in place of 32, for less memory.

Matrices of linear layers and embeddings are quantized.
"""

from collections import Counter
from pathlib import Path

from torch import Tensor, nn

from unpad.data.family import family_of
from unpad.errors import RecipeError
from unpad.models import build_model, model_config
from unpad.models.contract import Model
from unpad.nn.native.quantized import MOST_INPUTS
from unpad.run.base import fingerprint, stored_weights, write_derived
from unpad.run.folder import MADE_BY, find_run, refuse_run, run_recipe
from unpad.run.kept import open_files
from unpad.run.quantized import KEY, KIND, quantized_tensors, read_quantized

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
    values = {KEY: {"weights": KIND, "original": str(folder.resolve()), "sha256": fingerprint(weights)}}
    write_derived(folder, out, tensors, state, {MADE_BY: f"unpad export {folder} --{KIND}"}, values)
    before, after = (sum(tensor.nbytes for tensor in each.values()) for each in (weights, tensors))
    return [
        f"{len(names) or 'no'} {KIND} weights; {before:,} bytes become {after:,}, {after / before:.3f} times as many",
        *_unchanged(model, weights, names),
        f"written to {out}",
    ]


def quantized_names(model: Model) -> set[str]:
    """Names of the weights of a model that are quantized."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Embedding)}
    return {f"{name}.weight" for name, each in layers.items() if LEAST_INPUTS <= each.weight.shape[1] <= MOST_INPUTS}


def _unchanged(model: Model, weights: dict[str, Tensor], names: set[str]) -> list[str]:
    """A line that counts the numbers that stay in fp32 by their kinds of layers."""
    counts = Counter[str]()
    for name, tensor in weights.items():
        if name not in names:
            layer, _, last = name.rpartition(".")
            counts[f"{type(model.get_submodule(layer)).__name__}.{last}"] += tensor.numel()
    shown = ", ".join(f"{number:,} of {layer}" for layer, number in counts.most_common())
    return [f"in fp32 as before: {shown}"] if shown else []
