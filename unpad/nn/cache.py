"""Keys and values of the tokens read so far, by row: prompts are read in pieces, then one token per row and step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from unpad.batching.layout import Layout, PaddedLayout
from unpad.nn.attend import Attend
from unpad.nn.attention import attend_rows, in_window, self_attention
from unpad.nn.kernel import runs_native
from unpad.nn.linear import rows_are_independent
from unpad.nn.native import library
from unpad.nn.native.attention import decode_attention, piece_attention, supports_decoding
from unpad.nn.rope import turned

PLACES = 256  # tokens; without native kernels a prompt may be cut at multiples of it


def cut_step(dtype: torch.dtype, device: torch.device, head_dim: int) -> int:
    """A prompt cut at multiples of this many tokens, from its own start, gets the bits of the whole: where the native
    kernel reads it, anywhere."""
    return 1 if runs_native(dtype, device, head_dim) else PLACES


@dataclass
class _Held:
    """Keys and values of a row in one layer.

    Args:
        buffer: (2, kv_heads, capacity, head_dim), keys and values of the first `length` tokens.
        bias: (num_tokens,), added to the scores of the keys of the prompt.
    """

    buffer: Tensor
    length: int = 0
    bias: Tensor | None = None


class CachedRow:
    """Keys and values of one sequence, in buffers of its own, which double when they are full.

    Layers after a removal of tokens hold fewer tokens, in smaller buffers.

    Args:
        most: upper bound of the sequence's tokens.

    Attributes:
        length: tokens read, which is the position of the next one.
    """

    def __init__(self, most: int) -> None:
        self.most, self.length = most, 0
        self._layers: list[_Held] = []

    @property
    def num_bytes(self) -> int:
        """Size of all buffers."""
        return sum(one.buffer.nbytes + (0 if one.bias is None else one.bias.nbytes) for one in self._layers)

    @property
    def token_bytes(self) -> int:
        """Size of a token's keys and values in all layers."""
        return sum(one.buffer.nbytes // max(one.buffer.shape[2], 1) for one in self._layers)

    @property
    def is_whole(self) -> bool:
        """True if every layer holds every token that was read, and nothing beside keys and values."""
        return all(one.length == self.length and one.bias is None for one in self._layers)

    def reserve(self, new: int) -> None:
        """Make room for so many new tokens in every layer, so that a pass asks for no memory."""
        for one in self._layers:
            self._make_room(one, new, self.most - self.length - new)

    def hold(self, index: int, new: int, qkv: Tensor, heads: int) -> _Held:
        """Keys and values of a layer, with room for so many new tokens."""
        if index == len(self._layers):
            self._layers.append(_Held(qkv.new_empty(2, (qkv.shape[1] - heads) // 2, 0, qkv.shape[2])))
        one = self._layers[index]
        self._make_room(one, new, self.most - self.length)
        return one

    def _make_room(self, one: _Held, new: int, later: int) -> None:
        """Grow a layer's buffer for new tokens; `later` tokens at most come after them."""
        needed = one.length + new
        if needed > one.buffer.shape[2]:
            one.buffer = _moved(one.buffer, one.length, min(2 * needed, needed + later))

    def copy(self, num: int | None = None, most: int | None = None) -> "CachedRow":
        """A row with the same tokens in buffers of its own.

        Args:
            num: only the first tokens, in buffers without room for more; of rows that hold every token in every layer.
            most: of the new row; default the same.
        """
        new = CachedRow(self.most if most is None else most)
        new.length = self.length if num is None else num
        for one in self._layers:
            assert num is None or (one.length == self.length and one.bias is None), "a layer holds other tokens"
            length = one.length if num is None else num
            buffer = _moved(one.buffer, length, one.buffer.shape[2] if num is None else num)
            new._layers.append(replace(one, buffer=buffer, length=length))
        return new


def _moved(buffer: Tensor, length: int, capacity: int) -> Tensor:
    """A buffer with room for `capacity` tokens that holds the first tokens of another one."""
    new = buffer.new_empty(*buffer.shape[:2], capacity, buffer.shape[3])
    new[:, :, :length] = buffer[:, :, :length]
    return new


class KeyValueCache:
    """The rows that a pass reads new tokens of: pieces of prompts, or one token each.

    Args:
        rows: in the order of the pass's sequences; they may have been in other caches before, and keep what they hold.
    """

    def __init__(self, rows: Sequence[CachedRow]) -> None:
        self.rows = list(rows)
        self._reading = True

    @property
    def lengths(self) -> Tensor:
        """Tokens read of each row, (num_rows,) int64: the position of its next one."""
        return torch.tensor([row.length for row in self.rows], dtype=torch.int64)

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_bytes(self) -> int:
        """Size of all buffers."""
        return sum(row.num_bytes for row in self.rows)

    def begin(self, news: Sequence[int] | None) -> None:
        """Begin a pass.

        Args:
            news: tokens of each row's piece of a prompt; None for one token each, which decoding makes.
        """
        self._reading = news is not None
        for row, new in zip(self.rows, [1] * len(self.rows) if news is None else news, strict=True):
            row.length += new
            assert row.length <= row.most, "a sequence exceeds the length that was announced"

    def attend(self, index: int, qkv: Tensor, layout: Layout | PaddedLayout, heads: int, how: Attend) -> Tensor:
        """Store the new keys and values of a layer and attend to all of their row: as causal `self_attention`.

        Args:
            layout: of the new tokens; layers after a removal have fewer.
            how: a key bias is of prompts that are read whole; all later passes keep it.
        """
        assert isinstance(layout, Layout), "new tokens come as a flat run"
        news = layout.lengths().tolist() if self._reading else [1] * len(self.rows)
        held = [row.hold(index, new, qkv, heads) for row, new in zip(self.rows, news, strict=True)]
        lengths = [one.length for one in held]
        if how.key_bias is not None:
            assert self._reading, "new tokens have no bias"
            assert not any(lengths), "a prompt with a bias is read whole"
            for one, bias in zip(held, how.key_bias.split(news), strict=True):
                one.bias = bias
        try:
            buffers = [one.buffer for one in held]
            if self._reading and runs_native(qkv.dtype, qkv.device, qkv.shape[2]):
                return piece_attention(qkv, layout.cu_seqlens, buffers, lengths, heads, how)
            biased = any(one.bias is not None for one in held)
            if not self._reading and not biased and library.runs(qkv) and supports_decoding(qkv.dtype, qkv.shape[2]):
                return decode_attention(qkv, buffers, lengths, heads, how)
            q, k, v = turned(qkv, heads, how.rotary)
            for one, new, keys, values in zip(held, news, k.split(news), v.split(news), strict=True):
                one.buffer[0, :, one.length : one.length + new] = keys.transpose(0, 1)
                one.buffer[1, :, one.length : one.length + new] = values.transpose(0, 1)
            if self._reading and not any(lengths) and not rows_are_independent(qkv):
                return self_attention(qkv, layout, heads, how)
            attend = _attend_piece if self._reading else _attend_last
            parts = [attend(part, one, how.window) for part, one in zip(q.split(news), held, strict=True)]
            return torch.cat([q[:0], *parts])
        finally:
            for one, new in zip(held, news, strict=True):
                one.length += new

    def reorder(self, rows: Tensor) -> None:
        """Make row i the old row rows[i]; rows may repeat, as copies, and may be omitted."""
        new: list[CachedRow] = []
        for i in rows.tolist():
            old = self.rows[i]
            new.append(old.copy() if old in new else old)
        self.rows = new


def _attend_piece(q: Tensor, one: _Held, window: int | None) -> Tensor:
    """Attention of the queries of a piece, (num_new, heads, head_dim), which were stored behind the held tokens.

    Torch's attention depends on the number of queries and keys: it takes the queries between two multiples of PLACES at
    a time, so that the sizes are those of the whole prompt.
    """
    first, last, parts = one.length, one.length + len(q), [q[:0]]
    while first < last:
        stop = min((first // PLACES + 1) * PLACES, last)
        begin = 0 if window is None else max(0, first + 1 - window)
        rows = slice(first - begin, stop - begin)
        keys, values = (
            x.repeat_interleave(q.shape[1] // len(x), 0)[None] for x in one.buffer[:, :, begin:stop].unbind()
        )
        mask = None if window is None else partial(in_window, stop - begin, window, q.device)
        how = Attend(key_bias=None if one.bias is None else one.bias[None, begin:stop])
        queries = q[first - one.length : stop - one.length].transpose(0, 1)[None]  # (1, heads, num, head_dim)
        out = attend_rows(queries, keys, values, rows, mask, how)
        parts.append(out[0].transpose(0, 1))
        first = stop
    return torch.cat(parts)


def _attend_last(q: Tensor, one: _Held, window: int | None) -> Tensor:
    """Attention of the query of a row's last token, (1, heads, head_dim), to the keys that it sees."""
    stop, kv_heads = one.length + 1, one.buffer.shape[1]
    keys, values = one.buffer[:, None, :, 0 if window is None else max(0, stop - window) : stop].unbind()
    mask = None
    if one.bias is not None:  # new tokens have none
        mask = F.pad(one.bias, (0, stop - len(one.bias)))[None, None, None, stop - keys.shape[2] :].to(q.dtype)
    # The query heads that share a key head are its queries, so that the cache is read in place.
    grouped = q[0].unflatten(0, (kv_heads, -1))[None]  # (1, kv_heads, heads / kv_heads, head_dim)
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).flatten(1, 2)
