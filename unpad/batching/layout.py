"""Boundaries of sequences in a flat run of tokens, and the groups that attention computes together.

The loader builds a layout once. Models pass it along; only attention looks inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

WASTE_STEPS = (0.25, 0.4, 0.6)  # tried in turn while there are too many groups
MAX_CELL_RATIO = 2.0  # computed to needed cells; beyond it, more groups cost less than wider ones


def length_groups(lengths: np.ndarray, waste: float = 0.15, max_tokens: int = 4096, max_groups: int = 32) -> np.ndarray:
    """Cut a descending list of lengths into consecutive groups with little padding.

    In each group the share of padding is at most `waste` and count * longest at most max(max_tokens, longest). Equal
    lengths stay together unless their number alone breaks that. With more than `max_groups` groups, `waste`
    rises step by step, while attention computes at most MAX_CELL_RATIO times the needed cells.

    Args:
        lengths: (num_seqs,) int, descending.

    Returns:
        Offsets (num_groups + 1,) int64; [0] for an empty list.
    """
    lengths = np.asarray(lengths)
    if len(lengths) == 0:
        return np.zeros(1, np.int64)
    starts = np.append(0, np.flatnonzero(np.diff(lengths)) + 1)
    values = lengths[starts].tolist()
    counts = np.diff(np.append(starts, len(lengths))).tolist()
    offsets = _greedy(values, counts, waste, max_tokens)
    if len(offsets) - 1 > max_groups:
        allowed = MAX_CELL_RATIO * attention_cells(lengths)
        for more in WASTE_STEPS:
            wider = _greedy(values, counts, max(more, waste), max_tokens)
            if attention_cells(lengths, np.array(wider)) > allowed:
                break
            offsets = wider
            if len(offsets) - 1 <= max_groups:
                break
    return np.array(offsets, np.int64)


def attention_cells(lengths: np.ndarray, offsets: np.ndarray | None = None) -> int:
    """Query-key pairs before the causal mask: sum of count * longest**2 over groups, or of length**2 without groups.

    Args:
        lengths: (num_seqs,) int, descending.
        offsets: (num_groups + 1,) int.
    """
    lengths = np.asarray(lengths).astype(np.int64)
    if offsets is None:
        return int((lengths * lengths).sum())
    longest = lengths[offsets[:-1]]
    return int((np.diff(offsets) * longest * longest).sum())


def _greedy(values: list[int], counts: list[int], waste: float, max_tokens: int) -> list[int]:
    """Extend each group as far as possible; shorter members only add padding, so greedy is optimal for a group."""
    fill = 1 - waste
    offsets, end = [0], 0
    longest = size = tokens = 0  # of the open group
    for value, count in zip(values, counts, strict=True):
        joined = size + count
        cells = joined * longest
        if size and cells <= max_tokens and tokens + value * count >= fill * cells:
            size, tokens = joined, tokens + value * count
        else:
            if size:
                offsets.append(end)
            whole = max(1, max_tokens // value) if value else count  # members of a full group of this length
            rest = (count - 1) % whole + 1
            offsets.extend(range(end + whole, end + count - rest + 1, whole))
            longest, size, tokens = value, rest, rest * value
        end += count
    offsets.append(end)
    return offsets


@dataclass(frozen=True)
class LengthGroup:
    """Sequences of similar lengths, longest first, that attention computes as one small rectangle.

    Args:
        start, stop: the group's tokens in the run sorted by length.
        num_seqs, longest: the rectangle is (num_seqs, longest).
        cells: flat token of every cell, (num_seqs * longest,) int64; cells past a sequence's end repeat its last token.
            None when all lengths are equal: the rectangle is then a view.
        real: cells that hold a token, in flat order, (stop - start,) int64; None with `cells`.
        key_mask: (num_seqs, longest) bool, True = real; None with `cells`.
    """

    start: int
    stop: int
    num_seqs: int
    longest: int
    cells: Tensor | None = None
    real: Tensor | None = None
    key_mask: Tensor | None = None

    def to(self, device: torch.device) -> LengthGroup:
        return replace(self, **_moved(self, device))

    def rectangle(self, run: Tensor) -> Tensor:
        """The sequences of a run in the order of lengths, (total_tokens, ...), as (num_seqs, longest, ...); cells past
        the end of a sequence repeat its last token."""
        cells = run[self.start : self.stop] if self.cells is None else run.index_select(0, self.cells)
        return cells.unflatten(0, (self.num_seqs, self.longest))

    def tokens(self, rows: Tensor) -> Tensor:
        """The real tokens of (num_seqs, longest, ...), one sequence after the other."""
        cells = rows.flatten(0, 1)
        return cells if self.real is None else cells.index_select(0, self.real)


@dataclass(frozen=True)
class Keyed:
    """Sequences with keys for random draws, so that a sequence draws the same in every batch.

    Args:
        keys: (num_seqs,) int64 below 2**31, such as the place of a sequence in its update; None: draws go by the place
            in the run.
    """

    keys: Tensor | None = field(default=None, kw_only=True)

    @property
    def bases(self) -> Tensor | None:
        """Place of every sequence and of its first token in draws, (num_seqs,) int64; None without keys."""
        return None if self.keys is None else self.keys << 32

    def keys_of(self, places: int | Tensor, seqs: Tensor | None = None) -> Tensor | None:
        """Keys of parts of sequences, such as their images: those with these places in the sequence, int64.

        Args:
            seqs: (num_parts,) int64, the sequence of every part; None: every sequence has one.
        """
        if self.keys is None:
            return None
        keys = self.keys if seqs is None else self.keys.index_select(0, seqs)
        return keys * 1_000_003 + places + 1 & 0x7FFFFFFF


def _moved(holder: object, device: torch.device) -> dict[str, Any]:
    """The tensors among an object's fields, on `device`."""
    return {name: value.to(device) for name, value in vars(holder).items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class GroupedRun:
    """A flat run in length groups, for attention without a kernel for ragged runs.

    Args:
        groups: sequences computed together, longest first.
        by_length: (total_tokens,) int64, the run's tokens with the longest sequence first; None when already so.
        undo: (total_tokens,) int64, the inverse of `by_length`.
    """

    groups: tuple[LengthGroup, ...]
    by_length: Tensor | None = None
    undo: Tensor | None = None

    def to(self, device: torch.device) -> GroupedRun:
        return replace(self, groups=tuple(group.to(device) for group in self.groups), **_moved(self, device))

    def ordered(self, run: Tensor) -> Tensor:
        """A run (total_tokens, ...) with the longest sequence first."""
        return run if self.by_length is None else run.index_select(0, self.by_length)

    def restored(self, parts: list[Tensor]) -> Tensor:
        """The tokens of all groups, in the order of the run."""
        run = torch.cat(parts)
        return run if self.undo is None else run.index_select(0, self.undo)


@dataclass(frozen=True)
class Layout(Keyed):
    """Boundaries of the sequences in a flat run.

    Args:
        cu_seqlens: (num_seqs + 1,) int32, where each sequence starts; the last entry is total_tokens.
        max_seqlen: length of the longest sequence, 0 for an empty run.
        total: tokens of the run; None where only `cu_seqlens` has them, which an accelerator would wait for.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    total: int | None = field(default=None, kw_only=True)

    @property
    def num_seqs(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def longest(self) -> int:
        """Cells of the longest row."""
        return self.max_seqlen

    def lengths(self) -> Tensor:
        """Tokens per sequence, (num_seqs,) int64."""
        return self.cu_seqlens.diff().long()

    def seq_of_token(self) -> Tensor:
        """The sequence that each token belongs to, (total_tokens,) int64."""
        return torch.repeat_interleave(self.lengths(), output_size=self.total)

    @cached_property
    def places(self) -> Tensor | None:
        """Place of every token in draws, (total_tokens,) int64; None without keys."""
        if self.keys is None:
            return None
        seqs = self.seq_of_token()
        starts = (self.keys << 32) - self.cu_seqlens[:-1]
        return starts.index_select(0, seqs) + torch.arange(len(seqs), device=seqs.device)

    def with_keys(self, keys: Tensor | None) -> Layout:
        """The same boundaries with other keys."""
        keyed = replace(self, keys=keys)
        if "grouped" in vars(self):
            vars(keyed)["grouped"] = self.grouped
        return keyed

    def select(self, seqs: Sequence[int] | Tensor) -> tuple[Layout, Tensor]:
        """Take these sequences in this order: their own layout, and their tokens in this one, (num_tokens,) int64."""
        index = seqs.cpu().numpy() if isinstance(seqs, Tensor) else np.asarray(seqs, np.int64)
        bounds = self.cu_seqlens.cpu().numpy()
        lengths = np.diff(bounds)[index].astype(np.int64)
        shifts = bounds[index] - (np.cumsum(lengths) - lengths)
        tokens = np.repeat(shifts, lengths) + np.arange(lengths.sum())
        device = self.cu_seqlens.device
        keys = None if self.keys is None else self.keys.index_select(0, torch.from_numpy(index).to(device))
        return build_layout(lengths).to(device).with_keys(keys), torch.from_numpy(tokens).to(device)

    def restrict(self, places: Tensor) -> Layout:
        """The layout of only the tokens at these places, (num,) int64 ascending; a sequence may keep none.

        Reads the longest length from the device, which synchronizes with an accelerator.
        """
        bounds = torch.searchsorted(places, self.cu_seqlens.long(), out_int32=True)
        return Layout(bounds, int(bounds.diff().max()) if self.num_seqs else 0, keys=self.keys)

    def keep(self, kept: Tensor) -> Layout:
        """The layout of only the tokens where `kept`, (total_tokens,) bool, is True; see `restrict`."""
        return self.restrict(kept.nonzero().flatten())

    @cached_property
    def grouped(self) -> GroupedRun:
        """The run in length groups; computed on first use, since a kernel for ragged runs needs none of it."""
        lengths = np.diff(self.cu_seqlens.cpu().numpy()).astype(np.int64)
        with torch.inference_mode(False):  # first use may be in inference, later use in training
            return _group_run(lengths).to(self.cu_seqlens.device)

    def to(self, device: torch.device) -> Layout:
        if self.cu_seqlens.device == device:
            return self
        moved = replace(self, **_moved(self, device))
        if "grouped" in vars(self):  # moved, since computing them again would read the boundaries back
            vars(moved)["grouped"] = self.grouped.to(device)
        return moved


@dataclass(frozen=True)
class PaddedLayout(Keyed):
    """Sequences of a (batch, seq) rectangle, flattened to (batch * seq,) tokens.

    For comparison and exchange with code that pads; `attention_mask` (batch, seq) bool, True = real.
    """

    attention_mask: Tensor

    @property
    def num_seqs(self) -> int:
        return self.attention_mask.shape[0]

    @property
    def longest(self) -> int:
        """Cells of every row."""
        return self.attention_mask.shape[1]

    def lengths(self) -> Tensor:
        """Real tokens per sequence, (batch,) int64."""
        return self.attention_mask.sum(1)

    @cached_property
    def places(self) -> Tensor | None:
        """Place of every cell in draws, (batch * seq,) int64; None without keys."""
        if self.keys is None:
            return None
        column = torch.arange(self.attention_mask.shape[1], device=self.keys.device)
        return ((self.keys << 32)[:, None] + column).flatten()

    def with_keys(self, keys: Tensor | None) -> PaddedLayout:
        """The same cells with other keys."""
        return replace(self, keys=keys)

    def to(self, device: torch.device) -> PaddedLayout:
        return replace(self, **_moved(self, device))


def build_layout(lengths: np.ndarray) -> Layout:
    """Lay out sequences of the given lengths, (num_seqs,) integers, none negative."""
    lengths = np.asarray(lengths, np.int64)
    assert lengths.size == 0 or lengths.min() >= 0, "a length is negative"
    cu_seqlens = np.zeros(lengths.size + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    return Layout(torch.from_numpy(cu_seqlens), int(lengths.max(initial=0)), total=int(cu_seqlens[-1]))


def _group_run(lengths: np.ndarray) -> GroupedRun:
    """Sort sequences of the given lengths, (num_seqs,) int64, by length, and cut the run into groups."""
    begins = np.cumsum(lengths) - lengths
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    descending = descending[: np.count_nonzero(descending)]  # empty sequences have no cells
    starts = np.concatenate([[0], np.cumsum(descending)])
    groups = tuple(_group(descending[a:b], int(starts[a])) for a, b in pairwise(length_groups(descending)))
    if np.all(np.diff(order) > 0):
        return GroupedRun(groups)
    flat = np.repeat(begins[order[: descending.size]] - starts[:-1], descending) + np.arange(starts[-1])
    undo = np.empty_like(flat)
    undo[flat] = np.arange(flat.size)
    return GroupedRun(groups, torch.from_numpy(flat), torch.from_numpy(undo))


def _group(lengths: np.ndarray, start: int) -> LengthGroup:
    longest, count, total = int(lengths[0]), lengths.size, int(lengths.sum())
    if lengths[-1] == longest:
        return LengthGroup(start, start + total, count, longest)
    column = np.arange(longest)
    mask = column[None] < lengths[:, None]
    first = start + np.concatenate([[0], np.cumsum(lengths)[:-1]])
    cells = first[:, None] + np.minimum(column[None], lengths[:, None] - 1)
    return LengthGroup(
        start=start,
        stop=start + total,
        num_seqs=count,
        longest=longest,
        cells=torch.from_numpy(cells.reshape(-1)),
        real=torch.from_numpy(np.flatnonzero(mask)),
        key_mask=torch.from_numpy(mask),
    )
