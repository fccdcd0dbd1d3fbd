"""Models whose numbers for a token depend on the length of the row above a threshold of their configuration.

`longrope` (Ding et al. 2024, arXiv 2402.13753) and `dynamic` rotary frequencies are those of the longest sequence of a
batch; the temperature of queries of Llama 4 counts indices of the row. Below the threshold sequences stay apart.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from unpad.errors import RecipeError

T = TypeVar("T")


def thresholds(fields: dict[str, Any]) -> dict[str, int]:
    """Lengths in tokens above which a token's numbers depend on what is beside its sequence, by kind.

    Args:
        fields: of the configuration of a language model.
    """
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    found: dict[str, int] = {}
    for part in [part for part in rope.values() if isinstance(part, dict)] or [rope]:  # of each type of layers, or one
        kind, limit = part.get("rope_type", part.get("type")), fields.get("max_position_embeddings")
        if kind == "longrope":
            name = "original_max_position_embeddings"
            limit = part.get(name) or fields.get(name) or limit
        if kind in ("longrope", "dynamic") and limit:
            found[kind] = int(limit)
    if fields.get("attn_temperature_tuning") and fields.get("floor_scale"):
        found["floor_scale"] = int(fields["floor_scale"]) - 1
    return found


def refuse_lengths(limits: dict[str, int], lengths: np.ndarray, tokens: int) -> None:
    """Refuse sequences that would change each other's numbers in one flat batch.

    Args:
        limits: of `thresholds`.
        lengths: tokens per sequence, (num_seqs,) int.
        tokens: of the batch.

    Raises:
        RecipeError: names the threshold, and what keeps below it.
    """
    if len(lengths) < 2:
        return
    for kind, limit in limits.items():
        longest, num_long = int(lengths.max()), int((lengths > limit).sum())
        if kind == "floor_scale" and tokens > limit:
            what = (
                f"a flat batch of {tokens:,} tokens, and queries are scaled by the index in the row from {limit:,} on"
            )
            raise RecipeError(f"{what} ({kind})", fix=f"set tokens_per_micro and tokens_per_eval to {limit} or less")
        if num_long and kind in ("longrope", "dynamic") and (kind == "dynamic" or num_long < len(lengths)):
            what = (
                f"{num_long:,} of {len(lengths):,} sequences are longer than {limit:,} tokens, the longest {longest:,}"
            )
            raise RecipeError(
                f"{what}, and the rotary frequencies of a batch are those of its longest sequence ({kind})",
                fix=f"leave out or cut those longer than {limit} tokens; padded batches have the same fault",
            )


def within(sequences: Sequence[T], lengths: Sequence[int], limits: dict[str, int]) -> list[list[T]]:
    """Runs of sequences, in order, that `refuse_lengths` lets through as flat batches where only their tokens count."""
    limit, runs, tokens = limits.get("floor_scale", math.inf), list[list[T]](), math.inf
    for sequence, length in zip(sequences, lengths, strict=True):
        if tokens + length > limit or not runs:
            runs.append([])
            tokens = 0
        runs[-1].append(sequence)
        tokens += length
    return runs
