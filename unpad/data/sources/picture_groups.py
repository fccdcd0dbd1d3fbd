"""Pictures of one thing at several sizes, found by the names of their files."""

from __future__ import annotations

import re
from collections.abc import Sequence

from unpad.data.sources.images import ImageExample

_SCALE = re.compile(r"@\d(\.\d)?x$")
_SIZED = re.compile(r"(.*?[^\d])(\d{1,4})(?:x(\d{1,4}))?")  # name_16, name-32x32
_FOLDER = re.compile(r"\d{1,4}(x\d{1,4})?(@\dx?)?")  # 16, 32x32, 16x16@2x


def group_names(examples: Sequence[ImageExample]) -> list[str]:
    """Group of every picture: the one that its row declares, or the name of its file if it occurs at several sizes.

    A number at the end of a name that is the picture's own width or height is no part of the name, nor is "@2x":
    16/x.png, 32/x.png, x_64.png and x@2x.png are one thing. Names of numbers alone, such as 0001.jpg, count as names
    only in folders that are named after sizes. Names that end in a number, as cameras write them, mean the same thing
    only within a class, or within a folder of pictures without classes.

    Returns:
        One name per picture, "" for a picture that is in no group.
    """
    keys: list[tuple[str, str] | None] = []
    sizes: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for example in examples:
        key = None if example.group or example.row is not None else _key(example)
        keys.append(key)
        if key is not None:
            sizes.setdefault(key, set()).add((example.width, example.height))
    return [
        example.group or (f"{key[0]}/{key[1]}" if key is not None and len(sizes[key]) > 1 else "")
        for example, key in zip(examples, keys, strict=True)
    ]


def _key(example: ImageExample) -> tuple[str, str] | None:
    """Scope and name of the thing that a file shows; None for a name that is a mere number."""
    name = _SCALE.sub("", example.path.stem)
    sized = _SIZED.fullmatch(name)
    if sized is not None and {int(number) for number in sized.groups()[1:] if number} & {example.width, example.height}:
        name = sized[1].rstrip("-_ .@") or name
    folder = example.path.parent.name
    if not any(letter.isalpha() for letter in name) and _FOLDER.fullmatch(folder) is None:
        return None
    return (example.label or str(example.path.parent)) if name[-1].isdigit() else "", name
