"""`unpad predict`: class, answer, reply or risk of data, a row for each of its rows, by one verb for every family.

Rows that cannot be used stop it, as they stop training; with `data.on_bad_row=quarantine` their fault stands in their
row, and the others go on.
"""

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from unpad.data.rows import read_classes
from unpad.data.sources.images import SUFFIXES, checked_path, contained_bytes, file_bytes
from unpad.data.sources.reader import read
from unpad.data.sources.row import Row, require_text
from unpad.errors import RecipeError, SourceError
from unpad.inference import bulk
from unpad.inference.embed import open_patients, patient_columns, predicts
from unpad.inference.engine import Request
from unpad.inference.images import Answer, check_asks, classify_each, is_of_images, ledger, list_images
from unpad.inference.loaded import LoadedRun
from unpad.models.contract import PredictsSets
from unpad.models.vision_language.model import VisionLanguage
from unpad.storage.parquet import check_file, write_table
from unpad.storage.paths import user_path
from unpad.storage.remote import data_path
from unpad.terminal.printing import escaped
from unpad.terminal.table import cells, number_of, text_table

FILES = (".csv", ".jsonl", ".parquet")  # of predictions
TABLES = (".csv", ".tsv", ".jsonl")
PICTURES = 'write rows such as {"image": "cat.png"}, or a CSV with this column'
SHOWN = 20  # rows on a terminal
SAID = ("class", "answer", "reply")
WIDEST = 28  # columns of the terminal for a text
# Fields of rows that files have, and a terminal has no room for.
DETAILS = {
    "system", "prompt_tokens", "tokens", "finished", "seed", "unknown_characters", "mostly_unknown", "notes",
    "events", "unknown_codes", "outside_range", "after_landmark", "trained",
}  # fmt: skip


@dataclass(frozen=True)
class Predictions:
    """Predictions of data.

    Args:
        rows: fields by name, one for each row of the data; `fault` is what is wrong with one that has no prediction.
        unit: name of the rows, plural.
        lines: what the run does not know of the data; faults: rows that cannot be used, of tables of patients too.
        private: whether only the owner may read them.
    """

    rows: list[dict[str, Any]]
    unit: str
    lines: Sequence[str] = ()
    faults: int = 0
    private: bool = False

    def table(self) -> list[str]:
        """The first rows as a table for a terminal, without details."""
        used = {name for row in self.rows for name, value in row.items() if value or name in SAID} - DETAILS
        names = [name for name in dict.fromkeys(name for row in self.rows for name in row) if name in used]
        names = [name for name in names if name != "line" or not used & {"id", "image"}]
        shown = [[_shown(name, row.get(name)) for name in names] for row in self.rows[:SHOWN]]
        more = len(self.rows) - SHOWN
        left = [place for place, name in enumerate(names) if not name.startswith("probability") and name != "risk"]
        return text_table(names, shown, left=left) + ([f"... and {more:,} more: --out FILE.csv"] if more > 0 else [])

    def summary(self, out: Path) -> str:
        """What was written, for the terminal."""
        bad = sum(bool(row.get(bulk.FAULT)) for row in self.rows)
        more = f", without {number_of(self.faults, 'bad rows')}" if self.faults else ""
        more = f", {bad:,} with a fault" if bad else more
        return f"{number_of(len(self.rows) - bad, self.unit)} predicted{more}: {out}"


def _shown(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1%}" if name.startswith("probability") else f"{value:.4g}"
    text = "" if value is None else escaped("; ".join(map(str, value)) if isinstance(value, list) else str(value))
    text = text or ("(no answer)" if name in SAID and value == "" else "")
    if cells(text) <= WIDEST or name in ("mark", bulk.FAULT):
        return text
    is_path = name == "image"  # whose end tells it from others
    while cells(text) >= WIDEST:
        text = text[1:] if is_path else text[:-1]
    return f"…{text}" if is_path else f"{text}…"


def predict(run: LoadedRun, data: Path | None, out: Path | None = None, *, same_seed: bool = False) -> Predictions:
    """Predict every row of data, and write the predictions as CSV, JSON lines or parquet if a file is named for them.

    Args:
        data: pictures: a file, a folder, or a table with `image`; patients: tables in the form of the run's, or None
            for its own; questions and texts: a table as `answer_questions` and `answer_prompts` read it.
        out: replaced; replies are continued where an earlier command was ended.
        same_seed: whether all replies draw with the seed of the settings.

    Raises:
        RecipeError: the run predicts nothing, or nothing of such data.
        SourceError: the data has no row that can be used, or one that cannot, unless the recipe quarantines these.
        UnpadError: as `bulk.answer_rows`.
    """
    if out is not None:
        check_file(out, *FILES)
        if out.suffix.lower() not in FILES:
            raise RecipeError("the name does not tell the format", where=str(out), fix=f"name it {out.name}.csv")
    _refuse_other(run, data)
    if isinstance(run.model, PredictsSets):
        found = _patients(run, data)
    elif data is not None and is_of_images(run):
        found = _pictures(run, data)
    else:
        assert data is not None, "it was checked"
        return _replies(run, data, out, same_seed)
    if out is not None:
        write_table(out, found.rows, private=found.private)
    return found


def _refuse_other(run: LoadedRun, data: Path | None) -> None:
    """Refuse a picture where the run reads none, and no data where it has none, with what it reads."""
    is_patients, is_picture = isinstance(run.model, PredictsSets), data is not None and data.suffix.lower() in SUFFIXES
    if is_of_images(run):
        reads, is_picture = "pictures: a file, a folder, or a table with `image`", False
    elif isinstance(run.model, VisionLanguage):
        reads = (
            f"a table with `image` and `question`; one picture: unpad infer {run.folder} --image FILE --question TEXT"
        )
        is_picture = is_picture or (data is not None and data.is_dir())
    else:
        reads = "tables in the form of the run's" if is_patients else "a table with `prompt` or `messages`, or a text"
    if is_picture:
        raise RecipeError("a picture alone asks this run nothing", where=str(data), fix=f"name {reads}")
    if data is None and not is_patients:
        raise RecipeError("no data is named", where=str(run.folder), fix=f"name {reads}")


def _patients(run: LoadedRun, path: Path | None) -> Predictions:
    if not any(predicts(run)):
        fix = "train with events.labels, or use `unpad embed` for its vectors"
        raise RecipeError("this run predicts no outcome", where=str(run.folder), fix=fix)
    data, lines = open_patients(run, path)
    columns, remarks = patient_columns(run, data, is_new=path is not None)
    rows, num_bad = pa.table(columns).to_pylist(), len(data.bad_rows) if path is not None else 0
    return Predictions(rows, data.unit, [*lines, *remarks], num_bad, private=True)


def _pictures(run: LoadedRun, path: Path) -> Predictions:
    rows = list(_pictures_of(run, path))
    answers = classify_each(run, [(Path(row.where), row.ask) for row in rows], 1)
    found = [row.given | _classified(answer) for row, answer in zip(rows, answers, strict=True)]
    faults = [(row.where, answer.fault) for row, answer in zip(rows, answers, strict=True) if answer.fault]
    if not rows:
        raise SourceError("there are no pictures in it", where=str(path), fix=PICTURES)
    bulk.refuse_faults(faults, len(rows), bulk.stops(run))
    return Predictions(found, "pictures", ledger(run, answers), len(faults))


def _classified(answer: Answer) -> dict[str, Any]:
    name, p = answer.top[0] if answer.top else (None, None)
    return {"class": name, "probability": p, **answer.remarks()}


def _pictures_of(run: LoadedRun, path: Path) -> Iterator[bulk.BulkRow[bytes]]:
    """The rows of a table of pictures, or a row for every file of a folder."""
    if path.suffix.lower() not in TABLES:
        for image in list_images([path]):
            yield bulk.BulkRow(str(image), {"image": str(image)}, partial(file_bytes, image))
        return
    field, root = run.recipe.data.images[0].field or "image", os.path.realpath(path.parent)

    def ask(number: int, row: Row) -> tuple[dict[str, Any], Callable[[], bytes]]:
        return {}, partial(contained_bytes, path.parent / checked_path(row.text(field)), root)

    rows = read(bulk.table_file(path), run.recipe.data, (field,), ("id",))
    yield from bulk.rows_of(path, rows, PICTURES, ("id", field), ask)


def _replies(run: LoadedRun, path: Path, out: Path | None, same_seed: bool) -> Predictions:
    is_asked = isinstance(run.model, VisionLanguage)
    with TemporaryDirectory() as folder:
        part = Path(folder, "lines") if out is None else Path(f"{out}.part.jsonl")
        lines = out if out is not None and out.suffix.lower() == ".jsonl" else part
        if is_asked:
            written = bulk.answer_questions(run, path, lines, stops=bulk.stops(run))
        else:
            written = bulk.answer_prompts(run, path, lines, same_seed=same_seed)
        rows = [json.loads(line) for line in lines.read_bytes().splitlines()]
    for row in rows:
        del row["made_by"]
    if out is not None and lines is part:
        write_table(out, rows)
        part.unlink()
    return Predictions(rows, "questions" if is_asked else "prompts", written.unread, written.faults)


# --------------------------------------------------------------------------- from Python


def predict_rows(run: LoadedRun, data: str | Path | None) -> list[dict[str, Any]]:
    """The rows of `predict`."""
    return predict(run, None if data is None else data_path(str(data))).rows


def classify_images(run: LoadedRun, images: Any) -> list[dict[str, Any]]:
    """Rows of images, as `predict` gives them, with all classes; arguments and errors as `LoadedRun.classify`."""
    images = [images] if isinstance(images, str | Path | bytes) else images
    names = [Path(one) if isinstance(one, str | Path) else Path(f"image {place}") for place, one in enumerate(images)]
    contents = [partial(_content, image) for image in images]
    answers = classify_each(run, [*zip(names, contents, strict=True)], len(read_classes(run.files)))
    return [{"image": str(answer.path), **_classified(answer), "top": dict(answer.top)} for answer in answers]


def _content(image: Any) -> bytes:
    """Bytes of an image: of its file, or of a PNG of a picture of Pillow."""
    if isinstance(image, str | Path):
        return file_bytes(user_path(image))
    if isinstance(image, bytes):
        return image
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def ask_rows(run: LoadedRun, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of questions with their answers; arguments and errors as `LoadedRun.ask`."""
    check_asks(run)

    def ask(row: Mapping[str, Any]) -> tuple[Request, bulk.Report]:
        image = row.get("image")
        paths = [user_path(one) for one in (image if isinstance(image, list) else [image]) if one is not None]
        return bulk.ask_question(run, paths, require_text(row.get("question"), '"question"'))

    asked = (bulk.BulkRow(f"rows:{number}", {}, partial(ask, row)) for number, row in enumerate(rows, 1))
    answers = bulk.answers_of(bulk.questions_to(run, Path("rows"), "", lambda: asked, stops=False), asked)
    found = ({**row, **answer} for row, answer in zip(rows, answers, strict=True))
    return [{name: value for name, value in answer.items() if name != "line"} for answer in found]
