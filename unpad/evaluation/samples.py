"""Replies of a text model to prompts of its held-out data, which a run keeps at its end."""

from __future__ import annotations

import numpy as np

from unpad.data.sources.split import Split
from unpad.data.text import TOKENIZER, TextData
from unpad.data.tokens.tokenizer import load_tokenizer
from unpad.evaluation.openings import OPENING_TOKENS, SHORTEST
from unpad.evaluation.replies import question
from unpad.inference.generate import complete
from unpad.inference.loaded import generation_precision
from unpad.models.contract import Generates
from unpad.recipes.recipe import Recipe

NUM_SAMPLES, MAX_TOKENS = 4, 60


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
            opening = tokens.tokens(index)[: OPENING_TOKENS + 1].tolist()
            prompts.append(question(tokens, index) if kind != "text" else opening)
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
