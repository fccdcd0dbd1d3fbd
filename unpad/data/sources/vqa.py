"""Questions about images with their answers, and captions, one per row of JSON lines."""

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from sys import intern

from unpad.data.sources.example import BadRow, SplitName, Turn, place_of
from unpad.data.sources.faults import FieldFault, RowFault, excerpt, missing, type_name
from unpad.data.sources.files import Annotations, SourceFile
from unpad.data.sources.images import SUFFIXES, ImageExample, ImageRow, checked_path, examine
from unpad.data.sources.json_rows import read_array
from unpad.data.sources.reader import OPTIONAL, converted, examples, reading
from unpad.data.sources.row import Row, require_text
from unpad.data.sources.unread import count_unread, doubt_answers, doubt_unread
from unpad.recipes.data import DataSettings
from unpad.terminal.progress import counted

FIELDS = ("image", "question", "answer", "answers", "caption")
DESCRIBE = "Describe the picture."  # the question of a row with a caption


@dataclass(frozen=True, slots=True)
class VqaExample:
    """A question about images, or about none, and its answers.

    Args:
        where: "file:line".
        images: index of each image in the list that `read_all` returns beside the examples.
        answers: what people said; training takes the commonest.
        caption: whether the answer describes the image as a whole.
        group: that the row declares, or "".
    """

    where: str
    images: tuple[int, ...]
    question: str
    answers: tuple[str, ...]
    split: SplitName | None
    caption: bool
    group: str = ""

    @property
    def answer(self) -> str:
        """The commonest answer, the first of them where several are."""
        return max(self.answers, key=self.answers.count)


_Question = tuple[tuple[Path, ...], VqaExample]  # paths of the images of a row, and its example without them


def read_all(file: SourceFile, data: DataSettings) -> tuple[list[VqaExample], list[ImageExample], list[BadRow]]:
    """Read a file of questions to the end; every row is an example or a bad row, every image is looked at once.

    A row has `image`, a path that stays within the file's folder, a list of them or null; `question` and `answer`, or
    `answers`, a list; or `caption`. It may have `split` and `group`. Questions with annotations of VQAv2 become such.

    Raises:
        SourceError: the file cannot be opened or read.
    """
    folder = file.path.parent if file.annotations is None else file.annotations.images
    with reading(file.path):
        rows = list(counted(_rows(file, data, partial(_row, folder)), f"reading {file.path.name}", unit="rows"))
    root = os.path.realpath(folder)
    paths = list(dict.fromkeys(path for row in rows if not isinstance(row, BadRow) for path in row[0]))
    with ThreadPoolExecutor() as pool:
        examined = pool.map(lambda path: examine(ImageRow(str(path), "", path, root)), paths)
        looked = dict(zip(paths, counted(examined, "reading images", len(paths), "images"), strict=True))
    images = [image for image in looked.values() if isinstance(image, ImageExample)]
    number = {image.path: index for index, image in enumerate(images)}
    used: list[VqaExample] = []
    bad: list[BadRow] = []
    for row in rows:
        if isinstance(row, BadRow):
            bad.append(row)
            continue
        shown, example = row
        faults = [image for image in map(looked.__getitem__, shown) if isinstance(image, BadRow)]
        if faults:
            bad.append(BadRow(example.where, faults[0].code, faults[0].what, faults[0].fix, excerpt(faults[0].where)))
        else:
            used.append(replace(example, images=tuple(number[path] for path in shown)))
    return used, images, bad


def _rows(file: SourceFile, data: DataSettings, convert: Callable[[Row], _Question]) -> Iterator[_Question | BadRow]:
    if file.annotations is None:
        wanted = ("image",) if file.format == "csv" else FIELDS  # other empty cells of CSV are no fields
        yield from examples(file, data, wanted, convert, "vqa", (*FIELDS, *OPTIONAL))
    else:
        file.unread.clear()
        yield from converted(joined(file, file.annotations), convert, unread=file.unread)


def _row(folder: Path, row: Row) -> _Question:
    paths, question = asked(folder, row)
    caption = "question" not in row
    made = VqaExample(row.where, (), question, _answers(row, caption), row.split(), caption, row.group())
    doubt_unread(row, [Turn("user", question), *(Turn("assistant", answer) for answer in made.answers)])
    return paths, made


def asked(folder: Path, row: Row) -> tuple[tuple[Path, ...], str]:
    """Paths of the images of a row, and its question.

    Args:
        folder: in which the paths start.

    Raises:
        RowFault: one of them is missing or unusable.
    """
    image = row.require("image")["image"]
    names = image if isinstance(image, list) else [] if image is None else [image]
    paths = tuple(folder / checked_path(require_text(name, '"image"')) for name in names)
    if "caption" in row and "question" not in row:
        return paths, DESCRIBE
    if "question" not in row:
        talks = "conversations about pictures are not read: write question and answer" if "conversations" in row else ""
        raise missing(("question", "caption"), row.value, fix=talks)
    return paths, require_text(row.get("question"), '"question"')


def _answers(row: Row, caption: bool) -> tuple[str, ...]:
    if caption:
        return (row.text("caption"),)
    if "answers" not in row:
        return (require_text(row.get("answer"), '"answer"'),)
    texts = answer_texts(row["answers"])
    doubt_answers(row, row["answers"])
    return texts


# --------------------------------------------------------------------------- two files, as VQAv2 publishes them


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
