"""Reading of untrusted files: regular, of bounded size, and of the expected shape.

A value that does not fit its type is described in words: pydantic's errors without its own terms.
"""

import json
import os
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from unpad.errors import CheckpointError, UnpadError, nearest
from unpad.storage.disk import NO_WAIT
from unpad.storage.strict_json import OTHER_COPY, strict_value

MOST_BYTES = 1 << 29  # largest size of a file that is read whole
MOST_LINE_BYTES = 1 << 26
LONGEST_FIELD = 60  # characters of a field's name in a message
LARGEST = 1e300  # largest number that is drawn or added

Kind = type[UnpadError]


def _is_number(value: Any) -> Any:
    if value not in ("inf", "-inf", "nan") and (type(value) not in (int, float) or not -LARGEST <= value <= LARGEST):
        raise ValueError("should be a number")
    return value


Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Finite = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Number = Annotated[Any, AfterValidator(_is_number)]  # finite, or one of the texts for non-finite numbers


@contextmanager
def opened(path: Path, kind: Kind = CheckpointError, fix: str = OTHER_COPY) -> Iterator[IO[bytes]]:
    """Open a regular file for reading; reading a pipe or a device could block or never end.

    Raises:
        kind: the file is missing, not regular, or unreadable; names it.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | NO_WAIT)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise unusable(path, "it is no regular file", kind, fix)
            yield file
    except OSError as error:
        if isinstance(error, UnpadError):
            raise
        raise unusable(path, error.strerror or "it cannot be opened", kind, fix) from None


def unusable(path: Path, reason: str, kind: Kind = CheckpointError, fix: str = OTHER_COPY) -> UnpadError:
    """Error of a file that cannot be used."""
    return kind(f"{path.name} cannot be read: {reason}", where=str(path), fix=fix)


def read_file(path: Path, kind: Kind = CheckpointError, most: int = MOST_BYTES, fix: str = OTHER_COPY) -> bytes:
    """Read a regular file.

    Raises:
        kind: as `opened`, or it has more than `most` bytes.
    """
    with opened(path, kind, fix) as file:
        # Not `most + 1` at once: Python allocates the whole requested size.
        data = file.read(min(most, os.fstat(file.fileno()).st_size) + 1)
    if len(data) > most:
        raise unusable(path, f"it has more than {most:,} bytes", kind, fix)
    return data


def read_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file with their newlines; the last one, and one that is too long, may have none."""
    return iter(lambda: file.readline(MOST_LINE_BYTES), b"")


def read_shaped(path: Path, shape: Any, kind: Kind = CheckpointError, fix: str = OTHER_COPY) -> Any:
    """Read a JSON file of a shape; see `shaped`."""
    return shaped(read_file(path, kind, fix=fix), shape, path, kind, fix)


def shaped(data: bytes, shape: Any, path: Path, kind: Kind = CheckpointError, fix: str = OTHER_COPY) -> Any:
    """Parse strict JSON of a shape; the value is returned without conversion.

    Args:
        shape: a type that pydantic checks strictly, such as a TypedDict; additional keys are kept.
        fix: what to do about it.
        path: path of the file, for the error.

    Raises:
        kind: it is not JSON of this shape; names the field.
    """
    try:
        value = strict_value(data)
    except ValueError as error:
        raise unusable(path, str(error), kind, fix) from None
    if fault := misfit(value, shape):
        raise unusable(path, fault, kind, fix)
    return value


def misfit(value: Any, shape: Any) -> str:
    """Describe the first field of a value that does not fit the shape, and why; empty if all fit."""
    adapter = _adapter(shape)
    try:
        if is_dataclass(shape):  # validated as JSON, not as Python objects
            adapter.validate_json(json.dumps(value), strict=True)
        else:
            adapter.validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        if first["type"] == "missing":
            return f'"{field[:LONGEST_FIELD]}" is missing'
        given = first["input"]
        text = "a list" if isinstance(given, list) else "an object" if isinstance(given, dict) else shown(given)
        reason, _ = describe(first, text)
        if first["type"] == "value_error":  # our own text, with the field as its subject
            reason = f"{reason}, got {text}"
            return f'"{field[:LONGEST_FIELD]}" {reason}' if field else f"it {reason}"
        return f'"{field[:LONGEST_FIELD]}": {reason}' if field else reason
    return ""


def known_fields(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The values that are fields of a dataclass, by name."""
    return {field.name: values[field.name] for field in fields(kind) if field.name in values}


@cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape)


# --------------------------------------------------------------------------- a wrong value in words

LONGEST_VALUE = 80  # characters of a wrong value

_VALUES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_EXPECTED = {kind: name for name, value in _VALUES.items() for kind in value["errors"]}  # by pydantic's error type
_FIXES = {name: value["fix"] for name, value in _VALUES.items() if "fix" in value}

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
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
