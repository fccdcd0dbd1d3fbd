"""Native kernels of every target that this processor runs, in one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from unpad.nn.native import library


def has(target: str) -> bool:
    """True if this process can run a target; of none where kernels are switched off."""
    kernels = library._load()[0]
    return kernels is not None and bool(kernels.library.unpad_kernels_for(target.encode()))


def able() -> list[str]:
    """Targets that this process can run, without the one for tests alone."""
    return list(filter(has, library.TARGETS))


@contextmanager
def running(target: str, table: Any = None) -> Iterator[None]:
    """Run the kernels of a target inside; of the table that is given, if one is."""
    kernels = library._load()[0]
    table = table or kernels.library.unpad_kernels_for(target.encode()).contents
    loaded = kernels._replace(target=target, table=table), library.NAMES[target]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_load", lambda: loaded)
        try:
            library._function.cache_clear()
            yield
        finally:
            library._function.cache_clear()
