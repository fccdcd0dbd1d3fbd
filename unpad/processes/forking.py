"""Processes of a command that start at once: forked, where the system can, from a process that has all modules."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any

CONTEXT: Any = get_context("forkserver" if sys.platform == "linux" else "spawn")


def prepare(modules: Sequence[str], work: Callable[..., object], *arguments: object, **options: Any) -> BaseProcess:
    """A process that will do `work` in the folder and with the variables of this one, and leaves Ctrl-C to it.

    Args:
        modules: imported once, by the process that forks the others; elsewhere every process imports what it needs.
        work: function of a module; arguments: picklable.
        options: of the process.
    """
    CONTEXT.set_forkserver_preload(list(modules))
    world = (os.getcwd(), dict(os.environ))
    process: BaseProcess = CONTEXT.Process(target=_work, args=(world, work, arguments), **options)
    return process


def start(process: BaseProcess) -> None:
    """Start a process.

    The one that forks it is of the terminal's group, too: a Ctrl-C while that imports would be a traceback.
    """
    if sys.platform == "win32":
        process.start()
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(world: tuple[str, dict[str, str]], work: Callable[..., object], arguments: Sequence[object]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.chdir(world[0])
    os.environ.clear()
    os.environ |= world[1]
    work(*arguments)
