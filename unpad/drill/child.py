"""Training processes of a drill, with their output in a file."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from unpad.processes import children
from unpad.processes.children import Child

MODULES = ["unpad.drill.train", "unpad.drill.probe", "unpad.run.board"]


def started(folder: Path, action: Callable[..., object], *arguments: object) -> AbstractContextManager[Child]:
    """Run `action` in a new process, with its output in a file of `folder`; see `children.started`."""
    output = folder / f"{time.monotonic_ns()}.out"
    return children.started(action, *arguments, modules=MODULES, output=output)
