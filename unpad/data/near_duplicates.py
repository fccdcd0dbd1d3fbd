"""Near-duplicates of training rows among new rows that a run is evaluated on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NearDuplicates:
    """New rows that are near-duplicates of training rows of a run.

    Args:
        unit: what is compared: documents or pictures.
        num: number of these; num_equal: equal to a training one; num_near: other near-duplicates.
        pairs: places of some of these and of their training rows.
        lines: the same as text.
        reason: why nothing was compared, or "".
    """

    unit: str
    num: int
    num_equal: int
    num_near: int
    pairs: tuple[tuple[str, str], ...]
    lines: tuple[str, ...]
    reason: str = ""

    def to_json(self) -> dict[str, object]:
        """Fields by name; the counts are null where nothing was compared."""
        known = not self.reason
        return {
            "unit": self.unit,
            "compared": self.num if known else None,
            "equal": self.num_equal if known else None,
            "near": self.num_near if known else None,
            "found": [{"row": row, "training_row": source} for row, source in self.pairs],
            "reason": self.reason or None,
        }


def not_compared(unit: str, reason: str) -> NearDuplicates:
    """Say that near-duplicates were not looked for, and why."""
    line = f"near-duplicates of training {unit} are not looked for: {reason}"
    return NearDuplicates(unit, 0, 0, 0, (), (line,), reason)
