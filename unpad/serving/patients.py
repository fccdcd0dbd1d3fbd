"""Patients of requests: rows of events become the run's tables, in memory alone, and predictions as of `unpad embed`.

The model's passes join those of other requests; a patient's numbers have the same bits whoever is beside it.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from unpad.data.family import open_data
from unpad.data.histories.event_files import AUTO, find_files
from unpad.data.patient_marks import mark_patients, refuse_unknown
from unpad.data.patients import EventData
from unpad.data.sources.files import resolve_path
from unpad.data.sources.split import Wanted
from unpad.errors import SourceError, UnpadError, nearest
from unpad.inference.embed import named_predictions, predicts, with_tables
from unpad.inference.loaded import LoadedRun
from unpad.inference.patients import by_class, class_names
from unpad.models.contract import PredictsSets
from unpad.recipes.data import EventLabels, EventSource
from unpad.serving.protocol import Instance, RequestError

MOST_EVENTS = 20_000  # of a request
ID = "id"  # column that joins the tables of a request; its numbers are places in the request
Cell = str | int | float | None
Passes = Sequence[tuple[np.ndarray, Mapping[str, np.ndarray]]]  # places of patients in the data, and their numbers
Place = tuple[int, int | None, Mapping[str, Cell]]  # of a row: its patient, its number among the events, and the row
# A row that cannot be used, as errors name it; patients have pseudonyms there.
_ROW = re.compile(
    r'(?P<table>[^/:]+)\.parquet:(?P<row>\d+): (?P<code>E_\w+) (?:patient \w+: )?(?P<what>(?:"(?P<column>[^"]*)")?.*)'
)


@dataclass(frozen=True)
class Form:
    """Columns of one table of a run, by which its rows are told from those of others.

    Args:
        source: the table as the recipe has it, with the columns by which it is read here.
        timed: columns of time and code; none for a table of facts.
        needs: those of them that a row has to have.
        others: value, number of the set, or the facts.
    """

    source: EventSource
    name: str
    timed: tuple[str, ...]
    needs: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.timed, *self.others)


@dataclass(frozen=True)
class Tables:
    """The tables that a run reads; `landmark` is the column with the landmark of each patient, "" without one."""

    run: LoadedRun
    forms: tuple[Form, ...]
    landmark: str

    @staticmethod
    def of(run: LoadedRun) -> "Tables":
        """Read the forms of a run's tables from its recipe, and from the tables themselves where names are `auto`."""
        forms = tuple(_form(run, number, source) for number, source in enumerate(run.recipe.data.events))
        landmark = run.recipe.events.landmark
        return Tables(run, forms, landmark if isinstance(landmark, str) else "")

    @property
    def columns(self) -> list[str]:
        """Columns of the rows of a request, that of the id first."""
        names = [name for form in self.forms for name in form.columns]
        return list(dict.fromkeys([ID, *names, *([self.landmark] if self.landmark else [])]))

    def read(self, instances: Sequence[Instance]) -> EventData:
        """Patients of a request as the model reads them; those of `EventData.ids` are places in the request.

        Raises:
            RequestError: a value cannot be used, or a patient lacks its landmark; names the place in the request.
            SourceError: as `unpad embed --data`: no code of a table is known.
        """
        rows = {form.name: self._rows(form, instances) for form in self.forms}
        tables = {form.name: self._table(form, rows[form.name], instances) for form in self.forms}
        recipe = self.run.recipe
        labels = recipe.events.labels if self.landmark else None
        if labels is not None:
            rows["labels"], tables["labels"] = self._landmarks(labels, instances)
        with in_memory(tables) as places:
            if labels is not None:
                read = {"path": str(places["labels"]), "id": ID, "censored": "keep", "missing": "keep"}
                labels = labels.model_copy(update=read)
            sources = [form.source.model_copy(update={"path": str(places[form.name])}) for form in self.forms]
            moved = with_tables(recipe, sources, labels)
            stop = {"data": moved.data.model_copy(update={"on_bad_row": "stop"})}
            with _at_request(rows, places.values()):
                data = cast(EventData, open_data(moved.model_copy(update=stop), self.run.files, Wanted.NEW))
                refuse_unknown(data)
        present = {int(one) for one in data.ids.tolist()}
        for place in range(len(instances)):
            if place not in present:
                raise RequestError("the patient has no event: give at least one", f"instances[{place}].events")
        return data

    def check(self, instances: Sequence[Instance]) -> None:
        """Refuse too many rows, rows with unknown columns, and rows of no table.

        Raises:
            RequestError: names the row.
        """
        if (num := sum(len(one.events) for one in instances)) > MOST_EVENTS:
            raise RequestError(f"{num:,} events, at most {MOST_EVENTS:,} are taken: ask in parts", "instances")
        columns, needs = self.columns[1:], [form.needs for form in self.forms if form.timed]
        facts = {name for form in self.forms if not form.timed for name in form.others} | {self.landmark}
        for place, instance in enumerate(instances):
            for number, row in enumerate(instance.events):
                param = f"instances[{place}].events[{number}]"
                for name in row:
                    if name not in columns:
                        what = f'there is no column "{name[:60]}": {nearest(name[:60], columns)}'
                        raise RequestError(what, f"{param}.{name[:60]}")
                given = {name for name, cell in row.items() if cell is not None}
                is_timed = any(given >= set(one) for one in needs)
                if not is_timed and not (given and given <= facts):
                    wanted = " or ".join(map(" and ".join, needs))
                    raise RequestError(f"the row is of no table of the run: an event needs {wanted}", param)

    def _rows(self, form: Form, instances: Sequence[Instance]) -> list[Place]:
        """Places of the rows of a table in the request; of a table of facts those of patients."""
        if not form.timed:
            return [(place, None, {}) for place in range(len(instances))]
        earlier = [one.needs for one in self.forms[: self.forms.index(form)] if one.timed]
        return [
            (place, number, row)
            for place, instance in enumerate(instances)
            for number, row in enumerate(instance.events)
            if _has(row, form.needs) and not any(_has(row, needs) for needs in earlier)
        ]

    def _table(self, form: Form, rows: Sequence[Place], instances: Sequence[Instance]) -> pa.Table:
        if not form.timed:
            return _facts(form.others, instances)
        columns = {name: _column(name, [row.get(name) for *_, row in rows], form.timed) for name in form.columns}
        empty = pa.nulls(len(rows), pa.float64())  # of a column of values without any
        for name in form.others:
            columns[name] = empty if columns[name].null_count == len(rows) else columns[name]
        return pa.table({ID: pa.array([place for place, *_ in rows], pa.int64()), **columns})

    def _landmarks(self, labels: EventLabels, instances: Sequence[Instance]) -> tuple[list[Place], pa.Table]:
        """The table of labels of a request, landmarks without outcomes, and the places of its rows.

        Raises:
            RequestError: a patient has none.
        """
        given = [(place, at) for place, one in enumerate(instances) for at in _given(one, self.landmark)]
        bare = sorted(set(range(len(instances))) - {place for place, _ in given})
        if bare:
            what = f"the patient has no {self.landmark}, the time of the prediction: give it in one of the rows"
            raise RequestError(what, f"instances[{bare[0]}].events")
        unknown = pa.nulls(len(given), pa.float64())
        outcomes = {name: unknown for name in (labels.label, labels.time, labels.event, labels.duration) if name}
        at = _column(self.landmark, [cell for _, cell in given])
        ids = pa.array([place for place, _ in given], pa.int64())
        return [(place, None, {}) for place, _ in given], pa.table({ID: ids, **outcomes, self.landmark: at})


def _form(run: LoadedRun, number: int, source: EventSource) -> Form:
    name = f"{Path(source.path).stem.replace('*', '') or 'events'}-{number}"
    if source.static:
        return Form(source.model_copy(update={"id": ID, "layout": "table"}), name, (), (), tuple(source.static))
    layout = _layout(run, source)
    names = AUTO[layout]

    def column(asked: str, kind: str) -> str:
        return names[kind][0] if asked == "auto" else asked

    time, code = column(source.time, "time"), column(source.code, "code")
    value = None if source.value is None else column(source.value, "value")
    read: dict[str, Any] = {"id": ID, "time": time, "code": code, "value": value}
    read["layout"] = "meds" if layout == "meds" else "table"
    if layout == "patients" and source.negative == "auto":
        read["negative"] = "error"
    named = tuple(name for name in (source.set, source.value_unit) if name not in (None, "auto"))
    needs = (code,) if layout == "meds" else (time, code)
    others = (*(() if value is None else (value,)), *named)
    return Form(source.model_copy(update=read), name, (time, code), needs, others)


def _layout(run: LoadedRun, source: EventSource) -> str:
    """Layout of a source; that of tables where its files are gone."""
    try:
        return find_files(source, resolve_path(run.recipe.data, source.path))[1]
    except (UnpadError, OSError):
        return "table" if source.layout == "auto" else source.layout


def check_sets(data: EventData, most: int) -> None:
    """Refuse a patient with so many sets that the pass of the model would hold up others.

    Raises:
        RequestError: names the patient.
    """
    lengths = np.diff(data.sets.sets_of)
    for row in np.flatnonzero(lengths > most)[:1].tolist():
        what = f"the patient has {lengths[row]:,} sets of events, at most {most:,} are taken here: leave out the oldest"
        raise RequestError(what, f"instances[{data.ids[row]}].events")


# --------------------------------------------------------------------------- tables in memory


def _has(row: Mapping[str, Cell], names: Sequence[str]) -> bool:
    return all(row.get(name) is not None for name in names)


def _column(name: str, cells: Sequence[Cell], codes: Sequence[str] = ()) -> pa.Array:
    """Cells as one type: numbers, or texts where one is a text or the column is that of codes."""
    if any(type(cell) is str for cell in cells) or (codes and name == codes[-1]):
        return pa.array([None if cell is None else str(cell) for cell in cells], pa.string())
    if all(type(cell) is int or cell is None for cell in cells):
        return pa.array(cells, pa.int64())
    return pa.array([None if cell is None else float(cell) for cell in cells], pa.float64())


def _given(instance: Instance, name: str) -> list[Cell]:
    """The different cells that the rows of a patient have in a column."""
    return list(dict.fromkeys(row[name] for row in instance.events if row.get(name) is not None))


def _facts(names: Sequence[str], instances: Sequence[Instance]) -> pa.Table:
    """One row per patient with the facts that any of its rows has.

    Raises:
        RequestError: two rows differ in a fact.
    """
    columns: dict[str, list[Cell]] = {name: [] for name in names}
    for place, instance in enumerate(instances):
        for name in names:
            given = _given(instance, name)
            if len(given) > 1:
                what = f"rows of one patient differ in {name}, which is a fact that holds for all of them"
                raise RequestError(what, f"instances[{place}].events")
            columns[name].append(given[0] if given else None)
    ids = pa.array(range(len(instances)), pa.int64())
    return pa.table({ID: ids, **{name: _column(name, cells) for name, cells in columns.items()}})


@contextmanager
def in_memory(tables: Mapping[str, pa.Table]) -> Iterator[dict[str, Path]]:
    """Paths of tables whose contents are in memory; on the disk are links to them alone, as long as the context is.
    Only Linux has such files; elsewhere the contents are in a temporary folder."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="unpad-")))
        places = {}
        for name, table in tables.items():
            places[name] = folder / f"{name}.parquet"
            if sys.platform != "linux":
                pq.write_table(table, places[name])
                continue
            file = stack.enter_context(os.fdopen(os.memfd_create(f"unpad-{name}"), "wb"))
            pq.write_table(table, file)
            file.flush()
            places[name].symlink_to(f"/proc/{os.getpid()}/fd/{file.fileno()}")
        yield places


@contextmanager
def _at_request(rows: Mapping[str, Sequence[Place]], files: Iterable[Path]) -> Iterator[None]:
    """Errors inside name the place in the request that a row of a table came from, or the table, and no file."""
    try:
        yield
    except UnpadError as error:
        if found := _ROW.search(next(iter(error.details), f"{error.where}: {error.summary}")):
            place, number, row = rows[found["table"]][int(found["row"]) - 1]
            column = f".{found['column']}" if found["column"] in row else ""
            at = "" if number is None else f"[{number}]{column}"
            raise RequestError(f"{found['code']} {found['what']}", f"instances[{place}].events{at}") from None
        texts = [error.summary, error.fix, *error.details]
        for folder in {f"{file.parent}/" for file in files}:
            texts = [text.replace(folder, "") for text in texts]
        raise SourceError(texts[0], fix=texts[1], details=texts[2:]) from None


# --------------------------------------------------------------------------- answers


def answers_of(run: LoadedRun) -> dict[str, Any]:
    """Facts on a run's `predictions`: names of its probabilities and of its risk, and the days from the landmark within
    which its hazards give the probabilities; None where these are not of hazards."""
    model, labels, (_, has_hazards) = run.model, run.recipe.events.labels, predicts(run)
    assert isinstance(model, PredictsSets), "a run of patients"
    horizon = model.horizon if has_hazards else None
    num_competing = len(labels.competing) if labels is not None and horizon is not None else 0
    sizes = {"log_p": (0, len(class_names(run)) or 2), "competing": (0, num_competing), "risk": (0,)}
    named = named_predictions(run, {name: np.zeros(size) for name, size in sizes.items()})
    return {"predictions": list(named), "horizon_days": horizon}


def predictions(run: LoadedRun, data: EventData, instances: Sequence[Instance], passes: Passes) -> list[dict[str, Any]]:
    """Every patient of a request as `unpad embed` writes it; of several landmarks, every one of them."""
    marks, answers = pa.table(mark_patients(data).columns()), _named_answers(data, instances)
    for places, numbers in passes:
        rows = pa.table(named_predictions(run, numbers)).to_pylist() or [{}] * len(places)
        vectors = [{"vector": vector} for vector in numbers["vector"].tolist()] if "vector" in numbers else rows
        for place, *parts in zip(places.tolist(), rows, marks.take(places).to_pylist(), vectors, strict=True):
            for part in parts:
                answers[place] |= part
    return answers


def _named_answers(data: EventData, instances: Sequence[Instance]) -> list[dict[str, Any]]:
    """The beginning of an answer for every patient of the data, or example of one, in the order of the request."""
    answers: list[dict[str, Any]] = [{"id": instances[int(place)].id} for place in data.ids.tolist()]
    if data.landmarks is not None:
        for answer, landmark in zip(answers, data.landmarks.tolist(), strict=True):
            answer["landmark"] = landmark
    return answers


def explanations(
    run: LoadedRun,
    data: EventData,
    instances: Sequence[Instance],
    parts: Sequence[tuple[int, Mapping[str, np.ndarray]]],
) -> list[dict[str, Any]]:
    """Per patient and set, the probability had the record ended with it, of each of several classes, and its share of
    attention.

    `days` are those from the landmark, null for facts without a time.

    Args:
        parts: places of patients in the data, and numbers of their sets, in order.
    """
    answers, sets = _named_answers(data, instances), data.sets
    for place, answer in enumerate(answers):
        mine = slice(*sets.sets_of[place : place + 2].tolist())
        timed = zip(sets.times[mine].tolist(), sets.timeless[mine].tolist(), strict=True)
        answer["days"] = [None if timeless else day for day, timeless in timed]
    for place, numbers in parts:
        for name, values in {**by_class(run, numbers["probability"]), "attention": numbers["attention"]}.items():
            answers[place].setdefault(name, []).extend(values.tolist())
    return answers
