"""Start several processes on this machine that train one model, and wait for their ends.

Each process has a session of its own, a rank and the address of a store of torch's, as under torchrun; when one has
failed, the remaining ones are ended. A signal to this process is passed on to them, so that they save and exit; a
second signal kills them.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

from unpad.errors import HANGUP, SIGNALS, UNFORESEEN, LostProcessError, RecipeError
from unpad.machine import cores
from unpad.processes.children import interrupts_held
from unpad.processes.worker import LAUNCHER, LOGS, log_of, shown_log
from unpad.terminal.printing import print_lines, print_text, resume_run, show_cursor
from unpad.terminal.table import number_of

PATIENCE_S = 8.0  # for the others to end after one has failed
POLL_S = 0.025


def launch(processes: int, arguments: Sequence[str], folder: Path) -> int:
    """Run `unpad ARGUMENTS` in several processes; report on standard error what ended them if they could not.

    The cores are divided among the processes, unless OMP_NUM_THREADS is set.

    Args:
        folder: run directory, which gets the logs of all processes but the first.

    Returns:
        Exit code of the run: the code of the lowest rank that failed otherwise than by LostProcessError; 129, 130 or
        143 after SIGHUP, Ctrl-C or SIGTERM, unless a process could not save; LostProcessError's code if a process was
        killed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(torch.get_num_threads() // processes, 1)))
    if note := crowded(processes):
        print_lines([note], to_errors=True)
    with tempfile.TemporaryDirectory(prefix="unpad-") as logs:
        os.environ[LOGS], os.environ[LAUNCHER] = logs, str(os.getpid())
        ended = run_processes(processes, [sys.executable, "-m", "unpad", *arguments])
        for rank in range(1, processes):
            if ended.untold(rank):
                print_text(shown_log(rank, Path(logs) / f"{rank}.log"), to_errors=True)
        lost = Path(logs) / "0.log"
        error = ended.error(folder, lost.read_text(encoding="utf-8") if lost.is_file() else "", processes)
    if ended.codes.get(0, 0) < 0 and sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        show_cursor()  # the first process had no time to
    if error:
        print_text(f"{error}\n", to_errors=True)
    return ended.code()


def crowded(processes: int) -> str:
    """Warning if there are more processes than cores; "" otherwise, and on GPUs, where each process takes one."""
    here = cores()
    if processes <= here or torch.cuda.is_available():
        return ""
    return f"note  {processes} processes share {number_of(here, 'cores')}, which is slower than --processes {here}"


@dataclass
class Ended:
    """Exit codes of the processes of a run, and what ended them.

    Args:
        codes: exit code by rank, minus the signal number if a signal ended it; successful processes are missing.
        signal: number of the signal that this process received; None if it received none.
        first: rank that failed first; None if none failed.
        silent: ranks that were killed because they kept running after another had failed.
        at_once: whether a second signal killed the processes.
    """

    codes: dict[int, int] = field(default_factory=dict)
    signal: int | None = None
    first: int | None = None
    silent: list[int] = field(default_factory=list)
    at_once: bool = False

    def code(self) -> int:
        """Exit code of the run."""
        told = [code for _, code in sorted(self.codes.items()) if code > 0]
        known = [code for code in told if code != LostProcessError.exit_code]
        if self.signal is not None:
            # Python exits with UNFORESEEN if a signal arrives during its start or shutdown.
            known = [] if self.at_once else [code for code in known if code != UNFORESEEN]
            return known[0] if known else 128 + self.signal
        if known:
            return known[0]
        return LostProcessError.exit_code if self.codes else 0

    def untold(self, rank: int) -> bool:
        """True if the first process cannot have reported why the run ended."""
        code = self.codes.get(rank, 0)
        if self.signal is not None and code in (128 + self.signal, -self.signal, -signal.SIGTERM):
            return False  # the signal to this command ended it, like the first process
        return code not in (0, self.codes.get(0)) and not self.at_once

    def error(self, folder: Path, lost: str, processes: int) -> str:
        """Message on failures that no process could report itself, for a run in `folder`; "" if the first reported all.

        Args:
            lost: error of the first process if it lost the connection to another, which it has not printed.
            processes: number of the run's processes.
        """
        if self.signal is not None:
            kind = SIGNALS[self.signal]
            what = f"stopped at once by a second {kind.name}"
            return str(kind(what, where=str(folder))) if self.at_once else ""
        if self.first is None:
            return ""
        code, rank = self.codes.get(self.first, 0), self.first
        if code < 0:
            what = f"process {rank} was killed by {signal.Signals(-code).name}"
        elif code == LostProcessError.exit_code and self.silent:
            rank = self.silent[0]
            what = f"process {rank} did not answer for the seconds of train.timeout, and was ended"
        elif code not in (LostProcessError.exit_code, self.codes.get(0)):
            what = f"process {rank} ended with exit code {code}"
        elif code == LostProcessError.exit_code and not lost:
            what = f"process {rank} lost the connection to another, or waited for it longer than train.timeout"
        else:
            return lost.rstrip()
        log = log_of(folder, rank)
        again = resume_run(folder, "--processes", str(processes))
        fix = f"see why it ended, such as for lack of memory; then continue with {again}, or with another number"
        return str(LostProcessError(what, where=str(log if log.is_file() else folder), fix=fix))


def run_processes(num: int, command: Sequence[str]) -> Ended:
    """Run a command in several processes until all have ended, and return how they ended.

    Must be called in the main thread: it handles Ctrl-C, SIGTERM and SIGHUP, unless nohup ignores SIGHUP.

    Raises:
        RecipeError: on Windows, which has none of the signals and sessions that this takes.
    """
    if sys.platform == "win32":
        fix = "leave it out, or use WSL 2"
        raise RecipeError("several processes need Linux or macOS", where="--processes", fix=fix)
    from torch.distributed.elastic.utils.distributed import create_c10d_store

    store = create_c10d_store(is_server=True, server_addr="localhost", wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(num),
        "LOCAL_WORLD_SIZE": str(num),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        # Names of torch's agent: the processes join its store, instead of making one of their own.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "unpad",
    }
    ended, running, passed_on, failed_at = Ended(), dict[int, subprocess.Popen[bytes]](), False, 0.0
    with _recording(ended):
        try:
            # Until `unpad.__main__` can answer: in an interpreter that is half started, Ctrl-C is a traceback.
            with interrupts_held():
                for rank in range(num):
                    here = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    environment = os.environ | shared | here
                    running[rank] = subprocess.Popen(command, env=environment, start_new_session=True)
            while running:
                if ended.signal is not None and not passed_on:
                    passed_on = True
                    _send(running.values(), ended.signal)
                if ended.at_once:
                    _send(running.values(), signal.SIGKILL)
                time.sleep(POLL_S)
                codes = {rank: code for rank, process in running.items() if (code := process.poll()) is not None}
                running = {rank: process for rank, process in running.items() if rank not in codes}
                ended.codes |= {rank: code for rank, code in codes.items() if code}
                if ended.first is None and ended.codes:
                    ended.first, failed_at = min(ended.codes), time.monotonic()
                    _send(running.values(), signal.SIGTERM)
                elif ended.codes and not ended.silent and time.monotonic() - failed_at > PATIENCE_S:
                    ended.silent = list(running)
                    _send(running.values(), signal.SIGKILL)
        finally:
            _send(running.values(), signal.SIGKILL)
    return ended


@contextmanager
def _recording(ended: Ended) -> Iterator[None]:
    """Record the signals that this process receives; a closing terminal sends SIGHUP more than once."""

    def record(number: int, frame: FrameType | None) -> None:
        ended.at_once = ended.at_once or (ended.signal is not None and number != HANGUP)
        ended.signal = ended.signal or number

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        if number != HANGUP or before[number] is not signal.SIG_IGN:
            signal.signal(number, record)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(processes: Iterable[subprocess.Popen[bytes]], number: int) -> None:
    """Send a signal to the sessions of processes; ended ones are skipped."""
    for process in processes:
        if sys.platform != "win32":
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
