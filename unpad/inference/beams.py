"""Beam search: the text of highest log probability per token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor
from torch.nn import functional as F

from unpad.errors import NonFiniteError
from unpad.inference.engine import Prompts, advance, device_of, prefill, token_limits, token_lists
from unpad.models.contract import Generates
from unpad.recipes.training import GenerateSettings


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
    cache, hidden = prefill(
        model, prompts, max(len(text) + limit - 1 for text, limit in zip(texts, limits.tolist(), strict=True))
    )
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


class _Scores:
    """Logits without banned ids and with the repetition penalty.

    The penalty divides positive and multiplies negative logits of tokens that the prompt or the continuation holds
    (Keskar et al. 2019, arXiv 1909.05858, section 4.1).
    """

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
            penalised = torch.where(logits > 0, logits / self._penalty, logits * self._penalty)
            logits = torch.where(self._used, penalised, logits)
        if not bool(logits.sum().isfinite()):
            raise NonFiniteError(
                "the model's scores are not finite", fix="use an earlier checkpoint, or precision fp32"
            )
        return logits.index_fill_(-1, self._banned, -math.inf)

    def add(self, tokens: Tensor) -> None:
        """Add the next token of each row, (num_rows,)."""
        if self._used is not None:
            self._used.scatter_(1, tokens.to(self._used.device)[:, None], True)

    def reorder(self, rows: Tensor) -> None:
        if self._used is not None:
            self._used = self._used[rows.to(self._used.device)]
