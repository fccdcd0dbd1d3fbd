"""What makes readable pictures of little use to a model: black and blank ones, labels that contradict each other,
classes that a property of the files tells, and how far pictures are shrunk."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unpad.data.pictures.alike import extremes, too_many
from unpad.data.sources.images import ImageExample
from unpad.recipes.data import ImageSettings
from unpad.terminal.table import number_of

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
