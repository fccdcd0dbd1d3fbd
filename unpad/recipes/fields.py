"""Shell completion of recipe fields and their values."""

from __future__ import annotations

import json
from typing import Any

from unpad.errors import UnpadError
from unpad.recipes.file import field_schema, load_recipe
from unpad.recipes.recipe import Recipe

Candidate = tuple[str, str]  # text and its explanation


def complete_override(recipe: str | None, words: list[str], incomplete: str) -> list[Candidate]:
    """Complete one `field=value`. Bash splits words at "=", so the field and the sign arrive in `words`.

    Args:
        words: overrides before the incomplete word; zsh and fish do not split them.
    """
    if words[-1:] == ["="]:
        return [(value, "") for value in complete_value(recipe, words[-2], incomplete)]
    if words and not incomplete and "=" not in words[-1] and words[-2:-1] != ["="]:  # typer drops a final "="
        return [(value, "") for value in complete_value(recipe, words[-1], "")]
    return complete_field(recipe, incomplete)


def complete_field(recipe: str | None, incomplete: str) -> list[Candidate]:
    """Fields that begin with `incomplete`, such as `optim.lr=`; sections, such as `optim.`, while several match.

    A single match is completed to its values. Only the fields that the recipe sets are known for the model and stages.

    Args:
        recipe: packaged name or YAML file; defaults of all fields if it cannot be loaded.
    """
    fields = _fields(_load(recipe).model_dump(mode="json"))
    field, equals, value = incomplete.partition("=")
    names = [name for name in fields if name.startswith(incomplete)]
    heads = dict.fromkeys(name.partition(".")[0] + ("." if "." in name else "=") for name in names)
    if "." not in incomplete and len(heads) > 1:
        return [(head, _schema(head.rstrip(".=")).get("description", "")) for head in heads]
    if equals or len(names) == 1:  # after a single candidate, the shell would add a space to `optim.lr=`
        name = field if equals else names[0]
        return [(f"{name}={text}", "") for text in complete_value(recipe, name, value if equals else "")]
    return [(f"{name}=", _schema(name).get("description", "")) for name in names]


def complete_value(recipe: str | None, field: str, incomplete: str) -> list[str]:
    """Values of a field that begin with `incomplete`: its choices, or the empty text and the recipe's value."""
    fields = _fields(_load(recipe).model_dump(mode="json"))
    if field not in fields:
        return []
    schema = _schema(field)
    kinds = [schema, *schema.get("anyOf", [])]
    choices = [_text(choice) for kind in kinds for choice in kind.get("enum", [])]
    if schema.get("type") == "boolean":
        choices = ["true", "false"]
    return [text for text in choices or ["", _text(fields[field])] if text.startswith(incomplete)]


def _load(recipe: str | None) -> Recipe:
    try:
        return load_recipe(recipe) if recipe else Recipe()
    except (UnpadError, OSError):
        return Recipe()


def _fields(value: Any, prefix: str = "") -> dict[str, Any]:
    """{dotted name: value} of all fields; stages have their names."""
    if isinstance(value, dict) and value:
        items = value.items()
    elif isinstance(value, list) and all(isinstance(item, dict) and "name" in item for item in value) and value:
        items = {item["name"]: item for item in value}.items()
    else:
        return {prefix: value}
    return {
        name: leaf for key, item in items for name, leaf in _fields(item, f"{prefix}.{key}" if prefix else key).items()
    }


def _schema(field: str) -> dict[str, Any]:
    parts = field.split(".")
    return field_schema(parts[2:] if parts[0] == "stages" else parts)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
