"""Shares of the micro-batches of an update among processes, by cost.

Costs are in tokens: all computation for one token except attention costs 1. Padding and filler count.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

import numpy as np

from unpad.batching.grouping import sum_runs
from unpad.batching.plan import Micro, Plan


def micro_cost(micro: Micro, cells_per_token: float, attended: np.ndarray | None = None) -> float:
    """Cost of a micro-batch: its computed tokens plus its attention cells divided by `cells_per_token`.

    Args:
        cells_per_token: number of pairs of positions that cost as much attention as the rest of one token, above 0;
            infinite for a model without attention between positions.
        attended: as in `SequenceTable`, number of vectors of every sequence that attend to each other, indexed by
            sequence id, (num_sequences,) int; None: its positions do.
    """
    lengths = (micro.stops - micro.starts).astype(np.int64)
    tokens, sides = int(lengths.sum()), lengths if attended is None else attended[micro.seq_ids].astype(np.int64)
    if micro.pad_to:
        tokens = len(lengths) * micro.pad_to
        sides = np.full(len(lengths), micro.pad_to if attended is None else sides.max(initial=0), np.int64)
    filler = max(micro.fill_to - tokens, 0)  # sequences of one token
    return tokens + filler + (int(np.square(sides).sum()) + filler) / cells_per_token


def micro_costs(made: Plan, cells_per_token: float, attended: np.ndarray | None = None) -> np.ndarray:
    """`micro_cost` of every micro-batch of a plan, (num_micros,) fp64."""
    pieces, offsets = made.pieces, made.micro_offsets
    lengths = pieces.lengths[made.order].astype(np.int64)
    counts, pad_to = np.diff(offsets), made.pad_to.astype(np.int64)
    sides, widest = lengths, pad_to
    if attended is not None:
        sides = attended[pieces.seq_ids[made.order]].astype(np.int64)
        widest = np.maximum.reduceat(sides, offsets[:-1]) if len(counts) else pad_to
    tokens = np.where(pad_to > 0, counts * pad_to, sum_runs(lengths, offsets))
    cells = np.where(pad_to > 0, counts * np.square(widest), sum_runs(np.square(sides), offsets))
    filler = np.maximum(made.fill_to - tokens, 0)
    costs: np.ndarray = tokens + filler + (cells + filler) / cells_per_token
    return costs


def assign(costs: Sequence[float], num_shares: int) -> list[list[int]]:
    """Indices of pieces of work for each of `num_shares` processes, each ascending.

    Each piece goes, most expensive first, to the process with the lowest cost so far (Graham 1969, "Bounds on
    multiprocessing timing anomalies", longest processing time first): the most expensive share is at most 4/3 of the
    optimum. Ties go to the earlier piece and the lower process, so equal arguments give equal shares.
    """
    loads, shares = [(0.0, share) for share in range(num_shares)], [list[int]() for _ in range(num_shares)]
    heapify(loads)
    for piece in np.argsort(-np.asarray(costs, np.float64), kind="stable").tolist():
        load, least = loads[0]
        heapreplace(loads, (load + float(costs[piece]), least))
        shares[least].append(piece)
    return [sorted(share) for share in shares]


def assign_equally(costs: Sequence[float], num_shares: int) -> list[list[int]]:
    """Equal numbers of pieces of work for each of `num_shares` processes, the most expensive first.

    The pieces are taken in descending order of cost, `num_shares` at a time; the most expensive one goes to the process
    with the lowest cost so far. So the pieces at one place of all shares cost about the same, for processes that wait
    for each other after each piece.

    Args:
        costs: cost of each piece; their number is a multiple of `num_shares`.
    """
    order = np.argsort(-np.asarray(costs, np.float64), kind="stable").reshape(-1, num_shares)
    loads, shares = np.zeros(num_shares), [list[int]() for _ in range(num_shares)]
    for turn in order.tolist():
        for piece, share in zip(turn, np.argsort(loads, kind="stable").tolist(), strict=True):
            loads[share] += costs[piece]
            shares[share].append(piece)
    return shares
