"""Look up patients and rows of their tables by the place that a user names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unpad.data.histories.cohort import PatientTables
from unpad.data.histories.tables import Table
from unpad.data.sources.named import Place, file_test


@dataclass(frozen=True, eq=False)
class PatientRow:
    """A row of a table, or a patient by id or file.

    Args:
        where: its place, without an id.
        person: index into `EventRows.patients`; -1 for a row of nobody.
        events: (n,) int64, its events among all; none for a label or a patient.
    """

    where: str
    person: int
    events: np.ndarray


def find_row(tables: PatientTables, place: Place, given: str) -> PatientRow | None:
    """Find a patient by id or by the file of all events, or the row at a place.

    Args:
        given: as the user wrote it, perhaps an id.
    """
    rows, nothing = tables.rows, np.zeros(0, np.int64)
    is_it = file_test(place.file)
    owners = [file.owner for part in rows.parts for file in part.table.files if file.owner and is_it(str(file.path))]
    patients = rows.patients.to_pylist()
    wanted = owners[0] if owners and not place.item else given
    if wanted in patients:
        person = patients.index(wanted)
        return PatientRow(f"patient {rows.alias(person)}", person, nothing)
    if place.line is None:
        return None
    for number, part in enumerate(rows.parts):
        row = _table_row(part.table, place)
        if row is not None:
            events = np.flatnonzero((rows.source == number) & (rows.origin == row))
            return PatientRow(part.table.where(row), int(rows.person[events[0]]) if len(events) else -1, events)
    labels = tables.labels
    row = None if labels is None else _table_row(labels.table, place)
    if labels is None or row is None:
        return None
    person = tables.cohort.person[np.isin(tables.cohort.label_row, np.flatnonzero(labels.origin == row))]
    return PatientRow(labels.table.where(row), int(person[0]) if len(person) else -1, nothing)


def _table_row(table: Table, place: Place) -> int | None:
    """Index of the row at a place; None if the table does not have it."""
    is_it = file_test(place.file)
    files = [number for number, file in enumerate(table.files) if is_it(str(file.path)) or file.shown == place.file]
    matches = np.flatnonzero(np.isin(table.file_of, files) & (table.row == place.line))
    return int(matches[0]) if len(matches) else None
