"""Table of labels, one row per patient and landmark: `label` (0 or 1, or one of several classes), or `event` and
`duration`, on the clock of the events."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import numpy as np
import pyarrow as pa

from unpad.data.histories.columns import NOTHING, PER_DAY, Column, Faults
from unpad.data.histories.event_files import ID_NAMES, number
from unpad.data.histories.event_rows import EventTable
from unpad.data.histories.tables import Table, TableFile, open_table
from unpad.data.sources.example import BadRow
from unpad.data.sources.fields import in_yaml
from unpad.errors import RecipeError
from unpad.models.set_sequence.event_sets import FIRST_COMPETING
from unpad.recipes.data import EventLabels, EventSettings, as_word
from unpad.terminal.table import number_of

_WORD = r"[^\W\d_](?=.{0,30}$)[\w ./()&+-]*"
_TRUTHS = {"0": 0, "1": 1, "false": 0, "true": 1}
MOST_WORDS = 12


@dataclass(frozen=True)
class TimeUnit:
    """Unit of the times of a recipe and of its table of labels.

    Args:
        unit: of times: minutes, hours, days or timestamp.
        per_day: units per day, for lengths of time such as the horizon.
    """

    unit: str
    per_day: float

    def horizon(self, labels: EventLabels | None) -> float | None:
        """Days from the landmark within which the outcome makes the label 1, if the recipe has such a time."""
        return None if labels is None or labels.horizon is None else labels.horizon / self.per_day


def clock_of(parts: list[EventTable], settings: EventSettings) -> TimeUnit:
    """Return the clock of a recipe.

    Raises:
        RecipeError: a number has no unit, or events have timestamps and the landmark is a number, or some tables have
            timestamps and others a clock of their own.
    """
    units = {part.unit for part in parts if part.unit is not None}
    if "timestamp" in units and len(units) > 1:
        what = "some tables of events have timestamps and others count from a time of their own"
        raise RecipeError(what, where="data.events", fix="bring all of them onto one clock")
    if units == {"timestamp"}:
        if settings.landmarks:
            fix = "name a column of the table of labels that holds timestamps"
            raise RecipeError("events have timestamps, and the landmark is a number", where="events.landmark", fix=fix)
        return TimeUnit("timestamp", PER_DAY["days" if settings.unit == "auto" else settings.unit])
    if settings.unit != "auto":
        return TimeUnit(settings.unit, PER_DAY[settings.unit])
    labels = settings.labels
    counts = settings.landmark is not None or settings.window or (labels and (labels.duration or labels.time))
    if len(units) != 1 and counts:
        what = "tables of events count in " + (" and ".join(sorted(units)) or "no unit")
        raise RecipeError(what, where="events.unit", fix="set events.unit to that of landmark, horizon and duration")
    unit = units.pop() if len(units) == 1 else "days"
    return TimeUnit(unit, PER_DAY[unit])


@dataclass(frozen=True, eq=False)
class LabelTable:
    """Rows of the table of labels, one per patient, or patient and landmark; times are days on the clock of the events.

    Args:
        ids: (num_rows,) strings, of the rows with an id.
        usable: (num_rows,) bool, rows without a fault.
        label: (num_rows,) float64, 0 or 1, or the place of one of several classes, nan if missing; that of `event` in a
            table without `label`, where 2 and up are the competing events in their order.
        end: (num_rows,) float64, end of observation, or time at which the label was known; nan if missing.
        landmark: (num_rows,) float64; None without a column of landmarks.
        origin: (num_rows,) int64, row of `table`.
        split: (num_rows,) int8 of `Split` that the column `split` declares; None without the column.
        zones: column of timestamps -> whether they have a zone.
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
    zones: dict[str, bool]

    def where(self, index: int) -> str:
        return self.table.where(int(self.origin[index]))


def read_labels(path: Path, settings: EventSettings, clock: TimeUnit, with_split: bool = True) -> LabelTable:
    """Read the table of labels.

    Args:
        with_split: True if a column `split` names the part of a patient.

    Raises:
        SourceError: it cannot be read or lacks a column.
        RecipeError: its times have a format, and the events count from a time of their own.
    """
    labels = settings.labels
    assert labels is not None
    if labels.format is not None and clock.unit != "timestamp":
        what = f"events count in {clock.unit}, and a format is of dates"
        raise RecipeError(what, where="events.labels.format", fix="leave it out, or give the events timestamps")
    named = {
        "label": labels.label or labels.event,
        "end": labels.duration or labels.time,
        "landmark": settings.landmark if isinstance(settings.landmark, str) else None,
        "split": "split" if with_split else None,
    }
    wanted = {"id": ID_NAMES if labels.id == "auto" else (labels.id,)}
    wanted |= {key: (name,) for key, name in named.items() if name is not None}
    fields = {"label": "label" if labels.label else "event", "end": "duration" if labels.duration else "time"}
    table = open_table([TableFile(path, str(path))], wanted, ("split",), "events.labels", fields)
    faults = Faults(table, labels.decimal)
    ids, _ = faults.read_ids()
    identified = np.flatnonzero(faults.good)
    label = _read_label(faults.column("label"), labels)
    end, landmark = (
        faults.column(name).times(clock.unit, labels.format) if table.has(name) else None
        for name in ("end", "landmark")
    )
    end = np.full(len(table), np.nan) if end is None else end
    if landmark is not None:
        faults.add(np.isnan(landmark), "E_NULL", f'there is no "{table.names["landmark"]}"', "fill it in")
    _refuse_several(ids, label, landmark, faults, labels.classes or ("0", "1", *labels.competing))
    if labels.duration is None and (landmark is not None or settings.landmarks):
        landmark_day = landmark if landmark is not None else settings.landmarks[0] / clock.per_day
        fix = "set an earlier landmark, or remove the row"
        faults.add(end < landmark_day, "E_LEAK", "the label was known before the landmark", fix)
    split = faults.column("split").sides() if table.has("split") else None
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
        zones=faults.zones,
    )


def _read_label(column: Column, labels: EventLabels) -> np.ndarray:
    """Read the column of labels, (num_rows,) float64, as in `LabelTable`, nan where it is empty or not known."""
    if labels.classes:
        places = {word: place for place, word in enumerate(labels.classes)}
        return _mapped(column, {**places, **(labels.map or {})}, ("classes", "map"))
    if labels.map is not None or labels.competing:
        causes = {word: cause for cause, word in enumerate(labels.competing, FIRST_COMPETING)}
        fields = ("map",) if labels.event is None else ("map", "competing")
        return _mapped(column, {**_TRUTHS, **(labels.map or {}), **causes}, fields)
    if column.is_text:
        _refuse_texts(column, labels)
    label = column.numbers(expected="0 or 1", truths=True)
    wrong = ~np.isnan(label) & (label != 0) & (label != 1)
    fix = "write 0 or 1, or leave it empty; 'events.labels.map={1: 0, 2: 1}' gives other numbers a meaning"
    if labels.event is not None:
        fix += ", and events.labels.competing=[2] says that 2 is another event, after which the outcome cannot come"
    else:
        fix += ", and 'events.labels.classes=[0, 1, 2]' makes each a class of its own"
    _refuse(column, wrong, _TRUTHS, "neither 0 nor 1", fix)
    return label


def _words_by_row(column: Column) -> tuple[list[str], np.ndarray]:
    """Values of a column of labels as words, and the place of every row among them, (num_rows,), -1 for empty rows."""
    encoded = column.values.cast(pa.string()).dictionary_encode()
    return [as_word(word) for word in encoded.dictionary.to_pylist()], np.asarray(encoded.indices.fill_null(-1))


def _sayable(words: Sequence[str], index: np.ndarray, declared: Collection[str]) -> dict[str, int]:
    """Values of a column of labels, beside the declared ones, that messages may say, with the rows of each: where they
    are few, those that several rows have, that are nearly a declared one, and numbers of two digits. Another word of
    one patient alone may be a name.

    Args:
        words, index: as of `_words_by_row`.
    """
    counts = Counter[str]()
    for word, rows in zip(words, np.bincount(index[index >= 0], minlength=len(words)).tolist(), strict=True):
        counts[word] += rows
    others = {word: rows for word, rows in counts.most_common() if word not in declared}
    if len(others) > MOST_WORDS:
        return {}
    return {
        word: rows
        for word, rows in others.items()
        if (rows > 1 and re.fullmatch(_WORD, word))
        or re.fullmatch(r"-?\d{1,2}(\.\d+)?", word)
        or get_close_matches(word, list(declared), n=1)
    }


def _refuse(column: Column, wrong: np.ndarray, declared: Collection[str], what: str, fix: str) -> None:
    """Refuse rows whose value is none of the declared ones, (num_rows,) bool, and say it where that names nobody."""
    if not wrong.any():
        return
    words, index = _words_by_row(column)
    sayable = _sayable(words, index, declared)

    def explain(row: int) -> tuple[str, str]:
        word = words[index[row]]
        return f'is "{word}", {what}' if word in sayable else f"is {what}", fix

    column.refuse(wrong, "E_LABEL", explain)


def _refuse_texts(column: Column, labels: EventLabels) -> None:
    """Refuse words of a column of 0 and 1, with those that there are, and texts such as codes of diagnoses."""
    is_text = column.matches(r"^\s*[^\W\d_]") & ~column.matches(r"^(?i:true|false|nan|inf|infinity)$") & ~column.empty
    words, index = _words_by_row(column)
    sayable = {word: rows for word, rows in _sayable(words, np.where(is_text, index, -1), ()).items() if rows}
    fix = "write 0 or 1, or leave it empty"
    if sayable:
        counts = ", ".join(f"{word} ({rows:,})" for word, rows in sayable.items())
        pairs = ", ".join(f"{in_yaml(word)}: ?" for word in sayable)
        others = int(is_text.sum()) - sum(sayable.values())
        counts += f" and {number_of(others, 'others')}" if others else ""
        fix = f"of {counts}, say which is 0, 1 or null (not known), in place of each ?: 'events.labels.map={{{pairs}}}'"
    if labels.label is None:
        fix += "; words for other ends of observation are in events.labels.competing"
    elif len(sayable) != 2:
        several = ", ".join(map(in_yaml, sayable)) or "I10, I21.4"
        fix += f"; or, to predict which: 'events.labels.classes=[{several}]'"

    def explain(row: int) -> tuple[str, str]:
        kind = "a word" if words[index[row]] in sayable else f"a text of {len(column.values[row].as_py())} characters"
        return f"is {kind}, expected 0 or 1", fix

    column.refuse(is_text, "E_TYPE", explain)


def _mapped(column: Column, meaning: Mapping[str, int | None], fields: Sequence[str]) -> np.ndarray:
    """Labels of the words, or numbers, of a column, (num_rows,) float64; nan for empty rows and unknown outcomes.

    Args:
        fields: of `events.labels` that give words a meaning, for the message.
    """
    words, index = _words_by_row(column)
    value = [meaning.get(word) for word in words]
    empty = [word in map(str.lower, NOTHING) and word not in meaning for word in words]
    label: np.ndarray = np.array([*(np.nan if meant is None else meant for meant in value), np.nan], np.float64)[index]
    strange = np.array([*(not bare and word not in meaning for bare, word in zip(empty, words, strict=True)), False])
    fix = f"add the word to {' or '.join(fields)} in events.labels, or leave the cell empty"
    _refuse(column, strange[index], meaning, f"none of {', '.join(meaning)}", fix)
    return label


def _refuse_several(
    ids: pa.Array, label: np.ndarray, landmark: np.ndarray | None, faults: Faults, names: Sequence[str]
) -> None:
    """Refuse patients with several rows, of one landmark where a column has these, and say which of them contradict
    each other; `names` are those of labels 0, 1, ..."""
    person, of_one = number(ids), ""
    fix = "leave one row per patient, or name the column of its prediction times in events.landmark"
    if landmark is not None:
        pairs = np.stack([person.astype(np.float64), np.nan_to_num(landmark, nan=np.inf)])
        person, of_one = np.unique(pairs, axis=1, return_inverse=True)[1].reshape(-1), " of one landmark"
        fix = "leave one row per patient and landmark"
    twice = np.bincount(person, minlength=1)[person] > 1
    having = np.stack([np.bincount(person, label == value, minlength=1)[person] > 0 for value in range(len(names))])
    what = f"the patient has several rows of labels{of_one}"

    def explain(row: int) -> tuple[str, str]:
        both = " and ".join(names[place] for place in np.flatnonzero(having[:, row]).tolist())
        return f"{what}, which contradict each other: {both}", fix

    faults.add(twice & (having.sum(0) > 1), "E_LABEL", explain)
    faults.add(twice, "E_LABEL", what, fix)
