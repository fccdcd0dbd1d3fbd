"""The pre-norm transformer block that every model here is built from, and its settings."""

from __future__ import annotations

from typing import Literal, Protocol

from pydantic import Field, model_validator
from torch import Tensor, nn

from unpad.layout import Layout, PaddedLayout
from unpad.nn.activation import GATED, Kind, activate
from unpad.nn.attention import self_attention
from unpad.nn.linear import Linear
from unpad.nn.norm import Norm
from unpad.nn.rope import Rotary
from unpad.recipe import Section


class BlockConfig(Section):
    """Sizes and choices of a stack of blocks."""

    width: int = Field(256, ge=1, description="Channels of the residual stream.")
    blocks: int = Field(2, ge=0)
    heads: int = Field(8, ge=1)
    kv_heads: int | None = Field(None, ge=1, description="Key and value heads; default as many as heads.")
    hidden: int = Field(512, ge=1, description="Channels inside the feed-forward part.")
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    eps: float = Field(1e-6, gt=0)
    activation: Kind = "swiglu"
    bias: bool = False
    dropout: float = Field(0.0, ge=0, lt=1, description="On the output of attention and of feed-forward.")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="On the weights of attention.")
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

    def attend(self, index: int, qkv: Tensor, heads: int, rotary: Rotary | None) -> Tensor: ...


class Attention(nn.Module):
    """Multi-head attention over a flat run, grouped-query when kv_heads < heads."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.num_kv_heads, config.head_dim
        self.causal, self.dropout = config.causal, config.attention_dropout
        self.to_qkv = Linear(config.width, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=config.bias)
        self.to_out = Linear(config.width, config.width, bias=config.bias)

    def forward(
        self, x: Tensor, layout: Layout | PaddedLayout, rotary: Rotary | None, cache: Cache | None, index: int
    ) -> Tensor:
        qkv = self.to_qkv(x).unflatten(-1, (-1, self.head_dim))  # (total_tokens, heads + 2 kv_heads, head_dim)
        if cache is None:
            dropout = self.dropout if self.training else 0.0
            y = self_attention(qkv, layout, self.heads, self.causal, rotary=rotary, dropout=dropout)
        else:
            y = cache.attend(index, qkv, self.heads, rotary)
        return self.to_out(y.flatten(1))  # (total_tokens, width)


class FeedForward(nn.Module):
    """down(act(up x)), or down(act(gate x) * up x) for the gated kinds."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.up = Linear(config.width, config.hidden * (2 if config.activation in GATED else 1), bias=config.bias)
        self.down = Linear(config.hidden, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(activate(self.activation, self.up(x)))


class Block(nn.Module):
    """x + attention(norm x), then x + feed_forward(norm x).

    A branch's output is added by the norm that comes next, in the next block or after the last, so that the residual
    stream is read and written once per norm.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.norm_1 = Norm(config.norm, config.width, config.eps, config.dropout)
        self.attention = Attention(config)
        self.norm_2 = Norm(config.norm, config.width, config.eps, config.dropout)
        self.feed_forward = FeedForward(config)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        layout: Layout | PaddedLayout,
        rotary: Rotary | None = None,
        cache: Cache | None = None,
        index: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """One block's step along the residual stream.

        Args:
            x: (total_tokens, width), fp32 or wider.
            delta: (total_tokens, width), what the block before returned beside x and nobody has added yet.

        Returns:
            x and delta for the next block; after the last, `Norm` adds them.
        """
        x, y = self.norm_1(x, delta)
        x, y = self.norm_2(x, self.attention(y, layout, rotary, cache, index))
        return x, self.feed_forward(y)


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
