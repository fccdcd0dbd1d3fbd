"""Fields of a recipe for editors and shells: the JSON schema of its file, and completion of overrides."""

import json
from collections.abc import Mapping
from typing import Any

from unpad.errors import UnpadError
from unpad.recipes.data import KINDS
from unpad.recipes.file import field_schema, load_recipe
from unpad.recipes.recipe import SETTINGS, Recipe, stage_fields

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


# YAML 1.1 parsers read 1e-3 as text; the sections convert it to a number.
EXPONENT = r"[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"
DEFAULT_KIND = "decoder"


def recipe_schema(models: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Build the schema. It accepts every valid recipe, but misses inconsistencies between fields.

    Args:
        models: schema of the model section, by `model.kind`.
    """
    schema = Recipe.model_json_schema()
    definitions = schema["$defs"]
    stage = definitions["Stage"]["properties"]
    for section, settings in SETTINGS.items():
        fields = definitions[settings.__name__]["properties"]
        allowed = {field: fields[field] for field in stage_fields(section)}
        stage[section] |= {"additionalProperties": False, "properties": allowed}
    for kind in KINDS:
        sources = definitions["DataSettings"]["properties"][kind]
        one = [{"type": "string"}, sources.pop("items")]
        del sources["type"]
        sources["anyOf"] = [*one, {"type": "array", "items": {"anyOf": one}}, {"type": "null"}]
    schema["properties"]["model"] = _model(models, definitions)
    _accept_exponents(schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Recipe of unpad", **schema}


def _model(models: Mapping[str, dict[str, Any]], definitions: dict[str, Any]) -> dict[str, Any]:
    """Schema of the model section: its `kind` determines the other fields; their sections join the `definitions`."""
    branches = []
    for kind, own in models.items():
        for name, definition in own.get("$defs", {}).items():
            assert definitions.setdefault(name, definition) == definition, f"two sections are called {name}"
        definitions[f"model_{kind}"] = {key: value for key, value in own.items() if key != "$defs"}
        required = [] if kind == DEFAULT_KIND else ["kind"]  # a section without a kind has the default kind
        # The recipe need not name the kind of an imported model.
        chosen = {"properties": {"kind": {"const": kind}}, "required": required, "not": {"required": ["from"]}}
        branches.append({"if": chosen, "then": {"$ref": f"#/$defs/model_{kind}"}})
    kinds = {"enum": list(models), "default": DEFAULT_KIND, "description": "Name of a file of models/."}
    start = {
        "type": ["string", "null"],
        "description": "A run, or a Hugging Face folder, that the model comes from; null: that of train.init_from.",
    }
    return {"type": "object", "properties": {"kind": kinds, "from": start}, "allOf": branches}


def _accept_exponents(node: Any) -> None:
    """Let every number also be text such as 1e-3, with a sign only where the number may be negative."""
    if isinstance(node, list):
        for item in node:
            _accept_exponents(item)
    elif isinstance(node, dict):
        for item in node.values():
            _accept_exponents(item)
        if node.get("type") == "number":
            lowest = node.get("minimum", node.get("exclusiveMinimum"))
            sign = "^[-+]?" if lowest is None or lowest < 0 else "^"
            limits = [key for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if key in node]
            number = {"type": node.pop("type"), **{key: node.pop(key) for key in limits}}
            node["anyOf"] = [number, {"type": "string", "pattern": sign + EXPONENT}]
