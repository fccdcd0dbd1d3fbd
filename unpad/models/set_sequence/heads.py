"""Heads on the readout of a patient: one of two classes, and the discrete time to the outcome, with censored ones.

Time is cut into bins at `edges` in days from the landmark, and a model gives the logit of the hazard of every bin: the
probability of the outcome in it, given that it was reached without (Singer and Willett 1993; Gensheimer and
Narasimhan 2019, arXiv 1805.00917). A bin ends with its right edge: an outcome on an edge belongs to the bin before it,
one at the landmark or earlier to the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unpad.errors import RecipeError
from unpad.models.set_sequence.event_sets import EventSets
from unpad.nn.draws import draw
from unpad.nn.dropout import dropout
from unpad.nn.linear import Linear
from unpad.nn.losses import Terms
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


class PatientHeads(nn.Module):
    """Two heads on the hidden state of a patient's readout.

    Args:
        width: channels of the hidden state.
        edges: (bins + 1,) of the bins of time to the outcome, from `survival.bin_edges`; None: without that head.
        positive_weight: factor on the loss of a patient of class 1; it makes up for a rare class, and raises the
            predicted odds by the same factor.
        dropout: share of the hidden state set to zero in training.
    """

    edges: Tensor | None

    def __init__(self, width: int, edges: Tensor | None, positive_weight: float, dropout: float) -> None:
        super().__init__()
        self.classes = Linear(width, 2)
        self.bins = None if edges is None else Linear(width, len(edges) - 1)
        self.register_buffer("edges", edges, persistent=False)
        self.positive_weight, self.dropout = positive_weight, dropout

    def scores(self, readouts: Tensor) -> Tensor:
        """Scores of both classes, (num_seqs, width) to (num_seqs, 2), fp32 or wider."""
        return widened(self.classes(readouts))

    def hazards(self, readouts: Tensor) -> Tensor | None:
        """Logits of the hazard of every bin, (num_seqs, bins), fp32 or wider; None without bins."""
        return None if self.bins is None else widened(self.bins(readouts))

    def timed(self, events: EventSets) -> Tensor:
        """Patients with a hazard loss, (num_seqs,) bool: all with a duration; none without bins."""
        if self.bins is None or events.durations is None:
            return torch.zeros(events.history.num_seqs, dtype=torch.bool, device=events.times.device)
        return ~events.durations.isnan()

    def terms(self, readouts: Tensor, labels: Tensor | None, events: EventSets, label_smoothing: float) -> Terms:
        """Losses of patients.

        Args:
            readouts: (num_seqs, width).
            labels: (num_seqs,) int64, 0, 1, or -1 for an unknown class; None: all unknown.
            label_smoothing: share of each target spread over both classes.

        Returns:
            classification, smoothed and weighted, over known classes; nll, the same plain and without gradient, only
            with labels; hazard, over patients with a duration.
        """
        if self.training and self.dropout:
            readouts = dropout(readouts, self.dropout, draw(len(readouts)))
        nothing = widened(readouts.new_zeros(())), 0
        terms: Terms = {"classification": nothing, "hazard": nothing}
        if labels is not None:
            known = (labels >= 0).nonzero().flatten()
            labels = labels.index_select(0, known)
            logs = self.scores(readouts.index_select(0, known)).log_softmax(1)  # (num_known, 2)
            nll = -logs.gather(1, labels[:, None])[:, 0]
            loss = (1 - label_smoothing) * nll - label_smoothing * logs.mean(1)
            terms["classification"] = torch.where(labels == 1, self.positive_weight * loss, loss).sum(), len(known)
            terms["nll"] = nll.detach().sum(), len(known)
        timed = self.timed(events).nonzero().flatten()
        logits = self.hazards(readouts.index_select(0, timed))
        if logits is not None and events.durations is not None:
            assert events.observed is not None, "durations come with `observed`"
            assert self.edges is not None, "hazards have bins"
            durations, observed = (x.index_select(0, timed) for x in (events.durations, events.observed))
            terms["hazard"] = hazard_nll(logits, durations, observed, self.edges).sum(), len(timed)
        return terms
