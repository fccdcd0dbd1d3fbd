"""Balance of a plan's updates among processes, and sizes that would give all of them work.

Every process takes its share of an update by `assign`, and the update ends with the most expensive share. Costs are in
tokens: all computation for one token except attention costs 1. Padding and filler count, communication does not.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    return tokens + filler + (cells + filler) / cells_per_token


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


MOST_UPDATES = 2000  # of a plan that are shared out; longer plans are sampled evenly down to this number
BUSY = 0.9  # mean over maximum of the cost per process from which on all count as busy
MICROS_EACH = (1, 2, 3, 4)  # micro-batches per process of the cuts that are tried
ROOM = (1.0, 1.03, 1.1)  # of their tokens over an even cut
MOST_EACH = 64  # micro-batches per process of an update that fills processes
DRAWN_MICROS = 4096  # of all updates that are drawn to find that one
WHOLE_MICROS = 0.97  # size of an update that is to have this number of micro-batches, and not one more


@dataclass(frozen=True)
class Balance:
    """Balance of a plan among a number of processes.

    Args:
        efficiency: cost of the real tokens over the cost of all processes from the beginning to the end of every
            update: the mean over the maximum of the cost per process, with padding and filler as waste.
        bound: efficiency if micro-batches could be cut anywhere but inside a sequence: a share then costs at least as
            much as the most expensive sequence of its update.
        idle: processes without a micro-batch in most updates.
    """

    processes: int
    efficiency: float
    bound: float
    idle: int


class Costs:
    """Costs of a plan's pieces and micro-batches.

    Args:
        made: the plan.
        cells_per_token, attended: as in `shares.micro_cost`.

    Attributes:
        micros: (num_micros,) fp64.
        pieces: without padding, in the order of the plan, (num_pieces,) fp64.
        tokens: real tokens of the most expensive piece; 0 for an empty plan.
    """

    def __init__(self, made: Plan, cells_per_token: float, attended: np.ndarray | None = None) -> None:
        pieces = made.pieces.take(made.order)
        lengths = pieces.lengths.astype(np.int64)
        sides = lengths if attended is None else attended[pieces.seq_ids].astype(np.int64)
        self.made, self.micros = made, micro_costs(made, cells_per_token, attended)
        self.pieces = lengths + np.square(sides) / cells_per_token
        self.tokens = int(lengths[self.pieces.argmax()]) if len(lengths) else 0

    @property
    def largest(self) -> float:
        """Cost of the most expensive piece."""
        return float(self.pieces.max(initial=0))

    def balance(self, processes: int) -> Balance:
        """Share the updates out among `processes` processes."""
        made = self.made
        if not made.num_steps:
            return Balance(processes, 1.0, 1.0, processes)
        updates = np.unique(np.linspace(0, made.num_steps - 1, MOST_UPDATES).round().astype(np.int64))
        first, last = made.step_offsets[updates], made.step_offsets[updates + 1]
        runs = list(zip(made.micro_offsets[first], made.micro_offsets[last], strict=True))
        useful = np.array([self.pieces[begin:end].sum() for begin, end in runs])
        largest = np.array([self.pieces[begin:end].max() for begin, end in runs])
        micros = [self.micros[begin:end] for begin, end in zip(first, last, strict=True)]
        spent = sum(_largest_share(costs, processes) for costs in micros)
        return Balance(
            processes,
            efficiency=float(useful.sum()) / (processes * spent),
            bound=float(useful.sum() / np.maximum(useful, processes * largest).sum()),
            idle=_idle(last - first, processes),
        )

    def fill_tokens(self, processes: int) -> int | None:
        """Real tokens of the smallest update that keeps `processes` processes at least BUSY, with two or more
        micro-batches each, padding aside; None if MOST_EACH each do not, and for an empty plan.

        Updates are drawn from the micro-batches of this plan, which should be those of updates much larger than one
        micro-batch.
        """
        if not len(self.micros):
            return None
        whole = slice(max(len(self.micros) - 1, 1))  # the last may be what was left over
        micros, per_micro = self.micros[whole], float(self.made.micro_tokens[whole].mean())
        rng, each = np.random.default_rng(0), 2
        while each <= MOST_EACH:
            drawn = rng.choice(micros, (max(DRAWN_MICROS // (each * processes), 2), each * processes))
            spent = sum(_largest_share(update, processes) for update in drawn)
            if float(drawn.sum()) >= BUSY * processes * spent:  # sequences without tokens fill no update
                return math.floor(WHOLE_MICROS * each * processes * per_micro) or None
            each += math.ceil(each / 4)
        return None


def _largest_share(costs: np.ndarray, processes: int) -> float:
    """Cost of the most expensive share of `shares.assign`."""
    if len(costs) <= processes:
        return float(costs.max())
    loads = [0.0] * processes
    for cost in np.sort(costs)[::-1].tolist():
        heapreplace(loads, loads[0] + cost)
    return max(loads)


def _idle(micros: np.ndarray, processes: int) -> int:
    """Number of processes without work in most updates, given the micro-batches of each, (num_updates,) int."""
    working = sum(2 * int((micros > rank).sum()) >= len(micros) for rank in range(min(processes, int(micros.max()))))
    return processes - working


# --------------------------------------------------------------------------- a finer cut


@dataclass(frozen=True)
class BalancedSize:
    """A smaller `plan.tokens_per_micro`, and the balance that it gives."""

    tokens_per_micro: int
    balance: Balance


def finer_cut(
    replan: Callable[[int], Plan],
    tokens_per_micro: int,
    processes: int,
    cells_per_token: float,
    attended: np.ndarray | None = None,
) -> BalancedSize | None:
    """Find a `plan.tokens_per_micro` with which every process has work in most updates.

    Tries sizes that cut the median update into MICROS_EACH micro-batches per process until one reaches an efficiency of
    BUSY, and takes the best. Each size gets some ROOM: whole sequences leave some of it empty, and one micro-batch more
    than processes would keep all of them waiting.

    Args:
        replan: a plan of the same sequences with another `plan.tokens_per_micro`.
        tokens_per_micro: the one in use; the result is smaller.
        processes: number of them; cells_per_token, attended: as in `shares.micro_cost`.

    Returns:
        None if no such size gives every process work: an update has too few sequences, or the strategy does not cut by
        this setting.
    """
    made = replan(tokens_per_micro)
    if not made.num_steps:
        return None
    update = float(np.median(sum_runs(made.micro_tokens, made.step_offsets)))
    best: BalancedSize | None = None
    for each in MICROS_EACH:
        sizes = (math.ceil(room * update / (each * processes)) for room in ROOM)
        cuts = [
            BalancedSize(size, Costs(replan(size), cells_per_token, attended).balance(processes))
            for size in sizes
            if 0 < size < tokens_per_micro
        ]
        useful = [cut for cut in cuts if not cut.balance.idle]
        best = max([*([] if best is None else [best]), *useful], key=lambda cut: cut.balance.efficiency, default=None)
        if best is not None and best.balance.efficiency >= BUSY:
            break
    return best
