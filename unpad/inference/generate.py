"""Continuations of prompts of any lengths.

A prompt gives the same tokens alone and in a batch: nothing is padded, each sequence draws from a generator seeded by
its own seed and content, and a finished sequence leaves the batch. See `engine`.
"""

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor
from torch.nn import functional as F

from unpad.batching.batch import RaggedBatch
from unpad.data.tokens.tokenizer import DecodeStream, Tokenizer
from unpad.errors import NonFiniteError
from unpad.inference import engine as engines
from unpad.inference.engine import Collected, Engine, Finished, Prompts, Request, device_of, token_limits, token_lists
from unpad.models.contract import Generates
from unpad.nn.precision import Precision
from unpad.recipes.training import GenerateSettings

PIECE, ROWS = 8192, 256  # of an engine whose prompts are all there: tokens read in a turn, answers at the same time


@dataclass(frozen=True)
class Completion:
    """Continuation of a prompt: ids without EOS, their text, and the reason it ended.

    finished: "eos", the model ended it; "length", max_new_tokens; "context", the model's positions ran out.
    """

    ids: list[int]
    text: str
    finished: Finished


@dataclass(frozen=True)
class Continuing:
    """A way to continue prompts.

    Args:
        stops: tokens that end a sequence and are not part of it.
        banned: ids that are never generated.
    """

    model: Generates
    settings: GenerateSettings
    stops: Sequence[int]
    banned: Sequence[int] = ()
    precision: Precision = "fp32"

    @staticmethod
    def of(
        model: Generates, tokenizer: Tokenizer, settings: GenerateSettings, precision: Precision = "fp32"
    ) -> "Continuing":
        """As a tokenizer has it: up to its stop tokens, without control tokens."""
        return Continuing(model, settings, sorted(tokenizer.stop_ids), engines.banned_ids(model, tokenizer), precision)

    def request(self, prompt: Sequence[int] | RaggedBatch, seed: int | None = None) -> Request:
        settings = self.settings if seed is None else self.settings.model_copy(update={"seed": seed})
        return Request(prompt, settings, self.stops, self.banned)

    def all(self, prompts: Prompts, seeds: Sequence[int] | None = None) -> list[tuple[list[int], Finished]]:
        """The tokens of every continuation, and why it ended; arguments and errors as of `generate`."""
        texts = token_lists(prompts)
        engines.check(self.model, texts, self.settings)
        if self.settings.beams > 1 and len(texts):
            with engines.running(self.model, self.precision):
                best = dict(beam_search(self.model, prompts, self.settings, self.stops, self.banned))
            limits = token_limits(self.model, texts, self.settings).tolist()
            return [(best[place], self._why(len(best[place]), limit)) for place, limit in enumerate(limits)]
        seeds = [self.settings.seed] * len(texts) if seeds is None else seeds
        requests = [self.request(text, seed) for text, seed in zip(texts, seeds, strict=True)]
        answers = [Collected() for _ in requests]
        engine = Engine(self.model, precision=self.precision, piece=PIECE, rows=ROWS, keeps=False)
        if isinstance(prompts, RaggedBatch):
            engine.submit_together(prompts, requests, answers)
        else:
            for request, answer in zip(requests, answers, strict=True):
                engine.submit(request, answer)
        engine.run()
        return [(answer.tokens(), answer.finished()) for answer in answers]

    def tokens(self, prompt: Sequence[int], seed: int | None = None, engine: Engine | None = None) -> Iterator[int]:
        """Yield the tokens of a continuation as they are made; those of beams at the end."""
        if self.settings.beams > 1:
            yield from self.all([prompt])[0][0]
            return
        engine = engine or Engine(self.model, precision=self.precision, piece=PIECE, keeps=False)
        answer = Collected()
        ticket = engine.submit(self.request(prompt, seed), answer)
        num_yielded = 0
        try:
            going = True
            while going:
                going = engine.turn()  # between turns the caller has its own modes
                new = answer.steps[0][num_yielded:]
                yield from (step.token for step in new)
                num_yielded += len(new)
            answer.tokens()  # raises the error of an answer that failed
        finally:  # the caller may leave
            if ticket.open:
                ticket.cancel()
                engine.turn()

    def _why(self, num_ids: int, limit: int) -> Finished:
        """The reason of the end of a text that beams found."""
        if num_ids < limit:
            return "eos"
        return "length" if limit == self.settings.max_new_tokens else "context"


def complete(
    model: Generates,
    tokenizer: Tokenizer,
    prompts: Prompts,
    settings: GenerateSettings,
    precision: Precision = "fp32",
    seeds: Sequence[int] | None = None,
) -> list[Completion]:
    """Continue every prompt. Raises as `generate` does."""
    made = Continuing.of(model, tokenizer, settings, precision).all(prompts, seeds)
    return [Completion(ids, tokenizer.decode(ids), finished) for ids, finished in made]


def generate(
    model: Generates,
    prompts: Prompts,
    settings: GenerateSettings,
    *,
    eos_id: int | Sequence[int],
    banned: Sequence[int] = (),
    precision: Precision = "fp32",
    seeds: Sequence[int] | None = None,
) -> list[list[int]]:
    """Continue every prompt until EOS or another stop, max_new_tokens or the end of the model's context.

    Args:
        prompts: token ids, none empty.
        eos_id: the token that ends a sequence, or several; not part of the result.
        banned: ids that are never generated.
        seeds: seed of each prompt's draws; by default settings.seed for all, so that the result of a prompt does not
            depend on the others.

    Raises:
        RecipeError: a prompt is empty, longer than the model's context or outside its vocabulary; beams with a
            temperature; a model that is not causal.
        NonFiniteError: the model's scores are NaN or infinite.
    """
    stops = [eos_id] if isinstance(eos_id, int) else eos_id
    return [ids for ids, _ in Continuing(model, settings, stops, banned, precision).all(prompts, seeds)]


def stream(
    model: Generates,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    settings: GenerateSettings,
    precision: Precision = "fp32",
    seed: int | None = None,
    engine: Engine | None = None,
) -> Generator[str, None, None]:
    """Yield the continuation of one prompt as it is generated, never splitting a character. Raises as `generate` does.

    Args:
        seed: of the draws; default settings.seed.
        engine: of this model and precision, with nothing to do; it may keep the beginnings of earlier prompts.
    """
    decoder = DecodeStream(tokenizer)
    for token in Continuing.of(model, tokenizer, settings, precision).tokens(prompt_ids, seed, engine):
        if text := decoder.push(token):
            yield text
    if text := decoder.flush():
        yield text


# --------------------------------------------------------------------------- texts that end an answer


def until(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Yield text up to the first occurrence of one of `stops`, as `StopTexts` does."""
    texts = StopTexts(stops)
    for piece in pieces:
        if ready := texts.push(piece):
            yield ready
        if texts.found:
            return
    if rest := texts.rest():
        yield rest


class StopTexts:
    """Text up to the one of `stops` that is complete first, also across pieces; a start of a stop is held back.

    `found` is True once one has occurred; nothing is pushed then.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._begun = [0] * len(stops)  # characters of each stop that the text so far ends with
        self._waiting = ""
        self.found = False

    def push(self, piece: str) -> str:
        """Add a piece, and return the text that is certain to come before any stop."""
        waiting = self._waiting + piece
        for end, letter in enumerate(piece, len(self._waiting) + 1):
            complete = 0
            for place, (stop, borders) in enumerate(self._stops):
                begun = self._begun[place]
                while begun and stop[begun] != letter:
                    begun = borders[begun - 1]
                self._begun[place] = begun = begun + (stop[begun] == letter)
                if begun == len(stop):
                    complete = max(complete, begun)
            if complete:
                self.found, self._waiting = True, ""
                return waiting[: end - complete]
        keep = len(waiting) - max(self._begun, default=0)
        self._waiting = waiting[keep:]
        return waiting[:keep]

    def rest(self) -> str:
        """The text that was held back, when nothing follows."""
        rest, self._waiting = self._waiting, ""
        return rest


def _borders(stop: str) -> list[int]:
    """For every place of a text, the length of the longest proper start that its beginning up to there ends with.

    Knuth, Morris and Pratt (1977), "Fast pattern matching in strings".
    """
    borders, length = [0], 0
    for letter in stop[1:]:
        while length and stop[length] != letter:
            length = borders[length - 1]
        length += stop[length] == letter
        borders.append(length)
    return borders


# --------------------------------------------------------------------------- beams


@dataclass(frozen=True)
class _Beams:
    """Unfinished texts of each live prompt and the best finished one.

    Args:
        prompts: (num_live,) position of each in the caller's list.
        limits: (num_live,) most new tokens.
        sums: (num_live, beams) fp64, log probability of each text; -inf for a missing one.
        texts: (num_live, beams, num_steps) int64.
        best: (num_live,) fp64, highest log probability per token of a finished text, EOS counted.
        best_texts: (num_live, num_steps) int64; the first best_lengths (num_live,) tokens count, EOS excluded.
    """

    prompts: Tensor
    limits: Tensor
    sums: Tensor
    texts: Tensor
    best: Tensor
    best_texts: Tensor
    best_lengths: Tensor

    def select(self, live: Tensor) -> "_Beams":
        return _Beams(**{name: value[live] for name, value in vars(self).items()})


def beam_search(
    model: Generates, prompts: Prompts, settings: GenerateSettings, stop_ids: Sequence[int], banned: Sequence[int]
) -> Iterator[tuple[int, list[int]]]:
    """Search for the text of highest log probability per token; yield each prompt's place and text once it is known.

    A prompt ends when no continuation can beat its best finished text: log probabilities are never positive, so
    a text's score never rises above its sum over the longest length allowed.
    """
    texts = token_lists(prompts)
    num, width = len(texts), settings.beams
    limits = token_limits(model, texts, settings)
    scores = _Scores(model, texts, settings, banned)
    most = max(len(text) + limit - 1 for text, limit in zip(texts, limits.tolist(), strict=True))
    cache, hidden = engines.prefill(model, prompts, most)
    beams = _Beams(
        prompts=torch.arange(num),
        limits=torch.from_numpy(limits),
        sums=torch.tensor([0.0] + [-math.inf] * (width - 1), dtype=torch.float64).repeat(num, 1),
        texts=torch.zeros(num, width, 0, dtype=torch.int64),
        best=torch.full((num,), -math.inf, dtype=torch.float64),
        best_texts=torch.zeros(num, 0, dtype=torch.int64),
        best_lengths=torch.zeros(num, dtype=torch.int64),
    )
    copies = torch.arange(num).repeat_interleave(width)
    cache.reorder(copies)
    scores.reorder(copies)
    hidden = hidden[copies.to(hidden.device)]
    for step in count(1):
        log_probs = scores.of(hidden).double().log_softmax(-1).cpu().unflatten(0, (-1, width))
        beams, parents = _extend(beams, log_probs, step, stop_ids)
        done = (beams.best >= beams.sums[:, 0] / beams.limits) | (beams.limits == step)
        for row in done.nonzero()[:, 0].tolist():
            yield int(beams.prompts[row]), beams.best_texts[row, : beams.best_lengths[row]].tolist()
        if bool(done.all()):
            return
        kept = (parents + width * torch.arange(len(parents))[:, None])[~done].flatten()
        beams = beams.select(~done)
        cache.reorder(kept)
        scores.reorder(kept)
        tokens = beams.texts[:, :, -1].flatten()
        scores.add(tokens)
        hidden = engines.advance(model, cache, tokens)


def _extend(beams: _Beams, log_probs: Tensor, step: int, stop_ids: Sequence[int]) -> tuple[_Beams, Tensor]:
    """Extend every text by its most likely tokens.

    Args:
        log_probs: (num_live, beams, vocab_size) fp64.

    Returns:
        The beams, most likely first, and the beam that each one continues, (num_live, beams).
    """
    width, vocab = log_probs.shape[1:]
    totals = (beams.sums[:, :, None] + log_probs).flatten(1)
    # A beam has at most this many ends, so enough of these candidates continue.
    num = min((1 + len(stop_ids)) * width, totals.shape[1])
    sums, flat = totals.topk(num, -1)  # (num_live, candidates), descending
    parents, tokens = flat // vocab, flat % vocab
    texts = torch.cat([_rows(beams.texts, parents), tokens[:, :, None]], -1)
    ends = torch.isin(tokens, torch.tensor(stop_ids))

    ending, which = torch.where(ends, sums, -math.inf).max(-1)
    beams = _with_best(beams, ending / step, texts, which, torch.full_like(beams.best_lengths, step - 1))
    going = torch.where(ends, -math.inf, sums)
    going, chosen = going.topk(width, -1)
    # A text truncated at the limit counts as finished.
    cut = torch.where(beams.limits == step, going[:, 0] / step, -math.inf)
    beams = _with_best(beams, cut, texts, chosen[:, 0], torch.full_like(beams.best_lengths, step))
    return replace(beams, sums=going, texts=_rows(texts, chosen)), parents.gather(1, chosen)


def _with_best(beams: _Beams, score: Tensor, texts: Tensor, which: Tensor, lengths: Tensor) -> _Beams:
    """Replace the best text by texts[:, which], (num_live, num_steps), if `score` (num_live,) beats the best so far."""
    better = score > beams.best
    candidates = _rows(texts, which[:, None])[:, 0]
    before = F.pad(beams.best_texts, (0, candidates.shape[1] - beams.best_texts.shape[1]))
    return replace(
        beams,
        best=torch.where(better, score, beams.best),
        best_texts=torch.where(better[:, None], candidates, before),
        best_lengths=torch.where(better, lengths, beams.best_lengths),
    )


def _rows(texts: Tensor, which: Tensor) -> Tensor:
    """texts (num, n, steps), which (num, m) -> (num, m, steps)."""
    return texts.gather(1, which[:, :, None].expand(-1, -1, texts.shape[2]))


class _Scores:
    """Logits without banned ids and with the repetition penalty."""

    def __init__(
        self, model: Generates, prompts: Sequence[Sequence[int]], settings: GenerateSettings, banned: Sequence[int]
    ) -> None:
        self._model, self._penalty = model, settings.repetition_penalty
        self._banned = torch.tensor(sorted(set(banned)), dtype=torch.int64, device=device_of(model))
        self._used: Tensor | None = None  # (num_rows, vocab_size) bool
        if self._penalty != 1:
            self._used = torch.zeros(len(prompts), model.vocab_size, dtype=torch.bool, device=device_of(model))
            for row, prompt in enumerate(prompts):
                self._used[row, torch.tensor(prompt, device=device_of(model))] = True

    def of(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, (num_rows, vocab_size), fp32 or wider.

        Raises:
            NonFiniteError: one is NaN or infinite.
        """
        logits = self._model.logits(hidden)
        if self._used is not None:
            logits = engines.penalised(logits, self._used, self._penalty)
        if not bool(logits.sum().isfinite()):
            fix = "use an earlier checkpoint, or precision fp32"
            raise NonFiniteError("the model's scores are not finite", fix=fix)
        return logits.index_fill_(-1, self._banned, -math.inf)

    def add(self, tokens: Tensor) -> None:
        """Add the next token of each row, (num_rows,)."""
        if self._used is not None:
            self._used.scatter_(1, tokens.to(self._used.device)[:, None], True)

    def reorder(self, rows: Tensor) -> None:
        if self._used is not None:
            self._used = self._used[rows.to(self._used.device)]
