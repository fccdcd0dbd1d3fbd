"""Samples of vision and question tokens, and sets of members."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from unpad.batching.layout import Layout, build_layout
from unpad.models.vision_language.visual import VisionTokens
from unpad.nn.block import BlockConfig

M = TypeVar("M", bound=nn.Module)
WIDTH = 16
# Very different lengths in both runs, a sample without question and one without vision tokens.
VISION = [7, 1, 40, 12, 0, 3, 44]
QUESTION = [5, 2, 17, 0, 4, 1, 16]
# Members of sets, and a block of them.
SIZES = [1, 40, 2, 7, 1, 3, 12]
CONFIG = BlockConfig(width=WIDTH, heads=2, hidden=24, norm="layernorm", activation="gelu", bias=True)


def members_of(sizes: list[int]) -> Layout:
    """Layout of sets of so many members."""
    return build_layout(np.array(sizes, int))


def make_samples(
    vision: list[int] = VISION, question: list[int] = QUESTION, dtype: torch.dtype = torch.float64, seed: int = 0
) -> VisionTokens:
    generator = torch.Generator().manual_seed(seed)
    flat = [torch.randn(sum(n), WIDTH, generator=generator, dtype=dtype).requires_grad_() for n in (vision, question)]
    return VisionTokens(flat[0], build_layout(np.array(vision, int)), flat[1], build_layout(np.array(question, int)))


def moved(module: M, dtype: torch.dtype = torch.float64) -> M:
    """The module in eval with every parameter away from where it starts, so that zeros and ones hide no gradient."""
    torch.manual_seed(1)
    for parameter in module.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return module.to(dtype).eval()


def bounds_of(layout: Layout) -> list[tuple[int, int]]:
    return list(pairwise(layout.cu_seqlens.tolist()))
