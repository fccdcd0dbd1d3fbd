"""Processes that make up a group, for tests of what they do together."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from unpad.processes.group import Group, joined


def run_group(work: Callable[[Group], Any], size: int, folder: Path, seconds: float = 60) -> list[Any]:
    """As `run_ranks`; `work` gets the group that the processes make up."""
    return run_ranks(partial(_in_group, work), size, folder, seconds)


def run_ranks(work: Callable[[], Any], size: int, folder: Path, seconds: float = 60) -> list[Any]:
    """What `work` returns as JSON in each of several processes, which have the variables that torchrun sets.

    The result of one that ended without returning is "exit CODE".

    Args:
        work: function of a module.
        folder: for the results.
        seconds: after which processes that go on are killed, which fails.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("spawn")
    processes = [context.Process(target=_run, args=(work, rank, size, port, folder)) for rank in range(size)]
    try:
        for process in processes:
            process.start()
        ends_at = time.monotonic() + seconds
        for process in processes:
            process.join(max(ends_at - time.monotonic(), 0))
        assert all(process.exitcode is not None for process in processes), "a process hangs"
        return [_told(process, folder / f"{rank}.json") for rank, process in enumerate(processes)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _in_group(work: Callable[[Group], Any]) -> Any:
    with joined(timeout_s=30) as group:
        return work(group)


def _run(work: Callable[[], Any], rank: int, size: int, port: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    (folder / f"{rank}.json").write_text(json.dumps(work()))


def _told(process: BaseProcess, path: Path) -> Any:
    return json.loads(path.read_text()) if process.exitcode == 0 else f"exit {process.exitcode}"
