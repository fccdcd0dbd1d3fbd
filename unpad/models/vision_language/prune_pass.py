"""One pass of a language model that drops visual tokens between its blocks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from unpad.batching.batch import RaggedBatch, required
from unpad.batching.layout import Layout, PaddedLayout
from unpad.models.vision_language import prune
from unpad.models.vision_language.visual import VisionTokens, Visual, cells, is_last, is_question, last_tokens, mark
from unpad.nn.block import Between, Block, Stream
from unpad.nn.draws import apart
from unpad.nn.segments import segment_place, segment_sum


class PrunePass:
    """Removal of visual tokens before and between the blocks of one pass.

    The choice depends on the sample alone: its question, up to the beginning of the answer, and its own visual tokens.
    With `config.question` false it depends on these tokens and the text before them.

    Args:
        config: layers and method of the removal.
        heads: learned heads, by the number of their layer.
        blocks: of the language model.
        batch: as the language model reads it.
        visual: places of its visual tokens.
        mode: soft: hide tokens by the heads' probabilities instead of removing them. relevance: hide them by chance,
            and let heads judge them beside: the gradient of a loss by a token's weight tells how much it depends on it.
        learns: draw noise and dropout of the heads for this pass; else choose as in evaluation.
        temperature: of the probabilities.

    Attributes:
        kept: visual tokens of every sample that entered each block so far, a (num_seqs,) int64 per block.
        kept_tokens: the patch of `media` that each of these tokens represents, sample by sample, a (num_visual,) int64
            per block.
        expected: `kept` with each token counted by the probability that no head drops it, (num_seqs,) fp32 per block.
        probabilities: outputs of the heads so far, or of chance for relevance, each (num_visual,); not in removal.
        logits: of the heads so far, each (num_visual,); relevance only.
    """

    def __init__(
        self,
        config: prune.PruneConfig,
        heads: nn.ModuleDict,
        blocks: nn.ModuleList,
        batch: RaggedBatch,
        visual: Visual,
        *,
        mode: Literal["soft", "relevance", "hard"],
        learns: bool,
        temperature: Tensor,
    ) -> None:
        self._config, self._heads, self._blocks = config, heads, blocks
        self._mode, self._learns, self._temperature = mode, learns, temperature
        self._given, self._seq_ids = visual, batch.seq_ids
        # Places in the stream of the remaining visual tokens, and the patch that each represents.
        self._visual, self._source = visual.index, visual.source
        # A prompt may end with an image; a token that predicts a target always stays.
        self._needed = (batch.loss_mask | is_last(batch.layout)).index_select(0, self._visual)  # (num_visual,) bool
        asks, rows = is_question(batch, self._visual), cells(batch.layout)
        self.visual_layout = rows.restrict(self._visual)
        self._lengths = self._given_lengths = self.visual_layout.lengths()
        self._place = segment_place(self.visual_layout)  # (num_visual,) among the initial tokens of the sample
        self._question = asks.nonzero().flatten()[: None if config.question else 0]
        self._question_layout = rows.restrict(self._question)
        self._places = torch.arange(batch.total_tokens, device=asks.device)  # of the batch's tokens in the stream
        self.probabilities: list[Tensor] = []
        self.logits: list[Tensor] = []
        self.kept: list[Tensor] = []
        self.kept_tokens: list[Tensor] = []
        self.expected: list[Tensor] = []

    def __call__(self, index: int, entered: Stream, left: Stream) -> Stream:
        if index in self._config.layers:
            with apart("prune"):  # text alone is not judged
                if self._mode == "hard":
                    left = self._remove(left, self._choose(index, entered, left))
                else:
                    left = self._soften(index, entered, left)
        if index + 1 < len(self._blocks):
            self.kept.append(self._lengths)
            self.kept_tokens.append(self._source)
            with torch.no_grad():
                likely = segment_sum(self.keep().float(), self.visual_layout) if self.probabilities else self._lengths
                self.expected.append(likely.float())
        return left

    def reads(self, index: int) -> bool:
        return index in self._config.layers

    def places(self, tokens: Tensor) -> Tensor:
        return self._places.index_select(0, tokens)

    def keep(self) -> Tensor:
        """Probability that no head so far drops a visual token, (num_visual,) in the layout of `visual_layout`."""
        return prune.cumulative_keep(self.probabilities)

    def found(self, loss: Tensor) -> list[Tensor]:
        """Fall of a sum of losses of this pass as the weight of a token grows, (num_visual,) per head, and 0 for tokens
        that always stay; of a pass for relevance."""
        falls = torch.autograd.grad(-loss, self.probabilities, retain_graph=True, materialize_grads=True)
        return [one.masked_fill(self._needed, 0) for one in falls]

    def _judge(self, index: int, entered: Stream, left: Stream) -> Tensor:
        """Logits of the head after a block, (num_visual,)."""
        hidden, received = left.hidden(), None
        if self._mode == "relevance":
            hidden = hidden.detach()  # heads alone learn what they expect
        visual, question = hidden.index_select(0, self._visual), hidden.index_select(0, self._question)
        if self._config.attention_weight != "none":
            # Relative to even attention on what was given, also of tokens that removal left: 1 tells nothing.
            even = self._given_lengths.index_select(0, self.visual_layout.seq_of_token())
            received = self._received(index, entered, self._question) * even
        head = self._heads[str(index)]
        if head.training != self._learns:  # to set it takes as long as a layer of a short prompt
            head.train(self._learns)
        return head(VisionTokens(visual, self.visual_layout, question, self._question_layout, received))

    def _noise(self, index: int, logits: Tensor) -> Tensor:
        """Logistic noise of a head's logits, (num_visual,): random while heads learn, else fixed."""
        if self._learns:
            return prune.fresh_noise(logits, self.visual_layout)
        return prune.drawn_noise(index, self._place, logits.dtype)

    def _soften(self, index: int, entered: Stream, left: Stream) -> Stream:
        """Hide visual tokens from the blocks that follow by the probability that no head so far drops them, or for
        relevance by chance alone, evenly from 0 to 1."""
        logits = self._judge(index, entered, left)
        noise = self._noise(index, logits)
        if self._mode == "relevance":
            self.logits.append(logits)
            self.probabilities.append(torch.sigmoid(noise).masked_fill(self._needed, 1).requires_grad_())
        else:
            probability = prune.keep_probability(logits + noise, self._temperature)
            self.probabilities.append(probability.masked_fill(self._needed, 1))
        probability, total = self.keep(), len(left.x)
        scale = probability.new_ones(total).index_copy(0, self._visual, probability)
        return replace(left, key_bias=prune.soft_bias(probability, mark(self._visual, total)), value_scale=scale)

    @torch.no_grad()
    def _choose(self, index: int, entered: Stream, left: Stream) -> Tensor:
        """Mask of the visual tokens that stay after a block, (num_visual,) bool."""
        config = self._config
        if config.learns:
            scores = self._judge(index, entered, left)
            if config.softens:
                scores = scores + self._noise(index, scores)
            scores = scores.masked_fill(self._needed, torch.inf)
            if config.keep is None:
                probability = prune.keep_probability(scores, self._temperature)
                return prune.hard_keep(probability, self.visual_layout, config.threshold)
        else:
            scores = self._rank(index, entered).masked_fill(self._needed, torch.inf)
        assert config.keep is not None, "rankings have it"
        return prune.keep_top(scores, self.visual_layout, config.keep * self._lengths.double())

    def _rank(self, index: int, entered: Stream) -> Tensor:
        """Scores of the visual tokens, (num_visual,), by a ranking."""
        media, in_tower, method = self._given.media, self._given.tower_attention, self._config.method
        if method == "attention":
            # Attention of the question's last token, as in FastV; other tokens may precede the image.
            return self._received(index, entered, self._question[last_tokens(self._question_layout)])
        if method == "class_token":
            assert in_tower is not None, "the tower was asked for it"
            return in_tower.index_select(0, self._source)
        if method == "random":
            ids = self._seq_ids  # without ids every sample draws the same, which no neighbour changes either
            return prune.random_order(self.visual_layout, torch.zeros_like(self._lengths) if ids is None else ids)
        columns = required(media.grid)[:, 1].index_select(0, cells(media.layout).seq_of_token())
        place, width = (x.index_select(0, self._source) for x in (media.position_ids, columns))
        return prune.even_order(place // width, place % width)

    @torch.no_grad()
    def _received(self, index: int, entered: Stream, text: Tensor) -> Tensor:
        """Attention that each visual token receives in block `index` from the text at these places, (num_visual,)."""
        block, layout, bias = self._blocks[index], entered.layout, entered.key_bias
        assert isinstance(block, Block), "the language model is a stack of blocks"
        q, k = block.attention.queries_and_keys(block.norm_1(entered.hidden())[1], block.attention.rotary_of(entered))
        if isinstance(layout, PaddedLayout):
            padding = ~layout.attention_mask.flatten()
            nothing = torch.zeros_like(padding, dtype=torch.float32) if bias is None else bias
            bias = nothing.masked_fill(padding, -torch.inf)
        looked_at, looking, causal = mark(self._visual, len(q)), mark(text, len(q)), block.attention.causal
        return prune.text_to_vision_attention(q, k, cells(layout), looked_at, looking, causal, key_bias=bias)

    def _remove(self, stream: Stream, kept: Tensor) -> Stream:
        """Remove visual tokens from the stream; in a rectangle they become padding.

        Args:
            kept: (num_visual,) bool.
        """
        stays = torch.ones(len(stream.x), dtype=torch.bool, device=kept.device).index_copy_(0, self._visual, kept)
        left = kept.nonzero().flatten()
        self._visual, self._source, self._needed, self._place = (
            x.index_select(0, left) for x in (self._visual, self._source, self._needed, self._place)
        )
        self.visual_layout = self.visual_layout.restrict(left)
        self._lengths = self.visual_layout.lengths()
        if isinstance(stream.layout, Layout):
            places = stays.cumsum(0) - 1  # of tokens that stay; the others are never looked up
            self._places = places[self._places]
            self._visual, self._question = (places.index_select(0, at) for at in (self._visual, self._question))
        return stream.keep(stays)


class BlockRecord:
    """Record of hidden states between blocks, which it leaves unchanged.

    Args:
        layers: blocks after which to record.
        tokens: (num,) int64, tokens to record; no token before them may be removed.
        inner: another change between the blocks, applied after recording.

    Attributes:
        states: per layer, (num, width).
    """

    def __init__(self, layers: Sequence[int], tokens: Tensor, inner: Between | None = None) -> None:
        self._layers, self._tokens, self._inner = layers, tokens, inner
        self.states: list[Tensor] = []

    def __call__(self, index: int, entered: Stream, left: Stream) -> Stream:
        if index in self._layers:
            self.states.append(left.hidden().index_select(0, self._tokens))
        return left if self._inner is None else self._inner(index, entered, left)

    def reads(self, index: int) -> bool:
        return index in self._layers or (self._inner is not None and self._inner.reads(index))

    def places(self, tokens: Tensor) -> Tensor:
        return tokens if self._inner is None else self._inner.places(tokens)
