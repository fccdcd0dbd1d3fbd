"""System information files, below one root that tests replace, and the limits that `ulimit` sets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple


def limit_of(name: str) -> int | None:
    """Soft limit of this process, by its name after RLIMIT_, such as AS; None without one."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit: int = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
    return None if limit == resource.RLIM_INFINITY else limit


ROOT = Path("/")


class ControlGroup(NamedTuple):
    """Folder of a control group, which may be hidden, and its version, 1 or 2."""

    folder: Path
    version: int


def system_file(name: str) -> Path:
    """Path of a file by its name without the first slash, such as proc/stat."""
    return ROOT / name


def lines_of(path: Path) -> list[str]:
    """Lines of a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def number_of(path: Path, field: str) -> int | None:
    """First number of the line that begins with a field, with or without a colon; None without one."""
    for line in lines_of(path):
        words = line.split()
        if len(words) > 1 and words[0].removesuffix(":") == field and words[1].isdecimal():
            return int(words[1])
    return None


def control_groups(controller: str) -> Iterator[ControlGroup]:
    """Control groups of this process that a controller such as "memory" may limit, the innermost first and then those
    around it, of both versions.

    A container may show them only at the root: many of the folders do not exist.
    """
    for line in lines_of(system_file("proc/self/cgroup")):
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = system_file("sys/fs/cgroup") / (controller if controllers else "")
        inner = PurePosixPath(path.lstrip("/"))
        for group in (inner, *inner.parents):
            yield ControlGroup(top / group, 1 if controllers else 2)
