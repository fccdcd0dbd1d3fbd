"""A process that runs cases of one target for a while, and is ended by the system where one takes too much.

Each case has limits on processor time, on time in all, on memory in use and on address space. A case over a limit ends
the process; the number of the case stays in shared memory, where the parent finds it.
"""

import gc
import json
import mmap
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.fuzz.target import Builder, Target, judge, random_of

TOO_MUCH_MEMORY = 77  # exit code of a process that ends itself after a case
TELL_SECONDS = 1.0  # between messages to the parent: what a kill can lose
ADDRESSES = 6 << 30  # bytes beyond those at the start; memory that is never touched counts here

Tell = Callable[[dict[str, Any]], None]  # sends a message to the parent
Work = Callable[[Tell, mmap.mmap], None]  # what a child does; the number of its case goes into shared memory


@dataclass(frozen=True)
class Limits:
    """Most that one case may take."""

    cpu_seconds: float = 10.0
    seconds: float = 60.0  # in all: a wait, not work; long, as other programs may have the processor
    memory: int = 1 << 30  # bytes in use


@dataclass
class Process:
    """A running child: what it says, as lines of JSON, and the case that it is at."""

    pid: int
    output: int
    at: mmap.mmap
    name: str
    folder: Path
    said: bytes = b""
    heard: float = field(default_factory=time.monotonic)  # when it said something last

    @property
    def seed(self) -> int:
        return int.from_bytes(self.at[:8], "little")

    def read(self) -> list[dict[str, Any]] | None:
        """Messages that have come; None at the end."""
        data = os.read(self.output, 1 << 16)
        if not data:
            return None
        *lines, self.said = (self.said + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> str:
        """Wait for the end; what ended it, "" for a good end."""
        os.close(self.output)
        return ending(os.waitpid(self.pid, 0)[1])


def ending(status: int) -> str:
    """How a process that runs cases ended, "" if well."""
    code = os.waitstatus_to_exitcode(status)
    known = {
        0: "",
        TOO_MUCH_MEMORY: "too much memory",
        -signal.SIGPROF: "hang: too much processor time",
        -signal.SIGALRM: "hang: a wait without an end",
    }
    return known.get(code, f"death by {signal.Signals(-code).name}" if code < 0 else f"exit with code {code}")


def signature_of(name: str, why: str) -> str:
    """Signature of a case that ends its process."""
    return f"{why} in the target {name}"


def start(name: str, work: Work, folder: Path) -> Process:
    """Fork a child that does `work(tell, at)`; `tell` sends a message to the parent."""
    at = mmap.mmap(-1, 8)
    reading, writing = os.pipe()
    parent = os.getpid()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Process(pid, reading, at, name, folder)
    code = 1
    try:
        os.close(reading)
        _be_quiet()
        work(lambda message: _send(writing, message, parent), at)
        code = 0
    except BrokenPipeError:  # the parent is gone
        code = 0
    except BaseException:
        _send(writing, {"broken": traceback.format_exc()}, parent)
    finally:
        os._exit(code)


def _send(descriptor: int, message: dict[str, Any], parent: int) -> None:
    if os.getppid() != parent:
        raise BrokenPipeError
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def _be_quiet() -> None:
    """Libraries in C and Rust write about damaged files by themselves; no core file, and ends by signals that end."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGPROF, signal.SIGALRM, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    warnings.simplefilter("ignore")


def run_cases(name: str, builder: Builder, folder: Path, first: int, seconds: float, most: int, limits: Limits) -> Work:
    """Work of a child: cases from the number `first` on, for some seconds or until `most` are done.

    Messages are {"next", "cases", "refused", "seconds", "slowest", "memory"}, counted since the last message, and
    {"found": {...}} with the first case of every signature.
    """

    def work(tell: Tell, at: mmap.mmap) -> None:
        at[:8] = first.to_bytes(8, "little")
        _work(name, open_target(builder, folder), first, seconds, most, limits, tell, at)

    return work


def _work(
    name: str, target: Target, first: int, seconds: float, most: int, limits: Limits,
    tell: Tell, at: mmap.mmap,
) -> None:  # fmt: skip
    known: set[str] = set()
    gc.freeze()
    began = told = time.monotonic()
    counts = {"cases": 0, "refused": 0, "failed": 0, "seconds": 0.0, "slowest": 0.0}
    _limit_addresses()
    for seed in range(first, first + most):
        at[:8] = seed.to_bytes(8, "little")
        before = time.process_time()
        _begin(limits)
        data = target.make(random_of(name, seed))
        verdict = judge(target, data)
        _end_limits()
        taken = time.process_time() - before
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        counts["cases"] += 1
        counts["refused"] += verdict.refused
        counts["failed"] += bool(verdict.signature)
        counts["slowest"] = max(counts["slowest"], taken)
        now = time.monotonic()
        over = now - began > seconds or seed == first + most - 1 or memory > limits.memory
        if now - told > TELL_SECONDS or over:
            tell({"next": seed + 1, **counts, "seconds": now - told, "memory": memory})
            counts, told = dict.fromkeys(counts, 0), now
        if verdict.signature and verdict.signature not in known:
            known.add(verdict.signature)
            tell({"found": {**_found(name, seed, verdict.signature, verdict.detail, data), "ended": False}})
        if memory > limits.memory:
            os._exit(TOO_MUCH_MEMORY)
        if over:
            return


def tell_ending(name: str, builder: Builder, folder: Path, seed: int, why: str) -> Work:
    """Work of a child: make the bytes of a case that ended its process once more, and tell the finding."""

    def work(tell: Tell, at: mmap.mmap) -> None:
        at[:8] = seed.to_bytes(8, "little")
        data = open_target(builder, folder).make(random_of(name, seed))
        tell({"found": {**_found(name, seed, signature_of(name, why), why, data), "ended": True}})

    return work


def try_again(builder: Builder, folder: Path, kept: Sequence[dict[str, Any]], limits: Limits) -> Work:
    """Work of a child: tell {"open": signature} of every kept finding that still fails."""

    def work(tell: Tell, at: mmap.mmap) -> None:
        target = open_target(builder, folder)
        for found in kept:
            data = found["data"].encode("latin-1")
            why = probe(target, data, limits)
            if signature := signature_of(found["target"], why) if why else judge(target, data).signature:
                tell({"open": signature})

    return work


def probe(target: Target, data: bytes, limits: Limits) -> str:
    """How a process that runs this one case ends, "" if well."""
    pid = os.fork()
    if not pid:
        _limit_addresses()
        _begin(limits)
        judge(target, data)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        os._exit(TOO_MUCH_MEMORY if memory > limits.memory else 0)
    return ending(os.waitpid(pid, 0)[1])


def _begin(limits: Limits) -> None:
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, limits.seconds)


def _end_limits() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)


def _limit_addresses() -> None:
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _found(name: str, seed: int, signature: str, detail: str, data: bytes) -> dict[str, Any]:
    """A finding as it is kept; bytes as text, one character per byte."""
    return {"target": name, "seed": seed, "signature": signature, "detail": detail, "data": data.decode("latin-1")}


def open_target(builder: Builder, folder: Path | None = None) -> Target:
    """A target with its folder, by default a new one, as the working directory, and a cache of its own."""
    folder = folder or Path(tempfile.mkdtemp(prefix="unpad-fuzz-"))
    os.chdir(folder)
    os.environ["UNPAD_CACHE"] = str(folder / "cache")
    random.seed(0)
    return builder(folder)
