"""Check of the address space limit (apart: it comes before the libraries that crash if that is too low)."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from unpad.errors import OutOfMemoryError
from unpad.machine import limit_of

# Of all libraries of a training but torch's own files: 847 MB in all, with a torch of 447 MB (Linux, x86-64).
OTHERS_MB = 400


def watch_address_space() -> None:
    """Check the limit of the address space, such as from `ulimit -v`, before torch is imported.

    With too little, some libraries load and some crash: torch by a signal, tokenizers by an abort.
    """
    if limit_of("AS") is not None:
        sys.meta_path.insert(0, _BeforeTorch)


class _BeforeTorch:
    """Import finder that finds nothing, but sees every module before it is loaded."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name == "torch":
            sys.meta_path.remove(_BeforeTorch)
            _check()


def _check() -> None:
    """Compare the limit with what the libraries need.

    Raises:
        OutOfMemoryError: it is lower.
    """
    found = PathFinder.find_spec("torch")
    if found is None or found.origin is None:
        return
    files = (Path(found.origin).parent / "lib").glob("*.so*")
    needed = sum(file.stat().st_size for file in files) // 10**6 + OTHERS_MB
    limit = limit_of("AS")
    if limit is not None and limit // 10**6 < needed:
        what = (
            f"the libraries take about {needed:,} MB of address space to load, and the limit is {limit // 10**6:,} MB"
        )
        fix = "raise it, or limit the memory instead of addresses, as `systemd-run -p MemoryMax=2G` does"
        raise OutOfMemoryError(what, where="ulimit -v", fix=fix)
