"""A lower set of instructions for this process and all that it starts, and what everybody says to it.

`force` comes before torch is loaded: every library reads its variable when it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

VARIABLES = {
    "avx2": {
        "UNPAD_NATIVE": "avx2",  # our kernels
        "ATEN_CPU_CAPABILITY": "avx2",  # torch's
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",  # products in fp32
        "ONEDNN_MAX_CPU_ISA": "AVX2",  # products in bf16
    }
}


def force(arguments: Sequence[str]) -> None:
    """Set the variables that `--force NAME` among the arguments stands for."""
    assert "torch" not in sys.modules, "torch has read its variables already"
    asked = [*arguments, ""]
    names = [asked[i + 1] for i in range(len(arguments)) if asked[i] == "--force"]
    names += [word.partition("=")[2] for word in arguments if word.startswith("--force=")]
    for name in names:
        os.environ.update(VARIABLES.get(name, {}))


def matrix_instructions() -> str | None:
    """The set of instructions that MKL takes here, in its own words; None where torch multiplies with another library.

    What MKL takes on processors of other makers may be less than they have, with and without force.
    """
    import ctypes

    import torch

    class Version(ctypes.Structure):
        """`MKLVersion` of mkl_types.h."""

        _fields_ = (
            *((name, ctypes.c_int) for name in ("major", "minor", "update")),
            *((name, ctypes.c_char_p) for name in ("status", "build", "processor", "platform")),
        )

    file = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    try:
        read = ctypes.CDLL(str(file)).mkl_serv_get_version
    except (OSError, AttributeError):
        return None
    version = Version()
    read(ctypes.byref(version))
    return bytes(version.processor).decode()


def check(name: str) -> str:
    """Say what computes in this process, each in its own words.

    Raises:
        SystemExit: force took no effect.
    """
    import torch

    from unpad.nn.native import library

    kernels, ours, matrices = torch.backends.cpu.get_cpu_capability(), library.target(), matrix_instructions()
    seen = f"torch's kernels are {kernels}, ours {ours}, of matrix products {matrices or 'not said'}"
    if kernels != "AVX2" or ours not in ("avx2", None) or "512" in (matrices or ""):
        raise SystemExit(f"--force {name} took no effect: {seen}")
    return seen
