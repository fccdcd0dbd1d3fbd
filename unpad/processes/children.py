"""Child processes for parts of a command's work: each runs a function of a module and returns its result or error.

A child is a new process, or forked from one that has imported all modules and computed nothing: a fork of this process
would lose the threads of parallel products. Children leave Ctrl-C to this process and never outlive it.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import connection, get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from unpad.errors import UNFORESEEN, LostProcessError, UnpadError

CONTEXT: Any = get_context("forkserver" if sys.platform == "linux" else "spawn")
FRESH: Any = get_context("spawn")
LAST_LINES = 3  # of the output of a child that failed


class Child:
    """A child process and its output.

    Args:
        told: connection that receives the outcome: its result, a user's error, or another exception.
        output: file that its output goes to; None if it shares this process's output.
    """

    def __init__(self, process: BaseProcess, told: Connection, output: Path | None) -> None:
        self.process = process
        self._told, self._output = told, output
        self._end: tuple[str, Any] | None = None
        self._is_open = True

    @property
    def exit_code(self) -> int | None:
        """Exit code, or minus the signal that ended it; None while it runs."""
        return self.process.exitcode

    @property
    def signs(self) -> list[Any]:
        """Objects to wait on: one is ready when the process has ended or sends its outcome."""
        return [self.process.sentinel, *([self._told] if self._is_open else [])]

    def listen(self) -> tuple[str, Any]:
        """Kind and value of its outcome once it was sent: "result", "told" or "raised"; "" and None before."""
        if self._is_open and self._told.poll(0):
            with suppress(EOFError, ConnectionError):
                self._end = self._told.recv()
            self._is_open = False
        return self._end or ("", None)

    def close(self) -> None:
        """Kill it, and receive the outcome if it was sent."""
        self.kill()
        self.listen()
        self._is_open = False
        self._told.close()
        if self._output is not None:
            self._output.unlink(missing_ok=True)

    def wait(self, seconds: float) -> int | None:
        """`exit_code` once it has ended, or after a timeout in seconds."""
        self.process.join(max(seconds, 0))
        return self.exit_code

    def signal(self, number: int) -> None:
        """Send a signal to this process only, unless it has ended."""
        if self.exit_code is None and self.process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill(self) -> int | None:
        """Kill it with SIGKILL, and everything that it started."""
        if self.process.pid is None:  # it did not begin
            return None
        self.signal(signal.SIGKILL)
        self.process.join()
        with suppress(ProcessLookupError, PermissionError):  # it leads a group of its own
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.exit_code

    def user_error(self) -> UnpadError | None:
        """The user's error that it ended with."""
        kind, value = self.listen()
        return UnpadError.from_json(value) if kind == "told" else None

    def last_words(self) -> str:
        """Its last lines of output, or its error, on one line."""
        if (error := self.user_error()) is not None:
            return f"{type(error).__name__}: {error.what}"
        with suppress(OSError):
            text = "" if self._output is None else self._output.read_text("utf-8", "replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            return " ".join(lines[-LAST_LINES:])[-300:]
        return ""


@contextmanager
def started(
    function: Callable[..., object],
    *arguments: object,
    modules: Sequence[str] | None = None,
    output: Path | None = None,
) -> Iterator[Child]:
    """Call a function in a new process, with this one's working folder and environment; kill it at the end.

    Args:
        function: defined in a module; arguments: picklable.
        modules: imported once, by the process that forks the others, where the system can fork; None: the process
            imports what it needs, so that its memory use is that of a separate program.
        output: file for its output, including the traceback of an unforeseen exception; deleted at the end.
    """
    if modules is not None:
        CONTEXT.set_forkserver_preload(list(modules))
    world, context = (os.getcwd(), dict(os.environ)), FRESH if modules is None else CONTEXT
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(world, there, output, function, arguments))
    child = Child(process, here, output)
    try:
        with there:
            _start(process)
        yield child
    finally:
        child.close()


def run_all(
    function: Callable[..., Any],
    calls: Sequence[Sequence[object]],
    *,
    modules: Sequence[str] | None = None,
    at_once: int | None = None,
    grace: float = 0.0,
    fix: str = "run it again, with more memory free",
) -> Iterator[Any]:
    """Call a function with each of several arguments, each in a process of its own; results in the same order.

    Args:
        function, calls, modules: as in `started`.
        at_once: number of processes at a time, in the order of the calls; None for all.
        grace: seconds that the others have to end, or to send their own errors, once one has failed.
        fix: the user's next step if a process is killed.

    Raises:
        UnpadError: the error of the first call that failed; LostProcessError only if there is no other error.
        LostProcessError: a process was killed.
        Exception: raised by a call, with its traceback as a note.
    """
    children, shown, has_failed = list[Child](), 0, False
    with ExitStack() as stack:
        while shown < len(calls):
            codes = [child.exit_code for child in children]  # read once: any of them may end meanwhile
            has_failed |= any(code not in (None, 0) for code in codes)
            while shown < len(codes) and codes[shown] == 0:
                yield children[shown].listen()[1]
                shown += 1
            running = [child for child, code in zip(children, codes, strict=True) if code is None]
            while not has_failed and len(children) < len(calls) and len(running) < (at_once or len(calls)):
                child = stack.enter_context(started(function, *calls[len(children)], modules=modules))
                children.append(child)
                running.append(child)
            if not running:
                break
            if not connection.wait([sign for child in running for sign in child.signs], grace if has_failed else None):
                break
            for child in running:
                child.listen()
    if shown < len(calls):
        raise _failure(children, fix)


def _failure(children: Sequence[Child], fix: str) -> Exception:
    """The most informative exception of the failed processes."""
    errors: list[Exception] = [one for child in children if (one := child.user_error()) is not None]
    raised: list[Exception] = [value for kind, value in map(Child.listen, children) if kind == "raised"]
    for error in (*errors, *raised):
        if not isinstance(error, LostProcessError):  # a mere consequence of the end of another process
            return error
    number, code = next((number, child.exit_code) for number, child in enumerate(children) if child.exit_code != 0)
    return LostProcessError(f"process {number} ended with exit code {code}", fix=fix)


def _start(process: BaseProcess) -> None:
    """Start a process.

    It, or the process that forks it, begins in the terminal's group: a Ctrl-C during its imports would print a
    traceback.
    """
    if sys.platform == "win32":
        process.start()
        return
    resource_tracker.ensure_running()  # it unblocks the signal when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --------------------------------------------------------------------------- in the child


def _work(
    world: tuple[str, dict[str, str]],
    told: Connection,
    output: Path | None,
    function: Callable[..., object],
    arguments: Sequence[object],
) -> None:
    """Call the function detached from the terminal, and send its outcome."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.chdir(world[0])
    os.environ.clear()
    os.environ |= world[1]
    if output is not None:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    try:
        told.send(("result", function(*arguments)))
    except UnpadError as error:
        told.send(("told", error.to_json()))
        sys.exit(error.exit_code)
    except Exception as error:
        if output is not None:
            raise
        told.send(("raised", _portable(error)))
        sys.exit(UNFORESEEN)


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
        with suppress(OSError):
            os.killpg(0, signal.SIGKILL)
        os._exit(1)
