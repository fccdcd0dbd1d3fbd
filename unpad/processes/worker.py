"""One of several processes, seen from inside: how it was started, where it prints, and how it ends.

The first has the terminal, each other one a log of its own. Output from before the run directory is known goes to a
temporary file. `keep_log` moves this to RUN/processes/RANK.log, where all later output is appended. If the process
fails before that, the file is printed on its original standard error: by the process itself, or by `launch`, which
knows the file.
"""

import atexit
import ctypes
import io
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from unpad import storage
from unpad.errors import PLEASE_REPORT, SIGNALS, UNFORESEEN, LostProcessError, RecipeError, UnpadError
from unpad.storage.disk import APPEND, NO_FOLLOW, disk_errors, file_mode, write_all
from unpad.terminal.printing import print_text


def started_by_torchrun() -> bool:
    """True if `unpad train --processes` or torchrun started this process as one of several."""
    return {"RANK", "LOCAL_RANK"} <= os.environ.keys() and int(os.environ.get("WORLD_SIZE", "1")) > 1


def in_process_group() -> bool:
    """True if this process is one of several in a group of torch.distributed, which somebody has made."""
    dist = sys.modules.get("torch.distributed")  # who has not imported it has no group
    return dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def refuse_separate_tasks() -> None:
    """Refuse to be one of several processes that srun or mpirun starts: none knows of the others, and each would train
    a run of its own.

    Raises:
        RecipeError: in every such process, with the command that starts them as one run.
    """
    name, num = max(((name, int(os.environ.get(name) or 1)) for name in TASKS), key=lambda task: task[1])
    if num == 1 or "RANK" in os.environ:
        return
    hosts = int(os.environ.get("SLURM_STEP_NUM_NODES") or 1)
    line = f"torchrun --nnodes {hosts} --nproc-per-node {-(-num // hosts)} --rdzv-backend c10d"
    line = f"{'srun --ntasks-per-node 1 ' if name == TASKS[0] else ''}{line} --rdzv-endpoint HOST:29500"
    what = f"{num} processes were started without torchrun, and each would train a run of its own"
    fix = f"start one torchrun for each host: {line} -m unpad train ...; or set RANK=0, for a run by each"
    raise RecipeError(what, where=name, fix=fix)


def refuse_under_torchrun(what: str, where: str, fix: str) -> None:
    """Refuse a command that one of several processes cannot run.

    Raises:
        RecipeError: with this message; all processes raise it, and the first prints it.
    """
    if started_by_torchrun() or in_process_group():
        error = RecipeError(what, where=where, fix=fix)
        error.is_agreed = True
        raise error


# Number of processes that srun, Open MPI and MPICH have started. Not SLURM_NTASKS: the script of a job has it as well.
TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
LAUNCHER = "UNPAD_LAUNCHER"  # set by `launch`: its process id
LAST_S = 30.0  # to wait for the end of the first process, which has an error to report
_SIGNALLED = [kind.exit_code for kind in SIGNALS.values()]
_PR_SET_PDEATHSIG = 1
LOGS = "UNPAD_LOGS"  # set by `launch`: the folder of the temporary files
FOLDER = "processes"  # in a run directory

_begun: "list[OwnLog]" = []  # log of this process, if it has one


def run_as_worker(work: Callable[[], None]) -> None:
    """Run the work of this process, one of several, with its output redirected; exits if it fails.

    Every process prints its errors. Errors common to all appear once, since only the first has the terminal; the others
    wait for its end, because the launcher ends all processes when one fails, and the first has files to complete.
    """
    _end_with_launcher()
    rank = int(os.environ["RANK"])
    log = begin_log(rank)
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


def leave(code: int | str | None) -> NoReturn:
    """End this process after its last output: while an interpreter takes its modules apart, a thread of torch's that
    still runs would end it by SIGABRT."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else UNFORESEEN if code else 0)


def leave_to_launcher(error: UnpadError) -> bool:
    """Leave the loss of another process to the launcher, which knows more about it; False for an error to print
    here."""
    if not isinstance(error, LostProcessError) or LAUNCHER not in os.environ or os.environ.get("RANK") != "0":
        return False
    with suppress(OSError):
        (Path(os.environ[LOGS]) / "0.log").write_text(f"{error}\n", encoding="utf-8")
    return True


def _wait_for_first(was_signalled: bool) -> None:
    """Wait until the launcher ends this process, after the first has ended with an error.

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


# --------------------------------------------------------------------------- its log


class OwnLog:
    """Standard output and standard error of this process, in a file of its own.

    Args:
        rank: of this process.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.kept = rank, False
        self._owns_folder = LOGS not in os.environ
        self._folder = Path(os.environ.get(LOGS) or tempfile.mkdtemp(prefix="unpad-"))
        self._path = self._folder / f"{rank}.log"
        self._terminal = os.dup(2)
        _redirect(os.open(self._path, APPEND, 0o600))
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)  # a killed process loses unwritten output

    def keep(self, folder: Path, private: bool) -> None:
        """Move the output so far into the run directory, and append all later output to it.

        Raises:
            DiskError: it cannot be written there.
        """
        if self.kept:
            return
        path = log_of(folder, self.rank)
        storage.make_folder(path.parent, private=private)
        with disk_errors(path):
            descriptor = os.open(path, APPEND | NO_FOLLOW, file_mode(path, private))
            sys.stdout.flush()
            write_all(descriptor, path, self._path.read_bytes())
        _redirect(descriptor)
        self.kept = True
        self._remove()

    def show(self) -> None:
        """Print the log on the terminal, if it was not kept and `launch` will not print it."""
        if self.kept or not self._owns_folder:
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with suppress(OSError):
            os.write(self._terminal, shown_log(self.rank, self._path).encode())
        self._remove()

    def _remove(self) -> None:
        with suppress(OSError):
            self._path.unlink()
        if self._owns_folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def begin_log(rank: int) -> OwnLog | None:
    """Redirect the output of this process, if it is not the first of its run."""
    if rank == 0:
        return None
    _begun[:] = [OwnLog(rank)]
    return _begun[0]


def keep_log(folder: Path, *, private: bool) -> None:
    """Keep the log of this process in the run directory, if it has one.

    Args:
        private: whether only the owner may read it.

    Raises:
        DiskError: it cannot be written there.
    """
    for log in _begun:
        log.keep(folder, private)


def log_of(folder: Path, rank: int) -> Path:
    """Log of a process in the directory of its run."""
    return folder / FOLDER / f"{rank}.log"


def shown_log(rank: int, path: Path) -> str:
    """Text of a log under a line that names its process; "" without a log."""
    try:
        text = path.read_text(encoding="utf-8", errors="backslashreplace")
    except OSError:
        return ""
    return f"process {rank}:\n{text}" if text.strip() else ""


def _redirect(descriptor: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
