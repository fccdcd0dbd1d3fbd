"""Prefill and decode: prompts of any lengths read as one flat run, then one token per live sequence and step.

A prompt gives the same tokens alone and in a batch: nothing is padded, each sequence draws from a generator seeded by
its own seed and content, and a finished sequence leaves the batch. On the CPU a decoder's scores have the same bits
too: inside `independent_rows` no row's products, activation, attention or draw look at the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from unpad.batching.batch import RaggedBatch, from_prompts
from unpad.batching.layout import Layout
from unpad.data.tokens.tokenizer import DecodeStream, Tokenizer
from unpad.errors import NonFiniteError, RecipeError
from unpad.models.contract import Generates
from unpad.nn.cache import CachedRow, KeyValueCache
from unpad.nn.linear import independent_rows, keep_copies, reading
from unpad.nn.precision import Precision, autocast
from unpad.recipes.training import GenerateSettings
from unpad.terminal.table import number_of

Finished = Literal["eos", "length", "context"]
# Token ids, or a flat batch of them with images among the tokens.
Prompts = Sequence[Sequence[int]] | RaggedBatch
GREEDY_BELOW = 1e-4  # a lower temperature only overflows


@dataclass(frozen=True)
class Completion:
    """Continuation of a prompt: ids without EOS, their text, and the reason it ended.

    finished: "eos", the model ended it; "length", max_new_tokens; "context", the model's positions ran out.
    """

    ids: list[int]
    text: str
    finished: Finished


def complete(
    model: Generates,
    tokenizer: Tokenizer,
    prompts: Prompts,
    settings: GenerateSettings,
    precision: Precision = "fp32",
    seeds: Sequence[int] | None = None,
) -> list[Completion]:
    """Continue every prompt. Raises as `generate` does."""
    stops, banned = sorted(tokenizer.stop_ids), banned_ids(model, tokenizer)
    all_ids = generate(model, prompts, settings, eos_id=stops, banned=banned, precision=precision, seeds=seeds)
    limits = token_limits(model, token_lists(prompts), settings)
    return [
        Completion(ids, tokenizer.decode(ids), _why_finished(len(ids), limit, settings))
        for ids, limit in zip(all_ids, limits.tolist(), strict=True)
    ]


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
    steps = _steps(model, prompts, settings, stops, banned, seeds)
    all_rows, all_tokens = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    with _running(model, precision):
        for rows, tokens in steps:
            all_rows.append(rows)
            all_tokens.append(tokens)
    flat_rows, flat_tokens = np.concatenate(all_rows), np.concatenate(all_tokens)
    order = np.argsort(flat_rows, kind="stable")
    num = len(token_lists(prompts))
    cuts = np.cumsum(np.bincount(flat_rows, minlength=num))[:-1]
    return [part.tolist() for part in np.split(flat_tokens[order], cuts)] if num else []


def stream(
    model: Generates,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    settings: GenerateSettings,
    precision: Precision = "fp32",
    seed: int | None = None,
) -> Iterator[str]:
    """Yield the continuation of one prompt as it is generated, never splitting a character. Raises as `generate` does.

    Args:
        seed: of the draws; default settings.seed.
    """
    seeds = None if seed is None else [seed]
    stops, banned = sorted(tokenizer.stop_ids), banned_ids(model, tokenizer)
    steps = _steps(model, [prompt_ids], settings, stops, banned, seeds)
    decoder = DecodeStream(tokenizer)
    while True:
        with _running(model, precision, decoder):  # per step: between steps the caller has its own modes
            step = next(steps, None)
        if step is None:
            break
        for token in step[1].tolist():
            if text := decoder.push(token):
                yield text
    if text := decoder.flush():
        yield text


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


def token_limits(model: Generates, prompts: Sequence[Sequence[int]], settings: GenerateSettings) -> np.ndarray:
    """Most new tokens of each prompt, (num_prompts,) int64: every position predicts one token."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int64)
    return np.minimum(settings.max_new_tokens, model.config.longest - lengths + 1)


def _why_finished(num_ids: int, limit: int, settings: GenerateSettings) -> Finished:
    if num_ids < limit:
        return "eos"
    return "length" if limit == settings.max_new_tokens else "context"


@contextmanager
def _running(model: Generates, precision: Precision, owner: object | None = None) -> Iterator[None]:
    """Without gradients and dropout, products in `precision`; the model's mode is restored.

    Args:
        owner: as long as it lives, later calls reuse the copies of the weights in `precision`.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), autocast(precision, _device(model)), keep_copies(owner), independent_rows():
            yield
    finally:
        model.train(was_training)


def _device(model: Generates) -> torch.device:
    return next(model.parameters()).device


# --------------------------------------------------------------------------- read


def prefill(model: Generates, prompts: Prompts, most: int) -> tuple[KeyValueCache, Tensor]:
    """Read all prompts in one flat run.

    Args:
        most: tokens that no sequence will exceed, prompt included.

    Returns:
        The cache, and the hidden state of every prompt's last token, (num_prompts, width).
    """
    if isinstance(prompts, RaggedBatch):
        batch = prompts.to(_device(model))
    else:
        batch = from_prompts(prompts).to(_device(model))
    assert isinstance(batch.layout, Layout)
    cache = KeyValueCache([CachedRow(max(most, length)) for length in batch.layout.lengths().tolist()])
    cache.begin(batch.layout.lengths().tolist())
    with reading():
        return cache, model.last_hidden(batch, cache)


def advance(model: Generates, cache: KeyValueCache, tokens: Tensor) -> Tensor:
    """Read one more token per row, (num_rows,) int64; return its hidden state, (num_rows, width)."""
    device = _device(model)
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


# --------------------------------------------------------------------------- one token per step


def _steps(
    model: Generates,
    prompts: Prompts,
    settings: GenerateSettings,
    stop_ids: Sequence[int],
    banned: Sequence[int],
    seeds: Sequence[int] | None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (positions in `prompts`, their next tokens) of each step, without EOS. Input is checked at once."""
    texts = token_lists(prompts)
    _check(model, texts, settings)
    if not len(texts):
        return iter(())
    if settings.beams > 1:
        return _beam_steps(model, prompts, settings, stop_ids, banned)
    seeds = [settings.seed] * len(texts) if seeds is None else seeds
    assert len(seeds) == len(texts), "one seed per prompt"
    return _sample_steps(model, prompts, settings, stop_ids, banned, seeds)


def _check(model: Generates, prompts: Sequence[Sequence[int]], settings: GenerateSettings) -> None:
    longest = model.config.longest
    if not model.causal:
        raise RecipeError(
            "a model with causal: false cannot continue a text", where="model.causal", fix="set it to true"
        )
    if settings.beams > 1 and settings.temperature > GREEDY_BELOW:
        raise RecipeError(
            f"beams={settings.beams} search for the best text, temperature={settings.temperature} draws one",
            where="generate",
            fix="set generate.temperature=0 or generate.beams=1",
        )
    for position, prompt in enumerate(prompts):
        where = f"prompt {position}"
        if not len(prompt):
            raise RecipeError("the prompt has no tokens", where=where, fix="begin it with BOS at least")
        if len(prompt) > longest:
            raise RecipeError(
                f"the prompt has {number_of(len(prompt), 'tokens')}, the model's context is {longest}",
                where=where,
                fix=model.config.advice_beyond,
            )
        if not 0 <= min(prompt) <= max(prompt) < model.vocab_size:
            raise RecipeError(
                f"the prompt has ids {min(prompt)} to {max(prompt)}, the model knows 0 to {model.vocab_size - 1}",
                where=where,
                fix="encode it with the tokenizer of the model's run",
            )


def _sample_steps(
    model: Generates,
    prompts: Prompts,
    settings: GenerateSettings,
    stop_ids: Sequence[int],
    banned: Sequence[int],
    seeds: Sequence[int],
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    texts = token_lists(prompts)
    rows = np.arange(len(texts))  # the prompt that each row of the cache continues
    limits = token_limits(model, texts, settings)
    generators = [_generator(seed, text) for seed, text in zip(seeds, texts, strict=True)]
    scores = _Scores(model, texts, settings, banned)
    cache, hidden = prefill(model, prompts, _most_tokens(texts, limits))
    for step in count(1):
        logits = scores.of(hidden)
        if settings.temperature <= GREEDY_BELOW:
            tokens = logits.argmax(-1).cpu()
        else:
            uniform = torch.tensor([generators[row].random() for row in rows.tolist()], dtype=torch.float64)
            tokens = sample(logits.cpu().double(), settings, uniform)
        going = ~np.isin(tokens.numpy(), stop_ids)
        yield rows[going], tokens.numpy()[going]
        live = going & (limits[rows] > step)
        if not live.any():
            return
        if not live.all():
            order = cache.keep(live)
            rows, tokens = rows[order], tokens[torch.from_numpy(order)]
            scores.reorder(torch.from_numpy(order))
        scores.add(tokens)
        hidden = advance(model, cache, tokens)


def _generator(seed: int, prompt: Sequence[int]) -> np.random.Generator:
    """Generator of a prompt's draws, seeded also by its content: prompts with one seed draw independently of their
    places and of each other."""
    content = np.asarray(prompt, "<i8").tobytes()
    return np.random.default_rng([seed, int.from_bytes(blake2b(content, digest_size=8).digest(), "little")])


def _most_tokens(prompts: Sequence[Sequence[int]], limits: np.ndarray) -> int:
    """Tokens of the longest sequence to read; the last token of a sequence is never read."""
    return int(max(len(prompt) + limit - 1 for prompt, limit in zip(prompts, limits.tolist(), strict=True)))


class _Scores:
    """Logits without banned ids and with the repetition penalty.

    The penalty divides positive and multiplies negative logits of tokens that the prompt or the continuation holds
    (Keskar et al. 2019, arXiv 1909.05858, section 4.1).
    """

    def __init__(
        self, model: Generates, prompts: Sequence[Sequence[int]], settings: GenerateSettings, banned: Sequence[int]
    ) -> None:
        self._model, self._penalty = model, settings.repetition_penalty
        self._banned = torch.tensor(sorted(set(banned)), dtype=torch.int64, device=_device(model))
        self._used: Tensor | None = None  # (num_rows, vocab_size) bool
        if self._penalty != 1:
            self._used = torch.zeros(len(prompts), model.vocab_size, dtype=torch.bool, device=_device(model))
            for row, prompt in enumerate(prompts):
                self._used[row, torch.tensor(prompt, device=_device(model))] = True

    def of(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, (num_rows, vocab_size), fp32 or wider.

        Raises:
            NonFiniteError: one is NaN or infinite.
        """
        logits = self._model.logits(hidden)
        if not bool(logits.sum().isfinite()):
            raise NonFiniteError(
                "the model's scores are not finite", fix="use an earlier checkpoint, or precision fp32"
            )
        if self._used is not None:
            penalised = torch.where(logits > 0, logits / self._penalty, logits * self._penalty)
            logits = torch.where(self._used, penalised, logits)
        return logits.index_fill_(-1, self._banned, -math.inf)

    def add(self, tokens: Tensor) -> None:
        """Add the next token of each row, (num_rows,)."""
        if self._used is not None:
            self._used.scatter_(1, tokens.to(self._used.device)[:, None], True)

    def reorder(self, rows: Tensor) -> None:
        if self._used is not None:
            self._used = self._used[rows.to(self._used.device)]


def sample(logits: Tensor, settings: GenerateSettings, uniform: Tensor) -> Tensor:
    """Draw a token per row from softmax(logits / temperature), cut to the top_k most likely and then to top_p.

    top_p keeps the smallest set of most likely tokens that reaches this share of the probability left by top_k
    (Holtzman et al. 2019, arXiv 1904.09751).

    Args:
        logits: (num_rows, vocab_size) fp64.
        uniform: (num_rows,) fp64 in [0, 1), places in the cumulative distribution.

    Returns:
        (num_rows,) int64.
    """
    probabilities, candidates = (logits / settings.temperature).softmax(-1), None
    if settings.top_k:
        probabilities, candidates = probabilities.topk(min(settings.top_k, logits.shape[-1]), -1)  # descending
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    if settings.top_p < 1:
        if candidates is None:
            probabilities, candidates = _most_likely(probabilities, settings.top_p)
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= settings.top_p, 0)
    cumulative = probabilities.cumsum(-1)
    # right: a token of probability 0 has the same cumulative value as the token before it and is never the first above.
    chosen = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)
    return (chosen if candidates is None else candidates.gather(-1, chosen))[:, 0]


def _most_likely(probabilities: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """The most likely tokens of every row, descending, and their ids: enough to reach `share`, or all.

    Each row is sorted as it would be alone, so that ties do not depend on the others.
    """
    vocab = probabilities.shape[-1]
    values, ids = probabilities.topk(min(256, vocab), -1)  # sorting a whole vocabulary costs more than the model
    flat = values.sum(-1) < share
    if bool(flat.any()):
        values, ids = (F.pad(x, (0, vocab - x.shape[-1])) for x in (values, ids))
        values[flat], ids[flat] = probabilities[flat].sort(dim=-1, descending=True, stable=True)
    return values, ids


# --------------------------------------------------------------------------- beam search


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

    def select(self, live: Tensor) -> _Beams:
        return _Beams(**{name: value[live] for name, value in vars(self).items()})


def _beam_steps(
    model: Generates, prompts: Prompts, settings: GenerateSettings, stop_ids: Sequence[int], banned: Sequence[int]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Search for the text of highest log probability per token; yield each prompt's once it is known.

    A prompt ends when no continuation can beat its best finished text: log probabilities are never positive, so
    a text's score never rises above its sum over the longest length allowed.
    """
    texts = token_lists(prompts)
    num, width = len(texts), settings.beams
    limits = token_limits(model, texts, settings)
    scores = _Scores(model, texts, settings, banned)
    cache, hidden = prefill(model, prompts, _most_tokens(texts, limits))
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
            text = beams.best_texts[row, : beams.best_lengths[row]].numpy()
            yield np.full(text.size, int(beams.prompts[row])), text
        if bool(done.all()):
            return
        kept = (parents + width * torch.arange(len(parents))[:, None])[~done].flatten()
        beams = beams.select(~done)
        cache.reorder(kept)
        scores.reorder(kept)
        tokens = beams.texts[:, :, -1].flatten()
        scores.add(tokens)
        hidden = advance(model, cache, tokens)


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
    sums, flat = totals.topk(
        min((1 + len(stop_ids)) * width, totals.shape[1]), -1
    )  # (num_live, candidates), descending
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
