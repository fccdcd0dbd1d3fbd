"""The library of compiled kernels, if it exists and the processor can run it.

Callers check `enabled()` before they take the native path; a run prints `describe()`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from unpad.errors import RecipeError
from unpad.nn.scope import Scope

SWITCH = "UNPAD_NATIVE"
INTERFACE = 12  # UNPAD_INTERFACE of kernels.h
DTYPES = {torch.bfloat16: 0, torch.float64: 1, torch.float32: 2}  # of activations, as in kernels.h
TARGETS = {  # instruction sets, the best first, with their names in logs
    "avx512_amx": "AVX-512 BF16 with AMX",
    "avx512_bf16": "AVX-512 BF16",
    "avx512": "AVX-512",
    "avx2": "AVX2",
    "plain": "no special instructions" if platform.machine() == "x86_64" else "NEON",
}
PLAIN_TILES = "plain_tiles"  # for tests: what avx512_amx computes, without its instructions; taken if asked for alone
BF16_TARGETS = ("avx512_amx", "avx512_bf16", PLAIN_TILES)
NAMES = TARGETS | {PLAIN_TILES: "AVX-512 BF16 with plain tiles"}
_switched_off: Scope[bool] = Scope(False)


class _Table(ctypes.Structure):
    """`struct unpad_kernels` of kernels.h: addresses of functions."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in (
            "attention_forward", "attention_backward", "piece_attention", "decode_attention", "rowwise_linear",
            "int8_linear", "int4_linear", "add_norm_forward", "add_norm_backward", "activation_forward",
            "activation_backward", "cross_entropy", "add_rounded", "head_forward", "head_backward",
        )
    )  # fmt: skip


class Kernels(NamedTuple):
    """The compiled kernels of a target."""

    target: str
    table: _Table
    library: ctypes.CDLL  # held, so that the code stays loaded


def file() -> Path:
    """File of the compiled kernels, which need not exist."""
    return Path(__file__).with_name("_kernels" + sysconfig.get_config_var("EXT_SUFFIX"))


@lru_cache(maxsize=1)
def _load() -> tuple[Kernels | None, str]:
    """The kernels, or None, and the reason."""
    asked = os.environ.get(SWITCH) or "1"  # an empty variable is like none
    if asked == "0":
        return None, f"switched off by {SWITCH}=0"
    if asked not in ("1", *NAMES):
        fix = f"unset it for the best kernels, or set it to 0 for none or to a target: {', '.join(TARGETS)}"
        raise RecipeError(f"{SWITCH} is {asked!r}", where="environment", fix=fix)
    if not file().exists():
        return None, "not compiled: installed without gcc, from a wheel without kernels, or not on Linux, x86-64 or ARM"
    try:
        library = ctypes.CDLL(str(file()))
    except OSError as error:
        return None, f"{file().name} cannot be loaded: {error}"
    if library.unpad_interface() != INTERFACE:
        return None, "compiled from other sources: install again"
    if len(_openmp_runtimes()) > 1:  # two pools of threads would wait for each other's cores
        return None, f"two OpenMP runtimes are loaded: {', '.join(sorted(_openmp_runtimes()))}"
    library.unpad_kernels_for.restype = ctypes.POINTER(_Table)
    denied = ""
    for target in TARGETS if asked == "1" else (asked,):
        if table := library.unpad_kernels_for(target.encode()):
            return Kernels(target, table.contents, library), NAMES[target] + (denied and f"; {denied}")
        if target == "avx512_amx" and library.unpad_has_tiles() and not library.unpad_grants_tiles():
            denied = "the system does not let this process use AMX (arch_prctl)"
    return None, denied or f"this processor has no {NAMES[asked]}"


def _openmp_runtimes() -> set[str]:
    """Files of OpenMP runtimes in this process; torch has loaded its own by now."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        files = {line.split()[-1] for line in maps if "/" in line}
    return {file for file in files if Path(file).name.startswith(("libgomp", "libiomp", "libomp"))}


def function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """A compiled function of `struct unpad_kernels` with its ctypes; check `enabled` first."""
    loaded, reason = _load()
    assert loaded is not None, reason
    found: Callable[..., Any] = ctypes.CFUNCTYPE(result, *arguments)(getattr(loaded.table, name))
    return found


def has_function(name: str) -> bool:
    """True if the target has a function that not all have; check `enabled` first."""
    loaded = _load()[0]
    return loaded is not None and getattr(loaded.table, name) is not None


def enabled() -> bool:
    """True if the native kernels are available and switched on in this thread."""
    return not _switched_off.get() and _load()[0] is not None


def computes(dtype: torch.dtype) -> bool:
    """True if kernels are enabled and support activations of this dtype on the CPU."""
    return enabled() and _supports(dtype)


def _supports(dtype: torch.dtype) -> bool:
    kernels = _load()[0]
    assert kernels is not None
    return dtype in DTYPES and (dtype != torch.bfloat16 or kernels.target in BF16_TARGETS)


def code(dtype: torch.dtype) -> int:
    """The number of a dtype in kernels.h; the target must support it."""
    assert _supports(dtype), f"no native kernels for {dtype} here"
    return DTYPES[dtype]


def runs(x: Tensor) -> bool:
    """True if kernels accept activations like this tensor."""
    return x.device.type == "cpu" and computes(x.dtype)


def target() -> str | None:
    """The instruction set whose kernels this process runs, a key of `NAMES`; None without kernels."""
    loaded = _load()[0]
    return None if loaded is None else loaded.target


def describe() -> str:
    """Description of the kernels that this process runs, for the log."""
    loaded, reason = _load()
    return f"native kernels ({reason})" if loaded is not None else f"torch kernels ({reason})"


@contextmanager
def switched_off() -> Iterator[None]:
    """Compute without the native kernels inside, in this thread; for comparing the two paths.

    A backward pass takes the path that its forward pass took, wherever it runs.
    """
    with _switched_off.of(True):
        yield


def is_plain(tensor: Tensor | None) -> bool:
    """True if the numbers of a tensor are its memory, and for None; classes derived from Tensor may hold them elsewhere
    or in another form, as quantized weights do."""
    return tensor is None or type(tensor) in (Tensor, Parameter)


def pointer(tensor: Tensor | None) -> int | None:
    """Address of a contiguous tensor's first number, for ctypes; None becomes NULL."""
    if tensor is None:
        return None
    assert is_plain(tensor), f"kernels read memory, and a {type(tensor).__name__} has none of its own"
    assert tensor.is_contiguous(), "kernels read contiguous memory"
    return tensor.data_ptr()
