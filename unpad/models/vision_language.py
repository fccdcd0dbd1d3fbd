"""Text with images in it: a vision tower, a projector, and a decoder that reads one visual token per patch.

The composition of LLaVA 1.5 (Liu et al. 2023, arXiv 2310.03744). A sequence is text with placeholders, as many as its
images have patches; it may have no image, one or several, at any place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from unpad.batch import RaggedBatch
from unpad.errors import RecipeError, SourceError
from unpad.layout import Layout, PaddedLayout
from unpad.losses import Terms
from unpad.models import decoder
from unpad.nn.activation import activate
from unpad.nn.block import Block, Cache, Stream, init_weights
from unpad.nn.linear import Linear
from unpad.nn.prune import (
    PrunerHead,
    VisionTokens,
    cumulative_keep,
    hard_keep,
    keep_probability,
    keep_top,
    last_tokens,
    select,
    soft_bias,
    text_to_vision_attention,
)
from unpad.nn.tower import Tower, TowerConfig
from unpad.recipe import Section

DATA = "vqa"
Mode = Literal["off", "soft", "hard"]


class PruneConfig(Section):
    """Where the language model loses visual tokens, and which."""

    layers: list[int] = Field(min_length=1, description="Blocks after which tokens are removed, counted from 0.")
    method: Literal["learned", "random", "uniform", "attention"] = Field(
        "learned", description="Who judges tokens: heads that learn it, or a ranking to compare them with."
    )
    inner: int = Field(512, ge=2, description="Channels inside a head.")
    heads: int = Field(4, ge=1, description="Attention heads of a head.")
    keep: float | None = Field(
        None, gt=0, le=1, description="Share that stays of the visual tokens of a sample that reach each layer."
    )
    threshold: float = Field(
        0.5, ge=0, lt=1, description="Probability above which heads keep a token, where keep does not say how many."
    )

    @model_validator(mode="after")
    def _fit(self) -> PruneConfig:
        if self.layers != sorted({*self.layers}) or self.layers[0] < 0:
            raise ValueError(f"layers {self.layers} are not ascending numbers of blocks, counted from 0")
        if self.inner % 2 or self.inner % self.heads:
            raise ValueError(f"inner {self.inner} is not an even multiple of heads {self.heads}")
        if self.method != "learned" and self.keep is None:
            raise ValueError(f"method={self.method} ranks tokens; keep must say which share of them stays")
        return self


class Config(Section):
    """The `model` section of a recipe."""

    kind: Literal["vision_language"] = "vision_language"
    vision: TowerConfig = Field(default_factory=TowerConfig)
    language: decoder.Config = Field(default_factory=decoder.Config)
    projector_activation: Literal["relu", "gelu", "quick_gelu"] = "gelu"
    projector_bias: bool = True
    image_id: int | None = Field(None, description="Id of the placeholders; None: only their number is checked.")
    prune: PruneConfig | None = Field(None, description="Removal of visual tokens inside the language model.")

    @model_validator(mode="after")
    def _layers_exist(self) -> Config:
        last = self.language.blocks - 1
        if self.prune is not None and self.prune.layers[-1] >= last:
            raise ValueError(
                f"prune.layers {self.prune.layers} reach past block {last - 1}; nothing reads visual tokens after the"
                f" last of {self.language.blocks} blocks"
            )
        return self

    @property
    def longest(self) -> int:
        """Most positions of a sequence, its visual tokens included."""
        return self.language.longest

    @property
    def patch(self) -> int:
        """Side of a patch, in pixels."""
        return self.vision.patch

    @property
    def causal(self) -> bool:
        return self.language.causal

    @property
    def head_dim(self) -> int:
        return self.language.head_dim


class Projector(nn.Module):
    """second(act(first x)): features of patches to embeddings of the language model."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.activation, width = config.projector_activation, config.language.width
        self.first = Linear(config.vision.width, width, bias=config.projector_bias)
        self.second = Linear(width, width, bias=config.projector_bias)
        init_weights(self, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(activate(self.activation, self.first(x)))


class VisionLanguage(nn.Module):
    """Next-token model over a flat run of sequences with images in them.

    `forward` is `encode`, `splice` and the decoder in turn; what goes between them, such as a layer that merges visual
    tokens, calls them itself.

    With `config.prune` the decoder loses visual tokens on its way, as `mode` says. Which ones a sample loses depends on
    nothing but the sample: its question, up to where the answer begins, and its own visual tokens.

    Args:
        config: sizes and choices.
        vocab_size: rows of the embedding and of the head.

    Attributes:
        temperature: of the heads' probabilities; whoever trains them lowers it.
        kept: after a pass in hard mode, the visual tokens of every sample that entered each block, a (num_seqs,) int64
            per block; empty after one in another mode. Steps of decoding leave it as it is.
    """

    def __init__(self, config: Config, vocab_size: int) -> None:
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self.tower = Tower(config.vision)
        self.projector = Projector(config)
        self.decoder = decoder.Decoder(config.language, vocab_size)
        prune, self.pruners = config.prune, nn.ModuleDict()
        if prune is not None and prune.method == "learned":
            for layer in prune.layers:
                self.pruners[str(layer)] = PrunerHead(config.language.width, prune.inner, prune.heads)
        self.temperature = 1.0
        self.kept: list[Tensor] = []
        self._mode: Mode | None = None

    @property
    def mode(self) -> Mode:
        """What happens to visual tokens that are not wanted; assign to it to choose, None for the default again.

        off: nothing. soft: later blocks attend to them less, as the heads' probabilities say. hard: they are taken out.
        By default heads are soft in training and hard in evaluation, and rankings, which learn nothing, always hard.
        """
        if self._mode is not None:
            return self._mode
        if self.config.prune is None:
            return "off"
        return "soft" if self.training and self.config.prune.method == "learned" else "hard"

    @mode.setter
    def mode(self, value: Mode | None) -> None:
        prune = self.config.prune
        if value not in (None, "off") and prune is None:
            raise RecipeError(f"mode={value} removes visual tokens, and the model has no prune section")
        if value == "soft" and prune is not None and prune.method != "learned":
            raise RecipeError(f"method={prune.method} has no probabilities for mode=soft", fix="use mode=hard")
        self._mode = value

    def forward(self, batch: RaggedBatch, cache: Cache | None = None) -> Tensor:
        """Hidden states after the last norm, (total_tokens, width), in the computing dtype.

        In hard mode visual tokens that were removed have none, and total_tokens is less by as many; in a rectangle
        theirs mean nothing.

        Args:
            batch: `input_ids` with placeholders, and `media`, `media_index` and `media_seqs` unless it is all text.
            cache: filled by the first pass; later passes read one text token per sequence.

        Raises:
            SourceError: a sequence has not as many placeholders as visual tokens, or an image does not fit the tower.
            RecipeError: a position lies outside the model's context; a cache in soft mode.
        """
        # A step of decoding may bring the id of a placeholder that the model itself wrote.
        alone = isinstance(batch.layout, Layout) and batch.layout.max_seqlen <= 1
        is_step = cache is not None and batch.media is None and alone
        if is_step:
            hidden: Tensor = self.decoder(batch, cache)
            return hidden
        if cache is not None and self.mode == "soft":
            raise RecipeError("soft removal has no cache to decode with", fix="use mode=hard, or mode=off")
        hidden = self.decoder(self._read_images(batch), cache, self._pruning(batch))
        return hidden

    def encode(self, media: RaggedBatch) -> Tensor:
        """Visual tokens of images, (media.total_tokens, language width)."""
        pixels = media.inputs_embeds
        # A frozen tower keeps nothing for a backward pass that will not come.
        trains = any(p.requires_grad for p in self.tower.parameters()) or (pixels is not None and pixels.requires_grad)
        with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
            features = self.tower(media)  # (total_patches, vision width)
        visual: Tensor = self.projector(features)
        return visual

    def splice(self, batch: RaggedBatch, visual: Tensor) -> RaggedBatch:
        """The batch as the decoder reads it, with `inputs_embeds` (total_tokens, language width) instead of images.

        `input_ids` stay beside them: they tell the decoder that this is text, whose positions it scales.

        Args:
            visual: (media_index.numel(), language width), put at `media_index`.
        """
        index = batch.media_index
        assert index is not None, "a batch with images says where they stand"
        x = batch.inputs_embeds
        if x is None:
            assert batch.input_ids is not None, "a batch holds input_ids or inputs_embeds"
            # A placeholder's id may lie outside the vocabulary; its embedding is not read.
            x = self.embed(batch.input_ids.index_fill(0, index, 0))
        x = x.index_copy(0, index, visual.to(x.dtype))
        return replace(batch, inputs_embeds=x, media=None, media_index=None, media_seqs=None)

    def losses(self, batch: RaggedBatch) -> Terms:
        """Terms over the batch's targets, as of the decoder. Raises as `forward`."""
        return self.decoder.losses(self._read_images(batch), self._pruning(batch))

    @torch.no_grad()
    def token_nll(self, batch: RaggedBatch) -> Tensor:
        """Negative log-likelihood of every target of the batch, (num_targets,) in nats."""
        return self.decoder.token_nll(self._read_images(batch), self._pruning(batch))

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
        """The counts that `losses` will return, from the batch alone."""
        return self.decoder.count_targets(batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, (num, width) -> (num, vocab_size), fp32 or wider."""
        return self.decoder.logits(hidden)

    @property
    def embed(self) -> nn.Embedding:
        """Embedding of text tokens."""
        return self.decoder.embed

    @property
    def label_smoothing(self) -> float:
        return self.decoder.label_smoothing

    @label_smoothing.setter
    def label_smoothing(self, value: float) -> None:
        self.decoder.label_smoothing = value

    def _check_places(self, batch: RaggedBatch) -> None:
        """Refuse a batch whose visual tokens are not exactly where its placeholders are.

        Raises:
            SourceError: names the sequence.
        """
        index, device = batch.media_index, batch.position_ids.device
        if index is None:
            index = torch.zeros(0, dtype=torch.int64, device=device)
        num_visual = 0 if batch.media is None else batch.media.total_tokens
        placeholders = _placeholders(batch, self.config.image_id)
        expected = index if placeholders is None else placeholders
        if index.numel() == num_visual and (placeholders is None or torch.equal(placeholders, index)):
            return
        sequence = _cells(batch.layout).seq_of_token()
        visual = torch.zeros(batch.num_seqs, dtype=torch.int64, device=device)
        if batch.media is not None and batch.media_seqs is not None:
            visual = visual.index_add(0, batch.media_seqs, batch.media.layout.lengths())
        marked, placed = (torch.bincount(sequence[at], minlength=batch.num_seqs) for at in (expected, index))
        wrong = ((marked != visual) | (placed != visual)).nonzero().flatten().tolist()
        if wrong:
            short = int(placed[wrong[0]]) if marked[wrong[0]] == visual[wrong[0]] else int(marked[wrong[0]])
            counts = f"{short} placeholders for {int(visual[wrong[0]])} visual tokens"
        else:
            wrong = sequence[expected[expected != index][:1]].tolist()
            counts = "visual tokens at other places than its placeholders"
        name = wrong[0] if batch.seq_ids is None else int(batch.seq_ids[wrong[0]])
        raise SourceError(
            f"a sequence has {counts}",
            where=f"sequence {name}" + (" of the batch" if batch.seq_ids is None else ""),
            fix="put one placeholder into the text for every patch of its images, in their order",
        )

    def _read_images(self, batch: RaggedBatch) -> RaggedBatch:
        """The batch as the decoder reads it; the tower does not run for text alone."""
        self._check_places(batch)
        if batch.media is None or batch.media.total_tokens == 0:
            return batch
        return self.splice(batch, self.encode(batch.media))

    def _pruning(self, batch: RaggedBatch) -> _Pruning | None:
        """What removes tokens in one pass over this batch; None where nothing does."""
        self.kept = []
        if self.mode == "off":
            return None
        if batch.media is None or batch.media.total_tokens == 0:
            if self.mode == "hard":
                none = torch.zeros(batch.num_seqs, dtype=torch.int64, device=batch.position_ids.device)
                self.kept = [none] * self.config.language.blocks
            return None
        return _Pruning(self, batch)


class _Pruning:
    """Removes visual tokens between the blocks of one pass of the decoder.

    Args:
        model: whose heads and mode to go by; its `kept` is written.
        batch: as it was before `splice`, with its images.
    """

    def __init__(self, model: VisionLanguage, batch: RaggedBatch) -> None:
        assert model.config.prune is not None, "the mode is off without it"
        assert batch.media is not None, "there is nothing to remove"
        assert batch.media_index is not None, "a batch with images says where they stand"
        self._model, self._config, self._soft = model, model.config.prune, model.mode == "soft"
        self._media, self._seq_ids = batch.media, batch.seq_ids
        # Places in the stream of the visual tokens that are left, and which token of `media` each of them is.
        self._visual, self._source = batch.media_index.sort()
        # A prompt may end with an image; the token that something is predicted from stays, whoever judges it.
        self._needed = (batch.loss_mask | _is_last(batch.layout)).index_select(0, self._visual)  # (num_visual,) bool
        cells = _cells(batch.layout)
        is_visual = _mark(self._visual, batch.total_tokens)
        is_question = _before_answers(batch) & ~is_visual
        self._visual_layout, self._question_layout = cells.keep(is_visual), cells.keep(is_question)
        self._question = is_question.nonzero().flatten()  # (num_question,) their places in the stream
        self._places = torch.arange(batch.total_tokens, device=is_visual.device)  # of the batch's tokens in the stream
        self._probabilities: list[Tensor] = []  # of the heads so far, each (num_visual,)
        self._count()

    def __call__(self, index: int, entered: Stream, left: Stream) -> Stream:
        if index in self._config.layers:
            left = self._soften(index, left) if self._soft else self._remove(left, self._choose(index, entered, left))
        if index + 1 < self._model.config.language.blocks:
            self._count()
        return left

    def places(self, tokens: Tensor) -> Tensor:
        return self._places.index_select(0, tokens)

    def _count(self) -> None:
        """Write down how many visual tokens enter the next block."""
        if not self._soft:
            self._model.kept.append(self._visual_layout.lengths())

    def _judge(self, index: int, stream: Stream) -> tuple[Tensor, Tensor]:
        """Logits and probabilities of the head after a block, each (num_visual,)."""
        hidden = stream.hidden()
        visual, question = hidden.index_select(0, self._visual), hidden.index_select(0, self._question)
        head = self._model.pruners[str(index)]
        logits, probability = head(
            visual, self._visual_layout, question, self._question_layout, self._model.temperature
        )
        return logits, probability

    def _soften(self, index: int, stream: Stream) -> Stream:
        """Hide visual tokens from the blocks that follow by the probability that no head so far drops them."""
        self._probabilities.append(self._judge(index, stream)[1].masked_fill(self._needed, 1))
        probability, total = cumulative_keep(self._probabilities), len(stream.x)
        scale = probability.new_ones(total).index_copy(0, self._visual, probability)
        return replace(stream, key_bias=soft_bias(probability, _mark(self._visual, total)), value_scale=scale)

    @torch.no_grad()
    def _choose(self, index: int, entered: Stream, left: Stream) -> Tensor:
        """Which visual tokens go on after a block, (num_visual,) bool."""
        config = self._config
        if config.method == "learned":
            scores = self._judge(index, left)[0].masked_fill(self._needed, torch.inf)
            if config.keep is None:  # without the noise that a head in training adds to its own
                probability = keep_probability(scores, self._model.temperature, noisy=False)
                return hard_keep(probability, self._visual_layout, config.threshold)
        else:
            scores = self._rank(index, entered).masked_fill(self._needed, torch.inf)
        assert config.keep is not None, "rankings have it"
        return keep_top(scores, self._visual_layout, config.keep * self._visual_layout.lengths().double())

    def _rank(self, index: int, entered: Stream) -> Tensor:
        """Scores of the visual tokens, (num_visual,), by a ranking."""
        media, received = self._media, None
        assert media.grid is not None, "a batch of images says how large they are"
        if self._config.method == "attention":
            received = self._received(index, entered)
        columns = media.grid[:, 1].index_select(0, _cells(media.layout).seq_of_token())
        ids = self._seq_ids  # without ids every sample draws alike, which no neighbour changes either
        tokens = VisionTokens(
            self._visual_layout,
            sample_ids=torch.zeros_like(self._visual_layout.lengths()) if ids is None else ids,
            rows=(media.position_ids // columns).index_select(0, self._source),
            columns=(media.position_ids % columns).index_select(0, self._source),
            text_attention=received,
        )
        return select(self._config.method, tokens)

    def _received(self, index: int, entered: Stream) -> Tensor:
        """What each visual token receives in block `index` from the last token of its question, (num_visual,)."""
        block, layout, bias = self._model.decoder.blocks[index], entered.layout, None
        assert isinstance(block, Block), "the decoder is a stack of blocks"
        q, k = block.attention.queries_and_keys(block.norm_1(entered.hidden())[1], entered.rotary)
        if isinstance(layout, PaddedLayout):
            padding = ~layout.attention_mask.flatten()
            bias = torch.zeros_like(padding, dtype=torch.float32).masked_fill(padding, -torch.inf)
        asks, looked_at = self._question[last_tokens(self._question_layout)], _mark(self._visual, len(q))
        causal = self._model.config.causal
        return text_to_vision_attention(q, k, _cells(layout), looked_at, _mark(asks, len(q)), causal, key_bias=bias)

    def _remove(self, stream: Stream, kept: Tensor) -> Stream:
        """Take visual tokens out of the stream; in a rectangle they become padding.

        Args:
            kept: (num_visual,) bool.
        """
        stays = ~_mark(self._visual[~kept], len(stream.x))
        self._visual, self._source, self._needed = (x[kept] for x in (self._visual, self._source, self._needed))
        self._visual_layout = self._visual_layout.keep(kept)
        if isinstance(stream.layout, Layout):
            places = stays.cumsum(0) - 1  # of tokens that stay; nobody asks for the others
            self._places, self._visual, self._question = (
                places[at] for at in (self._places, self._visual, self._question)
            )
        return stream.keep(stays)


def _mark(places: Tensor, total: int) -> Tensor:
    """True on these places, (total,) bool."""
    marked = torch.zeros(total, dtype=torch.bool, device=places.device)
    marked[places] = True
    return marked


def _cells(layout: Layout | PaddedLayout) -> Layout:
    """The rows of a rectangle as sequences, their padding included; a flat run as it is."""
    if isinstance(layout, Layout):
        return layout
    rows, columns = layout.attention_mask.shape
    bounds = torch.arange(rows + 1, dtype=torch.int32, device=layout.attention_mask.device) * columns
    return Layout(bounds, columns if rows else 0)


def _is_last(layout: Layout | PaddedLayout) -> Tensor:
    """True on the last token of each sequence, (total_tokens,) bool."""
    if isinstance(layout, Layout):
        return last_tokens(layout)
    real = layout.attention_mask.flatten()
    return real.masked_scatter(real, last_tokens(_cells(layout).keep(real)))


def _before_answers(batch: RaggedBatch) -> Tensor:
    """True on the tokens of each sequence up to the one that predicts its first target, padding left out; on all of a
    sequence without targets. (total_tokens,) bool."""
    cells = _cells(batch.layout)
    counted = F.pad(batch.loss_mask.cumsum(0), (1, 0))  # (total_tokens + 1,) targets before each token
    first = cells.cu_seqlens[:-1].long().index_select(0, cells.seq_of_token())
    before = counted[:-1] == counted[first]
    return before & batch.layout.attention_mask.flatten() if isinstance(batch.layout, PaddedLayout) else before


def _placeholders(batch: RaggedBatch, image_id: int | None) -> Tensor | None:
    """The places of placeholders, ascending, (num,) int64; None where they cannot be told.

    On an accelerator finding them would make it wait; there whoever made the batch sees to it.
    """
    if image_id is None or batch.input_ids is None or batch.input_ids.device.type != "cpu":
        return None
    is_placeholder = batch.input_ids == image_id
    if isinstance(batch.layout, PaddedLayout):  # padding may hold any id
        is_placeholder &= batch.layout.attention_mask.flatten()
    return is_placeholder.nonzero().flatten()
