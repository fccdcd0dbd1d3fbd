"""What is believed of a set before its events are seen, and after."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from unpad.models.set_sequence.encoder import Latent, draw_latents, soft_clamp
from unpad.models.set_sequence.gaussian import Gate, product_of_experts
from unpad.models.set_sequence.history import HistoryEncoder, SetLayout
from unpad.models.set_sequence.set_losses import gaussian_kl
from unpad.nn.activation import activate
from unpad.nn.block import BlockConfig
from unpad.nn.linear import Linear
from unpad.nn.segments import widened

Prior = Literal["standard", "history"]
Update = Literal["none", "product"]


def states_before(states: Tensor, start: Tensor, course: SetLayout) -> Tensor:
    """Of every set the state of the set before it, `start` for the first of a patient.

    Args:
        states: (num_sets + num_seqs, width), of the places of `course`.
        start: (width,).

    Returns:
        (num_sets, width).
    """
    before = states.index_select(0, (course.sets - 1).clamp_min(0))
    return torch.where(course.is_first[:, None], start.to(before.dtype), before)


class Belief(nn.Module):
    """The prior of every set, and the posterior that its events make of it.

    The prior is the standard normal, or a Gaussian predicted from the sets before and from the time of this one. The
    posterior is what the encoder says of the events, or the product of that and the prior, with a gate.

    An exact filter would go from set to set and predict each prior from the posteriors before it. Here the history is
    that of the encoder's own means, so that all priors, and then all posteriors, come out of one pass each: what the
    prior adds to a posterior does not reach later priors.

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
            self.start = nn.Parameter(torch.randn(config.width))  # as wide as what a norm returns
            self.hidden, self.to_prior = Linear(config.width, config.width), Linear(config.width, 2 * latent)
        self.gate = Gate() if update == "product" else None

    def reset(self) -> None:
        """A gate that starts as a gate does, with the plain product."""
        if self.gate is not None:
            self.gate = Gate()

    def forward(self, seen: Latent, history: HistoryEncoder, course: SetLayout) -> tuple[Latent, Tensor]:
        """Update the prior of every set.

        Args:
            seen: what the encoder says of the events of each set.

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
