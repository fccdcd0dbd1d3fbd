"""Reduction of a case to a small one with the same finding: values of its JSON first, then its bytes."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

Fails = Callable[[bytes], bool]


class _Budget:
    """Trials that are left, and the moment at which they end."""

    def __init__(self, fails: Fails, trials: int, seconds: float) -> None:
        self._fails, self._left, self._end = fails, trials, time.monotonic() + seconds

    def __call__(self, data: bytes) -> bool:
        if self.is_spent:
            return False
        self._left -= 1
        return self._fails(data)

    @property
    def is_spent(self) -> bool:
        return self._left <= 0 or time.monotonic() > self._end


def reduce_case(data: bytes, fails: Fails, trials: int = 3000, seconds: float = 20.0) -> bytes:
    """Remove what a finding does not need.

    Args:
        fails: True for bytes that show the finding, as `data` does.
        trials, seconds: most that may be spent; what is left then is returned as it is.
    """
    budget = _Budget(fails, trials, seconds)
    before = None
    while data != before and not budget.is_spent:
        before = data
        data = _without_lines(data, budget)
        data = _smaller_values(data, budget)
        data = _without_bytes(data, budget)
    return data


def _without_lines(data: bytes, fails: Fails) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join(_minimal(lines, lambda kept: fails(b"".join(kept)))) if len(lines) > 1 else data


def _without_bytes(data: bytes, fails: Fails) -> bytes:
    pieces = [data[at : at + 1] for at in range(len(data))]
    return b"".join(_minimal(pieces, lambda kept: fails(b"".join(kept))))


def _minimal(parts: list[bytes], fails: Callable[[list[bytes]], bool]) -> list[bytes]:
    """Parts of which none of any run can be left out; delta debugging with runs that halve (Zeller, 2002)."""
    size = max(len(parts) // 2, 1)
    while parts:
        at, removed = 0, False
        while at < len(parts):
            kept = parts[:at] + parts[at + size :]
            if fails(kept):
                parts, removed = kept, True
            else:
                at += size
        if size == 1 and not removed:
            return parts
        size = max(size // 2, 1)
    return parts


# --------------------------------------------------------------------------- values


def _smaller_values(data: bytes, fails: Fails) -> bytes:
    """Reduce every line, or the whole, that is JSON, also after a name that ends with a NUL."""
    head, found, body = data.partition(b"\0")
    for prefix, rest in ((b"", data), (head + found, body)):
        for parts in ([rest], rest.split(b"\n")):
            for index in range(len(parts)):
                parts = _smaller_part(parts, index, lambda text, prefix=prefix: fails(prefix + text))
            smaller = prefix + b"\n".join(parts)
            if smaller != data:
                return smaller
    return data


def _smaller_part(parts: list[bytes], index: int, fails: Fails) -> list[bytes]:
    try:
        value = json.loads(parts[index])
    except (ValueError, RecursionError):
        return parts

    def put(value: Any) -> list[bytes]:
        return [*parts[:index], json.dumps(value, ensure_ascii=True).encode(), *parts[index + 1 :]]

    if not fails(b"\n".join(put(value))):
        return parts
    smaller = True
    while smaller:
        smaller = False
        for candidate in _candidates(value):
            if fails(b"\n".join(put(candidate))):
                value, smaller = candidate, True
                break
    return put(value)


def _candidates(value: Any) -> Iterator[Any]:
    """Values a little smaller than a value, the largest steps first."""
    if isinstance(value, dict):
        yield from (item for item in value.values() if isinstance(item, dict | list))
        yield from ({name: item for name, item in value.items() if name != key} for key in value)
        for key, item in value.items():
            yield from ({**value, key: smaller} for smaller in _candidates(item))
    elif isinstance(value, list):
        yield from (value[: len(value) // 2], value[len(value) // 2 :]) if len(value) > 1 else ()
        yield from (value[:at] + value[at + 1 :] for at in range(len(value)))
        for at, item in enumerate(value):
            yield from ([*value[:at], smaller, *value[at + 1 :]] for smaller in _candidates(item))
    elif isinstance(value, str) and len(value) > 1:
        yield from (value[: len(value) // 2], value[len(value) // 2 :])
