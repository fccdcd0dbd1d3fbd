"""Work counted in calls of functions, which no other load of the machine changes."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


def counted(function: Callable[[], T]) -> tuple[T, int]:
    """The result of a function, and the calls that it made in this thread, of Python and of C."""
    calls = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        result = function()
    finally:
        sys.setprofile(before)
    return result, calls
