"""Forked processes for tests of kills."""

import os
import traceback
from collections.abc import Callable


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process; return its exit code (9 after SIGKILL is -9, 1 after an exception)."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
