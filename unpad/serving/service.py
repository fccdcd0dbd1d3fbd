"""The run behind the routes: asks go into one queue before one model, and their answers come back as events."""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

from unpad.errors import NonFiniteError, OutOfMemoryError, RecipeError, SourceError, UnpadError
from unpad.inference.engine import Engine, Reason
from unpad.serving import protocol
from unpad.serving.limits import MIB, Limits
from unpad.serving.metrics import Metrics, log_fault
from unpad.serving.pictures import LargeError, leave_large
from unpad.serving.served import ModelPrompt, Served
from unpad.serving.worker import Detokenizer, Handle, ModelThread, PassJob, WorkerEndedError

State = Literal["loading", "ready", "draining"]
Result = TypeVar("Result")
RECENT = 32  # ends of answers by which the rate is measured
LONGEST_RETRY = 60  # seconds
MOST_BODIES = 256 * MIB  # of all requests, beyond the first FREE_BODY of each, so that short ones find room beside long
FREE_BODY = 1 << 16  # bytes
READ_AHEAD = 256  # tokens of one request's prompts that wait to be read, beyond which the next ones are held back


class Service:
    """A run open for answers.

    Attributes:
        state: whether it answers; asks are refused while the model loads, and when the server is about to end.
        served: the run, once it is loaded.
        num_open: answers and inputs that are not done; num_read: requests that are read and made into these.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits, self.metrics = limits, Metrics()
        self.state: State = "loading"
        self.served: Served | None = None
        self.fingerprint = ""
        self._worker: ModelThread | None = None
        self.num_open = self.num_read = 0
        self._num_bytes = 0  # of bodies, as MOST_BODIES counts them
        self._ends: deque[float] = deque(maxlen=RECENT)
        # They share the processor with the model; one that takes long leaves the other to the next request.
        self._preparing = ThreadPoolExecutor(2, thread_name_prefix="unpad-prompts", initializer=leave_large)
        self._large = ThreadPoolExecutor(1, thread_name_prefix="unpad-large")

    # ----------------------------------------------------------------------- life

    async def open(self, load: Callable[[], tuple[Served, str, Callable[[], Engine] | None]]) -> None:
        """Load the run in the thread that will own it; raises as `load`.

        Args:
            load: returns the run, its fingerprint, and what makes its engine if it answers in tokens.
        """
        worker = ModelThread(asyncio.get_running_loop(), self._fail)
        worker.start()
        self._worker = worker
        self.served, self.fingerprint, make = await worker.call(load)
        if make is not None:
            await worker.call(partial(worker.install, make))
        self.state = "ready"

    @property
    def worker(self) -> ModelThread:
        """The thread of the model."""
        assert self._worker is not None, "the run is being loaded"
        return self._worker

    async def broken(self) -> None:
        """Wait until the thread of the model ends; raises the fault that ended it."""
        await asyncio.shield(asyncio.wrap_future(self.worker.ended))

    def drain(self) -> None:
        """Answer what is open, and nothing new."""
        self.state = "draining"

    async def close(self) -> None:
        """End what is still open, and the thread of the model."""
        self.state = "draining"
        if self._worker is not None:
            await asyncio.to_thread(self._worker.stop)
        for pool in (self._preparing, self._large):
            pool.shutdown(wait=False, cancel_futures=True)

    def ready(self) -> Served:
        """The run.

        Raises:
            RequestError: 503 while it loads, and when the server is about to end.
        """
        if self.served is None or self.state != "ready":
            raise protocol.unavailable(f"the server is {self.state}: ask again later", code=self.state)
        return self.served

    @property
    def max_body(self) -> int:
        """Bytes of a body: more for runs that read images."""
        if self.limits.max_body is not None:
            return self.limits.max_body
        return 20 * MIB if self.ready().kind in ("vqa", "images") else 4 * MIB

    def _fail(self, error: BaseException, requests: Sequence[str]) -> None:
        log_fault(" ".join(["in the thread of the model", *requests]), error)

    async def numbers(self) -> bytes:
        """Numbers for Prometheus, those of the engine between two of its turns."""
        if self.state == "ready" and self.worker.engine is not None:
            self.metrics.engine = await self.worker.call(partial(Metrics.of, self.worker.engine))
        return self.metrics.text()

    # ----------------------------------------------------------------------- work

    async def prepare(self, work: Callable[[], Result]) -> Result:
        """Do a bounded part of reading a request beside the event loop; no part of one whose client left is begun."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._preparing, work)
        except LargeError:  # one at a time, so that many hold up each other and no other request
            return await loop.run_in_executor(self._large, work)

    @contextmanager
    def place(self) -> Iterator[Callable[[int], None]]:
        """A place for a request that is read, with what counts the bytes of its body so far.

        Raises:
            RequestError: 429 if too many are read; 503, of what counts, if their bodies are too large together.
        """
        self._refuse_beyond(self.num_read + 1)
        self.num_read, kept = self.num_read + 1, 0

        def count(num_bytes: int) -> None:
            nonlocal kept
            more = max(0, num_bytes - FREE_BODY) - kept
            if self._num_bytes + more > MOST_BODIES:
                what = "the bodies of other requests leave no room for this one: ask again later"
                error = protocol.unavailable(what, code="too_many_bytes")
                raise replace(error, headers={**error.headers, "Connection": "close"})
            self._num_bytes, kept = self._num_bytes + more, kept + more

        try:
            yield count
        finally:
            self.num_read, self._num_bytes = self.num_read - 1, self._num_bytes - kept

    def admit(self, number: int) -> None:
        """Refuse work beyond what runs and waits.

        Raises:
            RequestError: 429, with the seconds until there may be room; 400 if there can never be.
        """
        most = self.limits.rows + self.limits.waiting
        if number > most:
            raise protocol.RequestError(f"the request asks for {number} answers: at most {most} are taken at once", "n")
        self._refuse_beyond(self.num_open + number)

    def _refuse_beyond(self, number: int) -> None:
        """Refuse so many answers, or requests that are read, if that is more than run and wait."""
        most = self.limits.rows + self.limits.waiting
        if number > most:
            seconds = self._seconds_to_wait(number - most)
            what = f"as many answers run or wait already as are taken, {most}: ask again in {seconds} s"
            raise protocol.RequestError(
                what, status=429, kind="rate_limit_error", code="too_many_requests", headers=protocol.later(seconds)
            )

    def _seconds_to_wait(self, number: int) -> int:
        """Seconds in which so many answers end at the rate of the last ones."""
        if len(self._ends) < 2:
            return 1
        rate = (len(self._ends) - 1) / max(time.monotonic() - self._ends[0], 1e-3)
        return max(1, min(LONGEST_RETRY, math.ceil(number / rate)))

    def begin(self, number: int) -> None:
        self.num_open += number

    def end(self) -> None:
        self.num_open -= 1
        self._ends.append(time.monotonic())

    def ask(self, prompts: Sequence[ModelPrompt], ask: protocol.TokensAsk, began: float, owner: str) -> "OpenRequest":
        """Queue the answers to prompts of a request that arrived at `began`, with the token `owner`. Raises as `admit`
        and `ready`."""
        self.ready()
        self.admit(len(prompts) * ask.n)
        return OpenRequest(self, prompts, ask, began, owner)

    async def once(
        self,
        kind: str,
        inputs: Sequence[Any],
        work: Callable[[Sequence[Any]], Sequence[Any]],
        together: int = 1,
        number: int | None = None,
    ) -> list[Any]:
        """Results of inputs, in passes that others of their kind may join.

        Args:
            number: of the answers that they are parts of; None: each is one.
            together: inputs that wait for a pass at the same time; the next follow when they are done, so that many do
                not hold up those of other requests.

        Raises:
            RequestError: as `admit` and `ready`.
        """
        self.ready()
        number = len(inputs) if number is None else number
        self.admit(number)
        self.begin(number)
        results = list[Any]()
        try:
            for first in range(0, len(inputs), together):
                jobs = [PassJob(kind, input, work) for input in inputs[first : first + together]]
                for job in jobs:
                    self.worker.queue(job)
                results += await asyncio.gather(*(asyncio.wrap_future(job.future) for job in jobs))
            return results
        finally:
            for _ in range(number):
                self.end()


class OpenRequest:
    """The answers to the prompts of one request, numbered prompt by prompt.

    Attributes:
        num_read, num_cached, num_made: tokens of the prompts, those of them kept from earlier, and of the answers.
    """

    def __init__(
        self, service: Service, prompts: Sequence[ModelPrompt], ask: protocol.TokensAsk, began: float, owner: str
    ) -> None:
        self._service = service
        self._events: asyncio.Queue[protocol.TextPiece | protocol.RequestError] = asyncio.Queue()
        self._made = [0] * (len(prompts) * ask.n)
        self._began = began
        self._last: list[float | None] = [None] * len(self._made)
        self.num_read = sum(prompt.num_tokens for prompt in prompts)
        self.num_cached = 0
        echo = isinstance(ask, protocol.CompletionAsk) and ask.echo
        deadline = began + service.limits.timeout
        # Said here too, as the engine may be within a turn.
        late = partial(self._events.put_nowait, too_late(service.limits))
        self._late = asyncio.get_running_loop().call_at(deadline, late)  # a loop's clock is time.monotonic
        service.begin(len(self._made))
        top = ask.top if not echo or ask.top is not None else 0
        fields: dict[str, Any] = {"n": ask.n, "deadline": deadline, "top": top, "echo": echo, "owner": owner}
        self._requests = [(replace(one.request, **fields), one.stop, one.num_tokens) for one in prompts]
        self._ask, self._num_heard, self._num_ended, self._context = ask, 0, 0, copy_context()
        self._handles: list[Handle] = []
        self._feed()

    def _feed(self) -> None:
        """Give the engine further prompts, up to half of its rows, so that other requests find some, and no more than
        it reads soon, as it reads those of others after them."""
        assert self._service.served is not None, "it is loaded"
        n, tokenizer = self._ask.n, self._service.served.run.tokenizer
        while len(self._handles) < len(self._requests):
            running = len(self._handles) * n - self._num_ended
            ahead = sum(num for *_, num in self._requests[self._num_heard : len(self._handles)])
            if running and (running + n > self._service.limits.rows // 2 or ahead >= READ_AHEAD):
                return
            request, stops, _ = self._requests[len(self._handles)]
            texts = [Detokenizer(tokenizer, stops, reports=self._ask.top is not None) for _ in range(n)]
            first, silent = len(self._handles) * n, self._ask.most_new == 0
            self._handles.append(self._service.worker.submit(request, self, first, texts, silent=silent))

    @property
    def num_made(self) -> int:
        return sum(self._made)

    @property
    def num_answers(self) -> int:
        return len(self._made)

    def cancel(self) -> None:
        """Free the rows; for a client that left."""
        for _ in range((len(self._requests) - len(self._handles)) * self._ask.n):
            self._service.end()
        del self._requests[len(self._handles) :]
        for handle in self._handles:
            self._service.worker.cancel(handle)

    async def pieces(self) -> AsyncIterator[protocol.TextPiece]:
        """Text of all answers as it comes; the last piece of each has the reason why it ended.

        Raises:
            RequestError: an answer failed; the others are cancelled.
        """
        left = len(self._made)
        try:
            while left:
                event = await self._events.get()
                if isinstance(event, protocol.RequestError):
                    raise event
                left -= event.finished is not None
                yield event
        finally:
            self._late.cancel()
            if left:
                self.cancel()

    # ----------------------------------------------------------------------- events

    def read(self, cached: int) -> None:
        self.num_cached += cached
        self._num_heard += 1
        self._context.run(self._feed)

    def add(self, index: int, text: str, tokens: tuple[protocol.Spelled, ...], num_made: int) -> None:
        if num_made > self._made[index]:
            self._measure(index)
            self._made[index] = num_made
        if text or tokens:
            self._events.put_nowait(protocol.TextPiece(index, text, tokens))

    def _measure(self, index: int) -> None:
        now, last, metrics = time.monotonic(), self._last[index], self._service.metrics
        if last is not None:
            metrics.between.observe(now - last)
        elif not any(self._last):
            metrics.first.observe(now - self._began)
        self._last[index] = now

    def end(self, index: int, reason: Reason, error: UnpadError | None) -> None:
        self._service.end()
        self._num_ended += 1
        self._context.run(self._feed)
        failure = error_of(reason, error, self._service.limits)
        self._events.put_nowait(failure or protocol.TextPiece(index, finished=protocol.FINISHED[reason]))


def error_of(reason: Reason, error: UnpadError | None, limits: Limits) -> protocol.RequestError | None:
    """The error of an answer that did not end well; None for one that did."""
    if reason in protocol.FINISHED:
        return None
    if reason == "deadline":
        return too_late(limits)
    if reason == "cancelled":
        return ending()
    return failed(error)


def ending() -> protocol.RequestError:
    return protocol.unavailable("the server ends before the answer was complete: ask again", code="draining")


def failed(error: Exception | None) -> protocol.RequestError:
    """The answer to a request that failed by an error of its own."""
    if isinstance(error, protocol.RequestError):
        return error
    if isinstance(error, WorkerEndedError):
        return ending()
    if isinstance(error, NonFiniteError):
        return protocol.RequestError(
            protocol.message_of(error), status=500, kind="server_error", code="scores_not_finite"
        )
    if isinstance(error, OutOfMemoryError):
        what = f"the request does not fit into memory: {error.fix}"
        return protocol.unavailable(what, code="out_of_memory", seconds=LONGEST_RETRY)
    if isinstance(error, RecipeError | SourceError):
        return protocol.RequestError(protocol.message_of(error), code=getattr(error, "code", None))
    what = "a fault of the server: its log has more under the id of this request"
    return protocol.RequestError(what, status=500, kind="server_error")


def too_late(limits: Limits) -> protocol.RequestError:
    what = f"the request waited or ran longer than {limits.timeout:g} seconds: ask for fewer tokens, or again later"
    return protocol.RequestError(what, status=408, kind="timeout_error", code="timeout")
