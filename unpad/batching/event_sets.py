"""The sets that a batch's tokens form, where sequences are patients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unpad.batching.layout import Layout, build_layout


@dataclass(frozen=True)
class EventSets:
    """What a batch of patients holds besides the codes of its events, which are its tokens.

    Sets lie end to end in the order of the tokens, and a patient's sets in the order of time. All of it stays flat when
    the batch becomes a rectangle.

    Args:
        values: (num_events,) float32, standardised; 0 where there is none.
        has_value: (num_events,) bool; an event without a value is not one of value 0.
        members: the events of every set, num_sets runs over num_events.
        history: the sets of every sequence, num_seqs runs over num_sets; a patient may have none.
        times: (num_sets,) float32, days from the landmark, negative before it; never falls within a patient.
        durations: (num_seqs,) float32, days from the landmark to the end of observation; None without such labels.
        observed: (num_seqs,) bool, whether observation ended with the outcome, not by censoring; beside `durations`.
    """

    values: Tensor
    has_value: Tensor
    members: Layout
    history: Layout
    times: Tensor
    durations: Tensor | None = None
    observed: Tensor | None = None

    @property
    def num_sets(self) -> int:
        return self.times.numel()

    def to(self, device: torch.device) -> EventSets:
        moved = {k: v.to(device, non_blocking=True) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, members=self.members.to(device), history=self.history.to(device), **moved)

    def select(self, seqs: Sequence[int]) -> EventSets:
        """Those of these sequences, in this order."""
        chosen = list(seqs)
        sets = self.history.tokens_of(chosen)
        events = self.members.tokens_of(sets.tolist())
        return EventSets(
            values=self.values[events],
            has_value=self.has_value[events],
            members=build_layout(self.members.lengths()[sets].cpu().numpy()),
            history=build_layout(self.history.lengths()[chosen].cpu().numpy()),
            times=self.times[sets],
            durations=None if self.durations is None else self.durations[chosen],
            observed=None if self.observed is None else self.observed[chosen],
        ).to(self.times.device)


def _join_events(parts: Sequence[EventSets]) -> EventSets:
    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    def runs(layouts: list[Layout]) -> Layout:
        return build_layout(torch.cat([layout.lengths() for layout in layouts]).cpu().numpy())

    labelled = all(part.durations is not None for part in parts)
    return EventSets(
        values=joined("values"),
        has_value=joined("has_value"),
        members=runs([part.members for part in parts]),
        history=runs([part.history for part in parts]),
        times=joined("times"),
        durations=joined("durations") if labelled else None,
        observed=joined("observed") if labelled else None,
    )
