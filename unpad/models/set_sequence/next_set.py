"""Next-set heads: codes, time and values of the set that follows a set in a patient's history."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from unpad.batching.layout import Layout
from unpad.models.set_sequence.event_sets import EventSets
from unpad.nn.linear import Linear
from unpad.nn.losses import Terms
from unpad.nn.precision import widened
from unpad.nn.segments import segment_mean

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
            scores: Tensor = self.codes(widened(hidden))
            return scores

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
            total: Tensor = self.codes(part).logsumexp(1)
            return total

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
        nll: Tensor = (math.log(2 * math.pi) + log_var + error.square() * (-log_var).exp()) / 2
        return nll

    def _value_errors(
        self, before: Tensor, codes: Tensor, events: EventSets, following: Following
    ) -> tuple[Tensor, int]:
        has_value = events.has_value.index_select(0, following.events)
        index = following.events[has_value]
        row = torch.repeat_interleave(following.members.lengths(), output_size=len(following.events))[has_value]
        code, value = codes.index_select(0, index), events.values.index_select(0, index)
        predicted = (before.index_select(0, row) * self.values(code)).sum(1) + self.value_bias(code)[:, 0]
        return (predicted - value.to(predicted.dtype).asinh()).square().sum(), len(index)
