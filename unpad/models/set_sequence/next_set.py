"""What follows a set in a patient's history: which codes the next set holds, when it comes, and the codes' values."""

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
from unpad.nn.segments import segment_mean, widened

CHUNK_CELLS = 1 << 22  # pairs of a set and a code that exist at a time
LOG_VAR_LIMIT = 6.0  # of the time of the next set, in logarithms of days; times that repeat exactly would reach -inf


@dataclass(frozen=True)
class Following:
    """The sets that follow another of their patient, and their events.

    Args:
        sets: (num_following,) int64; the set before each is the one of the number before.
        events: (num_next_events,) int64, all events of these sets.
        members: these events, set by set.
        gaps: (num_following,) days since the set before.
    """

    sets: Tensor
    events: Tensor
    members: Layout
    gaps: Tensor


def sets_that_follow(events: EventSets, is_first: Tensor) -> Following:
    """Find them; accelerators wait here.

    Args:
        is_first: (num_sets,) bool, whether a set is the first of its patient.
    """
    sets = (~is_first).nonzero().flatten()
    lengths = events.members.lengths()
    follows = (~is_first).repeat_interleave(lengths, output_size=len(events.values))
    bounds = F.pad(lengths.index_select(0, sets).cumsum(0, dtype=torch.int32), (1, 0))
    gaps = events.times.index_select(0, sets) - events.times.index_select(0, sets - 1)
    return Following(sets, follows.nonzero().flatten(), Layout(bounds, events.members.max_seqlen), gaps.clamp_min(0))


class NextSet(nn.Module):
    """Three heads on the hidden state of a set, which has seen that set and those before it.

    They compute in fp32 at least: they are small, and a likelihood that is rounded to bf16 is hardly one.

    Args:
        width: channels of the hidden state.
        num_codes: codes that events can have.
    """

    def __init__(self, width: int, num_codes: int) -> None:
        super().__init__()
        self.codes = Linear(width, num_codes)
        self.time = Linear(width, 2)
        self.values = nn.Embedding(num_codes, width)  # row c: the direction in which the value of code c rises
        self.value_bias = nn.Embedding(num_codes, 1)

    def scores(self, hidden: Tensor) -> Tensor:
        """Logits of the codes of the next set, (num_sets, width) to (num_sets, num_codes), fp32 or wider."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.codes(widened(hidden))

    def terms(self, hidden: Tensor, codes: Tensor, events: EventSets, following: Following, wanted: set[str]) -> Terms:
        """Losses of all sets that follow another.

        Args:
            hidden: (num_sets, width), of every set.
            codes: (num_events,) int64.
            wanted: which of next_code, next_time and next_value to compute.

        Returns:
            next_code: negative log-likelihood of the codes of a set, mean over its events, by a softmax over all codes;
            next_time: that of log1p of the days to it, by a Gaussian; both over sets. next_value: squared error of
            asinh of a value, over the events that have one; a prediction knows the code, and no event of the set.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            before = widened(hidden).index_select(0, following.sets - 1)  # (num_following, width)
            found: Terms = {}
            if "next_code" in wanted:
                nll = self._code_nll(before, codes.index_select(0, following.events), following.members)
                found["next_code"] = nll.sum(), len(following.sets)
            if "next_time" in wanted:
                found["next_time"] = self._time_nll(before, following.gaps).sum(), len(following.sets)
            if "next_value" in wanted:
                found["next_value"] = self._value_errors(before, codes, events, following)
        return found

    def _code_nll(self, before: Tensor, codes: Tensor, members: Layout) -> Tensor:
        """(num_following,). The mean score of a set's codes is the score of their mean row: no logits are picked."""
        rows = segment_mean(F.embedding(codes, self.codes.weight), members)  # (num_following, width)
        bias = segment_mean(self.codes.bias.index_select(0, codes), members)
        return self._log_partition(before) - (before * rows).sum(1) - bias

    def _log_partition(self, before: Tensor) -> Tensor:
        """Logarithm of the softmax's denominator, (num_following,); many logits are made anew for the backward pass."""
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
        told = events.has_value.index_select(0, following.events)
        index = following.events[told]
        row = torch.repeat_interleave(following.members.lengths(), output_size=len(following.events))[told]
        code, value = codes.index_select(0, index), events.values.index_select(0, index)
        made = (before.index_select(0, row) * self.values(code)).sum(1) + self.value_bias(code)[:, 0]
        return (made - value.to(made.dtype).asinh()).square().sum(), len(index)
