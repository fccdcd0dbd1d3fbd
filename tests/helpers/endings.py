"""Endings of a run of several processes: faults in one or all of them, and what the processes then end with.

The processes are forked from this one and run the command `unpad train` each, as the launcher would start them.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from tests.helpers.processes import forked
from tests.helpers.toy import LOOP
from unpad.cli.main import main
from unpad.data.text import TextData
from unpad.errors import CollapseError, SourceError
from unpad.models.decoder import Decoder
from unpad.run.monitor import Monitor
from unpad.storage import disk
from unpad.training import consistency
from unpad.training.context import Verdict

SETUP = import_module("unpad.training.setup")
LIMIT_S = 120.0
SILENT = ("train.timeout=5",)

Fault = Callable[[int, int], None]  # installed in the process of a rank, by rank and number of processes


@dataclass(frozen=True)
class Ending:
    """A way in which a run ends.

    Args:
        code: of every process, unless `of_last` or `of_first` says otherwise.
        fault: brings it about at an early step of the process.
        overrides: of the recipe, in all processes.
        said: words of the first process's error.
    """

    name: str
    code: int
    fault: Fault
    of_last: int | None = None
    of_first: int | None = None
    overrides: tuple[str, ...] = ()
    said: str = ""

    def codes(self, size: int) -> list[int]:
        """Exit codes by rank; minus the number of a signal that ended the process."""
        codes = [self.code] * size
        if self.of_first is not None:
            codes[0] = self.of_first
        if self.of_last is not None:
            codes[-1] = self.of_last
        return codes


@dataclass(frozen=True)
class Ended:
    """End of a run.

    Args:
        codes: as of `Ending.codes`.
        seconds: from the event to the end of the last process; 0 if there was none.
        error: what the first process printed on standard error.
    """

    codes: list[int]
    seconds: float
    error: str


def no_fault(rank: int, size: int) -> None:
    """Leave a run as it is."""


def run_command(
    arguments: list[str],
    size: int,
    folder: Path,
    fault: Fault = no_fault,
    own: Mapping[int, list[str]] = MappingProxyType({}),
    work: Callable[[], object] = main,
) -> Ended:
    """Run `unpad ARGUMENTS` in several processes until all have ended; a stopped one is killed when the others have.

    Args:
        work: in place of the command.
        folder: for the output of the processes.
        own: further arguments of some ranks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    event = folder / "event"
    event.unlink(missing_ok=True)
    given = [[*arguments, *own.get(rank, [])] for rank in range(size)]
    running = {_fork(rank, size, port, given[rank], folder, fault, work): rank for rank in range(size)}
    codes, stopped, latest = [0] * size, set[int](), time.monotonic() + LIMIT_S
    try:
        while running:
            for pid in list(running):
                found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
                if found and os.WIFSTOPPED(status):
                    stopped.add(pid)
                elif found:
                    codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
            ended_at = time.monotonic()
            assert ended_at < latest, f"ranks {sorted(running.values())} go on; codes so far {codes}"
            if running.keys() <= stopped:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    seconds = ended_at - float(event.read_text()) if event.is_file() else 0.0
    return Ended(codes, seconds, (folder / "err-0").read_text(encoding="utf-8"))


def _fork(
    rank: int, size: int, port: int, arguments: list[str], folder: Path, fault: Fault, work: Callable[[], object]
) -> int:
    def act() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(folder / f"err-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        if size > 1:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"UNPAD_TEST_EVENT": str(folder / "event"), "TMPDIR": str(folder)}
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)
        fault(rank, size)
        sys.argv = ["unpad", *arguments]
        work()

    return forked(act)


def happen() -> None:
    """Note the time of the event."""
    Path(os.environ["UNPAD_TEST_EVENT"]).write_text(str(time.monotonic()))


def before_step(number: int, action: Callable[[], None]) -> None:
    """Do something before the `number`-th step of this process, 1 being the first."""
    update, left = LOOP.train_step, number

    def step(*args: object, **options: object) -> object:
        nonlocal left
        left -= 1
        if left == 0:
            action()
        return update(*args, **options)

    LOOP.train_step = step


def _signals(ranks: Callable[[int, int], bool], *numbers: int) -> Fault:
    """Signals that the processes of some ranks send to themselves before their third step."""

    def fault(rank: int, size: int) -> None:
        def act() -> None:
            happen()
            for number in numbers:
                os.kill(os.getpid(), number)

        if ranks(rank, size):
            before_step(3, act)

    return fault


def everyone(rank: int, size: int) -> bool:
    return True


def first(rank: int, size: int) -> bool:
    return rank == 0


def last(rank: int, size: int) -> bool:
    return rank == size - 1


def _bad_data(rank: int, size: int) -> None:
    load, left = TextData.load, 7

    def loaded(self: TextData, *args: object) -> object:
        nonlocal left
        left -= 1
        if left == 0:
            happen()
            raise SourceError("the file has changed while it was read", where="texts.jsonl:3", fix="put it back")
        return load(self, *args)

    if last(rank, size):
        TextData.load = loaded


def _full_disk(rank: int, size: int) -> None:
    def fill() -> None:
        def operation(name: str, path: Path) -> None:
            if "checkpoints" in path.parts:
                happen()
                raise OSError(28, os.strerror(28))

        disk.operation = operation

    if rank == 0:
        before_step(3, fill)


def _losses(change: Callable[[dict[str, tuple[torch.Tensor, int]]], object]) -> Fault:
    """Changed losses of the last process from its third step on."""

    def fault(rank: int, size: int) -> None:
        def begin() -> None:
            losses = Decoder.losses

            def changed(self: Decoder, batch: object) -> object:
                happen()
                return change(losses(self, batch))

            Decoder.losses = changed

        if last(rank, size):
            before_step(3, begin)

    return fault


def _no_memory(terms: object) -> object:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def _crash(terms: object) -> object:
    raise ZeroDivisionError


class _Collapses:
    """Watch that finds a collapse at its third reading, as those of models with a latent may."""

    name, subject = "collapse", "latent"

    def __init__(self) -> None:
        self._num = 0

    def describe(self) -> str:
        return ""

    def due(self, step: int) -> bool:
        return True

    def check(self, step: int) -> Verdict:
        self._num += 1
        action = "stop" if self._num == 3 else None
        if action:
            happen()
        return Verdict(step, "red" if action else "green", False, action, "", {})

    def scaled(self, weights: dict[str, float]) -> dict[str, float]:
        return weights

    def values(self) -> dict[str, object]:
        return {}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def error(self, verdict: Verdict) -> CollapseError:
        return CollapseError("the latent has collapsed")


def _collapse(rank: int, size: int) -> None:
    LOOP.start_watches = lambda *_: [_Collapses()]
    Monitor.row = lambda *_: None


def killed_at(number: int, of: int) -> Fault:
    """SIGKILL of one process before its `number`-th step or, of the first, storage operation."""

    def fault(rank: int, size: int) -> None:
        left = number

        def seen() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                happen()
                os.kill(os.getpid(), signal.SIGKILL)

        if rank == of:
            update = LOOP.train_step
            LOOP.train_step = lambda *args, **options: (seen(), update(*args, **options))[1]
            disk.operation = lambda name, path: seen()

    return fault


ENDINGS = [
    Ending("bad data in one process", 3, _bad_data, said="texts.jsonl:3"),
    Ending("full disk", 6, _full_disk, said="No space left"),
    Ending("no memory in one process", 8, _losses(_no_memory), said="can't allocate memory"),
    Ending(
        "loss that is not finite in one process",
        7,
        _losses(lambda terms: {name: (total * float("nan"), count) for name, (total, count) in terms.items()}),
    ),
    Ending("collapse", 11, _collapse),
    Ending("a fault of the program in one process", 10, _losses(_crash), of_last=1),
    Ending("Ctrl-C", 130, _signals(everyone, signal.SIGINT), said="everything up to here is saved"),
    Ending("Ctrl-C twice", 130, _signals(everyone, signal.SIGINT, signal.SIGINT), said="Interrupted"),
    Ending("SIGTERM", 143, _signals(everyone, signal.SIGTERM), said="everything up to here is saved"),
    Ending("SIGHUP of a closed terminal", 129, _signals(everyone, *2 * [signal.SIGHUP]), said="up to here is saved"),
    Ending("SIGTERM to one process", 143, _signals(last, signal.SIGTERM), said="everything up to here is saved"),
    Ending("SIGKILL of the last process", 10, _signals(last, signal.SIGKILL), of_last=-signal.SIGKILL, said="gone"),
    Ending("SIGKILL of the first process", 10, _signals(first, signal.SIGKILL), of_first=-signal.SIGKILL),
    Ending("silent last process", 10, _signals(last, signal.SIGSTOP), of_last=-signal.SIGKILL, overrides=SILENT),
    Ending("silent first process", 10, _signals(first, signal.SIGSTOP), of_first=-signal.SIGKILL, overrides=SILENT),
]


# --------------------------------------------------------------------------- processes that are not alike


def _other_code(rank: int, size: int) -> None:
    if last(rank, size):
        happen()
        consistency.code_hash = lambda: "of another version"


def _other_weights(rank: int, size: int) -> None:
    build = SETUP.build_model

    def changed(*args: object) -> nn.Module:
        model: nn.Module = build(*args)
        happen()
        return _nudged(model)

    if last(rank, size):
        SETUP.build_model = changed


def _drift(rank: int, size: int) -> None:
    update = LOOP.train_step

    def step(model: nn.Module, *args: object, **options: object) -> object:
        happen()
        return update(_nudged(model), *args, **options)

    if last(rank, size):
        LOOP.train_step = step


def _nudged(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1e-6
    return model


def _other_threads(rank: int, size: int) -> None:
    if last(rank, size):
        happen()
        torch.set_num_threads(2)


def _other_data(rank: int, size: int) -> None:
    if last(rank, size):
        happen()
        os.chdir("changed")


UNLIKE = [
    Ending("other code", 9, _other_code, said="another code than process 0"),
    Ending("other weights", 9, _other_weights, said="other weights than process 0"),
    Ending("weights that drift apart", 9, _drift, said="other weights than process 0\n  at: step 2"),
    Ending(
        "other threads", 9, _other_threads, overrides=("train.threads=null",), said="another threads than process 0"
    ),
    Ending("other data", 9, _other_data, said="another data than process 0"),
]
