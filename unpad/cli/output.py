"""Output of verbs: lines on the terminal, or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


def print_lines(lines: Iterable[str]) -> None:
    """Print lines as they are, within the width of the terminal."""
    from unpad.run.screen import open_console

    console = open_console()
    for line in lines:
        console.print(line, markup=False)


def print_json(value: Any) -> None:
    """Print a value as JSON; numbers that are not finite are "inf", "-inf" or "nan"."""
    from unpad.storage import finite

    print(json.dumps(finite(value), ensure_ascii=False, indent=1, allow_nan=False))
