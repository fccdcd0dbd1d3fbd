"""A value that does not fit its type, in words: pydantic's errors without its own terms."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from unpad.errors import nearest

SHOWN = 80  # characters of a wrong value

# Name of a value of the expected type, by pydantic's error type.
_EXPECTED = {
    "float_type": "a number", "float_parsing": "a number",
    "int_type": "a whole number", "int_parsing": "a whole number", "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of a usual size", "finite_number": "a finite number",
    "bool_type": "true or false", "bool_parsing": "true or false", "not_a_truth": "true or false",
    "not_a_number": "a number", "string_type": "a text", "list_type": "a list", "tuple_type": "a list",
    "dict_type": "a mapping", "model_type": "a section of fields", "model_attributes_type": "a section of fields",
    "dataclass_type": "an object", "none_required": "null",
}  # fmt: skip

_FIXES = {
    "a number": "write a number", "a whole number": "write a whole number", "a finite number": "write a finite number",
    "true or false": "write true or false, without quotes", "a text": "write it in quotes, if it is meant as a text",
    "a list": "write a list, as in [a, b]", "a mapping": "write a mapping, as in {key: value}",
    "a section of fields": "write its fields, as in {field: value}",
}  # fmt: skip

_LIMITS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than": lambda limit: f"must be greater than {_number(limit['gt'])}",
    "greater_than_equal": lambda limit: f"must be greater than or equal to {_number(limit['ge'])}",
    "less_than": lambda limit: f"must be less than {_number(limit['lt'])}",
    "less_than_equal": lambda limit: f"must be less than or equal to {_number(limit['le'])}",
    "multiple_of": lambda limit: f"must be a multiple of {_number(limit['multiple_of'])}",
}


def describe(error: Mapping[str, Any], given: str = "") -> tuple[str, str]:
    """Text for one of `ValidationError.errors()`, and a fix; "" if there is none.

    Args:
        given: the refused value as shown; default as JSON.

    An error type that no field of this package can have is described in pydantic's words.
    """
    kind, context = error["type"], error.get("ctx", {})
    given = given or shown(error.get("input"))
    if expected := _EXPECTED.get(kind):
        empty = " (nothing is written there)" if error["input"] is None or error["input"] == "" else ""
        return f"{given} is not {expected}{empty}", _FIXES.get(expected, "")
    if kind in _LIMITS:
        return f"{_LIMITS[kind](context)}, got {given}", ""
    if kind == "literal_error":
        return _choice(error["input"], given, context["expected"])
    if kind == "missing":
        return "must be given", "add it"
    if kind in ("too_short", "too_long"):
        bound, limit = ("at least", "min_length") if kind == "too_short" else ("at most", "max_length")
        number = context[limit]
        return f"must have {bound} {number} {'entry' if number == 1 else 'entries'}, got {given}", ""
    if kind == "string_pattern_mismatch":
        return f"{given} does not match the pattern {context['pattern']}", ""
    if kind in ("value_error", "assertion_error"):
        return str(context.get("error", error["msg"])), ""
    return f"{error['msg']}, got {given}", ""


def _number(limit: Any) -> str:
    """A limit as people write it, such as 0 for 0.0."""
    return str(int(limit) if isinstance(limit, float) and limit.is_integer() else limit)


def _choice(value: Any, given: str, expected: str) -> tuple[str, str]:
    """Description of a value outside a list of choices, which pydantic gives as 'a', 'b' or 'c'."""
    names = [name.strip("'") for name in expected.replace(" or ", ", ").split(", ")]
    fix = nearest(value, names) if isinstance(value, str) else "write one of them"
    return f"must be {' or '.join([', '.join(names[:-1]), names[-1]] if names[1:] else names)}, got {given}", fix


def expected_of(error: Mapping[str, Any]) -> str:
    """Name of a value of the expected type, for errors of a field that takes several; "" if it has no name."""
    return _EXPECTED.get(error["type"], "")


def fix_of(expected: str) -> str:
    """Advice on a value of the wrong type."""
    return _FIXES.get(expected, "")


def shown(value: Any) -> str:
    """A value in JSON, truncated if long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
