"""Position encodings: rotary (Su et al. 2021, arXiv 2104.09864) and sinusoidal (Vaswani et al. 2017, arXiv 1706.03762).

Angles are computed in fp64 and cast last, so that fp64 models stay exact to fp64.
"""

import math
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

ContextMethod = Literal["none", "linear", "ntk"]
Rotary = tuple[Tensor, Tensor]  # what `rotary_table` returns


@lru_cache(maxsize=8)
def rotary_frequencies(
    head_dim: int, theta: float, method: ContextMethod, factor: float, device: torch.device | None = None
) -> Tensor:
    """Angle per position of each pair of channels, (head_dim / 2,) fp64, kept on each device.

    Args:
        method: extension beyond the trained context. linear divides positions by `factor`
            (Chen et al. 2023, arXiv 2306.15595); ntk raises theta so that only slow channels stretch
            (Peng et al. 2023, arXiv 2309.00071, section 3.1).
        factor: wanted context over trained context, at least 1.
    """
    if method == "ntk" and head_dim > 2:
        theta = theta * factor ** (head_dim / (head_dim - 2))
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return (frequencies / factor if method == "linear" else frequencies).to(device)


def scaled_frequencies(frequencies: Tensor, *, factor: float, low: float, high: float, context: int) -> Tensor:
    """Frequencies of Llama 3.1 (Grattafiori et al. 2024, arXiv 2407.21783, section 3.4; the formula is of its code).

    Args:
        frequencies: (head_dim / 2,) fp64.
        factor: divisor of the frequencies that turn at most `low` times within the context.
        high: turns from which a frequency stays as it is; between `low` and `high` both are mixed linearly.
        context: tokens before the extension.
    """
    turns = context * frequencies / (2 * math.pi)
    fast = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (fast + (1 - fast) / factor)


def rotary_table(position_ids: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines for `rotate`, each (total_tokens, 1, head_dim / 2), in `dtype`, fp32 or wider."""
    angles = position_ids.to(torch.float64)[:, None, None] * frequencies.to(position_ids.device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + head_dim / 2]) of (total_tokens, heads, head_dim) by their angles.

    Low-precision x is rotated in the table's precision and rounded once.
    """
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


def turned(qkv: Tensor, heads: int, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of (total_tokens, heads + 2 * kv_heads, head_dim), positions applied."""
    kv_heads = (qkv.shape[1] - heads) // 2
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    return (q, k, v) if rotary is None else (rotate(q, *rotary), rotate(k, *rotary), v)


@lru_cache(maxsize=8)
def sinusoidal_table(num_positions: int, dim: int) -> Tensor:
    """PE(p, 2i) = sin(p / 10000^(2i/dim)), PE(p, 2i+1) = cos of the same; (num_positions, dim) fp64."""
    frequencies = torch.exp(torch.arange(0, dim, 2, dtype=torch.float64) * (-math.log(10000.0) / dim))
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequencies
    table = torch.zeros(num_positions, dim, dtype=torch.float64)
    table[:, 0::2] = angles.sin()
    table[:, 1::2] = angles.cos()[:, : dim // 2]
    return table


@lru_cache(maxsize=8)
def position_table(num_positions: int, dim: int, factor: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`factor` times the sinusoidal table, cast before it is scaled; (num_positions, dim)."""
    return factor * sinusoidal_table(num_positions, dim).to(device, dtype)
