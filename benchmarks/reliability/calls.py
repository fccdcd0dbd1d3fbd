"""Calls of the operating system on the files of a folder, seen from inside of the process that makes them.

Python reaches files through the functions of `os` and through `io.open`; libraries in C that open files themselves are
not seen, and none of them writes what must survive: `recorder.py` compares what it saw with what is there.
"""

from __future__ import annotations

import builtins
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

BY_PATH = ("open", "rename", "replace", "link", "symlink", "mkdir", "unlink", "remove", "rmdir", "chmod", "listdir")
BY_PATH_READ = ("scandir", "stat", "lstat", "statvfs")
BY_FILE = ("write", "fsync", "fdatasync", "ftruncate", "read", "pread", "fstat", "close")
REAL: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in BY_PATH + BY_PATH_READ + BY_FILE}
_real_open = io.open

# Called with the function's name, the path inside of the folder, and the arguments; what it raises, the call raises.
Before = Callable[[str, str, tuple[Any, ...]], None]
# Called with the same, and the result.
After = Callable[[str, str, tuple[Any, ...], Any], None]


def _nothing(name: str, path: str, args: tuple[Any, ...], *result: Any) -> None:
    """Leave a call alone."""


class Calls:
    """Watch over the calls of this process on files inside of `root`.

    Args:
        before, after: called around every call; a call of theirs is not seen itself.
    """

    def __init__(self, root: Path, before: Before = _nothing, after: After = _nothing) -> None:
        self._root, self._before, self._after = os.path.abspath(root) + os.sep, before, after
        self._paths: dict[int, str] = {}  # of open files
        self._is_inside = False  # of `before` or `after`
        self._lock = threading.RLock()  # a thread writes checkpoints

    def install(self) -> None:
        """Put the watched functions in place of the real ones."""
        for name in BY_PATH + BY_PATH_READ:
            setattr(os, name, self._by_path(name))
        for name in BY_FILE:
            setattr(os, name, self._by_file(name))
        io.open = builtins.open = self._open_file

    def path_of(self, path: Any) -> str | None:
        """A path within the folder, empty for the folder itself; None for others."""
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        whole = os.path.abspath(os.fsdecode(path))
        return whole[len(self._root) :] if f"{whole}{os.sep}".startswith(self._root) else None

    def _around(self, name: str, path: str | None, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        if path is None:
            return call()
        with self._lock:
            if self._is_inside:
                return call()
            self._tell(self._before, name, path, args)
            result = call()
            self._tell(self._after, name, path, args, result)
            return result

    def _tell(self, hook: Callable[..., None], *args: Any) -> None:
        self._is_inside = True
        try:
            hook(*args)
        finally:
            self._is_inside = False

    def _by_path(self, name: str) -> Callable[..., Any]:
        real = REAL[name]

        def call(*args: Any, **options: Any) -> Any:
            at = options.get("dir_fd")
            path = self.path_of(args[0]) if at is None and args else None
            if at in self._paths:
                path = f"{self._paths[at]}/{args[0]}"
            result = self._around(name, path, args, lambda: real(*args, **options))
            if name == "open":
                self._paths.pop(result, None)  # a file object has closed its own unseen
                if path is not None:
                    self._paths[result] = path
            return result

        return call

    def _by_file(self, name: str) -> Callable[..., Any]:
        real = REAL[name]

        def call(file: int, *args: Any) -> Any:
            path = self._paths.pop(file, None) if name == "close" else self._paths.get(file)
            return self._around(name, path, (file, *args), lambda: real(file, *args))

        return call

    def _open_file(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if options.get("opener"):  # calls `os.open`
            return _real_open(file, mode, *args, **options)
        path = self.path_of(file)
        return self._around("io.open", path, (file, mode), lambda: _real_open(file, mode, *args, **options))
