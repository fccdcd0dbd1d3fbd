"""JSON schema of a recipe file, for editors that complete and check YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unpad.recipes.data import KINDS
from unpad.recipes.recipe import Recipe, stage_fields

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
    for section, name in (("plan", "PlanSettings"), ("optim", "OptimSettings"), ("train", "TrainSettings")):
        fields = definitions[name]["properties"]
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
    start = {"type": "string", "description": "A run, or a Hugging Face folder, that the model comes from."}
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
