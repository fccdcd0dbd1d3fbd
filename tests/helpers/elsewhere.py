"""`python elsewhere.py SYSTEM ARGUMENTS, ARGUMENTS` runs `unpad` once or more as on "darwin" or "win32": without what that system lacks."""

import builtins
import errno
import importlib
import io
import os
import pkgutil
import signal
import sys
import time
import types
from fcntl import LOCK_EX, LOCK_NB, flock
from typing import Any

# What tells systems apart when it is imported, and is to find this one.
OTHERS = "asyncio multiprocessing.connection platform PIL.Image pyarrow.parquet rich.console tensorboard.summary.writer \
tokenizers torch.distributed torch.utils.flop_counter typer typer._adapters zoneinfo"
MODULES = ("fcntl", "grp", "pwd", "resource", "termios")
LACKED = {
    "darwin": ("fork register_at_fork memfd_create sched_getaffinity CLOCK_BOOTTIME", {*signal.valid_signals()}),
    "win32": (
        "fork register_at_fork memfd_create sched_getaffinity clock_gettime CLOCK_BOOTTIME CLOCK_MONOTONIC O_DIRECTORY O_NOFOLLOW "
        "O_NONBLOCK O_SYNC chown fchmod fchown getegid geteuid getgid getloadavg getpgid getuid killpg mkfifo pread "
        "pthread_sigmask pwrite setitimer setsid sysconf SIGHUP SIGKILL SIGUSR1 SIGUSR2 ITIMER_PROF",
        {signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGINT, signal.SIGSEGV, signal.SIGTERM},
    ),
}
BINARY = 1 << 30


def become(system: str) -> None:
    for name in OTHERS.split():
        importlib.import_module(name)
    names, signals = LACKED[system]
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for name in names.split():
        for module in (os, signal, time):
            vars(module).pop(name, None)
    sys.platform = system
    set_signal, is_windows = signal.signal, system == "win32"
    files = {name: getattr(os, name) for name in ("open", "readlink", "listdir", "rename", "replace", "unlink", "rmdir", "mkdir")}

    def set_known(number: int, handler: Any) -> Any:
        if number not in signals:
            raise ValueError("signal number out of range")
        return set_signal(number, handler)

    def refuse(name: str, place: Any) -> None:
        if isinstance(place, (str, os.PathLike)) and os.fspath(place).startswith(("/proc", "/sys/")):
            raise FileNotFoundError(errno.ENOENT, "hidden", place)
        if is_windows and name in ("rename", "replace", "unlink", "rmdir"):
            whole = os.path.realpath(place)
            for number in files["listdir"]("/proc/self/fd"):
                try:
                    opened = files["readlink"](f"/proc/self/fd/{number}")
                except OSError:
                    continue
                if (opened + "/").startswith(whole + "/"):
                    raise PermissionError(errno.EACCES, "it is open", place)

    def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        refuse("open", path)
        if is_windows:
            assert dir_fd is None
            if os.path.isdir(path):
                raise PermissionError(errno.EACCES, "a folder", path)
            if sys._getframe(1).f_globals["__name__"].startswith("unpad.") and flags & (os.O_WRONLY | os.O_RDWR):
                assert flags & BINARY, path
        return files["open"](path, flags & ~BINARY, mode, dir_fd=dir_fd)

    def moved(name: str) -> Any:
        def move(source: Any, target: Any) -> None:
            refuse(name, source), refuse(name, target)
            if is_windows and os.path.lexists(target) and (name == "rename" or os.path.isdir(target)):
                raise FileExistsError(errno.EEXIST, "it exists", target)
            files[name](source, target)

        return move

    def guarded(name: str, function: Any) -> Any:
        def call(place: Any = ".", *more: Any, **named: Any) -> Any:
            refuse(name, place)
            return function(place, *more, **named)

        return call

    def locking(descriptor: int, mode: int, num: int) -> None:
        assert os.lseek(descriptor, 0, os.SEEK_CUR) >= 1 << 20, "what is locked cannot be read"
        try:
            flock(descriptor, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, "locked") from None

    signal.signal, signal.valid_signals = set_known, lambda: signals
    os.open, os.rename, os.replace = opened, moved("rename"), moved("replace")
    for name in ("readlink", "listdir", "unlink", "rmdir"):
        setattr(os, name, guarded(name, files[name]))
    builtins.open = io.open = guarded("fopen", io.open)
    sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)  # type: ignore[assignment]
    if is_windows:
        os.O_BINARY = BINARY
        os.kill = None


if __name__ == "__main__":
    begun = time.perf_counter()
    become(sys.argv[1])
    print("hidden", time.perf_counter() - begun, file=sys.stderr)
    from unpad.__main__ import main

    if sys.argv[2] == "import":
        import unpad
        for module in pkgutil.walk_packages(unpad.__path__, "unpad."):
            if not module.name.endswith("__main__"):
                try:
                    importlib.import_module(module.name)
                except ImportError as error:
                    print(module.name, repr(error))
    else:
        for line in " ".join(sys.argv[2:]).split(" , "):
            sys.argv = ["unpad", *line.split()]
            try:
                main()
            except SystemExit as end:
                print("code", end.code)
    print("done", time.perf_counter() - begun, file=sys.stderr)
