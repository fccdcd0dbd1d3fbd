"""Images of requests: from data URLs and base64, in memory alone, to the prompts and classes of `unpad infer`."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unpad.batching.batch import RaggedBatch
from unpad.inference.images import question_about
from unpad.inference.loaded import LoadedRun
from unpad.serving.protocol import RequestError


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
    """Bytes of base64. Raises RequestError if it is damaged."""
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError("the base64 of an image is damaged: encode it again", param, code="invalid_base64") from None


@contextmanager
def in_memory(content: bytes) -> Iterator[Path]:
    """A file without a place on a disk, as long as the context is open."""
    with os.fdopen(os.memfd_create("unpad"), "wb") as file:
        file.write(content)
        file.flush()
        yield Path(f"/proc/self/fd/{file.fileno()}")


def question_prompt(run: LoadedRun, content: bytes, question: str) -> RaggedBatch:
    """The prompt of a question about an image, as `unpad infer --question` makes it.

    Raises:
        ImageError: the image cannot be used.
    """
    with in_memory(content) as path:
        return question_about(run, path, content, question)
