"""The pre-norm transformer block that every model here is built from, and its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from unpad.layout import Layout, PaddedLayout
from unpad.nn.attention import ragged_attention
from unpad.nn.norm import make_norm
from unpad.nn.rope import rotate
from unpad.recipe import Section

Rotary = tuple[Tensor, Tensor]


class BlockConfig(Section):
    """Sizes and choices of a stack of blocks."""

    width: int = Field(256, ge=1, description="Channels of the residual stream.")
    blocks: int = Field(2, ge=0)
    heads: int = Field(8, ge=1)
    kv_heads: int | None = Field(None, ge=1, description="Key and value heads; default as many as heads.")
    hidden: int = Field(512, ge=1, description="Channels inside the feed-forward part.")
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    eps: float = Field(1e-6, gt=0)
    activation: Literal["relu", "gelu", "geglu", "swiglu"] = "swiglu"
    bias: bool = False
    dropout: float = Field(0.0, ge=0, lt=1, description="On the output of attention and of feed-forward.")
    causal: bool = True

    @model_validator(mode="after")
    def _heads_fit(self) -> BlockConfig:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")
        return self

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads


class Cache(Protocol):
    """What decoding keeps of earlier tokens; `nn/cache.py` has the implementation."""

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Attention(nn.Module):
    """Multi-head attention over a flat run, grouped-query when kv_heads < heads."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.num_kv_heads, config.head_dim
        self.causal = config.causal
        self.to_qkv = nn.Linear(config.width, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=config.bias)
        self.to_out = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(
        self, x: Tensor, layout: Layout | PaddedLayout, rotary: Rotary | None, cache: Cache | None, index: int
    ) -> Tensor:
        qkv = self.to_qkv(x).unflatten(-1, (-1, self.head_dim))  # (total_tokens, heads + 2 kv_heads, head_dim)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        if rotary is not None:
            cos, sin = rotary
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = ragged_attention(q, k, v, layout, self.causal) if cache is None else cache.attend(index, q, k, v)
        return self.to_out(y.flatten(1))  # (total_tokens, width)


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {"relu": F.relu, "gelu": F.gelu, "geglu": F.gelu, "swiglu": F.silu}


class FeedForward(nn.Module):
    """down(act(up x)), or down(act(gate x) * up x) for the gated kinds (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.gated = config.activation in ("geglu", "swiglu")
        self.act = ACTIVATIONS[config.activation]
        self.up = nn.Linear(config.width, config.hidden * (2 if self.gated else 1), bias=config.bias)
        self.down = nn.Linear(config.hidden, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.gated:
            gate, value = y.chunk(2, -1)
            return self.down(self.act(gate) * value)
        return self.down(self.act(y))


class Block(nn.Module):
    """x + attention(norm x), then x + feed_forward(norm x)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.norm_1 = make_norm(config.norm, config.width, config.eps)
        self.attention = Attention(config)
        self.norm_2 = make_norm(config.norm, config.width, config.eps)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        layout: Layout | PaddedLayout,
        rotary: Rotary | None = None,
        cache: Cache | None = None,
        index: int = 0,
    ) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x), layout, rotary, cache, index))
        return x + self.dropout(self.feed_forward(self.norm_2(x)))


def init_weights(module: nn.Module, num_blocks: int) -> None:
    """Normal(0, 0.02) for matrices, zero for biases.

    The two matrices that end in the residual stream of each block are smaller by sqrt(2 * num_blocks), so that its size
    does not grow with depth (Radford et al. 2019, section 2.3).
    """
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2:
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            continue
        residual = name.endswith(("to_out.weight", "down.weight"))
        nn.init.normal_(parameter, std=0.02 / (2 * max(num_blocks, 1)) ** 0.5 if residual else 0.02)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype matrix products run in: autocast's where it is on, else the input's."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
