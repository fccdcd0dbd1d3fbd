"""Compile the native kernels where they can run; everything else about the package is in pyproject.toml.

Only gcc on Linux, on x86-64 or ARM, is tried. A build that fails is no error: unpad then trains through torch alone,
and a wheel without kernels is one for every platform.
"""

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

NATIVE = Path("unpad") / "nn" / "native"
# Products and sums that the compiler would join as it likes would keep bodies of a kernel from having the same bits.
MORE_ARGS = {"target_avx512_amx.cpp": ["-ffp-contract=off"]}


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


class BuildKernels(build_ext):
    """Compile the sources side by side, as many as there are cores."""

    def build_extension(self, ext: Extension) -> None:
        compile_all = self.compiler.compile

        def compile_one(source: str, extra_postargs: list[str], **options: object) -> list[str]:
            more = MORE_ARGS.get(Path(source).name, [])
            return compile_all([source], extra_postargs=[*extra_postargs, *more], **options)

        def compile_each(sources: list[str], **options: object) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = pool.map(lambda source: compile_one(source, **options), sources)
                return [name for names in made for name in names]

        # pip shows it with -v alone; `make` says it by itself.
        print("unpad: compiling the native kernels, about a minute of processor time", flush=True)
        self.compiler.compile = compile_each
        super().build_extension(ext)


class BuildModules(build_py):
    """Leave nothing of an earlier build: models, planners and recipes are found by their files."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        outputs = [*self.get_outputs(), *self.get_finalized_command("build_ext").get_outputs()]
        expected = {Path(output).absolute() for output in outputs}
        for path in Path(self.build_lib, "unpad").absolute().rglob("*"):
            if path.is_file() and path not in expected:
                path.unlink()


class Wheel(bdist_wheel):
    """A wheel for this platform if the kernels could be compiled, otherwise one for every platform."""

    def run(self) -> None:
        compiling = self.reinitialize_command("build_ext")
        self.run_command("build_ext")
        if not all(Path(output).exists() for output in compiling.get_outputs()):
            self.distribution.ext_modules = []
            self.root_is_pure = True
        super().run()


setup(ext_modules=kernels(), cmdclass={"bdist_wheel": Wheel, "build_ext": BuildKernels, "build_py": BuildModules})
