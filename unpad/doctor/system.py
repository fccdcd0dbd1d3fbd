"""Readings of the machine that the doctor uses, each of which tests replace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from unpad.machine.load import busy_seconds, cores, own_seconds, quota
from unpad.machine.memory import swapped_bytes


@dataclass(frozen=True)
class System:
    """Readings of the machine; `now` is the clock that everything is timed by, in seconds."""

    cores: Callable[[], int] = cores
    quota: Callable[[], float | None] = quota
    threads: Callable[[], int] = torch.get_num_threads
    busy_seconds: Callable[[], float | None] = busy_seconds
    own_seconds: Callable[[], float] = own_seconds
    swapped_bytes: Callable[[], int] = swapped_bytes
    now: Callable[[], float] = time.perf_counter
