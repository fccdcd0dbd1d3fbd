"""Commands that messages suggest to a user, quoted for a shell."""

from __future__ import annotations

import shlex
from pathlib import Path


def resume_run(folder: Path, *options: str) -> str:
    """The command that continues a run with its saved recipe and overrides."""
    name = str(folder)
    if "/" not in name:  # it could be read as a recipe's name, or an option
        name = f"./{name}"
    return shlex.join(["unpad", "train", "--resume", name, *options])
