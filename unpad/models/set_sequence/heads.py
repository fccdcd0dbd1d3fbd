"""Heads on the readouts of a patient: one of several classes or the discrete time to the outcome, and the next set.

Time is cut into bins at `edges` in days from the landmark, and a model gives the logit of the hazard of every bin: the
probability of the outcome in it, given that it was reached without (Singer and Willett 1993; Gensheimer and
Narasimhan 2019, arXiv 1805.00917). A bin ends with its right edge: an outcome on an edge belongs to the bin before it,
one at the landmark or earlier to the first.

Other events, after which the outcome cannot come, compete with it. A bin then has a logit per cause, against that of
nothing, which is 0: its hazards are the softmax of these, and their likelihood is multinomial (Tutz and Schmid 2016,
"Modeling Discrete Time-to-Event Data", chapter 8). It is computed as that of any event, times that of the cause given
an event; with the outcome as the only cause the second is exactly 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from unpad.batching.layout import Layout
from unpad.errors import RecipeError
from unpad.models.set_sequence.event_sets import OUTCOME, EventSets
from unpad.models.set_sequence.linear_path import COLUMNS, LastValues, Regression, fit
from unpad.nn.draws import draw, dropout
from unpad.nn.linear import Linear
from unpad.nn.losses import Terms
from unpad.nn.precision import widened
from unpad.nn.segments import segment_mean


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
        what = f"hazards need at least two rising edges in days from the landmark, and these are {list(days)}"
        fix = "give the edges of the bins, for five years by year [0, 365, 730, 1095, 1460, 1825]"
        raise RecipeError(what, where=where, fix=fix)
    return edges


def hazard_nll(logits: Tensor, durations: Tensor, cause: Tensor, edges: Tensor) -> Tensor:
    """Negative log-likelihood of every person's observation, in nats.

    Outcome or competing event in bin k: nothing came in the bins before k, and it came in k. Censored within bin k:
    nothing in the bins before k, and k is unknown; censored on the right edge of k: nothing in k either. Observed
    beyond the last edge, whatever came then: nothing in all bins.

    Args:
        logits: (num, bins, causes), of the hazards.
        durations: (num,) days from the landmark to the end of observation.
        cause: (num,) int64, what that end was, as in `EventSets`.
        edges: (bins + 1,).

    Returns:
        (num,) in fp32 or wider; NaN for a NaN duration, 0 without any information.
    """
    assert logits.shape[1] == len(edges) - 1, f"{logits.shape[1]} hazards for {len(edges)} edges"
    logits, durations = widened(logits), widened(durations)
    tried, came = observed_bins(durations, cause, edges)
    any_event = any_of(logits)  # (num, bins)
    nll = torch.where(tried, -F.logsigmoid(torch.where(came, any_event, -any_event)), 0).sum(1)
    return (nll + cause_nll(logits, cause, came)).masked_fill(durations.isnan(), math.nan)


def cause_nll(logits: Tensor, cause: Tensor, came: Tensor) -> Tensor:
    """The part of `hazard_nll` that says which event came, given that one did, (num,) nats; 0 for who had none.

    Args:
        logits, cause: as of `hazard_nll`.
        came: (num, bins) from `observed_bins`.
    """
    place = (cause - OUTCOME).clamp_min(0)[:, None, None].expand(-1, logits.shape[1], 1)
    logs = widened(logits).log_softmax(2).gather(2, place)[..., 0]
    return -torch.where(came, logs, 0).sum(1)


def any_of(logits: Tensor) -> Tensor:
    """Logits of the hazard of any event, (num, bins), of those of its causes, (num, bins, causes)."""
    return logits.logsumexp(2)


def observed_bins(durations: Tensor, cause: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """The bins of which it is known whether an event came in them, and those in which one came, both (num, bins)
    bool; arguments as of `hazard_nll`."""
    observed = cause > 0
    ends = edges.to(durations)[1:]  # in the dtype of the durations, where a day on an edge is that edge
    before, until = (torch.bucketize(durations, ends, right=right) for right in (False, True))  # ends < and <= a day
    survived = torch.where(observed, before, until)[:, None]  # (num, 1) bins
    bins = torch.arange(len(ends), device=durations.device)
    came = (bins == survived) & observed[:, None]
    return (bins < survived) | came, came


def cumulative_hazard(logits: Tensor) -> Tensor:
    """Cumulative hazard of any event at the end of each bin, (num, bins) in fp32 or wider, never falling: minus the
    logarithm of the probability of no event until then.

    Args:
        logits: (num, bins, causes), of the hazards.
    """
    return -F.logsigmoid(-any_of(widened(logits))).cumsum(1)


def risk(logits: Tensor) -> Tensor:
    """Minus the logarithm of the probability that the outcome does not come by the last edge, (num,) in fp32 or wider.

    It orders people as the probability of the outcome by the last edge does, but still distinguishes those for whom
    that rounds to 1. Without competing events it is the cumulative hazard; with them, that of the subdistribution
    (Fine and Gray 1999).

    Args:
        logits: (num, bins, causes), of the hazards.
    """
    until = logits.new_ones(logits.shape[1])
    return -_both(_incidence(logits, cumulative_hazard(logits)[:, -1], until))[:, 0]


def bins_until(horizon: float, edges: Tensor) -> Tensor:
    """Share of every bin that lies before the horizon, (bins,) float32.

    Args:
        horizon: days from the landmark.
        edges: (bins + 1,).

    Raises:
        RecipeError: the horizon is beyond the last edge, or not after the first.
    """
    if not float(edges[0]) < horizon <= float(edges[-1]):
        what = f"the hazards are of days {edges[0]:g} to {edges[-1]:g}, and the horizon is day {horizon:g}"
        fix = f"let the edges begin before {horizon:g} and go on to it or beyond"
        raise RecipeError(what, where="model.bins", fix=fix)
    return ((horizon - edges[:-1]) / edges.diff()).clamp(0, 1)


def class_scores(hazards: Tensor, until: Tensor) -> Tensor:
    """Logarithms of the probability of no outcome and of the outcome by the horizon, (num, 2) in fp32 or wider.

    Args:
        hazards, until: as of `incidence`.
    """
    return _both(incidence(hazards, until))


def incidence(hazards: Tensor, until: Tensor) -> Tensor:
    """Logarithms of the probability of no event, and of each cause's cumulative incidence, by the horizon: that the
    outcome, or this competing event, is the first that comes; (num, 1 + causes) in fp32 or wider.

    Within a bin the rate of every cause is constant.

    Args:
        hazards: (num, bins, causes) logits.
        until: (bins,) from `bins_until`.
    """
    total = (-F.logsigmoid(-any_of(widened(hazards))) * until).sum(1)
    return _incidence(hazards, total, until)


def _both(logs: Tensor) -> Tensor:
    """`incidence`, with all that is not the outcome as one."""
    return torch.stack([torch.cat([logs[:, :1], logs[:, 2:]], 1).logsumexp(1), logs[:, 1]], 1)


def _incidence(hazards: Tensor, total: Tensor, until: Tensor) -> Tensor:
    """`incidence`; `total` is the cumulative hazard of any event by the horizon, (num,)."""
    hazards = widened(hazards)
    rates = -F.logsigmoid(-any_of(hazards)) * until  # (num, bins)
    before = rates.cumsum(1) - rates
    # The shares that causes have in a bin's events count as events do: of who reaches the bin, and where in it.
    weights = torch.where(until > 0, _log_any(rates) - before, -math.inf)
    causes = (weights[..., None] + hazards.log_softmax(2)).logsumexp(1).log_softmax(1)  # (num, causes)
    return torch.cat([-total[:, None], _log_any(total)[:, None] + causes], 1)


def _log_any(rate: Tensor) -> Tensor:
    """Logarithm of the probability that an event comes at a cumulative hazard."""
    tiny = torch.finfo(rate.dtype).tiny  # a probability that rounds to 0 has a logarithm and a gradient all the same
    return (-torch.expm1(-rate)).clamp_min(tiny).log()


class Observations(NamedTuple):
    """Observations of patients, as of `hazard_nll`, and the edges of the bins that learn from them."""

    durations: Tensor
    cause: Tensor
    edges: Tensor


class PatientHeads(nn.Module):
    """Head on the hidden state of a patient's readout: hazards of bins of time, or classes, or both.

    With a horizon the two classes are those of the hazards up to it, and there is one head for both.

    Args:
        width: channels of the hidden state.
        edges: (bins + 1,) of the bins of time to the outcome, from `bin_edges`; None: no hazards.
        horizon: days from the landmark up to which the hazards give the classes; None: these have a head of their own.
        positive_weight: factor on the loss of a patient of class 1; it makes up for a rare class, and raises the
            predicted odds by the same factor.
        dropout: share of the hidden state set to zero in training.
        competing: number of events that compete with the outcome; each has hazards of its own beside those of it.
        num_classes: 2, whether the outcome came; or more, and no hazards.
    """

    edges: Tensor | None
    until: Tensor | None

    def __init__(
        self,
        width: int,
        edges: Tensor | None,
        horizon: float | None,
        positive_weight: float,
        dropout: float,
        competing: int = 0,
        num_classes: int = 2,
    ) -> None:
        super().__init__()
        assert num_classes == 2 or edges is None, "hazards are of one outcome"
        self.num_classes = num_classes
        self.classes = Linear(width, num_classes) if horizon is None else None
        self.causes = 1 + competing
        self.bins = None if edges is None else Linear(width, (len(edges) - 1) * self.causes)
        self.register_buffer("edges", edges, persistent=False)
        assert horizon is None or edges is not None, "a horizon is one of hazards"
        until = None if horizon is None or edges is None else bins_until(horizon, edges)
        self.register_buffer("until", until, persistent=False)
        self.positive_weight, self.dropout = positive_weight, dropout

    @property
    def num_shifts(self) -> int:
        """Sums of a linear path: one for every cause, or for every class but the first."""
        return max(self.causes, self.num_classes - 1)

    def scores(self, readouts: Tensor, shift: Tensor | None) -> Tensor:
        """Scores of the classes, (num_seqs, num_classes), fp32 or wider.

        Args:
            readouts: (num_seqs, width).
            shift: (num_seqs, num_shifts) of `LinearPath`, or None.
        """
        if self.classes is None:
            hazards = self.hazards(readouts, shift)
            assert hazards is not None, "a horizon is one of hazards"
            assert self.until is not None, "a horizon is one of hazards"
            return class_scores(hazards, self.until)
        scores = widened(self.classes(readouts))
        return scores if shift is None else scores + F.pad(shift[:, : self.num_classes - 1], (1, 0))

    def hazards(self, readouts: Tensor, shift: Tensor | None) -> Tensor | None:
        """Logits of the hazards of every bin, (num_seqs, bins, causes), fp32 or wider, those of a cause all shifted
        alike; None without bins."""
        if self.bins is None:
            return None
        logits: Tensor = widened(self.bins(readouts)).unflatten(1, (-1, self.causes))
        return logits if shift is None else logits + shift[:, None]

    @torch.no_grad()
    def begin(
        self, last: LastValues, num_codes: int, labels: Tensor | None, events: EventSets, patient: Tensor | None = None
    ) -> Tensor | None:
        """Begin at ridge regression of what is known of patients on their last values, with little of the readout.

        The logits of every cause against nothing are a regression of their own, over the bins in which no other cause
        came: they converge to those of the multinomial one (Begg and Gray 1984, "Calculation of polychotomous logistic
        regression parameters using individualized regressions"), and each has the penalty that suits it. Those of
        several classes are so against the commonest, and then counted from the first.

        Args:
            last: their last values, of `num_codes` different codes.
            labels: as of `terms`.
            patient: as of `Regression`.

        Returns:
            The weights of a `LinearPath`, (num_codes, num_shifts * COLUMNS); None if nothing is known of anybody.
        """
        observed, timed = self._observed(events), self.timed(events)
        if self.bins is not None and observed is not None and bool(timed.any()):
            tried, came = observed_bins(observed.durations.nan_to_num(), observed.cause, observed.edges)
            weights = self._weighed(timed.double(), labels if self.classes is None else None)[:, None]
            found = []
            for cause in range(OUTCOME, OUTCOME + self.causes):
                mine = (observed.cause == cause)[:, None] & came
                trials = (tried & (mine | ~came)) * weights
                found.append(fit(Regression(last, num_codes, trials, mine * weights, patient)))
            weight = torch.cat([weight for weight, _ in found], 1)
            biases = torch.stack([biases for _, biases in found], 1).flatten()
            head = self.bins
        elif self.classes is not None and labels is not None and bool((labels >= 0).any()):
            counts = torch.bincount(labels[labels >= 0], minlength=self.num_classes)
            base = 0 if self.num_classes == 2 else int(counts.argmax())
            parts = []
            for one in range(self.num_classes):
                if one == base:
                    parts.append((last.columns.new_zeros(num_codes, COLUMNS), last.columns.new_zeros(1)))
                    continue
                tried = self._weighed(((labels == one) | (labels == base)).double(), labels)[:, None]
                parts.append(fit(Regression(last, num_codes, tried, tried * (labels == one)[:, None], patient)))
            weight = torch.cat([part - parts[0][0] for part, _ in parts[1:]], 1)
            head, biases = self.classes, torch.cat([bias for _, bias in parts])
        else:
            return None
        head.weight.mul_(FIRST_SHARE)
        head.bias.copy_(biases)
        return weight

    def timed(self, events: EventSets) -> Tensor:
        """Patients with a hazard loss, (num_seqs,) bool: all with a duration; none without bins."""
        observed = self._observed(events)
        if observed is None:
            return torch.zeros(events.history.num_seqs, dtype=torch.bool, device=events.times.device)
        return ~observed.durations.isnan()

    def num_came(self, events: EventSets) -> int:
        """Number of patients with an event in a bin, of whom its cause is learned."""
        observed = self._observed(events)
        return 0 if observed is None else int((observed_bins(*observed)[1] & self.timed(events)[:, None]).sum())

    def _observed(self, events: EventSets) -> Observations | None:
        if self.edges is None or events.durations is None or events.cause is None:
            return None
        return Observations(events.durations, events.cause, self.edges)

    def terms(
        self, readouts: Tensor, shift: Tensor | None, labels: Tensor | None, events: EventSets, label_smoothing: float
    ) -> Terms:
        """Losses of patients.

        Args:
            readouts, shift: as of `scores`.
            labels: (num_seqs,) int64, 0 and up, or -1 for an unknown class; None: all unknown.
            label_smoothing: share of each target spread over all classes.

        Returns:
            classification, smoothed and weighted, over known classes; nll, the same plain and without gradient, only
            with labels; hazard, over patients with a duration, and weighted where it gives the classes; cause, only
            with competing events, the part of it that says which event came, plain and without gradient, over those
            who had one in a bin.
        """
        if self.training and self.dropout:
            readouts = dropout(readouts, self.dropout, draw(), events.history.bases)
        nothing = widened(readouts.new_zeros(())), 0
        terms: Terms = {"classification": nothing, "hazard": nothing} | ({"cause": nothing} if self.causes > 1 else {})
        if labels is not None:
            known = (labels >= 0).nonzero().flatten()
            known_classes = labels.index_select(0, known)
            scores = self.scores(readouts.index_select(0, known), _select(shift, known))
            logs = scores.log_softmax(1)  # (num_known, num_classes)
            nll = -logs.gather(1, known_classes[:, None])[:, 0]
            loss = (1 - label_smoothing) * nll - label_smoothing * logs.mean(1)
            terms["classification"] = self._weighed(loss, known_classes).sum(), len(known)
            terms["nll"] = nll.detach().sum(), len(known)
        observed, timed = self._observed(events), self.timed(events).nonzero().flatten()
        logits = self.hazards(readouts.index_select(0, timed), _select(shift, timed))
        if logits is not None and observed is not None:
            durations, cause = (x.index_select(0, timed) for x in observed[:2])
            nll = hazard_nll(logits, durations, cause, observed.edges)
            classes = _select(labels, timed) if self.classes is None else None
            terms["hazard"] = self._weighed(nll, classes).sum(), len(timed)
            if self.causes > 1:
                came = observed_bins(durations, cause, observed.edges)[1]
                terms["cause"] = cause_nll(logits.detach(), cause, came).sum(), int(came.sum())
        return terms

    def _weighed(self, loss: Tensor, labels: Tensor | None) -> Tensor:
        """Losses of patients, (num,), those of class 1 times `positive_weight`."""
        return loss if labels is None else torch.where(labels == 1, self.positive_weight * loss, loss)


def _select(values: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if values is None else values.index_select(0, rows)


FIRST_SHARE = 0.3  # of a head's initial weights, beside a linear path: not zero, so that all parts learn from the start
CHUNK_CELLS = 1 << 22  # most pairs of a set and a code in memory at a time
LOG_VAR_LIMIT = 6.0  # of the time of the next set, in logarithms of days; exactly repeating times would reach -inf


@dataclass(frozen=True)
class Following:
    """Sets after the first of their patient, and their events.

    Args:
        sets: (num_following,) int64; the preceding set of set i is set i - 1.
        events: (num_next_events,) int64, all events of these sets.
        members: boundaries of these events by set.
        gaps: (num_following,) days since the set before.
    """

    sets: Tensor
    events: Tensor
    members: Layout
    gaps: Tensor


def sets_that_follow(events: EventSets, is_first: Tensor) -> Following:
    """Find the sets after the first of a patient; synchronizes with an accelerator.

    Args:
        is_first: (num_sets,) bool, True for the first set of a patient.
    """
    sets = (~is_first).nonzero().flatten()
    lengths = events.members.lengths()
    follows = (~is_first).repeat_interleave(lengths, output_size=len(events.values))
    bounds = F.pad(lengths.index_select(0, sets).cumsum(0, dtype=torch.int32), (1, 0))
    gaps = events.times.index_select(0, sets) - events.times.index_select(0, sets - 1)
    return Following(sets, follows.nonzero().flatten(), Layout(bounds, events.members.max_seqlen), gaps.clamp_min(0))


class NextSet(nn.Module):
    """Three heads on the hidden state of a set, which has seen that set and all before it.

    They compute in fp32 or wider: they are small, and rounding to bf16 would spoil a likelihood.

    Args:
        width: channels of the hidden state.
        num_codes: number of different codes.
    """

    def __init__(self, width: int, num_codes: int) -> None:
        super().__init__()
        self.codes = Linear(width, num_codes)
        self.time = Linear(width, 2)
        self.values = nn.Embedding(num_codes, width)  # row c: direction in which the value of code c rises
        self.value_bias = nn.Embedding(num_codes, 1)

    def scores(self, hidden: Tensor) -> Tensor:
        """Logits of the codes of the next set, (num_sets, width) to (num_sets, num_codes), fp32 or wider."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.codes(widened(hidden))

    def terms(self, hidden: Tensor, codes: Tensor, events: EventSets, following: Following, wanted: set[str]) -> Terms:
        """Losses of all sets after the first of their patient.

        Args:
            hidden: (num_sets, width).
            codes: (num_events,) int64.
            wanted: terms to compute, of next_code, next_time and next_value.

        Returns:
            next_code: negative log-likelihood of the codes of a set, mean over its events, by a softmax over all codes;
            next_time: that of log1p of the days to it, by a Gaussian; both over sets. next_value: squared error of
            asinh of a value, over events with a value; the prediction knows the event's code and nothing else of
            the set.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            before = widened(hidden).index_select(0, following.sets - 1)  # (num_following, width)
            terms: Terms = {}
            if "next_code" in wanted:
                nll = self._code_nll(before, codes.index_select(0, following.events), following.members)
                terms["next_code"] = nll.sum(), len(following.sets)
            if "next_time" in wanted:
                terms["next_time"] = self._time_nll(before, following.gaps).sum(), len(following.sets)
            if "next_value" in wanted:
                terms["next_value"] = self._value_errors(before, codes, events, following)
        return terms

    def _code_nll(self, before: Tensor, codes: Tensor, members: Layout) -> Tensor:
        """(num_following,). A set's mean score is the score of its codes' mean row, so no logits are gathered."""
        rows = segment_mean(F.embedding(codes, self.codes.weight), members)  # (num_following, width)
        bias = segment_mean(self.codes.bias.index_select(0, codes), members)
        return self._log_partition(before) - (before * rows).sum(1) - bias

    def _log_partition(self, before: Tensor) -> Tensor:
        """Logarithm of the softmax's denominator, (num_following,); many logits are recomputed in the backward pass."""
        rows = max(1, CHUNK_CELLS // self.codes.out_features)

        def denominator(part: Tensor) -> Tensor:
            return self.codes(part).logsumexp(1)

        if len(before) <= rows:
            return denominator(before)
        parts = [
            checkpoint(denominator, part, use_reentrant=False, preserve_rng_state=False) for part in before.split(rows)
        ]
        return torch.cat(parts)

    def _time_nll(self, before: Tensor, gaps: Tensor) -> Tensor:
        mean, log_var = self.time(before).unbind(1)
        log_var = LOG_VAR_LIMIT * torch.tanh(log_var / LOG_VAR_LIMIT)
        error = gaps.to(mean.dtype).log1p() - mean
        return (math.log(2 * math.pi) + log_var + error.square() * (-log_var).exp()) / 2

    def _value_errors(
        self, before: Tensor, codes: Tensor, events: EventSets, following: Following
    ) -> tuple[Tensor, int]:
        has_value = events.has_value.index_select(0, following.events)
        index = following.events[has_value]
        row = torch.repeat_interleave(following.members.lengths(), output_size=len(following.events))[has_value]
        code, value = codes.index_select(0, index), events.values.index_select(0, index)
        predicted = (before.index_select(0, row) * self.values(code)).sum(1) + self.value_bias(code)[:, 0]
        return (predicted - value.to(predicted.dtype).asinh()).square().sum(), len(index)
