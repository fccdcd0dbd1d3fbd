"""The ledger: what happens to every token of an epoch, by reason, with the sequences concerned.

Reasons, by column:
    trained    whole (of a sequence that fits), split (of windows), rest (of a truncated sequence)
    context    no_loss (shown to the model, carries no target with loss)
    truncated  truncate_right, truncate_left
    dropped    too_long, no_target, last_step
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

COLUMNS = ("trained", "context", "truncated", "dropped")
NUM_FIRST_IDS = 5


@dataclass(frozen=True)
class Ledger:
    """Tokens by fate; every position counts once, in the first piece that holds it.

    Args:
        trained, context, truncated, dropped: tokens per reason.
        repeated: positions shown once more as the context of an overlapping window; not part of `total`.
        sequences: number of different sequences per reason; a sequence may meet several.
        first_ids: lowest sequence ids per reason, at most NUM_FIRST_IDS.
    """

    trained: dict[str, int] = field(default_factory=dict)
    context: dict[str, int] = field(default_factory=dict)
    truncated: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    repeated: int = 0
    sequences: dict[str, int] = field(default_factory=dict)
    first_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Tokens of all columns; `plan` asserts that it is the number of tokens it was given."""
        return sum(self.tokens(column) for column in COLUMNS)

    def tokens(self, column: str) -> int:
        """Tokens of one column, all reasons together."""
        return sum(getattr(self, column).values())

    def __add__(self, other: "Ledger") -> "Ledger":
        """Join the accounts of two disjoint sets of tokens."""
        ids = {
            reason: tuple(sorted({*self.first_ids.get(reason, ()), *other.first_ids.get(reason, ())})[:NUM_FIRST_IDS])
            for reason in {**self.first_ids, **other.first_ids}
        }
        columns = {column: _sum(getattr(self, column), getattr(other, column)) for column in COLUMNS}
        return Ledger(
            **columns,
            repeated=self.repeated + other.repeated,
            sequences=_sum(self.sequences, other.sequences),
            first_ids=ids,
        )

    def rows(self) -> list[tuple[str, str, int, float, int, tuple[int, ...]]]:
        """Lines of a table: (column, reason, tokens, share of all tokens, sequences, first sequence ids)."""
        total = max(self.total, 1)
        return [
            (column, reason, tokens, tokens / total, self.sequences[reason], self.first_ids[reason])
            for column in COLUMNS
            for reason, tokens in getattr(self, column).items()
        ]

    def to_json(self) -> dict[str, Any]:
        columns = {column: dict(getattr(self, column)) for column in COLUMNS}
        ids = {reason: list(first) for reason, first in self.first_ids.items()}
        counts = {"total": self.total, "repeated": self.repeated}
        return {**counts, **columns, "sequences": dict(self.sequences), "first_ids": ids}


def entry(column: str, reason: str, tokens: int, seq_ids: np.ndarray) -> Ledger:
    """A ledger of one reason; empty without sequences.

    Args:
        tokens: number of tokens with this fate.
        seq_ids: their sequences, (n,) int; repeats count once.
    """
    if len(seq_ids) == 0:
        return Ledger()
    # Not np.unique: its hashing would take most of a plan's time, and sorting ids that are in order is quick.
    ordered = np.sort(seq_ids, kind="stable")
    unique = ordered[np.append(True, np.diff(ordered) > 0)]
    first = tuple(unique[:NUM_FIRST_IDS].tolist())
    return Ledger(**{column: {reason: int(tokens)}}, sequences={reason: len(unique)}, first_ids={reason: first})  # type: ignore[arg-type]


def _sum(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
    return {reason: left.get(reason, 0) + right.get(reason, 0) for reason in {**left, **right}}
