"""Activations of the feed-forward part, plain and gated (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from unpad.nn.native import library
from unpad.nn.native.activation import KINDS, activation

Kind = Literal["relu", "gelu", "quick_gelu", "geglu", "swiglu"]
GATED = ("geglu", "swiglu")


def activate(kind: Kind, x: Tensor) -> Tensor:
    """Compute act(x), or act(gate) * value for the gated kinds.

    Args:
        kind: quick_gelu is x * sigmoid(1.702 x), the approximation of gelu that CLIP was trained with (Hendrycks and
            Gimpel 2016, arXiv 1606.08415, section 2).
        x: (total_tokens, hidden), or (total_tokens, 2 * hidden) with the gate first.

    Returns:
        (total_tokens, hidden).
    """
    if kind in KINDS and library.runs(x):
        return activation(kind, x)
    if kind in GATED:
        gate, value = x.chunk(2, -1)
        return (F.silu(gate) if kind == "swiglu" else F.gelu(gate)) * value
    if kind == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    return F.relu(x) if kind == "relu" else F.gelu(x)
