"""The plan: sequences of every optimizer step and micro-batch of an epoch, and what happens to every token.

A plan is data, returned by a pure function of lengths, settings, seed and epoch. An epoch of very many sequences is
several plans, of a window of it each.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module

import numpy as np

from unpad.batching.grouping import Grouping, bundled, joined, split_steps, sum_runs, unfold
from unpad.batching.ledger import Ledger, entry
from unpad.batching.pieces import Pieces, TargetCount, account, cut_and_count
from unpad.errors import PlanError
from unpad.recipes.training import PlanSettings

SPAN = ("seq_ids", "starts", "stops", "first_target")  # of a piece: the arrays of a Micro


@dataclass(frozen=True, eq=False)
class Micro:
    """Sequences of one micro-batch.

    Args:
        seq_ids: (num_seqs,) int64.
        starts, stops, first_target: (num_seqs,) int32, as in Pieces.
        pad_to: length that every sequence is padded to, a (batch, pad_to) rectangle; 0 is ragged.
        fill_to: tokens of the flat run with the filler at its end; 0 is without filler.
        epoch_seed: (seed, epoch), which seeds every random draw of the epoch.
    """

    seq_ids: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    first_target: np.ndarray
    pad_to: int
    fill_to: int
    epoch_seed: tuple[int, int] = (0, 0)


@dataclass(frozen=True, eq=False)
class Plan:
    """Pieces in order, cut into micro-batches and steps; offsets as in Grouping.

    Args:
        order: indices into pieces, (n,) int64; every piece once, without the pieces of a dropped last step.
        micro_offsets: (num_micros + 1,) int64 into order.
        step_offsets: (num_steps + 1,) int64 into the micro-batches.
        pad_to, fill_to: (num_micros,) int32, as in Micro.
        epoch_seed: as in Micro.
    """

    pieces: Pieces
    order: np.ndarray
    micro_offsets: np.ndarray
    step_offsets: np.ndarray
    pad_to: np.ndarray
    fill_to: np.ndarray
    ledger: Ledger
    strategy: str
    epoch_seed: tuple[int, int] = (0, 0)

    @property
    def num_steps(self) -> int:
        return len(self.step_offsets) - 1

    @property
    def num_micros(self) -> int:
        return len(self.micro_offsets) - 1

    def step(self, index: int) -> list[Micro]:
        """The micro-batches of one step, in order."""
        if not 0 <= index < self.num_steps:
            raise IndexError(f"step {index} of {self.num_steps}")
        return [self.micro(number) for number in range(self.step_offsets[index], self.step_offsets[index + 1])]

    def micro(self, number: int) -> Micro:
        """A micro-batch, numbered through all steps."""
        part = self.pieces.take(self.order[self.micro_offsets[number] : self.micro_offsets[number + 1]])
        pad_to, fill_to = int(self.pad_to[number]), int(self.fill_to[number])
        return Micro(part.seq_ids, part.starts, part.stops, part.first_target, pad_to, fill_to, self.epoch_seed)

    @property
    def micro_tokens(self) -> np.ndarray:
        """Real tokens per micro-batch, (num_micros,) int64."""
        return sum_runs(self.pieces.lengths[self.order], self.micro_offsets)

    @property
    def micro_cells(self) -> np.ndarray:
        """Tokens computed per micro-batch, real and padded, (num_micros,) int64."""
        padded = self.pad_to * np.diff(self.micro_offsets)
        return np.maximum(np.maximum(padded, self.fill_to), self.micro_tokens)

    @property
    def real_tokens(self) -> int:
        """Real tokens, including the context of overlapping windows."""
        return int(self.micro_tokens.sum())

    @property
    def padded_tokens(self) -> int:
        """Computed tokens: real, padding and filler."""
        return int(self.micro_cells.sum())

    @property
    def pad_share(self) -> float:
        """Share of the computed tokens that is padding or filler; 0 for an empty plan."""
        cells = self.padded_tokens
        return 1 - self.real_tokens / cells if cells else 0.0


def rows_digest(micros: Sequence[Micro]) -> str:
    """Digest of the sequence ids of a step and their trained spans, 16 hex digits; independent of their order and of
    the cut into micro-batches."""
    parts = [np.concatenate([np.zeros(0, np.int64), *(vars(micro)[name] for micro in micros)]) for name in SPAN]
    order = np.lexsort(parts[::-1])
    return blake2b(np.stack(parts)[:, order].astype("<i8").tobytes(), digest_size=8).hexdigest()


def plan(
    lengths: np.ndarray,
    settings: PlanSettings,
    *,
    seed: int,
    epoch: int,
    first_step: int = 0,
    window: int | None = None,
    max_tokens: int | None = None,
    context_field: str = "model.context",
    seq_ids: np.ndarray | None = None,
    targets: TargetCount | None = None,
    bundles: np.ndarray | None = None,
) -> Plan:
    """Plan one epoch, or a window of it. Pure: equal arguments give an equal plan.

    Args:
        lengths: positions per sequence, indexed by sequence id, (num_sequences,) int, possibly mapped from a file.
        settings: the recipe's section; its strategy names the function that groups the pieces.
        first_step: steps of the stage before this epoch or window, for settings that grow by steps.
        window: number of the window of the epoch that `seq_ids` are, from `window_places`; None is the whole epoch.
        max_tokens: the model's context length; the smaller of this and settings.max_tokens applies.
        context_field: recipe field that sets the model's context, named in an error.
        seq_ids: the sequences of this epoch, (n,) int, repeats allowed; None is every sequence once.
        targets: counts targets with loss inside spans; None: every position is a target. A
            sequence without positions is planned if this gives it a target.
        bundles: number of each sequence's bundle, (num_sequences,) int64, -1 for none; the sequences of a bundle are in
            one micro-batch, and count as one where settings count sequences.

    Raises:
        PlanError: the settings do not fit the lengths, or ask for windows of a whole epoch.
    """
    if window is None and settings.window is not None:
        what = "windows are of the epochs of a training, and here all sequences are planned at once"
        raise PlanError(what, where="plan.window", fix="leave it out, and plan some of the lengths after the others")
    limits = {"plan.max_tokens": settings.max_tokens, context_field: max_tokens}
    limit = min((one for one in limits.values() if one is not None), default=None)
    limited_by = " and ".join(name for name, one in limits.items() if one == limit)
    settings = settings.model_copy(update={"max_tokens": limit})
    lengths = np.asarray(lengths)
    pieces, counts, lost = cut_and_count(lengths, seq_ids, settings, targets, limited_by, bundles)
    grouped, offsets = pieces.lengths, np.arange(len(pieces) + 1)
    if bundles is not None:
        order, offsets = bundled(bundles[pieces.seq_ids])
        pieces, counts = pieces.take(order), counts[order]
        grouped = sum_runs(pieces.lengths, offsets)
    grouping, settings = _grouped(grouped, settings.parts(epoch, first_step), _random(seed, epoch, 0, window))
    is_dropped = np.zeros(len(grouped), bool)
    if settings.drop_last:
        grouping, is_dropped = _without_short_last_step(grouping, grouped, settings)
    if bundles is not None:
        grouping = unfold(grouping, offsets, pieces.lengths, settings)
        is_dropped = np.repeat(is_dropped, np.diff(offsets))
    trained = pieces
    if settings.drop_last:
        dropped = pieces.take(is_dropped)
        lost += entry("dropped", "last_step", (dropped.stops - dropped.first_target).sum(), dropped.seq_ids)
        trained, counts = pieces.take(~is_dropped), counts[~is_dropped]
    ledger = lost + account(trained, counts, lengths, settings.overflow)
    assert ledger.total == int((lengths if seq_ids is None else lengths[seq_ids]).sum()), "the ledger does not add up"
    return Plan(pieces, *grouping, ledger, settings.strategy, (seed, epoch))


def _grouped(
    lengths: np.ndarray, parts: list[tuple[int | None, PlanSettings]], rng: np.random.Generator
) -> tuple[Grouping, PlanSettings]:
    """Group all pieces; pieces left over by the steps of one part are grouped with the settings of the next.

    Returns:
        The grouping, and the settings of the part in which it ends.
    """
    strategy = import_module(f"unpad.batching.strategies.{parts[0][1].strategy}")
    left, done = np.arange(len(lengths)), list[Grouping]()
    for num_steps, settings in parts:
        grouping: Grouping = strategy.group(lengths[left], settings, rng)
        grouping = grouping._replace(order=left[grouping.order])
        if num_steps is None or len(grouping.step_offsets) - 1 <= num_steps:
            break
        first, left = split_steps(grouping, num_steps)
        done.append(first)
    return joined([*done, grouping]), settings


def _without_short_last_step(
    grouping: Grouping, lengths: np.ndarray, settings: PlanSettings
) -> tuple[Grouping, np.ndarray]:
    """Drop the last step if it has room left; also return its pieces, (num_pieces,) bool."""
    is_dropped, steps = np.zeros(len(lengths), bool), grouping.step_offsets
    if len(steps) > 1:
        before, last = split_steps(grouping, len(steps) - 2)
        if settings.batches_per_step is not None:
            is_short = steps[-1] - steps[-2] < settings.batches_per_step
        else:  # steps of whole sequences rarely have the exact size: one is full when the shortest piece would not fit
            tokens = lengths[last].sum()
            is_short = tokens < settings.tokens_per_step and tokens + lengths.min() <= settings.tokens_per_step
        if is_short:
            is_dropped[last], grouping = True, before
    return grouping, is_dropped


# --------------------------------------------------------------------------- sequences of an epoch

# Sequences of an epoch that are planned at once, some 150 bytes and a microsecond each; and of a window of more.
MOST_AT_ONCE, WINDOW = 10_000_000, 2_000_000
BLOCK = 4096  # neighbouring sequences that stay in one window, to be read from one place of a file


def num_windows(num_sequences: int, settings: PlanSettings) -> int:
    """Windows that an epoch is planned in; at least 1."""
    size = settings.window or (WINDOW if num_sequences > MOST_AT_ONCE else num_sequences)
    return -(-num_sequences // size) if num_sequences else 1


def window_places(num_sequences: int, windows: int, window: int, seed: int, epoch: int) -> np.ndarray:
    """Sequences of one of several windows: blocks of neighbours, which every epoch deals out anew.

    Args:
        windows: from `num_windows`; all hold the same number of blocks, or one less.

    Returns:
        Places in ascending order, (n,) int64; every one of `num_sequences` is in one window.
    """
    assert 0 <= window < windows, "there is such a window"
    block = max(min(BLOCK, num_sequences // windows // 64), 1)  # 64 blocks and more, so that windows are alike
    num_blocks = -(-num_sequences // block)
    first, last = (number * num_blocks // windows for number in (window, window + 1))
    chosen = np.sort(_random(seed, epoch, 2).permutation(num_blocks)[first:last])
    places = (chosen[:, None] * block + np.arange(block)).ravel()
    return places[places < num_sequences]


def _random(seed: int, epoch: int, stream: int, window: int | None = None) -> np.random.Generator:
    """Generator of one use of random numbers. Zeros at the end change nothing: stream 0 is that of (seed, epoch)."""
    return np.random.default_rng([seed, epoch, stream, window or 0])


def draw_sequences(
    source_of: np.ndarray, weights: Sequence[float], seed: int, epoch: int, window: int = 0
) -> np.ndarray:
    """Draw the sequences of one epoch, or of a window of it: weight w takes each sequence floor(w) times, and a random
    share of the rest.

    The share is drawn without replacement, and its size is right on average over epochs and windows.

    Args:
        source_of: source of each sequence, an index into weights, (num_sequences,) int.
        weights: epochs of each source per epoch of the run.

    Returns:
        Sequence ids in ascending order, (n,) int64; all of them once where every weight is 1.
    """
    source_of = np.asarray(source_of).astype(np.int64)
    rng = _random(seed, epoch, 1, window)
    times = np.floor(np.array(weights)).astype(np.int64)[source_of]  # (num_sequences,)
    for source, weight in enumerate(weights):
        members = np.flatnonzero(source_of == source)
        share = math.floor(weight % 1 * len(members) + rng.random())
        times[rng.permutation(members)[:share]] += 1
    return np.repeat(np.arange(len(source_of)), times)
