"""Output of verbs for programs."""

from __future__ import annotations

from typing import Any

from unpad.terminal import printing


def print_json(value: Any) -> None:
    """Print a value as JSON; numbers that are not finite are "inf", "-inf" or "nan"."""
    from unpad.storage import finite

    printing.print_json(finite(value))
