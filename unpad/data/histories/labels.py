"""Table of labels, one row per patient: `label` (0 or 1), or `event` and `duration`, on the clock of the events."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from unpad.data.histories import columns
from unpad.data.histories.columns import Faults
from unpad.data.histories.event_files import ID_NAMES, column_sides, number
from unpad.data.histories.event_rows import EventTable, units_of
from unpad.data.histories.tables import Table, TableFile, open_table
from unpad.data.histories.times import PER_DAY, times
from unpad.data.sources.example import BadRow
from unpad.errors import RecipeError
from unpad.recipes.data import EventSettings


@dataclass(frozen=True)
class Clock:
    """Unit of the times of a recipe and of its table of labels.

    Args:
        unit: of times: minutes, hours, days or timestamp.
        per_day: units per day, for lengths of time such as the horizon.
    """

    unit: str
    per_day: float


def clock_of(parts: list[EventTable], settings: EventSettings) -> Clock:
    """Return the clock of a recipe.

    Raises:
        RecipeError: a number has no unit, or events have timestamps and the landmark is a number.
    """
    units = units_of(parts)
    if units == {"timestamp"}:
        if isinstance(settings.landmark, float):
            fix = "name a column of the table of labels that holds timestamps"
            raise RecipeError("events have timestamps, and the landmark is a number", where="events.landmark", fix=fix)
        return Clock("timestamp", PER_DAY["days" if settings.unit == "auto" else settings.unit])
    if settings.unit != "auto":
        return Clock(settings.unit, PER_DAY[settings.unit])
    labels = settings.labels
    counts = settings.landmark is not None or settings.window or (labels and (labels.duration or labels.time))
    if len(units) != 1 and counts:
        what = "tables of events count in " + (" and ".join(sorted(units)) or "no unit")
        raise RecipeError(what, where="events.unit", fix="set events.unit to that of landmark, horizon and duration")
    unit = units.pop() if len(units) == 1 else "days"
    return Clock(unit, PER_DAY[unit])


@dataclass(frozen=True, eq=False)
class LabelTable:
    """Rows of the table of labels, one per patient; times are days on the clock of the events.

    Args:
        ids: (num_rows,) strings, of the rows with an id.
        usable: (num_rows,) bool, rows without a fault.
        label: (num_rows,) float64, 0 or 1, nan if missing; that of `event` in a table without `label`.
        end: (num_rows,) float64, end of observation, or time at which the label was known; nan if unknown.
        landmark: (num_rows,) float64; None without a column of landmarks.
        origin: (num_rows,) int64, row of `table`.
        split: (num_rows,) int8 of `Split` that the column `split` declares; None without the column.
    """

    table: Table
    ids: pa.Array
    usable: np.ndarray
    label: np.ndarray
    end: np.ndarray
    landmark: np.ndarray | None
    origin: np.ndarray
    bad: list[BadRow]
    split: np.ndarray | None

    def where(self, index: int) -> str:
        return self.table.where(int(self.origin[index]))


def read_labels(path: Path, settings: EventSettings, clock: Clock, with_split: bool = True) -> LabelTable:
    """Read the table of labels.

    Args:
        with_split: whether a column `split` says of which part a patient is.

    Raises:
        SourceError: it cannot be read or lacks a column.
    """
    labels = settings.labels
    assert labels is not None
    named = {"label": labels.label or labels.event, "end": labels.duration or labels.time}
    if isinstance(settings.landmark, str):
        named["landmark"] = settings.landmark
    wanted = {"id": ID_NAMES if labels.id == "auto" else (labels.id,)}
    wanted |= {key: (name,) for key, name in named.items() if name is not None}
    optional = ("split",) if with_split else ()
    wanted |= {name: (name,) for name in optional}
    table = open_table([TableFile(path, str(path))], wanted, optional, "events.labels")
    faults = Faults(table)
    ids, _ = columns.ids(table, faults)
    faults.ids = ids
    identified = np.flatnonzero(faults.good)
    person = number(ids)
    twice = np.bincount(person, minlength=1)[person] > 1
    fix = "leave one row per patient; of several prediction times keep one"
    faults.add(twice, "E_LABEL", "the patient has several rows of labels", fix)
    label = columns.numbers(table, "label", faults, expected="0 or 1", truths=True)
    wrong = ~np.isnan(label) & (label != 0) & (label != 1)
    faults.add(wrong, "E_LABEL", f'"{table.names["label"]}" is neither 0 nor 1', "write 0 or 1, or leave it empty")
    end = times(table, "end", clock.unit, faults) if table.has("end") else np.full(len(table), np.nan)
    landmark = times(table, "landmark", clock.unit, faults) if table.has("landmark") else None
    if landmark is not None:
        faults.add(np.isnan(landmark), "E_NULL", f'there is no "{table.names["landmark"]}"', "fill it in")
    if labels.duration is not None:
        label = np.where(np.isnan(end), np.nan, label)
    elif landmark is not None or isinstance(settings.landmark, float):
        made = landmark if landmark is not None else settings.landmark / clock.per_day  # type: ignore[operator]
        fix = "set an earlier landmark, or remove the row"
        faults.add(end < made, "E_LEAK", "the label was known before the landmark", fix)
    split = column_sides(table, faults) if table.has("split") else None
    return LabelTable(
        table=table,
        ids=ids.take(pa.array(identified)),
        usable=faults.good[identified],
        label=label[identified],
        end=end[identified],
        landmark=None if landmark is None else landmark[identified],
        origin=identified,
        bad=faults.bad,
        split=None if split is None else split[identified],
    )
