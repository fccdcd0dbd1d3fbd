"""Overrides: `key.sub=value` on the command line, applied to the values of a recipe file."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from unpad.errors import RecipeError, nearest
from unpad.recipes.data import KINDS, EventLabels, EventSource, Source, as_sources, is_packaged
from unpad.recipes.lines import YAML_FAULTS, LineLoader, TwoReadingsError
from unpad.recipes.recipe import STAGE_SECTIONS, Recipe

# Sections that a command line may give as a whole, in braces, and a fragment of one.
_BRACED = ("events.labels", *(f"data.{kind}" for kind in KINDS))
_FIELDS = {*Source.model_fields, *EventSource.model_fields, *EventLabels.model_fields}
_PIECE = re.compile(rf"(?:{'|'.join(sorted(_FIELDS))}):(?!//)")


@dataclass(frozen=True)
class Override:
    """One `key=text` of the command line.

    Args:
        key: as written; may name a stage.
        text: the value as written.
        path: keys and list indices that lead to the field.
        value: parsed from the text.
    """

    key: str
    text: str
    path: tuple[str | int, ...]
    value: Any


def apply_override(values: dict[str, Any], given: str) -> Override:
    """Apply one `key.sub=value` to the values of a recipe, in which stages may be named.

    Raises:
        RecipeError: it is not key=value, the value is not YAML, or the key leads into nothing.
    """
    key, equals, text = given.partition("=")
    if not equals or not key:
        raise RecipeError(f'"{given}" is not key=value', where="command line", fix="write for example optim.lr=1e-4")
    where = f"command line: {key}"
    try:
        value = LineLoader(text).load() if text.strip() else ""
    except TwoReadingsError as error:
        raise RecipeError(str(error.problem), where=where, fix=error.fix) from None
    except YAML_FAULTS:
        fix = "write a value in place of each ?" if ": ?" in text else "quote it"
        raise RecipeError(f'"{text[:80]}" is not a YAML value', where=where, fix=fix) from None
    parts: list[str | int] = []
    here: Any = values
    names = key.split(".")
    for position, name in enumerate(names):
        step: str | int = name
        if isinstance(here, list):
            step = _list_index(here, name, key)
        elif not isinstance(here, dict):
            raise RecipeError(f'"{".".join(names[:position])}" holds a value, not a section', where=where)
        parts.append(step)
        if position == len(names) - 1:
            here[step] = value
        else:
            if isinstance(here, dict):
                here[step] = _section_below(here.get(step), tuple(parts), names[position + 1], where)
            here = here[step]
    return Override(key, text, tuple(parts), value)


def refuse_split(overrides: Sequence[str]) -> None:
    """Refuse braces that a shell has split, or without a blank after a colon; the error has the quoted form.

    Raises:
        RecipeError: an override of a source, or of the labels, is such a fragment.
    """
    for index, given in enumerate(overrides):
        key, _, text = given.partition("=")
        if key.partition(".")[0] not in ("data", "events"):
            continue
        if text.startswith("{") and "}" not in text:  # at its blanks
            rest = list(takewhile(lambda word: "}" not in word, overrides[index + 1 :]))
            pieces = " ".join([text, *overrides[index + 1 :][: len(rest) + 1]])
        elif key in _BRACED and _PIECE.match(text):  # at its commas, each with the key
            pieces = ",".join(one.partition("=")[2] for one in overrides if one.startswith(f"{key}="))
        elif key in _BRACED and re.match(r"\{\s*\w+:[^\s]", text):
            pieces = text
        else:
            continue
        fields = [re.sub(r"^(\w+):\s*", r"\1: ", piece.strip()) for piece in pieces.strip("{} ").split(",")]
        whole = f"{key}={{{', '.join(filter(None, fields))}"
        whole += "}" * (whole.count("{") - whole.count("}"))
        what = "a value in braces needs quotes in a shell, and a blank after each colon"
        raise RecipeError(what, where=f"command line: {given}", fix=f"write '{whole}'")


def _section_below(value: Any, path: tuple[str | int, ...], name: str, where: str) -> Any:
    """The mapping or list at `path` that an override of its part `name` changes; a new mapping if there is none."""
    if path == ("stages",) and not value:
        fix = f"leave out stages.{name}., or list the stages in a recipe file"
        raise RecipeError(f'there is no stage "{name}": the recipe has no stages', where=where, fix=fix)
    if len(path) == 2 and path[0] == "data" and path[1] in KINDS and name.isdigit():
        return as_sources(value)
    return value if isinstance(value, dict | list) else {}


def _list_index(items: list[Any], name: str, key: str) -> int:
    names = [str(item.get("name", i)) if isinstance(item, dict) else str(i) for i, item in enumerate(items)]
    if name in names:
        return names.index(name)
    if name.isdigit() and int(name) < len(items):
        return int(name)
    what = f'there is no stage "{name}"' if key.startswith("stages.") else f'there is no "{name}" here'
    raise RecipeError(what, where=f"command line: {key}", fix=nearest(name, names))


def refuse_shadowed(recipe: Recipe, overrides: Sequence[Override]) -> None:
    """Refuse overrides of fields that stages set themselves, where they would have no effect.

    A stage that another override sets explicitly does not count, unless no stage is left.

    Raises:
        RecipeError: names the field in each stage.
    """
    for override in overrides:
        section, field = str(override.path[0]), override.path[1:2]
        for name in field or (override.value if section in STAGE_SECTIONS else ()):
            _refuse_shadowed(recipe, overrides, override, section, str(name))


def _refuse_shadowed(
    recipe: Recipe, overrides: Sequence[Override], override: Override, section: str, field: str
) -> None:
    if section not in STAGE_SECTIONS:
        return
    setting = [index for index, stage in enumerate(recipe.stages) if field in stage.changes[section]]
    shadowing = [index for index in setting if not _gives(overrides, ("stages", index, section, field))]
    if not shadowing and len(setting) < max(len(recipe.stages), 1):
        return
    whole = len(override.path) == 1
    given = json.dumps(override.value[field], ensure_ascii=False) if whole else override.text
    key = f"{section}.{field}" if whole else override.key
    names = [recipe.stages[index].name for index in shadowing or setting]
    own = " ".join(shlex.quote(f"stages.{stage.name}.{key}={given}") for stage in recipe.stages)
    raise RecipeError(
        f"{section}.{field} is set by {'stage' if len(names) == 1 else 'stages'} {' and '.join(names)}, "
        "where this would change nothing",
        where=f"command line: {override.key}",
        fix=f"name the stage: {own}",
    )


def _gives(overrides: Sequence[Override], path: tuple[str | int, ...]) -> bool:
    """True if an override gives the field at `path`, alone or within a section."""
    return any(path[: len(one.path)] == one.path or one.path[: len(path)] == path for one in overrides)


def without_packaged(recipe: Recipe, overrides: Sequence[Override]) -> Recipe:
    """Drop the packaged sources of a recipe if an override gives a source; sources that overrides name stay.

    Raises:
        RecipeError: events are given, but one of their tables would still be the package's.
    """
    giving = [override for override in overrides if _gives_source(override)]
    if not giving:
        return recipe
    if any(override.path[1] == "events" for override in giving):
        for field, path in recipe.events.tables.items():
            if is_packaged(path) and not _gives(overrides, ("events", *field.split("."))):
                fix = f"give events.{field}=FILE as well, or events.{field.partition('.')[0]}=null"
                what = f"data.events is yours, and events.{field} is the package's own: {path}"
                raise RecipeError(what, where=f"command line: {giving[0].key}", fix=fix)
    kept = {
        kind: [
            source
            for index, source in enumerate(recipe.data.sources(kind))
            if not is_packaged(source.path) or any(_names_source(override, kind, index) for override in overrides)
        ]
        for kind in KINDS
    }
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=kept)})


def as_long_as_asked(recipe: Recipe, overrides: Sequence[Override]) -> Recipe:
    """Drop train.min_steps where overrides give epochs, and not the steps too: who asks for two epochs gets two."""

    def is_dropped(*section: str | int) -> bool:
        return _gives(overrides, (*section, "max_epochs")) and not _gives(overrides, (*section, "min_steps"))

    if not any(train.get("min_steps") for train in (recipe.train.model_dump(), *(one.train for one in recipe.stages))):
        return recipe
    stages = [
        stage.model_copy(update={"train": {**stage.train, "min_steps": None}})
        if is_dropped("stages", index, "train")
        else stage
        for index, stage in enumerate(recipe.stages)
    ]
    train = recipe.train.model_copy(update={"min_steps": None}) if is_dropped("train") else recipe.train
    return recipe.model_copy(update={"stages": stages, "train": train})


def _gives_source(override: Override) -> bool:
    """True if an override gives files to read, rather than none, or another field of a source."""
    head, *rest = override.path
    if head != "data" or not rest or rest[0] not in KINDS or not override.value:
        return False
    return len(rest) == 1 or rest[-1] == "path" or (len(rest) == 2 and isinstance(rest[1], int))


def _names_source(override: Override, kind: str, index: int) -> bool:
    """True if an override gives or changes the source of this kind and index, alone or with others."""
    head, *rest = override.path
    if head != "data" or (rest and rest[0] != kind):
        return False
    return len(rest) < 2 or rest[1] == index or isinstance(rest[1], str)
