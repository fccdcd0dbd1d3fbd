"""Loading of recipe files: YAML with line numbers, overrides as `key.sub=value`, and errors that name the line."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import yaml
from pydantic import ValidationError

from unpad.errors import RecipeError, nearest
from unpad.recipes.find import find_recipe
from unpad.recipes.recipe import Recipe
from unpad.recipes.section import first_fault

MAX_RECIPE_BYTES = 1 << 20
KEY_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
NUMBER_TAG = "tag:yaml.org,2002:int"
MAX_YAML_NODES = 20_000  # a bomb of aliases in 300 bytes expands to millions
# PyYAML does not wrap the ValueError of an impossible date or number.
YAML_FAULTS = (yaml.YAMLError, ValueError, RecursionError)


class _LineLoader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys and bombs of aliases, and records the line of every key."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lines: dict[tuple[str | int, ...], int] = {}

    def load(self) -> Any:
        node = self.get_single_node()
        if node is None:
            return {}
        self._walk(node, (), [0])
        return self.construct_document(node)

    def _walk(self, node: yaml.Node, path: tuple[str | int, ...], visited: list[int]) -> None:
        visited[0] += 1
        if visited[0] > MAX_YAML_NODES or len(path) > 50:
            raise yaml.MarkedYAMLError(
                problem="too large or too deeply nested for a recipe", problem_mark=node.start_mark
            )
        self.lines[path] = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, value in node.value:
                if key.tag == NUMBER_TAG:  # fields with numbers as keys, such as plan.grow, parse them from text
                    key.tag = KEY_TAGS[0]
                if key.tag not in KEY_TAGS:  # YAML reads `on` as a boolean
                    raise yaml.MarkedYAMLError(problem="a key is not a name; quote it", problem_mark=key.start_mark)
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f'the key "{key.value}" occurs twice', problem_mark=key.start_mark
                    )
                seen.add(key.value)
                self._walk(value, (*path, key.value), visited)
                self.lines[(*path, key.value)] = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                self._walk(value, (*path, index), visited)


def load_recipe(recipe: str, overrides: list[str] | None = None) -> Recipe:
    """Load a recipe by packaged name or path, and apply `key.sub=value` overrides.

    Raises:
        RecipeError: unknown recipe or key, wrong type or value; names the file and line, or the override.
    """
    path = find_recipe(recipe)
    if path.stat().st_size > MAX_RECIPE_BYTES:
        raise RecipeError("the recipe is larger than 1 MB", where=str(path), fix="a recipe is a short YAML file")
    try:
        loader = _LineLoader(path.read_text(encoding="utf-8"))
        values = loader.load()
    except YAML_FAULTS as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = f"{path}:{line + 1}" if line is not None else str(path)
        raise RecipeError(
            str(getattr(error, "problem", None) or error).splitlines()[0], where=where, fix="correct the YAML"
        ) from None
    if not isinstance(values, dict):
        raise RecipeError("a recipe is a mapping of sections", where=str(path), fix="see `unpad recipes copy`")
    overridden = {_override(values, text) for text in overrides or []}
    return _validate(values, str(path), loader.lines, overridden)


def parse_recipe(values: dict[str, Any]) -> Recipe:
    """Build a recipe from a dictionary.

    Raises:
        RecipeError: a key or value does not fit.
    """
    return _validate(values, "recipe", {}, set())


def _override(values: dict[str, Any], text: str) -> tuple[str | int, ...]:
    """Apply one `key.sub=value` to `values`, in which stages may be named, and return the path of the field."""
    key, equals, raw = text.partition("=")
    if not equals or not key:
        raise RecipeError(f'"{text}" is not key=value', where="command line", fix="write for example optim.lr=1e-4")
    try:
        value = _LineLoader(raw).load() if raw.strip() else ""
    except YAML_FAULTS:
        raise RecipeError(f'"{raw[:80]}" is not a YAML value', where=f"command line: {key}", fix="quote it") from None
    parts: list[str | int] = []
    here: Any = values
    names = key.split(".")
    for position, name in enumerate(names):
        last = position == len(names) - 1
        step: str | int = name
        if isinstance(here, list):
            step = _list_index(here, name, key)
        elif not isinstance(here, dict):
            raise RecipeError(
                f'"{".".join(names[:position])}" holds a value, not a section', where=f"command line: {key}"
            )
        parts.append(step)
        if last:
            here[step] = value
        else:
            if isinstance(here, dict) and not isinstance(here.get(step), dict | list):
                here[step] = {}
            here = here[step]
    return tuple(parts)


def _list_index(items: list[Any], name: str, key: str) -> int:
    names = [str(item.get("name", i)) if isinstance(item, dict) else str(i) for i, item in enumerate(items)]
    if name in names:
        return names.index(name)
    if name.isdigit() and int(name) < len(items):
        return int(name)
    raise RecipeError(f'there is no "{name}" here', where=f"command line: {key}", fix=nearest(name, names))


def _validate(
    values: dict[str, Any], origin: str, lines: dict[tuple[str | int, ...], int], overridden: set[tuple[str | int, ...]]
) -> Recipe:
    try:
        return Recipe(**values)
    except ValidationError as error:
        fault = first_fault(error)
        path = fault.path
        if any(path[: len(o)] == o or o[: len(path)] == path for o in overridden if path):
            where = f"command line: {fault.name}"
        else:
            line = next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), None)
            where = f"{origin}:{line}: {fault.name}" if line else f"{origin}: {fault.name}".removesuffix(": ")
        if fault.is_unknown:
            # Sections of a stage are validated as those of the recipe.
            section = field_schema(path[2:-1] if path[0] == "stages" and len(path) > 3 else path[:-1])
            fix = nearest(str(path[-1]), list(section.get("properties", {})))
            raise RecipeError(f'unknown key "{path[-1]}"', where=where, fix=fix) from None
        raise RecipeError(fault.message + fault.given, where=where, fix="correct this field") from None


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
        if "$ref" in node:
            node = {**schema["$defs"][node["$ref"].rsplit("/", 1)[1]], **node}
    return node
