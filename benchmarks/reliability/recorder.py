"""Recorder of the file operations of a run, which the operations of a resumed run may follow."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.reliability.calls import REAL, Calls
from benchmarks.reliability.disk_model import Disk, File, Operation, Tree
from unpad import storage
from unpad.run import checkpoint
from unpad.storage import LineLog
from unpad.storage.folders import MANIFEST

UNRECORDED = "/tensorboard/"  # events that TensorBoard writes on its own, and that no promise covers
DEAD = 900_000_000  # beyond the number of any process: what a process of the recording left is never in use
_TEMPORARY = re.compile(r"(\.tmp-[0-9a-f]{8}-[0-9a-f]{8}-)(\d+)-")


class Recorder:
    """Recorder of what this process does to the files in `root`; every operation is added to the file `log` at once.

    Args:
        kill_at: number of the operation before which the process kills itself.
    """

    def __init__(self, root: Path, log: Path, kill_at: int | None = None) -> None:
        self._calls = Calls(root, self._before, self._after)
        self._disk, self._kill_at = Disk(), kill_at
        for operation in read_log(log):
            self._disk.apply(operation)
        self._num = 0
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._open: dict[int, File] = {}
        self._is_new = False

    def install(self) -> None:
        """Begin to record, also what is acknowledged, which is whatever a function has returned from."""
        self._calls.install()
        self._after_call(storage.make_folder, lambda path, **_: ("made", path, 0))
        self._after_call(storage.write_atomic, lambda path, *_, **__: ("file", path, self._number(path)))
        for write in (storage.write_folder, storage.replace_folder):
            self._after_call(write, lambda path, _: ("folder", path, self._number(path / MANIFEST)))
        self._after_call(storage.end_folder, lambda _, path, __: ("folder", path, self._number(path / MANIFEST)))
        self._after_call(checkpoint.save, lambda folder, state, _: ("checkpoint", folder, state.step))
        self._after_call(checkpoint.save_named, lambda folder, name, state: ("named", folder / name, state.step))
        self._after_call(storage.remove_folder, None)
        self._after_call(LineLog.sync, lambda log: ("lines", log.path, self._lines(log.path)))

    def _after_call(self, function: Any, told: Callable[..., tuple[str, Path, Any]] | None) -> None:
        """Have a function, wherever it has been imported, acknowledge what it returns from.

        Args:
            told: None for a function that deletes.
        """

        def call(*args: Any, **options: Any) -> Any:
            if told is None and self._calls.path_of(args[0]) is not None:
                self._add(("withdraw", self._inside(args[0])))
            result = function(*args, **options)
            if told is not None:
                self._acknowledge(*told(*args, **options))
            return result

        for module in [module for name, module in sys.modules.items() if name.startswith("unpad")]:
            for place, value in list(vars(module).items()):
                if value is function:
                    setattr(module, place, call)
        name = function.__name__
        if vars(LineLog).get(name) is function:
            setattr(LineLog, name, call)

    def _number(self, path: Path) -> int:
        file = self._disk.find(self._inside(path))
        assert isinstance(file, File), path
        return file.number

    def _lines(self, path: Path) -> tuple[int, int]:
        """Number and size of a file."""
        number = self._number(path)
        return number, len(self._disk.files[number].data)

    def _inside(self, path: Path) -> str:
        inside = self._calls.path_of(path)
        assert inside is not None, path
        return _dead(inside)

    def _acknowledge(self, kind: str, path: Path, value: Any) -> None:
        inside = self._calls.path_of(path)
        if inside is not None and UNRECORDED not in f"/{inside}/":
            self._add(("acknowledge", kind, self._inside(path), value))

    def _before(self, name: str, path: str, args: tuple[Any, ...]) -> None:
        if name == "io.open" and set(args[1]) & set("wax+") and UNRECORDED not in path:
            raise AssertionError(f"{path} is written in a way that is not recorded")
        if name == "open":
            self._is_new = bool(args[1] & os.O_CREAT) and not os.path.lexists(args[0])
        if name in CHANGES and not (name == "open" and not self._is_new) and UNRECORDED not in f"/{path}/":
            if self._num == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self._num += 1

    def _after(self, name: str, path: str, args: tuple[Any, ...], result: Any) -> None:
        if UNRECORDED in f"/{path}/":
            return
        path = _dead(path)
        match name:
            case "open":
                self._opened(path, args[1], result)
            case "write":
                offset = os.lseek(args[0], 0, os.SEEK_CUR) - result
                self._add(("write", self._open[args[0]].number, offset, bytes(args[1][:result])))
            case "ftruncate":
                self._add(("truncate", self._open[args[0]].number, args[1]))
            case "fsync" | "fdatasync":
                file = self._open.get(args[0])
                self._add(("flush names", path) if file is None else ("flush", file.number))
            case "close":
                self._open.pop(args[0], None)
            case "rename" | "replace" | "link":
                self._add(("link" if name == "link" else "rename", path, self._inside(args[1])))
            case _ if name in NAMED:
                self._add((NAMED[name], path))

    def _opened(self, path: str, flags: int, descriptor: int) -> None:
        self._open.pop(descriptor, None)
        if self._is_new:
            number = len(self._disk.files)
            self._add(("create", path, number))
            self._open[descriptor] = self._disk.files[number]
        elif flags & (os.O_WRONLY | os.O_RDWR):
            file = self._disk.find(path)
            assert isinstance(file, File), path
            self._open[descriptor] = file
            if flags & os.O_TRUNC:
                self._add(("truncate", file.number, 0))

    def _add(self, operation: Operation) -> None:
        self._disk.apply(operation)
        fields = [part.decode("latin-1") if isinstance(part, bytes) else part for part in operation]
        line = json.dumps(fields).encode() + b"\n"
        assert REAL["write"](self._log, line) == len(line)


NAMED = {"mkdir": "mkdir", "unlink": "delete", "remove": "delete", "rmdir": "delete"}
CHANGES = {"open", "write", "fsync", "fdatasync", "ftruncate", "rename", "replace", "link", *NAMED}


def read_log(path: Path) -> Iterator[Operation]:
    """Yield the operations of a log; none if there is none."""
    for line in path.read_bytes().splitlines() if path.exists() else ():
        *fields, last = json.loads(line)
        if fields[0] == "write":
            last = last.encode("latin-1")
        yield (*fields, tuple(last) if isinstance(last, list) else last)


def tree_of(root: Path) -> Tree:
    """What is there of the recorded files."""
    found: Tree = {}
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        if UNRECORDED not in f"/{name}/":
            found[_dead(name)] = path.read_bytes() if path.is_file() else None
    return found


def _dead(path: str) -> str:
    """A path with the process in temporary names replaced by one that cannot be alive."""
    return _TEMPORARY.sub(
        lambda match: f"{match[1]}{DEAD + int(match[2])}-" if int(match[2]) < DEAD else match[0], path
    )
