"""EventSets: the part of a batch of patients that holds sets of events, their values and times."""

from dataclasses import dataclass, field, replace

from torch import Tensor

from unpad.batching.fields import SEQUENCE, BatchPart, per, per_sequence, runs
from unpad.batching.layout import Layout, build_layout
from unpad.nn.segments import segment_place

OUTCOME, FIRST_COMPETING = 1, 2  # what ended observation, beside 0, censoring


@dataclass(frozen=True)
class EventSets(BatchPart):
    """Sets and values of the events of a batch; its tokens are the codes of the events.

    Sets follow each other in the order of the tokens, and the sets of a patient in the order of time. Padding a batch
    leaves its sets flat.

    Args:
        history: sets of every patient, num_seqs runs over num_sets; a patient may have none.
        members: events of every set, num_sets runs over num_events.
        values: (num_events,) float32, standardised; 0 for an event without a value.
        has_value: (num_events,) bool, which tells a missing value from a value of 0.
        times: (num_sets,) float32, days from the landmark, negative before it; ascending within a patient.
        durations: (num_seqs,) float32, days from the landmark to the end of observation; None for a cohort without.
        cause: (num_seqs,) int64, what ended observation: 0 censoring, OUTCOME, or from FIRST_COMPETING on another event
            after which the outcome cannot come; None with `durations`.
    """

    history: Layout = field(metadata=runs(SEQUENCE, "set"))
    members: Layout = field(metadata=runs("set", "event"))
    values: Tensor = field(metadata=per("event"))
    has_value: Tensor = field(metadata=per("event"))
    times: Tensor = field(metadata=per("set"))
    durations: Tensor | None = field(default=None, metadata=per_sequence())
    cause: Tensor | None = field(default=None, metadata=per_sequence())

    @property
    def num_sets(self) -> int:
        return self.times.numel()

    @property
    def attended(self) -> Layout:
        """Sets of every patient, and one readout."""
        return build_layout((self.history.lengths() + 1).cpu().numpy())


def keyed(events: EventSets, keys: Tensor | None) -> EventSets:
    """The same with keys of patients, (num_seqs,) int64, and of their sets, for random draws."""
    if keys is None:
        return events
    history = events.history.with_keys(keys)
    members = events.members.with_keys(history.keys_of(segment_place(history), history.seq_of_token()))
    return replace(events, history=history, members=members)
