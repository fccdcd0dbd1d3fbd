"""Lines of the server's log, on standard error: one a request, and faults of the program; no text of a request."""

from __future__ import annotations

import traceback
from contextvars import ContextVar
from datetime import datetime

from unpad.terminal.printing import print_lines
from unpad.terminal.table import number_of

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")  # of the request that is being answered


def log_request(id: str, route: str, status: str, tokens: str, seconds: float) -> None:
    """Time, id, route, status, tokens and seconds of a request that is done."""
    now = datetime.now().astimezone().isoformat(timespec="milliseconds")
    print_lines([f"{now} {id} {route} {status} {tokens} {seconds:.3f} s"], to_errors=True)


def log_draining(num_open: int, seconds: float) -> None:
    """The beginning of the end: answers that are open, and how long they may take."""
    left = f"{number_of(num_open, 'answers')} open, for at most {seconds:g} s; another signal ends it now"
    print_lines([f"draining: {left if num_open else 'no answer is open'}"], to_errors=True)


def log_fault(place: str, error: BaseException) -> None:
    """The traceback of a fault, without the messages of errors, which may quote a request."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"  {frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    print_lines([f"fault {place}: {type(error).__name__}", *lines], to_errors=True)
