"""`unpad infer`: classes of image files or answers about them, at the model's size and normalisation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unpad.batching.batch import RaggedBatch
from unpad.data.measuring import Measuring
from unpad.data.pictures.album import WITH_OPACITY, compare_pictures, image_batch, pixels_of, seen_pictures
from unpad.data.pixels.decode import decode
from unpad.data.pixels.formats import NOTES, ImageError
from unpad.data.pixels.patches import Grid, detail, grid_of, prepare
from unpad.data.rows import read_classes
from unpad.data.sources.example import BadRow
from unpad.data.sources.faults import RowFault
from unpad.data.sources.files import natural_key, refuse_names
from unpad.data.sources.images import SUFFIXES, ImageExample, ImageRow, examine, file_bytes
from unpad.data.vqa import VqaData, questions_about
from unpad.errors import RecipeError, SourceError
from unpad.inference.generate import complete
from unpad.inference.loaded import LoadedRun
from unpad.inference.prompts import lost_of
from unpad.models.contract import Classifies, PixelConfig, PrunesTokens
from unpad.models.vision_language.model import VisionLanguage
from unpad.nn.linear import independent_rows
from unpad.recipes.training import GenerateSettings
from unpad.run.report.vqa import Kept, refuse_unshowable
from unpad.terminal.progress import counted
from unpad.terminal.table import csv_text


@dataclass(frozen=True)
class Answer:
    """Prediction for one image file.

    Args:
        top: classes with their probabilities, the most likely first; empty for an unusable file.
        text: the answer to a question about the image; None without a question.
        fault: fault of the file, or "".
        notes: corrections applied, such as reading the first frame only.
        unknown_characters: characters of the question that the tokenizer lost; None without a question.
        shown: the patches that the model kept, if requested.
        mode: mode of the file as in `ImageInfo`; size: width and height in pixels; "" and None if unusable.
        mark: difference from the images of training, or "".
    """

    path: Path
    top: tuple[tuple[str, float], ...] = ()
    text: str | None = None
    fault: str = ""
    notes: tuple[str, ...] = ()
    shown: Kept | None = None
    unknown_characters: int | None = None
    mode: str = ""
    size: tuple[int, int] | None = None
    mark: str = ""

    def line(self) -> str:
        """The answer as text: the most likely class and its probability, then the others."""
        if self.fault:
            return f"{self.path}: {self.fault}"
        classes = ", ".join(f"{name} {p:.1%}" for name, p in self.top)
        shown = classes if self.text is None else self.text or "(no answer)"
        remarks = [NOTES[note] for note in self.notes] + ([self.mark] if self.mark else [])
        return f"{self.path}: {shown}" + (f"  ({'; '.join(remarks)})" if remarks else "")

    def to_json(self) -> dict[str, Any]:
        top = [{"class": name, "probability": p} for name, p in self.top]
        result: dict[str, Any] = {"top": top} if self.text is None else {"answer": self.text}
        if self.unknown_characters is not None:
            result["unknown_characters"] = self.unknown_characters
        return {"image": str(self.path), **result, **self.remarks()}

    def remarks(self) -> dict[str, Any]:
        """What is wrong or doubtful about the image."""
        return {"fault": self.fault, "notes": list(self.notes), "mark": self.mark}


def list_images(paths: Sequence[Path]) -> list[Path]:
    """List image files; a folder stands for all images in it and below, in natural order.

    Raises:
        SourceError: a path does not exist, a folder holds no image, or the name of one is not UTF-8.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted((p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES), key=natural_key)
            if not inside:
                raise SourceError("the folder holds no image", where=str(path), fix="name a file, or another folder")
            files += inside
        elif path.exists():
            files.append(path)
        else:
            raise SourceError("there is no such file or folder", where=str(path), fix="check the path")
    refuse_names(files)
    return files


def classify(run: LoadedRun, paths: Sequence[Path], top: int = 5) -> list[Answer]:
    """Classify image files, as `classify_each` does."""
    return classify_each(run, [(path, partial(file_bytes, path)) for path in paths], top)


def classify_each(run: LoadedRun, images: Sequence[tuple[Path, Callable[[], bytes]]], top: int) -> list[Answer]:
    """Classify images, in batches of the run's size; results do not depend on the batch.

    Args:
        images: the name of each, and what reads it or raises ImageError, RowFault or OSError.
        top: most classes per image.

    Raises:
        RecipeError: the run does not classify images.
    """
    if not is_of_images(run):
        fix = f"unpad predict {run.folder} DATA reads what it learnt from"
        fix = "ask it something with --question" if isinstance(run.model, VisionLanguage) else fix
        raise RecipeError("this run classifies no images", where=str(run.folder), fix=fix)
    answers: list[Answer | None] = []

    def usable() -> Iterator[ReadImage]:
        for path, content in counted(images, "classifying", len(images), "images"):
            try:
                image = read_image(run, content(), path)
            except (ImageError, RowFault, OSError) as error:
                answers.append(Answer(path, fault=fault_text(error)))
            else:
                answers.append(None)
                yield image

    classified = iter(list(classify_read(run, usable(), top)))
    return [next(classified) if answer is None else answer for answer in answers]


def classify_read(run: LoadedRun, images: Iterable[ReadImage], top: int) -> Iterator[Answer]:
    """Yield the classes of images in their order, in passes of the run's size; of one as of many, bit for bit."""
    waiting: list[ReadImage] = []
    for image in images:
        waiting.append(image)
        if sum(len(one.patches) for one in waiting) >= run.recipe.plan.tokens_per_micro:
            yield from classify_images(run, waiting, top)
            waiting = []
    yield from classify_images(run, waiting, top)


def is_of_images(run: LoadedRun) -> bool:
    """True if a run gives images classes."""
    return isinstance(run.model, Classifies) and isinstance(run.model.config, PixelConfig)


def check_asks(run: LoadedRun) -> VisionLanguage:
    """The model of a run that answers questions about images.

    Raises:
        RecipeError: the run answers none.
    """
    if not isinstance(run.model, VisionLanguage):
        fix = f"ask for classes: unpad predict {run.folder} DATA; or use a run of `unpad train vqa`"
        raise RecipeError("this run answers no questions about images", where=str(run.folder), fix=fix)
    return run.model


def _marked(run: LoadedRun, answers: list[Answer]) -> list[Answer]:
    """Mark the images with a mode or size that training did not have."""
    seen = seen_pictures(run.files)
    return [
        replace(one, mark=seen.mark(one.mode, one.size)) if seen is not None and one.size is not None else one
        for one in answers
    ]


def ledger(run: LoadedRun, answers: Sequence[Answer]) -> list[str]:
    """Lines on images with a mode or size that training did not have; none without such images, or if the run has no
    record."""
    known = [(one.mode, one.size) for one in answers if one.size is not None]
    return compare_pictures(seen_pictures(run.files), known)[0] if any(one.mark for one in answers) else []


def ask(run: LoadedRun, paths: Sequence[Path], question: str, *, show: bool = False) -> list[Answer]:
    """Answer one question about each of several image files, greedily, in batches of the run's own size.

    Args:
        show: also return the kept patches of each image.

    Raises:
        RecipeError: the run does not answer questions about images, or `show` is given and its model removes no
            patches.
    """
    model = check_asks(run)
    if show:
        refuse_unshowable(model.modes, model.config.merge is not None, str(run.folder))
    looked = [examine_image(run, path) for path in paths]
    images = [image for image in looked if isinstance(image, ImageExample)]
    lost = lost_of(run.tokenizer, [question]).lost
    texts: list[str] = []
    shown: list[Kept | None] = [None] * len(images)
    if images:
        data, rows = questions_about(run.recipe, run.tokenizer, images, question), np.arange(len(images))
        if show:
            kept = answer_shown(run, data, rows)
            texts, shown = [one.answer for one in kept], [*kept]
        else:
            texts = answer(run, data, rows)
    answers, said = list[Answer](), zip(texts, shown, strict=True)
    for path, image in zip(paths, looked, strict=True):
        if isinstance(image, ImageExample):
            (text, patches), size = next(said), (image.width, image.height)
            of_image = Answer(path, notes=image.notes, mode=image.mode, size=size)
            answers.append(replace(of_image, text=text, shown=patches, unknown_characters=lost))
        else:
            answers.append(Answer(path, fault=fault_text(image)))
    return _marked(run, answers)


def question_about(
    run: LoadedRun, path: Path, content: bytes, question: str
) -> tuple[RaggedBatch, tuple[int, int], list[str]]:
    """The prompt of one question about one image, as `ask` makes it, the image's rows and columns of patches, and what
    is doubtful about it.

    Args:
        path: a file from which the image's bytes can be read once more.

    Raises:
        ImageError: the image cannot be used.
    """
    image = examine_image(run, path, content)
    if isinstance(image, BadRow):
        raise ImageError(image.code, image.what, image.fix)
    data = questions_about(run.recipe, run.tokenizer, [image], question)
    rows, columns = data.album.grids[0].tolist()
    seen = seen_pictures(run.files)
    mark = "" if seen is None else seen.mark(image.mode, (image.width, image.height))
    return data.prompts([0]), (rows, columns), [*(NOTES[note] for note in image.notes), *filter(None, [mark])]


def to_csv(answers: Sequence[Answer]) -> str:
    """One row per file: image, class or answer, probability, fault, mark."""
    rows = []
    for one in answers:
        name, p = (one.top[0][0], f"{one.top[0][1]:.6f}") if one.top else (one.text or "", "")
        rows.append([str(one.path), name, p, one.fault, one.mark])
    said = "class" if all(one.text is None for one in answers) else "answer"
    return csv_text(["image", said, "probability", "fault", "mark"], rows)


@dataclass(frozen=True)
class ReadImage:
    """An image as the model reads it; `size` is its height and width in pixels."""

    path: Path
    patches: np.ndarray
    grid: Grid
    size: tuple[int, int]
    notes: tuple[str, ...]
    mode: str


def read_image(run: LoadedRun, content: bytes, path: Path) -> ReadImage:
    """Decode an image for a run that classifies.

    Args:
        path: by which its answer names it.

    Raises:
        ImageError: it cannot be used.
    """
    settings, config = run.recipe.images, run.model.config
    assert isinstance(config, PixelConfig), "checked by the caller"
    decoded = decode(content, config.channels == WITH_OPACITY, settings.grey_bits)
    _refuse_blank(decoded.pixels)
    height, width = decoded.pixels.shape[:2]
    shown = detail(decoded.pixels) if settings.size == "adaptive" else None
    grid = grid_of(width, height, config.patch, settings, shown)
    patches = prepare(decoded.pixels, grid, config.patch, settings)
    return ReadImage(path, patches, grid, (height, width), decoded.notes, decoded.mode)


def examine_image(
    run: LoadedRun, path: Path, content: bytes | None = None, root: str | None = None
) -> ImageExample | BadRow:
    """Check one image file for a question to a run; a blank image is a bad row too.

    Args:
        root: the real folder that must contain it; None for its own.
    """
    image = examine(ImageRow(str(path), "", path, root or str(path.resolve().parent), content=content))
    if isinstance(image, BadRow):
        return image
    try:
        _refuse_blank(pixels_of(image, grey_bits=run.recipe.images.grey_bits))
    except ImageError as error:
        return BadRow(str(path), error.code, error.what, error.fix, "")
    return image


def _refuse_blank(pixels: np.ndarray) -> None:
    """Reject a single-colour image: any prediction for it would be meaningless.

    Raises:
        ImageError: every pixel is the same.
    """
    if bool((pixels == pixels[:1, :1]).all()):
        what = f"all {pixels.shape[1]} x {pixels.shape[0]} pixels have one colour"
        raise ImageError("E_BLANK", what, "leave it out, or check how the file was written")


@torch.inference_mode()
def classify_images(run: LoadedRun, images: Sequence[ReadImage], top: int) -> list[Answer]:
    """Classes of images in one pass; those of one have the same bits whatever images are beside it.

    Args:
        top: most classes per image.
    """
    if not images:
        return []
    grids = np.array([image.grid for image in images], np.int64).reshape(-1, 2)
    model, config, classes = run.model, run.model.config, read_classes(run.files)
    assert isinstance(model, Classifies), "checked by the caller"
    assert isinstance(config, PixelConfig), "as well"
    num_values = config.channels * config.patch**2
    batch = image_batch([image.patches for image in images], grids, num_values, [image.size for image in images])
    with independent_rows():
        p = model.classify(batch.to(model.device)).double().softmax(-1).cpu().numpy()  # (num_images, num_classes)
    order = np.argsort(-p, 1, kind="stable")[:, :top]
    answers = []
    for image, chances, likeliest in zip(images, p, order, strict=True):
        best, (height, width) = tuple((classes[c], float(chances[c])) for c in likeliest), image.size
        answers.append(Answer(image.path, best, notes=image.notes, mode=image.mode, size=(width, height)))
    return _marked(run, answers)


def fault_text(error: ImageError | RowFault | BadRow | OSError) -> str:
    """A fault in one line, its code first and its remedy last."""
    if isinstance(error, OSError):
        return f"E_READ {error.strerror or error}"
    return f"{error.code} {error.what}; {error.fix}"


# --------------------------------------------------------------------------- answers in batches


def answer(run: LoadedRun, data: VqaData, seq_ids: np.ndarray) -> list[str]:
    """Answer questions greedily, in fp32, in batches of the run's size; answers do not depend on the batch."""
    return answer_counted(run, data, seq_ids)[0]


def answer_counted(run: LoadedRun, data: VqaData, seq_ids: np.ndarray) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Answer questions as `answer` does, and count visual tokens.

    Returns:
        The answers; the visual tokens of every row before any is removed, (num_rows,) int64; and those that entered
        each block, (num_rows, blocks) int64, without blocks if there is one token per patch.
    """
    model = run.model
    assert isinstance(model, PrunesTokens), "a model of images and questions counts its visual tokens"
    answers: dict[int, str] = {}
    counts: dict[int, np.ndarray] = {}
    for ids, texts in _answered(run, data, seq_ids):
        rows = np.stack([one.cpu().numpy() for one in (model.given, *model.kept)], 1)
        answers |= dict(zip(ids, texts, strict=True))
        counts |= dict(zip(ids, rows, strict=True))
    order = seq_ids.tolist()
    table = np.stack([counts[seq] for seq in order])
    return [answers[seq] for seq in order], table[:, 0], table[:, 1:]


def answer_shown(run: LoadedRun, data: VqaData, seq_ids: np.ndarray) -> list[Kept]:
    """Answer questions about one image each, and show the kept patches; for models that remove patches and merge
    none."""
    shown: dict[int, Kept] = {}
    model = run.model
    assert isinstance(model, VisionLanguage), "a model that removes patches"
    assert model.config.prune is not None, "models that remove patches have a prune section"
    blocks = model.config.prune.layers
    for ids, texts in _answered(run, data, seq_ids):
        first = np.cumsum(data.num_patches[ids]) - data.num_patches[ids]  # index in the batch of each row's first patch
        counts = [model.kept[block + 1].tolist() for block in blocks]
        tokens = [model.kept_tokens[block + 1].cpu().numpy() for block in blocks]
        rows = [np.split(one, np.cumsum(count)[:-1]) for one, count in zip(tokens, counts, strict=True)]
        for place, (seq, text) in enumerate(zip(ids, texts, strict=True)):
            stays = {block: np.zeros(data.num_patches[seq], np.bool_) for block in blocks}
            for block, of_rows in zip(blocks, rows, strict=True):
                stays[block][of_rows[place] - first[place]] = True
            example = data.examples[seq]
            shown[seq] = Kept(data.album.picture(example.images[0]), data.album.patch, stays, example.question, text)
    return [shown[seq] for seq in seq_ids.tolist()]


def greedy(run: LoadedRun) -> GenerateSettings:
    """Settings of answers about images."""
    return run.recipe.generate.model_copy(update={"temperature": 0.0, "beams": 1})


def _answered(run: LoadedRun, data: VqaData, seq_ids: np.ndarray) -> Iterator[tuple[list[int], list[str]]]:
    """Yield rows and their answers, batch by batch; the model's counts are those of the latest batch."""
    settings = greedy(run)
    for micro in Measuring(run.model, data, seq_ids, run.recipe.plan).micros():
        ids = micro.seq_ids.tolist()
        yield ids, [one.text for one in complete(run.generator, run.tokenizer, data.prompts(ids), settings)]
