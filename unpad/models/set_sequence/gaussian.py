"""Independent Gaussians: product of a prior and an observation, and the gate on the observation."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from unpad.nn.activation import activate
from unpad.nn.linear import Linear
from unpad.nn.precision import widened

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


class Gate(nn.Module):
    """Weight of an observation, between `low` and `high` for every set, from its surprise, its precision relative to
    the prior, and the time since the observation before.

    The features are log1p(mean (m - m_p)^2 / (v + v_p)), mean(log v_p - log v) and log1p(gap). The gate is
    initialized to 1 for every set, the plain product, or halfway if 1 is not between the bounds.

    Args:
        low, high: bounds of the gate, 0 < low < high.
        hidden: channels inside.
    """

    def __init__(self, low: float = 0.1, high: float = 3.0, hidden: int = 16) -> None:
        super().__init__()
        assert 0 < low < high, f"bounds {low} and {high} of a gate"
        self.low, self.high = low, high
        self.to_hidden, self.to_out = Linear(3, hidden), Linear(hidden, 1)
        share = (1 - low) / (high - low) if low < 1 < high else 0.5
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
        return self.low + (self.high - self.low) * widened(self.to_out(hidden)).sigmoid()
