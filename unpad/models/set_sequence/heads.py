"""Heads on the readout of a patient: one of two classes, and the time to the outcome."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unpad.models.set_sequence.event_sets import EventSets
from unpad.models.set_sequence.survival import hazard_nll
from unpad.nn.draws import draw
from unpad.nn.dropout import dropout
from unpad.nn.linear import Linear
from unpad.nn.losses import Terms
from unpad.nn.precision import widened


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
