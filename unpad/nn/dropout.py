"""Dropout by the bits of `nn/draws.py`, which native kernels compute where they need them and store no mask."""

from __future__ import annotations

import torch
from torch import Tensor

from unpad.nn.draws import bits, rows_of


def dropout(x: Tensor, share: float, seed: int, places: Tensor | None = None) -> Tensor:
    """Set a share of (rows, columns) to zero and divide the rest by 1 - share (Srivastava et al. 2014, JMLR 15).

    Args:
        seed: from `draws.draw`.
        places: (rows,) int64, as `Layout.places`; None numbers the rows.
    """
    if share == 0:
        return x
    columns = torch.arange(x.shape[1], device=x.device)
    return torch.where(kept(seed, rows_of(x, places)[:, None], columns, share), x / (1 - share), 0)


def kept(seed: int, rows: Tensor, columns: Tensor, share: float) -> Tensor:
    """Mask of the places of a matrix that dropout keeps.

    Args:
        rows, columns: int64 indices that broadcast against each other.

    Returns:
        bool of their broadcast shape.
    """
    # Compared as if unsigned.
    return bits(seed, rows, columns).bitwise_xor_(-(2**31)) >= int(share * 2**32) - 2**31
