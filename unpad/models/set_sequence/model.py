"""Set-sequence model of patients: sequences of sets of events, all of any size. Start here.

The events of one time point form a set. An encoder turns a set into a Gaussian latent, and a decoder reconstructs the
events from it. A causal transformer over the latents of a patient predicts the next set, and a readout at the landmark
predicts the outcome. Without padding or truncation: events, sets and patients of a batch pass every layer as flat runs,
and each has the outputs that it has alone.

The other files of this folder, in reading order:

- `event_sets.py`: the batch part that holds sets, values and times
- `encoder.py`: events of a set -> latents
- `belief.py`: product of Gaussians; prior and posterior of every set; latent -> events
- `history.py`: transformer over the latents of a patient, with the readout
- `linear_path.py`: last values of a patient -> outcome
- `heads.py`: class of a patient, time to the outcome, and codes, time and values of the next set
- `losses.py`: distances between sets, and divergences of latents
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from unpad.batching.batch import RaggedBatch, required
from unpad.batching.layout import Layout
from unpad.models.contract import ModelConfig, PredictsSets, ReadsCodeVectors
from unpad.models.set_sequence.belief import Belief, Prior, SetDecoder, Update, states_before
from unpad.models.set_sequence.encoder import EventEmbedding, Latent, SetEncoder
from unpad.models.set_sequence.event_sets import EventSets, keyed
from unpad.models.set_sequence.heads import NextSet, PatientHeads, bin_edges, incidence, sets_that_follow
from unpad.models.set_sequence.history import HistoryEncoder, SetLayout, lay_out_course
from unpad.models.set_sequence.linear_path import LinearPath, values_of_patients
from unpad.models.set_sequence.losses import chamfer, free_bits, gaussian_kl, nearest, sinkhorn
from unpad.nn.activation import Kind
from unpad.nn.block import BlockConfig, init_weights
from unpad.nn.linear import Linear, compute_dtype
from unpad.nn.losses import Terms, cross_entropy, token_nll
from unpad.nn.precision import widened
from unpad.nn.segments import real_tokens
from unpad.recipes.training import Ramp

DATA = "patients"


class Config(ModelConfig, BlockConfig):
    """The `model` section of a recipe. Sizes of blocks apply to all parts; `blocks` counts those of the history."""

    decided: ClassVar[tuple[str, ...]] = ("horizon", "competing", "classes", "last_values")
    kind: Literal["set_sequence"] = "set_sequence"
    width: int = Field(96, ge=2, multiple_of=2)
    """Channels of events, sets and histories."""
    blocks: int = Field(2, ge=1, le=1000)
    """Blocks of the transformer over a patient's sets."""
    heads: int = Field(3, ge=1)
    hidden: int = Field(192, ge=1)
    """Channels inside feed-forward parts."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    eps: float = Field(1e-5, gt=0)
    activation: Kind = "gelu"
    bias: bool = True
    dropout: float = Field(0.1, ge=0, lt=1)
    """On the output of attention and of feed-forward."""
    causal: Literal[True] = True
    rotary: bool = True
    """Attention also encodes the index of a set; its time is encoded in any case."""
    levels: int = Field(2, ge=1)
    """Blocks of the set encoder, each with a latent."""
    inducing: int = Field(4, ge=1)
    """Inducing points of a set."""
    latent: int = Field(64, ge=1)
    """Dimensions of a set's latent."""
    decoder_layers: int = Field(2, ge=1)
    """Feed-forward layers of the set decoder."""
    decoder_history: bool = False
    """The set decoder also reads the history before the set."""
    sample: bool = True
    """Training samples latents; false takes their means."""
    slot_noise: float = Field(0.1, ge=0)
    """Noise on the decoder's slots in training."""
    reconstruction: Literal["chamfer", "sinkhorn"] = "chamfer"
    """Distance between the events of a set and their reconstruction."""
    prior: Prior = "standard"
    """history: predicted from the preceding sets."""
    update: Update = "none"
    """product: the posterior is the product of prior and observation."""
    free_bits: float = Field(0.03, ge=0)
    """Nats per dimension and set of a latent without cost."""
    positive_weight: float = Field(1.0, gt=0)
    """Weight of patients of class 1; class 0 has 1."""
    bins: list[float] | None = None
    """Edges in days from the landmark of the bins of time to the outcome; default no hazards."""
    horizon: float | None = Field(None, gt=0)
    """Days from the landmark up to which the hazards of bins give the probability of the outcome; default: as
    events.labels.horizon says. Without, a head of its own gives it."""
    competing: int | None = Field(None, ge=0)
    """Other events that end the wait for the outcome, each with hazards of its own; default: as many as
    events.labels.competing names."""
    classes: int | None = Field(None, ge=2)
    """Classes of a ready label, each with a score; default: as many as events.labels.classes names, or 2."""
    last_values: bool | None = None
    """The last value of every code, its change, and whether there is one also act on the outcome linearly; default: if
    events.scale is log or rank."""
    code_vectors: int | None = Field(None, ge=1)
    """Length of given vectors of codes; default codes are learned."""
    context: int = Field(1_000_000, ge=1)
    """Most events of a patient."""

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        if self.rotary and self.head_dim % 2:
            raise ValueError(f"rotary needs an even head size, and width {self.width} / heads {self.heads} is odd")
        if self.horizon is not None and self.bins is None:
            raise ValueError("a horizon needs hazards, and model.bins has none")
        if self.competing and self.bins is None:
            raise ValueError("competing events have hazards, and model.bins has none")
        if (self.classes or 2) > 2 and self.bins is not None:
            raise ValueError("hazards are of one outcome, and there are several classes; leave model.bins out")
        if (self.classes or 2) > 2 and self.positive_weight != 1:
            raise ValueError("positive_weight is of class 1 beside class 0, and there are more; leave it out")
        return self

    @property
    def longest(self) -> int:
        """Most events of a patient."""
        return self.context


@dataclass(frozen=True)
class SetReading:
    """A batch after the encoder.

    Args:
        codes: (num_events,) int64.
        embedded: (num_events, width).
        latents: one per level; the deepest, last, is the posterior and represents the set.
        divergences: divergence of each level from its prior, (num_sets, latent) per dimension in nats.
        course: places of sets and readouts in the history.
    """

    events: EventSets
    codes: Tensor
    embedded: Tensor
    latents: list[Latent]
    divergences: list[Tensor]
    course: SetLayout


class SetSequence(PredictsSets, ReadsCodeVectors):
    """Classifier, survival model and generative model of patients.

    Args:
        config: sizes and choices.
        num_codes: number of different codes.

    Raises:
        RecipeError: `bins` are not edges of bins.
    """

    claims = "patients"
    computes: ClassVar[tuple[str, ...]] = ("nll",)
    config: Config

    def __init__(self, config: Config, num_codes: int) -> None:
        super().__init__()
        self.config, self.num_codes, self.head_dim = config, num_codes, config.head_dim
        self.embedding = EventEmbedding(num_codes, config.width, config.code_vectors)
        self.encoder = SetEncoder(config, config.levels, config.inducing, config.latent, config.sample)
        self.history = HistoryEncoder(config, config.latent, config.rotary)
        self.belief = Belief(config, config.latent, config.prior, config.update, config.sample)
        layers, noise = config.decoder_layers, config.slot_noise
        self.decoder = SetDecoder(config, config.latent, layers, noise, config.decoder_history)
        self.decoder_start = nn.Parameter(torch.randn(config.width)) if config.decoder_history else None
        self.made_code = Linear(config.width, num_codes, bias=False)
        self.next_set = NextSet(config.width, num_codes)
        edges = None if config.bins is None else bin_edges(config.bins, "model.bins")
        weight, dropout = config.positive_weight, config.dropout
        kinds = config.competing or 0, config.classes or 2
        self.patient = PatientHeads(config.width, edges, config.horizon, weight, dropout, *kinds)
        self.last_values = LinearPath(num_codes, self.patient.num_shifts) if config.last_values else None
        self.weights = {
            "classification": 1.0,
            "hazard": 0.0 if config.bins is None else 0.3,
            "reconstruction": 0.1,
            "made_code": 0.1,
            "kl": Ramp(start=0.0, end=0.1, steps=1000),
            "next_code": 0.1,
            "next_time": 0.05,
            "next_value": 0.05,
        }
        if config.horizon is not None:  # the hazards learn what the classes would, and of censored patients besides
            self.weights |= {"classification": 0.0, "hazard": 1.0}
        self._weighted = set(self.weights)
        init_weights(self, config.blocks)
        for part in (self.embedding, self.encoder, self.belief, self.history, self.decoder):
            part.reset()

    def begin_step(self, step: int, total_steps: int, weights: Mapping[str, float]) -> list[nn.Parameter]:
        """Compute only these terms in the coming step. Reinitialize no parameter."""
        self._weighted = set(weights)
        return []

    def forward(self, batch: RaggedBatch) -> Tensor:
        """Hidden states of the readouts, (num_seqs, width), in the computing dtype."""
        reading = self._read(batch)
        return self._readouts(self._states(reading), reading)

    def begin(self, batch: RaggedBatch, patient: Tensor | None = None) -> None:
        """Let the linear path, if there is one, begin as ridge regression on patients, and the network near zero."""
        if self.last_values is None:
            return
        events, codes = batch.require(EventSets), required(batch.input_ids)
        last = values_of_patients(real_tokens(codes, batch.layout), events, torch.float64)
        weight = self.patient.begin(last, self.num_codes, batch.seq_labels, events, patient)
        if weight is not None:
            with torch.no_grad():
                self.last_values.weight.copy_(weight)

    @property
    def horizon(self) -> float | None:
        """In days from the landmark."""
        return self.config.horizon

    @property
    def code_vector_size(self) -> int | None:
        return self.config.code_vectors

    def load_code_vectors(self, vectors: Tensor) -> None:
        self.embedding.load_code_vectors(vectors)

    # ----------------------------------------------------------------------- answers

    def classify(self, batch: RaggedBatch) -> Tensor:
        """Scores of the classes of every patient, (num_seqs, num_classes), fp32 or wider."""
        return self.patient.scores(*self._outcome(self._read(batch)))

    def hazards(self, batch: RaggedBatch) -> Tensor | None:
        """Logits of the hazards of every bin, (num_seqs, bins, causes), fp32 or wider; None without bins."""
        return self.patient.hazards(*self._outcome(self._read(batch)))

    def classes_and_hazards(self, batch: RaggedBatch) -> tuple[Tensor, Tensor | None]:
        """`classify` and `hazards` of a batch, of one pass."""
        outcome = self._outcome(self._read(batch))
        return self.patient.scores(*outcome), self.patient.hazards(*outcome)

    def competing(self, hazards: Tensor) -> Tensor:
        """Log probabilities of the competing events by the horizon, (num_seqs, num_competing), fp32 or wider."""
        until = self.patient.until
        return super().competing(hazards) if until is None else incidence(hazards, until)[:, 2:]

    @torch.no_grad()
    def nll(self, batch: RaggedBatch) -> Tensor:
        """Negative log-likelihood of the class of every patient, (num_seqs,) in nats; NaN for an unknown class."""
        labels = required(batch.seq_labels)
        nll = F.cross_entropy(self.classify(batch), labels.clamp_min(0), reduction="none")
        return nll.masked_fill(labels < 0, math.nan)

    @torch.no_grad()
    def next_codes(self, batch: RaggedBatch) -> Tensor:
        """Logits of the codes of the next set, from every set and its predecessors, (num_sets, num_codes)."""
        reading = self._read(batch)
        return self.next_set.scores(self._states(reading).index_select(0, reading.course.sets))

    @torch.no_grad()
    def vectors(self, batch: RaggedBatch, level: Literal["patient", "set"]) -> Tensor:
        """Embeddings, fp32 or wider: readouts (num_seqs, width), or means of sets (num_sets, latent)."""
        return widened(self(batch)) if level == "patient" else self._read(batch).latents[-1].mean

    @torch.no_grad()
    def posterior(self, batch: RaggedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, logarithm of the variance, and divergence from the prior of the deepest latents, unweighted and per
        dimension, each (num_sets, latent)."""
        reading = self._read(batch)
        return reading.latents[-1].mean, reading.latents[-1].log_var, reading.divergences[-1]

    @torch.no_grad()
    def reconstruct(self, batch: RaggedBatch, latents: Tensor | None = None) -> Tensor:
        """Distance of every reconstructed set from the set, (num_sets,), fp32 or wider.

        Args:
            latents: (num_sets, latent) to decode instead of the sets' own; the history given to the decoder stays.
        """
        reading = self._read(batch)
        made, members = self._make(reading, [reading.latents[-1].z if latents is None else latents], None)
        return self._distance(made, reading.embedded, members)

    @torch.no_grad()
    def code_nll(self, batch: RaggedBatch) -> Tensor:
        """Negative log-likelihood of every event's code by its nearest reconstructed event, (num_events,) in nats."""
        reading = self._read(batch)
        made, members = self._make(reading, [reading.latents[-1].z], None)
        return token_nll(self._nearest_made(made, reading.embedded, members), self.made_code.weight, reading.codes)

    @torch.no_grad()
    def course(self, batch: RaggedBatch, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Predictions along the history of every patient, for a picture.

        Each set's prediction reads the history up to that set, so time grows with the square of a patient's sets.

        Args:
            part: the sets that are wanted; what each gets does not depend on the others.

        Returns:
            Per set the predicted probabilities of the classes at the landmark for a record that ends with this set,
            (num_sets, num_classes), and the set's share of the readout's attention in the last block, mean of all
            heads, (num_sets,). Both fp32 or wider; the shares of a patient and of the readout itself add up to 1.
        """
        reading = self._read(batch)
        latents, events = reading.latents[-1].z, reading.events
        hidden = self.history.at_every_set(latents, events.history, events.times, part)
        attention = self.history.attention(latents, reading.course).index_select(0, reading.course.sets[part])
        shift = None if self.last_values is None else self.last_values.at_every_set(reading.codes, events)
        return self.patient.scores(hidden, None if shift is None else shift[part]).softmax(1), attention

    # ----------------------------------------------------------------------- losses

    def losses(self, batch: RaggedBatch) -> Terms:
        """Terms over the batch's patients, sets and events.

        - classification: cross-entropy of known classes, smoothed and weighted; over patients of known class
        - hazard: likelihood of the time to the outcome; over patients with a duration
        - reconstruction: distance of reconstructed sets from the sets' embedded events, without gradient to these,
          over all levels, with more weight on deeper ones; over sets
        - made_code: likelihood of an event's code by the nearest reconstructed event; over events
        - kl: divergence from the prior, summed over dimensions, each with its free bits, levels as above; over sets
        - next_code, next_time, next_value: see `NextSet.terms`; over sets after a patient's first, and their values
        - nll, not trained: plain cross-entropy of known classes; without labels, reconstruction at the deepest level
        - cause, not trained, with competing events: the part of hazard that says which event came; over who had one
        - raw_kl, not trained: divergence of the deepest level without free bits; over sets

        Training skips terms without a weight of `begin_step`.
        """
        weighted = self._weighted if self.training else set(self.weights)
        reading = self._read(batch)
        states = self._states(reading)
        events, num_sets = reading.events, reading.events.num_sets
        free = [free_bits(kl, self.config.free_bits).sum(1) for kl in reading.divergences]
        terms: Terms = {
            "kl": (self._over_levels(free).sum(), num_sets),
            "raw_kl": (reading.divergences[-1].detach().sum(), num_sets),
        }
        terms |= self.patient.terms(*self._outcome(reading, states), batch.seq_labels, events, self.label_smoothing)
        if weighted & {"next_code", "next_time", "next_value"}:
            hidden = states.index_select(0, reading.course.sets)
            following = sets_that_follow(events, reading.course.is_first)
            terms |= self.next_set.terms(hidden, reading.codes, events, following, weighted)
        if weighted & {"reconstruction", "made_code"} or batch.seq_labels is None:
            terms |= self._decoder_terms(reading, states, unlabelled=batch.seq_labels is None)
        return terms

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
        """Counts that `losses` will return, from the batch alone; synchronizes with an accelerator."""
        events = batch.require(EventSets)
        continued = (events.history.lengths() - 1).clamp_min(0)  # (num_seqs,) sets after the first
        starts = events.history.cu_seqlens[:-1].long()[events.history.lengths() > 0]
        is_first = torch.zeros_like(events.times, dtype=torch.bool).index_fill(0, starts, True)
        first_event = is_first.repeat_interleave(events.members.lengths(), output_size=len(events.values))
        labels = batch.seq_labels
        counts = [
            continued.sum(),
            (events.has_value & ~first_event).sum(),
            continued.new_zeros(()) if labels is None else (labels >= 0).sum(),
            self.patient.timed(events).sum(),
        ]
        num_following, num_values, num_labelled, num_timed = torch.stack(counts).tolist()
        return {
            "classification": num_labelled,
            "hazard": num_timed,
            "reconstruction": events.num_sets,
            "made_code": len(events.values),
            "kl": events.num_sets,
            "next_code": num_following,
            "next_time": num_following,
            "next_value": num_values,
            "nll": events.num_sets if labels is None else num_labelled,
            "raw_kl": events.num_sets,
        } | ({"cause": self.patient.num_came(events)} if self.patient.causes > 1 else {})

    def _decoder_terms(self, reading: SetReading, states: Tensor, unlabelled: bool) -> Terms:
        """reconstruction, made_code, and for a batch without labels nll."""
        num_sets, num_levels = reading.events.num_sets, len(reading.latents)
        made, members = self._make(reading, [latent.z for latent in reading.latents], states)
        embedded = reading.embedded.detach()
        distances = self._distance(made, embedded.repeat(num_levels, 1), members).view(num_levels, num_sets)
        nearest_made = self._nearest_made(made[-len(embedded) :], embedded, reading.events.members)
        code_nll = cross_entropy(nearest_made, self.made_code.weight, reading.codes)[0]
        terms: Terms = {
            "reconstruction": (self._over_levels(list(distances)).sum(), num_sets),
            "made_code": (code_nll, len(embedded)),
        }
        if unlabelled:
            terms["nll"] = distances[-1].detach().sum(), num_sets
        return terms

    # ----------------------------------------------------------------------- parts

    def _read(self, batch: RaggedBatch) -> SetReading:
        """Embed and encode the events of a batch."""
        events = keyed(batch.require(EventSets), batch.layout.keys)
        codes = real_tokens(required(batch.input_ids), batch.layout)
        embedded = self.embedding(codes, events.values, events.has_value)
        latents = self.encoder(embedded, events.members)
        course = lay_out_course(events.history, events.times)
        posterior, divergence = self.belief(latents[-1], self.history, course)
        divergences = [gaussian_kl(latent.mean, latent.log_var) for latent in latents[:-1]]
        return SetReading(events, codes, embedded, [*latents[:-1], posterior], [*divergences, divergence], course)

    def _states(self, reading: SetReading) -> Tensor:
        """Hidden states of sets and readouts, (num_sets + num_seqs, width), in the computing dtype.

        The history reads means: the noise of samples would blur the predictions.
        """
        return self.history(reading.latents[-1].mean, reading.course)

    def _readouts(self, states: Tensor, reading: SetReading) -> Tensor:
        return states.index_select(0, reading.course.readouts)

    def _outcome(self, reading: SetReading, states: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Readouts (num_seqs, width), and shifts of the linear path, (num_seqs, num_shifts); `states` if computed."""
        readouts = self._readouts(self._states(reading) if states is None else states, reading)
        return readouts, None if self.last_values is None else self.last_values(reading.codes, reading.events)

    def _make(self, reading: SetReading, latents: Sequence[Tensor], states: Tensor | None) -> tuple[Tensor, Layout]:
        """Decode every set once for each of several latents, all (num_sets, latent).

        Args:
            states: hidden states of the sets' own latents, if already computed.

        Returns:
            (len(latents) * num_events, width), and the layout of all these sets.
        """
        before = None
        if self.decoder_start is not None:
            states = self._states(reading) if states is None else states
            before = states_before(states, self.decoder_start, reading.course).repeat(len(latents), 1)
        members = _repeat(reading.events.members, len(latents), len(reading.codes))
        return self.decoder(torch.cat(list(latents)), members, before), members

    def _distance(self, made: Tensor, target: Tensor, members: Layout) -> Tensor:
        """(num_sets,), fp32 or wider."""
        return (chamfer if self.config.reconstruction == "chamfer" else sinkhorn)(made, target, members)

    def _nearest_made(self, made: Tensor, embedded: Tensor, members: Layout) -> Tensor:
        """Nearest reconstructed event of every event of a set, (num_events, width), in the computing dtype."""
        _, index = nearest(made.detach(), widened(embedded), members)
        chosen = made.index_select(0, index)
        return chosen.to(compute_dtype(chosen))

    def _over_levels(self, values: Sequence[Tensor]) -> Tensor:
        """Weighted mean over levels of values (num_sets,); the weight of level i is i, counted from 1."""
        total = sum(range(len(values) + 1))
        return torch.stack([value * ((level + 1) / total) for level, value in enumerate(values)]).sum(0)


def _repeat(members: Layout, times: int, num_events: int) -> Layout:
    """The same sets several times in a row, without reading boundaries back from the device."""
    if times == 1:
        return members
    starts = [members.cu_seqlens[:-1] + index * num_events for index in range(times)]
    keys = [keys for index in range(times) if (keys := members.keys_of(index)) is not None]
    bounds = torch.cat([*starts, members.cu_seqlens[-1:] + (times - 1) * num_events])
    return Layout(bounds, members.max_seqlen, keys=torch.cat(keys) if keys else None)
