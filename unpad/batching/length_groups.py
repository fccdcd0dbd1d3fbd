"""Length groups: runs of similar lengths that attention computes as one padded rectangle."""

from __future__ import annotations

import numpy as np

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
