"""Pieces: sequences cut to the length that the model sees."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from unpad.batching.grouping import with_others
from unpad.batching.ledger import Ledger, entry
from unpad.errors import PlanError
from unpad.recipes.training import PlanSettings
from unpad.terminal.table import number_of

# (seq_ids, starts, stops) -> targets with loss inside each span; all (n,) int.
TargetCount = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True, eq=False)
class Pieces:
    """Spans [start, stop) of sequences, in the order of the sequences.

    Args:
        seq_ids: (num_pieces,) int64.
        starts, stops: (num_pieces,) int32, positions of the sequence.
        first_target: (num_pieces,) int32, first position with a target that counts; `start` unless windows overlap.
    """

    seq_ids: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    first_target: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Positions per piece, (num_pieces,) int64; 0 for a target without positions (label of an empty history)."""
        return self.stops.astype(np.int64) - self.starts

    def __len__(self) -> int:
        return len(self.seq_ids)

    def take(self, index: np.ndarray) -> "Pieces":
        """The pieces at `index`, (n,) int, or at the True entries of `index`, (num_pieces,) bool."""
        return Pieces(self.seq_ids[index], self.starts[index], self.stops[index], self.first_target[index])


def cut_and_count(
    lengths: np.ndarray,
    seq_ids: np.ndarray | None,
    settings: PlanSettings,
    targets: TargetCount | None,
    limited_by: str = "plan.max_tokens",
    bundles: np.ndarray | None = None,
) -> tuple[Pieces, np.ndarray, Ledger]:
    """Apply the overflow policy, and drop pieces without a target.

    Args:
        lengths: positions per sequence, indexed by sequence id, (num_sequences,) int; only those of `seq_ids` are read.
        seq_ids: sequences to cut, (n,) int, repeats allowed; None is every sequence once.
        settings: `max_tokens` limits a piece, `overflow` is the policy for longer sequences, and windows of split start
            every `stride` tokens, by default `max_tokens`. Where windows overlap, positions that an earlier window has
            shown are context in the later one, so every target counts once.
        targets: counts targets with loss inside spans; None: every position is a target.
        limited_by: the fields that `max_tokens` comes from, named in an error.
        bundles: number of each sequence's bundle, (num_sequences,) int64, -1 for none; a bundle is dropped as
            a whole, and never cut.

    Returns:
        The pieces, their numbers of targets (num_pieces,) int64, and the ledger of all tokens that are in no piece.

    Raises:
        PlanError: a sequence is too long and overflow is error, or would cut a bundle; the stride leaves gaps; as
            `check_lengths`.
    """
    ids = np.arange(len(lengths)) if seq_ids is None else _check_ids(seq_ids, len(lengths))
    sizes, overflow = check_lengths(lengths, ids), settings.overflow
    limit = settings.max_tokens or max(int(sizes.max(initial=1)), 1)
    over = sizes > limit
    if bundles is not None and over.any():
        over = with_others(over, bundles[ids], settings)
    num_pieces = np.ones_like(sizes)  # a sequence without positions is one empty piece, dropped unless it has a target
    step, shift, lost = limit, np.zeros_like(sizes), Ledger()
    if overflow == "split":
        step = (settings.max_tokens and settings.stride) or limit
        if step > limit:
            what = f"windows of {limit} tokens that start every {step} tokens leave tokens out"
            raise PlanError(what, where="plan.stride", fix=f"set plan.stride to {limit} or less")
        num_pieces[over] = 1 + -(-(sizes[over] - limit) // step)
    elif over.any():
        if overflow == "error":
            _refuse(int(ids[over][0]), int(sizes[over][0]), limit, limited_by)
        elif overflow == "drop":
            num_pieces[over] = 0
            lost += entry("dropped", "too_long", sizes[over].sum(), ids[over])
        else:
            assert overflow in ("truncate_right", "truncate_left"), overflow
            lost += entry("truncated", overflow, (sizes[over] - limit).sum(), ids[over])
            if overflow == "truncate_left":
                shift[over] = sizes[over] - limit
    source = np.repeat(np.arange(len(ids)), num_pieces)  # (num_pieces,) index into ids
    window = np.arange(len(source)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    starts = window * step + shift[source]
    stops = np.minimum(starts + limit, sizes[source])
    first_target = starts + np.where(window > 0, limit - step, 0)
    pieces = Pieces(ids[source], starts.astype(np.int32), stops.astype(np.int32), first_target.astype(np.int32))
    counts = stops - first_target if targets is None else _count(targets, pieces)
    if not counts.all():
        none = counts == 0
        lost += entry("dropped", "no_target", (stops - first_target)[none].sum(), pieces.seq_ids[none])
        pieces, counts = pieces.take(~none), counts[~none]
    return pieces, counts, lost


def account(pieces: Pieces, counts: np.ndarray, lengths: np.ndarray, overflow: str) -> Ledger:
    """The ledger of trained pieces.

    Args:
        counts: targets per piece, (num_pieces,) int64.
        lengths: positions per sequence, indexed by sequence id.
    """
    counts = np.minimum(counts, pieces.stops - pieces.first_target)  # the target of an empty piece has no token
    whole = (pieces.starts == 0) & (pieces.stops == lengths[pieces.seq_ids])
    reason = "split" if overflow == "split" else "rest"
    silent = pieces.stops - pieces.first_target - counts  # (num_pieces,) positions without a target
    repeated = int((pieces.first_target - pieces.starts).sum(dtype=np.int64))
    return (
        Ledger(repeated=repeated)
        + entry("trained", "whole", counts[whole].sum(), pieces.seq_ids[whole])
        + entry("trained", reason, counts[~whole].sum(), pieces.seq_ids[~whole])
        + entry("context", "no_loss", silent.sum(), pieces.seq_ids[silent > 0])
    )


def check_lengths(lengths: np.ndarray, seq_ids: np.ndarray) -> np.ndarray:
    """Return the lengths of sequences, (n,) int64.

    Args:
        lengths: (num_sequences,) int; seq_ids: (n,) int64, indices into it.

    Raises:
        PlanError: not a list of whole numbers, or one of these is not from 0 to 2**31 - 1.
    """
    if lengths.size == 0:
        return np.zeros(0, np.int64)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        what = f"lengths are {lengths.dtype} of shape {lengths.shape}"
        raise PlanError(what, fix="pass one whole number per sequence")
    sizes = lengths[seq_ids]
    # int32: spans and cu_seqlens are indexed with it.
    wrong = np.flatnonzero((sizes < 0) | (sizes >= 2**31))
    if len(wrong):
        what = f"sequence {seq_ids[wrong[0]]} has length {sizes[wrong[0]]}"
        raise PlanError(what, fix="lengths are 0 to 2147483647 tokens")
    return sizes.astype(np.int64)


def _check_ids(seq_ids: np.ndarray, num_sequences: int) -> np.ndarray:
    ids = np.asarray(seq_ids).astype(np.int64)
    if len(ids) and not (ids.min() >= 0 and ids.max() < num_sequences):
        what = f"sequence ids run from {ids.min()} to {ids.max()}, the data has {number_of(num_sequences, 'sequences')}"
        raise PlanError(what, fix="pass ids that index the lengths")
    return ids


def _refuse(seq_id: int, length: int, limit: int, limited_by: str) -> None:
    what = f"sequence {seq_id} has {number_of(int(length), 'tokens')}, the limit is {limit} of {limited_by}"
    fix = f"set plan.overflow to split, truncate_right, truncate_left or drop, or raise {limited_by}"
    raise PlanError(what, where="plan.overflow=error", fix=fix)


def _count(targets: TargetCount, pieces: Pieces) -> np.ndarray:
    counts = np.asarray(targets(pieces.seq_ids, pieces.first_target, pieces.stops)).astype(np.int64)
    assert counts.shape == pieces.seq_ids.shape, "one count per span"
    assert (counts >= 0).all(), "counts are not negative"
    # At least 1: a whole sequence without positions may have a target.
    most = np.maximum(pieces.stops - pieces.first_target, 1)
    assert (counts <= most).all(), "at most one target per position"
    return counts
