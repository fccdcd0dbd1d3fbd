"""Token mergers: layers that replace the vision tokens of each sample or image by fewer weighted means.

Each is a `Reducer`. A sample without vision tokens gets none; a sample without question tokens is merged without the
question's influence.

The batch gets shorter: text keeps its order and its positions, and the merged tokens of an image replace its patches.
Each merged token takes the place and position of one patch (`Merged.places`), so the following tokens of a sequence
have the same positions as without merging. The last token of an image predicts the target of its last patch.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from unpad.batching.batch import RaggedBatch, required
from unpad.batching.layout import Layout
from unpad.models.vision_language.visual import VisionTokens, Visual, is_question
from unpad.nn.activation import activate
from unpad.nn.block import BlockConfig, FeedForward
from unpad.nn.cross_attention import EPS, CrossAttention, PairedRuns, PairWeights, Projection, pair_sequences
from unpad.nn.draws import draw, dropout, uniform
from unpad.nn.linear import Linear
from unpad.nn.norm import Norm
from unpad.nn.precision import widened
from unpad.nn.segments import segment_mean, segment_place, segment_top_k
from unpad.recipes.section import Section


class MergeConfig(Section):
    """Settings of merging: fewer visual tokens per image before the language model."""

    variant: Literal["simple", "question", "slots", "similarity", "class_token"]
    """simple: the best by a learned score become means of what is like them; question: the same, having seen the
    question; slots: learned queries; similarity: the most alike are merged (ToMe); class_token: those stay that receive
    most attention in the tower (VisionZip)."""
    ratio: float | None = Field(None, gt=0, le=1)
    """Tokens left of each image per token; not for slots."""
    slots: int | None = Field(None, ge=1)
    """Tokens that slots makes of each image."""
    inner: int = Field(512, ge=1)
    """Channels inside simple, question and slots."""
    heads: int = Field(4, ge=1)
    """Attention heads of question and slots."""
    temperature: float = Field(1.0, gt=0)
    """Of the shares of simple and question; small: one each."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Inside simple, question and slots."""

    @model_validator(mode="after")
    def _fit(self) -> "MergeConfig":
        if self.variant == "slots":
            if self.slots is None or self.ratio is not None:
                raise ValueError("variant=slots needs slots, how many tokens an image becomes, and no ratio")
        elif self.ratio is None or self.slots is not None:
            raise ValueError(f"variant={self.variant} needs ratio, the tokens left per token, and no slots")
        if self.variant in ("question", "slots") and self.inner % self.heads:
            raise ValueError(f"inner {self.inner} is not a multiple of heads {self.heads}")
        return self

    @property
    def left(self) -> float:
        """Tokens left per token, of a variant with a ratio."""
        return self.ratio or 1.0


@dataclass(frozen=True)
class Merged:
    """Result of a merger.

    Args:
        features: (total_out, dim).
        layout: of `features`, one sequence per sample.
        average: merges other values of the vision tokens in the same way, (num_vision, dim) into (total_out, dim), by
            the share of every vision token in every merged token; the shares of a merged token add up to 1.
        places: (total_out,) int64, the vision token that each merged token replaces, ascending in every sample: its
            centre, or evenly spaced tokens without centres.
    """

    features: Tensor
    layout: Layout
    average: Callable[[Tensor], Tensor]
    places: Tensor


class Reducer(nn.Module, ABC):
    """Layer that replaces the vision tokens of each sample or image by fewer weighted means of them."""

    @abstractmethod
    def forward(self, tokens: VisionTokens) -> Merged:
        """Merge the vision tokens of each sample."""


def num_merged(layout: Layout, ratio: float) -> Tensor:
    """Number of tokens that a ratio leaves of each sample, max(1, floor(ratio * n)), or 0 of 0, (num_seqs,) int64."""
    lengths = layout.lengths()
    # 0.29 * 100 is 28.999999999999996; the small number restores the integer.
    return torch.minimum((lengths.double() * ratio + 1e-9).floor().long().clamp_min(1), lengths)


def _lay_out(counts: Tensor, largest: int, keys: Tensor | None) -> Layout:
    """Layout of `counts` (num_seqs,) int64 tokens per sequence, with `largest` known on the host."""
    return Layout(F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)), largest, keys=keys)


# --------------------------------------------------------------------------- the best tokens as centres


class TopAssignment(nn.Module):
    """Choose the best tokens of each sample as centres, and distribute all tokens among them.

    A learned score s ranks tokens; the M best are centres, in training after Gumbel noise (Gumbel-top-k: Kool et al.
    2019, arXiv 1903.06059). Token x gives centre c the share softmax over centres of q(x) k(c) / (sqrt(inner)
    temperature) + log sigmoid(s_c): a centre with a higher score attracts more tokens, so that the score learns
    although the choice has no gradient. With a single centre, which gets everything, the score learns nothing. The
    shares that a centre received are then divided by their sum: the result is a mean, so its size does not depend on
    the number of tokens close to the centre.

    Args:
        width: channels of tokens.
        config: `inner`, the channels in which tokens and centres are compared, and of the scorer; `ratio`;
            `temperature` of the shares, a small one approaches one centre per token; `dropout`, the share of the
            scorer's hidden values that training sets to zero.
    """

    def __init__(self, width: int, config: MergeConfig) -> None:
        super().__init__()
        self.ratio, self.temperature, self.dropout = config.left, config.temperature, config.dropout
        inner = config.inner
        self.hidden, self.to_score = Linear(width, inner), Linear(inner, 1)
        self.to_q, self.to_k = Linear(width, inner, bias=False), Linear(width, inner, bias=False)

    def scores(self, x: Tensor, layout: Layout) -> Tensor:
        """Scores (num_vision,) of tokens (num_vision, width), fp32 or wider."""
        hidden = activate("relu", self.hidden(x))
        if self.training and self.dropout:
            hidden = dropout(hidden, self.dropout, draw(), layout.places)
        return widened(self.to_score(hidden)[:, 0])

    def forward(self, x: Tensor, layout: Layout) -> tuple[PairWeights, Layout, Tensor]:
        """Weights of tokens (num_vision, width) in each centre, the layout of the centres, and their tokens.

        Centres keep the order of their tokens; in eval the same tokens give the same centres.
        """
        scores = self.scores(x, layout)
        chances = scores.detach()
        if self.training:
            chances = chances - (-uniform(chances, layout.places).log()).log()  # Gumbel noise
        counts = num_merged(layout, self.ratio)
        centres = segment_top_k(chances, layout, counts).nonzero().flatten()
        largest = min(max(1, math.floor(self.ratio * layout.max_seqlen + 1e-9)), layout.max_seqlen)
        out_layout = _lay_out(counts, largest, layout.keys)
        weights = _share_out(
            self.to_q(x),
            self.to_k(x.index_select(0, centres)),
            F.logsigmoid(scores.index_select(0, centres)),
            pair_sequences(out_layout, layout),
            math.sqrt(self.to_q.out_features) * self.temperature,
        )
        return weights, out_layout, centres


def _share_out(q: Tensor, k: Tensor, bias: Tensor, pairs: PairedRuns, scale: float) -> PairWeights:
    """Softmax over the centres for every token, then normalize the shares of every centre.

    Both in logarithms: the weights of a centre far from all tokens still add up to 1.

    Args:
        q: (num_vision, inner), of the tokens.
        k: (num_centres, inner).
        bias: (num_centres,), added to every score of a centre.
        pairs: centres as queries, tokens as keys.
    """
    rectangles = []
    for group in pairs.groups:
        centres, tokens = group.queries, group.keys
        with torch.autocast(q.device.type, enabled=False):
            scores = widened(centres.take(k) @ tokens.take(q).transpose(1, 2)) / scale  # (num_seqs, centres, tokens)
        scores = scores + centres.take(bias)[:, :, None]
        # Finite, and yet zero after a softmax: a row of -inf alone would become NaN in the next one.
        nothing = torch.finfo(scores.dtype).min / 4
        shares = scores.masked_fill(~centres.mask[:, :, None], nothing).log_softmax(1)
        rectangles.append(shares.masked_fill(~tokens.mask[:, None], -math.inf).softmax(2)[:, None])
    return PairWeights(pairs, tuple(rectangles))


class TopMerger(Reducer):
    """Merger to the best tokens of each sample, as weighted means of the tokens that resemble them.

    Args:
        width: channels of vision features.
        config: as of `TopAssignment`.
    """

    def __init__(self, width: int, config: MergeConfig) -> None:
        super().__init__()
        self.assign = TopAssignment(width, config)

    def forward(self, tokens: VisionTokens) -> Merged:
        weights, layout, centres = self.assign(tokens.vision, tokens.vision_layout)
        return Merged(weights.average(tokens.vision), layout, weights.average, centres)


class QuestionMerger(Reducer):
    """`TopMerger` that ranks and compares tokens after attention to the question.

    The result is the weighted mean of the raw features plus a projection of the weighted mean of the attended ones.
    The projection starts at zero, so that frozen layers after the merger, trained on raw features, see these at first.

    Args:
        width: channels of vision features.
        question_width: channels of question tokens.
        config: as of `TopAssignment`; `inner`, `heads` and `dropout` also of the attention to the question.
    """

    def __init__(self, width: int, question_width: int, config: MergeConfig) -> None:
        super().__init__()
        inner = config.inner
        # Embeddings of text begin far smaller than features of a tower, which would drown them.
        self.vision_in, self.question_in = Linear(width, inner), Projection(question_width, inner)
        self.attention = CrossAttention(inner, config.heads, config.dropout)
        self.norm = Norm("layernorm", inner, EPS)
        self.assign = TopAssignment(inner, config)
        self.to_out = _zero_linear(inner, width)

    def attended(self, tokens: VisionTokens) -> Tensor:
        """Vision tokens after attention to the question of their sample, (num_vision, inner)."""
        vision, question = self.vision_in(tokens.vision), self.question_in(tokens.question)
        delta, _ = self.attention(vision, question, pair_sequences(tokens.vision_layout, tokens.question_layout))
        return self.norm(widened(vision), delta)[1]

    def forward(self, tokens: VisionTokens) -> Merged:
        attended = self.attended(tokens)
        weights, layout, centres = self.assign(attended, tokens.vision_layout)
        features = weights.average(tokens.vision) + self.to_out(weights.average(attended))
        return Merged(features, layout, weights.average, centres)


def _zero_linear(width: int, out: int) -> Linear:
    linear = Linear(width, out)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


# --------------------------------------------------------------------------- learned slots


class PoolMerger(Reducer):
    """Merger by learned slots, which attend to the vision tokens given the question; each slot becomes one token.

    Every sample with vision tokens gets exactly `slots` tokens, even if it had fewer. The result is
    scale * projection of the slots + the mean of the raw features by the slots' own attention, averaged over heads.
    The projection starts at zero, so that at first every token is a convex mean of raw features. Nothing is sampled:
    training differs from eval by dropout only. Slots as queries: Set Transformer (Lee et al. 2019, arXiv 1810.00825).

    Args:
        width: channels of vision features.
        question_width: channels of question tokens.
        config: `slots`, the tokens of the result per sample; `inner`, the channels of the slots; `heads` of the
            attention; `dropout`, the rate for attention weights, the feed-forward part's output and inside the
            question's layers.
    """

    def __init__(self, width: int, question_width: int, config: MergeConfig) -> None:
        super().__init__()
        inner, heads, self.dropout = config.inner, config.heads, config.dropout
        # As wide as a norm's output: all slots of a sample get the same question added, and must stay different.
        self.slots = nn.Parameter(torch.randn(config.slots or 1, inner))
        self.vision_in, self.question_in = Projection(width, inner), Projection(question_width, inner)
        self.question_hidden, self.question_out = Linear(inner, inner), Linear(inner, inner)
        self.query_norm = Norm("layernorm", inner, EPS)
        self.attention = CrossAttention(inner, heads, self.dropout)
        self.attention_norm = Norm("layernorm", inner, EPS)
        sizes = BlockConfig(width=inner, heads=heads, hidden=4 * inner, activation="gelu", bias=True)
        self.feed_forward = FeedForward(sizes)
        self.out_norm = Norm("layernorm", inner, EPS, self.dropout)
        self.to_out = _zero_linear(inner, width)
        self.scale = nn.Parameter(torch.tensor(0.1))

    def forward(self, tokens: VisionTokens) -> Merged:
        vision_layout = tokens.vision_layout
        counts = (vision_layout.lengths() > 0) * self.slots.shape[0]
        layout = _lay_out(counts, self.slots.shape[0] if vision_layout.max_seqlen else 0, vision_layout.keys)
        term = self._question_term(tokens.question, tokens.question_layout, vision_layout.bases)
        asked = term.index_select(0, layout.seq_of_token())
        queries = self.query_norm(self.slots.index_select(0, segment_place(layout)) + asked)[1]  # (total_out, inner)
        vision = self.vision_in(tokens.vision)
        delta, weights = self.attention(queries, vision, pair_sequences(layout, vision_layout))
        x = self.attention_norm(widened(queries), delta)[1]
        x = self.out_norm(widened(x), self.feed_forward(x), layout)[1]
        features = self.scale * self.to_out(x) + weights.average(tokens.vision)
        return Merged(features, layout, weights.average, _evenly(layout, vision_layout))

    def _question_term(self, question: Tensor, layout: Layout, places: Tensor | None) -> Tensor:
        """Term that the question adds to every slot of its sample, (num_seqs, inner) fp32 or wider; 0 without one."""
        hidden = activate("gelu", self.question_hidden(segment_mean(self.question_in(question), layout)))
        if self.training and self.dropout:
            hidden = dropout(hidden, self.dropout, draw(), places)
        return widened(self.question_out(hidden)) * (layout.lengths() > 0)[:, None]


def _evenly(layout: Layout, vision_layout: Layout) -> Tensor:
    """Vision tokens at even distances from the first of each sample, one per token of `layout`, (total_out,) int64;
    they repeat if a sample has fewer."""
    sequence = layout.seq_of_token()
    here, there = (x.lengths().index_select(0, sequence) for x in (layout, vision_layout))
    return vision_layout.cu_seqlens.long().index_select(0, sequence) + segment_place(layout) * there // here


# --------------------------------------------------------------------------- chosen tokens, without learning


class BestMerger(Reducer):
    """Reducer that keeps the tokens unchanged which received most attention in the tower, and drops the others.

    Args:
        ratio: tokens left per token.
    """

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self.ratio = ratio

    def forward(self, tokens: VisionTokens) -> Merged:
        assert tokens.received is not None, "class_token ranks by the attention that patches received in the tower"
        layout = tokens.vision_layout
        best = segment_top_k(tokens.received, layout, num_merged(layout, self.ratio))
        places = best.nonzero().flatten()
        chosen = tokens.vision.index_select(0, places)
        return Merged(chosen, layout.keep(best), lambda values: values.index_select(0, places), places)


# --------------------------------------------------------------------------- similar tokens, without learning


@dataclass(frozen=True)
class TokenGroups:
    """Weights of merged tokens that are plain means of disjoint groups of vision tokens.

    Args:
        owner: (num_vision,) int64, the merged token that contains each vision token.
        sizes: (total_out,) int64, vision tokens per merged token.
    """

    owner: Tensor
    sizes: Tensor

    def average(self, values: Tensor) -> Tensor:
        """Merge (num_vision, dim) into (total_out, dim)."""
        order = self.owner.argsort(stable=True)
        total = torch.segment_reduce(
            widened(values).index_select(0, order), "sum", lengths=self.sizes, unsafe=True
        )  # in order of the tokens, without atomics
        return (total / self.sizes[:, None]).to(values.dtype)


class SimilarityMerger(Reducer):
    """`similarity_merge` as a layer; nothing is learned.

    Args:
        ratio: tokens left per token.
    """

    def __init__(self, ratio: float = 0.5) -> None:
        super().__init__()
        self.ratio = ratio

    def forward(self, tokens: VisionTokens) -> Merged:
        return similarity_merge(tokens.vision, tokens.vision_layout, num_merged(tokens.vision_layout, self.ratio))


def similarity_merge(features: Tensor, layout: Layout, budget: Tensor) -> Merged:
    """Merge the most similar tokens of each sample until `budget` are left: ToMe (Bolya et al. 2022, arXiv 2210.09461).

    One round splits each sample's tokens alternately into two halves, finds for each token of the first half the most
    similar token (cosine) of the second, and merges the best of these pairs. A round merges at most half of the tokens,
    so there are as many rounds as halvings. Means weight each token by its number of vision tokens. A merged token
    takes the place of its token of the second half.

    Args:
        features: (num_vision, dim), compared and averaged. Gradient flows through the means, not through the choice.
        budget: (num_seqs,) int64; a sample with fewer tokens keeps all, a sample with any keeps at least 1.
    """
    budget = torch.minimum(budget.clamp_min(1), layout.lengths())
    groups = TokenGroups(torch.arange(len(features), device=features.device), torch.ones_like(layout.seq_of_token()))
    current, places = layout, torch.arange(len(features), device=features.device)
    with torch.no_grad(), torch.autocast(features.device.type, enabled=False):
        while bool((current.lengths() > budget).any()):
            goes, into = _pair_off(groups.average(widened(features)), current, current.lengths() - budget)
            after = (~goes).cumsum(0) - 1  # (num_tokens,) new places of the tokens that stay
            owner = torch.where(goes, after[into], after)[groups.owner]
            current, places = current.keep(~goes), places[~goes]
            groups = TokenGroups(owner, torch.bincount(owner, minlength=int(current.cu_seqlens[-1])))
    return Merged(groups.average(features), current, groups.average, places)


def _pair_off(x: Tensor, layout: Layout, excess: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens to merge in one round, (num_tokens,) bool, and the target of each, (num_tokens,) int64.

    Args:
        x: (num_tokens, dim).
        excess: (num_seqs,) int64, tokens above the budget.
    """
    first = segment_place(layout) % 2 == 0
    sides = layout.keep(first), layout.keep(~first)
    unit = F.normalize(x, dim=1)
    here, there = first.nonzero().flatten(), (~first).nonzero().flatten()
    likeness, into = x.new_full((len(here),), -math.inf), here.clone()
    for group in pair_sequences(*sides).groups:
        scores = group.queries.take(unit[here]) @ group.keys.take(unit[there]).transpose(1, 2)
        best, at = scores.masked_fill(~group.keys.mask[:, None], -math.inf).max(2)  # (num_seqs, longest)
        chosen = there[group.keys.cells].gather(1, at)
        likeness[group.queries.tokens] = group.queries.flatten(best)
        into[group.queries.tokens] = group.queries.flatten(chosen)
    merged = segment_top_k(likeness, sides[0], torch.minimum(excess, layout.lengths() // 2))
    goes, target = torch.zeros_like(first), torch.arange(len(x), device=x.device)
    goes[here], target[here] = merged, into
    return goes, target


def make_merger(config: MergeConfig, width: int, question_width: int) -> Reducer:
    """Create the layer of a variant.

    Args:
        width: channels of the tower's features.
        question_width: channels of embeddings of text.
    """
    match config.variant:
        case "simple":
            return TopMerger(width, config)
        case "question":
            return QuestionMerger(width, question_width, config)
        case "slots":
            return PoolMerger(width, question_width, config)
        case "similarity":
            return SimilarityMerger(config.left)
        case "class_token":
            return BestMerger(config.left)


def merge_images(
    merger: Reducer, batch: RaggedBatch, text: Tensor, features: Tensor, tower_attention: Tensor | None
) -> Merged:
    """Merge the visual tokens of each image, given the question of its row.

    Args:
        batch: a flat run with images.
        text: (total_tokens, question_width), embeddings; placeholders' are not read.
        features: (media.total_tokens, width), of the tower.
        tower_attention: (media.total_tokens,); for class_token.
    """
    asks = is_question(batch, required(batch.media_index))
    layout, tokens = batch.flat_layout.keep(asks).select(required(batch.media_seqs))
    questions = text.index_select(0, asks.nonzero().flatten()).index_select(0, tokens)
    return merger(VisionTokens(features, required(batch.media).flat_layout, questions, layout, tower_attention))


def shorten(batch: RaggedBatch, text: Tensor, merged: Merged, embeds: Tensor) -> tuple[RaggedBatch, Visual]:
    """Return the batch as the language model reads it, with merged images.

    Args:
        batch: a flat run with images.
        text: (total_tokens, width), embeddings; placeholders' are not read.
        merged: one sequence per image.
        embeds: (total_out, width), of the merged tokens.

    Returns:
        A batch with `inputs_embeds` (new total_tokens, width), without `media`, and the places of its visual tokens.
    """
    media, index = required(batch.media), required(batch.media_index)
    patches = media.layout
    assert isinstance(patches, Layout), "images come as a flat run"
    present = patches.lengths() > 0
    bounds = patches.cu_seqlens.long()
    first, last = index[bounds[:-1][present]], index[bounds[1:][present] - 1]  # of every image
    becomes = torch.ones_like(batch.position_ids).index_fill(0, index, 0)  # (total_tokens,) new tokens per old token
    becomes = becomes.index_copy(0, first, merged.layout.lengths()[present])
    begins = becomes.cumsum(0) - becomes  # their first place in the new run
    made_of = torch.repeat_interleave(becomes)  # (new total_tokens,) the old token that gives the fields

    start = torch.zeros_like(patches.lengths())
    start[present] = begins[first]
    visual = start.index_select(0, merged.layout.seq_of_token()) + segment_place(merged.layout)  # (total_out,)
    positions = batch.position_ids[made_of].index_copy(0, visual, batch.position_ids[index[merged.places]])
    loss_mask = batch.loss_mask[made_of].index_fill(0, visual, False)
    final = (start + merged.layout.lengths() - 1)[present]
    loss_mask = loss_mask.index_copy(0, final, batch.loss_mask[last])
    labels = batch.labels[made_of].index_fill(0, visual, 0).index_copy(0, final, batch.labels[last])
    target_index = loss_mask.nonzero().flatten()
    assert len(target_index) == len(batch.target_index), "only the last patch of an image has a target"
    short = replace(
        batch,
        layout=_grown(batch, becomes),
        position_ids=positions,
        input_ids=None if batch.input_ids is None else batch.input_ids[made_of],
        labels=labels,
        loss_mask=loss_mask,
        target_index=target_index,
        inputs_embeds=text[made_of].index_copy(0, visual, embeds.to(text.dtype)),
        media=None,
        media_index=None,
        media_seqs=None,
    )
    order = visual.argsort()
    return short, Visual(visual[order], merged.places[order], media)


def _grown(batch: RaggedBatch, becomes: Tensor) -> Layout:
    """Layout of the run in which token i of the batch became `becomes[i]` tokens, (total_tokens,) int64."""
    before = torch.cat([becomes.new_zeros(1), becomes.cumsum(0)])
    bounds = before[batch.flat_layout.cu_seqlens.long()].to(torch.int32)
    return Layout(bounds, int(bounds.diff().max()) if batch.num_seqs else 0, keys=batch.layout.keys)
