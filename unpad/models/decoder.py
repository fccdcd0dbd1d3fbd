"""The decoder: token embeddings, pre-norm blocks, and a head over the vocabulary.

One class covers GPT-2 style (LayerNorm, GELU, learned positions), Llama style (RMSNorm, SwiGLU, rotary) and mixtures of
the two. `preset` names two configurations; every other field overrides the preset.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from unpad.batching.batch import RaggedBatch, required
from unpad.errors import RecipeError
from unpad.models.contract import Generates, LearnsPreferences, ModelConfig
from unpad.nn import rope
from unpad.nn.block import (
    BEFORE,
    AttentionSettings,
    Between,
    Block,
    BlockConfig,
    Cache,
    Stream,
    Unchanged,
    init_weights,
)
from unpad.nn.draws import draw, dropout
from unpad.nn.linear import compute_dtype, computing_copy, product
from unpad.nn.losses import Terms, cross_entropy, target_nll, token_nll
from unpad.nn.norm import Norm
from unpad.nn.precision import wide_dtype, widened
from unpad.nn.preference import count_pairs, pair_terms
from unpad.recipes.section import Section

DATA = "text"
# Share of wanted tokens above which the last block computes all: dropping the others would cost more than it saves.
MOST_WANTED = 7 / 8
PRESETS: dict[str, dict[str, Any]] = {
    # A small Chinese GPT: sinusoidal positions scaled against the embedding, and a norm before the head.
    "zh_gpt": {
        "width": 256, "blocks": 2, "heads": 8, "hidden": 512, "norm": "layernorm", "eps": 1e-5, "activation": "relu",
        "bias": True, "positions": "sinusoidal", "context": 128, "dropout": 0.1,
    },
    # Llama style with a GELU gate.
    "llm": {
        "width": 512, "blocks": 6, "heads": 8, "hidden": 2048, "norm": "rmsnorm", "eps": 1e-6, "activation": "geglu",
        "bias": False, "positions": "rotary", "context": 512, "dropout": 0.0,
    },
}  # fmt: skip


class RopeScaling(Section):
    """Rotary frequencies of Llama 3.1: slow channels turn `factor` times slower, fast ones as they were, and those
    between are interpolated."""

    factor: float = Field(ge=1)
    """Divisor of the frequencies of slow channels."""
    low_freq_factor: float = Field(gt=0)
    """Turns within original_context up to which a channel is slow."""
    high_freq_factor: float = Field(gt=0)
    """Turns within original_context from which a channel is fast."""
    original_context: int = Field(ge=1)
    """Context before the extension, in tokens."""

    @model_validator(mode="after")
    def _has_a_range(self) -> RopeScaling:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("high_freq_factor is not above low_freq_factor")
        return self

    def scaled(self, frequencies: Tensor) -> Tensor:
        """Frequencies that `rope.scaled_frequencies` makes of unscaled ones, (head_dim / 2,)."""
        low, high, context = self.low_freq_factor, self.high_freq_factor, self.original_context
        return rope.scaled_frequencies(frequencies, factor=self.factor, low=low, high=high, context=context)


class Config(ModelConfig, BlockConfig):
    """The `model` section of a recipe."""

    kind: Literal["decoder"] = "decoder"
    preset: Literal["zh_gpt", "llm"] | None = None
    """Sizes and choices of a small Chinese GPT, or of a Llama-style model; other fields override it."""
    context: int = Field(512, ge=1)
    """Longest sequence, in tokens."""
    positions: Literal["sinusoidal", "learned", "rotary"] = "rotary"
    """Kind of position encoding."""
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotary frequencies."""
    context_method: rope.ContextMethod = "none"
    """How rotary positions reach past the trained context."""
    context_factor: float = Field(1.0, ge=1)
    """Context wanted over context trained."""
    rope_scaling: RopeScaling | None = None
    """Frequencies of Llama 3.1 and later."""
    no_rope_blocks: list[int] = Field([])
    """Blocks, from 0, that apply no rotary positions."""
    head_width: int | None = Field(None, ge=1)
    """Channels of a head; default width / heads."""
    qkv_bias: bool | None = None
    """Biases of queries, keys and values; default as `bias`."""
    qk_norm: bool = False
    """RMSNorm of every query and key head, before rotary positions."""
    branch_norms: bool = False
    """Norms after attention and feed-forward too, before they are added."""
    sliding_window: int | None = Field(None, ge=1)
    """Tokens that a token of the sliding blocks sees, itself included."""
    sliding_blocks: list[int] | None = None
    """Blocks, from 0, with sliding_window; default all."""
    sliding_rope_theta: float | None = Field(None, gt=0)
    """Base of the rotary frequencies of the sliding blocks; default those of the others."""
    embed_scale: float = Field(1.0, gt=0)
    """Factor of the token embeddings, before positions."""
    vocab_size: int | None = Field(None, ge=1)
    """Rows of embedding and head; default as many as the tokenizer has ids."""
    tied: bool = True
    """The head shares the embedding's weights."""
    embed_dropout: float = Field(0.0, ge=0, lt=1)
    """On the embeddings."""

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, values: Any) -> Any:
        preset = values.get("preset") if isinstance(values, dict) else None
        return {**PRESETS[preset], **values} if isinstance(preset, str) and preset in PRESETS else values

    @model_validator(mode="after")
    def _positions_fit(self) -> Config:
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(
                f"rotary positions need an even head size, and width {self.width} / heads {self.heads} is odd"
            )
        if self.rope_scaling is not None and self.context_method != "none":
            raise ValueError(f"context_method={self.context_method} and rope_scaling both scale frequencies")
        return self

    @model_validator(mode="after")
    def _blocks_fit(self) -> Config:
        turns: list[tuple[str, object]] = [
            ("context_method", self.context_method != "none"),
            ("rope_scaling", self.rope_scaling),
            ("no_rope_blocks", self.no_rope_blocks),
            ("sliding_rope_theta", self.sliding_rope_theta),
        ]
        for name, value in turns:
            if value and self.positions != "rotary":
                raise ValueError(f"{name} is of rotary positions; positions is {self.positions}")
        for name, blocks in (("no_rope_blocks", self.no_rope_blocks), ("sliding_blocks", self.sliding_blocks)):
            for index in blocks or []:
                if not 0 <= index < self.blocks:
                    raise ValueError(f"{name} names block {index}; the blocks are 0 to {self.blocks - 1}")
        for name, value in (("sliding_blocks", self.sliding_blocks), ("sliding_rope_theta", self.sliding_rope_theta)):
            if value and self.sliding_window is None:
                raise ValueError(f"{name} goes with sliding_window")
        if self.sliding_window is not None and not self.causal:
            raise ValueError("sliding_window needs causal: true")
        return self

    @property
    def own_head_dim(self) -> int | None:
        return self.head_width

    def norms_branches(self) -> bool:
        return self.branch_norms

    def slides(self, index: int) -> bool:
        """True if the attention of a block has a window."""
        return self.sliding_window is not None and (self.sliding_blocks is None or index in self.sliding_blocks)

    def attention_of(self, index: int) -> AttentionSettings:
        local = self.slides(index) and self.sliding_rope_theta is not None
        return replace(
            super().attention_of(index),
            qkv_bias=self.bias if self.qkv_bias is None else self.qkv_bias,
            qk_norm=self.eps if self.qk_norm else None,
            window=self.sliding_window if self.slides(index) else None,
            angles="none" if index in self.no_rope_blocks else "local" if local else "global",
        )

    @property
    def longest(self) -> int:
        """Largest number of positions, context extension included."""
        return int(self.context * self.context_factor) if self.context_method != "none" else self.context

    @property
    def advice_beyond(self) -> str:
        """Advice on an input with more positions than `longest`."""
        more = "extend rotary positions with model.context_method and model.context_factor"
        return f"shorten it, or {more if self.positions == 'rotary' else 'train with a larger model.context'}"


class Decoder(Generates, LearnsPreferences):
    """Next-token model over a flat run of sequences.

    Args:
        config: sizes and choices.
        vocab_size: ids of the tokenizer, and rows of the embedding and of the head unless the config has more.

    Raises:
        RecipeError: the config has fewer.
    """

    config: Config

    def __init__(self, config: Config, vocab_size: int) -> None:
        super().__init__()
        if config.vocab_size is not None:
            if config.vocab_size < vocab_size:
                what = f"the tokenizer has {vocab_size} ids, the model {config.vocab_size}"
                raise RecipeError(what, where="model.vocab_size", fix="use the tokenizer of the model")
            vocab_size = config.vocab_size
        self.config, self.vocab_size = config, vocab_size
        self.causal, self.head_dim = config.causal, config.head_dim
        self.embed = nn.Embedding(vocab_size, config.width)
        self.position_embed = nn.Embedding(config.context, config.width) if config.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.blocks))
        self.norm = Norm(config.norm, config.width, config.eps, config.dropout)
        self.head = None if config.tied else nn.Linear(config.width, vocab_size, bias=False)
        init_weights(self, config.blocks)

    def forward(
        self,
        batch: RaggedBatch,
        cache: Cache | None = None,
        between: Between | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the last norm in the computing dtype, (total_tokens, width); (num, width) with `wanted`.

        Args:
            cache: holds the keys and values of earlier tokens; blocks attend through it.
            between: called before the first block and after every block; tokens that it removes have no hidden state,
                and `between.places` gives the places of the others.
            wanted: (num,) int64, tokens to return hidden states of; default all.

        Raises:
            RecipeError: a position is outside the model's context.
        """
        between = between or Unchanged()
        x = self._embed(batch)
        rotary, local = self._rotary(batch.position_ids, x.dtype), self._local_rotary(batch.position_ids, x.dtype)
        stream = Stream(x, None, batch.layout, rotary, local_rotary=local)
        stream = between(BEFORE, stream, stream)
        for index, block in enumerate(self.blocks):
            if wanted is not None and self._ends_short(index, len(wanted), stream, between):
                return self._normed(block(stream, cache, index, keep_index=between.places(wanted)))
            stream = between(index, stream, block(stream, cache, index))
        hidden = self._normed(stream)
        return hidden if wanted is None else _take(hidden, between.places(wanted))

    def last_hidden(self, batch: RaggedBatch, cache: Cache | None = None, between: Between | None = None) -> Tensor:
        """Hidden state of the last token of every sequence of a flat run, (num_seqs, width); arguments and errors as in
        `forward`."""
        return self(batch, cache, between, wanted=batch.flat_layout.cu_seqlens[1:].long() - 1)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        embedded = widened(self.embed(ids))  # (total_tokens, width); a frozen embedding may be in bf16
        return embedded if self.config.embed_scale == 1.0 else embedded * self.config.embed_scale

    def target_hidden(self, batch: RaggedBatch, between: Between | None = None) -> Tensor:
        """Hidden states from which the targets are predicted, (num_targets, width); `between` as in `losses`."""
        return self(batch, between=between, wanted=batch.target_index)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, (num, width) -> (num, vocab_size), fp32 or wider."""
        dtype = compute_dtype(hidden)
        return widened(product(hidden.to(dtype), computing_copy(self.head_weight, dtype)))

    def losses(self, batch: RaggedBatch, between: Between | None = None) -> Terms:
        """Loss terms over the batch's targets: `cross_entropy` trains, `nll` is the same without label smoothing. While
        the model learns preferences, the terms of `pair_terms` replace them.

        Args:
            between: as in `forward`; it must not remove a target.
        """
        hidden = self.target_hidden(batch, between)
        labels = batch.labels.index_select(0, batch.target_index)
        if self.beta is not None:
            return pair_terms(target_nll(hidden, self.head_weight, labels), batch, self.beta, self.label_smoothing)
        loss, nll = cross_entropy(hidden, self.head_weight, labels, self.label_smoothing)
        return {"cross_entropy": (loss, batch.num_targets), "nll": (nll, batch.num_targets)}

    @torch.no_grad()
    def token_nll(self, batch: RaggedBatch, between: Between | None = None) -> Tensor:
        """Negative log-likelihood of every target of the batch, (num_targets,) in nats; `between` as in `losses`."""
        labels = batch.labels.index_select(0, batch.target_index)
        return token_nll(self.target_hidden(batch, between), self.head_weight, labels)

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
        """The counts that `losses` will return, from the batch alone."""
        if self.beta is not None:
            return count_pairs(batch)
        return {"cross_entropy": batch.num_targets, "nll": batch.num_targets}

    def _ends_short(self, index: int, num_wanted: int, stream: Stream, between: Between) -> bool:
        """True if this block is the last, and drops all but the wanted tokens after its attention: nothing attends to
        the output of the others."""
        is_last = index == len(self.blocks) - 1
        return is_last and not between.reads(index) and num_wanted <= MOST_WANTED * len(stream.x)

    def _normed(self, stream: Stream) -> Tensor:
        """Hidden states after the last norm, (num, width)."""
        return self.norm(stream.x, stream.delta, stream.layout, stream.index)[1]

    @property
    def head_weight(self) -> Tensor:
        """(vocab_size, width)."""
        return self.embed.weight if self.head is None else self.head.weight

    def _embed(self, batch: RaggedBatch) -> Tensor:
        positions = batch.position_ids
        limit = self.config.longest
        # Reading the largest position would make an accelerator wait; there the plan keeps to the context.
        if positions.numel() and positions.device.type == "cpu" and int(positions.max()) >= limit:
            raise RecipeError(
                f"position {int(positions.max())} is outside the model's context of {limit} tokens",
                fix=self.config.advice_beyond,
            )
        embeds = batch.inputs_embeds
        x = self.embed_tokens(required(batch.input_ids)) if embeds is None else embeds
        if self.position_embed is not None:
            x = x + self.position_embed(positions)
        elif self.config.positions == "sinusoidal":
            # Embeddings start at 0.02 and the table at 1: without the factor positions would drown the tokens.
            factor = 0.02 if batch.input_ids is not None else 1.0
            table = rope.position_table(limit, self.config.width, factor, x.dtype, positions.device)
            x = x + table.index_select(0, positions)
        share = self.config.embed_dropout if self.training else 0.0
        return dropout(x, share, draw(), batch.layout.places) if share else x

    def _rotary(self, position_ids: Tensor, dtype: torch.dtype) -> rope.Rotary | None:
        config = self.config
        if config.positions != "rotary":
            return None
        frequencies = rope.rotary_frequencies(
            config.head_dim, config.rope_theta, config.context_method, config.context_factor, position_ids.device
        )
        if config.rope_scaling is not None:
            frequencies = config.rope_scaling.scaled(frequencies)
        return rope.rotary_table(position_ids, frequencies, wide_dtype(dtype))

    def _local_rotary(self, position_ids: Tensor, dtype: torch.dtype) -> rope.Rotary | None:
        """Angles of the blocks with a window, if they differ from those of the others."""
        config = self.config
        if config.sliding_rope_theta is None:
            return None
        frequencies = rope.rotary_frequencies(
            config.head_dim, config.sliding_rope_theta, "none", 1.0, position_ids.device
        )
        return rope.rotary_table(position_ids, frequencies, wide_dtype(dtype))


def _take(hidden: Tensor, index: Tensor) -> Tensor:
    """Rows of (total_tokens, width). Where all are taken in order, because every token has a target, nothing is copied;
    only checked on the processor, as a GPU would synchronize."""
    if hidden.device.type == "cpu" and len(index) == len(hidden) and torch.equal(index, torch.arange(len(index))):
        return hidden
    return hidden.index_select(0, index)
