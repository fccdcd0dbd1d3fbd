"""Builds driver.cpp together with the native kernels, without Python or torch."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from unpad.nn.native import library

NATIVE = Path(library.__file__).parent
DRIVER = Path(__file__).parents[1] / "nn" / "native" / "driver.cpp"


def build_driver(
    folder: Path, compiler: str, flags: Sequence[str], link: Sequence[str] = (), target: str | None = None
) -> Path:
    """Compile all sources, or those of one target, side by side into `folder` and link them; return the program."""
    sources = [DRIVER, *sorted(NATIVE.glob("*.cpp"))]
    if target is not None:
        others = [name for name in library.NAMES if name != target]
        (folder / "none.cpp").write_text(
            "".join(f'extern "C" const void *unpad_kernels_{name}() {{ return nullptr; }}\n' for name in others)
        )
        sources = [DRIVER, NATIVE / "targets.cpp", NATIVE / f"target_{target}.cpp", folder / "none.cpp"]
    objects = [folder / f"{source.stem}.o" for source in sources]
    builds = [
        subprocess.Popen([compiler, *flags, f"-I{NATIVE}", "-c", str(source), "-o", str(target)])
        for source, target in zip(sources, objects, strict=True)
    ]
    assert not any([build.wait() for build in builds]), "a source does not compile"
    program = folder / "driver"
    subprocess.run([compiler, *flags, *link, *map(str, objects), "-o", str(program)], check=True)
    return program
