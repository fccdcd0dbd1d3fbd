"""The pre-norm transformer block that every model here is built from, and its settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from unpad.batching.layout import Layout, PaddedLayout
from unpad.nn.activation import GATED, Kind, activate
from unpad.nn.attention import scale_values, self_attention
from unpad.nn.linear import Linear
from unpad.nn.norm import Norm
from unpad.nn.rope import Rotary, rotate
from unpad.recipes.section import Section


class BlockConfig(Section):
    """Sizes and choices of a stack of blocks."""

    width: int = Field(256, ge=1, description="Channels of the residual stream.")
    blocks: int = Field(2, ge=0, description="Transformer blocks.")
    heads: int = Field(8, ge=1, description="Attention heads.")
    kv_heads: int | None = Field(None, ge=1, description="Key and value heads; default as many as heads.")
    hidden: int = Field(512, ge=1, description="Channels inside the feed-forward part.")
    norm: Literal["layernorm", "rmsnorm"] = Field("rmsnorm", description="Kind of normalization.")
    eps: float = Field(1e-6, gt=0, description="Of the norms.")
    activation: Kind = Field("swiglu", description="Of the feed-forward part.")
    bias: bool = Field(False, description="Biases in the linear layers.")
    dropout: float = Field(0.0, ge=0, lt=1, description="On the output of attention and of feed-forward.")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="On the weights of attention.")
    causal: bool = Field(True, description="Attend to earlier positions only.")

    @model_validator(mode="after")
    def _heads_fit(self) -> BlockConfig:
        if self.width % self.heads:
            fits = [heads for heads in range(1, self.width + 1) if self.width % heads == 0]
            # An even head size where there is one: rotary positions need it.
            fits = [heads for heads in fits if self.width // heads % 2 == 0] or fits
            nearest = min(fits, key=lambda heads: abs(heads - self.heads))
            what = f"width {self.width} is not a multiple of heads {self.heads}"
            raise ValueError(f"{what}; heads {nearest} would fit")
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

    def attend(
        self,
        index: int,
        qkv: Tensor,
        layout: Layout | PaddedLayout,
        heads: int,
        rotary: Rotary | None,
        key_bias: Tensor | None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Stream:
    """What flows from block to block.

    Args:
        x: (total_tokens, width), fp32 or wider, the residual stream.
        delta: (total_tokens, width), what the last block returned beside x and nobody has added yet.
        layout: of the tokens that are in the stream.
        position_ids: (total_tokens,) int64; they stay with their tokens when others are removed.
        rotary: of `position_ids`.
        key_bias: (total_tokens,), added to the scores of a key in all heads of the blocks that follow.
        value_scale: (total_tokens,), what they multiply the values of a token by.
    """

    x: Tensor
    delta: Tensor | None
    layout: Layout | PaddedLayout
    position_ids: Tensor
    rotary: Rotary | None = None
    key_bias: Tensor | None = None
    value_scale: Tensor | None = None

    def hidden(self) -> Tensor:
        """Hidden states, (total_tokens, width), of the dtype of x, before dropout."""
        return self.x if self.delta is None else self.x + self.delta.to(self.x.dtype)

    def keep(self, kept: Tensor) -> Stream:
        """The stream of the tokens where `kept` (total_tokens,) bool is True; in a rectangle the others become padding.

        Accelerators wait here.
        """
        if isinstance(self.layout, PaddedLayout):
            mask = self.layout.attention_mask
            return replace(self, layout=PaddedLayout(mask & kept.view_as(mask)))
        index = kept.nonzero().flatten()

        def take(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.index_select(0, index)

        return Stream(
            x=self.x.index_select(0, index),
            delta=take(self.delta),
            layout=self.layout.at(index),
            position_ids=self.position_ids.index_select(0, index),
            rotary=None if self.rotary is None else (self.rotary[0][index], self.rotary[1][index]),
            key_bias=take(self.key_bias),
            value_scale=take(self.value_scale),
        )


BEFORE = -1  # in place of a block's number: before the first


class Between(Protocol):
    """What is done to the stream before the first block and between blocks, such as removing tokens from it."""

    def reads(self, index: int) -> bool:
        """Whether it needs what all tokens are after block `index`."""
        ...

    def __call__(self, index: int, entered: Stream, left: Stream) -> Stream:
        """Return what goes on after block `index`, which read `entered` and made `left` of it; index BEFORE stands for
        the embeddings, where both are the same."""
        ...

    def places(self, tokens: Tensor) -> Tensor:
        """Where tokens that were not removed stand in the last stream, (num,) int64 both."""
        ...


class Attention(nn.Module):
    """Multi-head attention over a flat run, grouped-query when kv_heads < heads."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.num_kv_heads, config.head_dim
        self.causal, self.dropout = config.causal, config.attention_dropout
        self.to_qkv = Linear(config.width, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=config.bias)
        self.to_out = Linear(config.width, config.width, bias=config.bias)

    def forward(
        self,
        x: Tensor,
        layout: Layout | PaddedLayout,
        rotary: Rotary | None,
        cache: Cache | None,
        index: int,
        *,
        key_bias: Tensor | None = None,
        value_scale: Tensor | None = None,
        at: Tensor | None = None,
    ) -> Tensor:
        qkv = self.to_qkv(x).unflatten(-1, (-1, self.head_dim))  # (total_tokens, heads + 2 kv_heads, head_dim)
        if value_scale is not None:
            qkv = scale_values(qkv, self.kv_heads, value_scale, torch.ones_like(value_scale, dtype=torch.bool))
        if cache is None:
            dropout = self.dropout if self.training else 0.0
            y = self_attention(qkv, layout, self.heads, self.causal, rotary=rotary, key_bias=key_bias, dropout=dropout)
        else:
            y = cache.attend(index, qkv, layout, self.heads, rotary, key_bias)
        y = y.flatten(1) if at is None else y.flatten(1).index_select(0, at)
        return self.to_out(y)  # (total_tokens, width), or (num, width)

    def queries_and_keys(self, x: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        """What `forward` compares, (total_tokens, heads, head_dim) and (total_tokens, kv_heads, head_dim), positions
        turned in."""
        q, k, _ = self.to_qkv(x).unflatten(-1, (-1, self.head_dim)).split([self.heads, self.kv_heads, self.kv_heads], 1)
        return (q, k) if rotary is None else (rotate(q, *rotary), rotate(k, *rotary))


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
        *,
        key_bias: Tensor | None = None,
        value_scale: Tensor | None = None,
        at: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One block's step along the residual stream.

        Args:
            x: (total_tokens, width), fp32 or wider.
            delta: (total_tokens, width), what the block before returned beside x and nobody has added yet.
            key_bias, value_scale: as in `Stream`.
            at: (num,) int64, the tokens to go on with, which still attend to all; default all of them.

        Returns:
            x and delta for the next block, of these tokens; after the last, `Norm` adds them.
        """
        x, y = self.norm_1(x, delta)
        attended = self.attention(y, layout, rotary, cache, index, key_bias=key_bias, value_scale=value_scale, at=at)
        x, y = self.norm_2(x if at is None else x.index_select(0, at), attended)
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
