"""Start several processes on this machine that train one model, under torch's elastic agent.

The agent starts each process in a session of its own, gives it a rank and a rendezvous address, and ends the remaining
ones when one has failed. A signal to this process is passed on to them, so that they save and exit; a second signal
kills them.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

from unpad.errors import SIGNALS, UNFORESEEN, LostProcessError
from unpad.machine.load import cores
from unpad.processes.own_log import LOGS, log_of, shown
from unpad.processes.worker import LAUNCHER
from unpad.terminal.commands import resume_run
from unpad.terminal.printing import print_lines, print_text, show_cursor
from unpad.terminal.table import number_of

PATIENCE_S = 8.0  # for the others to end after one has failed
POLL_S = 0.1

_AGENTS = (signal.SIGQUIT,)  # signals that torch's agent handles


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
                print_text(shown(rank, Path(logs) / f"{rank}.log"), to_errors=True)
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
    """
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    if "LOGLEVEL" not in os.environ:  # our processes report what happened
        for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in _AGENTS)
    meeting = RendezvousParameters("c10d", "localhost:0", uuid.uuid4().hex, 1, 1, local_addr="localhost")
    handler = get_rendezvous_handler(meeting)
    entry, *arguments = (part.replace("$", "$$") for part in command)  # the agent would substitute $NAME
    spec = WorkerSpec(
        role="unpad",
        local_world_size=num,
        rdzv_handler=handler,
        entrypoint=entry.replace("$$", "$"),
        args=tuple(arguments),
        max_restarts=0,
        monitor_interval=POLL_S,
        local_addr="localhost",
    )
    with tempfile.TemporaryDirectory(prefix="unpad-") as logs:
        agent = LocalElasticAgent(spec, DefaultLogsSpecs(logs))

        def pids() -> dict[int, int]:
            workers = agent.get_worker_group().workers
            return {worker.global_rank: worker.id for worker in workers if isinstance(worker.id, int)}

        with _supervised(pids) as supervisor:
            try:
                result: RunResult = agent.run()
            except SignalException as end:  # a closed terminal
                return Ended(signal=int(end.sigval), at_once=False)
            finally:
                handler.shutdown()
    failures = sorted(result.failures.items(), key=lambda item: item[1].timestamp)
    codes = {rank: failure.exitcode for rank, failure in failures}
    first = supervisor.first if supervisor.first in codes else next(iter(codes), None)
    silent = [rank for rank in supervisor.killed if rank in codes]
    return Ended(codes, supervisor.received, first, silent, supervisor.at_once)


class _Supervisor:
    """Thread that forwards signals to the processes, and kills those that keep running after one has failed.

    Args:
        pids: process ids by rank, which are also their session ids; empty before they have started.
    """

    def __init__(self, pids: Callable[[], Mapping[int, int]]) -> None:
        self.received: int | None = None
        self.at_once = False
        self.first: int | None = None
        self.killed: list[int] = []
        self._pids, self._passed_on, self._failed_at = pids, False, 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Record a signal for the thread. A closing terminal sends SIGHUP more than once."""
        self.at_once = self.at_once or (self.received is not None and number != signal.SIGHUP)
        self.received = self.received or number

    def _run(self) -> None:
        while not self._over.wait(POLL_S / 4):
            pids = self._pids()
            if self.received is not None and pids and not self._passed_on:
                self._passed_on = True
                _send(pids, self.received)
            if self.at_once:
                _send(pids, signal.SIGKILL)
            if self.first is None:
                self.first = next((rank for rank, pid in pids.items() if _failed(pid)), None)
                self._failed_at = time.monotonic()
            elif not self.killed and time.monotonic() - self._failed_at > PATIENCE_S:
                self.killed = [rank for rank, pid in pids.items() if _runs(pid)]
                _send({rank: pids[rank] for rank in self.killed}, signal.SIGKILL)


@contextmanager
def _supervised(pids: Callable[[], Mapping[int, int]]) -> Iterator[_Supervisor]:
    supervisor = _Supervisor(pids)
    before = {number: signal.getsignal(number) for number in (*SIGNALS, *_AGENTS)}
    for number in SIGNALS:
        if number != signal.SIGHUP or before[number] is not signal.SIG_IGN:
            signal.signal(number, supervisor.handle)
    supervisor.start()
    # Processes start with Ctrl-C held back, until `unpad.__main__` can answer it: in an interpreter that is half
    # started it is a traceback. The supervisor's thread, which began before, receives that of the launcher.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield supervisor
    finally:
        supervisor.stop()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(pids: Mapping[int, int], number: int) -> None:
    """Send a signal to the sessions of processes; ended ones are skipped."""
    for pid in pids.values():
        with suppress(ProcessLookupError):
            os.killpg(pid, number)


def _failed(pid: int) -> bool:
    """True if a process has ended with an exit code other than 0. Collecting it is left to the agent.

    Always False on macOS, where Python cannot ask without collecting: there the agent kills the remaining ones after 30
    seconds.
    """
    if sys.platform == "darwin":
        return False
    try:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return end is not None and (end.si_code != os.CLD_EXITED or end.si_status != 0)


def _runs(pid: int) -> bool:
    """True if a process has not ended yet; called after `_failed` was true."""
    if sys.platform == "darwin":
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False
