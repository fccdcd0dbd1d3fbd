"""Readers with planted faults, on which the fuzzer itself is tried.

python -m tests.helpers.fuzz.toys STATE FOUND CASES [NAME ...]
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.helpers.fuzz.crew import Plan, fuzz, open_findings
from tests.helpers.fuzz.target import Builder, Target, WrongError
from tests.helpers.fuzz.worker import Limits

LIMITS = Limits(cpu_seconds=0.1, seconds=1.0, memory=60 << 20)
KEY = b"x"


def _toy(fault: Callable[[], object], one_in: int = 10, size: int = 60) -> Builder:
    """A reader that has a fault where the bytes hold KEY, which one case of so many does."""

    def make(rng: random.Random) -> bytes:
        filling = bytes(rng.choice(b"abc{}") for _ in range(size))
        return filling[: size // 2] + (KEY if rng.randrange(one_in) == 0 else b"") + filling[size // 2 :]

    def run(data: bytes) -> None:
        if KEY in data:
            fault()

    return lambda folder: Target(make, run, ())


def _hang() -> None:
    while True:
        pass


def _fill() -> None:
    bytearray(b"\1") * LIMITS.memory  # no more: page by page it takes processor time, which has a limit too


def _lose() -> None:
    raise WrongError("rows are neither used nor bad", 3, 2)


def _miss() -> None:
    {}["nothing"]


TOYS: dict[str, Builder] = {
    "sound": _toy(lambda: None),
    "key_error": _toy(_miss),
    "lost_row": _toy(_lose),
    "exit": _toy(lambda: sys.exit(3)),
    "hang": _toy(_hang, 30, 4),
    "wait": _toy(lambda: time.sleep(60), 30, 2),
    "death": _toy(lambda: os.kill(os.getpid(), signal.SIGSEGV), 30, 4),
    "memory": _toy(_fill, 30, 4),
}


def main() -> None:
    """Fuzz the toys that the command line names."""
    state, found, cases, *names = sys.argv[1:]
    builders = {name: TOYS[name] for name in names} or TOYS
    origin = {"commit": "toy", "date": "2026-01-01", "processor": "toy"}
    plan = Plan(int(cases), 60.0, 2, Path(found), Path(state), origin, turn_seconds=0.2, limits=LIMITS)
    fuzz(plan, builders, lambda line: print(line, flush=True), open_findings(plan.found, builders, LIMITS))


if __name__ == "__main__":
    main()
