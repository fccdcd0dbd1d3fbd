"""Forked processes that form a group, for tests of what they do together.

Unlike those of `workers.py` they start at once, and have what the test has built.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # takes seconds, and so once before processes are forked

from unpad.errors import UnpadError
from unpad.processes.group import Group

LIMIT_S = 60.0


def run_ranks(folder: Path, size: int, work: Callable[[Group], Any]) -> list[Any]:
    """Run `work` in `size` forked processes, and return the JSON value of each by rank.

    An error of a user counts as the value [name of its class, text]. Any other exception fails the test here.
    """
    folder.mkdir(parents=True)
    children = [_fork(folder, rank, size, work) for rank in range(size)]
    running, deadline = dict(enumerate(children)), time.monotonic() + LIMIT_S
    try:
        while running and time.monotonic() < deadline:
            for rank, pid in list(running.items()):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    del running[rank]
            time.sleep(0.01)
    finally:
        for pid in running.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    faults = [path.read_text() for path in sorted(folder.glob("fault-*"))]
    assert not faults, "\n".join(faults)
    assert not running, f"processes {sorted(running)} of {size} did not end within {LIMIT_S} s"
    return [json.loads((folder / f"value-{rank}").read_text()) for rank in range(size)]


def _fork(folder: Path, rank: int, size: int, work: Callable[[Group], Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        limit = timedelta(seconds=LIMIT_S)
        dist.init_process_group("gloo", f"file://{folder / 'store'}", limit, size, rank)
        try:
            value = work(Group(rank, size, rank, dist.new_group(backend="gloo", timeout=limit)))
        except UnpadError as error:
            value = [type(error).__name__, str(error)]
        (folder / f"value-{rank}").write_text(json.dumps(value))
    except BaseException:
        (folder / f"fault-{rank}").write_text(f"process {rank}: {traceback.format_exc()}")
    finally:
        os._exit(0)
