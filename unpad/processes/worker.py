"""One of several processes, seen from inside: where it prints, and how it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from unpad.errors import PLEASE_REPORT, SIGNALS, UNFORESEEN, LostProcessError, UnpadError
from unpad.processes import own_log
from unpad.terminal.printing import print_text

LAUNCHER = "UNPAD_LAUNCHER"  # set by `launch`: its process id
LAST_S = 30.0  # to wait for the end of the first process, which has an error to report
_SIGNALLED = [kind.exit_code for kind in SIGNALS.values()]
_PR_SET_PDEATHSIG = 1


def run_as_worker(work: Callable[[], None]) -> None:
    """Run the work of this process, one of several, with its output redirected; exits if it fails.

    Every process prints its errors. Errors common to all appear once, since only the first has the terminal; the others
    wait for its end, because the agent ends all processes when one fails, and the first has files to complete.
    """
    _end_with_launcher()
    rank = int(os.environ["RANK"])
    log = own_log.begin(rank)
    try:
        work()
    except SystemExit as end:
        if end.code not in (0, None) and log is not None:
            agreed = isinstance(end.__cause__, UnpadError) and end.__cause__.is_agreed
            if (agreed or log.kept) and not isinstance(end.__cause__, LostProcessError):
                _wait_for_first(end.code in _SIGNALLED)
            if not agreed:
                log.show()
        raise
    except BaseException:
        print_text(f"{traceback.format_exc()}{PLEASE_REPORT}\n", to_errors=True)
        if log is not None:
            log.show()
        sys.exit(UNFORESEEN)


def leave_to_launcher(error: UnpadError) -> bool:
    """Leave the loss of another process to the launcher, which knows more about it; False for an error to print
    here."""
    if not isinstance(error, LostProcessError) or LAUNCHER not in os.environ or os.environ.get("RANK") != "0":
        return False
    with suppress(OSError):
        (Path(os.environ[own_log.LOGS]) / "0.log").write_text(f"{error}\n", encoding="utf-8")
    return True


def _wait_for_first(was_signalled: bool) -> None:
    """Wait until the agent ends this process, after the first has ended with an error.

    Args:
        was_signalled: whether a signal ends the run: torchrun then sends it, waits for all processes and ends none.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or (was_signalled and LAUNCHER not in os.environ):
        return
    over: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: over.append(number))
    agent, latest = os.getppid(), time.monotonic() + LAST_S
    while not over and os.getppid() == agent and time.monotonic() < latest:
        time.sleep(0.05)


def _end_with_launcher() -> None:
    """Have the kernel kill this process when the launcher is gone; only Linux can do that.

    Not SIGTERM: the kernel sends the signal once per thread of the launcher, and a second one would interrupt saving.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it was gone before
        sys.exit(LostProcessError.exit_code)
