"""Troubles planted by people who do not know the doctor's code: what they write, and how its findings are judged.

A module of them, such as `benchmarks/doctor_unseen.py`, has two lists of functions:

    TROUBLES: list[Callable[[Path], tuple[list[str], str, list[str], list[str]]]]
    HEALTHY: list[Callable[[Path], list[str]]]

A trouble gets an empty folder and returns (arguments, cause, fields, words):

- arguments of `unpad doctor`: a recipe, which it has written into the folder with the absolute paths of its data, the
  name of a packaged recipe, or the directory of a run; then overrides. No options.
- cause: one sentence that says what is wrong, for the page.
- fields: of the recipe, or other places; a right finding names one of them among its fields or in its words. A field
  is written as in overrides; `stages.NAME.` before it does not matter.
- words: one of them stands in the finding's English reason or advice, capitals ignored; none: the field says it all.

It is found if the first or second finding above a note is right, or if the error is with which the recipe or its data
is refused. A healthy recipe gets an empty folder and returns the arguments alone; it has no finding above a note. Both
draw everything from fixed seeds and change nothing outside of their folder.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.doctor.examining import SECONDS, quiet_machine
from unpad.doctor.examine import examine
from unpad.doctor.words import sentences
from unpad.errors import UnpadError
from unpad.terminal.finding import Finding

Planted = Callable[[Path], tuple[list[str], str, list[str], list[str]]]
Healthy = Callable[[Path], list[str]]


@dataclass(frozen=True)
class Verdict:
    """What the doctor said of a planted trouble.

    Args:
        rank: of the first right finding, 0 where there is none; an error that refuses the recipe has rank 1.
        said: codes of the findings above a note, or the name of the error.
        first: reason of the first finding, or the error.
    """

    cause: str
    rank: int
    said: list[str]
    first: str


def load(path: Path) -> tuple[list[Planted], list[Healthy]]:
    """The troubles and healthy recipes of a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "a path of a Python file"
    assert spec.loader is not None, "a path of a Python file"
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return list(module.TROUBLES), list(module.HEALTHY)


def name_of(made: Callable[..., object]) -> str:
    return made.__name__.replace("_", " ")


def judge(trouble: Planted, folder: Path) -> Verdict:
    """Plant a trouble in a folder, examine it, and look where a right finding stands."""
    arguments, cause, fields, words = trouble(folder)
    found = findings(arguments)
    if isinstance(found, UnpadError):
        return Verdict(cause, int(is_right([], str(found), fields, words)), [type(found).__name__], found.what)
    told = [(list(one.fields), " ".join(sentences(one, "en"))) for one in found]
    rank = next((at for at, (own, text) in enumerate(told, 1) if is_right(own, text, fields, words)), 0)
    return Verdict(cause, rank, [one.code for one in found], sentences(found[0], "en")[0] if found else "")


def findings(arguments: Sequence[str]) -> list[Finding] | UnpadError:
    """Findings above a note on a quiet machine, or the error that refuses the recipe."""
    try:
        return examine(arguments[0], arguments[1:], SECONDS, quiet_machine()).troubles
    except UnpadError as error:
        return error


def is_right(own: Sequence[str], text: str, fields: Sequence[str], words: Sequence[str]) -> bool:
    """True if a finding names one of the fields, and says one of the words if there are any."""
    plain = [re.sub(r"^stages\.[\w-]+\.", "", field) for field in own]
    names = any(field in plain or re.search(rf"(?<![\w.]){re.escape(field)}(?![\w])", text) for field in fields)
    return bool(names) and (not words or any(word.lower() in text.lower() for word in words))
