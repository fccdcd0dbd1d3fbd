"""Start of this process, alone or as one of several, by its environment; loads nothing."""

from __future__ import annotations

import os

from unpad.errors import RecipeError


def started_by_torchrun() -> bool:
    """True if this process is one of several that an agent of torch has started."""
    return {"RANK", "LOCAL_RANK"} <= os.environ.keys() and int(os.environ.get("WORLD_SIZE", "1")) > 1


def refuse_under_torchrun(what: str, where: str, fix: str) -> None:
    """Refuse what one of several processes cannot do on its own.

    Raises:
        RecipeError: with these words; all processes raise it, and the first shows it.
    """
    if started_by_torchrun():
        error = RecipeError(what, where=where, fix=fix)
        error.is_agreed = True
        raise error
