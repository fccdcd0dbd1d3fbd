"""Time to an outcome in discrete time, with people whose observation ends before it.

Time is cut into bins at `edges` in days from the landmark, and a model gives the logit of the hazard of every bin: of
the probability to have the outcome in it, given that it was reached without (Singer and Willett 1993; Gensheimer and
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
from unpad.nn.segments import widened


def bin_edges(days: Sequence[float], where: str) -> Tensor:
    """Edges of the bins as a tensor, (bins + 1,) float32.

    Args:
        days: from the landmark, rising; bins are one fewer.
        where: the recipe key they come from, for the message.

    Raises:
        RecipeError: fewer than two edges, one that is negative or not finite, or one not above that before it.
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
    """Negative log-likelihood of what was observed of every person, in nats.

    The outcome in bin k: the bins before it were survived, and k was not. Censored within bin k: the bins before it
    were survived, and of k nothing is known; on the right edge of a bin: it was survived as well. Observed beyond the
    last edge, whatever happened then: all bins were survived.

    Args:
        logits: (num, bins), of the hazards.
        durations: (num,) days from the landmark to the end of observation.
        observed: (num,) bool, whether that end was the outcome.
        edges: (bins + 1,).

    Returns:
        (num,) in fp32 or wider, NaN for a duration that is NaN; 0 where nothing is known.
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
    """Hazard added up to the end of each bin, (num, bins) in fp32 or wider, never falling: minus the logarithm of the
    probability to be without the outcome until then.

    Args:
        logits: (num, bins), of the hazards.
    """
    return -F.logsigmoid(-widened(logits)).cumsum(1)
