"""Normalisation over channels, accumulated in fp32 at least."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """g * x / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019, arXiv 1910.07467); (..., dim) to (..., dim)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, (x.shape[-1],), self.weight.to(wide.dtype), self.eps)


class LayerNorm(nn.Module):
    """g * (x - mean) / sqrt(var + eps) + b (Ba et al. 2016, arXiv 1607.06450); (..., dim) to (..., dim)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.layer_norm(wide, (x.shape[-1],), self.weight.to(wide.dtype), self.bias.to(wide.dtype), self.eps)


def make_norm(kind: Literal["layernorm", "rmsnorm"], dim: int, eps: float) -> nn.Module:
    return RMSNorm(dim, eps) if kind == "rmsnorm" else LayerNorm(dim, eps)
