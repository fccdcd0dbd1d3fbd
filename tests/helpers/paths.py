"""The two paths of the layers: torch's own operations, and native kernels where this machine runs them."""

from contextlib import AbstractContextManager, nullcontext
from traceback import extract_stack
from typing import Any, Literal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import unpad
from unpad.nn.native import library

PACKAGE = unpad.__path__[0]
Path = Literal["torch", "native"]
needs_kernels = pytest.mark.skipif(not library.enabled(), reason=library.describe())
PATHS: list[Path] = ["torch", "native"] if library.enabled() else ["torch"]
NATIVE_DTYPES = [d for d in (torch.bfloat16, torch.float32, torch.float64) if library.enabled() and library.computes(d)]
NATIVE_PRECISION = "bf16" if torch.bfloat16 in NATIVE_DTYPES else "fp32"
LOWEST = NATIVE_DTYPES[0] if NATIVE_DTYPES else torch.float32  # the shortest numbers that kernels compute here


def taken(path: Path, dtype: torch.dtype) -> Path:
    """The path that layers take for a dtype: native kernels of some processors do not compute in bf16."""
    return path if library.computes(dtype) else "torch"


def on(path: Path) -> AbstractContextManager[None]:
    """Compute by a path of PATHS inside."""
    return library.switched_off() if path == "torch" else nullcontext()


class Waits(TorchDispatchMode):
    """Notes which functions of the package inside wait for an accelerator: they read a number, or a shape by it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        is_open = name == "repeat_interleave" and kwargs.get("output_size") is None
        if is_open or name in ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal"):
            self.found.append(["", *(one.name for one in extract_stack() if one.filename.startswith(PACKAGE))][-1])
        return func(*args, **kwargs)


def check_operator(name: str, *arguments: object) -> None:
    """A native operator has the schema and the shapes that it tells torch."""
    operator = getattr(torch.ops.unpad, name).default
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
