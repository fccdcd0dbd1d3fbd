"""`unpad embed`: embeddings of patients or of their sets, as a parquet file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np
import pyarrow as pa
import torch

from unpad.data.family import next_command, open_data
from unpad.data.measuring import Measuring, once_each
from unpad.data.patient_marks import Marks, ledger, mark_patients, mark_sets, refuse_unknown
from unpad.data.patients import EventData
from unpad.data.sources.split import PARTS, Split, Wanted
from unpad.errors import DiskError, RecipeError, SourceError
from unpad.inference.loaded import LoadedRun
from unpad.inference.patients import class_names, gives_probability, likeliest, predict, probabilities, trains
from unpad.models.contract import PredictsSets
from unpad.models.set_sequence.event_sets import EventSets
from unpad.nn.linear import independent_rows
from unpad.recipes.data import EventLabels, EventSource
from unpad.recipes.recipe import Recipe
from unpad.storage.parquet import write_parquet
from unpad.storage.paths import refuse_format
from unpad.terminal.table import number_of

Level = Literal["patient", "set"]


@dataclass(frozen=True)
class Vectors:
    """Embeddings, in the order of the patients in the data and of time within a patient.

    Args:
        patient: (num_rows,) int64, index of the patient in the data.
        embedding: (num_rows, dim) float32.
        set_index: (num_rows,) int32, counted from 0 in every patient; None if rows are patients.
        days_from_landmark: (num_rows,) float32, NaN for a set of facts; None with `set_index`.
    """

    patient: np.ndarray
    embedding: np.ndarray
    set_index: np.ndarray | None = None
    days_from_landmark: np.ndarray | None = None


def embed_file(run: LoadedRun, path: Path | None, level: Level, out: Path) -> list[str]:
    """Write the embeddings of patients to a parquet file and return its description.

    Its columns are the patient's id as in the data, and its `landmark` where it may have several; for sets `set_index`
    and `days_from_landmark` (null for facts); for patients the columns of `predicted`; for patients given at `path` the
    columns of `Marks` and `trained`; and `embedding`, a list of fp32 numbers of fixed length.

    Args:
        path: data in the form that the run was trained on; None for the run's own.

    Raises:
        RecipeError: the run does not read patients, or files are missing at `path`.
        SourceError: the data cannot be used, or no code of a table is known to the run.
    """
    if not isinstance(run.model, PredictsSets):
        fix = f"use a run of `unpad train events`; this one: {next_command(run.recipe, str(run.folder))}"
        raise RecipeError("this run is not one of patients", where=str(run.folder), fix=fix)
    if out.suffix.lower() in (".csv", ".jsonl"):
        fix = f"name it {out.stem}.parquet; risks as a table: unpad predict RUN DATA --out {out.name}"
        raise RecipeError("vectors are written as parquet", where=str(out), fix=fix)
    refuse_format(out, ".parquet")
    data, lines = open_patients(run, path)
    vectors = embed(run, data, level)
    if vectors.set_index is None:
        columns, remarks = patient_columns(run, data, is_new=path is not None)
    else:
        columns = _names(run, data, vectors.patient)
        columns["set_index"] = pa.array(vectors.set_index)
        columns["days_from_landmark"] = pa.array(vectors.days_from_landmark, from_pandas=True)
        compared, remarks = _compared(run, data, mark_sets(data), vectors.patient) if path is not None else ({}, [])
        columns |= compared
    flat = pa.array(vectors.embedding.reshape(-1))
    columns["embedding"] = pa.FixedSizeListArray.from_arrays(flat, vectors.embedding.shape[1])
    write_parquet(out, columns, private=True)
    with_sets, size = np.unique(vectors.patient), vectors.embedding.shape[1]
    sets = "" if level == "patient" else f"{number_of(len(vectors.patient), 'sets')} of "
    patients = number_of(len(np.unique(data.table.group[with_sets])), "patients")
    rows = patients if data.landmarks is None else f"{number_of(len(with_sets), 'examples')} of {patients}"
    lines += [*remarks, f"{sets}{rows}, {number_of(size, 'numbers')} each: {out}"]
    without = len(data.table.positions) - len(with_sets)
    if path is None and data.table.num_test:
        lines.append(f"without {number_of(data.table.num_test, data.unit)} of the test part; --data reads any patients")
    return lines + ([f"no row for {number_of(without, f'other {data.unit}')} without a set"] if without else [])


def open_patients(run: LoadedRun, path: Path | None) -> tuple[EventData, list[str]]:
    """Patients at a path as the run reads them, and lines on what it does not know of them; or the run's own.

    Raises:
        RecipeError: files are missing at `path`.
        SourceError: the data cannot be used, or no code of a table is known to the run.
    """
    if path is None:
        return cast(EventData, run.data()), []
    data = cast(EventData, open_data(moved(run.recipe, path), run.files, Wanted.NEW))
    refuse_unknown(data)
    return data, ledger(data, mark_patients(data))


def patient_columns(run: LoadedRun, data: EventData, is_new: bool) -> tuple[dict[str, pa.Array], list[str]]:
    """Columns of every patient, id and `predicted` first, with marks and `trained` of new ones; and lines on them."""
    ids = np.arange(len(data.table))
    columns = _names(run, data, ids) | predicted(run, data, known=not is_new)
    compared, remarks = _compared(run, data, mark_patients(data), ids) if is_new else ({}, [])
    return columns | compared, remarks


def _names(run: LoadedRun, data: EventData, patient: np.ndarray) -> dict[str, pa.Array]:
    """Columns by which rows are known: the id as in the data, and the landmark where a patient may have several."""
    name = run.recipe.data.events[0].id
    columns = {"id" if name == "auto" else name: pa.array(data.ids[patient])}
    return columns if data.landmarks is None else columns | {"landmark": pa.array(data.landmarks[patient])}


def _compared(
    run: LoadedRun, data: EventData, marks: Marks, patient: np.ndarray
) -> tuple[dict[str, pa.Array], list[str]]:
    is_trained, remark = trained(run, data)
    return marks.columns() | {"trained": is_trained.take(pa.array(patient))}, [remark]


def predicted(run: LoadedRun, data: EventData, known: bool) -> dict[str, pa.Array]:
    """Columns with predictions and labels of every patient.

    `probability` of the outcome if the model was trained to classify, and `probability_NAME` of every competing event
    that has hazards, or of every one of several classes, and then `prediction`, the likeliest; `risk`, the hazard
    summed over all bins, if it was trained on hazards; for the run's own data `split`, train or valid, and `label`, 0,
    1 or the class, null if unknown.

    Args:
        known: whether the data is the run's own.
    """
    columns: dict[str, pa.Array] = {}
    if any(predicts(run)):
        ids = np.arange(len(data.table.positions))
        with independent_rows():
            columns = named_predictions(run, vars(predict(Measuring(run.model, data, ids, run.recipe.plan))))
    if known:
        columns["split"] = pa.array([PARTS[Split(side)] for side in data.table.split.tolist()])
        if data.labels is not None:
            values = pa.array(data.labels, mask=data.labels < 0)
            columns["label"] = pa.array(data.classes, pa.string()).take(values) if data.classes else values
    return columns


def named_predictions(run: LoadedRun, numbers: Mapping[str, np.ndarray]) -> dict[str, pa.Array]:
    """Columns of predictions under the names that people read; `numbers` as in `PatientPredictions`."""
    classifies, has_hazards = predicts(run)
    columns: dict[str, pa.Array] = {}
    if classifies:
        p = probabilities(run, numbers["log_p"], numbers["competing"])
        columns |= {name: pa.array(values) for name, values in p.items()}
    if classifies and class_names(run):
        columns["prediction"] = pa.array(likeliest(run, numbers["log_p"]), pa.string())
    return columns | ({"risk": pa.array(numbers["risk"])} if has_hazards else {})


def trained(run: LoadedRun, data: EventData) -> tuple[pa.BooleanArray, str]:
    """True for patients whose id is one of those that the run trained on, null for all if its own data cannot be read;
    and a line on it."""
    ids = data.identities()
    try:
        known = run.ids_by_part()[PARTS[Split.TRAIN]]
    except (DiskError, RecipeError, SourceError) as error:  # the run may be used without its data
        why = f"the run's own data cannot be read: {error.what}"
        return pa.nulls(len(ids), pa.bool_()), f"not compared by id with those of the run: {why}"
    found = [one in known for one in ids]
    num_found, num = len({one for one in ids if one in known}), len(set(ids))
    return pa.array(found, pa.bool_()), f"the run trained on {num_found:,} of {number_of(num, 'patients')}, by id"


def predicts(run: LoadedRun) -> tuple[bool, bool]:
    """True if a run gives a probability of the outcome, and true if it gives a risk over time."""
    assert isinstance(run.model, PredictsSets), "a run of patients"
    labels = run.recipe.events.labels  # without labels a head learns nothing, regardless of its weight
    classifies = labels is not None and bool(labels.label or labels.horizon) and gives_probability(run.model)
    return classifies, labels is not None and labels.duration is not None and trains(run.model, "hazard")


def moved(recipe: Recipe, path: Path, *, labelled: bool = False) -> Recipe:
    """The recipe with the paths of other patients, without a split.

    Args:
        path: replaces the recipe's single table or folder, or is a folder with all its files under their names.
        labelled: whether their outcomes are read; else labels are read for a column of landmarks alone.

    Raises:
        RecipeError: a file is missing.
    """
    labels = recipe.events.labels
    if not labelled and labels is not None:
        keep = {"censored": "keep", "missing": "keep"}
        labels = labels.model_copy(update=keep) if isinstance(recipe.events.landmark, str) else None
    paths = [source.path for source in recipe.data.events]
    names = dict.fromkeys(paths if labels is None else [*paths, labels.path])
    places = {name: path / Path(name).name for name in names}
    if len(names) == 1 and path.exists() and not all(place.exists() for place in places.values()):
        places = dict.fromkeys(names, path)
    for name, place in places.items():
        if not place.exists():
            files = ", ".join(sorted(Path(n).name for n in names))
            fix = f"name a folder with files of the names in the recipe: {files}"
            raise RecipeError(f"there is nothing in the place of {name}", where=str(place), fix=fix)
    resolved = {name: {"path": str(place.resolve())} for name, place in places.items()}
    sources = [source.model_copy(update=resolved[source.path]) for source in recipe.data.events]
    return with_tables(recipe, sources, labels and labels.model_copy(update=resolved[labels.path]))


def with_tables(recipe: Recipe, sources: Sequence[EventSource], labels: EventLabels | None) -> Recipe:
    """The recipe with other tables of events and of labels, and without a split."""
    data = recipe.data.model_copy(update={"events": list(sources)})
    events = recipe.events.model_copy(update={"labels": labels, "split": None})
    return recipe.model_copy(update={"data": data, "events": events})


@torch.no_grad()
def embed(run: LoadedRun, data: EventData, level: Level) -> Vectors:
    """Embed all patients, in the model's own precision; no embedding depends on the batch.

    Args:
        data: the patients.
    """
    model = run.model
    assert isinstance(model, PredictsSets), "a run of patients"
    ids = np.arange(len(data.table))
    patients, vectors, times = [np.zeros(0, np.int64)], [], [np.zeros(0, np.float32)]
    for micro in Measuring(model, data, ids, run.recipe.plan, targets=once_each).micros():
        batch = data.load(micro)
        with independent_rows():
            vectors.append(model.vectors(batch.to(model.device), level).float().cpu().numpy())
        mine, sets = micro.seq_ids, batch.require(EventSets)
        patients.append(mine if level == "patient" else np.repeat(mine, sets.history.lengths().numpy()))
        times.append(sets.times.numpy())
    patient = np.concatenate(patients)
    order = np.argsort(patient, kind="stable")  # the sets of a patient stay in their order
    patient, embedding = patient[order], np.concatenate(vectors or [np.zeros((0, 1), np.float32)])[order]
    if level == "patient":
        return Vectors(patient, embedding)
    set_index = (np.arange(len(patient)) - np.searchsorted(patient, patient)).astype(np.int32)
    days = np.where(data.sets.timeless, np.float32(np.nan), np.concatenate(times)[order])
    return Vectors(patient, embedding, set_index, days)
