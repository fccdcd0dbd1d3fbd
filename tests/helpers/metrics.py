"""Names of metrics against what their family declares."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from unpad.evaluation.family import measures_of


def undeclared(family: str, metrics: Iterable[str]) -> list[str]:
    """Metrics that do not match exactly one pattern of their family."""
    patterns = measures_of(family).HIGHER_IS_BETTER
    return [name for name in metrics if sum(fnmatchcase(name, pattern) for pattern in patterns) != 1]
