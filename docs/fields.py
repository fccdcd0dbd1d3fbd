"""Tables of recipe fields in docs/recipes.md, made from the sections themselves.

python docs/fields.py    replaces the tables between the page's two marks
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from unpad.models import model_kinds, model_module
from unpad.recipes.recipe import Recipe
from unpad.recipes.section import Section, descriptions

PAGE = Path(__file__).with_name("recipes.md")
BEGIN, END = "<!-- fields: begin -->\n", "<!-- fields: end -->\n"
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def tables() -> str:
    """All tables: the sections of a recipe, then the model section of every kind."""
    plain = {name for name in Recipe.model_fields if nested(Recipe, name) and name not in descriptions(Recipe)}
    told: dict[str, str] = {}
    parts = ["### Outside of sections\n", table(Recipe, plain, "", told)]
    seen: set[type[Section]] = set()
    for name in Recipe.model_fields:
        for section in nested(Recipe, name):
            parts += with_nested(name, section, seen, told)
    for kind in model_kinds():
        parts += with_nested("model", model_module(kind).Config, seen, told, kind)
    return "\n".join(parts)


def with_nested(
    path: str, section: type[Section], seen: set[type[Section]], told: dict[str, str], kind: str = ""
) -> Iterator[str]:
    """A table, and below it those of the sections inside its fields, each section once."""
    if section in seen:
        return
    seen.add(section)
    title = f"`{path}`{f' with `kind: {kind}`' if kind else ''}"
    yield f"### {title}\n"
    if section.__dict__.get("__doc__") and not kind:
        yield " ".join(str(section.__doc__).split()) + "\n"
    yield table(section, {"kind"} if kind else set(), title, told)
    for name in section.model_fields:
        for inner in nested(section, name):
            yield from with_nested(f"{path}.{name}", inner, seen, told)


def nested(section: type[Section], name: str) -> list[type[Section]]:
    """Sections that a field holds, as itself or in a list."""
    return list(_sections(section.model_fields[name].annotation))


def _sections(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)


def table(section: type[Section], skipped: set[str], title: str, told: dict[str, str]) -> str:
    """A row per field but the skipped ones: name, default, values, meaning; then the fields that an earlier table has.

    Args:
        told: rows of the tables so far, and the title of each one's table; those of this table are added.
    """
    rows = ["| field | default | values | meaning |", "|---|---|---|---|"]
    repeated: dict[str, list[str]] = {}
    for name, field in section.model_json_schema()["properties"].items():
        if name in skipped:
            continue
        default = "" if "default" not in field or nested(section, name) else f"`{shown(field['default'])}`"
        row = f"| `{name}` | {default} | {values(field)} | {description(section, name)} |"
        if told.setdefault(row, title) == title:
            rows.append(row)
        else:
            repeated.setdefault(told[row], []).append(f"`{name}`")
    rows += [f"\nAs under {other}: {', '.join(names)}." for other, names in repeated.items()]
    return "\n".join(rows) + "\n"


def shown(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def values(field: dict[str, Any]) -> str:
    """Values that a field takes, in words."""
    options = field.get("anyOf") or field.get("oneOf")
    if options:
        return " or ".join(filter(None, (values(option) for option in options)))
    if "enum" in field:
        return " ".join(f"`{item}`" for item in field["enum"])
    kind = {"string": "text", "array": "list", "boolean": "`true` `false`", "object": "mapping"}.get(
        field.get("type", ""), field.get("type", "section")
    )
    limits = [f"{sign} {field[bound]}" for bound, sign in BOUNDS.items() if bound in field]
    return " ".join([kind, ", ".join(limits)]).strip()


def description(section: type[Section], name: str) -> str:
    """The description of a field, or that of the section it was inherited from."""
    if text := descriptions(section).get(name):
        return text.replace("|", "\\|")
    raise ValueError(f"{section.__module__}.{section.__name__}.{name} has no description")


def page() -> str:
    """The page with the tables as they should be."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
