"""Keys and values of the tokens read so far, for decoding one token per sequence and step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from unpad.batching.layout import Layout, PaddedLayout
from unpad.nn.attention import self_attention
from unpad.nn.linear import rows_are_independent
from unpad.nn.native import library
from unpad.nn.native.decode import decode_attention, supports
from unpad.nn.rope import Rotary, rotate


@dataclass
class _Rows:
    """Number of tokens that each row holds; layers that read the same prompts share one instance.

    Args:
        lengths: (num_rows,) int64.
        longest: of `lengths`.
        capacity: tokens that a row's buffers have room for.
        masks: (num_rows, 1, 1, longest + 1) by window, True where the next token sees; made by a step's first layer.
    """

    lengths: Tensor
    longest: int
    capacity: int
    masks: dict[int | None, Tensor] = field(default_factory=dict)


@dataclass
class _Layer:
    """Keys and values, each (num_rows, kv_heads, capacity, head_dim), and the bias of the prompts' keys,
    (num_rows, 1, capacity, 1)."""

    keys: Tensor
    values: Tensor
    rows: _Rows
    bias: Tensor | None = None

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Buffers by name; in all, the third dimension is the place in the row."""
        found = {"keys": self.keys, "values": self.values}
        return found if self.bias is None else {**found, "bias": self.bias}

    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        for name, buffer in self.buffers.items():
            setattr(self, name, change(buffer))


class KeyValueCache:
    """Keys and values of the tokens read so far, two buffers per layer.

    Row i belongs to the i-th live sequence and holds its `lengths[i]` tokens read so far. Layers after a removal of
    tokens hold fewer tokens, in smaller buffers. Buffers double when they are full.

    Args:
        layout: the prompts, which the first pass reads with `self_attention`.
        most: upper bound of the tokens of any row.
    """

    def __init__(self, layout: Layout, most: int) -> None:
        self._most = most
        self._prompts: Layout | None  # in the layout of the last layer that read them
        self._cells: Tensor | None
        self._rows: list[_Rows] = []
        self._layers: list[_Layer] = []
        self._begin_rows(layout, min(2 * layout.max_seqlen, most))

    @property
    def lengths(self) -> Tensor:
        """Tokens read of each row, (num_rows,) int64: the position of its next one."""
        return self._rows[0].lengths

    @property
    def num_rows(self) -> int:
        return self.lengths.numel()

    @property
    def num_bytes(self) -> int:
        """Size of all buffers."""
        return sum(buffer.nbytes for layer in self._layers for buffer in layer.buffers.values())

    def attend(
        self,
        index: int,
        qkv: Tensor,
        layout: Layout | PaddedLayout,
        heads: int,
        rotary: Rotary | None,
        key_bias: Tensor | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Store the new keys and values of a layer and attend to all of their row: as causal `self_attention`.

        Args:
            layout: of the prompts in the first pass, the same object for layers that read the same tokens; in later
                passes one token per row.
            key_bias: (total_tokens,), of the prompts in the first pass; all later passes keep it.
            window: as of `self_attention`.
        """
        if self._prompts is not None:
            assert isinstance(layout, Layout), "prompts come as a flat run"
            self._store_prompts(qkv, layout, heads, rotary, key_bias)
            return self_attention(qkv, layout, heads, causal=True, rotary=rotary, key_bias=key_bias, window=window)
        assert key_bias is None, "new tokens have no bias"
        layer = self._layers[index]
        if layer.bias is None and library.runs(qkv) and supports(qkv.dtype, qkv.shape[2]):
            return decode_attention(qkv, layer.keys, layer.values, layer.rows.lengths, heads, rotary, window)
        return self._attend_in_torch(qkv, layer, heads, rotary, window)

    def _attend_in_torch(
        self, qkv: Tensor, layer: _Layer, heads: int, rotary: Rotary | None, window: int | None
    ) -> Tensor:
        q, k, v = _turned(qkv, heads, rotary)
        held, each = layer.rows, torch.arange(self.num_rows, device=q.device)
        layer.keys[each, :, held.lengths] = k
        layer.values[each, :, held.lengths] = v
        # The query heads that share a key head are its queries, so that the cache is read in place.
        grouped = q.unflatten(1, (k.shape[1], -1))  # (num_rows, kv_heads, heads / kv_heads, head_dim)
        if rows_are_independent(q):
            rows = [
                _attend_row(grouped[row], layer, row, slice(max(0, length + 1 - (window or length + 1)), length + 1))
                for row, length in enumerate(held.lengths.tolist())
            ]
            return torch.stack(rows).flatten(1, 2)
        window = None if window is None or window > held.longest else window
        seen = held.longest + 1
        if window not in held.masks:
            distance = held.lengths[:, None] - torch.arange(seen, device=q.device)
            real = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            held.masks[window] = real[:, None, None]
        keys, values, mask = layer.keys[:, :, :seen], layer.values[:, :, :seen], held.masks[window]
        if layer.bias is not None:
            bias = layer.bias[:, :, :seen].transpose(2, 3)  # (num_rows, 1, 1, seen)
            mask = bias.masked_fill(~mask, -math.inf).to(q.dtype)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return out.flatten(1, 2)  # (num_rows, heads, head_dim)

    def begin_step(self) -> None:
        """Make room for one more token per row."""
        self._prompts, self._cells = None, None
        for rows in self._rows:
            rows.masks.clear()  # of the previous token
            if rows.longest + 1 > rows.capacity:
                self._grow(rows)

    def _grow(self, rows: _Rows) -> None:
        # Merged images may hold more tokens than announced.
        most = self._most + max(0, int((rows.lengths - self.lengths).max()))
        assert rows.capacity < most, "a sequence exceeds the length that was announced"
        more = min(2 * rows.capacity, most) - rows.capacity
        for layer in self._layers:
            if layer.rows is rows:
                layer.change(lambda buffer: F.pad(buffer, (0, 0, 0, more)))
        rows.capacity += more

    def end_step(self) -> None:
        for rows in self._rows:
            rows.lengths = rows.lengths + 1
            rows.longest += 1

    def keep(self, live: np.ndarray) -> np.ndarray:
        """Drop the rows where `live` (num_rows,) is False; return which old row each row is now.

        Rows from the end fill the gaps, so that each dropped row costs the copy of at most one row.
        """
        num_live = int(live.sum())
        order = np.arange(num_live)
        gaps, moved = np.flatnonzero(~live[:num_live]), num_live + np.flatnonzero(live[num_live:])
        order[gaps] = moved
        to, source = (torch.from_numpy(rows).to(self.lengths.device) for rows in (gaps, moved))
        for layer in self._layers:
            longest = layer.rows.longest
            for buffer in layer.buffers.values():
                buffer[to, :, :longest] = buffer[source, :, :longest]
            layer.change(lambda buffer: buffer[:num_live])
        self._take(torch.from_numpy(order))
        return order

    def reorder(self, rows: Tensor) -> None:
        """Make row i a copy of the old row rows[i]; rows may repeat and may be omitted."""
        rows = rows.to(self.lengths.device)

        for layer in self._layers:
            longest = layer.rows.longest

            def copy(buffer: Tensor, longest: int = longest) -> Tensor:
                new = buffer.new_zeros(rows.numel(), *buffer.shape[1:])
                new[:, :, :longest] = buffer[rows, :, :longest]
                return new

            layer.change(copy)
        self._take(rows)

    def _take(self, order: Tensor) -> None:
        for rows in self._rows:
            rows.lengths = rows.lengths[order.to(rows.lengths.device)]
            rows.longest = int(rows.lengths.max()) if rows.lengths.numel() else 0

    def _begin_rows(self, layout: Layout, capacity: int) -> None:
        """Create the rows of layers that read the prompts in this layout."""
        self._prompts = layout
        self._rows.append(_Rows(layout.lengths(), layout.max_seqlen, capacity))
        self._cells = _cells(layout, capacity)

    def _store_prompts(
        self, qkv: Tensor, layout: Layout, heads: int, rotary: Rotary | None, key_bias: Tensor | None
    ) -> None:
        if layout is not self._prompts:
            # Room for as many new tokens as the first layer has.
            self._begin_rows(layout, layout.max_seqlen + self._rows[0].capacity - self._rows[0].longest)
        k, v = qkv[:, heads:].chunk(2, 1)
        k = k if rotary is None else rotate(k, *rotary)
        bias = None
        if key_bias is not None:
            place = torch.arange(self._rows[-1].capacity, device=key_bias.device)[:, None]
            new = place >= self._rows[-1].lengths[:, None, None, None]  # later tokens have no bias
            bias = self._spread(key_bias[:, None, None]).masked_fill_(new, 0)
        self._layers.append(_Layer(self._spread(k), self._spread(v), self._rows[-1], bias))

    def _spread(self, x: Tensor) -> Tensor:
        """Copy (total_tokens, kv_heads, dim) of the prompts into a new buffer, (num_rows, kv_heads, capacity, dim)."""
        assert self._cells is not None, "after the prompts a layer's buffers are there"
        rectangle: Tensor = x.index_select(0, self._cells.flatten()).unflatten(0, self._cells.shape)
        return rectangle.transpose(1, 2).contiguous()


def _attend_row(queries: Tensor, layer: _Layer, row: int, seen: slice) -> Tensor:
    """Attention of one row's queries, (kv_heads, heads / kv_heads, head_dim), to the keys that it sees: torch's
    attention over a rectangle of rows depends on the longest."""
    mask = None if layer.bias is None else layer.bias[row, :, seen].mT.to(queries.dtype)  # (1, 1, num_seen)
    out = F.scaled_dot_product_attention(
        queries[None], layer.keys[row, None, :, seen], layer.values[row, None, :, seen], attn_mask=mask
    )
    return out[0]


def _cells(layout: Layout, capacity: int) -> Tensor:
    """Token of every place in the rows' buffers, (num_rows, capacity) int32.

    Places past a row's end repeat its last token, because masked values must be finite.
    """
    bounds = layout.cu_seqlens[:, None]
    place = torch.arange(capacity, dtype=bounds.dtype, device=bounds.device)
    return torch.minimum(bounds[:-1] + place, bounds[1:] - 1).clamp_min_(0)  # -1: a first row of no tokens


def _turned(qkv: Tensor, heads: int, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of (total_tokens, heads + 2 * kv_heads, head_dim), positions applied."""
    kv_heads = (qkv.shape[1] - heads) // 2
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    return (q, k, v) if rotary is None else (rotate(q, *rotary), rotate(k, *rotary), v)
