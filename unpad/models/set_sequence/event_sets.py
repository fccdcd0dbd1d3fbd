"""The sets that a batch's tokens form, where sequences are patients."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from unpad.batching.fields import SEQUENCE, BatchPart, per, per_sequence, runs
from unpad.batching.layout import Layout, build_layout


@dataclass(frozen=True)
class EventSets(BatchPart):
    """What a batch of patients holds besides the codes of its events, which are its tokens.

    Sets lie end to end in the order of the tokens, and a patient's sets in the order of time. All of it stays flat when
    the batch becomes a rectangle.

    Args:
        history: the sets of every sequence, num_seqs runs over num_sets; a patient may have none.
        members: the events of every set, num_sets runs over num_events.
        values: (num_events,) float32, standardised; 0 where there is none.
        has_value: (num_events,) bool; an event without a value is not one of value 0.
        times: (num_sets,) float32, days from the landmark, negative before it; never falls within a patient.
        durations: (num_seqs,) float32, days from the landmark to the end of observation; None without such labels.
        observed: (num_seqs,) bool, whether observation ended with the outcome, not by censoring; beside `durations`.
    """

    history: Layout = field(metadata=runs(SEQUENCE, "set"))
    members: Layout = field(metadata=runs("set", "event"))
    values: Tensor = field(metadata=per("event"))
    has_value: Tensor = field(metadata=per("event"))
    times: Tensor = field(metadata=per("set"))
    durations: Tensor | None = field(default=None, metadata=per_sequence())
    observed: Tensor | None = field(default=None, metadata=per_sequence())

    @property
    def num_sets(self) -> int:
        return self.times.numel()

    @property
    def attended(self) -> Layout:
        """The sets of every patient and one readout."""
        return build_layout((self.history.lengths() + 1).cpu().numpy())
