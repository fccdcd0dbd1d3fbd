"""A lower set of instructions for this process and all that it starts, and the proof that everybody obeys.

`force` comes before torch is loaded: every library reads its variable when it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

VARIABLES = {
    "avx2": {
        "UNPAD_NATIVE": "avx2",  # our kernels
        "ATEN_CPU_CAPABILITY": "avx2",  # torch's
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",  # products in fp32
        "ONEDNN_MAX_CPU_ISA": "AVX2",  # products in bf16
    }
}
HIGHER, LOWER = "avx512f", {"avx2", "fma"}  # as /proc/cpuinfo names them
CLEARLY = 0.75  # of the speed without force: a product with half the lanes is slower than that
TURNS, TURN_SECONDS, SIZE = 5, 0.2, 1024


def force(arguments: Sequence[str]) -> None:
    """Set the variables that `--force NAME` among the arguments stands for."""
    assert "torch" not in sys.modules, "torch has read its variables already"
    asked = [*arguments, ""]
    names = [asked[i + 1] for i in range(len(arguments)) if asked[i] == "--force"]
    names += [word.partition("=")[2] for word in arguments if word.startswith("--force=")]
    for name in names:
        os.environ.update(VARIABLES.get(name, {}))


@contextmanager
def unforced(name: str) -> Iterator[None]:
    """Processes that are started inside do without the variables."""
    taken = {variable: os.environ.pop(variable) for variable in VARIABLES[name] if variable in os.environ}
    try:
        yield
    finally:
        os.environ.update(taken)


class Found(NamedTuple):
    """What a process computes with.

    Args:
        rates: operations per second of a product in fp32, one per turn.
        torch: set of instructions of torch's kernels.
        native: of ours; None without kernels.
        matrices: of the library of matrix products, in its own words; None where it does not say.
    """

    rates: list[float]
    torch: str
    native: str | None
    matrices: str | None


class Product:
    """A product in fp32, as a side of `apart.py`."""

    def __init__(self) -> None:
        import torch
        from measure import Contender, Work

        a = torch.full((SIZE, SIZE), 0.5)
        out = torch.empty_like(a)

        def step() -> Work:
            torch.mm(a, a, out=out)
            return Work(1, 2 * SIZE**3)

        self.side = Contender(step)

    def warm(self, seconds: float) -> None:
        self.side.warm(seconds)

    def longest_next(self) -> None:
        """All steps are alike."""

    def describe(self) -> dict[str, Any]:
        import torch

        from unpad.nn.native import library

        return {
            "torch": torch.backends.cpu.get_cpu_capability(),
            "native": library.target(),
            "matrices": matrix_instructions(),
        }


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


def measured(name: str) -> tuple[Found, Found]:
    """A process with force and one without, in turn."""
    from apart import Apart

    with unforced(name):
        free = Apart(Product)
    both = [Apart(Product), free]
    for side in both:
        side.build(TURN_SECONDS)
    turns = [[side.turn(TURN_SECONDS) for side in both] for _ in range(TURNS)]
    found = [
        Found([turn.operations / turn.seconds for turn in column], **side.describe())
        for side, column in zip(both, zip(*turns, strict=True), strict=True)
    ]
    for side in both:
        side.close()
    return found[0], found[1]


def flags() -> set[str]:
    """Sets of instructions of the processor."""
    from unpad.machine import processor_fields

    return set(processor_fields().get("flags", "").split())


def check(name: str, has: set[str], forced: Found, free: Found) -> str:
    """Say how it was found that force took effect.

    Args:
        has: flags of the processor.
        forced, free: of `measured`.

    Raises:
        SystemExit: it did not.
    """
    if not has >= LOWER:
        raise SystemExit(f"--force {name}: this processor has no AVX2")
    if forced.torch != "AVX2" or forced.native not in ("avx2", None):
        raise SystemExit(f"--force {name} took no effect: torch's kernels are {forced.torch}, ours {forced.native}")
    if HIGHER not in has:
        return "the processor has no AVX-512"
    ratios = sorted(mine / theirs for mine, theirs in zip(forced.rates, free.rates, strict=True))
    ratio = ratios[len(ratios) // 2]
    line = f"a product in fp32 runs at {ratio:.2f} of its speed without force"
    if ratio < CLEARLY:
        return line
    # A processor may multiply as fast with AVX2, and MKL may take no more on it: then only its own word tells.
    if forced.matrices is not None and "AVX2" in forced.matrices:
        return f"{line}; the library of matrix products says that it takes AVX2"
    raise SystemExit(
        f"--force {name} took no effect: {line}, not below {CLEARLY}, and the library of matrix products says "
        f"{forced.matrices or 'nothing'}"
    )
