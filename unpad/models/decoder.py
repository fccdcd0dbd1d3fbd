"""The decoder: token embeddings, pre-norm blocks, and a head over the vocabulary.

One class covers GPT-2 style (LayerNorm, GELU, learned positions), Llama style (RMSNorm, SwiGLU, rotary) and what lies
between. `preset` names two of them; every other field overrides the preset.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from unpad.batching.batch import RaggedBatch
from unpad.batching.layout import Layout
from unpad.errors import RecipeError
from unpad.models.contract import Generates, ModelConfig
from unpad.nn.block import BEFORE, Between, Block, BlockConfig, Cache, Stream, init_weights
from unpad.nn.linear import compute_dtype, computing_copy, product
from unpad.nn.losses import Terms, cross_entropy, token_nll
from unpad.nn.norm import Norm
from unpad.nn.rope import ContextMethod, Rotary, rotary_frequencies, rotary_table, sinusoidal_table

DATA = "text"
# Share of tokens above which a last block is computed whole: taking the others out would cost more than it saves.
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


class Config(ModelConfig, BlockConfig):
    """The `model` section of a recipe."""

    kind: Literal["decoder"] = "decoder"
    preset: Literal["zh_gpt", "llm"] | None = Field(
        None,
        description="Sizes and choices of a small Chinese GPT, or of a Llama-style model; other fields override it.",
    )
    context: int = Field(512, ge=1, description="Longest sequence, in tokens.")
    positions: Literal["sinusoidal", "learned", "rotary"] = Field("rotary", description="Kind of position encoding.")
    rope_theta: float = Field(10000.0, gt=0, description="Base of the rotary frequencies.")
    context_method: ContextMethod = Field("none", description="How rotary positions reach past the trained context.")
    context_factor: float = Field(1.0, ge=1, description="Context wanted over context trained.")
    tied: bool = Field(True, description="The head shares the embedding's weights.")
    embed_dropout: float = Field(0.0, ge=0, lt=1, description="On the embeddings.")

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("preset") in PRESETS:
            return {**PRESETS[values["preset"]], **values}
        return values

    @model_validator(mode="after")
    def _positions_fit(self) -> Config:
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(
                f"rotary positions need an even head size, and width {self.width} / heads {self.heads} is odd"
            )
        if self.context_method != "none" and self.positions != "rotary":
            raise ValueError(
                f"context_method={self.context_method} extends rotary positions; positions is {self.positions}"
            )
        return self

    @property
    def longest(self) -> int:
        """Most positions the model accepts, context extension included."""
        return int(self.context * self.context_factor) if self.context_method != "none" else self.context


class Decoder(Generates):
    """Next-token model over a flat run of sequences.

    Args:
        config: sizes and choices.
        vocab_size: rows of the embedding and of the head.
    """

    config: Config

    def __init__(self, config: Config, vocab_size: int) -> None:
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self.causal, self.head_dim = config.causal, config.head_dim
        self.embed = nn.Embedding(vocab_size, config.width)
        self.position_embed = nn.Embedding(config.context, config.width) if config.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = Norm(config.norm, config.width, config.eps, config.dropout)
        self.head = None if config.tied else nn.Linear(config.width, vocab_size, bias=False)
        self.dropout = nn.Dropout(config.embed_dropout)
        init_weights(self, config.blocks)

    def forward(
        self,
        batch: RaggedBatch,
        cache: Cache | None = None,
        between: Between | None = None,
        at: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the last norm in the computing dtype, (total_tokens, width); (num, width) of the tokens
        that are wanted.

        Args:
            between: called before the first block and after every block; of tokens that it removes there is no hidden
                state, and `between.places` says where the others are.
            at: (num,) int64, the tokens whose hidden states are wanted; default all. Nobody attends to
                what the last block makes of the others: it leaves them out once its attention is done.

        Raises:
            RecipeError: a position lies outside the model's context.
        """
        x = self._embed(batch)
        stream = Stream(x, None, batch.layout, batch.position_ids, self._rotary(batch.position_ids, x.dtype))
        if between is not None:
            stream = between(BEFORE, stream, stream)
        narrow = False
        for index, block in enumerate(self.blocks):
            narrow = at is not None and self._leaves_out(index, len(at), stream, between)
            x, delta = block(
                stream.x, stream.delta, stream.layout, stream.rotary, cache, index,
                key_bias=stream.key_bias, value_scale=stream.value_scale, at=_places(at, between) if narrow else None,
            )  # fmt: skip
            left = replace(stream, x=x, delta=delta)
            stream = left if between is None or narrow else between(index, stream, left)
        hidden: Tensor = self.norm(stream.x, stream.delta)[1]
        wanted = None if narrow else _places(at, between)
        return hidden if wanted is None else hidden.index_select(0, wanted)

    def last_hidden(self, batch: RaggedBatch, cache: Cache | None = None, between: Between | None = None) -> Tensor:
        """Hidden state of the last token of every sequence of a flat run, (num_seqs, width); arguments and errors as in
        `forward`."""
        assert isinstance(batch.layout, Layout), "prompts come as a flat run"
        return self(batch, cache, between, batch.layout.cu_seqlens[1:].long() - 1)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        return self.embed(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, (num, width) -> (num, vocab_size), fp32 or wider."""
        dtype = compute_dtype(hidden)
        out = product(hidden.to(dtype), computing_copy(self._head, dtype))
        return out.to(torch.promote_types(dtype, torch.float32))

    def losses(self, batch: RaggedBatch, between: Between | None = None) -> Terms:
        """Terms over the batch's targets: `cross_entropy` trains, `nll` is the same without label smoothing.

        Args:
            between: as in `forward`; it may not remove a target.
        """
        hidden = self(batch, between=between, at=batch.target_index)
        labels = batch.labels.index_select(0, batch.target_index)
        loss, nll = cross_entropy(hidden, self._head, labels, self.label_smoothing)
        return {"cross_entropy": (loss, batch.num_targets), "nll": (nll, batch.num_targets)}

    @torch.no_grad()
    def token_nll(self, batch: RaggedBatch, between: Between | None = None) -> Tensor:
        """Negative log-likelihood of every target of the batch, (num_targets,) in nats; `between` as in `losses`."""
        labels = batch.labels.index_select(0, batch.target_index)
        return token_nll(self(batch, between=between, at=batch.target_index), self._head, labels)

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
        """The counts that `losses` will return, from the batch alone."""
        return {"cross_entropy": batch.num_targets, "nll": batch.num_targets}

    def _leaves_out(self, index: int, num_wanted: int, stream: Stream, between: Between | None) -> bool:
        """Whether this block, which reads `stream`, is the last one and ends with the wanted tokens alone."""
        if index < len(self.blocks) - 1 or (between is not None and between.reads(index)):
            return False
        return num_wanted <= MOST_WANTED * len(stream.x)

    @property
    def _head(self) -> Tensor:
        """(vocab_size, width)."""
        return self.embed.weight if self.head is None else self.head.weight

    def _embed(self, batch: RaggedBatch) -> Tensor:
        positions = batch.position_ids
        limit = self.config.longest
        # On an accelerator reading the largest position would make it wait; plans keep to the context there.
        if positions.numel() and positions.device.type == "cpu" and int(positions.max()) >= limit:
            raise RecipeError(
                f"position {int(positions.max())} lies outside the model's context of {limit} tokens",
                fix="shorten the input, or extend rotary positions with model.context_method and model.context_factor",
            )
        if batch.inputs_embeds is not None:
            x = batch.inputs_embeds
        else:
            assert batch.input_ids is not None, "a batch holds input_ids or inputs_embeds"
            x = self.embed(batch.input_ids)  # (total_tokens, width)
        if self.position_embed is not None:
            x = x + self.position_embed(positions)
        elif self.config.positions == "sinusoidal":
            # Embeddings start at 0.02 and the table at 1: without the factor positions would drown the words.
            table = sinusoidal_table(limit, self.config.width).to(positions.device)[positions].to(x.dtype)
            x = x + 0.02 * table if batch.input_ids is not None else x + table
        return self.dropout(x)

    def _rotary(self, position_ids: Tensor, dtype: torch.dtype) -> Rotary | None:
        config = self.config
        if config.positions != "rotary":
            return None
        frequencies = rotary_frequencies(
            config.head_dim, config.rope_theta, config.context_method, config.context_factor
        )
        return rotary_table(position_ids, frequencies, torch.promote_types(dtype, torch.float32))


def _places(tokens: Tensor | None, between: Between | None) -> Tensor | None:
    """Where these tokens stand after what was removed between blocks."""
    return tokens if tokens is None or between is None else between.places(tokens)
