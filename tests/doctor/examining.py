"""Recipes under examination on a machine of one quiet core.

Its clock counts the work of this process alone, so that no verdict depends on what else the machine does.
"""

import time
from pathlib import Path
from typing import Any

from unpad.doctor.examine import Examination, examine
from unpad.doctor.trials import System

SECONDS = 600.0  # more than any check takes, so that none is cut short on a busy machine


def quiet_machine(**readings: Any) -> System:
    """A machine of one core, on which nothing else works."""
    calm: dict[str, Any] = {
        "cores": lambda: 1, "quota": lambda: None, "threads": lambda: 1, "busy_seconds": time.process_time,
        "now": time.process_time,
    }  # fmt: skip
    return System(**{**calm, **readings})


def examined(recipe: Path, *overrides: str, system: System | None = None, seconds: float = SECONDS) -> Examination:
    return examine(str(recipe), overrides, seconds, system or quiet_machine())


def codes(found: Examination) -> list[str]:
    """Codes of the findings above a note, in their order."""
    return [one.code for one in found.troubles]
