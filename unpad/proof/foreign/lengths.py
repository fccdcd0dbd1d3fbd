"""Models whose numbers for a token depend on the length of its row above a limit of their configuration.

`longrope` (Ding et al. 2024, arXiv 2402.13753) and `dynamic` rotary frequencies are those of the longest sequence of a
batch; the temperature of queries of Llama 4 counts indices of the row. In rows up to the limit sequences stay apart.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from unpad.errors import RecipeError

T = TypeVar("T")


class RowLimit(NamedTuple):
    """Most tokens of a row in which no token's numbers depend on what is beside its sequence, and the kind of field."""

    tokens: int
    kind: str


def row_limit(fields: dict[str, Any]) -> RowLimit | None:
    """The limit of a language model by the fields of its configuration; None for most models."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    limits = list[RowLimit]()
    for part in [part for part in rope.values() if isinstance(part, dict)] or [rope]:  # of each type of layers, or one
        kind, limit = part.get("rope_type", part.get("type")), fields.get("max_position_embeddings")
        if kind == "longrope":
            name = "original_max_position_embeddings"
            limit = part.get(name) or fields.get(name) or limit
        if kind in ("longrope", "dynamic") and limit:
            limits.append(RowLimit(int(limit), kind))
    if fields.get("attn_temperature_tuning") and fields.get("floor_scale"):
        limits.append(RowLimit(int(fields["floor_scale"]) - 1, "floor_scale"))
    return min(limits, default=None)


def refuse_long(limit: RowLimit | None, tokens: int) -> None:
    """Refuse a flat batch of several sequences in which they would change each other's numbers.

    Raises:
        RecipeError: it has more tokens than the limit.
    """
    if limit is not None and tokens > limit.tokens:
        raise RecipeError(
            f"a flat batch of {tokens:,} tokens, and above {limit.tokens:,} numbers depend on the length of the row "
            f"({limit.kind})",
            fix=f"set tokens_per_micro and tokens_per_eval to {limit.tokens} or less, and leave out or cut sequences "
            "that are longer; padded batches have the same fault",
        )


def within(sequences: Sequence[T], lengths: Sequence[int], limit: RowLimit | None) -> list[list[T]]:
    """Runs of sequences, in order, of at most as many tokens as a row may have, or of one sequence."""
    most, runs, tokens = math.inf if limit is None else limit.tokens, list[list[T]](), math.inf
    for sequence, length in zip(sequences, lengths, strict=True):
        if tokens + length > most or not runs:
            runs.append([])
            tokens = 0
        runs[-1].append(sequence)
        tokens += length
    return runs
