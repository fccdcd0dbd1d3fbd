"""Discrete-time survival: time to an outcome, with censored observations.

Time is cut into bins at `edges` in days from the landmark, and a model gives the logit of the hazard of every bin: the
probability of the outcome in it, given that it was reached without (Singer and Willett 1993; Gensheimer and
Narasimhan 2019, arXiv 1805.00917). A bin ends with its right edge: an outcome on an edge belongs to the bin before it,
one at the landmark or earlier to the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from unpad.errors import RecipeError
from unpad.nn.precision import widened


def bin_edges(days: Sequence[float], where: str) -> Tensor:
    """Edges of the bins as a tensor, (bins + 1,) float32.

    Args:
        days: from the landmark, rising; one more than bins.
        where: their recipe key, for the message.

    Raises:
        RecipeError: fewer than two edges, a negative or non-finite edge, or edges that do not rise.
    """
    edges = torch.tensor(list(days), dtype=torch.float32)
    if len(edges) < 2 or not bool(edges.isfinite().all()) or edges[0] < 0 or not bool((edges.diff() > 0).all()):
        raise RecipeError(
            f"hazards need at least two rising edges in days from the landmark, and these are {list(days)}",
            where=where,
            fix="give the edges of the bins, for five years by year [0, 365, 730, 1095, 1460, 1825]",
        )
    return edges


def hazard_nll(logits: Tensor, durations: Tensor, observed: Tensor, edges: Tensor) -> Tensor:
    """Negative log-likelihood of every person's observation, in nats.

    Outcome in bin k: survived the bins before k, and not k. Censored within bin k: survived the bins before k, and k is
    unknown; censored on the right edge of k: survived k as well. Observed beyond the last edge, with or without the
    outcome: survived all bins.

    Args:
        logits: (num, bins), of the hazards.
        durations: (num,) days from the landmark to the end of observation.
        observed: (num,) bool, True if that end was the outcome.
        edges: (bins + 1,).

    Returns:
        (num,) in fp32 or wider; NaN for a NaN duration, 0 without any information.
    """
    assert logits.shape[1] == len(edges) - 1, f"{logits.shape[1]} hazards for {len(edges)} edges"
    logits, durations = widened(logits), widened(durations)
    ends = edges.to(durations)[1:]  # in the dtype of the durations, where a day on an edge is that edge
    before, until = (torch.bucketize(durations, ends, right=right) for right in (False, True))  # ends < and <= a day
    survived = torch.where(observed, before, until)[:, None]  # (num, 1) bins
    bins = torch.arange(logits.shape[1], device=logits.device)
    nll = torch.where(bins < survived, -F.logsigmoid(-logits), 0)
    nll = nll + torch.where((bins == survived) & observed[:, None], -F.logsigmoid(logits), 0)
    return nll.sum(1).masked_fill(durations.isnan(), math.nan)


def cumulative_hazard(logits: Tensor) -> Tensor:
    """Cumulative hazard at the end of each bin, (num, bins) in fp32 or wider, never falling: minus the logarithm of the
    probability of no outcome until then.

    Args:
        logits: (num, bins), of the hazards.
    """
    return -F.logsigmoid(-widened(logits)).cumsum(1)
