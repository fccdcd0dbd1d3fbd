"""The two paths of the layers: torch's own operations, and native kernels where this machine runs them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

from unpad.nn.native import library

Path = Literal["torch", "native"]
PATHS: list[Path] = ["torch", "native"] if library.enabled() else ["torch"]


def on(path: Path) -> AbstractContextManager[None]:
    """Compute by a path of PATHS inside."""
    return library.switched_off() if path == "torch" else nullcontext()
