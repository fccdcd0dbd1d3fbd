"""The pre-norm transformer block of all models, its settings, and the residual stream between blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, Protocol

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unpad.batching.layout import Layout, PaddedLayout
from unpad.nn.activation import GATED, KINDS, Kind, activate
from unpad.nn.attend import Attend
from unpad.nn.attention import scale_values, self_attention
from unpad.nn.draws import Seed, draw
from unpad.nn.linear import Linear, apart
from unpad.nn.norm import Norm
from unpad.nn.rope import Rotary, turned
from unpad.recipes.section import Section


class BlockConfig(Section):
    """Sizes and choices of a stack of blocks."""

    width: int = Field(256, ge=1)
    """Channels of the residual stream."""
    blocks: int = Field(2, ge=0, le=1000)
    """Transformer blocks."""
    heads: int = Field(8, ge=1)
    """Attention heads."""
    kv_heads: int | None = Field(None, ge=1)
    """Key and value heads; default as many as heads."""
    hidden: int = Field(512, ge=1)
    """Channels inside the feed-forward part."""
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    """Kind of normalization."""
    eps: float = Field(1e-6, gt=0)
    """Of the norms."""
    activation: Kind = "swiglu"
    """Of the feed-forward part."""
    bias: bool = False
    """Biases in the linear layers."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """On the output of attention and of feed-forward."""
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    """On the weights of attention."""
    causal: bool = True
    """Attend to earlier positions only."""

    @model_validator(mode="after")
    def _heads_fit(self) -> BlockConfig:
        if self.own_head_dim is None and self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.heads % self.num_kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")
        return self

    @property
    def own_head_dim(self) -> int | None:
        """Channels of a head where they are not width / heads."""
        return None

    @property
    def head_dim(self) -> int:
        return self.own_head_dim or self.width // self.heads

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    def norms_branches(self) -> bool:
        """True if the output of attention and of feed-forward is normalised too, before it is added."""
        return False

    def attention_of(self, index: int) -> AttentionSettings:
        """Sizes and choices of the attention of block `index`."""
        return AttentionSettings(
            heads=self.heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            causal=self.causal,
            dropout=self.attention_dropout,
            qkv_bias=self.bias,
            out_bias=self.bias,
        )


@dataclass(frozen=True)
class AttentionSettings:
    """Sizes and choices of one block's attention.

    Args:
        dropout: on its weights.
        qkv_bias, out_bias: biases of queries, keys and values, and of the output.
        qk_norm: epsilon of an RMSNorm of every query and key head before positions are applied (Henry et al. 2020,
            arXiv 2010.04245); None for none.
        window: tokens that a token sees, itself included; None for all.
        angles: the stream's rotary angles that apply; "none": this block knows no positions.
    """

    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    dropout: float
    qkv_bias: bool
    out_bias: bool
    qk_norm: float | None = None
    window: int | None = None
    angles: Literal["global", "local", "none"] = "global"


Seeds = Sequence[int | None] | Tensor  # of dropout, one a place; None where nothing is dropped


class Cache(Protocol):
    """Keys and values of earlier tokens, for decoding; implemented in `nn/cache.py`."""

    def attend(self, index: int, qkv: Tensor, layout: Layout | PaddedLayout, heads: int, how: Attend) -> Tensor: ...


@dataclass(frozen=True)
class Stream:
    """The residual stream between two blocks.

    Args:
        x: (total_tokens, width), fp32 or wider.
        delta: (total_tokens, width), output of the last block that the next norm adds to x; None at the beginning.
        layout: layout of the tokens in the stream.
        rotary: angles of the tokens' positions; they stay with their tokens when others are removed.
        key_bias: (total_tokens,), added to the scores of a key in all heads of the blocks that follow.
        value_scale: (total_tokens,), factor of a token's values in the blocks that follow.
        local_rotary: as `rotary`, for the blocks with windowed attention, if their angles differ.
        index: (num,) int64, the tokens that `x` and `delta` are of, after a block with `keep_index`; None: all.
    """

    x: Tensor
    delta: Tensor | None
    layout: Layout | PaddedLayout
    rotary: Rotary | None = None
    key_bias: Tensor | None = None
    value_scale: Tensor | None = None
    local_rotary: Rotary | None = None
    index: Tensor | None = None

    def hidden(self) -> Tensor:
        """Hidden states, (total_tokens, width), in the dtype of x, before dropout."""
        return self.x if self.delta is None else self.x + self.delta.to(self.x.dtype)

    def keep(self, kept: Tensor) -> Stream:
        """The stream of the tokens where `kept` (total_tokens,) bool is True; in a rectangle the others become padding.

        Accelerators wait here.
        """
        if isinstance(self.layout, PaddedLayout):
            mask = self.layout.attention_mask
            return replace(self, layout=replace(self.layout, attention_mask=mask & kept.view_as(mask)))
        index = kept.nonzero().flatten()

        def take(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.index_select(0, index)

        def take_angles(rotary: Rotary | None) -> Rotary | None:
            return None if rotary is None else (rotary[0].index_select(0, index), rotary[1].index_select(0, index))

        return Stream(
            x=self.x.index_select(0, index),
            delta=take(self.delta),
            layout=self.layout.restrict(index),
            rotary=take_angles(self.rotary),
            key_bias=take(self.key_bias),
            value_scale=take(self.value_scale),
            local_rotary=take_angles(self.local_rotary),
        )


BEFORE = -1  # in place of a block's number: before the first


class Between(Protocol):
    """A change of the stream before the first block and between blocks, such as the removal of tokens."""

    def reads(self, index: int) -> bool:
        """True if it needs the hidden states of all tokens after block `index`."""

    def __call__(self, index: int, entered: Stream, left: Stream) -> Stream:
        """Return the stream for the next block, given the input (`entered`) and output (`left`) of block `index`.

        With index BEFORE both are the embeddings.
        """

    def places(self, tokens: Tensor) -> Tensor:
        """Places in the last stream of tokens that were not removed, (num,) int64 both."""


class Unchanged:
    """The `Between` that changes nothing."""

    def reads(self, index: int) -> bool:
        return False

    def __call__(self, index: int, entered: Stream, left: Stream) -> Stream:
        return left

    def places(self, tokens: Tensor) -> Tensor:
        return tokens


class Attention(nn.Module):
    """Multi-head attention over a flat run, grouped-query when kv_heads < heads.

    Args:
        index: of the block that it belongs to.
    """

    def __init__(self, config: BlockConfig, index: int = 0) -> None:
        super().__init__()
        settings = config.attention_of(index)
        self.heads, self.kv_heads, self.head_dim = settings.heads, settings.kv_heads, settings.head_dim
        self.causal, self.dropout, self.window = settings.causal, settings.dropout, settings.window
        self.angles = settings.angles
        self.to_qkv = Linear(config.width, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=settings.qkv_bias)
        self.to_out = Linear(self.heads * self.head_dim, config.width, bias=settings.out_bias)
        eps = settings.qk_norm
        self.q_norm = None if eps is None else Norm("rmsnorm", self.head_dim, eps)
        self.k_norm = None if eps is None else Norm("rmsnorm", self.head_dim, eps)

    def forward(
        self,
        x: Tensor,
        stream: Stream,
        cache: Cache | None = None,
        index: int = 0,
        keep_index: Tensor | None = None,
        seed: Seed | None = None,
    ) -> Tensor:
        """Attend within sequences.

        Args:
            x: (total_tokens, width), the normalized stream.
            stream: gives the layout, positions, bias and scale.
            keep_index: (num,) int64, as of `Block.forward`.
            seed: of dropout; None draws one.

        Returns:
            (total_tokens, width), or (num, width).
        """
        if cache is None and stream.value_scale is None and self.q_norm is None:  # attention may add the bias
            projected, bias = apart(self.to_qkv, x)
            qkv = projected.unflatten(-1, (-1, self.head_dim))  # (total_tokens, heads + 2 kv_heads, head_dim)
        else:
            qkv, bias = self.project(x), None
        if stream.value_scale is not None:
            everywhere = torch.ones_like(stream.value_scale, dtype=torch.bool)
            qkv = scale_values(qkv, self.kv_heads, stream.value_scale, everywhere)
        how = Attend(
            self.causal,
            self.window,
            self.dropout if self.training else 0.0,
            qkv_bias=bias,
            rotary=self.rotary_of(stream),
            key_bias=stream.key_bias,
            seed=seed,
        )
        if cache is None:
            y = self_attention(qkv, stream.layout, self.heads, how)
        else:
            y = cache.attend(index, qkv, stream.layout, self.heads, how)
        y = y.flatten(1) if keep_index is None else y.flatten(1).index_select(0, keep_index)
        return self.to_out(y)

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values before positions are applied, (total_tokens, heads + 2 kv_heads, head_dim)."""
        qkv: Tensor = self.to_qkv(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is None or self.k_norm is None:
            return qkv
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        return torch.cat([_normed_heads(self.q_norm, q), _normed_heads(self.k_norm, k), v], 1)

    def rotary_of(self, stream: Stream) -> Rotary | None:
        """The angles of the stream that apply here."""
        if self.angles == "none":
            return None
        return stream.rotary if self.angles == "global" else stream.local_rotary

    def queries_and_keys(self, x: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        """Queries and keys of `forward`, (total_tokens, heads, head_dim) and (total_tokens, kv_heads, head_dim), with
        positions applied."""
        return turned(self.project(x), self.heads, rotary)[:2]


def _normed_heads(norm: Norm, x: Tensor) -> Tensor:
    """Normalise every head of (total_tokens, heads, head_dim) by itself."""
    normed: Tensor = norm(x.reshape(-1, x.shape[2]))[1]
    return normed.view(x.shape).to(x.dtype)


class FeedForward(nn.Module):
    """down(act(up x)), or down(act(gate x) * up x) for the gated kinds."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.up = Linear(config.width, config.hidden * (2 if config.activation in GATED else 1), bias=config.bias)
        self.down = Linear(config.hidden, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        up, bias = apart(self.up, x) if self.activation in KINDS else (self.up(x), None)
        return self.down(activate(self.activation, up, bias))


class Block(nn.Module):
    """x + attention(norm x), then x + feed_forward(norm x); with `norms_branches` each output is normalised too.

    The next norm, in the next block or after the last, adds a branch's output, so that each norm reads and writes the
    residual stream once.

    Args:
        index: of the block in its model.
    """

    def __init__(self, config: BlockConfig, index: int = 0) -> None:
        super().__init__()
        after = config.norms_branches()
        self.norm_1 = Norm(config.norm, config.width, config.eps, config.dropout)
        self.attention = Attention(config, index)
        self.attention_norm = Norm(config.norm, config.width, config.eps) if after else None
        self.norm_2 = Norm(config.norm, config.width, config.eps, config.dropout)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = Norm(config.norm, config.width, config.eps) if after else None
        # Of passes with gradient: how torch.compile makes them, and whether the backward pass computes them again.
        self.backend: str | None = None
        self.recomputes = False

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
        seeds: Seeds = self._seeds(stream)
        if not torch.is_grad_enabled():
            return self.advance(stream, cache, index, keep_index, seeds)
        advance = Block.advance if self.backend is None else _compiled(self.backend)
        if self.backend is not None and any(seeds):
            _ = stream.layout.places  # kept by the layout; a graph cannot make them, as their number is data
            drawn = torch.tensor([seed or 0 for seed in seeds], pin_memory=stream.x.is_cuda)
            seeds = drawn.to(stream.x.device, non_blocking=True)
            torch._dynamo.mark_static(seeds)  # or a graph made of two sequences, with three bounds, is for two alone
        given = self, stream, cache, index, keep_index, seeds
        if self.recomputes:  # the only random draws are dropout's, which its seeds repeat
            return checkpoint(advance, *given, use_reentrant=False, preserve_rng_state=False)
        return advance(*given)

    def _seeds(self, stream: Stream) -> list[int | None]:
        """Seeds of dropout in the first norm, in attention and in the second norm; None where nothing is dropped."""
        first = self.norm_1.dropout if stream.delta is not None else 0.0
        shares = first, self.attention.dropout, self.norm_2.dropout
        return [draw() if share and self.training else None for share in shares]

    def advance(
        self, stream: Stream, cache: Cache | None, index: int, keep_index: Tensor | None, seeds: Seeds
    ) -> Stream:
        """`forward` with seeds of dropout that were drawn before."""
        x, y = self.norm_1(stream.x, stream.delta, stream.layout, seed=seeds[0])
        attended = self.attention(y, stream, cache, index, keep_index, seeds[1])
        attended = _normed_branch(self.attention_norm, attended)
        x = x if keep_index is None else x.index_select(0, keep_index)
        x, y = self.norm_2(x, attended, stream.layout, keep_index, seeds[2])
        delta = _normed_branch(self.feed_forward_norm, self.feed_forward(y))
        return replace(stream, x=x, delta=delta, index=keep_index)


@cache
def _compiled(backend: str) -> Callable[..., Stream]:
    return torch.compile(Block.advance, dynamic=True, backend=backend)


def compile_blocks(model: nn.Module, backend: str = "inductor") -> None:
    """Compile the passes with gradient of the blocks of a model: a graph for the first, the last and all between.

    Sizes are symbols, as they change with every batch; a batch of one sequence has graphs of its own. Blocks that drop
    weights of attention, in a loop over groups of sequences, stay as they are.
    """
    for module in model.modules():
        if isinstance(module, Block) and not module.attention.dropout:
            module.backend = backend


def recompute_blocks(model: nn.Module) -> None:
    """Keep the input of every block alone for the backward pass, which computes the rest again (Chen et al. 2016, arXiv
    1604.06174): memory grows with depth by a block's input, and time by a forward pass."""
    for module in model.modules():
        if isinstance(module, Block):
            module.recomputes = True


def compiled() -> tuple[int, float]:
    """Graphs that `compile_blocks` has had made in this process, and the seconds that they took."""
    if not _compiled.cache_info().currsize:
        return 0, 0.0
    from torch._dynamo.utils import calculate_time_spent, counters  # a second to import

    return counters["stats"]["unique_graphs"], calculate_time_spent()["total_wall_time"]


def _normed_branch(norm: Norm | None, y: Tensor) -> Tensor:
    """The output of a branch, (num, width), normalised if the block has a norm for it."""
    if norm is None:
        return y
    return norm(y)[1]


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
