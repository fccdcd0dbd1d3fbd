"""Activations of the feed-forward part, plain and gated (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from unpad.native import library
from unpad.native.activation import activation

Kind = Literal["relu", "gelu", "geglu", "swiglu"]
GATED = ("geglu", "swiglu")


def activate(kind: Kind, x: Tensor) -> Tensor:
    """act(x), or act(gate) * value of the gated kinds.

    Args:
        x: (total_tokens, hidden), or (total_tokens, 2 * hidden) with the gate first.

    Returns:
        (total_tokens, hidden).
    """
    if library.runs(x):
        return activation(kind, x)
    if kind in GATED:
        gate, value = x.chunk(2, -1)
        return (F.silu(gate) if kind == "swiglu" else F.gelu(gate)) * value
    return F.relu(x) if kind == "relu" else F.gelu(x)
