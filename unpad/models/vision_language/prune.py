"""Pruning of vision tokens: settings, learned heads, soft and hard removal, and rankings for comparison.

Vision tokens of all samples form one flat run with one sequence per sample. Soft removal hides a token from attention
by degrees, with probability 0 entirely; hard removal removes it from the run.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from unpad.batching.layout import Layout
from unpad.models.vision_language.visual import VisionTokens
from unpad.nn.activation import activate
from unpad.nn.attention import spread_values
from unpad.nn.block import BEFORE
from unpad.nn.cross_attention import EPS, CrossAttention, Projection, pair_sequences, received_attention
from unpad.nn.draws import draw, dropout, mix, uniform
from unpad.nn.linear import Linear
from unpad.nn.norm import Norm
from unpad.nn.precision import widened
from unpad.nn.segments import segment_place, segment_top_k
from unpad.recipes.section import Section
from unpad.recipes.training import Ramp, Weight


class DiscriminatorConfig(Section):
    """Settings of the classifier of hidden states into whole model and pruned model."""

    layers: list[int] = Field([-1], min_length=1)
    """Blocks after which it compares the text, counted from 0, or from the end."""
    inner: int = Field(512, ge=1)
    """Channels inside."""
    reinit: float = Field(0.0, ge=0, le=1)
    """Probability per step that all its weights are reinitialized."""


class PruneConfig(Section):
    """Pruning: the visual tokens that the language model drops, and the blocks before or after which it does."""

    layers: list[int] = Field(min_length=1)
    """Blocks after which tokens are removed, counted from 0; -1 before the first."""
    method: Literal["learned", "relevance", "random", "uniform", "attention", "class_token"] = "learned"
    """Who judges tokens: heads that learn it as tokens fade out, heads that learn how much the loss of the whole model
    depends on each, or a ranking to compare them with."""
    inner: int = Field(512, ge=2)
    """Channels inside a head."""
    heads: int = Field(4, ge=1)
    """Attention heads of a head."""
    question: bool = True
    """Heads read the question; false: they choose by the image alone."""
    attention_weight: Literal["none", "fixed", "learned"] = "none"
    """Add to a head's logits the attention that tokens receive from the question, relative to even attention on all of
    them, times 0.5 or learned."""
    keep: float | None = Field(None, gt=0, le=1)
    """Share that stays of the visual tokens of a sample that reach each layer."""
    threshold: float = Field(0.5, ge=0, lt=1)
    """Probability, with one fixed draw of the noise of training, above which heads keep a token, where keep does not
    say how many."""
    target: float | None = Field(None, gt=0)
    """What sparsity wants kept of a sample after the last layer: up to 1 a share, above it tokens. Default what keep
    leaves, and 0.5 without it."""
    one_sided: bool = True
    """Keeping less than the target costs nothing."""
    temperature: Weight = 1.0
    """Of the heads' probabilities: a number, or a ramp such as {start: 1, end: 0.1, share: 0.5}."""
    discriminator: DiscriminatorConfig | None = None
    """What the terms `adversarial` and `discriminator` are made with."""

    @property
    def learns(self) -> bool:
        """Heads judge tokens, and learn it."""
        return self.method in ("learned", "relevance")

    @property
    def softens(self) -> bool:
        """Heads learn it as tokens fade out, by probabilities with noise."""
        return self.method == "learned"

    @property
    def wanted(self) -> tuple[float, Literal["tokens", "ratio"]]:
        """Target of sparsity, and its unit."""
        if self.target is None:
            return (0.5 if self.keep is None else self.keep ** len(self.layers)), "ratio"
        return self.target, "ratio" if self.target <= 1 else "tokens"

    def temperature_at(self, step: int, total_steps: int) -> float:
        """Temperature of one step of a stage, counted from 0."""
        course = self.temperature
        return course.at(step, total_steps) if isinstance(course, Ramp) else course

    @model_validator(mode="after")
    def _fit(self) -> "PruneConfig":
        if self.layers != sorted({*self.layers}) or self.layers[0] < BEFORE:
            raise ValueError(f"layers {self.layers} are not ascending numbers of blocks, counted from 0 (-1: before)")
        if self.layers[0] == BEFORE and (self.method == "attention" or self.attention_weight != "none"):
            raise ValueError("layers [-1]: before the first block there is no attention to judge by; begin with 0")
        if self.inner % 2 or self.inner % self.heads:
            raise ValueError(f"inner {self.inner} is not an even multiple of heads {self.heads}")
        course = self.temperature
        if min((course.start, course.end) if isinstance(course, Ramp) else (course,)) <= 0:
            raise ValueError("temperature divides logits; it must be more than 0, at the start of a ramp too")
        if not self.question and self.attention_weight != "none":
            raise ValueError("attention_weight adds attention of the question, and question: false hides it from heads")
        if not self.softens:
            self._fit_ranking()
        return self

    def _fit_ranking(self) -> None:
        """Reject settings of probabilities where there are none, and of heads where there are none."""
        if self.keep is None:
            raise ValueError(f"method={self.method} ranks tokens; keep must say which share of them stays")
        for name in ("target", "discriminator"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} teaches heads as tokens fade out, and method={self.method} has none")
        if self.learns:
            return
        if self.attention_weight != "none":
            raise ValueError(f"attention_weight is of heads, and method={self.method} has none")
        if not self.question:
            raise ValueError(f"question: false is of heads, and method={self.method} has none")

    def check_blocks(self, blocks: int) -> None:
        """Reject numbers of blocks that a model does not have, or that have no effect.

        Raises:
            ValueError: names the number.
        """
        if self.layers[-1] >= blocks - 1:
            what = f"nothing reads visual tokens after the last of {blocks} blocks"
            raise ValueError(f"prune.layers {self.layers}: {what}, so there is nothing to save")
        for layer in self.discriminator.layers if self.discriminator else ():
            if not -blocks <= layer < blocks:
                raise ValueError(f"prune.discriminator.layers {layer} is none of {blocks} blocks")
            if layer % blocks <= self.layers[0]:
                raise ValueError(
                    f"prune.discriminator.layers {layer}: nothing is pruned up to block {self.layers[0]}, after which"
                    " there is nothing to compare"
                )


# Bias of a removed key. Next to any other key its weight is exactly 0 even in fp64, as with -inf; but the output of a
# token that sees no other key, such as the first of a causal sequence, stays finite.
REMOVED = -1e4


# --------------------------------------------------------------------------- heads


class PrunerHead(nn.Module):
    """Head of one layer that predicts the probability of keeping every vision token, given the question if it reads it.

    V = norm(Linear(norm(vision))), Q the same of the question; logit = MLP(norm(V + attention of V to Q)). With noise
    on the logits `keep_probability` is a sample of the binary concrete distribution (Maddison et al. 2016, arXiv
    1611.00712, appendix B).

    Args:
        width: channels of the hidden states.
        config: `inner`, the channels inside, and the `heads` of the attention; attention_weight none ignores attention,
            fixed adds it to the logits, times 0.5, and learned learns the factor. Noise of the logits has a deviation
            of 1.8, so attention should be relative to even attention, not a share.
        dropout: rate for attention weights and the MLP's hidden values.
    """

    attention_weight: Tensor | None

    def __init__(self, width: int, config: PruneConfig, dropout: float = 0.1) -> None:
        super().__init__()
        inner, self.dropout = config.inner, dropout
        self.vision_in, self.question_in = Projection(width, inner), Projection(width, inner)
        self.attention = CrossAttention(inner, config.heads, dropout)
        self.norm = Norm("layernorm", inner, EPS)
        self.hidden, self.to_logit = Linear(inner, inner // 2), Linear(inner // 2, 1)
        nn.init.xavier_uniform_(self.to_logit.weight)
        nn.init.zeros_(self.to_logit.bias)
        half = None if config.attention_weight == "none" else torch.tensor(0.5)
        if config.attention_weight == "learned" and half is not None:
            self.attention_weight = nn.Parameter(half)
        else:
            self.register_buffer("attention_weight", half)

    def forward(self, tokens: VisionTokens) -> Tensor:
        """Score vision tokens.

        Args:
            tokens: hidden states of both. With an attention weight they received what `text_to_vision_attention` gives
                times the tokens that share it.

        Returns:
            (num_vision,) logits of being kept, fp32 or wider.
        """
        seen, asked = self.vision_in(tokens.vision), self.question_in(tokens.question)
        delta, _ = self.attention(seen, asked, pair_sequences(tokens.vision_layout, tokens.question_layout))
        hidden = activate("gelu", self.hidden(self.norm(widened(seen), delta)[1]))
        if self.training and self.dropout:
            hidden = dropout(hidden, self.dropout, draw(), tokens.vision_layout.places)
        logits = widened(self.to_logit(hidden)[:, 0])
        assert (tokens.received is None) == (self.attention_weight is None), "attention goes with an attention weight"
        if tokens.received is not None and self.attention_weight is not None:
            logits = logits + self.attention_weight * tokens.received
        return logits


def keep_probability(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Probability of being kept, sigmoid(logit / temperature); the same shape.

    Args:
        logits: (num_vision,), fp32 or wider, with noise for one draw.
        temperature: above 0; may be a scalar tensor.
    """
    return torch.sigmoid(logits / temperature)


def fresh_noise(logits: Tensor, layout: Layout) -> Tensor:
    """Logistic noise, the difference of the two Gumbel variables of keep and drop; same shape."""
    return uniform(logits, layout.places).logit().to(logits.dtype)


def drawn_noise(layer: int, place: Tensor, dtype: torch.dtype) -> Tensor:
    """Logistic noise of one fixed draw, which depends only on the layer and the token's place.

    Heads learn logits in the presence of noise. The tokens with the highest logits alone are a choice unlike those in
    training; with this draw evaluation makes a choice like those.

    Args:
        place: (num_vision,) int64, number of the token among the initial tokens of its sample.

    Returns:
        (num_vision,).
    """
    most = int(place.max()) if len(place) else 0
    return _draw(layer, 1 << most.bit_length(), dtype, place.device).index_select(0, place)


@lru_cache(maxsize=64)  # about twenty operations, a measurable part of reading a short prompt
def _draw(layer: int, num: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Logistic noise of the first `num` places, (num,)."""
    with torch.inference_mode(False), torch.no_grad():  # first used in inference, it may be used in training later
        place = torch.arange(num, device=device)
        # 0 hashes to 0, which would always drop the first token; -1 is before the first layer.
        bits = mix(mix(torch.tensor(layer + 2, device=device)) ^ place)
        return ((bits.double() + 0.5) / 2**32).logit().to(dtype)


# --------------------------------------------------------------------------- soft removal


def cumulative_keep(probabilities: Sequence[Tensor]) -> Tensor:
    """Probability of being kept by every head so far, the product of their probabilities, (num_vision,)."""
    return torch.stack(list(probabilities)).prod(0)


def log_keep(probability: Tensor) -> Tensor:
    """Logarithm of a probability, REMOVED at 0, where the gradient is 0; the same shape."""
    present = probability >= torch.finfo(probability.dtype).tiny
    # The inner where keeps log(0) and its infinite gradient out of the backward pass.
    return torch.where(present, torch.where(present, probability, 1).log(), REMOVED)


def soft_bias(probability: Tensor, is_vision: Tensor) -> Tensor:
    """The key bias of soft removal, for `self_attention`.

    A probability p multiplies the weight of a key by p before weights are divided by their sum. 1 changes nothing; with
    0 every other token's output is as without the token. The next norm would undo a scaling of hidden states.

    Args:
        probability: (num_vision,), of all heads so far.
        is_vision: (total_tokens,) bool, True on num_vision tokens.

    Returns:
        (total_tokens,), log p on vision tokens, 0 elsewhere.
    """
    return spread_values(log_keep(probability), is_vision, 0)


# --------------------------------------------------------------------------- hard removal


def hard_keep(probability: Tensor, layout: Layout, threshold: float) -> Tensor:
    """Mark the tokens to keep: all above the threshold, and in any case the best of each sample.

    Args:
        probability: (num_vision,).
        threshold: below 1; 0 keeps all tokens, even where the probability has underflowed to 0.

    Returns:
        (num_vision,) bool; `layout.keep` gives the layout of the remaining tokens.
    """
    if threshold <= 0:
        return torch.ones_like(probability, dtype=torch.bool)
    return (probability > threshold) | segment_top_k(probability, layout, torch.ones_like(layout.lengths()))


def keep_top(scores: Tensor, layout: Layout, budget: Tensor) -> Tensor:
    """Mark the tokens with the highest scores of each sample.

    Args:
        scores: (num_vision,).
        budget: (num_seqs,) tokens to keep, rounded up; at least 1 is kept.

    Returns:
        (num_vision,) bool.
    """
    # 0.1 * 30 is 3.0000000000000004; the small number gives such products their integer.
    return segment_top_k(scores, layout, (budget.double() - 1e-9).ceil().long().clamp_min(1))


# --------------------------------------------------------------------------- attention as a signal


def text_to_vision_attention(
    q: Tensor,
    k: Tensor,
    layout: Layout,
    is_vision: Tensor,
    is_text: Tensor,
    causal: bool,
    *,
    key_bias: Tensor | None = None,
) -> Tensor:
    """Attention that each vision token receives from the text of its sample in a layer: the mean of the layer's
    attention weights over heads and text tokens.

    FastV (Chen et al. 2024, arXiv 2403.06764) ranks by it at an early layer, with `last_tokens` as text. Ranking by the
    class token of a vision tower is the same with that token as text (VisionZip, Yang et al. 2024, arXiv 2412.04467);
    in a tower without a class token every token may count as text and as vision.

    Args:
        q: (total_tokens, heads, head_dim), as the layer uses them, positions applied.
        k: (total_tokens, kv_heads, head_dim).
        layout: of the whole run.
        is_vision, is_text: (total_tokens,) bool; the keys to measure, and the queries to average over.
        causal: a query sees itself and earlier tokens only.
        key_bias: (total_tokens,), of the layer.

    Returns:
        (num_vision,) in fp32 or wider; zeros in a sample without text. Weights are computed for text queries only, and
        without gradient for few sequences at a time.
    """
    text = is_text.nonzero().flatten()
    pairs = pair_sequences(layout.keep(is_text), layout)
    places = (text, torch.arange(len(k), device=k.device)) if causal else None
    return received_attention(q.index_select(0, text), k, pairs, key_bias=key_bias, places=places)[is_vision]


# --------------------------------------------------------------------------- rankings for comparison


def random_order(layout: Layout, sample_ids: Tensor, seed: int = 0) -> Tensor:
    """Scores by which the tokens of a sample are kept in an order of (seed, sample id) alone, (num_vision,) fp64.

    Args:
        sample_ids: (num_seqs,) int64, of the corpus.
    """
    sample = sample_ids.index_select(0, layout.seq_of_token())
    low = 0xFFFFFFFF
    bits = mix(torch.tensor(seed & low, device=sample.device))
    for word in (sample & low, sample >> 32 & low, segment_place(layout)):
        bits = mix(bits ^ word)
    return bits.double()


def even_order(rows: Tensor, columns: Tensor, bits: int = 16) -> Tensor:
    """Scores by which an evenly spaced part of each grid is kept, whatever the budget, (num_vision,) fp64.

    Order of ordered dithering (Bayer 1973, "An optimum method for two-level rendition of continuous-tone pictures"):
    the first 4^k-th part of a grid is every 2^k-th cell in both directions, and the cells between follow likewise.

    Args:
        rows, columns: (num_vision,) int64, place of each token in the grid of its image, below 65536.
    """
    rank = torch.zeros_like(rows)
    for bit in range(bits):
        both, row = (rows ^ columns) >> bit & 1, rows >> bit & 1
        rank = rank << 2 | both << 1 | row
    return -rank.double()
