"""Openings of held-out documents, to see how a model continues unseen text."""

from __future__ import annotations

import numpy as np

from unpad.data.sources.split import Split
from unpad.data.text import TextData
from unpad.errors import SourceError
from unpad.inference.loaded import LoadedRun

OPENING_TOKENS = 12
SHORTEST = 2 * OPENING_TOKENS


def heldout_openings(run: LoadedRun, num: int) -> list[str]:
    """The first tokens of held-out texts, picked by the run's seed.

    Raises:
        SourceError: no held-out text is long enough to be cut.
    """
    data = run.data()
    if not isinstance(data, TextData):
        raise SourceError("the run holds no texts out", where=str(run.folder), fix="see `unpad eval`")
    tokens = data.tokens
    ids = np.flatnonzero((tokens.split == Split.HOLDOUT) & (tokens.kind == 0) & (tokens.lengths >= SHORTEST))
    if ids.size == 0:
        raise SourceError(
            f"no held-out text has {SHORTEST} tokens", where="data.holdout", fix="give openings yourself with --prompt"
        )
    chosen = np.random.default_rng(run.recipe.train.seed).permutation(ids)[:num]
    return [run.tokenizer.decode(tokens.tokens(int(i))[: OPENING_TOKENS + 1].tolist()) for i in chosen]
