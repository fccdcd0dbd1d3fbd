"""The thread that owns the model: takes work from a queue, turns the engine, and hands events to the event loop.

One answer's events reach its `Sink` in order. All events of a turn cross to the loop in one call, as a call for each
token would cost as much as a small model's step.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from unpad.errors import UnpadError, needs_memory
from unpad.inference.engine import Engine, NewToken, Reason, Request, Ticket
from unpad.serving.log import REQUEST_ID
from unpad.serving.protocol import Spelled
from unpad.serving.speech import Speech

Call = Callable[[], None]


class WorkerEndedError(Exception):
    """The thread ended before a job was begun."""


class Sink(Protocol):
    """Receives the events of one prompt, on the event loop."""

    def read(self, cached: int) -> None:
        """The prompt was read; `cached` of its tokens were kept from earlier requests."""

    def said(self, answer: int, text: str, tokens: tuple[Spelled, ...], num_made: int) -> None:
        """Text and tokens of an answer, which has `num_made` tokens so far."""

    def ended(self, answer: int, reason: Reason, error: UnpadError | None) -> None: ...


@dataclass
class Handle:
    """A request or a job in the queue, to be cancelled; None before the engine has it."""

    ticket: Ticket | None = None
    is_cancelled: bool = False


class ModelThread:
    """The thread that owns the model.

    Args:
        loop: on which sinks and futures hear of what happened.
        failed: told, on the loop, of a fault of the program that the thread survived, and of the ids of the requests
            that it ended.

    Attributes:
        is_broken: whether all requests end because of such a fault.
        ended: done when the thread ended; with the fault that it did not survive.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, failed: Callable[[BaseException, Sequence[str]], None]) -> None:
        self._loop, self._failed = loop, failed
        self._inbox: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self.outbox: list[Call] = []
        self.is_broken = False
        self._jobs: list[PassJob] = []
        self._make: Callable[[], Engine] | None = None
        self.engine: Engine | None = None
        self.ended: asyncio.Future[None] = loop.create_future()
        self._thread = threading.Thread(target=self._run, name="unpad-model", daemon=True)
        self._num_threads = torch.get_num_threads()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End all requests as cancelled, and the thread after its turn."""
        self._inbox.put(None)
        self._thread.join()

    # ----------------------------------------------------------------------- from the event loop

    async def call(self, work: Callable[[], Any]) -> Any:
        """Do something in the thread, between turns, and wait for its result."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._inbox.put(partial(self._answer, future, work))
        return await future

    def install(self, make: Callable[[], Engine]) -> Engine:
        """Make the engine; for the thread itself."""
        self._make = make
        self.engine = make()
        self.engine.on_fault = self._report
        return self.engine

    def submit(self, request: Request, sink: Sink, speech: Callable[[], Speech], *, silent: bool = False) -> Handle:
        """Queue a request for the engine.

        Args:
            speech: makes what turns the tokens of one answer into text.
            silent: leave out the tokens that the engine makes, of a request that only reads.
        """
        handle = Handle()
        listener = _Listener(self, sink, [speech() for _ in range(request.n)], echoes=request.echo, silent=silent)
        self._inbox.put(partial(self._submit, handle, request, listener))
        return handle

    def cancel(self, handle: Handle) -> None:
        """Free the rows of a request before the next step."""
        handle.is_cancelled = True
        self._inbox.put(partial(_cancel, handle))

    def queue(self, job: PassJob) -> None:
        """Queue a job; those that wait at the same time and are of one kind join in one pass."""
        self._inbox.put(partial(self._jobs.append, job))

    # ----------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)  # of each thread by itself
        try:
            self._turns()
        except BaseException as error:
            self._loop.call_soon_threadsafe(_set_exception, self.ended, error)
        else:
            self._loop.call_soon_threadsafe(_set_result, self.ended, None)

    def _turns(self) -> None:
        is_busy = False
        while True:
            if not self._take(wait=not is_busy):
                break
            try:
                self._pass()
                is_busy = self.engine is not None and self.engine.turn()
            except Exception as error:
                self._recover(error)
                is_busy = False
            self._deliver()
        if self.engine is not None:
            self.engine.close()
        self.outbox += [partial(_set_exception, job.future, WorkerEndedError()) for job in self._jobs]
        self._deliver()

    def _take(self, *, wait: bool) -> bool:
        """Do what the loop asked for; False if the thread is to end."""
        while True:
            try:
                call = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()
            wait = False

    def _submit(self, handle: Handle, request: Request, listener: _Listener) -> None:
        if handle.is_cancelled or self.engine is None:
            listener.fail("cancelled", None)
            return
        try:
            handle.ticket = self.engine.submit(request, listener)
        except UnpadError as error:
            listener.fail("failed", error)

    def _answer(self, future: asyncio.Future[Any], work: Callable[[], Any]) -> None:
        try:
            result = work()
        except BaseException as error:
            self.outbox.append(partial(_set_exception, future, error))
        else:
            self.outbox.append(partial(_set_result, future, result))
        self._deliver()

    def _pass(self) -> None:
        """Run the waiting jobs of the first one's kind in one pass, without those whose clients left."""
        jobs = [job for job in self._jobs if not job.handle.is_cancelled]
        chosen = [job for job in jobs if job.kind == jobs[0].kind]
        self._jobs = [job for job in jobs if job.kind != jobs[0].kind]
        if chosen:
            self._answer_jobs(chosen)
        if self._jobs:
            self._inbox.put(_nothing)  # come back for the others, after a turn of the engine

    def _answer_jobs(self, jobs: Sequence[PassJob]) -> None:
        try:
            with needs_memory("the request", "send fewer or smaller inputs in one request"):
                results = jobs[0].work([job.input for job in jobs])
        except Exception as error:
            if len(jobs) > 1:  # each alone, so that one bad input fails alone
                for job in jobs:
                    self._answer_jobs([job])
            else:
                self.outbox.append(partial(_set_exception, jobs[0].future, error))
        else:
            for job, result in zip(jobs, results, strict=True):
                self.outbox.append(partial(_set_result, job.future, result))

    def _recover(self, error: Exception) -> None:
        """After a fault of a turn that no request made by itself: end all requests, and go on with a new engine."""
        assert self.engine is not None, "only the engine's turns fail here"
        assert self._make is not None, "there is an engine"
        self._report(self.engine.tickets(), error)
        self.is_broken = True
        self.engine.close()
        self.is_broken = False
        self.install(self._make)

    def _report(self, tickets: Sequence[Ticket], error: Exception) -> None:
        ids = [ticket.listener.request_id for ticket in tickets if isinstance(ticket.listener, _Listener)]
        self.outbox.append(partial(self._failed, error, list(dict.fromkeys(ids))))

    def _deliver(self) -> None:
        if self.outbox:
            calls, self.outbox[:] = list(self.outbox), []
            self._loop.call_soon_threadsafe(_call_all, calls)


@dataclass(eq=False)
class PassJob:
    """A pass of the model over an input; those of one kind join.

    Args:
        kind: of jobs whose inputs `work` takes together.
        work: from all inputs to all results; a result does not depend on the others.
    """

    kind: str
    input: Any
    work: Callable[[Sequence[Any]], Sequence[Any]]
    future: asyncio.Future[Any]
    handle: Handle = field(default_factory=Handle)


class _Listener:
    """Turns the tokens of one request into text, in the thread, and puts events into the outbox."""

    def __init__(self, worker: ModelThread, sink: Sink, speeches: list[Speech], *, echoes: bool, silent: bool) -> None:
        self._worker, self._outbox, self._sink, self._speeches = worker, worker.outbox, sink, speeches
        self._echoes, self._silent = echoes, silent
        self.request_id = REQUEST_ID.get()
        self._num_made = [0] * len(speeches)
        self._is_over = [False] * len(speeches)

    def read(self, cached: int, echoed: tuple[NewToken, ...]) -> None:
        self._outbox.append(partial(self._sink.read, cached))
        for answer, speech in enumerate(self._speeches if self._echoes else []):
            self._outbox.append(partial(self._sink.said, answer, *speech.echo(echoed), 0))

    def step(self, step: NewToken) -> bool:
        if self._silent:
            return False
        self._num_made[step.answer] += 1
        speech = self._speeches[step.answer]
        text, tokens = speech.push(step)
        self._outbox.append(partial(self._sink.said, step.answer, text, tokens, self._num_made[step.answer]))
        return not speech.is_over

    def ended(self, answer: int, reason: Reason, error: UnpadError | None) -> None:
        if self._is_over[answer]:
            return
        self._is_over[answer] = True
        text, tokens = self._speeches[answer].rest()
        if text or tokens:
            self._outbox.append(partial(self._sink.said, answer, text, tokens, self._num_made[answer]))
        if self._worker.is_broken and reason == "cancelled":
            reason = "failed"
        if self._silent and reason == "stop":
            reason = "length"
        self._outbox.append(partial(self._sink.ended, answer, reason, error))

    def fail(self, reason: Reason, error: UnpadError | None) -> None:
        """End all answers of a request that the engine does not have."""
        for answer in range(len(self._speeches)):
            self.ended(answer, reason, error)


def _cancel(handle: Handle) -> None:
    if handle.ticket is not None:
        handle.ticket.cancel()


def _call_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _nothing() -> None:
    pass


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
