"""Forked processes for tests of kills."""

import os
import sys
import traceback
from collections.abc import Callable


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process; return its exit code (9 after SIGKILL is -9, 1 after an exception)."""
    return os.waitstatus_to_exitcode(os.waitpid(forked(work), 0)[1])


def forked(work: Callable[[], object]) -> int:
    """Begin to run `work` in a forked process, as `in_child`; return its id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
