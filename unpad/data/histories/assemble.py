"""Histories: each patient's sets in order of time, cut at sets, with numbered codes."""

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NotRequired

import numpy as np
from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from unpad.data.histories.cohort import PatientTables
from unpad.data.histories.columns import Faults
from unpad.data.histories.event_rows import EventRows
from unpad.data.histories.labels import TimeUnit
from unpad.data.histories.scales import LogJson, RankJson, Scale, fit_scale, scale_of, standardised
from unpad.data.histories.tables import TableFile, column_names, open_table
from unpad.data.sources.example import BadRow
from unpad.data.sources.split import Split
from unpad.errors import RecipeError, SourceError
from unpad.recipes.data import EventSettings
from unpad.storage.reading import Count, Finite, shaped
from unpad.terminal.table import number_of

CODES = "events.json"  # of a run
UNKNOWN = "<unknown>"  # row 0 of the code embedding
QUANTILES = (0.0, 0.01, 0.5, 0.99, 1.0)  # of values and days in training; the first and the last are their range


@dataclass(frozen=True, eq=False)
class Events:
    """Events of the histories, example by example, facts without a time first, then by time.

    An event of a patient occurs in every example with a landmark at it or later.

    Args:
        patient: (num_events,) int64, index of the example in the cohort, ascending.
        time: (num_events,) float64, days from the landmark; nan for facts without a time.
        set_index: (num_events,) int64, the number of a set as its table gives it; 0 without.
        code: (num_events,) int64, index into the names of `EventRows`, or of `Codes` once they are numbered.
        value: (num_events,) float64, nan where there is none.
        row: (num_events,) int64, index into `EventRows`.
    """

    patient: np.ndarray
    time: np.ndarray
    set_index: np.ndarray
    code: np.ndarray
    value: np.ndarray
    row: np.ndarray

    def take(self, index: np.ndarray) -> "Events":
        return Events(**{name: values[index] for name, values in vars(self).items()})

    def __len__(self) -> int:
        return len(self.patient)


def read_histories(
    tables: PatientTables, settings: EventSettings
) -> tuple[Events, dict[str, int], list[BadRow], np.ndarray]:
    """Select the cohort's events up to the landmark, each once, in an order that does not depend on the files'.

    Returns:
        The events; the number of other events, by reason; the refused rows; and the events of every patient after the
        landmark by table, (num_patients, num_sources) int64.
    """
    rows, cohort = tables.rows, tables.cohort
    counts: dict[str, int] = {}
    counts["of patients who are left out"] = int((~cohort.refused & ~np.isin(rows.person, cohort.person)).sum())
    num = np.bincount(cohort.person, minlength=len(rows.patients))
    first = np.zeros(len(num), np.int64)
    first[cohort.person[::-1]] = np.arange(len(cohort.person))[::-1]
    event_row = np.flatnonzero(~cohort.refused)
    times = num[rows.person[event_row]]  # an event is in every example of its patient
    place = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)  # among these
    event_row = np.repeat(event_row, times)
    patient = first[rows.person[event_row]] + place
    time = rows.days[event_row] - cohort.landmark[patient]
    late = time > 0  # nan is a fact without a time
    counts["after the landmark"] = int(late.sum())
    num_late = per_source(tables, patient[late], event_row[late])
    event_row, patient, time = event_row[~late], patient[~late], time[~late]
    sets = np.zeros(len(event_row), np.int64) if rows.sets is None else rows.sets[event_row]
    events = Events(patient, time, sets, rows.code[event_row], rows.values[event_row], event_row)
    events = events.take(np.lexsort((events.value, events.code, sets, np.nan_to_num(time, nan=-np.inf), patient)))
    same = np.zeros(len(events), np.bool_)
    same[1:] = np.logical_and.reduce([_equals_last(part) for name, part in vars(events).items() if name != "row"])
    bad: list[BadRow] = []
    if settings.duplicates == "error":
        fix = "remove it, or set events.duplicates to drop or keep"
        what = "another row is equal in everything"
        bad = [rows.bad(event, "E_DUPLICATE", what, fix) for event in np.unique(events.row[same]).tolist()]
    elif settings.duplicates == "drop":
        counts["exact duplicates"] = int(same.sum())
    events = events if settings.duplicates == "keep" else events.take(np.flatnonzero(~same))
    return events, counts, bad, num_late


def _equals_last(values: np.ndarray) -> np.ndarray:
    """Compare each entry but the first with the one before; nan equals nan. (num - 1,) bool"""
    equal: np.ndarray = values[1:] == values[:-1]
    return equal | (np.isnan(values[1:]) & np.isnan(values[:-1])) if values.dtype.kind == "f" else equal


# --------------------------------------------------------------------------- codes


@dataclass(frozen=True, eq=False)
class Codes:
    """Codes of a run, the commonest first after UNKNOWN, and the scales of their values.

    Args:
        names: row by row of the code embedding.
        counts: (num_codes,) int64, events of training patients, each once, however many examples read it.
        mean, std: (num_codes,) float64, of the values of training patients; 0 for codes without values.
        quantiles: (num_codes, len(QUANTILES)) float64, of the same values; 0 for codes without values. None in runs of
            versions that did not record them.
        scale: of the values that the model reads, by `events.scale`.
        times, durations: (len(QUANTILES),) float64, days from the landmark to the events of training patients, and to
            the end of their observation; None where there are none, or in runs of versions that did not record them.
    """

    names: tuple[str, ...]
    counts: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    quantiles: np.ndarray | None = None
    scale: Scale = None
    times: np.ndarray | None = None
    durations: np.ndarray | None = None

    def standardised(self, code: np.ndarray, value: np.ndarray) -> np.ndarray:
        """Values (num_events,) in standard deviations from the mean of their code, nan without a value."""
        return standardised(code, value, self.mean, self.std)

    def scaled(self, code: np.ndarray, value: np.ndarray) -> np.ndarray:
        """Values (num_events,) as the model reads them, nan without a value."""
        standard = self.standardised(code, value)
        return standard if self.scale is None else self.scale.of(code, value, standard)

    def to_bytes(self) -> bytes:
        named = {name: getattr(self, name) for name in ("counts", *NUMBERS)}
        columns: dict[str, object] = {name: each.tolist() for name, each in named.items() if each is not None}
        columns |= {} if self.scale is None else self.scale.to_json()
        return json.dumps({"codes": self.names, **columns}, ensure_ascii=False, indent=1).encode()


_Quantiles = Annotated[list[Finite], Field(min_length=len(QUANTILES), max_length=len(QUANTILES))]
NUMBERS = ("mean", "std", "quantiles", "times", "durations")


class _Codes(TypedDict):
    codes: Annotated[list[str], Field(min_length=1)]
    counts: list[Count]
    mean: list[Finite]
    std: list[Finite]
    quantiles: NotRequired[list[_Quantiles]]
    times: NotRequired[_Quantiles]
    durations: NotRequired[_Quantiles]
    log: NotRequired[LogJson]
    rank: NotRequired[RankJson]


def _of_one_length(known: _Codes) -> _Codes:
    fields: dict[str, Any] = {**known}
    size = len(known["codes"])
    columns = {name: part for name, part in fields.items() if name in ("counts", "mean", "std", "quantiles")}
    columns |= {f"{kind}.{name}": part for kind in ("log", "rank") for name, part in fields.get(kind, {}).items()}
    for name, values in columns.items():
        if len(values) != size:
            raise ValueError(f'has {size:,} codes, and {len(values):,} entries in "{name}"')
    if known["codes"][0] != UNKNOWN or len(set(known["codes"])) < size:
        raise ValueError(f"has codes that do not begin with {UNKNOWN}, or one of them twice")
    if "log" in known and any(a > 0 >= b for a, b in zip(known["log"]["std"], known["log"]["least"], strict=True)):
        raise ValueError('has logarithms of values that are not above 0 in "log"')
    if "rank" in known:
        for values, scores, std in zip(known["rank"]["values"], known["rank"]["scores"], known["std"], strict=True):
            rises = all(a < b for knots in (values, scores) for a, b in pairwise(knots))
            if len(values) != len(scores) or bool(values) != (std > 0) or not rises:
                raise ValueError('has knots in "rank" that do not rise, or do not fit the codes with values')
    return known


_CODES = Annotated[_Codes, AfterValidator(_of_one_length)]


def load_codes(content: bytes) -> Codes:
    """Read what `Codes.to_bytes` wrote.

    Raises:
        CheckpointError: it is damaged.
    """
    known = shaped(content, _CODES, Path(CODES))
    numbers = {name: np.array(each, np.float64) for name, each in known.items() if name in NUMBERS}
    scale = scale_of(known.get("log"), known.get("rank"))
    return Codes(tuple(known["codes"]), np.array(known["counts"], np.int64), scale=scale, **numbers)


def learn_codes(events: Events, names: list[str], in_training: np.ndarray, settings: EventSettings) -> Codes:
    """Number the codes of training patients by how often they occur, and measure their values.

    Args:
        names: of `events.code`.
        in_training: (num_events,) bool; an event that several examples of a patient read is in it once.
    """
    mine = events.take(np.flatnonzero(in_training))
    occurs = np.bincount(mine.code, minlength=len(names))
    order = sorted(np.flatnonzero(occurs >= settings.min_count).tolist(), key=lambda code: (-occurs[code], names[code]))
    chosen = np.array([code for code in order if names[code] != UNKNOWN], np.int64)
    row = np.zeros(len(names), np.int64)
    row[chosen] = np.arange(1, len(chosen) + 1)
    valued = np.flatnonzero(~np.isnan(mine.value) & (row[mine.code] > 0))
    code, value = row[mine.code[valued]], mine.value[valued]
    size = len(chosen) + 1
    num = np.bincount(code, minlength=size)
    mean = np.bincount(code, value, size) / np.maximum(num, 1)
    std = np.sqrt(np.bincount(code, (value - mean[code]) ** 2, size) / np.maximum(num, 1))
    std = np.maximum(std, settings.std_floor * np.abs(mean))
    std = np.where((num > 0) & (std == 0), 1.0, std)  # only zeros
    counts = np.concatenate([[occurs.sum() - occurs[chosen].sum()], occurs[chosen]])
    scale = fit_scale(settings.scale, code, value, settings.std_floor, size)
    return Codes((UNKNOWN, *(names[code] for code in chosen)), counts, mean, std, _quantiles(code, value, num), scale)


def _quantiles(code: np.ndarray, value: np.ndarray, num: np.ndarray) -> np.ndarray:
    """Values of every code at QUANTILES of its own values, (num_codes, len(QUANTILES)); 0 for codes without values.

    Args:
        num: (num_codes,) values of each code.
    """
    ordered = value[np.lexsort((value, code))]
    first = np.cumsum(num) - num
    at = first[:, None] + np.rint(np.maximum(num - 1, 0)[:, None] * np.array(QUANTILES)).astype(np.int64)
    return np.where(num[:, None] > 0, np.append(ordered, 0.0)[np.minimum(at, len(ordered))], 0.0)


def _range(days: np.ndarray) -> np.ndarray | None:
    """(num,) at QUANTILES, (len(QUANTILES),); None without any."""
    return np.quantile(days, QUANTILES, method="nearest") if len(days) else None


# --------------------------------------------------------------------------- sets


@dataclass(frozen=True, eq=False)
class Sets:
    """Starts of patients and sets in the events; a patient here is one example.

    Args:
        events_of: (num_patients + 1,) int64, first event of every patient.
        sets_of: (num_patients + 1,) int64, first set of every patient.
        set_starts: (num_sets + 1,) int64, first event of every set.
        times: (num_sets,) float32, days from the landmark, of a set's last event; ascending within a patient.
        timeless: (num_sets,) bool, sets of facts without a time; they get the time of the first set after them.
    """

    events_of: np.ndarray
    sets_of: np.ndarray
    set_starts: np.ndarray
    times: np.ndarray
    timeless: np.ndarray

    @property
    def has_no_time(self) -> np.ndarray:
        """Patients without any event that has a time, (num_patients,) bool."""
        timed = np.append(0, np.cumsum(~self.timeless))
        return np.asarray(np.diff(timed[self.sets_of]) == 0)


def form_sets(events: Events, num_patients: int, settings: EventSettings, clock: TimeUnit, numbered: bool) -> Sets:
    """Cut histories into sets: facts without a time, then events of one time, of one window, or of one number.

    Args:
        numbered: whether the tables number their sets.
    """
    timeless = np.isnan(events.time)
    key: np.ndarray = events.set_index if numbered else events.time
    if settings.window is not None and not numbered:
        key = np.ceil(events.time * clock.per_day / settings.window)  # windows end at the landmark
    begins = np.ones(len(events), np.bool_)
    parts = (events.patient, timeless, np.where(timeless, 0, key))
    begins[1:] = ~np.logical_and.reduce([_equals_last(part) for part in parts])
    starts = np.append(np.flatnonzero(begins), len(events))
    patient = events.patient[starts[:-1]]
    times = np.maximum.reduceat(events.time, starts[:-1]) if len(events) else np.zeros(0)
    bare = timeless[starts[:-1]]
    after = np.append(times[1:], np.nan)
    followed = np.append(patient[1:] == patient[:-1], False)
    times = np.where(bare, np.where(followed, after, 0.0), times)
    ranks = np.arange(num_patients + 1)
    return Sets(
        events_of=np.searchsorted(events.patient, ranks),
        sets_of=np.searchsorted(patient, ranks),
        set_starts=starts,
        times=times.astype(np.float32),
        timeless=bare,
    )


def cut_sets(sets: Sets, settings: EventSettings) -> np.ndarray:
    """Choose the sets that stay under `max_events`, the latest or earliest whole ones, (num_sets,) bool.

    A set is never split, so one set with a time always stays, and so do facts without one.
    """
    most = settings.max_events
    sizes, patients = np.diff(sets.set_starts), np.diff(sets.sets_of)
    if most is None:
        return np.ones(len(sizes), np.bool_)
    patient = np.repeat(np.arange(len(patients)), patients)
    facts = np.bincount(patient, sizes * sets.timeless, len(patients)).astype(np.int64)  # events of each patient
    begin = sets.events_of[patient] + facts[patient]
    if settings.keep == "latest":
        reach = sets.events_of[patient + 1] - sets.set_starts[:-1]
        nearest = np.arange(len(sizes)) == sets.sets_of[patient + 1] - 1
    else:
        reach = sets.set_starts[1:] - begin
        nearest = sets.set_starts[:-1] == begin
    return np.asarray(sets.timeless | nearest | (reach + facts[patient] <= most))


# --------------------------------------------------------------------------- all of it


@dataclass(frozen=True, eq=False)
class Histories:
    """The histories of a cohort.

    Args:
        events: with numbers of `known` as codes.
        counts: events that were left out, by reason.
        unknown: the commonest codes outside `known` -> how often they occur.
        num_read: (num_patients, num_sources) int64, events of each table before any is left out here; num_strange:
            events with codes outside `known`.
        notes: remarks on values that are left out.
    """

    known: Codes
    events: Events
    sets: Sets
    counts: dict[str, int]
    unknown: dict[str, int]
    num_read: np.ndarray
    num_strange: np.ndarray
    notes: tuple[str, ...] = ()


def assemble(tables: PatientTables, events: Events, settings: EventSettings, known: Codes | None) -> Histories:
    """Number the codes, form sets, and cut histories to `max_events`.

    The recipe says what happens to events of unknown codes. Values of codes without values in training are dropped,
    since their scale is unknown.

    Args:
        known: codes of an earlier run; None learns them from the training patients.

    Raises:
        SourceError: there is an unknown code and the recipe refuses them.
        RecipeError: the earlier run scales values otherwise.
    """
    rows, num_patients = tables.rows, len(tables.cohort.person)
    if known is None:
        in_training = np.zeros(len(events), np.bool_)
        mine = np.flatnonzero(tables.cohort.split[events.patient] == Split.TRAIN)
        in_training[mine[np.unique(events.row[mine], return_index=True)[1]]] = True
        known = learn_codes(events, rows.names, in_training, settings)
        cohort = tables.cohort
        times = events.time[in_training]
        durations = np.zeros(0) if cohort.duration is None else cohort.duration[cohort.split == Split.TRAIN]
        known = replace(known, times=_range(times[~np.isnan(times)]), durations=_range(durations))
    elif (kept := "standard" if known.scale is None else known.scale.kind) != settings.scale:
        what = f"the recipe scales values by {settings.scale}, and the run that it starts from by {kept}"
        raise RecipeError(what, where="events.scale", fix=f"set events.scale={kept}, or train anew")
    number_of_name = {name: index for index, name in enumerate(known.names)}
    code = np.array([number_of_name.get(name, 0) for name in rows.names], np.int64)[events.code]
    strange, unscaled = code == 0, known.std[code] == 0
    lost = np.bincount(code[~strange & unscaled & ~np.isnan(events.value)], minlength=len(known.names))
    named = [f"{lost[one]:,} of {known.names[one]}" for one in np.argsort(-lost, kind="stable")[:20] if lost[one]]
    notes = (f"values left out, as their codes have none in training: {', '.join(named)}",) if named else ()
    unknown = _unknown_codes(rows, events, strange, settings)
    num_read = per_source(tables, events.patient, events.row)
    num_strange = per_source(tables, events.patient[strange], events.row[strange])
    counts: dict[str, int] = {}
    events = replace(events, code=code, value=np.where(unscaled, np.nan, events.value))
    if settings.unknown_codes == "skip":
        events, counts = events.take(np.flatnonzero(~strange)), {"of unknown codes": int(strange.sum())}
    sets = form_sets(events, num_patients, settings, tables.clock, rows.sets is not None)
    within, before = cut_sets(sets, settings), len(events)
    if not within.all():
        events = events.take(np.flatnonzero(np.repeat(within, np.diff(sets.set_starts))))
        sets = form_sets(events, num_patients, settings, tables.clock, rows.sets is not None)
    counts["beyond events.max_events"] = before - len(events)
    return Histories(known, events, sets, counts, unknown, num_read, num_strange, notes)


def _unknown_codes(rows: EventRows, events: Events, strange: np.ndarray, settings: EventSettings) -> dict[str, int]:
    """Counts of the commonest unknown codes; `strange`, (num_events,) bool, are the events with one.

    Raises:
        SourceError: there is one and the recipe refuses them.
    """
    occurs = np.bincount(events.code[strange], minlength=len(rows.names))
    commonest = np.argsort(-occurs, kind="stable")[:20].tolist()
    unknown = {rows.names[index]: int(occurs[index]) for index in commonest if occurs[index]}
    if settings.unknown_codes == "error" and unknown:
        named = ", ".join(f'"{name}"' for name in list(unknown)[:8])
        num = number_of(int(occurs.sum()), "events")
        what = f"E_CODE {num} of codes that training patients do not have, or seldom: {named}"
        fix = "set events.unknown_codes to unknown or skip, or events.min_count lower"
        raise SourceError(what, where=rows.where(int(events.row[strange].min())), fix=fix)
    return unknown


def per_source(tables: PatientTables, patient: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Events of every patient by table, (num_patients, num_sources) int64; arguments as of `Events`."""
    num_patients, num_sources = len(tables.cohort.person), len(tables.rows.parts)
    cell = patient * num_sources + tables.rows.source[row]
    return np.bincount(cell, minlength=num_patients * num_sources).reshape(num_patients, num_sources)


KEY = "Key"


def read_vectors(path: Path, names: tuple[str, ...]) -> tuple[np.ndarray, list[str]]:
    """Read the vectors of these codes in this order, and list the codes without a vector.

    Returns:
        (num_codes, dim) float32, zeros for codes without a vector.

    Raises:
        SourceError: the table cannot be read, a vector has another width than the others, or a code has two.
    """
    file = TableFile(path, str(path))
    others = [name for name in column_names(path, file.shown) if name != KEY]
    if not others:
        what = f"E_WIDTH there is no column besides {KEY}"
        raise SourceError(what, where=file.shown, fix="write one column per dimension")
    table = open_table([file], {"code": (KEY,), **{f"at {name}": (name,) for name in others}}, (), "the table")
    if table.bad:
        row = table.bad[0]
        raise SourceError(f"E_WIDTH {row.what}", where=row.where, fix="write vectors of one width")
    faults = Faults(table)
    keys = faults.column("code").codes().to_pylist()
    vectors = np.stack([faults.column(f"at {name}").numbers() for name in others], 1)  # (num_rows, dim)
    faults.add(np.isnan(vectors).any(1), "E_WIDTH", f"the vector has fewer than {len(others)} numbers", "fill it in")
    seen: dict[str, int] = {}
    again = np.array([seen.setdefault(key, row) != row for row, key in enumerate(keys)], np.bool_)
    faults.add(again, "E_DUPKEY", "the code has a vector above", "leave one row per code")
    faults.refuse_any()
    rows = np.array([seen.get(name, -1) for name in names], np.int64)
    ordered = np.zeros((len(names), len(others)), np.float32)
    ordered[rows >= 0] = vectors[rows[rows >= 0]]
    return ordered, [name for name, row in zip(names[1:], rows[1:].tolist(), strict=True) if row < 0]
