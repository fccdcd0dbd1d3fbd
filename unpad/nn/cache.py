"""Keys and values of the tokens read so far, for decoding one token per sequence and step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from unpad.layout import Layout
from unpad.native import library
from unpad.native.decode import decode_attention, supports
from unpad.nn.attention import self_attention
from unpad.nn.rope import Rotary, rotate


class KeyValueCache:
    """Keys and values of the tokens read so far: per layer two buffers (num_rows, kv_heads, capacity, head_dim).

    Row i belongs to the i-th live sequence and holds `lengths[i]` tokens. Buffers double when they are full.

    Args:
        layout: the prompts, which the first pass reads with `self_attention`.
        most: tokens no row will ever exceed.
    """

    def __init__(self, layout: Layout, most: int) -> None:
        self.lengths = layout.lengths()  # (num_rows,) int64
        self._longest, self._most = layout.max_seqlen, most
        self._prompts: Layout | None = layout
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._mask: Tensor | None = None  # (num_rows, 1, 1, longest + 1), True = real; made by a step's first layer

    @property
    def num_rows(self) -> int:
        return self.lengths.numel()

    def attend(self, index: int, qkv: Tensor, heads: int, rotary: Rotary | None) -> Tensor:
        """Store the new keys and values of a layer and attend to all of their row: as causal `self_attention`."""
        if self._prompts is not None:
            self._store_prompts(qkv, self._prompts, heads, rotary)
            return self_attention(qkv, self._prompts, heads, causal=True, rotary=rotary)
        keys, values = self._layers[index]
        if library.runs(qkv) and supports(qkv.dtype, qkv.shape[2]):
            return decode_attention(qkv, keys, values, self.lengths, heads, rotary)
        return self._attend_in_torch(qkv, keys, values, heads, rotary)

    def _attend_in_torch(self, qkv: Tensor, keys: Tensor, values: Tensor, heads: int, rotary: Rotary | None) -> Tensor:
        q, k, v = _turned(qkv, heads, rotary)
        rows = torch.arange(self.num_rows, device=q.device)
        keys[rows, :, self.lengths] = k
        values[rows, :, self.lengths] = v
        # The query heads that share a key head are its queries: the cache is read as it lies.
        grouped = q.unflatten(1, (k.shape[1], -1))  # (num_rows, kv_heads, heads / kv_heads, head_dim)
        seen = self._longest + 1
        if self._mask is None:
            column = torch.arange(seen, device=q.device)
            self._mask = (column[None] <= self.lengths[:, None])[:, None, None]
        out = F.scaled_dot_product_attention(grouped, keys[:, :, :seen], values[:, :, :seen], attn_mask=self._mask)
        return out.flatten(1, 2)  # (num_rows, heads, head_dim)

    def begin_step(self) -> None:
        """Make room for one more token per row."""
        self._prompts = None
        capacity = self._layers[0][0].shape[2] if self._layers else 0
        if self._layers and self._longest + 1 > capacity:
            assert capacity < self._most, "a sequence exceeds the length that was announced"
            more = min(2 * capacity, self._most) - capacity
            self._layers = [(F.pad(k, (0, 0, 0, more)), F.pad(v, (0, 0, 0, more))) for k, v in self._layers]
        self._mask = None  # of the last step

    def end_step(self) -> None:
        self.lengths = self.lengths + 1
        self._longest += 1

    def keep(self, live: np.ndarray) -> np.ndarray:
        """Drop the rows where `live` (num_rows,) is False; return which old row each row is now.

        Rows from the end move into the gaps, so one ending costs the copy of one row at most.
        """
        num_live = int(live.sum())
        order = np.arange(num_live)
        gaps, moved = np.flatnonzero(~live[:num_live]), num_live + np.flatnonzero(live[num_live:])
        order[gaps] = moved
        to, source = (torch.from_numpy(rows).to(self.lengths.device) for rows in (gaps, moved))
        for buffer in (buffer for layer in self._layers for buffer in layer):
            buffer[to, :, : self._longest] = buffer[source, :, : self._longest]
        self._layers = [(keys[:num_live], values[:num_live]) for keys, values in self._layers]
        self._take(torch.from_numpy(order))
        return order

    def reorder(self, rows: Tensor) -> None:
        """Make row i a copy of the old row rows[i]; rows may repeat and may be left out."""
        rows = rows.to(self.lengths.device)

        def copy(buffer: Tensor) -> Tensor:
            new = buffer.new_zeros(rows.numel(), *buffer.shape[1:])
            new[:, :, : self._longest] = buffer[rows, :, : self._longest]
            return new

        self._layers = [(copy(keys), copy(values)) for keys, values in self._layers]
        self._take(rows)

    def _take(self, rows: Tensor) -> None:
        self.lengths = self.lengths[rows.to(self.lengths.device)]
        self._longest = int(self.lengths.max()) if self.num_rows else 0

    def _store_prompts(self, qkv: Tensor, prompts: Layout, heads: int, rotary: Rotary | None) -> None:
        _, k, v = _turned(qkv, heads, rotary)
        self._layers.append((self._spread(k, prompts), self._spread(v, prompts)))

    def _spread(self, x: Tensor, layout: Layout) -> Tensor:
        """(total_tokens, kv_heads, head_dim) of the prompts -> a new buffer."""
        capacity = min(2 * self._longest, self._most)
        buffer = x.new_zeros(layout.num_seqs, x.shape[1], capacity, x.shape[2])  # zeros: masked cells must be finite
        row = torch.repeat_interleave(torch.arange(layout.num_seqs, device=x.device), self.lengths)
        first = torch.repeat_interleave(layout.cu_seqlens[:-1].long(), self.lengths)
        buffer[row, :, torch.arange(x.shape[0], device=x.device) - first] = x
        return buffer


def _turned(qkv: Tensor, heads: int, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of (total_tokens, heads + 2 * kv_heads, head_dim), positions turned in."""
    kv_heads = (qkv.shape[1] - heads) // 2
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    return (q, k, v) if rotary is None else (rotate(q, *rotary), rotate(k, *rotary), v)
