"""Contract of models: the members that training, evaluation, generation and the proof use.

Every model is a `Model`; its defaults fit most of them. The classes after it are capabilities that only some models
have: a model subclasses each one it has, and code that needs one asks by `isinstance`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from unpad.batching.batch import RaggedBatch, required
from unpad.nn.block import Cache
from unpad.nn.linear import Linear
from unpad.nn.losses import Terms, cross_entropy, token_nll
from unpad.nn.precision import widened
from unpad.nn.segments import segment_mean
from unpad.recipes.section import Section
from unpad.recipes.training import Weight

WEIGHTS: Mapping[str, Weight] = {"cross_entropy": 1.0}
OF_PAIRS: Mapping[str, Weight] = {"preference": 1.0, "cross_entropy": 0.0}
ORIGIN = "origin"


# --------------------------------------------------------------------------- configs


class ModelConfig(Section):
    """Fields of a recipe's `model` section that all kinds share."""

    decided: ClassVar[tuple[str, ...]] = ()  # fields that the data fills in where they are None
    kind: str

    @property
    @abstractmethod
    def longest(self) -> int:
        """Most positions of a sequence."""

    @property
    def context_field(self) -> str:
        """Field of the recipe that sets `longest`."""
        return "model.context"

    @property
    def advice_beyond(self) -> str:
        """Advice on an input with more positions than `longest`."""
        return "shorten it"


@runtime_checkable
class PatchConfig(Protocol):
    """Config of a model that reads images as patches."""

    @property
    def patch(self) -> int:
        """Side of a patch, in pixels."""


@runtime_checkable
class PixelConfig(PatchConfig, Protocol):
    """Config of a model that may read pixels with opacity."""

    @property
    def channels(self) -> int:
        """Channels of a pixel, 3 or 4."""


@runtime_checkable
class MarksImages(Protocol):
    """Config of a model that reads images inside a text."""

    @property
    def image_id(self) -> int | None:
        """Id in the place of every visual token; None for any."""


# --------------------------------------------------------------------------- models


class Trainable(Protocol):
    """Interface of a model to the step: loss terms of a batch, and their counts without computing them."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def losses(self, batch: RaggedBatch) -> Terms: ...

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]: ...


class Model(nn.Module, ABC):
    """Base of every model; abstract.

    Attributes:
        config: validated `model` section of the recipe.
        additions: name patterns (fnmatch) of parameters that may be missing in the weights of another run that training
            starts from.
        label_smoothing: share of a label's probability that is spread over all classes; set by training.
        causal: whether the output of a token depends on earlier tokens and itself alone.
        head_dim: channels of an attention head; None without attention.
        weights: default weight of every loss term that can train.
        claims: name of the file of `unpad/proof/` with the claims about the model's inputs and outputs.
        computes: methods that compute with weights; a class names those that it adds, and `all_computing` has the
            inherited ones too.
        optional: children that a pass leaves out if its batch has nothing for them.
    """

    config: ModelConfig
    additions: tuple[str, ...] = ()
    label_smoothing: float = 0.0
    causal: bool = True
    head_dim: int | None = None
    claims: str = "tokens"
    weights: Mapping[str, Weight] = WEIGHTS
    computes: ClassVar[tuple[str, ...]] = ("forward", "losses")
    optional: ClassVar[tuple[str, ...]] = ()
    _trained: Mapping[str, Weight] | None = None

    @property
    def device(self) -> torch.device:
        """The device of the weights, which computes."""
        return next((one.device for one in self.parameters()), torch.device("cpu"))

    @abstractmethod
    def forward(self, batch: RaggedBatch) -> Tensor:
        """Hidden states, (total_tokens, width), in the computing dtype."""

    @abstractmethod
    def losses(self, batch: RaggedBatch) -> Terms:
        """Sum over targets and their count, of every loss term; models never divide."""

    @abstractmethod
    def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
        """The counts that `losses` will return in this step, without computing them."""

    @classmethod
    def all_computing(cls) -> list[str]:
        """`computes` of this class and of its base classes, in no order."""
        return sorted({name for one in cls.__mro__ for name in vars(one).get("computes", ())})

    def begin_step(self, step: int, total_steps: int, weights: Mapping[str, float]) -> list[nn.Parameter]:
        """Prepare for a step.

        Args:
            step: step of the stage, from 0 to `total_steps` - 1.
            weights: of the terms that train in it.

        Returns:
            Reinitialized parameters; their optimizer state must be reset.
        """
        return []

    @property
    def modes(self) -> tuple[str, ...]:
        """Ways to run the model. In "origin" it has an output for every token; in any other some are left out."""
        return (ORIGIN,)

    @property
    def mode(self) -> str:
        """The one of `modes` that is in use; assign to it to choose, None for the default."""
        return ORIGIN

    @mode.setter
    def mode(self, value: str | None) -> None:
        assert value in (None, ORIGIN), value

    @property
    def trained(self) -> Mapping[str, Weight]:
        """Weights of the loss terms in training; `weights` until training sets its recipe's."""
        return self.weights if self._trained is None else self._trained

    @trained.setter
    def trained(self, weights: Mapping[str, Weight]) -> None:
        self._trained = weights


# --------------------------------------------------------------------------- capabilities


class ReadsTokens(Model):
    """A model of tokens of a vocabulary; a batch may hold `inputs_embeds` in their place."""

    computes: ClassVar[tuple[str, ...]] = ("embed_tokens",)

    @abstractmethod
    def embed_tokens(self, ids: Tensor) -> Tensor:
        """Embeddings of token ids, (num,) int64 -> (num, width)."""


class ScoresTokens(ReadsTokens):
    """A model that predicts tokens."""

    computes: ClassVar[tuple[str, ...]] = ("token_nll",)

    @abstractmethod
    def token_nll(self, batch: RaggedBatch) -> Tensor:
        """Negative log-likelihood of every target of the batch, (num_targets,) in nats."""


class Generates(ScoresTokens):
    """A model that continues sequences of tokens.

    Attributes:
        vocab_size: token ids that it knows.
    """

    vocab_size: int
    computes: ClassVar[tuple[str, ...]] = ("last_hidden", "logits", "target_hidden")

    @abstractmethod
    def forward(self, batch: RaggedBatch, cache: Cache | None = None) -> Tensor:
        """Hidden states, (total_tokens, width), in the computing dtype.

        Args:
            cache: filled by the first pass; later passes read one token per sequence.
        """

    @abstractmethod
    def last_hidden(self, batch: RaggedBatch, cache: Cache | None = None) -> Tensor:
        """Hidden state of the last token of every sequence of a flat run, (num_seqs, width)."""

    def target_hidden(self, batch: RaggedBatch) -> Tensor:
        """Hidden states from which the targets of the batch are predicted, (num_targets, width)."""
        return self(batch).index_select(0, batch.target_index)

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, (num, width) -> (num, vocab_size), fp32 or wider."""


class LearnsPreferences(ScoresTokens):
    """A model that can learn which of two replies is better, from batches with the part `Pairs`.

    Attributes:
        beta: factor of the replies' implicit rewards; None while the model learns to predict tokens.
    """

    beta: float | None = None

    def learn(self, beta: float | None) -> None:
        """Learn preferences with rewards of this factor; None: learn to predict tokens."""
        self.beta = beta
        self.weights = WEIGHTS if beta is None else OF_PAIRS


class PrunesTokens(Model):
    """A model that merges or removes visual tokens, as `mode` says.

    Attributes:
        given: after a pass, the visual tokens of every sample before any is removed, (num_seqs,) int64.
        kept: after a pass, the visual tokens of every sample that entered each block, a (num_seqs,) int64 per block;
            empty after one in mode origin.
        kept_tokens: which ones, a (num_visual,) int64 per block: the patch of `media` that each is or represents,
            sample after sample as `kept` counts them.
        expected: `kept` with each token counted by its probability to stay, (num_seqs,) fp32 per block; equal numbers
            unless tokens are hidden by degrees.
    """

    given: Tensor
    kept: list[Tensor]
    kept_tokens: list[Tensor]
    expected: list[Tensor]


class Classifies(Model):
    """A model that gives every sequence a class."""

    computes: ClassVar[tuple[str, ...]] = ("classify",)

    @abstractmethod
    def classify(self, batch: RaggedBatch) -> Tensor:
        """Scores of the classes of every sequence, (num_seqs, num_classes), fp32 or wider."""


class Classifier(Classifies):
    """A model that scores the classes of a sequence from one vector of features.

    Attributes:
        head: from the features to the scores, without a bias.
    """

    head: Linear
    additions = ("head.*",)
    computes: ClassVar[tuple[str, ...]] = ("nll",)

    def classify(self, batch: RaggedBatch) -> Tensor:
        return widened(self.head(self._features(batch)))

    def losses(self, batch: RaggedBatch) -> Terms:
        """Loss terms over the sequences: `cross_entropy` trains, `nll` is the same without label smoothing."""
        labels = required(batch.seq_labels)
        loss, nll = cross_entropy(self._features(batch), self.head.weight, labels, self.label_smoothing)
        return {"cross_entropy": (loss, batch.num_targets), "nll": (nll, batch.num_targets)}

    @torch.no_grad()
    def nll(self, batch: RaggedBatch) -> Tensor:
        """Negative log-likelihood of the label of every sequence, (num_seqs,) in nats."""
        return token_nll(self._features(batch), self.head.weight, required(batch.seq_labels))

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
        return {"cross_entropy": batch.num_targets, "nll": batch.num_targets}

    def _features(self, batch: RaggedBatch) -> Tensor:
        """Input of the head for every sequence, (num_seqs, width), in the computing dtype; by default the mean of the
        hidden states."""
        hidden = self(batch)
        return segment_mean(hidden, batch.layout).to(hidden.dtype)


class HasLatent(Model):
    """A model that reconstructs each set from a Gaussian latent."""

    computes: ClassVar[tuple[str, ...]] = ("posterior", "reconstruct")

    @abstractmethod
    def posterior(self, batch: RaggedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, log variance and divergence from the prior, unweighted and per dimension in nats, each (num_sets,
        latent)."""

    @abstractmethod
    def reconstruct(self, batch: RaggedBatch, latents: Tensor | None = None) -> Tensor:
        """Distance of every reconstructed set from the set, (num_sets,), fp32 or wider.

        Args:
            latents: (num_sets, latent) to decode instead of the sets' own.
        """


class ReadsCodeVectors(Model):
    """A model that can read codes as vectors that come with the data."""

    @property
    @abstractmethod
    def code_vector_size(self) -> int | None:
        """Length of the vectors; None if it learns them."""

    @abstractmethod
    def load_code_vectors(self, vectors: Tensor) -> None:
        """Load the vectors of all codes, (num_codes, code_vector_size)."""


class PredictsSets(Classifies, HasLatent):
    """A model of sequences of sets of events that predicts the outcome of a sequence and the contents of its next
    set."""

    computes: ClassVar[tuple[str, ...]] = (
        "begin", "hazards", "classes_and_hazards", "next_codes", "code_nll", "vectors", "course",
    )  # fmt: skip

    @property
    def horizon(self) -> float | None:
        """Time up to which the hazards give the classes; by default these do not come of hazards."""
        return None

    def begin(self, batch: RaggedBatch, patient: Tensor | None = None) -> None:
        """Fit what does not begin at random on training sequences; by default there is nothing.

        Args:
            patient: (num_seqs,) int64 from 0, equal for sequences of one patient; None: each is of another.
        """
        return None

    @abstractmethod
    def hazards(self, batch: RaggedBatch) -> Tensor | None:
        """Logits of the hazards of every bin of time, (num_seqs, bins, causes), fp32 or wider; None without bins."""

    def classes_and_hazards(self, batch: RaggedBatch) -> tuple[Tensor, Tensor | None]:
        """`classify` and `hazards` of a batch, of one pass where the model can."""
        return self.classify(batch), self.hazards(batch)

    def competing(self, hazards: Tensor) -> Tensor:
        """Log probabilities that an event that competes with the outcome is the first to come by the horizon,
        (num_seqs, num_competing), of `hazards`; by default nothing competes."""
        return hazards.new_zeros(len(hazards), 0)

    @abstractmethod
    def next_codes(self, batch: RaggedBatch) -> Tensor:
        """Logits of the codes of the set after each, from it and those before it, (num_sets, num_codes)."""

    @abstractmethod
    def code_nll(self, batch: RaggedBatch) -> Tensor:
        """Negative log-likelihood of the code of every event, (num_events,) in nats."""

    @abstractmethod
    def vectors(self, batch: RaggedBatch, level: Literal["patient", "set"]) -> Tensor:
        """Embeddings, fp32 or wider: (num_seqs, dim) of sequences, or (num_sets, dim) of sets."""

    @abstractmethod
    def course(self, batch: RaggedBatch, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Per set, or per set of a part, the probabilities of the classes if the sequence ended with it, (num_sets,
        num_classes), and its share of attention, (num_sets,)."""
