"""`unpad eval`: the held-out metrics of a run's task."""

from __future__ import annotations

import numpy as np
import torch

from unpad.errors import SourceError
from unpad.evaluate.replies import accuracy, answer, with_keywords
from unpad.evaluate.text import Metric, document_nll, summarise
from unpad.run import LoadedRun, load
from unpad.tokens.corpus import KINDS, TokenSet


def evaluate_run(name: str, num_replies: int = 0) -> tuple[dict[str, Metric], list[str]]:
    """Measure a run on the documents it held out, in fp32, so that no number depends on batching or hardware format.

    Measured are the kinds of data that the last stage trained on: `loss`, `perplexity`, `bits_per_char` and
    `bits_per_byte`, with `text_` or `chat_` before them when there are both. `keywords_trained` and `keywords_heldout`
    are the shares of questions whose reply holds every required word.

    Args:
        num_replies: how many trained and held-out questions to show, picked by the run's seed.

    Returns:
        Metrics, and lines with questions and replies.

    Raises:
        SourceError: nothing is held out.
    """
    run = load(name)
    tokens = run.tokens()
    used = run.recipe.stages[-1].use if run.recipe.stages else KINDS
    kinds = [k for k, kind in enumerate(KINDS) if kind in used and np.any((tokens.split == 1) & (tokens.kind == k))]
    if not kinds:
        raise SourceError("the run holds nothing out", where="data.holdout", fix="train with data.holdout=0.05")
    metrics: dict[str, Metric] = {}
    lines: list[str] = []
    for kind in kinds:
        measured = _text(run, tokens, np.flatnonzero((tokens.split == 1) & (tokens.kind == kind)))
        prefix = f"{KINDS[kind]}_" if len(kinds) > 1 else ""
        metrics |= {prefix + key: metric for key, metric in measured.items()}
    for split, label in ((0, "trained"), (1, "heldout")):
        ids = with_keywords(tokens, split, run.recipe.train.seed)
        if ids.size:
            replies = answer(run, tokens, ids)
            metrics[f"keywords_{label}"] = accuracy(replies)
            for pick in np.random.default_rng(run.recipe.train.seed).permutation(len(replies))[:num_replies]:
                chosen = replies[pick]
                lines += [f"{label + ' question':<18}{chosen.question}", f"{'reply':<18}{chosen.reply}"]
    return metrics, lines


def _text(run: LoadedRun, tokens: TokenSet, ids: np.ndarray) -> dict[str, Metric]:
    sums = document_nll(
        run.model, tokens, ids,
        settings=run.recipe.plan, pad_id=run.tokenizer.pad_id, device=torch.device("cpu"),
    )  # fmt: skip
    return summarise(sums)
