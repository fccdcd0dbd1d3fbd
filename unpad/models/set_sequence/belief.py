"""Belief: prior and posterior of the latent of every set, and the decoder that reconstructs a set from its latent."""

import math
from typing import Literal, cast

import torch
from torch import Tensor, nn

from unpad.batching.layout import Layout
from unpad.models.set_sequence.encoder import Latent, draw_latents, soft_clamp
from unpad.models.set_sequence.history import HistoryEncoder, SetLayout
from unpad.models.set_sequence.losses import gaussian_kl
from unpad.nn.activation import activate
from unpad.nn.block import BlockConfig, FeedForward
from unpad.nn.draws import normal
from unpad.nn.linear import Linear
from unpad.nn.norm import Norm
from unpad.nn.precision import widened
from unpad.nn.rope import rotary_frequencies, rotary_table
from unpad.nn.segments import segment_place


def slot_table(num_slots: int, width: int) -> Tensor:
    """Sines, then cosines of the slot's index, (num_slots, width) fp64; width is even."""
    cos, sin = rotary_table(torch.arange(num_slots), rotary_frequencies(width, 1e4, "none", 1.0), torch.float64)
    return torch.cat([sin, cos], -1)[:, 0]


class SetDecoder(nn.Module):
    """Residual feed-forward layers, with norms before them, from a set's latent, its number of events and the index of
    each event's slot.

    A fixed sinusoidal table distinguishes the slots of a set, so evaluation is deterministic. Slots do not see the
    events: permuting the events of a set changes nothing. Outputs are unbounded, as embeddings of events are.

    Args:
        config: sizes; width is even.
        latent: dimensions of the latent.
        layers: feed-forward layers.
        noise: standard deviation of noise on the table in training; its entries are in [-1, 1].
        history: slots also read a vector (width,) of the history before the set.
    """

    def __init__(self, config: BlockConfig, latent: int, layers: int, noise: float, history: bool) -> None:
        super().__init__()
        self.noise = noise
        self.to_slot = Linear(config.width, config.width)
        self.from_latent = Linear(latent + 1, config.width)
        self.from_history = Linear(config.width, config.width, bias=False) if history else None
        self.norms = nn.ModuleList(
            Norm(config.norm, config.width, config.eps, config.dropout if index else 0.0) for index in range(layers)
        )
        self.layers = nn.ModuleList(FeedForward(config) for _ in range(layers))
        self.norm = Norm(config.norm, config.width, config.eps, config.dropout)
        self.to_event = Linear(config.width, config.width)

    def reset(self) -> None:
        """Initialize slots and latents to equal weight, and outputs to about the length of embeddings."""
        for linear in (self.to_slot, self.from_latent):
            nn.init.xavier_uniform_(linear.weight)
        nn.init.normal_(self.to_event.weight, std=1 / self.to_event.in_features)

    def forward(self, latents: Tensor, members: Layout, history: Tensor | None = None) -> Tensor:
        """Reconstruct the events of every set.

        Args:
            latents: (num_sets, latent).
            members: number of events of every set.
            history: (num_sets, width), for a decoder that reads it.

        Returns:
            (num_events, width), fp32 or wider, in the space of embedded events, unordered.
        """
        dtype = self.to_slot.weight.dtype
        sizes = members.lengths().to(latents.dtype).log1p()[:, None]
        of_set = widened(self.from_latent(torch.cat([latents, sizes], 1)))  # (num_sets, width)
        if self.from_history is not None:
            assert history is not None, "this decoder reads the history before a set"
            of_set = of_set + widened(self.from_history(history))
        place = segment_place(members)  # (num_events,)
        table = slot_table(members.max_seqlen, self.to_slot.in_features).to(place.device, dtype)
        if self.training and self.noise:
            slots = table.index_select(0, place)
            slots = self.to_slot(slots + self.noise * normal(slots, members.places))
        else:
            slots = self.to_slot(table).index_select(0, place)
        set_of_event = torch.repeat_interleave(members.lengths(), output_size=len(place))
        x = widened(slots) + of_set.index_select(0, set_of_event)
        delta: Tensor | None = None
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x, y = norm(x, delta, members)
            delta = layer(y)
        return widened(self.to_event(self.norm(x, delta, members)[1]))


MIN_LOG_VAR = -60.0  # lower bound of log variances in the gate, so that no square of a ratio overflows in fp32


def product_of_experts(
    prior_mean: Tensor, prior_log_var: Tensor, mean: Tensor, log_var: Tensor, gate: Tensor
) -> tuple[Tensor, Tensor]:
    """Product of a prior and an observation raised to the power `gate`, per dimension (Hinton 2002; Cao and Fleet
    2014, arXiv 1410.7827): precisions add, and the mean is that of both weighted by precision,

        1 / v_post = 1 / v_prior + gate / v,  m_post = v_post (m_prior / v_prior + gate m / v).

    With gate 1 this is the update of a Kalman filter that observes its state directly. Computed from differences of
    log variances, it is valid for all finite ones.

    Args:
        prior_mean, prior_log_var: (num_sets, dim).
        mean, log_var: (num_sets, dim), of the observation.
        gate: (num_sets, 1) or (num_sets, dim), not negative; 0 leaves the prior, and has no gradient.

    Returns:
        Mean and log variance, (num_sets, dim) in fp32 or wider.
    """
    prior_mean, prior_log_var, mean, log_var = map(widened, (prior_mean, prior_log_var, mean, log_var))
    power = gate.to(log_var.dtype).clamp_min(torch.finfo(log_var.dtype).tiny)
    log_precision = power.log() - log_var  # of the observation, with its gate
    share = (log_precision + prior_log_var).sigmoid()  # of the whole precision
    return prior_mean + share * (mean - prior_mean), -torch.logaddexp(-prior_log_var, log_precision)


LOW, HIGH = 0.1, 3.0  # bounds of a gate


class Gate(nn.Module):
    """Weight of an observation, between LOW and HIGH for every set, from its surprise, its precision relative to
    the prior, and the time since the observation before.

    The features are log1p(mean (m - m_p)^2 / (v + v_p)), mean(log v_p - log v) and log1p(gap). The gate is
    initialized to 1 for every set, the plain product.
    """

    def __init__(self) -> None:
        super().__init__()
        self.to_hidden, self.to_out = Linear(3, 16), Linear(16, 1)
        share = (1 - LOW) / (HIGH - LOW)
        nn.init.zeros_(self.to_out.weight)
        nn.init.constant_(cast(Tensor, self.to_out.bias), math.log(share / (1 - share)))

    def forward(self, prior_mean: Tensor, prior_log_var: Tensor, mean: Tensor, log_var: Tensor, gap: Tensor) -> Tensor:
        """Weigh observations.

        Args:
            prior_mean, prior_log_var, mean, log_var: (num_sets, dim).
            gap: (num_sets,) days since the set before, not negative.

        Returns:
            (num_sets, 1) in fp32 or wider.
        """
        prior_mean, prior_log_var, mean, log_var = map(widened, (prior_mean, prior_log_var, mean, log_var))
        both = torch.logaddexp(log_var, prior_log_var).clamp_min(MIN_LOG_VAR)  # log of the sum of variances
        surprise = ((mean - prior_mean).square() * (-both).exp()).mean(-1)
        # log1p: unlike a squared ratio, the surprise of a distant observation does not swamp the other features.
        features = [surprise.log1p(), (prior_log_var - log_var).mean(-1), gap.to(both.dtype).log1p()]
        hidden = activate("gelu", self.to_hidden(torch.stack(features, -1)))
        return LOW + (HIGH - LOW) * widened(self.to_out(hidden)).sigmoid()


Prior = Literal["standard", "history"]
Update = Literal["none", "product"]


def states_before(states: Tensor, start: Tensor, course: SetLayout) -> Tensor:
    """State of the set before every set; `start` for the first set of a patient.

    Args:
        states: (num_sets + num_seqs, width), for the places of `course`.
        start: (width,).

    Returns:
        (num_sets, width).
    """
    before = states.index_select(0, (course.sets - 1).clamp_min(0))
    return torch.where(course.is_first[:, None], start.to(before.dtype), before)


class Belief(nn.Module):
    """Prior and posterior of every set.

    The prior is the standard normal, or a Gaussian predicted from the preceding sets and the time of this one. The
    posterior is the encoder's Gaussian, or its product with the prior, weighted by a gate.

    An exact filter would go from set to set and predict each prior from the preceding posteriors. Here priors are
    predicted from the encoder's means, so one pass computes all priors and another all posteriors; a prior's effect on
    its posterior does not reach later priors.

    Args:
        config: sizes.
        latent: dimensions of a latent.
        prior, update: as above.
        sample: training draws from the posterior; False takes its mean.
    """

    def __init__(self, config: BlockConfig, latent: int, prior: Prior, update: Update, sample: bool) -> None:
        super().__init__()
        self.sample = sample
        self.start: nn.Parameter | None = None
        if prior == "history":
            self.start = nn.Parameter(torch.randn(config.width))  # of the length of a norm's output
            self.hidden, self.to_prior = Linear(config.width, config.width), Linear(config.width, 2 * latent)
        self.gate = Gate() if update == "product" else None

    def reset(self) -> None:
        """Initialize the gate to the plain product."""
        if self.gate is not None:
            self.gate = Gate()

    def forward(self, seen: Latent, history: HistoryEncoder, course: SetLayout) -> tuple[Latent, Tensor]:
        """Update the prior of every set.

        Args:
            seen: the encoder's latent of every set.

        Returns:
            The posterior, and its divergence from the prior per dimension, (num_sets, latent) in nats.
        """
        prior_mean = prior_log_var = torch.zeros_like(seen.mean)
        if self.start is not None:
            prior_mean, prior_log_var = self._predict(self.start, seen.mean, history, course)
        posterior = seen
        if self.gate is not None:
            gaps = course.gaps.index_select(0, course.sets)
            gate = self.gate(prior_mean, prior_log_var, seen.mean, seen.log_var, gaps)
            mean, log_var = product_of_experts(prior_mean, prior_log_var, seen.mean, seen.log_var, gate)
            places = course.layout.places
            places = None if places is None else places.index_select(0, course.sets)
            z = draw_latents(mean, log_var, places) if self.training and self.sample else mean
            posterior = Latent(mean, log_var, z)
        return posterior, gaussian_kl(posterior.mean, posterior.log_var, prior_mean, prior_log_var)

    def _predict(
        self, start: Tensor, means: Tensor, history: HistoryEncoder, course: SetLayout
    ) -> tuple[Tensor, Tensor]:
        """Mean and logarithm of the variance of every prior, (num_sets, latent)."""
        before = widened(states_before(history(means, course), start, course))
        at = history.time(course).index_select(0, course.sets)
        mean, log_var = widened(self.to_prior(activate("gelu", self.hidden(before + at)))).chunk(2, 1)
        return mean, soft_clamp(log_var)
