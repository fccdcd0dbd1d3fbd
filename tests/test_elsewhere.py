"""A small run on systems other than Linux: `python -m tests.test_elsewhere SYSTEM LINE...` is `unpad LINE` on one,
without what it lacks, and with what Windows refuses refused."""

import builtins
import importlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from fcntl import LOCK_EX, LOCK_NB, flock
from functools import partial

import pytest

# They find out where they are when they are imported, which is here.
PACKAGES = """asyncio multiprocessing.connection PIL.Image pyarrow.parquet rich.console tensorboard.summary.writer
    tokenizers torch.distributed torch.utils.flop_counter typer._adapters zoneinfo"""
LACKED = "fork register_at_fork memfd_create sched_getaffinity CLOCK_BOOTTIME"
WINDOWS = f"""{LACKED} O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_SYNC geteuid getloadavg getuid kill killpg pread pwrite
    setsid sysconf clock_gettime CLOCK_MONOTONIC SIGHUP SIGKILL SIGUSR1 pthread_sigmask setitimer"""
BINARY, LK_NBLCK = 1 << 30, 2


def become(system):
    for name in PACKAGES.split():
        importlib.import_module(name)
    for name in (LACKED if system == "darwin" else WINDOWS).split():
        for module in (os, signal, time):
            vars(module).pop(name, None)
    sys.modules |= {"fcntl": None, "resource": None, "termios": None, "msvcrt": sys.modules[__name__]}
    sys.platform, io.open = system, partial(open_text, io.open)
    builtins.open = io.open
    if system == "win32":
        os.open, os.rename, os.O_BINARY = partial(open_file, os.open), partial(rename, os.rename), BINARY
        signal.valid_signals, signal.signal = lambda: {2, 4, 6, 8, 11, 15}, partial(handle, signal.signal)


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
    assert not os.path.lexists(target), f"{target} exists"
    renames(source, target)


def handle(handles, number, handler):
    assert number in signal.valid_signals()
    return handles(number, handler)


def locking(descriptor, mode, num):
    """As of msvcrt."""
    assert os.lseek(descriptor, 0, os.SEEK_CUR) > 1 << 20, "nobody could read who holds it"
    flock(descriptor, LOCK_EX | LOCK_NB)


@pytest.mark.slow
@pytest.mark.promise("install.elsewhere")
@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_a_small_run_is_trained_continued_and_answers(system, tmp_path):
    small = "model.width=16 model.blocks=1 model.heads=1 train.eval_every=2 train.max_steps=2"
    lines = f"train zh_chat --out run {small}", "train --resume --out run train.max_steps=3", "runs ."
    command = [sys.executable, "-m", "tests.test_elsewhere", system, *lines, "generate run --prompt 你好"]
    world = os.environ | {"UNPAD_CACHE": "c", "PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=world)
    assert done.returncode == 0, done.stdout + done.stderr
    order = "(?s)step 2/2 .* mem unknown.*resumed  at step 2.*step 3/3 .*finished.*train.max_steps=3\n.+"
    assert re.search(order, done.stdout), done.stdout


if __name__ == "__main__":
    become(sys.argv[1])
    from unpad.__main__ import main

    for line in sys.argv[2:]:
        sys.argv = ["unpad", *line.split()]
        with pytest.raises(SystemExit, match=r"^0$"):
            main()
