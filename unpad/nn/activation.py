"""Activations of the feed-forward part, plain and gated (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from unpad.nn.linear import rows_are_independent
from unpad.nn.native import library
from unpad.nn.native.activation import KINDS, activation
from unpad.nn.precision import widened

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
    if rows_are_independent(x):
        return _activate_each(kind, x)
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


def _activate_each(kind: Kind, x: Tensor) -> Tensor:
    """The same by operations that give a number the same bits wherever it stands: torch's own activations compute the
    last numbers of a tensor by another formula."""
    x, value = x.chunk(2, -1) if kind in GATED else (x, None)
    wide = widened(x)
    if kind == "relu":
        y = wide.relu()
    elif kind in ("swiglu", "quick_gelu"):
        y = wide / (1 + (wide * (-1.702 if kind == "quick_gelu" else -1)).exp())
    elif kind in ("gelu", "geglu"):
        y = wide * 0.5 * (1 + (wide * math.sqrt(0.5)).erf())
    else:
        y = wide * 0.5 * (1 + (math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)).tanh())
    return y.to(x.dtype) if value is None else y.to(x.dtype) * value
