"""Images of requests: from data URLs and base64, in memory alone, to the prompts and classes of `unpad infer`."""

import base64
import binascii
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from unpad.batching.batch import RaggedBatch
from unpad.data.pixels.decode import probe
from unpad.data.pixels.formats import NOTES, ImageError
from unpad.inference.images import Answer, ReadImage, classify_read, question_about, read_image
from unpad.inference.loaded import LoadedRun
from unpad.models.vision_language.model import VisionLanguage
from unpad.nn.linear import independent_rows
from unpad.serving.protocol import RequestError

ALL = 1 << 30  # classes
LARGE = 1 << 22  # pixels, which take some tenths of a second
_thread = threading.local()  # whether it leaves large pictures to another


def image_bytes(url: str, param: str) -> bytes:
    """Bytes of an image in a data URL.

    Raises:
        RequestError: it is another URL, which this server does not fetch, or its base64 is damaged.
    """
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        what = "an image_url is no data URL: send the image itself, as data:image/png;base64,..."
        raise RequestError(what, param, code="invalid_image_url")
    return decoded(data, param)


def decoded(data: str, param: str) -> bytes:
    """Bytes of base64. Raises RequestError if it is damaged, or a URL."""
    if data.startswith("data:"):
        raise RequestError("this is a data URL: send its base64 alone, without data:", param, code="invalid_base64")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError("the base64 of an image is damaged: encode it again", param, code="invalid_base64") from None


@contextmanager
def in_memory(content: bytes) -> Iterator[Path]:
    """A file without a place on a disk, as long as the context is open. Only Linux has such; elsewhere it is
    temporary."""
    if sys.platform != "linux":
        with TemporaryDirectory(prefix="unpad-") as folder:
            path = Path(folder) / "content"
            path.write_bytes(content)
            yield path
        return
    with os.fdopen(os.memfd_create("unpad"), "wb") as file:
        file.write(content)
        file.flush()
        yield Path(f"/proc/self/fd/{file.fileno()}")


class LargeError(Exception):
    """A picture is left to the thread that reads large ones."""


def leave_large() -> None:
    """Let this thread raise LargeError instead of reading a picture of more than LARGE pixels by its header."""
    _thread.leaves = True


def _leave_if_large(content: bytes) -> None:
    if getattr(_thread, "leaves", False):
        with suppress(ImageError):  # which reading tells
            info = probe(content)
            if info.width * info.height > LARGE:
                raise LargeError


def read_or_fault(run: LoadedRun, content: bytes) -> ReadImage | ImageError:
    """An image as the model reads it, or why it cannot be used. Raises LargeError as `leave_large` says."""
    _leave_if_large(content)
    try:
        return read_image(run, content, Path())
    except ImageError as error:
        return error


def classes_of(run: LoadedRun, images: Sequence[ReadImage]) -> list[Answer]:
    """All classes of images, of one as of many."""
    return list(classify_read(run, images, ALL))


def detailed(answer: Answer | ImageError, number: int) -> dict[str, Any]:
    """The likeliest classes of an image, as clients of Hugging Face read them, with what is doubtful about it."""
    if isinstance(answer, ImageError):
        return {"top": [], "notes": [], "mark": "", "fault": f"{answer.code} {answer.what}; {answer.fix}"}
    notes = [NOTES[note] for note in answer.notes]
    top = [{"label": name, "score": p} for name, p in answer.top[:number]]
    return {"top": top, "notes": notes, "mark": answer.mark, "fault": ""}


def kept_patches(run: LoadedRun, batch: RaggedBatch, grid: tuple[int, int]) -> dict[str, Any]:
    """The patches that entered each block for a prompt with one image, by row and column; for the model's thread."""
    model = run.model
    assert isinstance(model, VisionLanguage), "the run answers questions about images"
    with torch.inference_mode(), independent_rows():
        model.last_hidden(batch)
    columns = grid[1]
    blocks = [[list(divmod(patch, columns)) for patch in sorted(one.tolist())] for one in model.kept_tokens]
    return {"grid": list(grid), "blocks": blocks}


def shows_patches(run: LoadedRun) -> bool:
    """True if a model's visual tokens stand for one patch each, and it removes some of them."""
    model = run.model
    return isinstance(model, VisionLanguage) and "hard" in model.modes and model.config.merge is None


def question_prompt(run: LoadedRun, content: bytes, question: str) -> tuple[RaggedBatch, tuple[int, int], list[str]]:
    """The prompt of a question about an image, as `unpad infer --question` makes it; results as `question_about`.

    Raises:
        ImageError: the image cannot be used.
        LargeError: as `leave_large` says.
    """
    _leave_if_large(content)
    with in_memory(content) as path:
        return question_about(run, path, content, question)
