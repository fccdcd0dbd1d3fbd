"""Child processes for parts of a command's work: each runs a function of a module and returns its result or error.

A child is forked from a process that has imported all modules and computed nothing: a fork of this process would lose
the threads of parallel products. Children leave Ctrl-C to this process and never outlive it.
"""

import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from unpad.errors import UNFORESEEN, LostProcessError, UnpadError

CONTEXT: Any = get_context("forkserver" if sys.platform == "linux" else "spawn")


@dataclass
class Child:
    """A child process.

    Args:
        connection: receives the outcome.
        outcome: "result" and its value, or "raised" and an exception; "" and None until it was sent.
    """

    process: BaseProcess
    connection: Connection
    outcome: tuple[str, Any] = ("", None)

    @property
    def signs(self) -> list[Any]:
        """Objects to wait on: one is ready when the process has ended or sends its outcome."""
        return [self.process.sentinel, *([] if self.connection.closed else [self.connection])]

    def listen(self) -> None:
        """Receive the outcome if it was sent."""
        if not self.connection.closed and self.connection.poll(0):
            with suppress(EOFError, ConnectionError):
                self.outcome = self.connection.recv()
            self.connection.close()


def run_all(
    function: Callable[..., Any],
    calls: Sequence[Sequence[object]],
    *,
    modules: Sequence[str],
    grace: float = 0.0,
    fix: str = "run it again, with more memory free",
) -> list[Any]:
    """Call a function with each of several arguments, each in a process of its own with this one's working folder and
    environment; results in the same order.

    Args:
        function: defined in a module; calls: its arguments, picklable.
        modules: imported once, by the process that forks the others, where the system can fork.
        grace: seconds that the others have to end, or to send their own errors, once one has failed.
        fix: the user's next step if a process is killed.

    Raises:
        UnpadError: the error of the first call that failed; LostProcessError only if there is no other error.
        LostProcessError: a process was killed.
        Exception: raised by a call, with its traceback as a note.
    """
    CONTEXT.set_forkserver_preload(list(modules))
    with ExitStack() as stack:
        children = [stack.enter_context(_started(function, arguments)) for arguments in calls]
        running = children
        while running:
            has_failed = any(child.process.exitcode for child in children)
            if not connection.wait([sign for child in running for sign in child.signs], grace if has_failed else None):
                break
            for child in running:
                child.listen()
            running = [child for child in running if child.process.exitcode is None]
        codes = [child.process.exitcode for child in children]
    raised = [child.outcome[1] for child in children if child.outcome[0] == "raised"]
    causes = [error for error in raised if not isinstance(error, LostProcessError)]
    if causes:
        raise min(causes, key=lambda error: not isinstance(error, UnpadError))
    for number, code in sorted(enumerate(codes), key=lambda item: item[1] or 0):  # killed ones first
        if code:
            raise LostProcessError(f"process {number} ended with exit code {code}", fix=fix)
    return [child.outcome[1] for child in children]


@contextmanager
def _started(function: Callable[..., object], arguments: Sequence[object]) -> Iterator[Child]:
    """Start a process, and kill it at the end, with everything that it started.

    It, or the process that forks it, begins in the terminal's group: a Ctrl-C during its imports would print a
    traceback.
    """
    here, there = CONTEXT.Pipe(duplex=False)
    world = os.getcwd(), dict(os.environ)
    child = Child(CONTEXT.Process(target=_work, args=(world, there, function, arguments)), here)
    if sys.platform != "win32":
        resource_tracker.ensure_running()  # it unblocks the signal when it starts
    try:
        with there, interrupts_held():
            child.process.start()
        yield child
    finally:
        if child.process.pid is not None:  # it began
            child.process.kill()
            child.process.join()
            if sys.platform != "win32":
                with suppress(ProcessLookupError, PermissionError):  # it leads a group of its own
                    os.killpg(child.process.pid, signal.SIGKILL)
        child.listen()
        child.connection.close()


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Processes that start inside begin with Ctrl-C held back; Windows has no such mask."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --------------------------------------------------------------------------- in the child


def _work(
    world: tuple[str, dict[str, str]], sender: Connection, function: Callable[..., object], arguments: Sequence[object]
) -> None:
    """Call the function detached from the terminal, and send its outcome.

    Args:
        world: working folder and environment.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform != "win32":
        with suppress(OSError):
            os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.chdir(world[0])
    os.environ.clear()
    os.environ |= world[1]
    try:
        sender.send(("result", function(*arguments)))
    except Exception as error:
        sender.send(("raised", _portable(error)))
        sys.exit(error.exit_code if isinstance(error, UnpadError) else UNFORESEEN)


def _portable(error: Exception) -> Exception:
    """A picklable form of an exception, with the traceback as a note."""
    note = f"It was raised in another process:\n{traceback.format_exc()}"
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # its class cannot be rebuilt from its arguments
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(note)
    return error


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        if sys.platform != "win32":
            with suppress(OSError):
                os.killpg(0, signal.SIGKILL)
        os._exit(1)
