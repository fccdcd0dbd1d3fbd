"""A child process that works for long."""

import os
import time
from functools import partial
from pathlib import Path

from unpad.processes.children import run_all

MODULES = ["unpad.processes.children"]
together = partial(run_all, modules=MODULES)


def sleeps(told: Path) -> None:
    """Tell the process and its folder, and go on for long, with a process of its own that does, too."""
    os.environ["OF_THE_CHILD"] = "1"
    grandchild = os.fork()
    if grandchild:
        told.write_text(f"{grandchild} {os.getcwd()} {os.environ['OF_THE_PARENT']} {os.getpgid(0) == os.getpid()}")
    time.sleep(600)
