"""Generation for requests that come and go: rows join and leave between steps.

A turn reads at most `piece` tokens of waiting prompts and then one token of every live row. An answer has the bits that
it has alone, whatever runs beside it: a row's scores depend on its own tokens only (see `independent_rows`), prompts
are cut where a cut changes nothing, and every answer draws from a generator of its own.

The beginnings of prompts are kept for later ones. Only what was computed by reading is kept: a decoding step sums in
another order, so replies are read again as part of the next prompt.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from unpad.batching.batch import RaggedBatch, from_prompts
from unpad.batching.layout import Layout
from unpad.data.tokens.tokenizer import Tokenizer, spelling
from unpad.errors import NonFiniteError, OutOfMemoryError, RecipeError, UnpadError, needs_memory
from unpad.models.contract import Generates
from unpad.nn.cache import CachedRow, KeyValueCache, cut_step
from unpad.nn.linear import independent_rows, keep_copies, reading
from unpad.nn.precision import DTYPES, Precision, autocast
from unpad.recipes.training import GenerateSettings
from unpad.terminal.table import number_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

KEPT_BYTES = 1 << 30  # of beginnings, by default
SHORTEST_KEPT = 16  # tokens; reading fewer costs less than copying them
# Token ids, or a flat batch of them with images among the tokens.
Prompts = Sequence[Sequence[int]] | RaggedBatch
GREEDY_BELOW = 1e-4  # a lower temperature only overflows
Finished = Literal["eos", "length", "context"]  # of an answer that nobody ended
Reason = Finished | Literal["stop", "deadline", "cancelled", "failed"]


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Args:
        prompt: token ids; or a batch of one prompt with images among its tokens.
        stop_ids: tokens that end an answer and are not part of it.
        banned: ids that are never generated.
        spelling: (states, vocab_size) int8, of `spelling`: an answer has no bytes that cannot follow; None: any may.
        n: number of answers; answer i draws with settings.seed + i.
        deadline: time.monotonic() at which all answers end.
        top: report log probabilities: of each token, and of so many likeliest ones.
        echo: with `top`, report those of the prompt's tokens too.
        owner: the beginnings of prompts that are kept are found by requests of the same one.
        bias: (vocab_size,) fp32, added to the scores.
        grammar: what an answer may be, at its start; the answers get copies.
    """

    prompt: Sequence[int] | RaggedBatch
    settings: GenerateSettings
    stop_ids: Sequence[int]
    banned: Sequence[int] = ()
    spelling: Tensor | None = None
    n: int = 1
    deadline: float | None = None
    top: int | None = None
    echo: bool = False
    owner: str = ""
    bias: Tensor | None = None
    grammar: "LLMatcher | None" = None


@dataclass(frozen=True)
class NewToken:
    """A token of an answer.

    Args:
        answer: 0 to n - 1.
        logprob: of the model's scores, before temperature, penalty and banned ids; None if none was asked for.
        top: the likeliest tokens with their log probabilities, descending.
    """

    answer: int
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Listener(Protocol):
    """Hears what becomes of a request, in the thread that turns the engine; must not block."""

    def read(self, cached: int, echoed: tuple[NewToken, ...]) -> None:
        """The prompt was read, `cached` tokens of it for an earlier request; `echoed` are its tokens, if asked for."""

    def step(self, step: NewToken) -> bool:
        """A token was made. False ends this answer with the reason "stop"."""
        ...

    def ended(self, answer: int, reason: Reason, error: UnpadError | None) -> None:
        """An answer ended; `error` says why it failed."""


@dataclass(eq=False)
class Ticket:
    """A request in the engine."""

    request: Request
    listener: Listener
    ids: Sequence[int]
    limit: int  # most new tokens of an answer
    forbidden: tuple[Tensor, ...]  # as `forbidden_ids`
    batch: RaggedBatch | None = None  # with images, read whole
    row: CachedRow | None = None
    cached: int = 0
    promised: int = 0  # bytes
    echoed: list[NewToken] = field(default_factory=list)
    open: set[int] = field(default_factory=set)  # answers that did not end
    cancelled: set[int] = field(default_factory=set)

    def cancel(self, answer: int | None = None) -> None:
        """End an answer, or all, before the next step."""
        self.cancelled |= self.open if answer is None else {answer}

    @property
    def most(self) -> int:
        """Tokens of a sequence; the last one is never read."""
        return len(self.ids) + self.limit - 1


@dataclass
class Collected:
    """A listener that collects the tokens, scores and ends of a request's answers.

    Args:
        leave: tokens after which an answer is left, with the reason "stop"; None to collect all.

    Attributes:
        cached: tokens of the prompt that were kept from earlier requests; None until it was read.
        scores: by answer, (vocab_size,) for each token, of an engine with `watch`.
    """

    leave: int | None = None
    cached: int | None = None
    echoed: tuple[NewToken, ...] = ()
    steps: dict[int, list[NewToken]] = field(default_factory=lambda: defaultdict(list))
    scores: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[int, Reason] = field(default_factory=dict)
    errors: dict[int, UnpadError] = field(default_factory=dict)

    def read(self, cached: int, echoed: tuple[NewToken, ...]) -> None:
        assert self.cached is None, "a prompt is read once"
        self.cached, self.echoed = cached, echoed

    def step(self, step: NewToken) -> bool:
        assert step.answer not in self.reasons, "an ended answer makes no tokens"
        self.steps[step.answer].append(step)
        return self.leave is None or len(self.steps[step.answer]) < self.leave

    def ended(self, answer: int, reason: Reason, error: UnpadError | None) -> None:
        assert answer not in self.reasons, "an answer ends once"
        self.reasons[answer] = reason
        if error is not None:
            self.errors[answer] = error

    def tokens(self, answer: int = 0) -> list[int]:
        """Tokens of an answer so far.

        Raises:
            UnpadError: the answer failed.
        """
        if answer in self.errors:
            raise self.errors[answer]
        return [step.token for step in self.steps[answer]]

    def finished(self, answer: int = 0) -> Finished:
        """The reason of an answer that nobody ended."""
        reason = self.reasons[answer]
        assert reason == "eos" or reason == "length" or reason == "context", reason
        return reason


def watch(ticket: Ticket, answer: int, scores: Tensor) -> None:
    """Keep scores with what is collected of their request: `watch` of an engine."""
    assert isinstance(ticket.listener, Collected), "requests that are watched are collected whole"
    ticket.listener.scores[answer].append(scores.clone())


# --------------------------------------------------------------------------- prompts and limits


def token_lists(prompts: Prompts) -> Sequence[Sequence[int]]:
    """Token ids of every prompt; images as their placeholders."""
    if not isinstance(prompts, RaggedBatch):
        return prompts
    assert prompts.input_ids is not None, "prompts are made of tokens"
    ids: list[list[int]] = [part.tolist() for part in prompts.input_ids.split(prompts.layout.lengths().tolist())]
    return ids


def control_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of control tokens that are never generated (BOS, PAD)."""
    return sorted({tokenizer.pad_id, tokenizer.bos_id} - tokenizer.stop_ids)


def banned_ids(model: Generates, tokenizer: Tokenizer) -> list[int]:
    """Ids that are never generated: control tokens, and rows of the model without a token."""
    return [*control_ids(tokenizer), *range(tokenizer.vocab_size, model.vocab_size)]


def spelling_of(model: Generates, tokenizer: Tokenizer) -> Tensor | None:
    """Bytes that may follow each other, as a request has them.

    None if a token's bytes depend on its neighbours, and for a tokenizer of a file: imported models draw as elsewhere.
    """
    free = tokenizer.pieces is None or tokenizer.kind == "file"
    return None if free else torch.from_numpy(spelling(tokenizer.pieces, model.vocab_size))


def forbidden_ids(model: Generates, request: Request) -> tuple[Tensor, ...]:
    """Ids that are banned or cannot follow, (vocab_size,) bool, by the state of the spelling."""
    return _forbidden_ids(request.spelling, tuple(request.banned), model.vocab_size)


@lru_cache(4)  # the requests of a server share theirs
def _forbidden_ids(spelling: Tensor | None, banned: tuple[int, ...], vocab_size: int) -> tuple[Tensor, ...]:
    table = torch.zeros(1, vocab_size, dtype=torch.bool) if spelling is None else spelling < 0
    return table.index_fill(-1, torch.tensor(banned, dtype=torch.int64), True).unbind()


def permitted(logits: Tensor, forbidden: Sequence[Tensor]) -> Tensor:
    """Scores (num_rows, vocab_size) without each row's forbidden ids, (vocab_size,) bool."""
    return logits.masked_fill(torch.stack(list(forbidden)).to(logits.device), -torch.inf)


def token_limits(model: Generates, prompts: Sequence[Sequence[int]], settings: GenerateSettings) -> np.ndarray:
    """Most new tokens of each prompt, (num_prompts,) int64: every position predicts one token."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int64)
    return np.minimum(settings.max_new_tokens, model.config.longest - lengths + 1)


def check(model: Generates, prompts: Sequence[Sequence[int]], settings: GenerateSettings) -> None:
    longest = model.config.longest
    if not model.causal:
        what = "a model with causal: false cannot continue a text"
        raise RecipeError(what, where="model.causal", fix="set it to true")
    if settings.beams > 1 and settings.temperature > GREEDY_BELOW:
        what = f"beams={settings.beams} search for the best text, temperature={settings.temperature} draws one"
        raise RecipeError(what, where="generate", fix="set generate.temperature=0 or generate.beams=1")
    if settings.beams > 1 and (settings.presence_penalty or settings.frequency_penalty or settings.json_schema):
        what = "beams know no schema, and no penalty but repetition_penalty"
        raise RecipeError(what, where="generate", fix="set generate.beams=1, or leave the others out")
    for position, prompt in enumerate(prompts):
        where = f"prompt {position}"
        if not len(prompt):
            raise RecipeError("the prompt has no tokens", where=where, fix="begin it with BOS at least")
        if len(prompt) > longest:
            what = f"the prompt has {number_of(len(prompt), 'tokens')}, the model's context is {longest}"
            raise RecipeError(what, where=where, fix=model.config.advice_beyond)
        if not 0 <= min(prompt) <= max(prompt) < model.vocab_size:
            what = f"the prompt has ids {min(prompt)} to {max(prompt)}, the model knows 0 to {model.vocab_size - 1}"
            raise RecipeError(what, where=where, fix="encode it with the tokenizer of the model's run")


# --------------------------------------------------------------------------- passes of the model


@contextmanager
def running(model: Generates, precision: Precision, owner: object | None = None) -> Iterator[None]:
    """Without gradients and dropout, products in `precision`; the model's mode is restored.

    Args:
        owner: as long as it lives, later calls reuse the copies of the weights in `precision`.
    """
    was_training = model.training
    if was_training:  # the walk over all modules costs a tenth of a small model's step
        model.eval()
    try:
        with torch.inference_mode(), autocast(precision, model.device), keep_copies(owner), independent_rows():
            yield
    finally:
        if was_training:
            model.train()


def prefill(model: Generates, prompts: Prompts, most: int) -> tuple[KeyValueCache, Tensor]:
    """Read all prompts in one flat run.

    Args:
        most: tokens that no sequence will exceed, prompt included.

    Returns:
        The cache, and the hidden state of every prompt's last token, (num_prompts, width).
    """
    batch = (prompts if isinstance(prompts, RaggedBatch) else from_prompts(prompts)).to(model.device)
    assert isinstance(batch.layout, Layout)
    cache = KeyValueCache([CachedRow(max(most, length)) for length in batch.layout.lengths().tolist()])
    cache.begin(batch.layout.lengths().tolist())
    with reading():
        return cache, model.last_hidden(batch, cache)


def advance(model: Generates, cache: KeyValueCache, tokens: Tensor) -> Tensor:
    """Read one more token per row, (num_rows,) int64; return its hidden state, (num_rows, width)."""
    device = model.device
    tokens = tokens.to(device)
    bounds = torch.arange(cache.num_rows + 1, dtype=torch.int32, device=device)
    batch = RaggedBatch(
        layout=Layout(bounds, 1),
        position_ids=cache.lengths.to(device),
        input_ids=tokens,
        labels=tokens,
        loss_mask=torch.zeros_like(tokens, dtype=torch.bool),
        target_index=tokens[:0],
    )
    cache.begin(None)
    hidden: Tensor = model(batch, cache)
    return hidden


# --------------------------------------------------------------------------- draws


def generator_of(seed: int, prompt: Sequence[int]) -> np.random.Generator:
    """Generator of a prompt's draws, seeded also by its content: prompts with one seed draw independently of their
    places and of each other."""
    content = np.asarray(prompt, "<i8").tobytes()
    return np.random.default_rng([seed, int.from_bytes(blake2b(content, digest_size=8).digest(), "little")])


def penalised(logits: Tensor, used: Tensor, penalty: float) -> Tensor:
    """Scores (num_rows, vocab_size) with the repetition penalty, which divides positive and multiplies negative ones of
    the tokens that the prompt or the answer holds, `used` (Keskar et al. 2019, arXiv 1909.05858, section 4.1)."""
    return torch.where(used, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def sample(logits: Tensor, settings: Sequence[GenerateSettings], uniform: Tensor) -> Tensor:
    """Draw a token per row from softmax(logits / temperature), cut to the top_k most likely, then to top_p and min_p.

    top_p keeps the smallest set of most likely tokens that reaches this share of the probability left by top_k
    (Holtzman et al. 2019, arXiv 1904.09751).

    Args:
        logits: (num_rows, vocab_size) fp64.
        settings: of each row, all of one top_k, and all with or all without a top_p.
        uniform: (num_rows,) fp64 in [0, 1), places in the cumulative distribution.

    Returns:
        (num_rows,) int64.
    """
    columns = [(one.temperature, one.top_p, one.min_p) for one in settings]
    temperature, top_p, min_p = torch.tensor(columns, dtype=torch.float64).mT
    probabilities, candidates = (logits / temperature[:, None]).softmax(-1), None
    if settings[0].top_k:
        probabilities, candidates = probabilities.topk(min(settings[0].top_k, logits.shape[-1]), -1)  # descending
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    if settings[0].top_p < 1:
        if candidates is None:
            probabilities, candidates = _most_likely(probabilities, top_p)
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p[:, None], 0)
    if bool(min_p.any()):
        probabilities = probabilities.masked_fill(probabilities < (min_p * probabilities.amax(-1))[:, None], 0)
    cumulative = probabilities.cumsum(-1)
    # right: a token of probability 0 has the same cumulative value as the token before it and is never the first above.
    chosen = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)
    return (chosen if candidates is None else candidates.gather(-1, chosen))[:, 0]


def _most_likely(probabilities: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely tokens of every row, descending, and their ids: enough to reach its `share`, or all.

    Each row is sorted as it would be alone, so that ties do not depend on the others.
    """
    vocab = probabilities.shape[-1]
    values, ids = probabilities.topk(min(256, vocab), -1)  # sorting a whole vocabulary costs more than the model
    flat = values.sum(-1) < share
    if bool(flat.any()):
        values, ids = (F.pad(x, (0, vocab - x.shape[-1])) for x in (values, ids))
        values[flat], ids[flat] = probabilities[flat].sort(dim=-1, descending=True, stable=True)
    return values, ids


# --------------------------------------------------------------------------- the engine


@dataclass(eq=False)
class _Answer:
    """A live row.

    Args:
        used: (vocab_size,) bool, tokens that the repetition penalty applies to; None without one.
        counts: (vocab_size,) fp32, of its own tokens for the other penalties; None without them.
        grammar: what may follow; None: anything.
        forbidden: (vocab_size,) bool, ids that cannot be next; state: of the request's spelling.
    """

    ticket: Ticket
    index: int
    row: CachedRow
    generator: np.random.Generator
    used: Tensor | None
    counts: Tensor | None
    grammar: "LLMatcher | None"
    made: int = 0
    last: int = 0
    state: int = 0
    forbidden: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.forbid()

    @property
    def adjusts(self) -> bool:
        """True with a penalty or a bias."""
        return any(one is not None for one in (self.used, self.counts, self.ticket.request.bias))

    def add(self, token: int) -> None:
        """Add the token that was chosen."""
        self.last, self.made = token, self.made + 1
        if self.used is not None:
            self.used[token] = True
        if self.counts is not None:
            self.counts[token] += 1
        if self.ticket.request.spelling is not None:
            self.state = int(self.ticket.request.spelling[self.state, token])
        if self.grammar is not None:
            self.grammar.consume_token(token)

    def forbid(self) -> None:
        """Set what cannot be next, by the state of spelling and grammar.

        Raises:
            RecipeError: the grammar's own limits of work are exceeded, or no token can follow.
        """
        self.forbidden = self.ticket.forbidden[self.state]
        if self.grammar is None:
            return
        bits = np.frombuffer(self.grammar.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=len(self.forbidden), bitorder="little")
        self.forbidden = self.forbidden | torch.from_numpy(allowed == 0)
        if error := self.grammar.get_error():
            what = f"the answer cannot be held to the schema any further: {error.splitlines()[0]}"
            raise RecipeError(what, fix="make the schema simpler")
        if bool(self.forbidden.all()):
            raise RecipeError("no token of the run goes on as the schema wants", fix="change the schema")


class Engine:
    """Continues prompts; all methods are for one thread.

    Args:
        piece: tokens of prompts that a turn reads at most.
        rows: answers at the same time.
        memory: bytes of keys and values of live rows and kept beginnings; a request that does not fit waits. None: rows
            take what they need.
        kept: bytes of these that beginnings take at most.
        keeps: whether beginnings of prompts are kept for later ones.
        watch: called with the scores, (vocab_size,), that each token of an answer is chosen by; for proofs.

    Attributes:
        on_fault: hears of a fault of the program that ends the answers of some requests alone; None: it is raised.
        tokens_read, tokens_reused, tokens_made: since the start; of prompts computed, of prompts kept from earlier
            ones, and of answers.
    """

    def __init__(
        self,
        model: Generates,
        *,
        precision: Precision = "fp32",
        piece: int = 256,
        rows: int = 64,
        memory: int | None = None,
        kept: int = KEPT_BYTES,
        keeps: bool = True,
        watch: Callable[[Ticket, int, Tensor], None] = lambda ticket, answer, scores: None,
    ) -> None:
        self._model, self._precision, self._watch = model, precision, watch
        self._piece, self._rows, self._memory, self._kept = piece, rows, memory, kept
        self._cut = cut_step(DTYPES[precision], model.device, model.head_dim or 0)
        self._beginnings = _Beginnings(self._cut) if keeps else None
        self._waiting: deque[list[Ticket]] = deque()  # those of a list are read in one pass
        self._reading: list[list[Ticket]] = []
        self._live: list[_Answer] = []
        self._token_bytes = 0  # of keys and values, once a row has been read
        self.tokens_read = self.tokens_reused = self.tokens_made = 0
        self.on_fault: Callable[[Sequence[Ticket], Exception], None] | None = None

    @property
    def live(self) -> int:
        """Answers that are being made."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Requests whose prompts nothing was read of."""
        return sum(map(len, self._waiting))

    @property
    def kept_bytes(self) -> int:
        return 0 if self._beginnings is None else self._beginnings.num_bytes

    # ------------------------------------------------------------------ requests

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Add a request.

        Raises:
            RecipeError: it can never run: the prompt is empty, too long or outside the vocabulary, or asks for beams.
        """
        if isinstance(request.prompt, RaggedBatch):
            return self.submit_together(request.prompt, [request], [listener])[0]
        ticket = self._ticket(request, listener, request.prompt)
        self._waiting.append([ticket])
        return ticket

    def submit_together(
        self, batch: RaggedBatch, requests: Sequence[Request], listeners: Sequence[Listener]
    ) -> list[Ticket]:
        """Add requests whose prompts are the sequences of a batch, and read them in one pass; errors as `submit`."""
        tickets = [
            self._ticket(request, listener, ids, batch)
            for request, listener, ids in zip(requests, listeners, token_lists(batch), strict=True)
        ]
        if tickets:
            self._waiting.append(tickets)
        return tickets

    def _ticket(
        self, request: Request, listener: Listener, ids: Sequence[int], batch: RaggedBatch | None = None
    ) -> Ticket:
        check(self._model, [ids], request.settings)
        assert request.settings.beams == 1, "beams have a search of their own"
        limit = int(token_limits(self._model, [ids], request.settings)[0])
        forbidden = forbidden_ids(self._model, request)
        return Ticket(request, listener, ids, limit, forbidden, batch, open=set(range(request.n)))

    def close(self) -> None:
        """End all answers as cancelled."""
        for ticket in self.tickets():
            ticket.cancel()
        self._drop()

    def tickets(self) -> list[Ticket]:
        """Requests that are not answered."""
        queued = [ticket for tickets in [*self._waiting, *self._reading] for ticket in tickets]
        return [*queued, *dict.fromkeys(answer.ticket for answer in self._live)]

    # ------------------------------------------------------------------ a turn

    def turn(self) -> bool:
        """Read a piece of prompts, then one token per live row; False if nothing is left to do."""
        with running(self._model, self._precision, owner=self):
            return self._turn()

    def run(self) -> None:
        """Turn until nothing is left to do."""
        with running(self._model, self._precision, owner=self):
            while self._turn():
                pass

    def _turn(self) -> bool:
        self._drop()
        self._admit()
        self._read()
        self._step()
        return bool(self._waiting or self._reading or self._live)

    def _drop(self) -> None:
        """End what was cancelled or is late."""
        now = time.monotonic()
        for ticket in self.tickets():
            late = ticket.request.deadline is not None and now >= ticket.request.deadline
            reason: Reason = "deadline" if late else "cancelled"
            for answer in sorted(ticket.open if late else ticket.open & ticket.cancelled):
                self._end(ticket, answer, reason)
        self._forget_ended()

    def _end(self, ticket: Ticket, answer: int, reason: Reason, error: UnpadError | None = None) -> None:
        ticket.open.discard(answer)
        ticket.promised = ticket.promised * len(ticket.open) // (len(ticket.open) + 1)
        ticket.listener.ended(answer, reason, error)

    def _forget_ended(self) -> None:
        """Remove rows and prompts all of whose answers ended."""
        self._live = [answer for answer in self._live if answer.index in answer.ticket.open]
        self._waiting = deque(self._open(self._waiting))
        self._reading = list(self._open(self._reading))

    @staticmethod
    def _open(queue: Iterable[list[Ticket]]) -> Iterable[list[Ticket]]:
        return (tickets for tickets in queue if any(ticket.open for ticket in tickets))

    # ------------------------------------------------------------------ prompts

    def _admit(self) -> None:
        """Begin with the requests that have waited longest, as many as rows and memory allow."""
        while self._waiting:
            tickets = self._waiting[0]
            alone = not self._reading and not self._live
            rows = sum(len(ticket.open) for ticket in [t for queued in self._reading for t in queued] + tickets)
            if not alone and rows + len(self._live) > self._rows:
                return
            if self._memory is not None and not self._fits(tickets, alone):
                return
            self._waiting.popleft()
            if not any(ticket.open for ticket in tickets):
                continue
            self._reading.append(tickets)
            for ticket in tickets:
                ticket.row = CachedRow(ticket.most)
                if self._beginnings is not None and ticket.batch is None and not ticket.request.echo:
                    ticket.row = self._beginnings.begin(ticket.ids, ticket.most, ticket.request.owner) or ticket.row
                ticket.cached = ticket.row.length
                self.tokens_reused += ticket.cached

    def _fits(self, tickets: list[Ticket], alone: bool) -> bool:
        """Promise memory to requests, if there is enough; what can never fit fails."""
        assert self._memory is not None
        if not self._token_bytes:
            return alone  # the first row shows how much a token takes
        needs = [len(ticket.open) * ticket.most * self._token_bytes for ticket in tickets]
        if sum(needs) > self._memory:
            what = f"the request needs {sum(needs) >> 20} MiB of keys and values, {self._memory >> 20} are allowed"
            fix = "ask for fewer tokens or answers, or raise the memory"
            self._fail(tickets, OutOfMemoryError(what, fix=fix))
            return True
        free = self._memory - sum(ticket.promised for ticket in self.tickets()) - sum(needs)
        if free < 0:
            return False
        if self._beginnings is not None:
            self._beginnings.shrink(free)
        for ticket, need in zip(tickets, needs, strict=True):
            ticket.promised = need
        return True

    @contextmanager
    def _apart(self, tickets: Sequence[Ticket]) -> Iterator[None]:
        """Let a fault of the program end these requests, and no others."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, UnpadError):
                if self.on_fault is None:
                    raise
                self.on_fault(tickets, error)
            self._fail(tickets, error if isinstance(error, UnpadError) else None)

    def _fail(self, tickets: Iterable[Ticket], error: UnpadError | None) -> None:
        for ticket in tickets:
            for answer in sorted(ticket.open):
                self._end(ticket, answer, "failed", error)

    def _read(self) -> None:
        """Read the next pieces of prompts; those that are complete get their first tokens."""
        parts = self._parts()
        if not parts:
            return
        tickets = [ticket for ticket, _ in parts]
        began = [ticket.row.length for ticket in tickets if ticket.row is not None]
        hidden = None
        with self._apart(tickets):
            try:
                with needs_memory("a prompt's keys and values", "ask for less at once, or lower the memory"):
                    hidden = self._read_whole(tickets) if tickets[0].batch is not None else self._read_parts(parts)
            except OutOfMemoryError as error:  # of the requests that are read, whose rows are half filled
                self._fail(tickets, error)
        if hidden is None:
            self._forget_ended()
            return
        self.tokens_read += sum(stop - start for (_, stop), start in zip(parts, began, strict=True))
        done = {id(ticket) for ticket, stop in parts if stop == len(ticket.ids)}
        # A prompt whose answers all ended may still be read, with others of its batch.
        complete = [place for place, ticket in enumerate(tickets) if id(ticket) in done and ticket.open]
        answers = []
        for place in complete:
            with self._apart([tickets[place]]):
                answers += self._answers(tickets[place])
        self._reading = [queued for queued in self._reading if id(queued[0]) not in done]
        self._live += answers
        copies = [place for place in complete for _ in sorted(tickets[place].open)]
        if copies:
            self._choose(answers, hidden[torch.tensor(copies, device=hidden.device)])

    def _parts(self) -> list[tuple[Ticket, int]]:
        """Prompts to read now, and the place where each of their pieces stops.

        A cut is at a multiple of the model's step from the prompt's own start, never where the turn's room ends.
        """
        parts: list[tuple[Ticket, int]] = []
        room = self._piece
        for queued in self._reading:
            if queued[0].batch is not None:  # images are read whole, in a pass of their own
                return parts or [(ticket, len(ticket.ids)) for ticket in queued]
            ticket = queued[0]
            assert ticket.row is not None
            start, length = ticket.row.length, len(ticket.ids)
            stop = length if length <= start + room else (start + room) // self._cut * self._cut
            if stop <= start:
                if parts:
                    return parts
                stop = min((start // self._cut + 1) * self._cut, length)
            parts.append((ticket, stop))
            room -= stop - start
            if room <= 0:
                break
        return parts

    def _read_whole(self, tickets: list[Ticket]) -> Tensor:
        batch = tickets[0].batch
        assert batch is not None
        cache, hidden = prefill(self._model, batch, max(ticket.most for ticket in tickets))
        for ticket, row in zip(tickets, cache.rows, strict=True):
            ticket.row, ticket.batch = row, None
            self._token_bytes = max(self._token_bytes, row.token_bytes)
        return hidden

    def _read_parts(self, parts: list[tuple[Ticket, int]]) -> Tensor:
        """Hidden state of the last token of every piece, (num_parts, width)."""
        rows = [ticket.row for ticket, _ in parts if ticket.row is not None]
        starts = [row.length for row in rows]
        pieces = [ticket.ids[start:stop] for (ticket, stop), start in zip(parts, starts, strict=True)]
        batch = from_prompts(pieces)
        lengths = torch.tensor([len(piece) for piece in pieces])
        moved = batch.position_ids + torch.tensor(starts).repeat_interleave(lengths)
        batch = replace(batch, position_ids=moved).to(self._model.device)
        cache = KeyValueCache(rows)
        cache.begin(lengths.tolist())
        last: Tensor
        with reading():
            if any(ticket.request.echo for ticket, _ in parts):
                every = self._model(batch, cache)
                for (ticket, stop), start, hidden in zip(parts, starts, every.split(lengths.tolist()), strict=True):
                    if ticket.request.echo:
                        self._echo(ticket, start, stop, hidden)
                last = every[lengths.cumsum(0).to(every.device) - 1]
            else:
                last = self._model.last_hidden(batch, cache)
        for (ticket, stop), row in zip(parts, rows, strict=True):
            self._token_bytes = max(self._token_bytes, row.token_bytes)
            if stop == len(ticket.ids) and self._beginnings is not None and row.is_whole:
                self._beginnings.keep(ticket.ids, row, self._free_for_beginnings(), ticket.request.owner)
        return last

    def _free_for_beginnings(self) -> int:
        if self._memory is None:
            return self._kept
        return min(self._kept, self._memory - sum(ticket.promised for ticket in self.tickets()))

    def _echo(self, ticket: Ticket, start: int, stop: int, hidden: Tensor) -> None:
        """Report the tokens that follow those of a piece, (num, width), but for the first of the answer."""
        if start == 0:
            ticket.echoed.append(NewToken(0, int(ticket.ids[0])))
        targets = ticket.ids[start + 1 : stop + 1]
        logits, top = self._model.logits(hidden[: len(targets)]), ticket.request.top
        ticket.echoed += [_step(0, int(token), row, top) for token, row in zip(targets, logits, strict=True)]

    def _answers(self, ticket: Ticket) -> list[_Answer]:
        """Rows for the answers of a prompt that was read; all but the first get copies."""
        assert ticket.row is not None
        settings = ticket.request.settings
        ticket.listener.read(ticket.cached, tuple(ticket.echoed))
        used = None
        if settings.repetition_penalty != 1:
            used = torch.zeros(self._model.vocab_size, dtype=torch.bool, device=self._model.device)
            used[torch.tensor(ticket.ids, device=used.device)] = True
        counted = settings.presence_penalty or settings.frequency_penalty
        rows = [ticket.row, *(ticket.row.copy() for _ in range(len(ticket.open) - 1))]
        ticket.row = None
        answers = []
        for index, row in zip(sorted(ticket.open), rows, strict=True):
            generator = generator_of(settings.seed + index, ticket.ids)
            mine = None if used is None else used.clone()
            counts = None if not counted else torch.zeros(self._model.vocab_size, device=self._model.device)
            grammar = None if ticket.request.grammar is None else ticket.request.grammar.deep_copy()
            answers.append(_Answer(ticket, index, row, generator, mine, counts, grammar))
        return answers

    # ------------------------------------------------------------------ one token per row

    def _step(self) -> None:
        answers = []
        for answer in self._live:
            try:
                with needs_memory("a row's keys and values", "ask for fewer tokens"):
                    answer.row.reserve(1)
                answers.append(answer)
            except OutOfMemoryError as error:
                self._end(answer.ticket, answer.index, "failed", error)
        if answers:
            cache = KeyValueCache([answer.row for answer in answers])
            tokens = torch.tensor([answer.last for answer in answers])
            self._choose(answers, advance(self._model, cache, tokens))
        self._forget_ended()

    def _choose(self, answers: list[_Answer], hidden: Tensor) -> None:
        """Choose the next token of each row from its hidden state, (num_rows, width), and report it."""
        logits, uniform = self._model.logits(hidden), [answer.generator.random() for answer in answers]
        try:
            tokens = _draw(answers, logits, uniform)
        except Exception:  # each by itself, so that the one at fault ends alone
            tokens = [None] * len(answers)
            for place, answer in enumerate(answers):
                with self._apart([answer.ticket]):
                    [tokens[place]] = _draw([answer], logits[place, None], [uniform[place]])
        for place, (answer, token) in enumerate(zip(answers, tokens, strict=True)):
            if answer.index not in answer.ticket.open:
                continue
            if token is None:
                fix = "use an earlier checkpoint, or precision fp32"
                error = NonFiniteError("the model's scores are not finite", fix=fix)
                self._end(answer.ticket, answer.index, "failed", error)
                continue
            with self._apart([answer.ticket]):
                self._report(answer, token, logits[place])
        self._forget_ended()

    def _report(self, answer: _Answer, token: int, logits: Tensor) -> None:
        ticket, request = answer.ticket, answer.ticket.request
        self._watch(ticket, answer.index, logits)
        if token in request.stop_ids:
            self._end(ticket, answer.index, "eos")
            return
        answer.add(token)
        self.tokens_made += 1
        if not ticket.listener.step(_step(answer.index, token, logits, request.top)):
            self._end(ticket, answer.index, "stop")
        elif answer.made == ticket.limit:
            cut = ticket.limit < request.settings.max_new_tokens
            self._end(ticket, answer.index, "context" if cut else "length")
        else:
            answer.forbid()


# --------------------------------------------------------------------------- scores and draws


def _draw(answers: Sequence[_Answer], logits: Tensor, uniform: Sequence[float]) -> list[int | None]:
    """Draw a token for each row of scores, (num_rows, vocab_size), None where they are not finite, by numbers from 0 to
    1."""
    if any(answer.adjusts for answer in answers):
        logits = torch.stack([_adjusted(answer, row) for answer, row in zip(answers, logits, strict=True)])
    finite = logits.sum(-1).isfinite().tolist()
    if not all(finite):
        logits = logits.nan_to_num()
    logits = permitted(logits, [answer.forbidden for answer in answers])
    every = [answer.ticket.request.settings for answer in answers]
    tokens: dict[int, int] = {}
    kinds = [(one.temperature <= GREEDY_BELOW, one.top_k, one.top_p < 1) for one in every]
    for kind in set(kinds):
        places = [place for place, other in enumerate(kinds) if other == kind]
        scores = logits[torch.tensor(places, device=logits.device)]
        if kind[0]:
            chosen = scores.argmax(-1)
        else:
            drawn = torch.tensor([uniform[place] for place in places], dtype=torch.float64)
            chosen = sample(scores.cpu().double(), [every[place] for place in places], drawn)
        tokens |= zip(places, chosen.tolist(), strict=True)
    return [tokens[place] if fits else None for place, fits in enumerate(finite)]


def _adjusted(answer: _Answer, logits: Tensor) -> Tensor:
    """Scores (vocab_size,) with the penalties and the bias of an answer."""
    settings, bias = answer.ticket.request.settings, answer.ticket.request.bias
    if answer.used is not None:
        logits = penalised(logits, answer.used, settings.repetition_penalty)
    if answer.counts is not None:
        logits = logits - settings.frequency_penalty * answer.counts - settings.presence_penalty * (answer.counts > 0)
    return logits if bias is None else logits + bias.to(logits.device)


def _step(answer: int, token: int, logits: Tensor, top: int | None) -> NewToken:
    """A token with its log probability and the likeliest ones, by scores (vocab_size,)."""
    if top is None:
        return NewToken(answer, token)
    log_probs = logits.double().log_softmax(-1)
    values, ids = log_probs.topk(min(top, len(log_probs)))
    likeliest = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return NewToken(answer, token, float(log_probs[token]), likeliest)


# --------------------------------------------------------------------------- beginnings


@dataclass(eq=False)
class _Kept:
    """A prompt that was read: its tokens, (num_tokens,) int64, and the digests of its beginnings."""

    ids: np.ndarray
    row: CachedRow
    digests: list[bytes]


class _Beginnings:
    """Prompts that were read, for later ones of the same owner that begin with the same tokens; the least recently used
    go first.

    Args:
        cut: a beginning is used up to a multiple of this many tokens.
    """

    def __init__(self, cut: int) -> None:
        self._cut = cut
        self._kept: dict[_Kept, None] = {}  # the least recently used first
        # The most recently used prompt with a beginning, so that none is lost with an older one.
        self._latest: dict[bytes, _Kept] = {}
        self.num_bytes = 0

    def begin(self, ids: Sequence[int], most: int, owner: str = "") -> CachedRow | None:
        """A row that holds the longest kept beginning of a prompt, of which the last token is still to be read."""
        prompt = np.asarray(ids, np.int64)
        found = None
        for digest in _digests(prompt, owner):
            if digest not in self._latest:
                break
            found = self._latest[digest]
        if found is None:
            return None
        shared = min(_shared(found.ids, prompt), len(prompt) - 1) // self._cut * self._cut
        if shared < SHORTEST_KEPT:
            return None
        self._use(found)
        return found.row.copy(shared, most)

    def keep(self, ids: Sequence[int], row: CachedRow, most_bytes: int, owner: str = "") -> None:
        """Keep a prompt that was read; prompts that it begins with go."""
        length = len(ids) // self._cut * self._cut
        if length < SHORTEST_KEPT or length * row.token_bytes > most_bytes:
            return
        prompt = np.asarray(ids[:length], np.int64)
        digests = list(_digests(prompt, owner))
        for kept in dict.fromkeys(self._latest[digest] for digest in digests if digest in self._latest):
            shared = _shared(kept.ids, prompt)
            if shared == length:
                self._use(kept)  # it is kept already
                return
            if shared == len(kept.ids):
                self._drop(kept)
        self.shrink(most_bytes - length * row.token_bytes)
        made = _Kept(prompt, row.copy(length, row.most), digests)
        self.num_bytes += made.row.num_bytes
        self._use(made)

    def shrink(self, most_bytes: int) -> None:
        """Drop what exceeds so many bytes."""
        while self._kept and self.num_bytes > most_bytes:
            self._drop(next(iter(self._kept)))

    def _use(self, kept: _Kept) -> None:
        self._kept.pop(kept, None)
        self._kept[kept] = None
        self._latest |= dict.fromkeys(kept.digests, kept)

    def _drop(self, kept: _Kept) -> None:
        del self._kept[kept]
        self.num_bytes -= kept.row.num_bytes
        for digest in kept.digests:
            if self._latest.get(digest) is kept:
                del self._latest[digest]


def _digests(prompt: np.ndarray, owner: str) -> Iterator[bytes]:
    """Digests of the beginnings of one, two and more blocks of SHORTEST_KEPT tokens, and of the whole prompt."""
    digest = blake2b(owner.encode(), digest_size=16).digest()
    for start in range(0, len(prompt), SHORTEST_KEPT):
        digest = blake2b(digest + prompt[start : start + SHORTEST_KEPT].tobytes(), digest_size=16).digest()
        yield digest


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    """Number of first tokens that two prompts share."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if different.size else length
