"""Low-rank adapters of a model's linear layers (LoRA; Hu et al. 2021, arXiv 2106.09685), by peft.

`adapt` keeps the model's class: everything that takes the model takes the adapted one. The model's own parameters, its
base, are frozen and change their names: `to_qkv.weight` becomes `to_qkv.base_layer.weight`. A run keeps the adapters
alone, and `merged` adds them to the base's weights, without peft.
"""

import json
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

import torch
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor, nn

from unpad.errors import RecipeError
from unpad.models.contract import Model
from unpad.models.decoder import Decoder
from unpad.nn.block import Stream
from unpad.nn.draws import draw, dropout
from unpad.nn.linear import Linear
from unpad.recipes.training import LoraSettings

NAME = "default"  # of the adapters in peft, which may hold several sets
ADAPTER, BASE = ".lora_", ".base_layer"  # in the names of an adapter's parameters, and of those of its layer
DOWN, UP, NORM = (f"{ADAPTER}{part}.{NAME}.weight" for part in ("A", "B", "magnitude_vector"))
PEFT_PREFIX = "base_model.model."  # of names in files of peft
ADAPTER_FOLDER = "adapter"  # of a run, for peft
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def adapt(model: Model, settings: LoraSettings) -> None:
    """Freeze a model and add adapters in fp32 to linear layers of its blocks; at first they change no output.

    Adapters are drawn from torch's generator. Layers outside blocks get none, because the model reads the weights of
    some of them directly.

    Raises:
        RecipeError: peft is not installed, or a target matches no linear layer of a block.
    """
    layers = _block_layers(model)
    for pattern in settings.targets:
        if not any(_matches(name, pattern) for name in layers):
            known = sorted({name.rpartition(".")[2] for name in layers})
            fix = f"use names such as {', '.join(known[:6])}" if known else "train without the section lora"
            raise RecipeError(f'"{pattern}" matches no linear layer of a block', where="lora.targets", fix=fix)
    chosen = [name for name in layers if any(_matches(name, pattern) for pattern in settings.targets)]
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        fix = "install it with: pip install 'unpad[lora]'"
        raise RecipeError("adapters need the package peft, which is not installed", where="lora", fix=fix) from None
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(**_peft_settings(settings, chosen)), model, NAME)
    if settings.dropout:
        for name, module in model.named_modules():
            if name.split(".")[-2:-1] == ["blocks"]:
                _drop_by_place(module, settings.dropout)
    found = {name.partition(ADAPTER)[0] for name in adapter_names(model)}
    assert found == set(chosen), f"peft adapted other layers than asked: {sorted(found.symmetric_difference(chosen))}"


class _Dropout(nn.Module):
    """Dropout of an adapter's inputs, which are rows of one of the runs of its block.

    Attributes:
        places: of every run of the pass, (num_rows,) int64; runs of equal numbers of rows have equal places.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share, self.places = share, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return dropout(x, self.share, draw(), next((one for one in self.places if len(one) == len(x)), None))


def _drop_by_place(block: nn.Module, share: float) -> None:
    """Let the adapters of a block draw dropout by the places of its tokens."""
    found = [drops for one in block.modules() if isinstance(drops := getattr(one, "lora_dropout", None), nn.ModuleDict)]
    placed = [_Dropout(share) for _ in found]
    for drops, drop in zip(found, placed, strict=True):
        drops[NAME] = drop

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        run = args[0] if isinstance(args[0], Stream) else args[2].gather  # of a block of the set encoder
        runs = [run.layout] if isinstance(run, Stream) else [run.queries, run.keys]
        places = [layout.places for layout in runs if layout.places is not None]
        if places and (index := kwargs.get("keep_index")) is not None:
            places.append(places[0].index_select(0, index))
        for drop in placed:
            drop.places = places

    block.register_forward_pre_hook(before, with_kwargs=True)


def _block_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Linear layers inside blocks by their names, as in the model without adapters."""
    return {
        name.removesuffix(BASE): module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and "blocks" in name.split(".")
    }


def _matches(name: str, pattern: str) -> bool:
    return fnmatch(name, pattern) or fnmatch(name.rpartition(".")[2], pattern)


def _peft_settings(settings: LoraSettings, layers: list[str]) -> dict[str, Any]:
    """Fields of peft's LoraConfig for adapters of the layers with these whole names."""
    return {
        "r": settings.r,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rslora,
        "use_dora": settings.dora,
        "target_modules": layers,
        "bias": "none",
    }


def adapter_names(model: nn.Module) -> list[str]:
    """Names of the parameters of a model's adapters; none of a model without adapters."""
    return [name for name, _ in model.named_parameters() if ADAPTER in name]


def draw_adapters(model: nn.Module) -> None:
    """Draw the matrices of adapters that begin as zero, so that a proof sees what adapters do."""
    for name, parameter in model.named_parameters():
        if name.endswith(UP):
            nn.init.normal_(parameter, std=0.02)


def kept_weights(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of a model that a run keeps: all, or in an adapted model those outside its base."""
    state: dict[str, Tensor] = model.state_dict()
    if not any(ADAPTER in name for name in state):
        return state
    base = {name for name, _ in model.named_parameters(remove_duplicate=False) if ADAPTER not in name}
    return {name: tensor for name, tensor in state.items() if name not in base}


def load_kept(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load tensors that `kept_weights` named; the others stay as they are."""
    unknown = model.load_state_dict(weights, strict=False).unexpected_keys
    assert not unknown, f"the model has no {unknown}"


# --------------------------------------------------------------------------- the base in low precision


def lower_base(model: Model, dtype: torch.dtype) -> list[str]:
    """Hold the large weights of an adapted model's base in the computing dtype, so that no step copies them.

    These are the linear layers of blocks, and a decoder's embedding and head. Adapters and norms stay in fp32.

    Returns:
        Names of the parameters that changed, as in the model without adapters.
    """
    parts = [*_block_layers(model).values()]
    for decoder in (module for module in model.modules() if isinstance(module, Decoder)):
        parts += [decoder.embed, *([] if decoder.head is None else [decoder.head])]
    large = {id(parameter) for part in parts for parameter in part.parameters()}
    lowered = []
    for name, parameter in model.named_parameters():
        if id(parameter) in large and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
            lowered.append(name.replace(BASE, ""))
    return lowered


# --------------------------------------------------------------------------- without adapters


def merged(base: Mapping[str, Tensor], kept: Mapping[str, Tensor], scaling: float) -> dict[str, Tensor]:
    """Weights of the model without adapters that computes the same.

    Args:
        base: weights of the model that was adapted.
        kept: `kept_weights` of the adapted model.
        scaling: of its `LoraSettings`.
    """
    weights = {**base, **{name: tensor for name, tensor in kept.items() if ADAPTER not in name}}
    for layer in (name.removesuffix(UP) for name in kept if name.endswith(UP)):
        weight = weights[f"{layer}.weight"]
        whole = weight + scaling * (kept[layer + UP] @ kept[layer + DOWN]).to(weight.dtype)
        if (norm := kept.get(layer + NORM)) is not None:
            whole = whole * (norm / whole.norm(dim=1))[:, None]
        weights[f"{layer}.weight"] = whole
    return weights


def peft_files(
    kept: Mapping[str, Tensor], settings: LoraSettings, base: str, more: Mapping[str, object] | None = None
) -> dict[str, bytes]:
    """The files of a folder that peft opens as an adapter of this model.

    Args:
        kept: `kept_weights` of an adapted model.
        base: place of the base.
        more: further fields of adapter_config.json.
    """
    adapters = {name: tensor for name, tensor in kept.items() if ADAPTER in name}
    layers = sorted({name.partition(ADAPTER)[0] for name in adapters})
    config = {"peft_type": "LORA", **_peft_settings(settings, layers), "inference_mode": True}
    config |= {"base_model_name_or_path": base, "task_type": None, **(more or {})}
    short = {name: name.replace(f".{NAME}.weight", "" if name.endswith(NORM) else ".weight") for name in adapters}
    tensors = {PEFT_PREFIX + short[name]: tensor.detach().cpu().contiguous() for name, tensor in adapters.items()}
    return {
        CONFIG_FILE: (json.dumps(config, ensure_ascii=False, indent=1) + "\n").encode(),
        WEIGHTS_FILE: tensors_to_bytes(tensors),
    }
