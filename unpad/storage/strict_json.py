"""Strict JSON: parsed from files that nobody vouches for, and values that it can hold."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from unpad.errors import CheckpointError

OTHER_COPY = "use another copy, or remove this one"


def parse_json(data: bytes, where: Path) -> Any:
    """Parse strict JSON from an untrusted file.

    Raises:
        CheckpointError: it is not UTF-8, not JSON, nested too deeply, or has too large a number.
    """
    try:
        return json.loads(data.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise CheckpointError(f"{where.name} is not usable JSON: {reason}", where=str(where), fix=OTHER_COPY) from None


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


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
