"""Scores of replies by the keywords of each question."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unpad.data.sources.split import Split
from unpad.data.tokens.token_set import TokenSet
from unpad.evaluation.metrics import Metric, interval, resample
from unpad.inference.generate import complete
from unpad.inference.loaded import LoadedRun

MAX_QUESTIONS = 400


@dataclass(frozen=True)
class Reply:
    """A question of the data, the model's reply, and whether the reply holds every keyword."""

    question: str
    reply: str
    keywords: tuple[str, ...]
    right: bool


def answer(run: LoadedRun, tokens: TokenSet, seq_ids: np.ndarray) -> list[Reply]:
    """Answer the first question of each conversation greedily and look for its keywords."""
    prompts = [question(tokens, int(i)) for i in seq_ids]
    settings = run.recipe.generate.model_copy(update={"temperature": 0.0, "beams": 1})
    replies = []
    for i, prompt, made in zip(
        seq_ids, prompts, complete(run.generator, run.tokenizer, prompts, settings), strict=True
    ):
        keywords = tokens.keywords(int(i))
        right = all(word in made.text for word in keywords)
        replies.append(Reply(run.tokenizer.decode(prompt), made.text, keywords, right))
    return replies


def with_keywords(tokens: TokenSet, split: Split, seed: int, most: int = MAX_QUESTIONS) -> np.ndarray:
    """Ids of original conversations of a split that name keywords, at most `most` of them, drawn by seed."""
    ids = np.flatnonzero((tokens.kind == 1) & (tokens.split == split) & (tokens.copy == 0))
    ids = np.array([i for i in ids if tokens.keywords(int(i))], np.int64)
    return ids if len(ids) <= most else np.sort(np.random.default_rng(seed).permutation(ids)[:most])


def accuracy(replies: list[Reply], seed: int = 0) -> Metric:
    """Share of replies with all their keywords, with a bootstrap interval over questions."""
    right = np.array([reply.right for reply in replies], np.float64)
    return interval(right.mean(), resample([right], seed)[0] / len(right), len(right))


def question(tokens: TokenSet, index: int) -> list[int]:
    """The tokens before the first one that carries loss: the conversation up to its first reply."""
    ids, loss = tokens.tokens(index), tokens.loss_mask(index)
    question: list[int] = ids[: int(np.argmax(loss))].tolist()
    return question
