"""`unpad infer --file`: the questions of a table, each about images of its own, answered in bulk.

A row that cannot be answered is written with its fault, and the others go on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unpad.data.pictures.album import seen_pictures
from unpad.data.sources.example import BadRow, place_of
from unpad.data.sources.faults import RowFault
from unpad.data.sources.files import FORMATS, SourceFile
from unpad.data.sources.images import ImageExample
from unpad.data.sources.reader import read, reading
from unpad.data.sources.vqa import asked
from unpad.data.vqa import question_about_all
from unpad.errors import RecipeError, SourceError
from unpad.inference.answers import greedy
from unpad.inference.bulk import FAULT, Bulk, BulkRow, Written, answer_rows, digest_of, fault_text, remedy, summary
from unpad.inference.engine import Engine, Request
from unpad.inference.generate import PIECE, ROWS
from unpad.inference.heard import Heard
from unpad.inference.images import check_asks, examine_image
from unpad.inference.loaded import LoadedRun
from unpad.inference.prompts import lost_of
from unpad.inference.steps import banned_ids, check, token_lists
from unpad.terminal.progress import held, progress

WANTED, OPTIONAL = ("image",), ("question", "caption", "id")
EXAMPLE = 'write rows such as {"image": "cat.png", "question": "Which animal?"}, or a CSV with these columns'


@dataclass
class QuestionRow:
    """A question of the table.

    Args:
        given: `id`, `image` and `question` as they stand in the row.
        paths: of the images; root: the real folder that must contain them.
        images: the images, once they were looked at.
    """

    run: LoadedRun
    line: int
    given: dict[str, Any]
    paths: tuple[Path, ...]
    question: str
    root: str
    images: list[ImageExample] = field(default_factory=list)

    def ask(self) -> Request:
        run, model, settings = self.run, self.run.generator, greedy(self.run)
        looked = [examine_image(path, root=self.root) for path in self.paths]
        for one in looked:
            if isinstance(one, BadRow):
                raise RowFault(one.code, one.what, one.fix)
        self.images = [one for one in looked if isinstance(one, ImageExample)]
        with held():  # the work on one row is no progress of its own
            batch = question_about_all(run.recipe, run.tokenizer, self.images, self.question).prompts([0])
        try:
            check(model, token_lists(batch), settings)
        except RecipeError as error:
            raise RowFault("E_CONTEXT", error.what, "shorten the question, or use smaller images") from None
        return Request(batch, settings, sorted(run.tokenizer.stop_ids), banned_ids(model, run.tokenizer))

    def told(self, heard: Heard) -> dict[str, Any]:
        """The fields of `unpad infer --json`, and the number of tokens and the reason of the end."""
        ids, seen = heard.tokens(), seen_pictures(self.run.files)
        marks = [seen.mark(one.mode, (one.width, one.height)) for one in self.images] if seen is not None else []
        return {
            "answer": self.run.tokenizer.decode(ids),
            "tokens": len(ids),
            "finished": heard.finished(),
            "unknown_characters": lost_of(self.run.tokenizer, [self.question]).lost,
            FAULT: "",
            "notes": list(dict.fromkeys(note for one in self.images for note in one.notes)),
            "mark": "; ".join(filter(None, dict.fromkeys(marks))),
        }


@dataclass(frozen=True)
class _BadRow:
    """A row without a question that could be asked."""

    line: int
    fault: RowFault
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def given(self) -> dict[str, Any]:
        return self.fields | {FAULT: fault_text(self.fault)}

    def ask(self) -> Request:
        raise self.fault

    def told(self, heard: Heard) -> dict[str, Any]:
        raise AssertionError("nothing was asked")


def answer_questions(run: LoadedRun, path: Path, out: Path) -> tuple[list[str], Written]:
    """Answer all questions of a table, JSON lines or CSV, as `ask` does each: greedily and in fp32.

    A row has `image`, `question` and perhaps `id`, as `data.vqa` reads them; other fields are left alone.

    Args:
        out: gets a JSON line for each row; one that such a command began is continued.

    Returns:
        What was done, for the terminal, and in numbers.

    Raises:
        RecipeError: the run answers no questions about images.
        SourceError: no row of the table has a question; nothing was written.
        UnpadError: as `answer_rows`.
    """
    check_asks(run)
    with progress(f"checking {path.name}"):
        num_rows = _count(run, path)
    engine = Engine(run.generator, piece=PIECE, rows=ROWS, keeps=False)
    made_by = digest_of(run, greedy(run), "fp32")
    bulk = Bulk(path, made_by, _rows(run, path), num_rows, "questions", run.recipe.plan.tokens_per_micro)
    written = answer_rows(bulk, engine, out)
    return [summary(bulk, written, out)], written


def _count(run: LoadedRun, path: Path) -> int:
    """The number of rows.

    Raises:
        SourceError: none of them has a question.
    """
    num_rows, usable, first = 0, False, None
    for row in _rows(run, path):
        num_rows += 1
        if isinstance(row, _BadRow):
            first = first or row
        else:
            usable = True
    if usable:
        return num_rows
    if first is None:
        raise SourceError("there are no questions in it", where=str(path), fix=EXAMPLE)
    fault = first.fault
    raise SourceError(f"{fault.code}: {fault.what}", where=f"{path}:{first.line}", fix=fault.fix)


def _rows(run: LoadedRun, path: Path) -> Iterator[BulkRow]:
    is_table = FORMATS.get(path.suffix.lower()) == "csv"
    file = SourceFile(path, "csv" if is_table else "jsonl", None, 1.0, 0)
    folder, root = path.parent, os.path.realpath(path.parent)
    with reading(path):
        for row in read(file, run.recipe.data, WANTED, OPTIONAL):
            line = _line(row.where)
            if isinstance(row, BadRow):
                yield _BadRow(line, RowFault(row.code, row.what, remedy(row, EXAMPLE)))
                continue
            given = {name: row[name] for name in ("id", "image") if row.get(name) is not None}
            try:
                paths, question = asked(folder, row)
            except RowFault as fault:
                yield _BadRow(line, RowFault(fault.code, fault.what, remedy(fault, EXAMPLE)), given)
                continue
            yield QuestionRow(run, line, given | {"question": question}, paths, question, root)


def _line(where: str) -> int:
    line = place_of(where).line
    assert line is not None, "rows of lines"
    return line
