"""Attention in one object: what is seen of a sequence, and how its scores are made.

Functions of `attention.py` and the kernels take queries, keys and values, a layout, and `Attend`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unpad.nn.draws import Seed
from unpad.nn.rope import Rotary


@dataclass(frozen=True)
class Attend:
    """softmax(scale * q k^T + key_bias) v, and what differs from it.

    Args:
        causal: a token sees itself and earlier tokens of its sequence; otherwise the whole sequence.
        window: tokens that a token sees at most, itself and those just before it; needs `causal`. None for all.
        dropout: share of attention weights set to zero, the others divided by 1 - dropout.
        qkv_bias: ((heads + 2 * kv_heads) * head_dim,), what `linear.apart` left to add to queries, keys and values.
        rotary: angles of `rotary_table` by which queries and keys are rotated first. No gradient flows to it.
        key_bias: (total_tokens,), added to the scores of a key in every head; -inf removes the key. Every query must
            see a key that is left.
        scale: factor of the scores; default 1 / sqrt(head_dim).
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: (heads,), scores of an additional key without a value, which every query sees.
        seed: of dropout; None draws one.
        places: (total_tokens,) int64, place of each token, by which dropout draws.
    """

    causal: bool = True
    window: int | None = None
    dropout: float = 0.0
    qkv_bias: Tensor | None = None
    rotary: Rotary | None = None
    key_bias: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    seed: Seed | None = None
    places: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.causal or self.window is None, "a window is of causal attention"

    @property
    def weighted(self) -> bool:
        """True if it has weights that native kernels compute, and fused ones of torch do not."""
        return self.key_bias is not None or self.dropout > 0

    @property
    def shaped(self) -> bool:
        """True if only matrix products of torch compute its scores."""
        return self.softcap is not None or self.sinks is not None

    @property
    def fuses(self) -> bool:
        """True if torch's fused kernels compute it."""
        return not (self.weighted or self.shaped)

    def scaled(self, scores: Tensor, head_dim: int) -> Tensor:
        """Products of queries and keys as scores."""
        return scores / math.sqrt(head_dim) if self.scale is None else scores * self.scale

    def within(self, longest: int) -> "Attend":
        """The same for sequences up to this length, without a window that hides nothing of them; in a graph of
        torch.compile, which is for any lengths, with it."""
        stays = self.window is None or torch.compiler.is_compiling() or self.window < longest
        return self if stays else replace(self, window=None)

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Attend":
        """The same with what belongs to tokens moved as the tokens are."""
        bias, places = (None if x is None else move(x) for x in (self.key_bias, self.places))
        return self if bias is places is None else replace(self, key_bias=bias, places=places)
