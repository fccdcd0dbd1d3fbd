"""Content of sequences as a model reads it, and reasons why a comparison with sequences alone proves nothing.

Sequences of equal content do not test a batch: a model that mixes them up computes the same.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch, concatenate
from unpad.batching.fields import KIND, SEQUENCE, FieldHolder, PerEntry

OUTPUTS = ("labels", "loss_mask", "position_ids")  # fields per token that are not content


def content_of(sequence: RaggedBatch) -> bytes:
    """Digest of what a model reads in a batch of one sequence: tokens, vectors, images, values and times.

    Labels do not count. Nor does the length of a sequence that repeats one token, as attention to equal tokens gives
    the same result for any number of them.
    """
    digest = hashlib.sha256()
    for name, value in _inputs(sequence):
        rows = value.cpu().double() if value.is_floating_point() else value.cpu()
        repeats = len(rows) > 1 and bool((rows == rows[:1]).all())
        kept = rows[:1] if repeats else rows
        digest.update(f"{name} {tuple(kept.shape)} {kept.dtype} ".encode() + kept.numpy().tobytes())
    return digest.digest()


def _inputs(holder: FieldHolder) -> Iterator[tuple[str, Tensor]]:
    """Fields with one entry per token, event or set, also of images and parts."""
    for field in fields(holder):
        value, kind = getattr(holder, field.name), field.metadata[KIND]
        if isinstance(value, RaggedBatch):
            yield from ((f"{field.name}.{name}", one) for name, one in _inputs(value))
        elif isinstance(value, tuple):
            for part in value:
                yield from _inputs(part)
        elif isinstance(kind, PerEntry) and kind.level != SEQUENCE and field.name not in OUTPUTS and value is not None:
            yield field.name, value


def units_of(alone: Sequence[RaggedBatch]) -> list[bytes]:
    """For each sequence, the content of its bundle, such as the two replies of a pair; most are bundles of one."""
    contents = [content_of(one) for one in alone]
    units = list(contents)
    for members in concatenate(alone).bundles if alone else []:
        together = b"".join(contents[seq] for seq in members)
        for seq in members:
            units[seq] = together
    return units


def unlike(rows: Sequence[int], units: Sequence[bytes | None]) -> int:
    """Number of different units in a micro-batch.

    Args:
        rows: the sequence of every row, -1 for filler.
        units: content of every sequence; None for sequences that do not count.
    """
    return len({units[row] for row in rows if row >= 0} - {None})


def gap_of(
    rows: Sequence[Sequence[int]], units: Sequence[bytes | None], *, split: bool = False, what: str = "sequence"
) -> str:
    """The reason why comparing micro-batches with sequences alone proves nothing; empty if it can.

    Args:
        rows: of every micro-batch, as in `unlike`.
        split: also require two micro-batches, as for a plan of a step.
        what: name of a sequence that counts.
    """
    given = [one for one in units if one is not None]
    num = len(set(given))
    if len(given) < 2:
        return f"there is {'only one' if given else 'no'} {what}"
    if num < 2:
        return f"all {len(given)} {what}s have the same content"
    if max((unlike(one, units) for one in rows), default=0) < 2:
        return f"no micro-batch holds two {what}s of unlike content, so each was compared with itself"
    if split and sum(any(row >= 0 for row in one) for one in rows) < 2:
        return f"one micro-batch holds all {num} {what}s, so no split of a step was compared"
    return ""


def is_zero(tensors: Sequence[Tensor]) -> bool:
    """True if there is no value other than 0."""
    return not any(bool(torch.any(one != 0)) for one in tensors)
