"""Replies of a text model: scores by the keywords of each question, and those that a run keeps at its end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unpad.data.sources.split import Split
from unpad.data.text import TOKENIZER, TextData
from unpad.data.tokens.token_set import TokenSet
from unpad.data.tokens.tokenizer import load_tokenizer
from unpad.evaluation.metrics import Metric, mean_of
from unpad.inference.generate import complete
from unpad.inference.loaded import LoadedRun, generation_precision
from unpad.models.contract import Generates
from unpad.recipes.recipe import Recipe
from unpad.terminal.progress import progress
from unpad.terminal.table import number_of

MAX_QUESTIONS = 400
OPENING_TOKENS = 12
SHORTEST = 2 * OPENING_TOKENS  # text that is long enough to be cut
NUM_SAMPLES, MAX_TOKENS = 4, 60


@dataclass(frozen=True)
class JudgedReply:
    """A question of the data, the model's reply, and whether the reply holds every keyword."""

    question: str
    reply: str
    keywords: tuple[str, ...]
    right: bool


def answer(run: LoadedRun, tokens: TokenSet, seq_ids: np.ndarray) -> list[JudgedReply]:
    """Answer the first question of each conversation greedily and look for its keywords."""
    prompts = [question(tokens, int(i)) for i in seq_ids]
    settings = run.recipe.generate.model_copy(update={"temperature": 0.0, "beams": 1})
    with progress(f"answering {number_of(len(prompts), 'questions')}"):
        completions = complete(run.generator, run.tokenizer, prompts, settings)
    replies = []
    for i, prompt, made in zip(seq_ids, prompts, completions, strict=True):
        keywords = tokens.keywords(int(i))
        right = all(word in made.text for word in keywords)
        replies.append(JudgedReply(run.tokenizer.decode(prompt), made.text, keywords, right))
    return replies


def with_keywords(tokens: TokenSet, seq_ids: np.ndarray, seed: int, most: int = MAX_QUESTIONS) -> np.ndarray:
    """Those of some sequences that are original conversations and name keywords, at most `most`, drawn by seed."""
    ids = seq_ids[(tokens.kind[seq_ids] == 1) & (tokens.copy[seq_ids] == 0)]
    ids = np.array([i for i in ids if tokens.keywords(int(i))], np.int64)
    return ids if len(ids) <= most else np.sort(np.random.default_rng(seed).permutation(ids)[:most])


def accuracy(replies: list[JudgedReply], groups: np.ndarray | None = None, seed: int = 0) -> Metric:
    """Share of replies with all their keywords, with its interval over groups of questions, such as those on one fact.

    Args:
        groups: (num_replies,) as in `resample`.
    """
    return mean_of(np.array([reply.right for reply in replies], np.float64), groups, seed, share=True)


def question(tokens: TokenSet, index: int) -> list[int]:
    """The tokens before the first one that carries loss: the conversation up to its first reply."""
    ids, loss = tokens.tokens(index), tokens.loss_mask(index)
    question: list[int] = ids[: int(np.argmax(loss))].tolist()
    return question


def opening(tokens: TokenSet, index: int) -> list[int]:
    """The first tokens of a text."""
    opening: list[int] = tokens.tokens(index)[: OPENING_TOKENS + 1].tolist()
    return opening


def sample_replies(model: Generates, data: TextData, recipe: Recipe, kinds: tuple[str, ...]) -> list[tuple[str, str]]:
    """Prompts of held-out data, drawn by the run's seed, each with the model's likeliest continuation.

    Args:
        kinds: parts of the data to draw from, the later first.
    """
    tokens, tokenizer = data.tokens, load_tokenizer(data.files[TOKENIZER])
    draw, prompts = np.random.default_rng(recipe.train.seed), list[list[int]]()
    for kind in reversed(kinds):
        chosen = (tokens.split == Split.HOLDOUT) & (tokens.kind == data.kinds.index(kind)) & (tokens.copy == 0)
        ids = np.flatnonzero(chosen & ((kind != "text") | (tokens.lengths >= SHORTEST)))
        for index in draw.permutation(ids)[: NUM_SAMPLES - len(prompts)].tolist():
            prompts.append(question(tokens, index) if kind != "text" else opening(tokens, index))
    room = model.config.longest // 2  # for the prompt, and for the reply
    prompts = [prompt for prompt in prompts if 0 < len(prompt) <= room]
    if not prompts:
        return []
    limit = min(recipe.generate.max_new_tokens, MAX_TOKENS, room)
    settings = recipe.generate.model_copy(update={"temperature": 0.0, "beams": 1, "max_new_tokens": limit})
    was_training = model.training
    model.eval()
    replies = complete(model, tokenizer, prompts, settings, generation_precision(settings))
    model.train(was_training)
    return [(tokenizer.decode(prompt), made.text) for prompt, made in zip(prompts, replies, strict=True)]
