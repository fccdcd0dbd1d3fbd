"""Events of patients from one file per patient, long tables, tables to join, tables of facts, or a MEDS dataset.

A row is an event: patient, time, code, and perhaps a value. Rows of all sources become flat columns. `cohort.py`
chooses the patients, `assemble.py` the events of their histories and the sets.

MEDS: Medical Event Data Standard, https://medical-event-data-standard.github.io.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from unpad.data.histories.columns import ANY_NUMBER, Faults, are_whole
from unpad.data.histories.event_files import AUTO, Sides, find_files, number
from unpad.data.histories.tables import Table, TableFile, alias, column_names, open_table
from unpad.data.sources.example import BadRow
from unpad.data.sources.fields import in_yaml
from unpad.data.sources.unread import words_of
from unpad.errors import RecipeError, SourceError
from unpad.recipes.data import EventSettings, EventSource
from unpad.terminal.table import number_of

UNIT_NAMES = ("unit", "units", "uom", "value_uom", "value_unit", "result_unit", "unit_of_measure", "einheit", "单位")
MOST_GRADES = 5  # numbers that may well be names, such as those of stages
FEW_PATIENTS = 20  # so few may well have one word each
Facts = tuple[str, pa.Array | None, np.ndarray]  # a column of static: its name, its words, or else its numbers


@dataclass(frozen=True, eq=False)
class EventTable:
    """Events of one source, without its bad rows.

    Args:
        ids: (num_events,) strings.
        whole_ids: whether the ids are whole numbers, from a numeric column or from names of files.
        days: (num_events,) float64, on the clock of the source; nan for a fact without a time.
        unit: unit of the times, None without times.
        codes: (num_events,) strings.
        values: (num_events,) float64, nan for events without a value.
        sets: (num_events,) int64, number of the set of each event; None if the source does not number sets.
        origin: (num_events,) int64, row of `table`.
        others: ids of patients that the source names without an event.
        declared: parts of patients that folders, rows or a table of the source declare.
        unsorted: rows that go back in time.
        bad: rows that cannot be used.
        notes: remarks with their remedy, such as on an id among the facts.
        zones: column of timestamps -> whether they have a zone.
    """

    table: Table
    name: str
    ids: pa.Array
    whole_ids: bool
    days: np.ndarray
    codes: pa.Array
    values: np.ndarray
    origin: np.ndarray
    others: pa.Array
    declared: Sides
    bad: list[BadRow]
    unit: str | None = None
    sets: np.ndarray | None = None
    unsorted: int = 0
    notes: tuple[str, ...] = ()
    zones: dict[str, bool] = field(default_factory=dict)


def read_source(
    source: EventSource, settings: EventSettings, resolve: Callable[[str], Path], with_split: bool = True
) -> EventTable:
    """Read one source to the end; every row is an event, a patient's facts, or a bad row.

    Args:
        with_split: True if a column `split` names the part of the row's patient.

    Raises:
        SourceError: a file cannot be read, lacks a column, or a patient is in two files or in two splits.
    """
    files, layout = find_files(source, resolve(source.path))
    path = resolve(source.path)
    if source.static:
        return _read_static(source, files, path, with_split)
    return _read_timed(source, layout, files, settings, path, with_split)


# --------------------------------------------------------------------------- events with a time


def _read_timed(
    source: EventSource, layout: str, files: list[TableFile], settings: EventSettings, path: Path, with_split: bool
) -> EventTable:
    present = column_names(files[0].path, files[0].shown)
    table = open_table(files, *_columns(source, layout, with_split, present), "data.events")
    faults = Faults(table, source.decimal, source.limits)
    ids, whole_ids = faults.read_ids()
    codes, time = faults.column("code").codes(), faults.column("time")
    unit = time.unit(source.unit, source.format)
    days = time.times(unit, source.format)
    if layout != "meds":
        fix = "fill it in; facts without a time are columns of a table of their own, named by static"
        faults.add(np.isnan(days), "E_NULL", "there is no time", fix)
    if source.negative == "error" or (source.negative == "auto" and layout == "patients"):
        fix = "count from admission, or set negative: allow for this table"
        faults.add(days < 0, "E_NEGATIVE", "the time is below 0", fix)
    codes, values = _read_values(source, table, codes, faults)
    codes, notes = _read_units(source, table, codes, values, faults)
    person = number(ids)
    unsorted = _goes_back(person, days) & faults.good
    if settings.unsorted == "error":
        faults.add(unsorted, "E_ORDER", "the time is before that of the patient's row above", "sort the table by time")
    sets = _read_sets(table, person, days, faults) if table.has("set") else None
    sides = faults.column("split").sides() if table.has("split") else None
    good = np.flatnonzero(faults.good)
    keep = pa.array(good)
    owners = pa.array([file.owner for file in files if file.owner is not None], pa.string())
    whole_ids = whole_ids or (layout == "patients" and are_whole(owners))
    patients = (owners, np.arange(len(files))) if layout == "patients" else (ids.take(keep), table.file_of[good])
    declared = [Sides.of_files(files, *patients)]
    splits = path / "metadata" / "subject_splits.parquet"
    if layout == "meds" and splits.is_file():
        declared = [Sides.of_table(splits)]
    elif sides is not None:
        declared.append(Sides.of_rows(ids.take(keep), sides[good]))
    notes += [f"{source.path}: {note}" for note in faults.notes]
    return EventTable(
        table=table,
        name=_title(path, layout),
        ids=ids.take(keep),
        whole_ids=whole_ids,
        days=days[good],
        unit=unit,
        codes=codes.take(keep),
        values=values[good],
        sets=None if sets is None else sets[good],
        origin=good,
        others=owners,
        declared=Sides.joined(declared),
        unsorted=int(unsorted[good].sum()),
        bad=faults.bad,
        notes=tuple(notes),
        zones=faults.zones,
    )


def _columns(
    source: EventSource, layout: str, with_split: bool, present: Sequence[str]
) -> tuple[dict[str, tuple[str, ...]], set[str]]:
    """Names that the columns of a source may have, and the columns that it may lack; as for `open_table`.

    Args:
        present: columns of the first file.
    """
    units = (*UNIT_NAMES, *(name for name in present if "unit" in words_of(name)))
    usual = {**AUTO[layout], "set": ("set_index",), "value_unit": units, "split": ("split",)}
    asked = {name: getattr(source, name) for name in ("id", "time", "code", "value", "set", "value_unit")}
    asked["split"] = "auto" if with_split else None
    if layout == "patients":
        asked["id"] = None
    if source.value is None:
        asked["value_unit"] = None
    wanted = {name: usual[name] if named == "auto" else (named,) for name, named in asked.items() if named is not None}
    optional = {name for name in ("set", "value_unit", "split") if asked[name] == "auto"}
    if layout == "meds" and source.value == "auto":
        wanted["text"] = ("text_value",)
        optional |= {"value", "text"}
    return wanted, optional


def _read_values(source: EventSource, table: Table, codes: pa.Array, faults: Faults) -> tuple[pa.Array, np.ndarray]:
    """Read the value of every event, (num_rows,) float64; with words=code, a text becomes a part of the event's code.

    Texts are those of the column of values, and of MEDS's text_value where there is no number.

    Raises:
        SourceError: text_value holds texts, and the source does not say what they mean.
    """
    if not table.has("value") and not table.has("text"):
        return codes, np.full(len(table), np.nan)
    treated = source.words != "error"
    words, values = None, np.full(len(table), np.nan)
    if table.has("value"):
        column = faults.column("value")
        words = column.words() if treated else None
        values = column.numbers(words=words)
    if table.has("text"):
        texts = faults.column("text").words() if source.words == "code" else table.column("text")
        texts = pc.if_else(pa.array(np.isnan(values)), texts.cast(pa.string()), None)
        num_texts = int(pc.sum(pc.fill_null(pc.not_equal(texts, ""), False)).as_py() or 0)
        if num_texts and not treated:
            what = f'E_TYPE {number_of(num_texts, "events")} with no number but a text in "text_value"'
            fix = "set words on this item of data.events: code makes the text a part of the event's code, skip drops it"
            raise SourceError(what, where=table.files[0].shown, fix=fix)
        words = texts if words is None else pc.coalesce(words, texts)
    if source.words != "code" or words is None:
        return codes, values
    return pc.if_else(pc.is_valid(words), pc.binary_join_element_wise(codes, words, "="), codes), values


def _read_units(
    source: EventSource, table: Table, codes: pa.Array, values: np.ndarray, faults: Faults
) -> tuple[pa.Array, list[str]]:
    """Read the unit of every value: codes with it, where the source says so, or else a warning of codes with two."""
    if not table.has("value_unit"):
        return codes, []
    name, column = table.names["value_unit"], faults.column("value_unit")
    units, texts = column.words(), pc.utf8_trim_whitespace(column.values.cast(pa.string()))
    if source.value_unit != "auto" or name.lower().endswith("id"):  # numbers of units, not of what is counted
        units = pc.coalesce(units, pc.if_else(pc.match_substring_regex(texts, ANY_NUMBER), texts, None))
    if source.value_unit != "auto":
        with_unit = pc.binary_join_element_wise(codes, " [", pc.utf8_lower(units), "]", "")
        return pc.if_else(pc.is_valid(units), with_unit, codes), []
    chosen = pa.array(np.flatnonzero(faults.good & ~np.isnan(values) & np.asarray(pc.is_valid(units))))
    pairs = pa.table({"code": codes.take(chosen), "unit": units.take(chosen)})
    pairs = pairs.append_column("alike", pc.utf8_lower(pairs["unit"])).group_by(["code", "alike"], use_threads=False)
    counts = pairs.aggregate([("unit", "first"), ("unit", "count")]).sort_by([("unit_count", "descending")])
    shown: dict[str, list[str]] = {}
    for row in counts.to_pylist():
        shown.setdefault(row["code"], []).append(f"{row['unit_first']} in {number_of(row['unit_count'], 'rows')}")
    several = [code for code, units in shown.items() if len(units) > 1]
    if not several:
        return codes, []
    more = f", and so for {number_of(len(several) - 1, 'more codes')}" if several[1:] else ""
    fix = f"set value_unit: {in_yaml(name)} beside the path of this table, which makes it a part of the code"
    what = f"{several[0]} has {' and '.join(shown[several[0]])}{more}"
    return codes, [f'{source.path}: "{name}" of {what}; convert them to one unit, or {fix}']


def _title(path: Path, layout: str) -> str:
    """Name of a source in the report: its file or folder; not the file of a single patient, which names the patient."""
    return path.parent.name if layout == "patients" and path.is_file() else path.name


def _goes_back(person: np.ndarray, days: np.ndarray) -> np.ndarray:
    """Find rows with an earlier time than the row above of the same patient, (num_rows,) bool."""
    order = np.argsort(person, kind="stable")
    back = (np.diff(person[order]) == 0) & (np.diff(days[order]) < 0)
    is_back = np.zeros(len(days), np.bool_)
    is_back[order[1:][back]] = True
    return is_back


def _by_time(person: np.ndarray, days: np.ndarray) -> np.ndarray:
    """Number the different times of every patient from 0, (num_rows,)."""
    order = np.lexsort((days, person))
    is_first = np.append(True, np.diff(person[order]) != 0)[: len(order)]
    later = np.cumsum(~is_first & np.append(True, np.diff(days[order]) != 0)[: len(order)])
    numbers = np.empty(len(order))
    numbers[order] = later - np.maximum.accumulate(np.where(is_first, later, 0))
    return numbers


def _read_sets(table: Table, person: np.ndarray, days: np.ndarray, faults: Faults) -> np.ndarray:
    """Read the number of the set of every row, (num_rows,) int64, in order of time, without gaps."""
    values = faults.column("set").numbers()
    shown = table.names["set"]
    bare = ~np.isin(table.file_of, table.file_of[~np.isnan(values)])  # of files without the column
    if bare.any() and not bare.all():
        values = values.copy()
        values[bare] = _by_time(person[bare], days[bare])
    wrong = np.isnan(values) | (values != np.floor(values))
    faults.add(wrong, "E_SET", f'"{shown}" is not a whole number', "number the sets of each patient from 0 or 1")
    sets = np.where(faults.good, np.nan_to_num(values), 0).astype(np.int64)
    good = np.flatnonzero(faults.good)
    order = good[np.lexsort((sets[good], days[good], person[good]))]
    step, same = np.diff(sets[order]), np.diff(person[order]) == 0
    for fault, what in ((step < 0, "goes back while the time goes on"), (step > 1, "leaves a number out")):
        is_bad = np.zeros(len(sets), np.bool_)
        is_bad[order[1:][same & fault]] = True
        fix = "number the sets of each patient in the order of time, or set: null to go by the time alone"
        faults.add(is_bad, "E_SET", f'"{shown}" {what}', fix)
    return sets


# --------------------------------------------------------------------------- facts without a time


def _read_static(source: EventSource, files: list[TableFile], path: Path, with_split: bool) -> EventTable:
    """Read facts, one row per patient.

    A number becomes an event with the name of its column as code and a value; a word or truth value one with
    "column=word" as code and without a value; an empty cell none."""
    wanted = {"id": AUTO["table"]["id"] if source.id == "auto" else (source.id,)}
    chosen = {f"static {name}": (name,) for name in source.static}
    wanted |= {"split": ("split",)} if with_split and "split" not in source.static else {}
    table = open_table(files, {**wanted, **chosen}, ("split",), "data.events", dict.fromkeys(chosen, "static"))
    faults = Faults(table, source.decimal, source.limits)
    ids, whole_ids = faults.read_ids()
    _, first = np.unique(number(ids), return_index=True)
    again = np.ones(len(table), np.bool_)
    again[first] = False
    faults.add(again, "E_DUPLICATE", "the patient has a row above", "leave one row per patient")
    sides = faults.column("split").sides() if table.has("split") else None
    read = []
    for key in chosen:
        column = faults.column(key)
        words = column.categories()
        values = column.numbers() if words is None else np.full(len(table), np.nan)
        read.append((key.removeprefix("static "), words, values))
    rows, codes, numbers = [], [], []
    for name, words, values in read:
        here = np.flatnonzero(faults.good & (~np.isnan(values) if words is None else np.asarray(pc.is_valid(words))))
        rows.append(here)
        numbers.append(values[here])
        if words is None:
            codes.append(pa.array([name] * len(here), pa.string()))
        else:
            codes.append(pc.binary_join_element_wise(name, words.take(pa.array(here)), "="))
    origin = np.concatenate(rows)
    keep = pa.array(faults.good)
    declared = [Sides.of_files(files, ids.filter(keep), table.file_of[faults.good])]
    if sides is not None:
        declared.append(Sides.of_rows(ids.filter(keep), sides[faults.good]))
    return EventTable(
        table=table,
        name=_title(path, "table"),
        ids=ids.take(pa.array(origin)),
        whole_ids=whole_ids,
        days=np.full(len(origin), np.nan),
        codes=pa.concat_arrays(codes),
        values=np.concatenate(numbers),
        origin=origin,
        others=ids.filter(keep),
        declared=Sides.joined(declared),
        bad=faults.bad,
        notes=(*(f"{source.path}: {note}" for note in faults.notes), *_doubtful(source, table, read)),
    )


def _doubtful(source: EventSource, table: Table, read: Sequence[Facts]) -> Iterator[str]:
    """Warn of facts that name the patient, by the column of ids or words that nearly every patient has alone, and of
    numbers that are read as words, beside words."""
    for name, words, _ in read:
        there = pa.array([], pa.string()) if words is None else words.drop_null()
        numbers = pc.drop_null(pc.if_else(pc.match_substring_regex(there, ANY_NUMBER), there, None))
        if table.names[f"static {name}"] == table.names["id"]:
            what = "is the id of the patient, and also one of the facts that the model reads; remove it from static"
        elif len(numbers.unique()) > MOST_GRADES and 2 * len(numbers) > len(there):
            what = f"has words in {number_of(len(there) - len(numbers), 'rows')}, so that its numbers are read as words"
            what += " too; empty them to read numbers"
        elif len(there) >= FEW_PATIENTS and len(there.unique()) > 0.9 * len(there):
            what = "has a word of its own for nearly every patient, as an id has; remove it from static"
        else:
            continue
        yield f'{source.path}: "{name}" {what}'


# --------------------------------------------------------------------------- all sources together


@dataclass(frozen=True, eq=False)
class EventRows:
    """Events of all sources, one source after the other.

    Args:
        parts: the sources.
        patients: every id that a source or `more` of `join` names, strings.
        person: (num_events,) int64, index into `patients`.
        names: every code, in order.
        code: (num_events,) int64, index into `names`.
        days, values, sets: as in `EventTable`.
        source: (num_events,) int16, index into `parts`.
        origin: (num_events,) int64, row of the source's table.
    """

    parts: list[EventTable]
    patients: pa.Array
    person: np.ndarray
    names: list[str]
    code: np.ndarray
    days: np.ndarray
    values: np.ndarray
    sets: np.ndarray | None
    source: np.ndarray
    origin: np.ndarray

    def where(self, event: int) -> str:
        return self.parts[self.source[event]].table.where(int(self.origin[event]))

    def bad(self, event: int, code: str, what: str, fix: str) -> BadRow:
        """A row that cannot be used, with the pseudonym of its patient."""
        return BadRow(self.where(event), code, f"patient {self.alias(int(self.person[event]))}: {what}", fix)

    def alias(self, person: int) -> str:
        return alias(self.patients[person].as_py())


def join(parts: Sequence[EventTable], more: Sequence[pa.Array] = ()) -> tuple[EventRows, list[np.ndarray]]:
    """Concatenate the events of all sources and number the patients.

    Args:
        more: ids of other tables, such as that of the labels.

    Returns:
        The events, and the patients' numbers for each of `more`.

    Raises:
        RecipeError: only some of the sources number their sets.
    """
    id_columns = [*(part.ids for part in parts), *(part.others for part in parts), *more]
    encoded = pa.concat_arrays([column.cast(pa.string()) for column in id_columns]).dictionary_encode()
    ends = np.cumsum([len(column) for column in id_columns])
    numbers = np.split(np.asarray(encoded.indices).astype(np.int64), ends[:-1])
    codes = pa.concat_arrays([part.codes.cast(pa.string()) for part in parts])
    names = sorted(codes.unique().to_pylist())
    timed = [part for part in parts if part.unit is not None]
    if len({part.sets is None for part in timed}) > 1:
        what = "some tables of events number their sets and others do not"
        raise RecipeError(what, where="data.events", fix="number them in all, or set: null to go by the time alone")
    numbered = any(part.sets is not None for part in timed)
    sets = [np.zeros(len(part.days), np.int64) if part.sets is None else part.sets for part in parts]
    rows = EventRows(
        parts=list(parts),
        patients=encoded.dictionary,
        person=np.concatenate(numbers[: len(parts)]),
        names=names,
        code=np.asarray(pc.index_in(codes, pa.array(names, pa.string()))).astype(np.int64),
        days=np.concatenate([part.days for part in parts]),
        values=np.concatenate([part.values for part in parts]),
        sets=np.concatenate(sets) if numbered else None,
        source=np.repeat(np.arange(len(parts), dtype=np.int16), [len(part.days) for part in parts]),
        origin=np.concatenate([part.origin for part in parts]),
    )
    return rows, numbers[2 * len(parts) :]
