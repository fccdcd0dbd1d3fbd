"""Rows of pairs, encoded as two conversations each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from unpad.data.sources.example import Example
from unpad.errors import SourceError


def both_replies(examples: Sequence[Example]) -> list[Example]:
    """Every pair as two conversations, one with the chosen and one with the rejected reply at its end."""
    every = []
    for example in examples:
        assert example.rejected is not None, "an example of a pair"
        every += [example, replace(example, turns=(*example.turns[:-1], example.rejected))]
    return every


def keep_last_reply(examples: Sequence[Example], loss_mask: np.ndarray, offsets: np.ndarray) -> None:
    """Leave loss on the last reply of every conversation alone, in place; those before it belong to the prompt.

    Args:
        loss_mask: (num_tokens,) bool; offsets: (num_examples + 1,) int64.

    Raises:
        SourceError: the tokens with loss of one of several replies are not in one run.
    """
    for example, (start, stop) in zip(examples, pairwise(offsets.tolist()), strict=True):
        mask, num_replies = loss_mask[start:stop], sum(turn.role == "assistant" for turn in example.turns)
        if num_replies == 1:
            continue
        begins = np.flatnonzero(mask[1:] & ~mask[:-1]) + 1  # the first token, BOS or of a prompt, carries no loss
        if len(begins) != num_replies:
            what = f"{num_replies} replies have {len(begins)} runs of tokens to learn, so the last reply is not known"
            fix = "use prompts with one message, or another chat template"
            raise SourceError(f"E_TEMPLATE {what}", where=example.where, fix=fix)
        mask[: begins[-1]] = False
