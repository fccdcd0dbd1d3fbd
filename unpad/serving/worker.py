"""The thread that owns the model: takes work from a queue, turns the engine, and hands texts to the event loop.

One answer's events reach its `Sink` in order. All events of a turn cross to the loop in one call, as a call for each
token would cost as much as a small model's step.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from unpad.data.tokens.tokenizer import DecodeStream, Tokenizer
from unpad.errors import UnpadError, needs_memory
from unpad.inference.engine import Engine, NewToken, Reason, Request, Ticket
from unpad.inference.generate import StopTexts
from unpad.serving.metrics import REQUEST_ID
from unpad.serving.protocol import Spelled

Call = Callable[[], None]
MOST_TOGETHER = 32  # jobs of a pass


class WorkerEndedError(Exception):
    """The thread ended before a job was begun."""


class Sink(Protocol):
    """Receives the answers of a request, by their numbers, on the event loop."""

    def read(self, cached: int) -> None:
        """A prompt was read; `cached` of its tokens were kept from earlier requests."""

    def add(self, index: int, text: str, tokens: tuple[Spelled, ...], num_made: int) -> None:
        """Text and tokens of an answer, which has `num_made` tokens so far."""

    def end(self, index: int, reason: Reason, error: UnpadError | None) -> None: ...


@dataclass
class Handle:
    """A request in the queue, to be cancelled; the ticket is None before the engine has it."""

    ticket: Ticket | None = None
    is_cancelled: bool = False


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
    future: Future[Any] = field(default_factory=Future)


class ModelThread:
    """The thread that owns the model.

    Args:
        loop: on which sinks hear of what happened.
        failed: called on the loop with a fault of the program that the thread survived, and with the ids of the
            requests that it ended.

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
        self.ended: Future[None] = Future()
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
        future: Future[Any] = Future()
        self._inbox.put(partial(_answer, future, work))
        return await asyncio.wrap_future(future)

    def install(self, make: Callable[[], Engine]) -> Engine:
        """Make the engine; for the thread itself."""
        self._make = make
        self.engine = make()
        self.engine.on_fault = self._report
        return self.engine

    def submit(
        self, request: Request, sink: Sink, first: int, detokenizers: list[Detokenizer], *, silent: bool = False
    ) -> Handle:
        """Queue a request for the engine.

        Args:
            first: number of its first answer.
            detokenizers: of its answers.
            silent: leave out the tokens that the engine makes, of a request that only reads.
        """
        handle = Handle()
        listener = _Listener(self, sink, first, detokenizers, echoes=request.echo, silent=silent)
        self._inbox.put(partial(self._submit, handle, request, listener))
        return handle

    def cancel(self, handle: Handle) -> None:
        """Free the rows of a request before the next step."""
        handle.is_cancelled = True
        self._inbox.put(lambda: None if handle.ticket is None else handle.ticket.cancel())

    def queue(self, job: PassJob) -> None:
        """Queue a job; those that wait at the same time and are of one kind join in one pass."""
        self._inbox.put(partial(self._jobs.append, job))

    # ----------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)  # of each thread by itself
        _answer(self.ended, self._turns)

    def _turns(self) -> None:
        is_busy = False
        while self._take(wait=not is_busy):
            try:
                self._pass()
                is_busy = self.engine is not None and self.engine.turn()
            except Exception as error:
                self._recover(error)
                is_busy = False
            self._deliver()
        if self.engine is not None:
            self.engine.close()
        for job in self._jobs:
            _finish(job.future, error=WorkerEndedError())
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

    def _pass(self) -> None:
        """Run the first waiting jobs of the first one's kind in one pass, without those whose clients left."""
        jobs = [job for job in self._jobs if not job.future.cancelled()]
        chosen = [job for job in jobs if job.kind == jobs[0].kind][:MOST_TOGETHER]
        self._jobs = [job for job in jobs if job not in chosen]
        if chosen:
            self._answer_jobs(chosen)
        if self._jobs:
            self._inbox.put(lambda: None)  # come back for the others, after a turn of the engine

    def _answer_jobs(self, jobs: Sequence[PassJob]) -> None:
        try:
            with needs_memory("the request", "send fewer or smaller inputs in one request"):
                results = jobs[0].work([job.input for job in jobs])
        except Exception as error:
            if len(jobs) == 1:
                _finish(jobs[0].future, error=error)
                return
            for job in jobs:  # each alone, so that one bad input fails alone
                self._answer_jobs([job])
        else:
            for job, result in zip(jobs, results, strict=True):
                _finish(job.future, result)

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


def _answer(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        result = work()
    except BaseException as error:
        _finish(future, error=error)
    else:
        _finish(future, result)


def _finish(future: Future[Any], result: Any = None, *, error: BaseException | None = None) -> None:
    with suppress(InvalidStateError):  # nobody waits for it
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def _call_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


class _Listener:
    """Turns the tokens of a request into text, in the thread, and puts events into the outbox."""

    def __init__(
        self, worker: ModelThread, sink: Sink, first: int, texts: list[Detokenizer], *, echoes: bool, silent: bool
    ) -> None:
        self._worker, self._outbox, self._sink, self._first = worker, worker.outbox, sink, first
        self._detokenizers, self._echoes, self._silent = texts, echoes, silent
        self.request_id = REQUEST_ID.get()
        self._num_made = [0] * len(texts)
        self._is_over = [False] * len(texts)

    def read(self, cached: int, echoed: tuple[NewToken, ...]) -> None:
        self._outbox.append(partial(self._sink.read, cached))
        for answer, detokenizer in enumerate(self._detokenizers if self._echoes else []):
            self._add(answer, *detokenizer.echo(echoed))

    def step(self, step: NewToken) -> bool:
        if self._silent:
            return False
        self._num_made[step.answer] += 1
        detokenizer = self._detokenizers[step.answer]
        self._add(step.answer, *detokenizer.push(step))
        return not detokenizer.is_over

    def ended(self, answer: int, reason: Reason, error: UnpadError | None) -> None:
        if self._is_over[answer]:
            return
        self._is_over[answer] = True
        self._add(answer, *self._detokenizers[answer].rest())
        if self._worker.is_broken and reason == "cancelled":
            reason = "failed"
        if self._silent and reason == "stop":
            reason = "length"
        self._outbox.append(partial(self._sink.end, self._first + answer, reason, error))

    def fail(self, reason: Reason, error: UnpadError | None) -> None:
        """End all answers of a request that the engine does not have."""
        for answer in range(len(self._detokenizers)):
            self.ended(answer, reason, error)

    def _add(self, answer: int, text: str, tokens: tuple[Spelled, ...]) -> None:
        self._outbox.append(partial(self._sink.add, self._first + answer, text, tokens, self._num_made[answer]))


class Detokenizer:
    """Incremental text of an answer: whole characters, up to a stop text, with log probabilities if wanted.

    Args:
        stops: texts before which it ends.
        reports: whether tokens are handed on with the text that they begin in.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], *, reports: bool) -> None:
        self._tokenizer, self._reports = tokenizer, reports
        self._decoder, self._stops = DecodeStream(tokenizer), StopTexts(stops)
        self._held: list[Spelled] = []
        self._num_decoded = self._num_said = 0  # characters

    @property
    def is_over(self) -> bool:
        """True once a stop text was found."""
        return self._stops.found

    def echo(self, tokens: Iterable[NewToken]) -> tuple[str, tuple[Spelled, ...]]:
        """Text and tokens of the prompt, which begin the answer; no stop text is looked for in them."""
        decoder, said, spelled = DecodeStream(self._tokenizer), "", []
        for step in tokens:
            spelled.append(self._spelled(step, len(said)))
            said += decoder.push(step.token)
        said += decoder.flush()
        self._num_decoded = self._num_said = len(said)
        return said, tuple(spelled)

    def push(self, step: NewToken) -> tuple[str, tuple[Spelled, ...]]:
        """Add a token; return the text that is certain by now, and the tokens that begin in the text so far."""
        if self._reports:
            self._held.append(self._spelled(step, self._num_decoded))
        return self._said(self._decoder.push(step.token), is_last=False)

    def rest(self) -> tuple[str, tuple[Spelled, ...]]:
        """The rest of text and tokens at the end of the answer."""
        return self._said(self._decoder.flush(), is_last=True)

    def _said(self, text: str, *, is_last: bool) -> tuple[str, tuple[Spelled, ...]]:
        self._num_decoded += len(text)
        said = "" if self.is_over else self._stops.push(text)
        if is_last and not self.is_over:
            said += self._stops.rest()
        self._num_said += len(said)
        everything = is_last and not self.is_over
        ready = [one for one in self._held if everything or one.offset < self._num_said]
        self._held = self._held[len(ready) :]
        return said, tuple(ready)

    def _spelled(self, step: NewToken, offset: int) -> Spelled:
        top = tuple(Spelled(*self._spelling(id), logprob) for id, logprob in step.top)
        return Spelled(*self._spelling(step.token), step.logprob, top, offset)

    def _spelling(self, id: int) -> tuple[str, bytes]:
        """Name and bytes of a token; one without text has a name alone."""
        tokenizer = self._tokenizer
        names = {tokenizer.eos_id: "<|eos|>", tokenizer.bos_id: "<|bos|>", tokenizer.pad_id: "<|pad|>"}
        if id >= tokenizer.vocab_size:
            return f"<|{id}|>", b""
        text = tokenizer.pieces[id] if tokenizer.pieces is not None else tokenizer.decode([id]).encode()
        return names.get(id, f"<|{id}|>"), text
