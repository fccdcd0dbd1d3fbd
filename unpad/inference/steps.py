"""Parts of generation: prompts read, one more token per row, scores and draws.

On the CPU a decoder's scores have the same bits for a prompt alone and among others: inside `independent_rows` no row's
products, activation, attention or draw look at the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from unpad.batching.batch import RaggedBatch, from_prompts
from unpad.batching.layout import Layout
from unpad.data.tokens.tokenizer import Tokenizer
from unpad.errors import RecipeError
from unpad.models.contract import Generates
from unpad.nn.cache import CachedRow, KeyValueCache
from unpad.nn.linear import independent_rows, keep_copies, reading
from unpad.nn.precision import Precision, autocast
from unpad.recipes.training import GenerateSettings
from unpad.terminal.table import number_of

# Token ids, or a flat batch of them with images among the tokens.
Prompts = Sequence[Sequence[int]] | RaggedBatch
GREEDY_BELOW = 1e-4  # a lower temperature only overflows


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


def check(model: Generates, prompts: Sequence[Sequence[int]], settings: GenerateSettings) -> None:
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


# --------------------------------------------------------------------------- read


@contextmanager
def running(model: Generates, precision: Precision, owner: object | None = None) -> Iterator[None]:
    """Without gradients and dropout, products in `precision`; the model's mode is restored.

    Args:
        owner: as long as it lives, later calls reuse the copies of the weights in `precision`.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), autocast(precision, device_of(model)), keep_copies(owner), independent_rows():
            yield
    finally:
        model.train(was_training)


def device_of(model: Generates) -> torch.device:
    return next(model.parameters()).device


def prefill(model: Generates, prompts: Prompts, most: int) -> tuple[KeyValueCache, Tensor]:
    """Read all prompts in one flat run.

    Args:
        most: tokens that no sequence will exceed, prompt included.

    Returns:
        The cache, and the hidden state of every prompt's last token, (num_prompts, width).
    """
    if isinstance(prompts, RaggedBatch):
        batch = prompts.to(device_of(model))
    else:
        batch = from_prompts(prompts).to(device_of(model))
    assert isinstance(batch.layout, Layout)
    cache = KeyValueCache([CachedRow(max(most, length)) for length in batch.layout.lengths().tolist()])
    cache.begin(batch.layout.lengths().tolist())
    with reading():
        return cache, model.last_hidden(batch, cache)


def advance(model: Generates, cache: KeyValueCache, tokens: Tensor) -> Tensor:
    """Read one more token per row, (num_rows,) int64; return its hidden state, (num_rows, width)."""
    device = device_of(model)
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


# --------------------------------------------------------------------------- draw


def generator_of(seed: int, prompt: Sequence[int]) -> np.random.Generator:
    """Generator of a prompt's draws, seeded also by its content: prompts with one seed draw independently of their
    places and of each other."""
    content = np.asarray(prompt, "<i8").tobytes()
    return np.random.default_rng([seed, int.from_bytes(blake2b(content, digest_size=8).digest(), "little")])


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
