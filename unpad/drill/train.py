"""Training inside a drill, as by `unpad train --resume` without a screen."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from unpad.training import loop


def train_here(recipe: Path, folder: Path) -> None:
    """Train a recipe, or continue its run.

    Raises:
        UnpadError: as `unpad.training.loop.train`.
    """
    loop.train(str(recipe), folder, resume=True, console=Console(quiet=True))
