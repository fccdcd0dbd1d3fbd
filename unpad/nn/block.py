"""The pre-norm transformer block of all models, its settings, and the residual stream between blocks."""

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
            # An even head size if possible: rotary positions need it.
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
    """Keys and values of earlier tokens, for decoding; implemented in `nn/cache.py`."""

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
    """The residual stream between two blocks.

    Args:
        x: (total_tokens, width), fp32 or wider.
        delta: (total_tokens, width), output of the last block that the next norm adds to x; None at the beginning.
        layout: of the tokens that are in the stream.
        rotary: angles of the tokens' positions; they stay with their tokens when others are removed.
        key_bias: (total_tokens,), added to the scores of a key in all heads of the blocks that follow.
        value_scale: (total_tokens,), factor of a token's values in the blocks that follow.
    """

    x: Tensor
    delta: Tensor | None
    layout: Layout | PaddedLayout
    rotary: Rotary | None = None
    key_bias: Tensor | None = None
    value_scale: Tensor | None = None

    def hidden(self) -> Tensor:
        """Hidden states, (total_tokens, width), in the dtype of x, before dropout."""
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
            layout=self.layout.restrict(index),
            rotary=None if self.rotary is None else (self.rotary[0][index], self.rotary[1][index]),
            key_bias=take(self.key_bias),
            value_scale=take(self.value_scale),
        )


BEFORE = -1  # in place of a block's number: before the first


class Between(Protocol):
    """A change of the stream before the first block and between blocks, such as the removal of tokens."""

    def reads(self, index: int) -> bool:
        """True if it needs the hidden states of all tokens after block `index`."""
        ...

    def __call__(self, index: int, entered: Stream, left: Stream) -> Stream:
        """Return the stream for the next block, given the input (`entered`) and output (`left`) of block `index`.

        With index BEFORE both are the embeddings.
        """
        ...

    def places(self, tokens: Tensor) -> Tensor:
        """Places in the last stream of tokens that were not removed, (num,) int64 both."""
        ...


class Unchanged:
    """The `Between` that changes nothing."""

    def reads(self, index: int) -> bool:
        return False

    def __call__(self, index: int, entered: Stream, left: Stream) -> Stream:
        return left

    def places(self, tokens: Tensor) -> Tensor:
        return tokens


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
        stream: Stream,
        cache: Cache | None = None,
        index: int = 0,
        keep_index: Tensor | None = None,
    ) -> Tensor:
        """Attend within sequences.

        Args:
            x: (total_tokens, width), the normalized stream.
            stream: gives the layout, positions, bias and scale.
            keep_index: (num,) int64, as of `Block.forward`.

        Returns:
            (total_tokens, width), or (num, width).
        """
        qkv = self.to_qkv(x).unflatten(-1, (-1, self.head_dim))  # (total_tokens, heads + 2 kv_heads, head_dim)
        if stream.value_scale is not None:
            everywhere = torch.ones_like(stream.value_scale, dtype=torch.bool)
            qkv = scale_values(qkv, self.kv_heads, stream.value_scale, everywhere)
        if cache is None:
            y = self_attention(
                qkv,
                stream.layout,
                self.heads,
                self.causal,
                rotary=stream.rotary,
                key_bias=stream.key_bias,
                dropout=self.dropout if self.training else 0.0,
            )
        else:
            y = cache.attend(index, qkv, stream.layout, self.heads, stream.rotary, stream.key_bias)
        y = y.flatten(1) if keep_index is None else y.flatten(1).index_select(0, keep_index)
        out: Tensor = self.to_out(y)
        return out

    def queries_and_keys(self, x: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        """Queries and keys of `forward`, (total_tokens, heads, head_dim) and (total_tokens, kv_heads, head_dim), with
        positions applied."""
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
        y: Tensor = self.down(activate(self.activation, self.up(x)))
        return y


class Block(nn.Module):
    """x + attention(norm x), then x + feed_forward(norm x).

    The next norm, in the next block or after the last, adds a branch's output, so that each norm reads and writes the
    residual stream once.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.norm_1 = Norm(config.norm, config.width, config.eps, config.dropout)
        self.attention = Attention(config)
        self.norm_2 = Norm(config.norm, config.width, config.eps, config.dropout)
        self.feed_forward = FeedForward(config)

    def forward(
        self, stream: Stream, cache: Cache | None = None, index: int = 0, keep_index: Tensor | None = None
    ) -> Stream:
        """Advance the stream by one block.

        Args:
            cache: holds the keys and values of earlier tokens, for block `index` of the model.
            keep_index: (num,) int64, tokens to continue with, which still attend to all; default all of them.

        Returns:
            The stream of these tokens; `keep_index` narrows only `x` and `delta`, which nothing but a norm may read.
        """
        x, y = self.norm_1(stream.x, stream.delta)
        attended = self.attention(y, stream, cache, index, keep_index)
        x, y = self.norm_2(x if keep_index is None else x.index_select(0, keep_index), attended)
        return replace(stream, x=x, delta=self.feed_forward(y))


def init_weights(module: nn.Module, num_blocks: int) -> None:
    """Normal(0, 0.02) for matrices, zero for biases.

    The two matrices of each block that write to the residual stream are smaller by sqrt(2 * num_blocks), so that its
    size does not grow with depth (Radford et al. 2019, section 2.3).
    """
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2:
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            continue
        residual = name.endswith(("to_out.weight", "down.weight"))
        nn.init.normal_(parameter, std=0.02 / (2 * max(num_blocks, 1)) ** 0.5 if residual else 0.02)
