"""Boundaries of the sequences in a batch of transformers: from `cu_seq_lens_q`, `position_ids` or `attention_mask`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from unpad.batching.layout import Layout, build_layout
from unpad.errors import PlanError

# Keyword arguments of a flat batch that name its boundaries, as FlashAttention's users in transformers pass them.
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@dataclass(frozen=True)
class Sequences:
    """The sequences of a (batch, seq) rectangle of tokens.

    Args:
        layout: of the real tokens, row after row.
        real: (num_real,) int64, cells of the flattened rectangle that hold them; None if all do.
    """

    layout: Layout
    real: Tensor | None = None


# Every layer asks for the layout of the same tensor, which is computed once and forgotten with it.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def find_sequences(batch: int, seq: int, attention_mask: Tensor | None, named: Mapping[str, Any]) -> Sequences:
    """Find the sequences of a batch; without any of the three, every row is one.

    Args:
        attention_mask: (batch, seq), or None. If bool, True = real, and every row is one sequence; if int32, the
            number of each token's sequence in its row, which counts where there is no `cu_seq_lens_q`.
        named: the batch's other arguments. `cu_seq_lens_q` is (num_seqs + 1,) int; `position_ids` (batch, seq),
            (1, seq) or, with several axes of positions, (axes, batch, seq), whose first begins a new sequence where it
            does not go up by one.

    Raises:
        PlanError: `cu_seq_lens_q` does not end at the last token.
    """
    bounds, positions = named.get("cu_seq_lens_q"), named.get("position_ids")
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        source = bounds if bounds is not None else attention_mask
    else:
        source = attention_mask if attention_mask is not None else bounds if bounds is not None else positions
    if source is None:
        return Sequences(build_layout(np.full(batch, seq)))
    state = (batch, seq, 0 if source.is_inference() else source._version)
    known = _known.get(source)
    if known is not None and known[0] == state:
        found: Sequences = known[1]
        return found
    if source is attention_mask:
        found = _of_mask(attention_mask) if attention_mask.dtype == torch.bool else _of_owners(attention_mask)
    elif source is bounds:
        if int(bounds[-1]) != batch * seq:
            raise PlanError(
                f"cu_seq_lens_q ends at {int(bounds[-1])}, the batch at {batch * seq}",
                fix="pass the boundaries of this batch",
            )
        found = Sequences(build_layout(bounds.diff().cpu().numpy()).to(bounds.device))
    else:
        assert positions is not None
        found = _of_positions(positions, batch, seq)
    _known[source] = (state, found)
    return found


def _of_mask(mask: Tensor) -> Sequences:
    layout = build_layout(mask.bool().sum(1).cpu().numpy()).to(mask.device)
    return Sequences(layout, mask.flatten().nonzero().flatten())


def _of_owners(owners: Tensor) -> Sequences:
    starts = torch.ones_like(owners, dtype=torch.bool)
    starts[:, 1:] = owners.diff(dim=1) != 0
    return _of_starts(starts)


def _of_positions(positions: Tensor, batch: int, seq: int) -> Sequences:
    first = positions[0] if positions.dim() == 3 else positions
    if first.shape[-1] != seq:  # positions of something else, such as of all keys of a cache
        return Sequences(build_layout(np.full(batch, seq)).to(positions.device))
    first = first.reshape(-1, seq).expand(batch, seq)
    starts = torch.ones_like(first, dtype=torch.bool)
    starts[:, 1:] = first.diff(dim=1) != 1
    return _of_starts(starts)


def _of_starts(starts: Tensor) -> Sequences:
    """Sequences that begin where `starts`, (batch, seq) bool, is True."""
    places = starts.flatten().nonzero().flatten().cpu().numpy()
    return Sequences(build_layout(np.diff(np.append(places, starts.numel()))).to(starts.device))
