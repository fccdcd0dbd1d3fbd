"""Commands that messages tell a user to type next, quoted for a shell."""

from __future__ import annotations

import shlex
from pathlib import Path


def resume_run(folder: Path, *options: str) -> str:
    """The command that continues a run; the run keeps its recipe and its overrides."""
    name = str(folder)
    if "/" not in name:  # or it could be a recipe's name, or an option
        name = f"./{name}"
    return shlex.join(["unpad", "train", "--resume", name, *options])


def resume_search(recipe: str, folder: Path, trials: int) -> str:
    """The command that continues a search, which keeps its ranges and its metric."""
    return shlex.join(["unpad", "search", recipe, "--out", str(folder), "--trials", str(trials), "--resume"])
