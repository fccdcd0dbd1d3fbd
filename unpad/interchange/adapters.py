"""Adapters under the names of a Hugging Face model, as files of a folder that peft opens with that model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from unpad.interchange.folder import Table
from unpad.models.adapters import DOWN, NORM, UP, peft_files
from unpad.recipes.adapters import LoraSettings


def adapter_files(kept: Mapping[str, Tensor], settings: LoraSettings, table: Table, base: str) -> dict[str, bytes]:
    """Files of adapters; a layer here that stacks several layers there becomes one adapter for each.

    Args:
        kept: `kept_weights` of an adapted decoder.
        table: of the decoder's family.
        base: place of the model there.
    """
    theirs: dict[str, Tensor] = {}
    transposed = False
    for layer in (name.removesuffix(UP) for name in kept if name.endswith(UP)):
        parts = table[f"{layer}.weight"]
        heights = [part.rows for part in parts]
        ups, norm = kept[layer + UP].split(heights), kept.get(layer + NORM)
        norms = [None] * len(parts) if norm is None else norm.split(heights)
        for part, up, own_norm in zip(parts, ups, norms, strict=True):
            there = part.name.removesuffix(".weight")
            theirs[there + DOWN] = kept[layer + DOWN].clone()  # the format refuses two names for one memory
            theirs[there + UP] = up / part.change.scale
            if own_norm is not None:
                theirs[there + NORM] = own_norm / part.change.scale
            transposed |= part.change.transposed
    return peft_files(theirs, settings, base, {"task_type": "CAUSAL_LM", "fan_in_fan_out": transposed})
