"""Start of the program, as the command `unpad` and as `python -m unpad`.

The handler of Ctrl-C is set before anything else is imported: the libraries take up to seconds to import, and an
exception in the middle of that is a traceback, or in the compiled part of torch an abort.
"""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

LAUNCHER = "UNPAD_LAUNCHER"  # as `unpad.processes.worker.LAUNCHER`
INTERRUPTED = 130  # as `unpad.errors.Interrupted`, which is not imported yet


def main() -> None:
    """Run the command line; Ctrl-C while a module is imported ends the process at once, and later as the verbs say."""
    if _misreads_names() and os.environ.get("PYTHONUTF8") != "1":
        arguments = [os.fsencode(argument) for argument in (sys.executable, *sys.orig_argv[1:])]
        os.execve(sys.executable, arguments, {**os.environ, "PYTHONUTF8": "1"})
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background jobs ignore it
            signal.signal(signal.SIGINT, _interrupt)
        if LAUNCHER in os.environ and sys.platform != "win32":  # `unpad.processes.launch` has held it back so far
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    except KeyboardInterrupt:
        _leave()
    _choose_waiting()
    from unpad.cli.main import main
    from unpad.processes.worker import leave, started_by_torchrun

    if not started_by_torchrun():
        main()
        return
    try:
        main()
    except SystemExit as end:
        leave(end.code)
    leave(0)


def _choose_waiting() -> None:
    """Let threads that wait for each other sleep where other processes use the cores, and in a server.

    OpenMP reads this when torch is loaded. Threads that spin beside others make a token a hundred times slower; on idle
    cores those that sleep make training a tenth slower.
    """
    is_busy = hasattr(os, "getloadavg") and os.getloadavg()[0] >= (os.cpu_count() or 1) / 2
    if is_busy or sys.argv[1:2] == ["serve"]:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _misreads_names() -> bool:
    """True if Python takes names and arguments for other than the UTF-8 that they are, as LC_ALL=C with PYTHONUTF8=0
    and locales of Latin-1 have it."""
    if sys.getfilesystemencoding() == "utf-8":
        return False
    with suppress(UnicodeDecodeError):
        read = [os.fsencode(argument).decode("utf-8") for argument in sys.argv[1:]]
        return sys.getfilesystemencoding() == "ascii" or read != sys.argv[1:]
    return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; during an import, which it could not pass, leave with the exit code of a Ctrl-C."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            _leave()
        frame = frame.f_back
    raise KeyboardInterrupt


def _leave() -> None:
    """End the process with the exit code of a Ctrl-C."""
    with suppress(OSError, RuntimeError, ValueError):  # no output, or Ctrl-C came while it was written
        sys.stdout.flush()
    if progress := sys.modules.get("unpad.terminal.progress"):
        with suppress(AttributeError):  # that module is the one that is imported
            progress.erase()
    if os.environ.get("RANK", "0") == "0":  # the first of several processes has the terminal
        os.write(2, b"Interrupted: stopped by Ctrl-C\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
