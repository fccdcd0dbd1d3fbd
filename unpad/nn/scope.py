"""Values that code inside a `with` reads without their being passed along."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class Scope(Generic[T]):
    """A value for the code inside a `with`, in one thread.

    torch.compile cannot trace a context variable. While no thread is inside, it traces a number of this object instead,
    and traces again when that changes.

    Args:
        default: the value outside.
    """

    def __init__(self, default: T) -> None:
        self._default, self._value = default, ContextVar("value", default=default)
        self._inside, self._lock = 0, Lock()

    def get(self) -> T:
        return self._value.get() if self._inside else self._default

    @contextmanager
    def of(self, value: T) -> Iterator[None]:
        """Set the value for the code inside."""
        with self._lock:
            self._inside += 1
        token = self._value.set(value)
        try:
            yield
        finally:
            self._value.reset(token)
            with self._lock:
                self._inside -= 1
