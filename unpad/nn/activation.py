"""Activations of the feed-forward part, plain and gated (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from unpad.nn.native import library
from unpad.nn.native.activation import KINDS, activation

Kind = Literal["relu", "gelu", "gelu_tanh", "quick_gelu", "geglu", "geglu_tanh", "swiglu"]
GATED = ("geglu", "geglu_tanh", "swiglu")


def activate(kind: Kind, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute act(x + bias), or act(gate) * value for the gated kinds.

    Args:
        kind: quick_gelu is x * sigmoid(1.702 x), the approximation of gelu that CLIP was trained with (Hendrycks and
            Gimpel 2016, arXiv 1606.08415, section 2); gelu_tanh and geglu_tanh have their approximation by tanh.
        x: (total_tokens, hidden), or (total_tokens, 2 * hidden) with the gate first.
        bias: as wide as x, of its dtype; None for none.

    Returns:
        (total_tokens, hidden).
    """
    if kind in KINDS and library.runs(x):
        return activation(kind, x, bias)
    if bias is not None:
        x = x + bias
    if kind in GATED:
        gate, value = x.chunk(2, -1)
        if kind == "swiglu":
            return F.silu(gate) * value
        return F.gelu(gate, approximate="tanh" if kind == "geglu_tanh" else "none") * value
    if kind == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    return F.relu(x) if kind == "relu" else F.gelu(x)
