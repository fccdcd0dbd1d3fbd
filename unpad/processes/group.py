"""Processes that train one model together: their messages, and errors that all of them raise.

torchrun, or `processes/launch.py`, starts the processes; torch.distributed carries their messages. A single process is
a group of one: it imports nothing of torch.distributed and sends nothing.
"""

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import safetensors.numpy
import torch
from torch import Tensor

from unpad.errors import LostProcessError, UnpadError
from unpad.processes.worker import (
    in_process_group,
    refuse_separate_tasks,
    refuse_under_torchrun,
    started_by_torchrun,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

TIMEOUT_S = 600.0
BEAT_S = 1.0  # between two messages of a process at work that takes long
MESSAGE_BYTES = 1024  # of the first round of a message; a longer message takes a second round


@dataclass
class Talk:
    """Message from this process at the end of a block of `Group.together`, and the messages of all processes.

    Args:
        own: JSON value of this process.
        told: values of all processes by rank; empty until the block has ended.
    """

    own: Any = None
    told: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Group:
    """This process among those that train one model.

    Every method is collective: all processes call it at the same point.

    Args:
        rank: number of this process, from 0, of `size`.
        local_rank: its number among those of its host.
        messages: group of torch.distributed for messages of the processor; None for one process.
        sums: group of torch.distributed for sums; None for its default group.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    messages: "ProcessGroup | None" = None
    sums: "ProcessGroup | None" = None

    @property
    def leads(self) -> bool:
        """True if this process writes the files of the run and holds the terminal."""
        return self.rank == 0

    @contextmanager
    def together(self) -> Iterator[Talk]:
        """Run a block in every process; a user's error in any of them is raised in all.

        Yields:
            The message to send (`own`) and, after the block, the messages of all (`told`).

        Raises:
            UnpadError: that of the lowest rank that has one, with its class and so its exit code.
            LostProcessError: a process is gone, or has been silent for longer than the time limit.
        """
        talk = Talk()
        if self.size == 1:
            yield talk
            talk.told = [talk.own]
            return
        error: UnpadError | None = None
        try:
            yield talk
        except UnpadError as raised:
            if raised.is_agreed or isinstance(raised, LostProcessError):
                raise  # the others know it, or cannot be reached
            error = raised
        if error is not None:
            self._fail(error)
        talk.told = self.exchange(talk.own)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Send a user's error that only this process raises in the block, outside `together`, to the others: they raise
        it where they next wait for this process. Meanwhile the block may send nothing but messages.

        Raises:
            UnpadError: as in `together`.
        """
        try:
            yield
        except UnpadError as error:
            if self.size == 1 or error.is_agreed or isinstance(error, LostProcessError):
                raise
            with suppress(LostProcessError):  # the others have ended and need not know
                self._fail(error)
            raise

    def _fail(self, error: UnpadError) -> None:
        """Send an error of this process to the others, and raise the error of the lowest rank that has one."""
        self._exchange_bytes(json.dumps(error.to_json()).encode(), error)

    def exchange(self, value: T) -> list[T]:
        """Send a JSON value to all processes, and return the values of all by rank.

        Raises:
            UnpadError, LostProcessError: as in `together`.
        """
        if self.size == 1:
            return [value]
        return [json.loads(text) for text in self._exchange_bytes(json.dumps(value).encode())]

    def exchange_arrays(self, arrays: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """Send named arrays to all processes, and return the arrays of all by rank, bit for bit.

        Raises:
            UnpadError, LostProcessError: as in `together`.
        """
        if self.size == 1:
            return [arrays]
        contiguous = {name: np.asarray(values, order="C") for name, values in arrays.items()}
        return [safetensors.numpy.load(data) for data in self._exchange_bytes(safetensors.numpy.save(contiguous))]

    def _exchange_bytes(self, data: bytes, error: UnpadError | None = None) -> list[bytes]:
        """Send bytes to all processes, and return the bytes of all by rank; with `error` they describe it.

        Raises:
            UnpadError: that of the lowest rank that has one.
        """
        told = self._send(bytes([error is not None]) + data)
        for rank, part in enumerate(told):
            if part[0]:
                if error is None or rank != self.rank:
                    found = json.loads(part[1:])
                    error = UnpadError.from_json({**found, "what": f"{found['what']} (process {rank})"})
                error.is_agreed = True
                raise error
        return [part[1:] for part in told]

    def _send(self, data: bytes) -> list[bytes]:
        head = len(data).to_bytes(8, "little") + data[: MESSAGE_BYTES - 8]
        with lost_processes():
            told = self._gather(head, MESSAGE_BYTES)
            sizes = [int.from_bytes(part[:8], "little") for part in told]
            rest = max(sizes) + 8 - MESSAGE_BYTES
            rests = self._gather(data[MESSAGE_BYTES - 8 :], rest) if rest > 0 else [b""] * self.size
        return [(part[8:] + more)[:size] for part, more, size in zip(told, rests, sizes, strict=True)]

    def _gather(self, own: bytes, num_bytes: int) -> list[bytes]:
        """Bytes of all processes by rank, each completed to `num_bytes`.

        By way of the first process and along a tree, in about log2(size) rounds; gloo's all_gather is a ring, which
        takes a round for each process.
        """
        import torch.distributed as dist

        parts = torch.zeros(self.size, num_bytes, dtype=torch.uint8)
        sent = torch.frombuffer(bytearray(own.ljust(num_bytes, b"\0")), dtype=torch.uint8)
        dist.gather(sent, list(parts) if self.rank == 0 else None, group=self.messages)
        dist.broadcast(parts, 0, group=self.messages)
        return [part.tobytes() for part in parts.numpy()]

    def limit(self, seconds: float) -> None:
        """Set how long this process waits for another from now on."""
        if self.messages is not None:
            import torch.distributed as dist

            for group in (self.sums or dist.group.WORLD, self.messages):
                if group is not None:
                    group.set_timeout(timedelta(seconds=seconds))

    def add(self, values: Tensor) -> None:
        """Add a tensor over all processes, in place.

        Raises:
            LostProcessError: as in `together`.
        """
        if self.size > 1:
            import torch.distributed as dist

            with lost_processes():
                dist.all_reduce(values, group=self.sums)

    def add_later(self, values: Tensor) -> Callable[[], None]:
        """Start adding a tensor over all processes, in place, while this process keeps computing.

        Returns:
            A function that waits for the sum; raises as `add` does.

        Raises:
            LostProcessError: as in `together`.
        """
        import torch.distributed as dist

        with lost_processes():
            work = dist.all_reduce(values, group=self.sums, async_op=True)

        def wait() -> None:
            with lost_processes():
                work.wait()

        return wait

    def of_leader(self, make: Callable[[], T]) -> T:
        """Compute a JSON value in the leading process, possibly for longer than the time limit, and return it in all.

        Args:
            make: must not use the group.

        Raises:
            UnpadError: that of `make`.
        """
        with self.together() as talk, self.at_length():
            talk.own = make() if self.leads else None
        value: T = talk.told[0]
        return value

    def first_of_host_first(self, make: Callable[[], T]) -> T:
        """Compute a value in every process, first in one process per host, which may leave files for the others.

        Args:
            make: may take longer than the time limit; must not use the group.

        Raises:
            UnpadError: that of `make`.
        """
        if self.size == 1:
            return make()
        made: list[T] = []
        for turn in (True, False):
            with self.together(), self.at_length():
                if turn == (self.local_rank == 0):
                    made.append(make())
        return made[0]

    @contextmanager
    def at_length(self) -> Iterator[None]:
        """Run a block in every process that may take longer than the time limit, and wait until all have ended it.

        A thread sends a heartbeat every `BEAT_S` seconds: a process that is gone, or stopped as a whole, is still found
        within the limit. The block itself must not use the group.

        Raises:
            UnpadError, LostProcessError: as in `together`.
        """
        if self.size == 1:
            yield
            return
        over, lost = threading.Event(), list[UnpadError]()

        def tell() -> None:
            try:
                while not over.wait(BEAT_S):
                    self.exchange(True)
            except UnpadError as error:
                lost.append(error)

        teller = threading.Thread(target=tell, name="unpad-at-work", daemon=True)
        teller.start()
        failure: UnpadError | None = None
        try:
            yield
        except UnpadError as error:
            failure = error
        finally:
            over.set()
            teller.join()
        if lost:
            raise lost[0]
        while any(self.exchange(False)):
            continue
        if failure is not None:
            raise failure


ALONE = Group()


@contextmanager
def lost_processes() -> Iterator[None]:
    """Treat every error of a block that only sends and receives as the loss of another process.

    Raises:
        LostProcessError: torch.distributed failed in the block.
    """
    try:
        yield
    except RuntimeError as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        again = "then continue with unpad train --resume RUN, by any number of them"
        fix = f"see its log in the run directory, under processes/; {again}"
        raise LostProcessError(f"another process of the run is gone or silent: {reason}", fix=fix) from None


@contextmanager
def lost_connections() -> Iterator[None]:
    """Convert connection errors of a block that also computes; other errors pass unchanged.

    Raises:
        LostProcessError: the connection to another process failed in the block.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.distributed.DistError) and "gloo" not in str(error):
            raise
        with lost_processes():
            raise


@contextmanager
def joined(timeout_s: float = TIMEOUT_S) -> Iterator[Group]:
    """Join the process group that this process is in already, or the one that it was started for.

    A group that exists, such as that of Ray Train, accelerate or a program of one's own, is left as it is: messages and
    sums have groups of their own beside it, whatever devices it serves, and they alone are removed in the end. Its
    maker has chosen the GPU of every process.

    Args:
        timeout_s: seconds to wait for another process.

    Yields:
        The group; ALONE for a single process.

    Raises:
        LostProcessError: the others did not join in time.
        RecipeError: the machine has fewer GPUs than processes; or as `refuse_separate_tasks` does.
    """
    exists = in_process_group()
    if not exists and not started_by_torchrun():
        refuse_separate_tasks()
        yield ALONE
        return
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    limit = timedelta(seconds=timeout_s)
    if not exists:
        _take_gpu()
        with lost_processes():
            dist.init_process_group(backend, timeout=limit)
    made: list[ProcessGroup | None] = []  # for messages, and sums
    try:
        with lost_processes():
            made = [dist.new_group(backend=kind, timeout=limit) for kind in (["gloo", backend] if exists else ["gloo"])]
        group = Group(dist.get_rank(), dist.get_world_size(), 0, *made)
        yield replace(group, local_rank=_local_rank(group))
    finally:
        for one in made if exists else [None]:  # None is the default group, with all others
            dist.destroy_process_group(one)


def _take_gpu() -> None:
    """Let this process of torchrun use the GPU of its number, if the machine has any.

    Raises:
        RecipeError: the machine has fewer GPUs than processes.
    """
    if not torch.cuda.is_available():
        return
    local_rank = int(os.environ["LOCAL_RANK"])
    num = int(os.environ.get("LOCAL_WORLD_SIZE", str(local_rank + 1)))
    if num > torch.cuda.device_count():
        what = f"{num} processes of this machine need a GPU each, and it has {torch.cuda.device_count()}"
        refuse_under_torchrun(what, "--processes", "start fewer, or hide the GPUs with CUDA_VISIBLE_DEVICES=")
    torch.cuda.set_device(local_rank)


def _local_rank(group: Group) -> int:
    """Number of this process among those of its host: as its starter says, else by the names of all hosts."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    hosts = group.exchange(socket.gethostname())
    return hosts[: group.rank].count(hosts[group.rank])
