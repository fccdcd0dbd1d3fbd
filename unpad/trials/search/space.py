"""Search space: ranges and choices of recipe fields, as written on the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from unpad.errors import RecipeError
from unpad.interchange.origin import open_recipe
from unpad.recipes.recipe import Recipe
from unpad.training.setup import resolved

NUMBER = re.compile(r"[-+]?(\d+(\.\d+)?|\.\d+)([eE][-+]?\d+)?")
# A path may contain two dots as well, but then also a slash.
RANGE = re.compile(r"(?P<low>[^/\\]+?)\.\.(?P<high>[^/\\:]+)(?P<scale>:[^/\\]*)?")
OPENING, CLOSING, QUOTES = "[{", "]}", "\"'"


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; optionally whole, or uniform in their logarithm."""

    low: float
    high: float
    whole: bool
    log: bool

    def ends(self) -> list[str]:
        return [written(int(end) if self.whole else end) for end in (self.low, self.high)]


@dataclass(frozen=True)
class Choice:
    """One of several values, each as text that a recipe field is given."""

    options: tuple[str, ...]

    def ends(self) -> list[str]:
        return list(self.options)


Space = dict[str, Range | Choice]


def written(value: float | int | str) -> str:
    """A value as text for an override, which parses to the same number."""
    text = value if isinstance(value, str) else repr(value)
    mantissa, e, exponent = text.partition("e")
    # YAML takes 1e-05 for a word, and 1.0e-05 for the number.
    return f"{mantissa}.0e{exponent}" if e and not isinstance(value, str) and "." not in mantissa else text


def split_fields(fields: Sequence[str]) -> tuple[Space, list[str]]:
    """Separate `key=LOW..HIGH`, `key=LOW..HIGH:log` and `key=a,b,c` from fields with one value.

    A range with two whole ends holds whole numbers. Commas within brackets or quotes do not separate.

    Raises:
        RecipeError: a range or a choice is invalid, or a key is given twice; names the key.
    """
    space: Space = {}
    fixed: list[str] = []
    seen: set[str] = set()
    for field in fields:
        key, _, text = field.partition("=")
        if key in seen:
            raise RecipeError("the key is given twice", where=f"command line: {key}", fix="give it once")
        seen.add(key)
        match = RANGE.fullmatch(text.strip()) if not text.strip().startswith(tuple(QUOTES)) else None
        options = _parts(text)
        if len(options) > 1:
            space[key] = _choice(key, options)
        elif match is not None:
            space[key] = _range(key, match)
        else:
            fixed.append(field)
    return space, fixed


def check_space(recipe: str, fixed: Sequence[str], space: Space) -> Recipe:
    """Refuse a space that no trial could use: each end of a range, and each choice, must fit the recipe alone.

    Returns:
        The recipe with the fixed fields alone.

    Raises:
        RecipeError: names the key.
    """
    for key, of in space.items():
        for end in of.ends():
            try:
                resolved(open_recipe(recipe, [*fixed, f"{key}={end}"]))
            except RecipeError as error:
                raise RecipeError(f"{key}={end}: {error.what}", where=f"command line: {key}", fix=error.fix) from None
    return resolved(open_recipe(recipe, list(fixed)))


def _range(key: str, match: re.Match[str]) -> Range:
    where = f"command line: {key}"
    low, high, scale = match["low"].strip(), match["high"].strip(), match["scale"]
    fix = "write for example optim.lr=1e-4..1e-2:log; text that is no range goes in quotes"
    for end in (low, high):
        if NUMBER.fullmatch(end) is None:
            raise RecipeError(f'"{end}" is no number, so {match[0]} is no range', where=where, fix=fix)
    if scale not in (None, ":log"):
        raise RecipeError(f'a range may end with ":log", not with "{scale}"', where=where, fix=fix)
    whole = not any(mark in end for end in (low, high) for mark in ".eE")
    span = Range(float(low), float(high), whole, scale is not None)
    if not math.isfinite(span.low) or not math.isfinite(span.high):
        raise RecipeError(f"{match[0][:80]} has an end that is too large for a number", where=where, fix=fix)
    if span.low >= span.high:
        raise RecipeError(f"the range {match[0]} is empty", where=where, fix="write the lower end first")
    if span.log and span.low <= 0:
        fix = "begin above 0, or leave out :log"
        raise RecipeError(f"{match[0]} has no logarithm at {low}", where=where, fix=fix)
    return span


def _choice(key: str, options: list[str]) -> Choice:
    where = f"command line: {key}"
    if "" in options:
        raise RecipeError("a choice is empty", where=where, fix='write "" for no text')
    if len(set(options)) < len(options):
        raise RecipeError("a choice is given twice", where=where, fix="give each once")
    return Choice(tuple(options))


def _parts(text: str) -> list[str]:
    """Split the text at its commas, except commas within brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in QUOTES:
            quote = letter
        depth += (letter in OPENING) - (letter in CLOSING) if not quote else 0
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]
