"""Speed of matrix products in fp32 and bf16 on this processor: measured once, kept in the user's cache folder."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch.nn import functional as F

from unpad.errors import DiskError
from unpad.nn.processor import full_processor_name, processor_fields
from unpad.storage import cache_folder, make_folder, write_atomic

FILE = "precision.json"  # in the cache folder
MAX_ENTRIES = 32
PROBE = (256, 256, 256)  # rows, inputs and outputs of a linear layer whose emulated products take milliseconds
SHAPES = ((1024, 512, 2048), (512, 256, 8192))  # of a block and of a head
HOPELESS = 4.0  # ratio of times at the probe from which larger products need no measurement
ROUNDS = 4
LIMIT_SECONDS = 0.6  # no round begins after it
# They limit the instructions of torch, MKL, oneDNN and the native kernels.
VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS"),
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "UNPAD_NATIVE"),
)
_measured: dict[Machine, Speed] = {}  # of this process


class Machine(BaseModel):
    """Everything that a measurement depends on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    processor: str
    instructions: tuple[str, ...]
    torch: str
    threads: int
    variables: tuple[tuple[str, str], ...]


class Speed(BaseModel):
    """Seconds of the same products in either precision."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fp32_seconds: float = Field(gt=0, allow_inf_nan=False)
    bf16_seconds: float = Field(gt=0, allow_inf_nan=False)

    @property
    def gain(self) -> float:
        """Times that bf16 is as fast as fp32."""
        return self.fp32_seconds / self.bf16_seconds


class _Entry(BaseModel):
    machine: Machine
    speed: Speed


class _File(BaseModel):
    entries: list[_Entry]


def this_machine() -> Machine:
    """This process's processor, libraries, threads and limits."""
    flags = processor_fields().get("flags", "").split()
    return Machine(
        processor=full_processor_name(),
        instructions=tuple(sorted(flag for flag in flags if flag.startswith(("avx", "amx")))),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        variables=tuple((name, os.environ[name]) for name in VARIABLES if name in os.environ),
    )


def product_speed() -> Speed:
    """Speed of products on this machine: of this process, else of the cache, else measured in about a second.

    A cache that is damaged or cannot be written only costs the measurement in the next process.
    """
    machine = this_machine()
    if machine not in _measured:
        entries = _read()
        found = next((entry.speed for entry in entries if entry.machine == machine), None)
        _measured[machine] = found or measure()
        if found is None:
            _write([*entries, _Entry(machine=machine, speed=_measured[machine])])
    return _measured[machine]


# --------------------------------------------------------------------------- measurement


def measure() -> Speed:
    """Time the products of a training step in both precisions by turns, the best of each; only small ones where bf16
    is emulated, whose large products take seconds."""
    began = time.perf_counter()
    probed = Speed(fp32_seconds=_best(torch.float32), bf16_seconds=_best(torch.bfloat16))
    if probed.gain < 1 / HOPELESS:
        return probed
    best: dict[tuple[torch.dtype, tuple[int, int, int]], float] = {}
    for number in range(ROUNDS):  # the first warms up and counts only if it is the only one
        if number and time.perf_counter() - began > LIMIT_SECONDS:
            break
        for shape in SHAPES:
            for dtype in (torch.float32, torch.bfloat16):
                best[dtype, shape] = min(products_seconds(shape, dtype), best.get((dtype, shape), float("inf")))
    fp32, bf16 = (sum(best[dtype, shape] for shape in SHAPES) for dtype in (torch.float32, torch.bfloat16))
    return Speed(fp32_seconds=fp32, bf16_seconds=bf16)


def _best(dtype: torch.dtype) -> float:
    """Seconds of the products of the probe."""
    return min(products_seconds(PROBE, dtype) for _ in range(ROUNDS))


def products_seconds(shape: tuple[int, int, int], dtype: torch.dtype) -> float:
    """Seconds of the three products that a linear layer takes in a training step: forward, and both gradients.

    Args:
        shape: rows, inputs, outputs.
        dtype: of all three; autocast is off.
    """
    rows, inputs, outputs = shape
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        x, weight, gradient = (  # ones: no random number is drawn, so that no run depends on a measurement
            torch.ones(size, dtype=dtype, device="cpu") for size in ((rows, inputs), (outputs, inputs), (rows, outputs))
        )
        start = time.perf_counter()
        _ = F.linear(x, weight), gradient @ weight, gradient.T @ x
        return time.perf_counter() - start


# --------------------------------------------------------------------------- cache


def cache_file() -> Path:
    """File of the measurements; deleting it makes the next run measure anew."""
    return cache_folder() / FILE


def _read() -> list[_Entry]:
    """Entries of the file; none if it is missing or damaged."""
    try:
        return _File.model_validate_json(cache_file().read_bytes()).entries
    except (OSError, ValueError, RuntimeError):  # RuntimeError: the user has no home
        return []


def _write(entries: list[_Entry]) -> None:
    with suppress(DiskError, RuntimeError):
        path = cache_file()
        make_folder(path.parent)
        write_atomic(path, _File(entries=entries[-MAX_ENTRIES:]).model_dump_json(indent=1) + "\n")
