"""Compile the native kernels where they can run; everything else about the package is in pyproject.toml.

Only gcc on Linux, on x86-64 or ARM, is tried. A build that fails is no error: unpad then trains through torch alone.
"""

import platform
import sys
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("unpad") / "nn" / "native"


def kernels() -> list[Extension]:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return []
    return [
        Extension(
            "unpad.nn.native._kernels",
            sources=sorted(str(path) for path in NATIVE.glob("*.cpp")),
            depends=sorted(str(path) for path in NATIVE.glob("*.h")),
            language="c++",
            # Scores of a padded cell are -inf on purpose, so no -ffast-math. gcc's own headers of these instructions
            # read registers they have not set, and are warned of by the thousand.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-g0",  # debug information takes a third of the time of compiling
                "-fopenmp",
                "-fno-math-errno",
                "-Wall",
                "-Wno-maybe-uninitialized",
                "-Wno-uninitialized",
                "-Wno-psabi",
            ],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ]


setup(ext_modules=kernels())
