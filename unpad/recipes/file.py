"""Recipe files, packaged or the user's: found by name, and read as YAML with overrides; errors name the line."""

import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from unpad.errors import RecipeError, nearest
from unpad.recipes.data import KINDS
from unpad.recipes.lines import YAML_FAULTS, LineLoader, Lines, TwoReadingsError
from unpad.recipes.overrides import apply_override, as_long_as_asked, refuse_shadowed, refuse_split, without_packaged
from unpad.recipes.recipe import STAGE_SECTIONS, Recipe, stage_fields
from unpad.recipes.section import Fault, all_faults
from unpad.storage.paths import user_path
from unpad.terminal.table import described

RECIPES = Path(__file__).parent
SUFFIXES = (".yaml", ".yml")


def recipe_names() -> list[str]:
    """Names of the packaged recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def describe_recipes() -> list[str]:
    """Names of the packaged recipes, each with the first comment of its file."""
    names = recipe_names()
    first = [(RECIPES / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0] for name in names]
    return described(names, [comment.removeprefix("# ") for comment in first])


def find_recipe(recipe: str) -> Path:
    """Find a packaged recipe by name, or a YAML file by path.

    Raises:
        RecipeError: neither exists.
    """
    if "/" not in recipe and not recipe.endswith(SUFFIXES):
        path = RECIPES / f"{recipe}.yaml"
        if path.is_file():
            return path
        raise RecipeError(f'there is no recipe "{recipe}"', fix=nearest(recipe, recipe_names()))
    path = user_path(recipe)
    if not path.is_file():
        raise RecipeError(f"there is no file {recipe}", fix="check the path, or see `unpad recipes`")
    return path


def complete_recipe(incomplete: str) -> list[str]:
    """Packaged names and YAML files that begin with `incomplete`, for shell completion."""
    folder = incomplete[: incomplete.rfind("/") + 1]
    files = [folder + path.name for path in Path(folder).glob("*") if path.suffix in SUFFIXES and path.is_file()]
    return sorted(name for name in [*recipe_names(), *files] if name.startswith(incomplete))


MAX_RECIPE_BYTES = 1 << 20
GONE = {"train.pipeline_stages": "leave it out: train.shard=full divides any model among processes"}
MOST_FAULTS = 8  # faults of a recipe that are reported at once


@lru_cache(maxsize=16)
def parse_yaml(content: bytes) -> tuple[Any, Lines]:
    """Values of YAML and the line of every key; a run reads its recipe several times, and parsing takes most of it."""
    loader = LineLoader(content.decode())
    return loader.load(), loader.lines


def load_recipe(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    began: Sequence[str] = (),
    keep_packaged: bool = False,
    parse: Callable[[bytes], tuple[Any, Lines]] = parse_yaml,
) -> Recipe:
    """Load a recipe by packaged name or path, and apply `key.sub=value` overrides.

    A source given by an override replaces the packaged sources of the recipe, and epochs given by one its
    train.min_steps.

    Args:
        began: overrides of the command that started a run, applied first; some may be shadowed by stages.
        keep_packaged: keep packaged sources beside given ones.
        parse: values and lines of the file, which may be a run's.

    Raises:
        RecipeError: unknown recipe or key, wrong type or value, or a field that stages set themselves; names the file
            and line, or the override.
    """
    refuse_split(overrides)
    path = find_recipe(recipe)
    values, lines = _read(path, parse)
    first = [apply_override(values, given) for given in began]
    new = [apply_override(values, given) for given in overrides]
    loaded = _validate(values, str(path), lines, {override.path for override in [*first, *new]})
    refuse_shadowed(loaded, new)
    loaded = as_long_as_asked(loaded, [*first, *new])
    return loaded if keep_packaged else without_packaged(loaded, [*first, *new])


def _read(path: Path, parse: Callable[[bytes], tuple[Any, Lines]]) -> tuple[dict[str, Any], Lines]:
    """Values of a recipe file, and the line of every key."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_RECIPE_BYTES + 1)
    except OSError as error:
        what = f"the recipe cannot be read: {error.strerror or error}"
        raise RecipeError(what, where=str(path), fix="check the path and the file's permissions") from None
    if len(content) > MAX_RECIPE_BYTES:
        raise RecipeError("the recipe is larger than 1 MB", where=str(path), fix="a recipe is a short YAML file")
    try:
        values, lines = parse(content)
    except YAML_FAULTS as error:
        marked = error if isinstance(error, yaml.MarkedYAMLError) else None
        mark = marked.problem_mark if marked else None
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        what = str((marked and marked.problem) or error).splitlines()[0]
        fix = error.fix if isinstance(error, TwoReadingsError) else "correct the YAML"
        raise RecipeError(what, where=where, fix=fix) from None
    if not isinstance(values, dict):
        raise RecipeError("a recipe is a mapping of sections", where=str(path), fix="see `unpad recipes copy`")
    return deepcopy(values), lines  # overrides change the values in place


def load_settings(overrides: Sequence[str]) -> Recipe:
    """The defaults with overrides, for data that is named beside them.

    Raises:
        RecipeError: as `load_recipe`, or an override names data.
    """
    refuse_split(overrides)
    values: dict[str, Any] = {}
    given = [apply_override(values, one) for one in overrides]
    loaded = _validate(values, "command line", {}, {one.path for one in given})
    if named := [kind for kind in KINDS if loaded.data.sources(kind)]:
        what, fix = f"data.{named[0]} names data beside a file", "leave out the file, and name a recipe in its place"
        raise RecipeError(what, where="command line", fix=fix)
    return loaded


def parse_recipe(values: dict[str, Any]) -> Recipe:
    """Build a recipe from a dictionary.

    Raises:
        RecipeError: a key or value does not fit.
    """
    return _validate(values, "recipe", {}, set())


def _validate(values: dict[str, Any], origin: str, lines: Lines, overridden: set[tuple[str | int, ...]]) -> Recipe:
    try:
        return Recipe(**values)
    except ValidationError as error:
        faults = all_faults(error)
    told = []
    for fault in faults[:MOST_FAULTS]:
        path = fault.path
        if any(path[: len(o)] == o or o[: len(path)] == path for o in overridden if path):
            where = f"command line: {_named(fault, values)}"
        else:
            line = next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), None)
            name = _named(fault, values)
            where = f"{origin}:{line}: {name}" if line else f"{origin}: {name}".removesuffix(": ")
        fix = _nearest_field(fault, values) if fault.is_unknown else fault.fix or "correct this field"
        told.append((fault.message, where, fix))
    (what, where, fix), *others = told
    also = [f"also at {place}: {message}; {advice}" for message, place, advice in others]
    more = [f"and {len(faults) - MOST_FAULTS} more"] if len(faults) > MOST_FAULTS else []
    raise RecipeError(what, where=where, fix=fix, details=[*also, *more])


def _named(fault: Fault, values: dict[str, Any]) -> str:
    """The field of a fault in the form of an override: a stage by its name, if it has a valid one."""
    match fault.path:
        case ("stages", int(index), *rest) if rest and rest[0] != "name":
            stage = values["stages"][index]
            name = stage.get("name") if isinstance(stage, dict) else None
            if isinstance(name, str) and re.fullmatch(r"\w[\w-]*", name):
                return ".".join(["stages", name, *map(str, rest)])
    return fault.name


def _nearest_field(fault: Fault, values: dict[str, Any]) -> str:
    """Advice on an unknown key: fields of its section with a similar name, or fields elsewhere with the same name."""
    if fault.name in GONE:
        return GONE[fault.name]
    *section, name = map(str, fault.path)
    known, elsewhere = list(field_schema(fault.path[:-1]).get("properties", {})), []
    if not section:
        elsewhere = [f"{one}.{field}" for one in known for field in field_schema([one]).get("properties", {})]
    elif section[0] == "stages" and len(section) == 2:
        inner = f"stages.{values['stages'][int(section[1])].get('name')}."
        elsewhere = [f"{inner}{one}.{field}" for one in STAGE_SECTIONS for field in stage_fields(one)]
        elsewhere += [
            f"{one}.{field}"  # of the whole run
            for one in STAGE_SECTIONS
            for field in field_schema([one]).get("properties", {})
            if field not in stage_fields(one)
        ]
    elif section[0] == "stages" and len(section) == 3:  # sections of a stage are validated as those of the recipe
        known = stage_fields(section[2])
    same = [field for field in elsewhere if field.endswith(f".{name}")]
    if same and not get_close_matches(name, known, n=1, cutoff=0.7):
        return "did you mean " + " or ".join(same) + "?"
    return nearest(name, known)


@cache
def _schema() -> dict[str, Any]:
    return Recipe.model_json_schema()


def field_schema(path: Sequence[str | int]) -> dict[str, Any]:
    """JSON schema of the section or field at `path`; empty when the recipe has none there."""
    schema = _schema()
    node: dict[str, Any] = schema
    for part in path:
        node = node.get("items", {}) if isinstance(part, int) else node.get("properties", {}).get(part, {})
        node = node.get("allOf", [node])[0]
        sections = [one for one in node.get("anyOf", []) if "$ref" in one]
        if len(sections) == 1:  # a section that may be left out
            node = sections[0]
        if "$ref" in node:
            node = {**schema["$defs"][node["$ref"].rsplit("/", 1)[1]], **node}
    return node
