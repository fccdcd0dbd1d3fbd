"""Time to an event in discrete time, with people whose observation ends before it.

Time is cut into bins at `edges` in days from the landmark, and a model gives the logit of the hazard of every bin: of
the probability to have the event in it, given that it was reached without (Singer and Willett 1993; Gensheimer and
Narasimhan 2019, arXiv 1805.00917). A bin ends with its right edge: an event on an edge belongs to the bin before it,
one at the landmark or earlier to the first. Within a bin the hazard is constant, as Kvamme and Borgan (2019, arXiv
1910.06724) interpolate.
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

    An event in bin k: the bins before it were survived, and k was not. Censored within bin k: the bins before it were
    survived, and of k nothing is known; on the right edge of a bin: it was survived as well. Observed beyond the last
    edge, whatever happened then: all bins were survived.

    Args:
        logits: (num, bins), of the hazards.
        durations: (num,) days from the landmark to the end of observation.
        observed: (num,) bool, whether that end was the event.
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


def survival(logits: Tensor) -> Tensor:
    """Probability to be without the event at the end of each bin, (num, bins) in fp32 or wider, never rising.

    Args:
        logits: (num, bins), of the hazards.
    """
    return F.logsigmoid(-widened(logits)).cumsum(1).exp()


def event_probability(logits: Tensor, edges: Tensor, horizon: float) -> Tensor:
    """Probability of the event between the first edge and `horizon`, (num,) in fp32 or wider.

    Args:
        logits: (num, bins), of the hazards.
        edges: (bins + 1,).
        horizon: days from the landmark; within a bin the logarithm of survival falls linearly.

    Raises:
        RecipeError: the horizon lies outside of the bins, about which the hazards say nothing.
    """
    first, last = float(edges[0]), float(edges[-1])
    if not first <= horizon <= last:
        raise RecipeError(
            f"a horizon of {horizon:g} days, where hazards reach from day {first:g} to day {last:g}",
            fix="choose a horizon within the bins, or train with an edge at or beyond it",
        )
    logits = widened(logits)
    start, end = edges.to(logits)[:-1], edges.to(logits)[1:]
    passed = ((horizon - start) / (end - start)).clamp(0, 1)  # (bins,) share of each bin before the horizon
    return -(F.logsigmoid(-logits) * passed).sum(1).expm1()


def risk(logits: Tensor, edges: Tensor) -> Tensor:
    """Expected share of the time between the first edge and the last that the event takes away, (num,) in [0, 1]:
    1 - (mean time without the event) / (last edge - first edge). Orders people for concordance.

    Args:
        logits: (num, bins), of the hazards.
        edges: (bins + 1,).
    """
    logs = F.logsigmoid(-widened(logits))  # (num, bins) logarithm of the share of each bin's people who survive it
    reached = F.pad(logs.cumsum(1)[:, :-1], (1, 0)).exp()
    # Mean of exp(logs * s) over s from 0 to 1; logs is 0 where a hazard is too small for the dtype.
    within = torch.where(logs < 0, logs.expm1() / torch.where(logs < 0, logs, 1), 1)
    days = edges.to(logs).diff()
    return 1 - (reached * within * days).sum(1) / days.sum()
