"""Recipe section on adapters."""

from __future__ import annotations

import math

from pydantic import Field

from unpad.recipes.section import Section


class LoraSettings(Section):
    """Low-rank adapters of linear layers, trained while the weights of `train.init_from` stay as they are."""

    r: int = Field(8, ge=1, description="Rank of an adapter.")
    alpha: int = Field(16, ge=1, description="An adapter's output is scaled by alpha / r.")
    dropout: float = Field(0.0, ge=0, lt=1, description="On the inputs of adapters.")
    targets: list[str] = Field(
        ["*"],
        min_length=1,
        description="Linear layers of blocks that get an adapter: patterns (fnmatch) of the whole name or of its last "
        "part, such as to_qkv; default all.",
    )
    rslora: bool = Field(
        False, description="Scale by alpha / sqrt(r) instead (Kalajdzievski 2023, arXiv 2312.03732), for large ranks."
    )
    dora: bool = Field(
        False,
        description="Also learn the norm of every output's weights, apart from their direction (Liu et al. 2024, "
        "arXiv 2402.09353).",
    )

    @property
    def scaling(self) -> float:
        """Factor on an adapter's output."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)
