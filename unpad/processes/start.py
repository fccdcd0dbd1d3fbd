"""Start of this process, alone or as one of several, by its environment; imports nothing."""

from __future__ import annotations

import os

from unpad.errors import RecipeError


def started_by_torchrun() -> bool:
    """True if `unpad train --processes` or torchrun started this process as one of several."""
    return {"RANK", "LOCAL_RANK"} <= os.environ.keys() and int(os.environ.get("WORLD_SIZE", "1")) > 1


def refuse_under_torchrun(what: str, where: str, fix: str) -> None:
    """Refuse a command that one of several processes cannot run.

    Raises:
        RecipeError: with this message; all processes raise it, and the first prints it.
    """
    if started_by_torchrun():
        error = RecipeError(what, where=where, fix=fix)
        error.is_agreed = True
        raise error
