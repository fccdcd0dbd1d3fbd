"""The library of compiled kernels, if it exists and the processor can run it.

Callers check `enabled()` before they take the native path; a run prints `describe()`.
"""

import ctypes
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from unpad.errors import RecipeError
from unpad.machine import lines_of, system_file
from unpad.nn.scope import Scope

SWITCH = "UNPAD_NATIVE"
INTERFACE = 13  # UNPAD_INTERFACE of kernels.h
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


# Functions of `struct unpad_kernels` of kernels.h in its order: letters of their arguments, and of a result after ">".
FUNCTIONS = {
    "attention_forward": "ippppppppp",
    "attention_backward": "ipppppppppppp",
    "piece_attention": "ipppppppp",
    "decode_attention": "ipppppp",
    "rowwise_linear": "iqqqipppp",
    "int8_linear": "qqqipppp",
    "add_norm_forward": "ipppppppp",
    "add_norm_backward": "ipppppppppp",
    "activation_forward": "iiqqippp",
    "activation_backward": "iiqqippppp",
    "cross_entropy": "iqqdiipppp>q",
    "add_rounded": "qddiipp",
    "head_forward": "qqqdipppppp>q",
    "head_backward": "qqqdippppppp",
}
TYPES: dict[str, Any] = {
    **{"i": ctypes.c_int, "q": ctypes.c_int64, "u": ctypes.c_uint64, "d": ctypes.c_double, "p": ctypes.c_void_p},
    "": None,
}
Compute = TypeVar("Compute", bound=Callable[..., Any])
_OPERATORS = torch.library.Library("unpad", "FRAGMENT")


def fields(*groups: str) -> tuple[tuple[str, Any], ...]:
    """Fields of a structure of kernels.h: groups of a letter of `TYPES` and the names of this type."""
    return tuple((name, TYPES[letter]) for letter, *names in map(str.split, groups) for name in names)


class _Table(ctypes.Structure):
    """`struct unpad_kernels` of kernels.h: addresses of functions."""

    _fields_ = fields(f"p {' '.join(FUNCTIONS)}")


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
    files = {line.split()[-1] for line in lines_of(system_file("proc/self/maps")) if "/" in line}
    return {file for file in files if Path(file).name.startswith(("libgomp", "libiomp", "libomp"))}


@cache
def _function(name: str) -> Callable[..., Any]:
    """A compiled function of `struct unpad_kernels` with its ctypes."""
    loaded, reason = _load()
    assert loaded is not None, reason
    arguments, _, result = FUNCTIONS[name].partition(">")
    typed = ctypes.CFUNCTYPE(TYPES[result], *(TYPES[letter] for letter in arguments))
    return typed(getattr(loaded.table, name))


def call(name: str, *arguments: Any) -> Any:
    """Call a function of `FUNCTIONS`; check `enabled` first.

    Args:
        arguments: numbers; tensors, for their addresses; None for NULL; a dtype for its number in kernels.h; a
            structure for a reference to it.
    """
    return _function(name)(*map(_passed, arguments))


def _passed(argument: Any) -> Any:
    if argument is None or isinstance(argument, Tensor):
        return pointer(argument)
    if isinstance(argument, torch.dtype):
        return code(argument)
    return ctypes.byref(argument) if isinstance(argument, ctypes.Structure) else argument


def operator(
    name: str, empty: Callable[..., Any], changes: Sequence[str] = (), schema: str | None = None
) -> Callable[[Compute], Compute]:
    """Make a function an operator of torch, `unpad::NAME` in profiles and for torch.compile.

    Args:
        empty: takes the same arguments and returns results without numbers.
        changes: arguments that are written to.
        schema: of arguments and results; default from the function's types.
    """

    def register(compute: Compute) -> Compute:
        _OPERATORS.define(name + (schema or torch.library.infer_schema(compute, mutates_args=changes)))
        _OPERATORS.impl(name, compute, "CPU")
        torch.library.register_fake(f"unpad::{name}", empty, lib=_OPERATORS)
        return cast(Compute, getattr(torch.ops.unpad, name).default)

    return register


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
