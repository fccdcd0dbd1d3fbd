"""Modes and sizes of the pictures that a run was trained on, and what sets other pictures apart from them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from unpad.data.family import PICTURES
from unpad.data.sources.images import ImageExample
from unpad.storage.reading import Count, shaped

# Larger shares of pictures are warnings.
MOST_MODES = 0.05
MOST_SIZES = 0.05
NUM_NAMED = 5

Size = tuple[int, int]  # width and height in pixels


@dataclass(frozen=True)
class SeenPictures:
    """Pictures of training, as `pictures.json` of a run keeps them.

    Args:
        modes: mode -> number of pictures.
        width, height: least and most that training saw, in pixels.
    """

    modes: dict[str, int]
    width: tuple[int, int]
    height: tuple[int, int]

    def to_bytes(self) -> bytes:
        """The content of `pictures.json`."""
        return json.dumps({"modes": self.modes, "width": self.width, "height": self.height}, indent=1).encode()

    def has_size(self, size: Size) -> bool:
        """Check that a size is within those of training."""
        bounds = zip(size, (self.width, self.height), strict=True)
        return all(low <= length <= high for length, (low, high) in bounds)

    def mark(self, mode: str, size: Size) -> str:
        """Reasons to doubt what is said of a picture, "" without one."""
        reasons = [] if mode in self.modes else [f"mode not in training: {mode}"]
        reasons += [] if self.has_size(size) else [f"size outside of training: {size[0]} x {size[1]}"]
        return "; ".join(reasons)


def summarise(examples: Sequence[ImageExample], factor: float = 1.0) -> SeenPictures:
    """Sum up the pictures of training, at least one.

    Args:
        factor: by which training makes some of them larger and others smaller.
    """
    modes = dict(sorted(Counter(example.mode for example in examples).items()))
    widths, heights = [example.width for example in examples], [example.height for example in examples]
    width, height = (
        (max(1, math.floor(min(each) / factor)), math.ceil(max(each) * factor)) for each in (widths, heights)
    )
    return SeenPictures(modes, width, height)


_Bounds = Annotated[list[Count], Field(min_length=2, max_length=2)]


class _Seen(TypedDict):
    modes: dict[str, Count]
    width: _Bounds
    height: _Bounds


def seen_pictures(kept: dict[str, bytes] | None) -> SeenPictures | None:
    """Summary of the training pictures among the kept files of a run; None for a run of an earlier version.

    Raises:
        CheckpointError: the file is damaged.
    """
    if kept is None or PICTURES not in kept:
        return None
    values = shaped(kept[PICTURES], _Seen, Path(PICTURES))
    return SeenPictures(values["modes"], (*values["width"],), (*values["height"],))


@dataclass(frozen=True)
class Unlike:
    """Pictures that are unlike those of training.

    Args:
        num: pictures that were looked at.
        modes: mode that training had not -> number of pictures; num_sizes: pictures of sizes that training had not.
        lines: the same as text, with a warning where the share is large.
    """

    num: int
    modes: dict[str, int]
    num_sizes: int
    lines: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """Fields by name."""
        return {"pictures": self.num, "unknown_modes": self.modes, "unknown_sizes": self.num_sizes}


def compare_pictures(seen: SeenPictures | None, pictures: Sequence[tuple[str, Size]]) -> Unlike | None:
    """Count the pictures of a mode or size that training did not have.

    Args:
        seen: None if the run does not record it; then nothing is said.
        pictures: mode and size of each.
    """
    if seen is None or not pictures:
        return None
    modes = Counter(mode for mode, _ in pictures if mode not in seen.modes)
    sizes = sum(not seen.has_size(size) for _, size in pictures)
    named = ", ".join(f"{mode} {count:,}" for mode, count in modes.most_common(NUM_NAMED))
    known = ", ".join(f"{mode} {count:,}" for mode, count in Counter(seen.modes).most_common(NUM_NAMED))
    (narrow, wide), (low, high) = seen.width, seen.height
    total = sum(modes.values())
    lines = (
        _share(total, len(pictures), f"have a mode that training had not{f': {named}' if named else ''}", MOST_MODES)
        + f"; training had {known}",
        _share(sizes, len(pictures), "have a size that training had not", MOST_SIZES)
        + f"; it had widths of {narrow:,} to {wide:,} and heights of {low:,} to {high:,} pixels",
    )
    return Unlike(len(pictures), dict(modes.most_common()), sizes, lines)


def _share(number: int, total: int, what: str, most: float) -> str:
    share = number / total
    return f"{'warning: ' if share > most else ''}{number:,} of {total:,} pictures ({share:.1%}) {what}"
