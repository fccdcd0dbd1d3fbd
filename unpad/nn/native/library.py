"""The library of compiled kernels, if it exists and the processor can run it.

Callers check `enabled()` before they take the native path; a run prints `describe()`.
"""

from __future__ import annotations

import ctypes
import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

SWITCH = "UNPAD_NATIVE"
INTERFACE = 3  # UNPAD_INTERFACE of kernels.h
DTYPES = {torch.bfloat16: 0, torch.float64: 1}  # of activations, as in kernels.h
_switched_off: ContextVar[bool] = ContextVar("_switched_off", default=False)


@lru_cache(maxsize=1)
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None, and the reason."""
    if os.environ.get(SWITCH, "1") == "0":
        return None, f"switched off by {SWITCH}=0"
    file = Path(__file__).with_name("_kernels" + sysconfig.get_config_var("EXT_SUFFIX"))
    if not file.exists():
        return None, "not compiled: the installation found no gcc, or no Linux on x86-64"
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        return None, f"{file.name} cannot be loaded: {error}"
    if library.unpad_interface() != INTERFACE:
        return None, "compiled from other sources: install again"
    if not library.unpad_supported():
        return None, "this processor has no AVX-512 BF16"
    if len(_openmp_runtimes()) > 1:  # two pools of threads would wait for each other's cores
        return None, f"two OpenMP runtimes are loaded: {', '.join(sorted(_openmp_runtimes()))}"
    return library, "AVX-512 BF16"


def _openmp_runtimes() -> set[str]:
    """Files of OpenMP runtimes in this process; torch has loaded its own by now."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        files = {line.split()[-1] for line in maps if "/" in line}
    return {file for file in files if Path(file).name.startswith(("libgomp", "libiomp", "libomp"))}


def library() -> ctypes.CDLL:
    """The compiled kernels; check `enabled` first."""
    loaded, reason = _load()
    assert loaded is not None, reason
    return loaded


def enabled() -> bool:
    """True if the native kernels are available and switched on in this thread."""
    return not _switched_off.get() and _load()[0] is not None


def runs(x: Tensor) -> bool:
    """True if kernels accept activations like this tensor."""
    return x.device.type == "cpu" and x.dtype in DTYPES and enabled()


def describe() -> str:
    """Description of the kernels that this process runs, for the log."""
    loaded, reason = _load()
    return f"native kernels ({reason})" if loaded is not None else f"torch kernels ({reason})"


@contextmanager
def switched_off() -> Iterator[None]:
    """Compute without the native kernels inside, in this thread; for comparing the two paths.

    A backward pass takes the path that its forward pass took, wherever it runs.
    """
    token = _switched_off.set(True)
    try:
        yield
    finally:
        _switched_off.reset(token)


def pointer(tensor: Tensor | None) -> int | None:
    """Address of a contiguous tensor's first number, for ctypes; None becomes NULL."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "kernels read contiguous memory"
    return tensor.data_ptr()
