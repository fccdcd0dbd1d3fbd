"""Shares of the micro-batches of an update among processes, by cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unpad.batching.plan import Micro


def micro_cost(micro: Micro, cells_per_token: float) -> float:
    """Cost of a micro-batch in tokens: computed tokens, and cells of attention at `cells_per_token` for one.

    Args:
        cells_per_token: pairs of positions whose attention costs as much as everything else of one token.
    """
    lengths = (micro.stops - micro.starts).astype(np.float64)
    if micro.pad_to:
        lengths = np.full(len(lengths), float(micro.pad_to))
    tokens = max(float(lengths.sum()), float(micro.fill_to))
    return tokens + float(np.square(lengths).sum()) / cells_per_token


def assign(costs: Sequence[float], num_shares: int) -> list[list[int]]:
    """Indices of pieces of work for each of `num_shares` processes, each ascending.

    The dearest piece first to the process with the least so far (Graham 1969, longest processing time first); at most
    4/3 of the best possible. Equal arguments give equal shares.
    """
    loads, shares = np.zeros(num_shares), [list[int]() for _ in range(num_shares)]
    for piece in np.argsort(-np.asarray(costs, np.float64), kind="stable").tolist():
        least = int(loads.argmin())
        loads[least] += costs[piece]
        shares[least].append(piece)
    return [sorted(share) for share in shares]
