"""Near-duplicate pictures in training and in other parts or new data, by a difference hash of small copies.

A picture is shrunk to 9 x 8 pixels; bit by bit the hash says whether a pixel is brighter than its left neighbour
(Krawetz 2013, "Kind of like that"). Two pictures are alike if few bits differ and the small copies have nearly the same
colours, so other sizes, formats and qualities of a picture are found, and pictures that are merely flat are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unpad.data.family import NearDuplicates, not_compared
from unpad.data.pixels.decode import decode
from unpad.data.pixels.formats import ImageError
from unpad.data.sources.images import ImageExample, read_bytes
from unpad.data.sources.leaks import NEW, PART_NAMES, advice, refused
from unpad.data.sources.split import Split, components
from unpad.data.tokens.cache import make_key, read_sealed, write_sealed
from unpad.errors import DiskError, SourceError
from unpad.storage import cache_folder
from unpad.terminal.progress import counted
from unpad.terminal.table import number_of

ROWS, COLUMNS = 8, 9
VERSION = 1  # of the small copies; a change makes new files in the cache
MOST_BITS = 6  # of 64 that may differ
MOST_DIFFERENCE = 6.0  # mean difference of colours, of 255
MOST_PIXELS = 1 << 32  # decoding takes about a second per hundred million and processor
MOST_PAIRS = 1 << 34  # pairs of equal brightness with hashes to compare; about a minute
MAX_SHOWN = 10
DECODERS = 4
BLOCK = 1 << 24  # pairs that are compared at a time
MOST_LINKS = 1 << 22  # rows and keys in memory


@dataclass(frozen=True, eq=False)
class Pictures:
    """Pictures of a run's data and the parts that show them.

    Args:
        examples: all that were listed, of every part.
        places: the row that shows each, (num_pictures,).
        parts: part -> (num_pictures,) bool; a picture of questions may be of several parts. Empty for new data
            and for one question about many pictures.
        rule: `data.near_duplicates`.
    """

    examples: Sequence[ImageExample]
    places: Sequence[str]
    parts: dict[Split, NDArray[np.bool_]]
    rule: str

    def lines(self) -> list[str]:
        """Lines on held-out pictures and those of the test part that are near-duplicates of training ones; none without
        such pictures."""
        return [line for part in PART_NAMES for line in self.compare(part).lines]

    def refuse(self) -> None:
        """Refuse near-duplicates on both sides if the rule is refuse, and pictures too many to compare.

        Raises:
            SourceError: E_LEAK, or the pictures cannot be compared.
        """
        for part, name in PART_NAMES.items() if self.rule == "refuse" else ():
            duplicates = self.compare(part)
            if duplicates.reason:
                raise _cannot_compare(duplicates.reason)
            if duplicates.num_equal + duplicates.num_near:
                one, other = duplicates.pairs[0]
                raise refused(name, duplicates.num_equal + duplicates.num_near, "pictures", f"{one} is like {other}")

    def compare(self, part: Split) -> NearDuplicates:
        """Near-duplicates of training pictures in another part."""
        nothing = np.zeros(len(self.examples), np.bool_)
        held, trained = self.parts.get(part, nothing), self.parts.get(Split.TRAIN, nothing)
        if not held.any() or not trained.any():
            return NearDuplicates("pictures", 0, 0, 0, (), ())
        if reason := too_many(self.examples):
            return not_compared("pictures", reason)
        return _compare(small_copies(self.examples), self.examples, self.places, held, trained, PART_NAMES[part])

    def compare_new(self, new: Pictures, shown: NDArray[np.bool_]) -> NearDuplicates:
        """Near-duplicates of the training pictures of these in new data.

        Args:
            shown: (num_new,) bool, the pictures of `new` to compare.
        """
        trained = np.flatnonzero(self.parts[Split.TRAIN]).tolist()
        chosen = np.flatnonzero(shown).tolist()
        mine, theirs = [self.examples[i] for i in trained], [new.examples[i] for i in chosen]
        if reason := too_many(self.examples) or too_many(theirs):
            return not_compared("pictures", reason)
        # The copies of all pictures of the run are in the cache since training.
        copies = np.concatenate([small_copies(self.examples)[trained], small_copies(theirs)])
        places = [*(self.places[i] for i in trained), *(new.places[i] for i in chosen)]
        held = np.arange(len(copies)) >= len(trained)
        return _compare(copies, [*mine, *theirs], places, held, ~held, NEW)


def _compare(
    copies: NDArray[np.uint8],
    examples: Sequence[ImageExample],
    places: Sequence[str],
    held: NDArray[np.bool_],
    trained: NDArray[np.bool_],
    part: str,
) -> NearDuplicates:
    if reason := _too_many_pairs(copies, held, trained):
        return not_compared("pictures", reason)
    near = near_pictures(copies, held, trained)
    both = np.flatnonzero(held & trained).tolist()  # the same file in rows of both parts
    near = sorted([*((one, one) for one in both), *((one, other) for one, other in near if not trained[one])])
    equal = sum(examples[one].sha256 == examples[other].sha256 for one, other in near)
    pictures, alike = number_of(int(held.sum()), "pictures"), number_of(len(near), "near-duplicates")
    lines = [f"  {part} {pictures}: {alike} of training ones"]
    lines[0] += f", {equal:,} of them equal" if equal else ""
    pairs = tuple((places[one], places[other]) for one, other in near[:MAX_SHOWN])
    lines += [f"    {one} is like {other}" for one, other in pairs] + ([f"    do: {advice(part)}"] if pairs else [])
    return NearDuplicates("pictures", int(held.sum()), equal, len(near) - equal, pairs, tuple(lines))


def tie_alike(examples: Sequence[ImageExample]) -> NDArray[np.int64]:
    """Number the sets of pictures that are near-duplicates, directly or through others, (num_pictures,) int64.

    Raises:
        SourceError: the pictures are too many to compare.
    """
    if reason := too_many(examples):
        raise _cannot_compare(reason)
    copies = small_copies(examples)
    _, first, same = np.unique(copies.reshape(len(copies), -1), axis=0, return_index=True, return_inverse=True)
    tied: NDArray[np.int64] = same.reshape(-1).astype(np.int64)  # equal copies need no comparison
    once = np.zeros(len(copies), np.bool_)
    once[first] = True
    if reason := _too_many_pairs(copies, once, once):
        raise _cannot_compare(reason)
    rows, keys, num = list[NDArray[np.int64]](), list[NDArray[np.int64]](), 0
    for row, chosen, _ in _near(copies, once, once):
        rows.append(np.append(chosen, row))
        keys.append(np.full(len(chosen) + 1, row))
        num += len(chosen) + 1
        if num > MOST_LINKS:
            tied = _joined(tied, rows, keys)
            rows, keys, num = [], [], 0
    return _joined(tied, rows, keys)


def _joined(tied: NDArray[np.int64], rows: list[NDArray[np.int64]], keys: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    links = [(np.arange(len(tied)), tied), *([(np.concatenate(rows), np.concatenate(keys))] if rows else [])]
    return components(len(tied), links)


def too_many(examples: Sequence[ImageExample]) -> str:
    """Reason not to decode pictures for comparison, or ""."""
    pixels = sum(example.width * example.height for example in examples)
    return f"{pixels / 1e9:,.1f} thousand million pixels are too many" if pixels > MOST_PIXELS else ""


def _cannot_compare(reason: str) -> SourceError:
    what = f"near-duplicate pictures cannot be looked for: {reason}"
    return SourceError(what, where="data.near_duplicates", fix="set data.near_duplicates=report")


def small_copies(examples: Sequence[ImageExample]) -> NDArray[np.uint8]:
    """Small copies of pictures on white, (num_images, 8, 9, 3) uint8, kept in the cache; 0 for a damaged picture."""
    key = make_key("pictures", VERSION, [example.sha256 for example in examples])
    path = cache_folder() / "pictures" / f"{key}.bin"
    shape = (len(examples), ROWS, COLUMNS, 3)
    cached, _ = read_sealed(path)
    if cached is not None and len(cached) == int(np.prod(shape)):
        return np.frombuffer(cached, np.uint8).reshape(shape)
    copies = np.zeros(shape, np.uint8)
    with ThreadPoolExecutor(DECODERS, thread_name_prefix="unpad-decoder") as pool:
        small = counted(pool.map(_small, examples), "comparing pictures", len(examples), "pictures")
        for index, copy in enumerate(small):
            copies[index] = copy
    with suppress(DiskError):  # the next run looks at the pictures again
        write_sealed(path, copies.tobytes())
    return copies


def _small(example: ImageExample) -> NDArray[np.uint8]:
    try:
        pixels = decode(read_bytes(example)).pixels
    except ImageError:  # training reports the damage
        return np.zeros((ROWS, COLUMNS, 3), np.uint8)
    return np.asarray(Image.fromarray(pixels).resize((COLUMNS, ROWS), Image.Resampling.BOX))


def near_pictures(
    copies: NDArray[np.uint8], held: NDArray[np.bool_], trained: NDArray[np.bool_]
) -> list[tuple[int, int]]:
    """Pair each held-out picture that is like a training picture with the nearest training picture, by index.

    Args:
        copies: of `small_copies`.
        held, trained: (num_images,) pictures of either side; one may be on both.
    """
    near = _near(copies, held, trained)
    return sorted((row, int(chosen[np.argmin(distance)])) for row, chosen, distance in near)


def _near(
    copies: NDArray[np.uint8], held: NDArray[np.bool_], trained: NDArray[np.bool_]
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.float64]]]:
    """Yield every held-out picture that is like others of training: its index, those of the others in rising order, and
    their differences in colour."""
    hashes, colours = _hashes(copies), copies.reshape(len(copies), -1).astype(np.int16)
    theirs, ours, low, high = _windows(copies, held, trained)
    rows_at_once = max(1, BLOCK // max(1, len(ours)))
    for start in range(0, len(theirs), rows_at_once):
        rows = theirs[start : start + rows_at_once]
        first, last = int(low[start]), int(high[start : start + rows_at_once].max())
        near = np.bitwise_count(hashes[rows][:, None] ^ hashes[ours[first:last]][None]) <= MOST_BITS
        for at in np.flatnonzero(near.any(1)).tolist():
            row = int(rows[at])
            chosen = np.sort(ours[first:last][near[at]])
            chosen = chosen[chosen != row]
            distance = np.abs(colours[chosen] - colours[row]).mean(1)
            alike = distance <= MOST_DIFFERENCE
            if alike.any():
                yield row, chosen[alike], distance[alike]


def _hashes(copies: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Difference hash of every small copy, (num_images,)."""
    grey = copies.astype(np.int16).sum(-1)  # (num_images, 8, 9)
    bits = (grey[:, :, 1:] > grey[:, :, :-1] + 3).reshape(len(copies), -1)
    return np.packbits(bits, axis=1).view(np.uint64)[:, 0]


def _windows(
    copies: NDArray[np.uint8], held: NDArray[np.bool_], trained: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Sort held-out and training pictures by brightness, and find the range of training pictures near enough in
    brightness to be like each held-out one: colours that differ little in the mean differ as little in their sum."""
    light = copies.reshape(len(copies), -1).sum(1, dtype=np.int64)
    theirs, ours = np.flatnonzero(held), np.flatnonzero(trained)
    theirs, ours = theirs[np.argsort(light[theirs], kind="stable")], ours[np.argsort(light[ours], kind="stable")]
    most = int(MOST_DIFFERENCE * ROWS * COLUMNS * 3)
    low = np.searchsorted(light[ours], light[theirs] - most, "left")
    high = np.searchsorted(light[ours], light[theirs] + most, "right")
    return theirs, ours, low, high


def _too_many_pairs(copies: NDArray[np.uint8], held: NDArray[np.bool_], trained: NDArray[np.bool_]) -> str:
    """Reason not to compare pictures of these parts, or ""."""
    _, _, low, high = _windows(copies, held, trained)
    pairs = int((high - low).sum())
    return f"{pairs / 1e9:,.1f} thousand million pairs of equal brightness are too many" if pairs > MOST_PAIRS else ""
