"""Vision-language model: text with images in it, answered by a decoder. Start here.

A vision tower turns every patch of an image into a feature vector, and a projector turns the vector into a visual
token, an embedding of the language model. A decoder reads these in place of the text's placeholders, one per patch
(the composition of LLaVA 1.5: Liu et al. 2023, arXiv 2310.03744). A sequence may have no image, one or several, at any
place. With `model.merge` the visual tokens of an image become fewer before the decoder reads them; with `model.prune`
the decoder drops some of them before or between its blocks.

The other files of this folder, in reading order:

- `tower.py`: pixels of patches -> features
- `visual.py`: places of visual tokens in a run of text, and the text that is the question
- `merge.py`: layers that merge tokens, their settings, and the shorter batch
- `prune.py`: settings of pruning, heads and rankings that judge tokens, soft and hard removal
- `prune_pass.py`: one pass of the decoder that drops tokens between blocks
- `losses.py`: loss terms that train the heads, and the discriminator's view of a pass
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from unpad.batching.batch import RaggedBatch, required
from unpad.batching.layout import Layout
from unpad.errors import RecipeError
from unpad.models import decoder
from unpad.models.contract import Generates, ModelConfig, PrunesTokens
from unpad.models.vision_language.losses import ACCURACIES, Adversary, keep_terms, relevance
from unpad.models.vision_language.losses import TERMS as ADVERSARY
from unpad.models.vision_language.merge import MergeConfig, make_merger, merge_images, shorten
from unpad.models.vision_language.prune import PruneConfig, PrunerHead
from unpad.models.vision_language.prune_pass import BlockRecord, PrunePass
from unpad.models.vision_language.tower import Tower, TowerConfig
from unpad.models.vision_language.visual import Visual, cells, check_places, placed
from unpad.nn.activation import activate
from unpad.nn.block import Cache, init_weights
from unpad.nn.draws import apart
from unpad.nn.linear import Linear
from unpad.nn.losses import Terms
from unpad.recipes.training import Weight

DATA = "vqa"
Mode = Literal["origin", "merge_only", "soft", "relevance", "hard"]
TEACHING = ("soft", "relevance")  # modes in which heads learn
# Default weight of sparsity; docs/internals/log.md has the effects of others.
SPARSITY = 5.0


class Config(ModelConfig):
    """The `model` section of a recipe."""

    kind: Literal["vision_language"] = "vision_language"
    vision: TowerConfig = Field(default_factory=TowerConfig)
    """The vision tower."""
    language: decoder.Config = Field(default_factory=decoder.Config)
    """The language model, with the fields of a decoder."""
    projector_activation: Literal["relu", "gelu", "quick_gelu"] = "gelu"
    """Of the projector."""
    projector_bias: bool = True
    """Biases in the projector."""
    image_id: int | None = None
    """Id of the placeholders; None: only their number is checked."""
    merge: MergeConfig | None = None
    """Fewer visual tokens before the language model."""
    prune: PruneConfig | None = None
    """Removal of visual tokens before or inside the language model."""

    @model_validator(mode="after")
    def _fit(self) -> "Config":
        if self.language.sliding_window is not None:
            raise ValueError("language.sliding_window: removed and merged tokens leave no count of earlier ones")
        if self.prune is not None:
            self.prune.check_blocks(self.language.blocks)
        if self.ranks_in_tower and self.vision.num_run == 0:
            raise ValueError(
                "class_token ranks by attention in the tower, and with feature_layer 0 no block of it runs"
            )
        return self

    @property
    def ranks_in_tower(self) -> bool:
        """True if merging or pruning ranks patches by the attention that they receive in the tower."""
        merges = self.merge is not None and self.merge.variant == "class_token"
        return merges or (self.prune is not None and self.prune.method == "class_token")

    @property
    def longest(self) -> int:
        """Largest number of positions of a sequence, patches included."""
        return self.language.longest

    @property
    def context_field(self) -> str:
        """Field of the recipe that sets `longest`."""
        return "model.language.context"

    @property
    def advice_beyond(self) -> str:
        """Advice on an input with more positions than `longest`, by the kind of positions."""
        return self.language.advice_beyond.replace("model.", "model.language.")

    @property
    def patch(self) -> int:
        """Side of a patch, in pixels."""
        return self.vision.patch


@dataclass(frozen=True)
class VisionReading:
    """A batch as the decoder reads it.

    Args:
        batch: with `inputs_embeds` in place of images.
        visual: places of its visual tokens; None for text alone.
        features: (media.total_tokens, vision width), output of the tower; None for text alone.
    """

    batch: RaggedBatch
    visual: Visual | None = None
    features: Tensor | None = None


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


class VisionLanguage(Generates, PrunesTokens):
    """Next-token model over a flat run of sequences with images in them.

    With `config.merge` images become fewer visual tokens before the decoder reads them; with `config.prune` the decoder
    drops some between its blocks, according to `mode`. The remaining tokens of a sample depend on the sample alone: its
    question, up to the beginning of the answer, and its own images.

    Args:
        config: sizes and choices.
        vocab_size: rows of the embedding and of the head.

    Attributes:
        temperature: () of the heads' probabilities; `begin_step` lowers it, and checkpoints store it.
        given, kept, kept_tokens, expected: as in `PrunesTokens`; decoding does not change them.
    """

    additions = ("merger.*", "pruners.*", "discriminator.*", "temperature")
    claims = "pruned"
    computes: ClassVar[tuple[str, ...]] = ("encode", "splice")
    optional = ("tower",)
    config: Config
    weights: dict[str, Weight]
    temperature: Tensor

    def __init__(self, config: Config, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.causal, self.head_dim = config.language.causal, config.language.head_dim
        self.tower = Tower(config.vision)
        self.projector = Projector(config)
        self.decoder = decoder.Decoder(config.language, vocab_size)
        self.vocab_size = self.decoder.vocab_size
        merge, prune, width = config.merge, config.prune, config.language.width
        self.merger = None if merge is None else make_merger(merge, config.vision.width, width)
        self.pruners = nn.ModuleDict()
        self.discriminator: Adversary | None = None
        self.weights = {"cross_entropy": 1.0}
        learns = prune is not None and prune.learns
        if prune is not None and learns:
            for layer in prune.layers:
                self.pruners[str(layer)] = PrunerHead(width, prune)
            soft = {"sparsity": SPARSITY, "token_count": 0.0, "binarisation": 0.0}
            self.weights |= soft if prune.softens else {"relevance": 1.0}
            if prune.discriminator is not None:
                self.discriminator = Adversary(prune.discriminator, width, config.language.blocks)
                self.weights |= dict.fromkeys(ADVERSARY, 0.0)
        first = 1.0 if prune is None else prune.temperature_at(0, 1)
        self.register_buffer("temperature", torch.tensor(first), persistent=learns)
        self.given = torch.zeros(0, dtype=torch.int64)
        self.kept: list[Tensor] = []
        self.kept_tokens: list[Tensor] = []
        self.expected: list[Tensor] = []
        self._asked = frozenset(name for name, weight in self.weights.items() if weight)
        self._mode: Mode | None = None

    # ----------------------------------------------------------------------- modes

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Modes that this model supports."""
        prune = self.config.prune
        found: list[Mode] = ["origin"]
        found += ["merge_only"] if self.config.merge is not None else []
        if prune is not None and prune.learns:
            found.append("soft" if prune.softens else "relevance")
        return (*found, "hard") if prune is not None else tuple(found)

    @property
    def mode(self) -> Mode:
        """Treatment of visual tokens; assign a mode to choose it, or None to restore the default.

        origin: one token per patch. merge_only: the tokens of each image are merged, none is removed. soft: merged, and
        later blocks attend to them less, by the heads' probabilities. relevance: merged, and later blocks attend to
        them less by chance, for heads to learn what the loss depends on. hard: merged, and unwanted tokens are removed.
        By default the model removes tokens. Only in training, while the heads or the discriminator learn, it does so
        softly or for relevance; with frozen heads the rest of the model learns without the tokens.
        """
        if self._mode is not None:
            return self._mode
        teaches = self._heads_learn or bool(self._asked.intersection(ADVERSARY))
        training = [mode for mode in self.modes if mode in TEACHING]
        return training[0] if self.training and training and teaches else self.modes[-1]

    @mode.setter
    def mode(self, value: str | None) -> None:
        chosen = next((mode for mode in self.modes if mode == value), None)
        if value is not None and chosen is None:
            what = f"a model with these merge and prune sections has no mode {value}"
            raise RecipeError(what, fix=f"use {' or '.join(self.modes)}")
        self._mode = chosen

    @property
    def _heads_learn(self) -> bool:
        return any(parameter.requires_grad for parameter in self.pruners.parameters())

    # ----------------------------------------------------------------------- passes

    def forward(self, batch: RaggedBatch, cache: Cache | None = None) -> Tensor:
        """Hidden states after the last norm, (total_tokens, width), in the computing dtype.

        Merged and removed visual tokens have none, and total_tokens is smaller by their number. In a rectangle the
        states of removed tokens are undefined; a rectangle with merged images is computed as a flat run.

        Args:
            batch: `input_ids` with placeholders, and `media`, `media_index` and `media_seqs` unless it is all text.
            cache: filled by the first pass; later passes read one text token per sequence.

        Raises:
            SourceError: a sequence has not one placeholder per patch, or an image does not fit the tower.
            RecipeError: a position is outside the model's context.
        """
        # In decoding the input may be a placeholder's id that the model itself generated.
        alone = isinstance(batch.layout, Layout) and batch.layout.max_seqlen <= 1
        if cache is not None and batch.media is None and alone:
            return self.decoder(batch, cache)
        reading = self._read(batch)
        return self.decoder(reading.batch, cache, self._pruning(reading))

    def last_hidden(self, batch: RaggedBatch, cache: Cache | None = None) -> Tensor:
        """Hidden state of the last token of every sequence of a flat run, (num_seqs, width); arguments and errors as in
        `forward`."""
        reading = self._read(batch)
        return self.decoder.last_hidden(reading.batch, cache, self._pruning(reading))

    def encode(self, media: RaggedBatch) -> Tensor:
        """One visual token per patch, (media.total_tokens, language width)."""
        return self.projector(self._look(media)[0])

    def splice(self, batch: RaggedBatch, visual: Tensor) -> RaggedBatch:
        """The batch as the decoder reads it, with `inputs_embeds` (total_tokens, language width) instead of images.

        `input_ids` remain: they tell the decoder to scale the positions of text.

        Args:
            visual: (media_index.numel(), language width), put at `media_index`.
        """
        x = self._text(batch)
        x = x.index_copy(0, required(batch.media_index), visual.to(x.dtype))
        return replace(batch, inputs_embeds=x, media=None, media_index=None, media_seqs=None)

    @torch.no_grad()
    def token_nll(self, batch: RaggedBatch) -> Tensor:
        """Negative log-likelihood of every target of the batch, (num_targets,) in nats."""
        reading = self._read(batch)
        return self.decoder.token_nll(reading.batch, self._pruning(reading))

    def target_hidden(self, batch: RaggedBatch) -> Tensor:
        """Hidden states from which the targets of the batch are predicted, (num_targets, language width)."""
        reading = self._read(batch)
        return self.decoder.target_hidden(reading.batch, self._pruning(reading))

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, (num, width) -> (num, vocab_size), fp32 or wider."""
        return self.decoder.logits(hidden)

    @property
    def embed(self) -> nn.Embedding:
        """Embedding of text tokens."""
        return self.decoder.embed

    def embed_tokens(self, ids: Tensor) -> Tensor:
        return self.decoder.embed_tokens(ids)

    # ----------------------------------------------------------------------- training

    @property
    def label_smoothing(self) -> float:
        return self.decoder.label_smoothing

    @label_smoothing.setter
    def label_smoothing(self, value: float) -> None:
        self.decoder.label_smoothing = value

    def begin_step(self, step: int, total_steps: int, weights: Mapping[str, float]) -> list[nn.Parameter]:
        """Prepare for a step: set the temperature while heads learn, and reinitialize the discriminator if due.

        Args:
            step: number of the step in its stage, from 0 to `total_steps` - 1.
            weights: weights of the terms that train in this step; costly terms are computed only if among these.

        Returns:
            Reinitialized parameters; their optimizer state must be reset.
        """
        self._asked, prune = frozenset(weights), self.config.prune
        if prune is None or not prune.softens:
            return []
        if self._heads_learn:
            self.temperature.fill_(prune.temperature_at(step, total_steps))
        if self.discriminator is None or not self._asked.intersection(ADVERSARY):
            return []
        return self.discriminator.begin_step()

    def losses(self, batch: RaggedBatch) -> Terms:
        """Loss terms: the decoder's over the batch's targets, and over samples with images those of soft removal or of
        relevance and, if the step trains them, the discriminator's. Raises as `forward`."""
        reading = self._read(batch)
        pruning, watch = self._pruning(reading), None
        if pruning is not None and self.mode == "relevance":
            return self._relevance_terms(reading, pruning)
        softly = pruning is not None and self.mode == "soft"
        if softly and self.discriminator is not None and reading.visual and self._asked.intersection(ADVERSARY):
            watch = self.discriminator.watch(reading.batch, reading.visual, pruning)
        terms = self.decoder.losses(reading.batch, watch or pruning)
        nothing = terms["cross_entropy"][0].detach().new_zeros(())
        terms = {**dict.fromkeys(self.weights, (nothing, 0)), **terms}
        if softly and pruning is not None and self.config.prune is not None:
            target, unit = self.config.prune.wanted
            terms |= keep_terms(pruning.keep(), pruning.visual_layout, target, unit, self.config.prune.one_sided)
        return terms if watch is None else terms | self._adversary_terms(batch, reading, watch)

    def _relevance_terms(self, reading: VisionReading, pruning: PrunePass) -> Terms:
        """The decoder's terms of a pass with tokens hidden by chance, and `relevance`, which trains heads."""
        with torch.enable_grad():  # by the weights of tokens
            terms = self.decoder.losses(reading.batch, pruning)
            loss, count = terms["cross_entropy"]
            found = pruning.found(loss)
        parts = [relevance(*one, pruning.visual_layout) for one in zip(found, pruning.logits, strict=True)]
        if all(name.startswith("pruners.") for name, parameter in self.named_parameters() if parameter.requires_grad):
            terms["cross_entropy"] = loss.detach(), count  # nothing else learns by it
        return {**terms, "relevance": (torch.stack([total for total, _ in parts]).sum(), parts[0][1])}

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
        """The counts that `losses` will return in this step, without computing them."""
        samples = 0
        if self.mode in TEACHING and batch.media is not None and batch.media_seqs is not None:
            samples = batch.media_seqs[batch.media.layout.lengths() > 0].unique().numel()
        judged = samples if self._asked.intersection(ADVERSARY) else 0
        counts = {name: judged if name in ADVERSARY else samples for name in self.weights}
        counts |= dict.fromkeys(ACCURACIES, judged) if judged else {}
        return counts | self.decoder.count_targets(batch)

    def _adversary_terms(self, batch: RaggedBatch, reading: VisionReading, fake: BlockRecord) -> Terms:
        """The discriminator's terms of the pass that `fake` watched, and of a pass with all visual tokens."""
        assert self.discriminator is not None, "only a model with a discriminator has these terms"
        with torch.no_grad():
            whole = reading if self.config.merge is None else self._compose(batch, reading.features, "origin")
            assert whole.visual is not None, "a batch with images"
            real = self.discriminator.watch(whole.batch, whole.visual)
            self.decoder(whole.batch, None, real)
        return self.discriminator.terms(whole.batch, whole.visual, real, fake)

    # ----------------------------------------------------------------------- images

    def _read(self, batch: RaggedBatch) -> VisionReading:
        """The batch as the decoder reads it in this mode; the tower does not run for text alone."""
        check_places(batch, self.config.image_id)
        merges = self.config.merge is not None and self.mode != "origin"
        if batch.media is None or batch.media.total_tokens == 0:
            return VisionReading(batch.flat() if merges else batch)
        features, received = self._look(batch.media)
        return self._compose(batch, features, self.mode, received)

    def _look(self, media: RaggedBatch) -> tuple[Tensor, Tensor | None]:
        """Features of patches, and the attention that they receive if a ranking uses it, as of `Tower.look`."""
        pixels = media.inputs_embeds
        # A frozen tower stores nothing for a backward pass.
        trains = any(p.requires_grad for p in self.tower.parameters()) or (pixels is not None and pixels.requires_grad)
        with torch.set_grad_enabled(trains and torch.is_grad_enabled()), apart("tower"):
            ranks = self.config.ranks_in_tower and self.mode != "origin"
            return self.tower.look(media, wants_attention=True) if ranks else (self.tower(media), None)

    def _compose(
        self, batch: RaggedBatch, features: Tensor | None, mode: Mode, received: Tensor | None = None
    ) -> VisionReading:
        """Insert the tower's features into the text, as patches or merged."""
        assert features is not None, "a batch with images"
        if self.merger is None or mode == "origin":
            return VisionReading(self.splice(batch, self.projector(features)), placed(batch, received), features)
        batch = batch.flat()
        text = self._text(batch)
        with apart("merge"):
            merged = merge_images(self.merger, batch, text, features, received)
        short, visual = shorten(batch, text, merged, self.projector(merged.features))
        return VisionReading(short, replace(visual, tower_attention=received), features)

    def _text(self, batch: RaggedBatch) -> Tensor:
        """Embeddings of text, (total_tokens, language width); those of placeholders are arbitrary."""
        if batch.inputs_embeds is not None:
            return batch.inputs_embeds
        assert batch.input_ids is not None, "a batch holds input_ids or inputs_embeds"
        # A placeholder's id may be outside the vocabulary; its embedding is not read.
        ids = batch.input_ids if batch.media_index is None else batch.input_ids.index_fill(0, batch.media_index, 0)
        return self.decoder.embed_tokens(ids)

    def _pruning(self, reading: VisionReading) -> PrunePass | None:
        """The removal of tokens in one pass over this batch, None without one; resets `given`, `kept`,
        `kept_tokens` and `expected`."""
        blocks, visual, layout = self.config.language.blocks, reading.visual, cells(reading.batch.layout)
        self.given = torch.zeros_like(layout.lengths()) if visual is None else layout.restrict(visual.index).lengths()
        if self.mode == "origin":
            self.kept, self.kept_tokens, self.expected = [], [], []
        elif visual is None or self.mode == "merge_only":
            nothing = torch.zeros(0, dtype=torch.int64, device=layout.cu_seqlens.device)
            self.kept_tokens = [nothing if visual is None else visual.source] * blocks
            self.kept, self.expected = [self.given] * blocks, [self.given.float()] * blocks
        else:
            assert self.config.prune is not None, "the mode is there with it only"
            mode = self.mode
            pruning = PrunePass(
                self.config.prune,
                self.pruners,
                self.decoder.blocks,
                reading.batch,
                visual,
                mode=mode,
                learns=self.training and mode in TEACHING,
                temperature=self.temperature,
            )
            self.kept, self.kept_tokens, self.expected = pruning.kept, pruning.kept_tokens, pruning.expected
            return pruning
        return None
