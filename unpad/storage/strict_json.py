"""Strict JSON: parsing of untrusted files, and conversion to representable values."""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from unpad.errors import CheckpointError

OTHER_COPY = "use another copy, or remove this one"
MOST_DEPTH = 100  # deepest nesting of lists and objects
MOST_VALUES = 1 << 23  # of a file; each may take 60 bytes of memory, and three of the file
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*(?:"|$)|[\[{]|[\]}]')  # with strings, in which brackets are none


def parse_json(data: bytes, where: Path) -> Any:
    """Parse strict JSON from an untrusted file.

    Raises:
        CheckpointError: `strict_value` or `refuse_many` refuses it.
    """
    try:
        refuse_many(data)
        return strict_value(data)
    except ValueError as error:
        raise CheckpointError(f"{where.name} is not usable JSON: {error}", where=str(where), fix=OTHER_COPY) from None


def refuse_many(data: bytes) -> None:
    """Refuse JSON that would take many times its size in memory.

    Raises:
        ValueError: it holds more than MOST_VALUES values.
    """
    if sum(map(data.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise ValueError(f"it holds more than {MOST_VALUES:,} values")


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def strict_value(data: bytes, constant: Callable[[str], object] = _refuse_constant) -> Any:
    """Parse strict JSON from an untrusted source; texts are valid Unicode, and nesting is at most MOST_DEPTH deep.

    Args:
        constant: what `Infinity`, `-Infinity` and `NaN` stand for, which strict JSON has not.

    Raises:
        ValueError: it is not UTF-8, not JSON, nested too deeply, or has a too large number or a lone surrogate.
    """
    try:
        text = data.decode()
        value = json.loads(text, parse_constant=constant)
        if b"\\ud" in data or b"\\uD" in data:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeEncodeError):
            raise ValueError("a text holds half of a surrogate pair") from None
        raise ValueError(
            "nested too deeply" if isinstance(error, RecursionError) else str(error).partition("\n")[0]
        ) from None
    if depth(text, 0, len(text)) > MOST_DEPTH:
        raise ValueError("nested too deeply")
    return value


def depth(text: str, start: int, end: int) -> int:
    """Return the depth to which JSON is nested in a part of a text, or an upper bound of it for few brackets."""
    brackets = text.count("[", start, end) + text.count("{", start, end)
    return brackets if brackets <= MOST_DEPTH else max(level for level, _ in nesting(text, start, end))


def nesting(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the depth behind every string and bracket of JSON, and the place."""
    depth = 0
    for match in _BRACKETS.finditer(text, start, end):
        depth += 1 if match[0] in "[{" else -1 if match[0] in "]}" else 0
        yield depth, match.end()


def json_object(line: bytes) -> dict[str, Any] | None:
    """Parse a JSON object; None for anything else."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def finite(value: Any) -> Any:
    """Replace every non-finite float by its text, "inf", "-inf" or "nan", so that the value is strict JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
