"""Residual add and normalisation over channels in one operation, accumulated in fp32 or wider."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unpad.batching.layout import Layout, PaddedLayout
from unpad.nn.draws import draw, dropout
from unpad.nn.linear import compute_dtype
from unpad.nn.native import library
from unpad.nn.native.norm import add_norm
from unpad.nn.precision import wide_dtype, widened


def _runs_native(residual: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    wide = wide_dtype(dtype)
    fits = residual.device.type == "cpu" and residual.dtype == weight.dtype == wide and library.is_plain(weight)
    return fits and library.computes(dtype)


class Norm(nn.Module):
    """RMSNorm, g * x / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019, arXiv 1910.07467), or LayerNorm,
    g * (x - mean) / sqrt(var + eps) + b (Ba et al. 2016, arXiv 1607.06450), of a residual stream.

    Args:
        dropout: share of `delta` that training sets to zero.
    """

    def __init__(self, kind: Literal["layernorm", "rmsnorm"], dim: int, eps: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if kind == "layernorm" else None
        self.eps, self.dropout = eps, dropout

    def forward(
        self,
        residual: Tensor,
        delta: Tensor | None = None,
        layout: Layout | PaddedLayout | None = None,
        index: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Add a branch's output to the residual stream, and normalise the sum for the next branch.

        Args:
            residual: (total_tokens, dim), fp32 or wider; without a delta in any dtype.
            delta: (total_tokens, dim) in the computing dtype; None at the beginning of the stream.
            layout: of the tokens, which dropout draws by; None: by the places of rows.
            index: (total_tokens,) int64, the tokens of `layout` that these are; None: all.

        Returns:
            The new residual, and its normalised form in the computing dtype.
        """
        dtype = compute_dtype(residual)
        share = self.dropout if self.training and delta is not None else 0.0
        seed, places = (draw(), None if layout is None else layout.places) if share else (0, None)
        if places is not None and index is not None:
            places = places.index_select(0, index)
        if _runs_native(residual, self.weight, dtype):
            return add_norm(
                residual,
                delta,
                self.weight,
                self.bias,
                eps=self.eps,
                centred=self.bias is not None,
                dropout=share,
                seed=seed,
                places=places,
                dtype=dtype,
            )
        if delta is not None:
            residual = residual + dropout(delta, share, seed, places)
        wide = widened(residual)
        weight, bias = self.weight.to(wide.dtype), None if self.bias is None else self.bias.to(wide.dtype)
        if bias is None:
            y = F.rms_norm(wide, weight.shape, weight, self.eps)
        else:
            y = F.layer_norm(wide, weight.shape, weight, bias, self.eps)
        return residual, y.to(dtype)
