"""`unpad serve` with a clock around its model, for `serve.py`.

    python benchmarks/serve_clocked.py CLOCK serve RUN --port 0

CLOCK is a file of eight bytes: seconds of processor time, a double, that the model's thread has spent inside the model
(forward passes and scores), written whenever a call ends.
"""

from __future__ import annotations

import mmap
import struct
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from unpad.__main__ import main
from unpad.serving.served import RunOpening

METHODS = ("forward", "last_hidden", "logits")


class Inside:
    """Processor time of a thread inside some methods, those that call one another counted once."""

    def __init__(self, owner: Any, memory: mmap.mmap) -> None:
        self._memory, self._seconds, self._depth = memory, 0.0, 0
        for name in METHODS:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def timed(*arguments: Any, **options: Any) -> Any:
            self._depth += 1
            began = time.thread_time()
            try:
                return method(*arguments, **options)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._seconds += time.thread_time() - began
                    struct.pack_into("d", self._memory, 0, self._seconds)

        return timed


def serve() -> None:
    with open(sys.argv[1], "r+b") as file:
        memory = mmap.mmap(file.fileno(), 8)
    load = RunOpening.load

    def clocked(opening: RunOpening) -> Any:
        found = load(opening)
        Inside(found[0].run.generator, memory)
        return found

    RunOpening.load = clocked  # type: ignore[assignment, method-assign]
    sys.argv = ["unpad", *sys.argv[2:]]
    main()


if __name__ == "__main__":
    serve()
