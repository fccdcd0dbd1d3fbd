"""Belief: prior and posterior of the latent of every set."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from unpad.models.set_sequence.encoder import Latent, draw_latents, soft_clamp
from unpad.models.set_sequence.gaussian import Gate, product_of_experts
from unpad.models.set_sequence.history import HistoryEncoder, SetLayout
from unpad.models.set_sequence.losses import gaussian_kl
from unpad.nn.activation import activate
from unpad.nn.block import BlockConfig
from unpad.nn.linear import Linear
from unpad.nn.precision import widened

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
            posterior = Latent(mean, log_var, draw_latents(mean, log_var) if self.training and self.sample else mean)
        return posterior, gaussian_kl(posterior.mean, posterior.log_var, prior_mean, prior_log_var)

    def _predict(
        self, start: Tensor, means: Tensor, history: HistoryEncoder, course: SetLayout
    ) -> tuple[Tensor, Tensor]:
        """Mean and logarithm of the variance of every prior, (num_sets, latent)."""
        before = widened(states_before(history(means, course), start, course))
        at = history.time(course).index_select(0, course.sets)
        mean, log_var = widened(self.to_prior(activate("gelu", self.hidden(before + at)))).chunk(2, 1)
        return mean, soft_clamp(log_var)
