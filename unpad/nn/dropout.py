"""Dropout by a hash of seed and place, so that every kernel drops the same values.

Native kernels compute the bits where they need them and store no mask; this file computes the same bits in torch. The
hash is the finaliser of MurmurHash3 (Appleby 2011), as in native/simd.h.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unpad.nn.draws import Draw, in_parts, random_like

_LOW = 0xFFFFFFFF


def dropout(x: Tensor, share: float, drawn: Draw) -> Tensor:
    """Set a share of (rows, columns) to zero and divide the rest by 1 - share (Srivastava et al. 2014, JMLR 15)."""
    if share == 0:
        return x
    rows = drawn.rows(x.shape[0], x.device)
    columns = torch.arange(x.shape[1], device=x.device)
    return torch.where(kept(drawn.seed, rows[:, None], columns, share), x / (1 - share), 0)


class Dropout(nn.Module):
    """Dropout by torch's generator, of (rows, columns); in evaluation none."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.p = share

    def forward(self, x: Tensor) -> Tensor:
        if not (in_parts() and self.training and self.p):
            return F.dropout(x, self.p, self.training)
        return x * random_like(x, lambda whole: F.dropout(torch.ones_like(whole), self.p))


def kept(seed: int, rows: Tensor, columns: Tensor, share: float) -> Tensor:
    """Mask of the places of a matrix that dropout keeps.

    Args:
        rows, columns: int64 indices that broadcast against each other.

    Returns:
        bool of their broadcast shape.
    """
    bits = mix(mix(rows & _LOW) ^ (seed & _LOW))
    bits = mix(bits ^ (seed >> 32) ^ (rows >> 32))
    return mix(bits ^ (columns * 0x9E3779B9 & _LOW)) >= int(share * 2**32)


def mix(x: Tensor) -> Tensor:
    """Hash 32 bits to 32 bits, both held in int64."""
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B & _LOW
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35 & _LOW
    return x ^ (x >> 16)
