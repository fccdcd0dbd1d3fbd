"""On systems that lack what Linux has a small run is trained, continued and read; `python -m tests.test_elsewhere SYSTEM`
is `unpad` for lines of standard input, without what that system lacks, and with what Windows refuses refused."""

import builtins
import importlib
import io
import os
import shlex
import signal
import subprocess
import sys
import time
from fcntl import LOCK_EX, LOCK_NB, flock
from functools import partial
from types import SimpleNamespace

import pytest

# They find out where they are when they are imported, which is here.
PACKAGES = (
    "asyncio multiprocessing.connection PIL.Image pyarrow.parquet rich.console tensorboard.summary.writer tokenizers"
)
MORE = "torch.distributed torch.utils.flop_counter typer._adapters zoneinfo"
LACKED = "fork register_at_fork memfd_create sched_getaffinity CLOCK_BOOTTIME"
WINDOWS = """O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_SYNC geteuid getloadavg getuid kill killpg pread pwrite setsid sysconf
    clock_gettime CLOCK_MONOTONIC SIGHUP SIGKILL SIGUSR1 pthread_sigmask setitimer"""
BINARY, FAR = 1 << 30, 1 << 20


def become(system):
    for name in f"{PACKAGES} {MORE}".split():
        importlib.import_module(name)
    for name in f"{LACKED} {WINDOWS if system == 'win32' else ''}".split():
        for module in (os, signal, time):
            vars(module).pop(name, None)
    sys.modules |= dict.fromkeys(("fcntl", "grp", "pwd", "resource", "termios"))
    sys.modules["msvcrt"] = SimpleNamespace(locking=lock, LK_NBLCK=2)
    sys.platform, builtins.open = system, partial(open_text, io.open)
    io.open = builtins.open
    if system == "win32":
        known = signal.valid_signals() - {1, 9, 10, 12}
        os.open, os.rename, os.O_BINARY = partial(open_file, os.open), partial(rename, os.rename), BINARY
        signal.valid_signals, signal.signal = lambda: known, partial(handle, signal.signal, known)


def open_text(opens, path, *more, **named):
    if str(path).startswith("/proc/"):
        raise FileNotFoundError(path)
    return opens(path, *more, **named)


def open_file(opens, path, flags, mode=0o777, dir_fd=None):
    if os.path.isdir(path) or dir_fd is not None:
        raise PermissionError(path)
    is_ours = sys._getframe(1).f_globals["__name__"].startswith("unpad.")
    assert not is_ours or flags & BINARY or not flags & (os.O_WRONLY | os.O_RDWR), f"{path} is written as text"
    return opens(path, flags & ~BINARY, mode)


def rename(renames, source, target):
    if os.path.lexists(target):
        raise FileExistsError(target)
    renames(source, target)


def handle(sets, known, number, handler):
    if number not in known:
        raise ValueError(number)
    return sets(number, handler)


def lock(descriptor, mode, num):
    assert os.lseek(descriptor, 0, os.SEEK_CUR) > FAR, "nobody could read who holds it"
    try:
        flock(descriptor, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        raise PermissionError from None


@pytest.mark.slow
@pytest.mark.promise("install.elsewhere")
@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_a_small_run_is_trained_continued_and_answers_where_linux_is_not(system, tmp_path):
    small = "model.width=16 model.blocks=1 model.heads=1 train.eval_every=2"
    lines = f"train zh_chat --out run train.max_steps=2 {small}\ntrain --resume --out run train.max_steps=3\nruns .\n"
    lines += "generate run --prompt 你好 max_new_tokens=3\n"
    command, environment = [sys.executable, "-m", "tests.test_elsewhere", system], os.environ | {"UNPAD_CACHE": "cache"}
    done = subprocess.run(command, input=lines, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 3/3" in done.stdout
    assert "finished" in done.stdout
    assert "resumed  at step 2" in done.stdout
    assert ("mem unknown" in done.stdout) == (system == "win32")


if __name__ == "__main__":
    become(sys.argv[1])
    from unpad.__main__ import main

    for line in sys.stdin.read().splitlines():
        sys.argv = ["unpad", *shlex.split(line)]
        try:
            main()
        except SystemExit as end:
            if end.code:
                sys.exit(f"{line}: {end.code}")
