"""Forked processes that form a group, for tests of what they do together: they start at once, and have what the test
has built and imported."""

import json
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # this and the next take seconds, and so once before processes are forked
import torch.distributed.fsdp

from unpad.errors import UnpadError
from unpad.processes.group import Group, joined

LIMIT_S = 60.0


def run_ranks(folder: Path, size: int, work: Callable[[Group], Any]) -> list[Any]:
    """As `run_processes`; `work` gets the group that the processes make up."""

    def in_group() -> Any:
        with joined(timeout_s=LIMIT_S) as group:
            return work(group)

    return run_processes(folder, size, in_group)


def run_processes(folder: Path, size: int, work: Callable[[], Any], limit_s: float = LIMIT_S) -> list[Any]:
    """Run `work` in `size` forked processes that have the variables of torchrun; return the JSON value of each by rank.

    An error of a user counts as the value [name of its class, text], the end of a process without a value as
    "exit CODE". Any other exception fails the test here.

    Args:
        folder: for the values; it is made.
        limit_s: seconds after which processes that go on are killed, which fails.
    """
    folder.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    codes, deadline = dict[int, int](), time.monotonic() + limit_s
    running = {rank: _fork(folder, rank, size, port, work) for rank in range(size)}
    try:
        while running and time.monotonic() < deadline:
            for rank, pid in list(running.items()):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    del running[rank]
                    codes[rank] = os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
    finally:
        for pid in running.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    faults = [path.read_text() for path in sorted(folder.glob("fault-*"))]
    assert not faults, "\n".join(faults)
    assert not running, f"processes {sorted(running)} of {size} did not end within {limit_s} s"
    return [
        json.loads((folder / f"value-{rank}").read_text()) if codes[rank] == 0 else f"exit {codes[rank]}"
        for rank in range(size)
    ]


def _fork(folder: Path, rank: int, size: int, port: int, work: Callable[[], Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        torch.set_num_threads(1)
        try:
            value = work()
        except UnpadError as error:
            value = [type(error).__name__, str(error)]
        (folder / f"value-{rank}").write_text(json.dumps(value))
    except BaseException:
        (folder / f"fault-{rank}").write_text(f"process {rank}: {traceback.format_exc()}")
    finally:
        os._exit(0)


def forbid_pickles() -> None:
    """Let every load of a pickle in this process raise."""

    def trap(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickled")

    pickle.load = pickle.loads = trap
