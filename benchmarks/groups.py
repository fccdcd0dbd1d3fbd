"""Sides that cannot share the machine's memory, measured in groups with one side, the anchor, in all of them.

Ratios are those within a group. Rates of sides of different groups come from different minutes: the anchor's rate in
either group shows how far the machine changed between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from apart import Apart, Memory
from measure import Rounds

RESERVE = 1 / 3  # of the machine's memory: no side is added where less is free


@dataclass(frozen=True)
class Groups:
    """Rounds of every group, and the sides that could not be measured, with the reasons.

    Args:
        rounds: each with the anchor among its sides.
    """

    anchor: str
    rounds: list[Rounds]
    left_out: dict[str, str]

    def group(self, *names: str) -> int | None:
        """The first group in which all these sides took turns; None if there is none."""
        return next((i for i, rounds in enumerate(self.rounds) if all(name in rounds.turns for name in names)), None)

    def ratios(self, name: str, other: str) -> list[float]:
        """Speed relative to another side, one ratio per round; none of sides that were not measured together."""
        group = self.group(name, other)
        return [] if group is None else self.rounds[group].ratios(name, other)

    def rates(self, name: str) -> list[float]:
        """Real tokens per second of a side, one per round of its first group."""
        group = self.group(name)
        return [] if group is None else self.rounds[group].rates(name)

    def shares(self, name: str) -> list[float]:
        """Operations per second over the best ceiling of all groups, one per round."""
        group = self.group(name)
        if group is None:
            return []
        return Rounds({name: self.rounds[group].turns[name]}, self.ceilings).shares(name)

    @property
    def ceilings(self) -> list[float]:
        return [ceiling for rounds in self.rounds for ceiling in rounds.ceilings]


@dataclass
class Builder:
    """Builds sides as long as memory lasts.

    Args:
        start: starts the process of a side.
        machine_bytes: memory of the machine.
        available: free bytes of the machine now.
        missing: what building raises where a package is missing; such a side is left out.
    """

    start: Callable[[str], Apart]
    warm_seconds: float
    machine_bytes: int
    available: Callable[[], int]
    missing: type[Exception]
    built: list[Memory] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def has_room(self) -> bool:
        """True if a third of the machine is free, and what the largest side needs and takes in a turn."""
        largest, grows = max(m.resting for m in self.built), max(m.peak - m.resting for m in self.built)
        return self.available() >= max(RESERVE * self.machine_bytes, largest + grows)

    def build(self, name: str) -> Apart | None:
        """Build a side; None if it is left out.

        Raises:
            MemoryError: its process was ended for want of memory.
        """
        side = self.start(name)
        try:
            self.built.append(side.build(self.warm_seconds))
            return side
        except self.missing as reason:
            self.left_out[name] = str(reason)
            side.close()
            return None
        except MemoryError:
            side.close()
            raise

    def fill(self, sides: dict[str, Apart], waiting: list[str]) -> None:
        """Move sides from those that wait into a group: one at least, then as many as there is room for."""
        alone = len(sides)
        while waiting and (len(sides) == alone or self.has_room()):
            try:
                side = self.build(waiting[0])
            except MemoryError:
                if len(sides) == alone:
                    raise
                return  # it is built again for the next group
            name = waiting.pop(0)
            if side is not None:
                sides[name] = side


def measure_groups(
    names: Sequence[str],
    builder: Builder,
    measure: Callable[[Mapping[str, Apart], float], Rounds],
    finish: Callable[[str, Apart], None],
) -> Groups:
    """Build as many sides as fit into memory, measure and close them, and go on with the others.

    Args:
        names: the first is the anchor, whose process stays.
        measure: takes the sides of a group, and their share of all sides that are not measured yet.
        finish: called with every side when its turns are over.

    Raises:
        MemoryError: not even the anchor and one side fit.
    """
    anchor, *waiting = names
    first = builder.build(anchor)
    assert first is not None, "the anchor needs no package"
    rounds: list[Rounds] = []
    while waiting or not rounds:
        sides = {anchor: first}
        builder.fill(sides, waiting)
        if len(sides) == 1 and rounds:  # the others were left out
            break
        rounds.append(measure(sides, len(sides) / (len(sides) + len(waiting))))
        for name, side in sides.items():
            if name != anchor:
                finish(name, side)
                side.close()
    finish(anchor, first)
    first.close()
    return Groups(anchor, rounds, builder.left_out)
