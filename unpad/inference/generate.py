"""Continuations of prompts of any lengths.

A prompt gives the same tokens alone and in a batch: nothing is padded, each sequence draws from a generator seeded by
its own seed and content, and a finished sequence leaves the batch. See `engine`.
"""

import json
import math
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.data.tokens.tokenizer import DecodeStream, LibraryTokenizer, Tokenizer
from unpad.errors import NonFiniteError, RecipeError, SourceError
from unpad.inference import engine as engines
from unpad.inference.engine import Collected, Engine, Finished, Prompts, Request, token_limits, token_lists
from unpad.models.contract import Generates
from unpad.nn.cache import CachedRow, KeyValueCache
from unpad.nn.precision import Precision
from unpad.recipes.training import GenerateSettings
from unpad.storage.reading import read_file

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

PIECE, ROWS = 8192, 256  # of an engine whose prompts are all there: tokens read in a turn, answers at the same time
# Of a schema: characters; symbols of its grammar, the time of which grows by their square, to 0.5 s; and the work of a
# step that computes what may follow, which holds the model, to 0.1 s.
MOST_SCHEMA, MOST_SYMBOLS, STEP_LEXER, STEP_ITEMS = 64 << 10, 6000, 50_000, 20_000
# Between the parts of a JSON text, as llama.cpp has it: without a bound, small models write nothing else.
WHITESPACE = r" |\n{1,2}[ \t]{0,20}"


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
        spelling, grammar: as a request has them.
    """

    model: Generates
    settings: GenerateSettings
    stops: Sequence[int]
    banned: Sequence[int] = ()
    precision: Precision = "fp32"
    spelling: Tensor | None = None
    grammar: "LLMatcher | None" = None

    @staticmethod
    def of(
        model: Generates, tokenizer: Tokenizer, settings: GenerateSettings, precision: Precision = "fp32"
    ) -> "Continuing":
        """As a tokenizer has it: up to its stop tokens, without control tokens and parts of characters.

        Raises:
            RecipeError: as `grammar_of`.
        """
        stops, banned = sorted(tokenizer.stop_ids), engines.banned_ids(model, tokenizer)
        grammar = grammar_of(settings, tokenizer, model.vocab_size)
        return Continuing(model, settings, stops, banned, precision, engines.spelling_of(model, tokenizer), grammar)

    def request(self, prompt: Sequence[int] | RaggedBatch, seed: int | None = None) -> Request:
        settings = self.settings if seed is None else self.settings.model_copy(update={"seed": seed})
        return Request(prompt, settings, self.stops, self.banned, self.spelling, grammar=self.grammar)

    def all(self, prompts: Prompts, seeds: Sequence[int] | None = None) -> list[tuple[list[int], Finished]]:
        """The tokens of every continuation, up to a stop, max_new_tokens or the end of the context, and why it ended.

        Args:
            prompts: none empty.
            seeds: seed of each prompt's draws; by default settings.seed for all, so that the result of a prompt does
                not depend on the others.

        Raises:
            RecipeError: a prompt is empty, longer than the model's context or outside its vocabulary; beams with a
                temperature; a model that is not causal.
            NonFiniteError: the model's scores are NaN or infinite.
        """
        texts = token_lists(prompts)
        engines.check(self.model, texts, self.settings)
        seeds = [self.settings.seed] * len(texts) if seeds is None else seeds
        requests = [self.request(text, seed) for text, seed in zip(texts, seeds, strict=True)]
        if self.settings.beams > 1 and requests:
            limits = token_limits(self.model, texts, self.settings).tolist()
            with engines.running(self.model, self.precision):
                best = beam_search(self.model, prompts, requests, limits)
            return [(ids, self._why(len(ids), limit)) for ids, limit in zip(best, limits, strict=True)]
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
        return "eos" if num_ids < limit else "length" if limit == self.settings.max_new_tokens else "context"


def complete(
    model: Generates,
    tokenizer: Tokenizer,
    prompts: Prompts,
    settings: GenerateSettings,
    precision: Precision = "fp32",
    seeds: Sequence[int] | None = None,
) -> list[Completion]:
    """Continue every prompt. Raises as `Continuing.all` and `of` do."""
    made = Continuing.of(model, tokenizer, settings, precision).all(prompts, seeds)
    return [Completion(ids, tokenizer.decode(ids), finished) for ids, finished in made]


def stream(
    model: Generates,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    settings: GenerateSettings,
    precision: Precision = "fp32",
    seed: int | None = None,
    engine: Engine | None = None,
) -> Generator[str, None, None]:
    """Yield the continuation of one prompt as it is generated, never splitting a character. Raises as
    `Continuing.all` and `of` do.

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
        self._stops, self._waiting, self.found = stops, "", False

    def push(self, piece: str) -> str:
        """Add a piece, and return the text that is certain to come before any stop."""
        text = self._waiting + piece
        ends = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if ends:
            self.found, self._waiting = True, ""
            return text[: min(ends)[1]]
        ready = min((_begun(text, stop) for stop in self._stops), default=len(text))
        self._waiting = text[ready:]
        return text[:ready]

    def rest(self) -> str:
        """The text that was held back, when nothing follows."""
        rest, self._waiting = self._waiting, ""
        return rest


def _begun(text: str, stop: str) -> int:
    """The first place from which on the rest of a text, maybe none of it, is a start of a stop."""
    first = max(len(text) - len(stop) + 1, 0)
    return next(place for place in range(first, len(text) + 1) if stop.startswith(text[place:]))


# --------------------------------------------------------------------------- schemas


def grammar_of(settings: GenerateSettings, tokenizer: Tokenizer, num_ids: int) -> "LLMatcher | None":
    """What an answer may be that is JSON of the schema of its settings, as a request has it; None without a schema.

    Args:
        num_ids: of the model.

    Raises:
        RecipeError: the extra is not installed, it knows not all of the schema, or the schema or a step of it exceeds a
            bound, by which no schema holds up other requests.
    """
    if settings.json_schema is None:
        return None
    try:
        from llguidance import LLMatcher, LLParserLimits
    except ImportError:
        raise RecipeError("a schema needs llguidance", fix="pip install 'unpad[schema]'") from None
    text = json.dumps(settings.json_schema, ensure_ascii=False)
    if len(text) > MOST_SCHEMA:
        what = f"the schema has {len(text):,} characters, and at most {MOST_SCHEMA:,} are read"
        raise RecipeError(what, fix="leave descriptions out, or ask in parts")
    limits = LLParserLimits(
        max_grammar_size=MOST_SYMBOLS, step_lexer_fuel=STEP_LEXER, step_max_items=STEP_ITEMS, verbose_errors=False
    )
    try:
        source = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE})
    except ValueError as error:
        raise RecipeError(f"the schema cannot be read: {error}", fix="nest it less deeply") from None
    vocabulary = _vocabulary(tokenizer, num_ids)  # type: ignore[arg-type]  # every tokenizer has a hash
    grammar = LLMatcher(vocabulary, source, log_level=0, limits=limits)
    grammar.compute_bitmask()  # some faults show at the first step
    if fault := grammar.get_error():
        what = f"the schema cannot be used: {' '.join(fault.split())[:200]}"
        raise RecipeError(what, fix="write it with other keywords, or make it simpler")
    return grammar


def with_schema(settings: GenerateSettings, path: Path, tokenizer: Tokenizer, num_ids: int) -> GenerateSettings:
    """Settings with the JSON Schema of a file.

    Raises:
        SourceError: it is no JSON object; names the line.
        RecipeError: as `grammar_of`; names the line of the keyword, if the error is on one.
    """
    fix = "write a JSON Schema, an object"
    content = read_file(path, SourceError, MOST_SCHEMA, fix)
    try:
        schema = json.loads(content)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise SourceError(f"the schema is not JSON: {error}", where=f"{path}:{line}", fix=fix) from None
    if type(schema) is not dict:
        raise SourceError("the schema is no object", where=str(path), fix=fix)
    settings = settings.model_copy(update={"json_schema": schema})
    try:
        grammar_of(settings, tokenizer, num_ids)
    except RecipeError as error:
        text, word = content.decode(errors="replace"), re.search(r'"[^"]+"', error.what)
        place = text.find(word[0]) if word else -1
        line = "" if place < 0 else f":{text.count(chr(10), 0, place) + 1}"
        raise RecipeError(error.what, where=f"{path}{line}", fix=error.fix) from None
    return settings


@lru_cache(2)
def _vocabulary(tokenizer: Tokenizer, num_ids: int) -> "LLTokenizer":
    """The tokens of a tokenizer for llguidance."""
    from llguidance import LLTokenizer, TokenizerWrapper

    stops, pieces = sorted(tokenizer.stop_ids), tokenizer.pieces
    if pieces is not None and (lacking := 256 - len({piece for piece in pieces if len(piece) == 1})):
        what = f"the run's tokenizer has no token for {lacking} of 256 bytes, so it cannot write all texts"
        raise RecipeError(what, fix="use a run whose tokenizer has them")
    if pieces is None:
        assert isinstance(tokenizer, LibraryTokenizer)
        try:
            return LLTokenizer(tokenizer.plain_bytes().decode(), n_vocab=num_ids, eos_token=stops)
        except ValueError as error:
            what = f"the run's tokenizer cannot be held to a schema: {error}"
            raise RecipeError(what, fix="use a run with a byte-level tokenizer") from None
    return LLTokenizer(TokenizerWrapper(_Pieces(tokenizer, pieces, num_ids)), eos_token=stops)


class _Pieces:
    """What TokenizerWrapper wants to know of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, pieces: Sequence[bytes], num_ids: int) -> None:
        self.tokens = [*pieces, *[b""] * (num_ids - len(pieces))]
        self.special_token_ids = [id for id, piece in enumerate(self.tokens) if not piece]
        self.eos_token_id, self.bos_token_id = tokenizer.eos_id, tokenizer.bos_id
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode_batch([text.decode()])[0]


# --------------------------------------------------------------------------- beams


def beam_search(
    model: Generates, prompts: Prompts, requests: Sequence[Request], limits: Sequence[int]
) -> list[list[int]]:
    """The text of highest log probability per token, EOS counted, that each prompt gets; at most `limits` tokens."""
    most = max(len(text) + limit - 1 for text, limit in zip(token_lists(prompts), limits, strict=True))
    cache, hidden = engines.prefill(model, prompts, most)
    return [_search(model, *one) for one in zip(requests, limits, cache.rows, hidden.split(1), strict=True)]


def _search(model: Generates, request: Request, limit: int, row: CachedRow, hidden: Tensor) -> list[int]:
    """Search for the best text of one prompt.

    It ends when no continuation can beat the best finished text: log probabilities are never positive, so a text's
    score never rises above its sum over the longest length allowed.

    Args:
        row: of the prompt; hidden: (1, width), of its last token.
    """
    width, penalty, stops = request.settings.beams, request.settings.repetition_penalty, set(request.stop_ids)
    device, cache, forbidden = hidden.device, KeyValueCache([row]), engines.forbidden_ids(model, request)
    states = [0]  # (beams,), of the spelling
    used = torch.zeros(1, model.vocab_size, dtype=torch.bool, device=device)  # (beams, vocab_size)
    used[0, torch.tensor(request.prompt, device=device)] = True
    texts: list[list[int]] = [[]]  # unfinished, the likeliest first
    sums = torch.zeros(1, dtype=torch.float64)  # (beams,), log probability of each
    best: tuple[float, list[int]] = (-math.inf, [])
    for step in range(1, limit + 1):
        logits = model.logits(hidden)
        logits = logits if penalty == 1 else engines.penalised(logits, used, penalty)
        if not bool(logits.sum().isfinite()):
            fix = "use an earlier checkpoint, or precision fp32"
            raise NonFiniteError("the model's scores are not finite", fix=fix)
        log_probs = engines.permitted(logits, [forbidden[state] for state in states]).double().log_softmax(-1).cpu()
        totals = (sums[:, None] + log_probs).flatten()
        # A beam has at most this many ends, so enough of these candidates continue.
        values, places = totals.topk(min((1 + len(stops)) * width, len(totals)))
        parents, tokens = places // model.vocab_size, places % model.vocab_size
        candidates = zip(values.tolist(), parents.tolist(), tokens.tolist(), strict=True)
        found = [(value, [*texts[beam], token]) for value, beam, token in candidates]
        ended = [(value / step, text[:-1]) for value, text in found if text[-1] in stops]
        best = max([best, *ended], key=itemgetter(0))
        live = [place for place, (value, text) in enumerate(found) if text[-1] not in stops and value > -math.inf]
        live = live[:width]
        if live and step == limit:  # a text that is cut counts as finished
            value, text = found[live[0]]
            best = max([best, (value / step, text)], key=itemgetter(0))
        if not live or step == limit or best[0] >= found[live[0]][0] / limit:
            break
        texts, sums, parents, tokens = [found[place][1] for place in live], values[live], parents[live], tokens[live]
        cache.reorder(parents)
        if request.spelling is not None:
            states = request.spelling[[states[beam] for beam in parents.tolist()], tokens].tolist()
        used = used[parents.to(device)].scatter(1, tokens.to(device)[:, None], True)
        hidden = engines.advance(model, cache, tokens)
    return best[1]
