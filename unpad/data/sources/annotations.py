"""Questions and annotations in two files of JSON, as VQAv2 publishes them, joined by their question_id."""

import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from sys import intern

from unpad.data.sources.example import BadRow, Turn, place_of
from unpad.data.sources.faults import FieldFault, RowFault, excerpt, type_name
from unpad.data.sources.files import Annotations, SourceFile
from unpad.data.sources.images import SUFFIXES
from unpad.data.sources.json_rows import read_array
from unpad.data.sources.reader import converted, reading
from unpad.data.sources.row import Row, require_text
from unpad.data.sources.unread import count_unread, doubt_answers, doubt_unread
from unpad.terminal.progress import counted

_NAME = re.compile(r"(?:.*_)?(\d{12})|(\d+)", re.DOTALL)  # COCO_train2014_000000000009, 000000000009, 9
PAIR, KNOWN = "E_PAIR", ("question_type", "answer_type")  # fields that say nothing of what is to be learned


_Annotation = tuple[str, int, tuple[str, ...]]  # place, image_id and answers


def joined(file: SourceFile, annotations: Annotations) -> Iterator[Row | BadRow]:
    """Yield every question as a row of JSON lines, with its image and its answers, or the bad row; at last the
    annotations without a question.

    Raises:
        SourceError: a file or the folder of the images cannot be read.
    """
    with reading(annotations.images):
        pictures = _pictures(annotations.images)
    with reading(annotations.path):
        answers, bad = _annotations(annotations.path, file)
    file.unread.num_rows = 0  # annotations are counted with their questions
    yield from bad
    if any(row.num_rows is None for row in bad):
        return  # most questions would lack what is in the rest of the file
    join = partial(_joined, pictures, answers, {}, annotations)
    item: Row | BadRow | None = None
    for item in converted(read_array(file.path, "questions"), join):
        yield item
    if isinstance(item, BadRow) and item.num_rows is None:
        return  # many annotations would lack their questions
    for number, left in answers.items():
        if isinstance(left, BadRow):
            yield left
        else:
            what = f"no question of {file.path.name} has question_id {number}"
            fix = "name the questions of these annotations, or remove the annotation"
            yield BadRow(left[0], PAIR, what, fix, excerpt(repr(left[2])))


def _joined(
    pictures: dict[int, list[str]],
    answers: dict[int, _Annotation | BadRow],
    seen: dict[int, str],
    annotations: Annotations,
    row: Row,
) -> Row | BadRow:
    """Row of a question, or the bad annotation that belongs to it.

    Args:
        pictures: names of image files by image_id.
        answers: by question_id, those without a question so far.
        seen: element of each question so far, such as [7], by its question_id.

    Raises:
        RowFault: the question has no annotation or no image, or more than one.
    """
    number = _id(row, "question_id")
    if number in seen:
        raise RowFault(PAIR, f"question_id {number} is also that of question {seen[number]}", "keep one of the two")
    seen[number] = place_of(row.where).item
    found = answers.pop(number, None)
    if found is None:
        what = f"no annotation of {annotations.path.name} has question_id {number}"
        raise RowFault(PAIR, what, "name the annotations of these questions, or remove the question")
    if isinstance(found, BadRow):
        return found
    image, (where, wanted, texts) = _id(row, "image_id"), found
    if image != wanted:
        what = f"image_id is {image}, and {wanted} in the annotation {where}"
        raise RowFault(PAIR, what, "name the annotations of these questions, or correct one of the two")
    name = _picture(pictures, image, annotations.images)
    return Row(row.where, row.value | {"image": name, "answers": list(texts), "split": annotations.part})


def answer_texts(answers: object) -> tuple[str, ...]:
    """Texts of a list of answers, which are texts themselves or `{"answer": text}`.

    Raises:
        RowFault: it is none, or holds something else.
    """
    if type(answers) is not list or not answers:
        raise RowFault("E_TYPE", f'"answers" is {type_name(answers)}, expected a list of strings')
    texts = [item.get("answer") if isinstance(item, dict) else item for item in answers]
    return tuple(intern(require_text(text, '"answers"')) for text in texts)  # ten times millions, mostly the same


def _annotations(path: Path, file: SourceFile) -> tuple[dict[int, _Annotation | BadRow], list[BadRow]]:
    """Annotations by question_id, or why they cannot be used; and the bad ones of which it is not known.

    Args:
        file: of the questions, which counts the fields that nobody reads.
    """
    found: dict[int, _Annotation | BadRow] = {}
    bad: list[BadRow] = []
    for row in counted(read_array(path, "annotations"), f"reading {path.name}", unit="annotations"):
        if isinstance(row, BadRow):
            bad.append(row)
            continue
        try:
            number = _id(row, "question_id")
            if number in found:
                raise RowFault(PAIR, f"question_id {number} has two annotations", "keep one of the two")
        except RowFault as fault:
            bad.append(fault.at(row.where, row.value))
            continue
        try:
            texts = answer_texts(row.require("answers")["answers"])
            found[number] = row.where, _id(row, "image_id"), texts
            for name in KNOWN:
                row.get(name)
            doubt_answers(row, row["answers"])
            doubt_unread(row, [Turn("assistant", text) for text in texts])
            if row.doubts:
                raise FieldFault(row.doubts)
            count_unread(file.unread, row)
        except RowFault as fault:
            found[number] = fault.at(row.where, row.value)
    return found, bad


def _id(row: Row, name: str) -> int:
    value = row.require(name)[name]
    if type(value) is not int or value < 0:
        given = value if type(value) is int else type_name(value)
        raise RowFault("E_TYPE", f'"{name}" is {given}, expected a whole number from 0')
    return value


def _pictures(folder: Path) -> dict[int, list[str]]:
    """Names of the image files of a folder by the image_id that they have."""
    names: dict[int, list[str]] = {}
    for name in sorted(os.listdir(folder)):
        stem, suffix = os.path.splitext(name)
        match = _NAME.fullmatch(stem)
        if match and suffix.lower() in SUFFIXES:
            names.setdefault(int(match[1] or match[2]), []).append(name)
    return names


def _picture(pictures: dict[int, list[str]], image: int, folder: Path) -> str:
    names = pictures.get(image, [])
    if not names:
        what = f"there is no image of image_id {image} in {folder}"
        raise RowFault("E_MISSING", what, "put it there, named as COCO_train2014_000000000009.jpg or 9.jpg are")
    if len(names) > 1:
        what = f"{names[0]} and {names[1]} in {folder} are both the image of image_id {image}"
        raise RowFault(PAIR, what, "keep one of the two")
    return names[0]
