"""Questions about images with their answers, and captions, one per row of JSON lines."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from unpad.data.sources.annotations import answer_texts, joined
from unpad.data.sources.example import BadRow, SplitName, Turn
from unpad.data.sources.faults import excerpt, missing
from unpad.data.sources.files import SourceFile
from unpad.data.sources.images import ImageExample, ImageRow, checked_path, examine
from unpad.data.sources.reader import OPTIONAL, converted, examples, reading
from unpad.data.sources.row import Row, require_text
from unpad.data.sources.unread import doubt_answers, doubt_unread
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
