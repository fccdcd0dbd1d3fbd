"""Near-duplicate pictures in training and in other parts or new data, by small copies, and remarks on what makes
readable pictures of little use to a model.

A picture is shrunk to 12 x 12 pixels of red, green, blue and opacity. Two pictures are alike if their copies differ by
less than a quarter of the contrast of the flatter one, its root mean square about its own mean: so other sizes, formats
and qualities of a picture are found, and no two pictures are alike for being flat, sparse or transparent.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unpad.data.family import NearDuplicates, not_compared
from unpad.data.pixels.decode import decode
from unpad.data.pixels.formats import ImageError
from unpad.data.sources.images import ImageExample, read_bytes
from unpad.data.sources.leaks import NEW, PART_NAMES, advice, refused
from unpad.data.sources.split import Split
from unpad.data.tokens.cache import make_key, read_sealed, write_sealed
from unpad.errors import DiskError, SourceError
from unpad.recipes.data import ImageSettings
from unpad.storage import cache_folder
from unpad.terminal.progress import counted
from unpad.terminal.table import number_of

SIDE = 12
VERSION = 4  # of the small copies; a change makes new files in the cache
MOST_DIFFERENCE = 0.25  # of the contrast
MOST_JOINED = 0.2  # share of the pictures that advice may tie to others
MOST_PIXELS = 1 << 32  # decoding takes about a second per hundred million and processor
MOST_PICTURES = 1 << 17  # all pairs take about two minutes
MAX_SHOWN = 10
DECODERS = 4  # threads: decoding and resizing release the interpreter's lock
BLOCK = 1 << 22  # pairs that are compared at a time


@dataclass(frozen=True, eq=False)
class Pictures:
    """Pictures of a run's data and the parts that show them.

    Args:
        examples: all that were listed, of every part.
        places: the row that shows each, (num_pictures,).
        parts: part -> (num_pictures,) bool; a picture of questions may be of several parts. Empty for new data
            and for one question about many pictures.
        rule: `data.near_duplicates`.
        grey_bits: `images.grey_bits`.
    """

    examples: Sequence[ImageExample]
    places: Sequence[str]
    parts: dict[Split, NDArray[np.bool_]]
    rule: str
    grey_bits: int = 16

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
                pair = duplicates.lines[1].strip()
                raise refused(name, duplicates.num_equal + duplicates.num_near, "pictures", pair, self._advice(name))

    def compare(self, part: Split) -> NearDuplicates:
        """Near-duplicates of training pictures in another part."""
        nothing = np.zeros(len(self.examples), np.bool_)
        held, trained = self.parts.get(part, nothing), self.parts.get(Split.TRAIN, nothing)
        if not held.any() or not trained.any():
            return NearDuplicates("pictures", 0, 0, 0, (), ())
        return self._compare([self.examples], held, trained, PART_NAMES[part])

    def compare_new(self, new: "Pictures", shown: NDArray[np.bool_]) -> NearDuplicates:
        """Near-duplicates of the training pictures of these in new data.

        Args:
            shown: (num_new,) bool, the pictures of `new` to compare.
        """
        both = Pictures([*self.examples, *new.examples], [*self.places, *new.places], {}, self.rule, self.grey_bits)
        trained = np.concatenate([self.parts[Split.TRAIN], np.zeros(len(shown), np.bool_)])
        held = np.concatenate([np.zeros(len(self.examples), np.bool_), shown])
        return both._compare([self.examples, new.examples], held, trained, NEW)  # training left copies of the first

    def _compare(
        self, listed: list[Sequence[ImageExample]], held: NDArray[np.bool_], trained: NDArray[np.bool_], part: str
    ) -> NearDuplicates:
        if reason := too_many(self.examples):
            return not_compared("pictures", reason)
        pairs = [(both, both) for both in np.flatnonzero(held & trained).tolist()]  # one file in rows of both parts
        rows, others = np.flatnonzero(held & ~trained), np.flatnonzero(trained)
        copies = np.concatenate([small_copies(examples, self.grey_bits) for examples in listed])
        for row, like, difference in _near(copies, rows, others):
            pairs.append((row, int(like[np.argmin(difference)])))
        pairs.sort()
        equal = sum(self.examples[one].sha256 == self.examples[other].sha256 for one, other in pairs)
        pictures, alike = number_of(int(held.sum()), "pictures"), number_of(len(pairs), "near-duplicates")
        lines = [f"  {part} {pictures}: {alike} of training ones" + (f", {equal:,} of them equal" if equal else "")]
        lines += [f"    {self._pair(*pair)}" for pair in pairs[:MAX_SHOWN]]
        lines += [f"    do: {self._advice(part)}"] if pairs else []
        places = tuple((self.places[one], self.places[other]) for one, other in pairs[:MAX_SHOWN])
        return NearDuplicates("pictures", int(held.sum()), equal, len(pairs) - equal, places, tuple(lines))

    def _pair(self, one: int, other: int) -> str:
        labels = self.examples[one].label, self.examples[other].label
        another = f", under another label: {labels[0]}, {labels[1]}" if labels[0] != labels[1] else ""
        return f"{self.places[one]} is like {self.places[other]}{another}"

    def _advice(self, part: str) -> str:
        """Advice on near-duplicates in a part; one that would tie many pictures to others is not given."""
        if part == NEW or self.rule == "together":
            return advice(part)
        tied = tie_alike(self.examples, self.grey_bits)
        num_joined = len(tied) - len(np.unique(tied))
        if num_joined <= MOST_JOINED * len(tied):
            return advice(part)
        tied_to = f"would tie {num_joined:,} of {len(tied):,} to others"
        return f"compare these pictures; data.near_duplicates=together {tied_to}"


def tie_alike(examples: Sequence[ImageExample], grey_bits: int = 16) -> NDArray[np.int64]:
    """Number the sets of pictures that are near-duplicates of one of them, (num_pictures,) int64.

    The first picture of a set, by the content of its copy, is like each of the others; these need not be alike.

    Raises:
        SourceError: the pictures are too many to compare.
    """
    if reason := too_many(examples):
        raise _cannot_compare(reason)
    return _kept("tied pictures", examples, grey_bits, np.int64, lambda: _tied(small_copies(examples, grey_bits)))


def _tied(copies: NDArray[np.uint8]) -> NDArray[np.int64]:
    _, first, same = np.unique(copies.reshape(len(copies), -1), axis=0, return_index=True, return_inverse=True)
    tied = np.arange(len(first))  # equal copies need no comparison
    for row, like, _ in _near(copies[first], tied.copy(), tied.copy()):
        earlier = like[(like < row) & (tied[like] == like)]
        tied[row] = earlier[0] if len(earlier) else row
    return tied[same.reshape(-1)]


def too_many(examples: Sequence[ImageExample]) -> str:
    """Reason not to compare pictures, or ""."""
    if len(examples) > MOST_PICTURES:
        return f"{len(examples):,} are too many"
    pixels = sum(example.width * example.height for example in examples)
    return f"{pixels / 1e9:,.1f} thousand million pixels are too many" if pixels > MOST_PIXELS else ""


def _cannot_compare(reason: str) -> SourceError:
    what = f"near-duplicate pictures cannot be looked for: {reason}"
    return SourceError(what, where="data.near_duplicates", fix="set data.near_duplicates=report")


def small_copies(examples: Sequence[ImageExample], grey_bits: int = 16) -> NDArray[np.uint8]:
    """Small copies of pictures on white, with their opacity, (num_images, SIDE, SIDE, 4) uint8; 0 for a damaged one."""
    return _looks(examples, grey_bits)[:, :-3].reshape(-1, SIDE, SIDE, 4)


def extremes(examples: Sequence[ImageExample], grey_bits: int = 16) -> NDArray[np.uint8]:
    """The brightest sample of each picture on white, 1 if its colours vary, and 1 if its opacity does, (num_images, 3)
    uint8; 1 for a damaged one."""
    return _looks(examples, grey_bits)[:, -3:]


def _looks(examples: Sequence[ImageExample], grey_bits: int) -> NDArray[np.uint8]:
    """What small copies and extremes are, decoded once and kept in the cache, (num_images, SIDE * SIDE * 4 + 3)."""

    def make() -> NDArray[np.uint8]:
        with ThreadPoolExecutor(DECODERS, thread_name_prefix="unpad-decoder") as pool:
            looks = pool.map(partial(_look, grey_bits), examples)
            return np.array(list(counted(looks, "looking at pictures", len(examples), "pictures")), np.uint8)

    return _kept("pictures", examples, grey_bits, np.uint8, make).reshape(len(examples), -1)


def _kept(
    name: str, examples: Sequence[ImageExample], grey_bits: int, dtype: type, make: Callable[[], NDArray[Any]]
) -> NDArray[Any]:
    """Numbers made of pictures, from the cache if it has them."""
    key = make_key(name, VERSION, grey_bits, [example.sha256 for example in examples])
    path = cache_folder() / "pictures" / f"{key}.bin"
    values, _ = read_sealed(path)
    if values is None:
        values = make().tobytes()
        with suppress(DiskError):  # the next run looks at the pictures again
            write_sealed(path, values)
    return np.frombuffer(values, dtype)


def _look(grey_bits: int, example: ImageExample) -> NDArray[np.uint8]:
    try:
        pixels = decode(read_bytes(example), opacity=True, grey_bits=grey_bits).pixels
    except ImageError:  # training reports the damage
        return np.array([0] * (SIDE * SIDE * 4) + [1] * 3, np.uint8)
    parts = Image.fromarray(np.ascontiguousarray(pixels[:, :, :3])), Image.fromarray(pixels[:, :, 3])
    small = np.dstack([np.asarray(part.resize((SIDE, SIDE), Image.Resampling.HAMMING)) for part in parts])
    varies = (pixels != pixels[:1, :1]).any((0, 1))  # (4,)
    return np.append(small, [pixels[:, :, :3].max(), varies[:3].any(), varies[3]]).astype(np.uint8)


def _near(
    copies: NDArray[np.uint8], rows: NDArray[np.int64], others: NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.float64]]]:
    """Yield, in order, each of `rows` that is like some of `others`: its index, theirs, and the squares of their
    differences."""
    values = copies.reshape(len(copies), -1).astype(np.float32) - 128
    size = (values**2).sum(1)
    contrast = (copies.var((1, 2)).sum(-1) * SIDE**2).astype(np.float32)  # sum of squares about the mean
    theirs, at_once = values[others].T, max(1, BLOCK // max(1, len(others)))
    for start in range(0, len(rows), at_once):
        chosen = rows[start : start + at_once]
        difference = size[chosen][:, None] + size[others] - 2 * values[chosen] @ theirs
        most = MOST_DIFFERENCE**2 * np.minimum(contrast[chosen][:, None], contrast[others])
        may = difference <= most + 1e-5 * size[others] + 64  # the product is rounded; what it lets through is not
        for at in np.flatnonzero(may.any(1)).tolist():
            row, like = int(chosen[at]), others[may[at]]
            exact = ((copies[like].astype(np.int64) - copies[row]) ** 2).sum((1, 2, 3))
            alike = exact <= most[at][may[at]]
            if alike.any():
                yield row, like[alike], exact[alike].astype(np.float64)


# --------------------------------------------------------------------------- remarks


MOST_NAMED = 3
DARK = 15  # of 255: 12 bits of 16
MOST_KEPT = 0.5  # share of its pixels from which a picture is not called shrunk
PROPERTIES: dict[str, Callable[[ImageExample], str]] = {
    "size": lambda picture: f"{picture.width} x {picture.height}",
    "mode": lambda picture: picture.mode,
    "kind of file": lambda picture: picture.path.suffix.casefold(),
}


def label_remarks(examples: Sequence[ImageExample]) -> list[str]:
    """Warnings about the classes of pictures: of one file under two, of a single picture, told by the files."""
    same, classes = defaultdict[str, dict[str, str]](dict), defaultdict[str, list[str]](list)
    for picture in examples:
        same[picture.sha256].setdefault(picture.label, picture.where)
        classes[picture.label].append(picture.where)
    several = [[f"{where} ({label})" for label, where in each.items()] for each in same.values() if len(each) > 1]
    lines = _warning([" and ".join(each) for each in several], "pictures", "under two labels", "keep the right one")
    single = [f"{label} ({where[0]})" for label, where in classes.items() if len(where) == 1]
    fix = "add pictures, or leave it out: one cannot be both learnt and measured"
    lines += _warning(single, "classes", "of a single picture", fix)
    if clue := class_clue(examples):
        lines.append(f"warning: the {clue.name} of a picture alone tells the class of {clue.share:.0%} of them")
        lines.append(f"  with {clue.value} it is {clue.label}; do: bring the files of all classes into one form")
    return lines


class Clue(NamedTuple):
    """A property of PROPERTIES, the share of pictures whose class it tells, its commonest value, and that class."""

    name: str
    share: float
    value: str
    label: str


def class_clue(examples: Sequence[ImageExample]) -> Clue | None:
    """The property of files that alone tells the class of nearly all of 40 pictures or more, or None."""
    classes = Counter(picture.label for picture in examples)
    if len(examples) < 40 or max(classes.values()) > 0.75 * len(examples):
        return None
    for name, of in PROPERTIES.items():
        counts = defaultdict[str, Counter[str]](Counter)
        for picture in examples:
            counts[of(picture)][picture.label] += 1
        share = sum(max(classes.values()) for classes in counts.values()) / len(examples)
        if 2 <= len(counts) <= len(examples) / 8 and share >= 0.97:
            value, classes = max(counts.items(), key=lambda item: item[1].total())
            return Clue(name, share, value, classes.most_common(1)[0][0])
    return None


def pixel_remarks(examples: Sequence[ImageExample], settings: ImageSettings, channels: int = 4) -> list[str]:
    """Warnings about pictures of 16 bits that are dark for want of a range, and about those of one colour.

    Too many to look at, as for near-duplicates, have none.

    Args:
        channels: of the model, 4 with opacity.
    """
    if not examples or too_many(examples):
        return []
    brightest, colours, opacity = extremes(examples, settings.grey_bits).T.astype(np.int64)
    deep = np.array([picture.mode.endswith("16 bits") for picture in examples])
    top, lines = int(brightest[deep].max(initial=0)), []
    if is_dark := settings.grey_bits == 16 and deep.any() and top <= DARK:
        what = f"no value of {number_of(int(deep.sum()), 'pictures')} of 16 bits reaches {(top + 1) << 8:,} of 65,535"
        fix = f"set images.grey_bits={12 if top else 8} if they are grey, or scale them to the whole range"
        lines += [f"warning: {what}: black or nearly so", f"  do: {fix}"]
    blank = (colours == 0) & ((opacity == 0) | (channels < 4)) & ~(deep & is_dark)
    where = [examples[index].where for index in np.flatnonzero(blank).tolist()]
    what, fix = "of one colour as the model sees them", "leave them out, or look at how they were written"
    return lines + _warning(where, "pictures", what, fix)


def shrunk(
    examples: Sequence[ImageExample], grids: NDArray[np.int64], patch: int, settings: ImageSettings
) -> list[str]:
    """A line on the pictures that lose half of their pixels or more, and by which field.

    Args:
        grids: (num_pictures, 2), rows and columns of patches of each; patch: pixels a side.
    """
    sizes = np.array([(picture.width, picture.height) for picture in examples], np.int64).reshape(-1, 2)
    small = grids.prod(1) * patch**2 < MOST_KEPT * sizes.prod(1)
    if not small.any():
        return []
    width, height = np.median(sizes[small], axis=0).astype(int).tolist()
    is_fixed = settings.size in ("square", "letterbox")
    side = settings.square if is_fixed else int(settings.max_tokens**0.5 * patch)
    field = f"images.square={side}" if is_fixed else f"images.max_tokens={settings.max_tokens}"
    several = f"{small.sum():,} of " if small.sum() < len(small) else ""
    what = f"{several}{number_of(len(small), 'pictures')}, median {width:,} x {height:,}"
    return [f"{what}, shrunk to {'' if is_fixed else 'about '}{side} x {side} by {field}"]


def _warning(names: Sequence[str], unit: str, what: str, fix: str) -> list[str]:
    """A warning with the first names and a fix; none without names."""
    more = f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else ""
    named = ", ".join(names[:MOST_NAMED]) + more
    return [f"warning: {number_of(len(names), unit)} {what}: {named}", f"  do: {fix}"] if names else []
