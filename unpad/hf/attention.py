"""Attention and mask "unpad" of transformers: tokens see their own sequence and nothing else, without a dense mask.

`AttentionInterface` calls `attend` in every layer, and `AttentionMaskInterface` `make_mask` once per forward pass.
Without a mask of the same name transformers would hand None to the attention, whatever the batch says.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from unpad.batching.layout import Layout, build_layout
from unpad.errors import PlanError
from unpad.nn import kernel
from unpad.nn.attend import Attend
from unpad.nn.attention import ragged_attention
from unpad.nn.native import library
from unpad.nn.precision import wide_dtype
from unpad.nn.scope import Scope

torch.compiler.assume_constant_result(library.computes)  # it reads files, and a graph cannot
Function = TypeVar("Function", bound=Callable[..., Any])


def outside_graphs(function: Function) -> Function:
    """Let a function run as it stands where torch.compile meets it: what it reads of tensors would break each graph."""
    return cast(Function, torch.compiler.disable(function))


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
        attention_mask: (batch, seq) bool, True = real, whose every row is one sequence; that of `hand`, which counts
            where there is no `cu_seq_lens_q`; or None.
        named: the batch's other arguments. `cu_seq_lens_q` is (num_seqs + 1,) int; `position_ids` (batch, seq),
            (1, seq) or, with several axes of positions, (axes, batch, seq), whose first begins a new sequence where it
            does not go up by one.

    Raises:
        PlanError: `cu_seq_lens_q` does not end at the last token, or it is missing where positions do not tell.
    """
    bounds, positions = named.get("cu_seq_lens_q"), named.get("position_ids")
    is_padding = attention_mask is not None and attention_mask.dtype == torch.bool
    order = (attention_mask, bounds) if is_padding else (bounds, attention_mask)
    source = next((one for one in (*order, positions) if one is not None), None)
    if source is None:
        return Sequences(build_layout(np.full(batch, seq)))
    if torch.compiler.is_compiling():
        return _read(source, batch, seq, {"max_length_q": seq, **named})
    state = (batch, seq, 0 if source.is_inference() else source._version)
    known = _known.get(source)
    if known is None or known[0] != state:
        known = _known[source] = (state, _read(source, batch, seq, named))
    return known[1]


def _read(source: Tensor, batch: int, seq: int, named: Mapping[str, Any]) -> Sequences:
    """The sequences that one of the tensors of `find_sequences` tells."""
    total = batch * seq
    if source is named.get("position_ids"):
        return _of_positions(source, batch, seq)
    if source is named.get("cu_seq_lens_q"):
        return Sequences(_of_bounds(source, total, named.get("max_length_q")))
    if is_handed(source):
        return Sequences(Layout(source[0, 0, :, 0], source.shape[3], total=total))
    return Sequences(build_layout(source.sum(1).cpu().numpy()).to(source.device), source.flatten().nonzero().flatten())


def _of_bounds(bounds: Tensor, total: int, longest: int | None) -> Layout:
    """The layout of `cu_seq_lens_q` of a batch of `total` tokens, with its `max_length_q`, if it has one."""
    if longest is not None and (torch.compiler.is_compiling() or kernel.card_version(bounds.device)):
        torch._assert_async(bounds[-1] == total)  # to read it would wait for the card, and break a graph
        return Layout(bounds.int(), longest, total=total)
    if int(bounds[-1]) != total:
        what = f"cu_seq_lens_q ends at {int(bounds[-1])}, the batch at {total}"
        raise PlanError(what, fix="pass the boundaries of this batch")
    return build_layout(bounds.diff().cpu().numpy()).to(bounds.device)


def hand(layout: Layout) -> Tensor:
    """A layout of all cells of a rectangle as an `attention_mask`, which graphs read without a number of a tensor.

    Returns:
        (1, 1, num_seqs + 1, max_seqlen) int32, a view of `cu_seqlens`. Models hand a mask of 4 axes to their layers.
    """
    return layout.cu_seqlens[None, None, :, None].expand(-1, -1, -1, max(layout.max_seqlen, 1))


def is_handed(mask: Tensor) -> bool:
    """True for a mask of `hand`; dense ones are bool or added to scores."""
    return mask.dim() == 4 and mask.dtype == torch.int32


def _of_positions(positions: Tensor, batch: int, seq: int) -> Sequences:
    first = positions[0] if positions.dim() == 3 else positions
    if len(positions) == SPATIAL and positions.dim() == 3 and bool((positions[1:] != first).any()):
        what = "positions of 3 axes, of pictures, do not tell where sequences begin"
        raise PlanError(what, fix="pass cu_seq_lens_q, or 4 axes of which the first counts the tokens of each sequence")
    if first.shape[-1] != seq:  # positions of something else, such as of all keys of a cache
        return Sequences(build_layout(np.full(batch, seq)).to(positions.device))
    first = first.reshape(-1, seq).expand(batch, seq)
    return _of_starts(F.pad(first.diff(dim=1) != 1, (1, 0), value=True))


def _of_starts(starts: Tensor) -> Sequences:
    """Sequences that begin where `starts`, (batch, seq) bool, is True."""
    places = starts.flatten().nonzero().flatten().cpu().numpy()
    return Sequences(build_layout(np.diff(np.append(places, starts.numel()))).to(starts.device))


NAME = "unpad"
SPATIAL = 3  # axes of positions of time, height and width, without one of tokens
OWN_MASKS = ("doge",)  # make a mask of their own in each layer of what they get, and then it is not causal
# Parts of masks that boundaries, windows of layers and causality say, functions of transformers.masking_utils.
PLAIN = ("causal_mask_function", "sliding_window_overlay", "packed_sequence_mask_function", "padding_mask_function")
noted: "Scope[set[object] | None]" = Scope(None)  # set of what attends by `attend`, and of visibility but `PLAIN`
EMPTY = build_layout(np.zeros(0))
EMPTY.grouped  # noqa: B018 - which a graph could not compute


def register() -> None:
    """Make `attn_implementation="unpad"` known to transformers; repeated calls change nothing."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def _refusal(config: type) -> str:
    """Why models of a class of configurations do not attend by `attend`; empty if they do.

    These use the mask in attention of their own, which shows later tokens where there is none.
    """
    folder, _, kind = config.__module__.rpartition(".configuration_")
    module = sys.modules.get(f"{folder}.modeling_{kind}")
    asks = module is None or hasattr(module, "ALL_ATTENTION_FUNCTIONS")
    asks = asks or any(getattr(one, "_supports_attention_backend", False) for one in vars(module).values())
    if asks and getattr(config, "model_type", "") not in OWN_MASKS:
        return ""
    return f"models of {config.__name__} compute attention by themselves"


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    local_size: int | None = None,
    **rest: Any,
) -> Tensor | None:
    """The mask that transformers hands to every layer.

    Args:
        mask_function: visibility of a key at a query, (batch, head, query, key indices) -> bool.
        attention_mask: (batch, seq) bool, True = real, or None.
        use_vmap: the model's own visibility, which only a dense mask can hold.
        local_size: the window or chunk of local attention.

    Returns:
        None where every row is one sequence; (batch, seq) bool where cells are padding; that of `hand` where
        transformers found several; a dense (batch, 1, queries, keys) bool mask where a cache, chunks or the model's own
        visibility need one. In a graph of torch.compile, which reads no number of a tensor, it is dense where cells may
        be padding, and else that of `hand`.

    Raises:
        PlanError: layers of the model do not attend by `attend`.
    """
    in_graph = torch.compiler.is_compiling()
    if in_graph and attention_mask is None and q_length == kv_length and not use_vmap:
        given = {"mask_function": mask_function, "local_size": local_size, **rest}
        return _mask_outside(batch_size, q_length, kv_length, **given)
    if not in_graph and (refusal := _refusal(type(rest.get("config")))):
        raise PlanError(refusal, fix='leave attn_implementation="unpad" out, and pad rows')
    diagonal, needs_dense = None, in_graph or use_vmap or q_length != kv_length
    if mask_function is not None and not needs_dense and q_length > 1:
        diagonal = _Diagonals(mask_function, batch_size, q_length, torch.device(rest.get("device", "cpu")))
        if not _is_plain(mask_function):
            _note(mask_function)
            needs_dense = _needs_dense(diagonal, q_length, local_size)
    if needs_dense:
        rest |= {"attention_mask": attention_mask, "use_vmap": use_vmap, "local_size": local_size}
        rest |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        rest |= {} if mask_function is None else {"mask_function": mask_function}
        return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **rest)
    if attention_mask is not None and not bool(attention_mask.all()):
        return attention_mask.bool()
    # Layers get the boundaries by the mask, since some models hand neither positions nor `cu_seq_lens_q` on to them.
    layout = None if diagonal is None else _of_starts(F.pad(~diagonal(-1), (1, 0), value=True)).layout
    return None if layout is None or layout.num_seqs == batch_size else hand(layout)


@outside_graphs
def _mask_outside(batch_size: int, q_length: int, kv_length: int, **given: Any) -> Tensor:
    """`make_mask` of a batch without padding, as graphs read it."""
    mask = make_mask(batch_size, q_length, kv_length, **given)
    mask = hand(build_layout(np.full(batch_size, q_length))) if mask is None else mask
    return mask.to(given.get("device", "cpu"))


def _is_plain(sees: Callable[..., Tensor]) -> bool:
    """True if a visibility function of transformers, with those that it calls, is made of `PLAIN` alone."""
    held = [cell.cell_contents for cell in sees.__closure__ or ()]
    parts = [one for each in held for one in (each if isinstance(each, tuple) else (each,)) if callable(one)]
    if parts:
        return all(map(_is_plain, parts))
    return sees.__module__ == causal_mask_function.__module__ and sees.__qualname__.partition(".")[0] in PLAIN


class _Diagonals:
    """Diagonals of the dense mask that a visibility function describes."""

    def __init__(self, sees: Callable[..., Tensor], batch: int, length: int, device: torch.device) -> None:
        self.sees, self.length, self.device = sees, length, device
        self.rows = torch.arange(batch, device=device)[:, None]
        self.head = torch.zeros((), dtype=torch.long, device=device)

    def __call__(self, ahead: int) -> Tensor:
        """(batch, length - |ahead|) bool, whether each token sees the one `ahead` of it; only tokens that have one."""
        place = torch.arange(max(-ahead, 0), self.length - max(ahead, 0), device=self.device)[None]
        return self.sees(self.rows, self.head, place, place + ahead).expand(len(self.rows), -1)


def _needs_dense(diagonal: _Diagonals, length: int, local_size: int | None) -> bool:
    """True if visibility is neither causal, nor causal within a window, nor of the whole row.

    Two diagonals of the dense mask tell: that of the next token, which causal attention hides and full attention shows
    everywhere, and that of the furthest key of a window.
    """
    following = diagonal(1)
    if bool(following.any()):
        return not bool(following.all()) or (local_size is not None and local_size < length)
    if local_size is None or local_size >= length:
        return False
    # The furthest key that a window shows. Past the first token that sees it, every token of a sequence does; of a
    # chunk only the last token does, so no two neighbours do. Where no token does, all sequences are shorter.
    furthest = diagonal(1 - local_size)
    return bool(furthest.any()) and not bool((furthest[:, 1:] & furthest[:, :-1]).any())


def _note(found: object) -> None:
    if (inside := noted.get()) is not None:
        inside.add(found)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer of transformers.

    Args:
        query: (batch, heads, seq, head_dim).
        key, value: (batch, kv_heads, keys, head_dim); values may have another head_dim.
        attention_mask: what `make_mask` returned.
        scaling: factor of the scores, by default 1 / sqrt(head_dim).
        sliding_window, softcap, s_aux: window, softcap and sinks of `Attend`.
        position_bias: added to the scores, (batch or 1, heads, seq, keys).

    Returns:
        (batch, seq, heads, head_dim of values), and None for the weights.
    """
    _note(module)
    if torch.is_autocast_enabled(query.device.type):  # norms of queries and keys leave them in fp32
        query, key = query.to(value.dtype), key.to(value.dtype)
    batch, _, seq, head_dim = query.shape
    scale = head_dim**-0.5 if scaling is None else scaling
    # transformers keeps this on the module of every attention.
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    is_dense = attention_mask is not None and attention_mask.dim() == 4 and not is_handed(attention_mask)
    if seq != key.shape[2] or is_dense:
        return _dense(query, key, value, attention_mask, scale, softcap, s_aux, position_bias, dropout), None
    ragged = position_bias is None and (causal or sliding_window is None)
    how = Attend(
        causal,
        sliding_window if ragged else None,
        dropout,
        scale=None if abs(scale * head_dim**0.5 - 1) < 1e-12 else scale,
        softcap=softcap,
        sinks=s_aux,
    )
    if torch.compiler.is_compiling():
        fused = value.shape[3] == head_dim
        whole = kernel.choose_kernels(query.dtype, query.device, EMPTY, head_dim, how, fused=fused)
        if not whole or dropout or not ragged:
            given = scale, dropout, sliding_window, softcap, s_aux, position_bias, causal
            return _attend_outside(module, query, key, value, attention_mask, *given, **kwargs)
    sequences = find_sequences(batch, seq, attention_mask, kwargs)
    if not ragged:
        mask = _dense_mask(sequences, batch, seq, causal, query.device)
        if sliding_window is not None:
            place = torch.arange(seq, device=query.device)
            mask = mask & ((place[:, None] - place).abs() < sliding_window)
        return _dense(query, key, value, mask, scale, softcap, s_aux, position_bias, dropout), None
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # each (batch * seq, heads, head_dim)
    if sequences.real is not None:
        flat = [x.index_select(0, sequences.real) for x in flat]
    q, k, v = flat
    out = ragged_attention(q, k, v, sequences.layout, how)
    if sequences.real is not None:
        out = out.new_zeros(batch * seq, *out.shape[1:]).index_copy(0, sequences.real, out)
    return out.unflatten(0, (batch, seq)), None


_attend_outside = outside_graphs(attend)


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    dropout: float,
) -> Tensor:
    """Attention through a dense mask (batch, 1 or heads, queries, keys), bool or added, or to all keys without one."""
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    if softcap is None and sinks is None and bias is None:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)
        return out.transpose(1, 2)
    wide = wide_dtype(query.dtype)
    scores = (query @ key.transpose(-1, -2)).to(wide) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        # The lowest number and not -inf: a query of a padding cell sees nothing, and NaN spreads.
        low = torch.finfo(wide).min
        scores = scores.masked_fill(~mask, low) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(wide).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], 3)
    weights = F.dropout(scores.softmax(-1)[..., : key.shape[2]], dropout)
    mixed: Tensor = weights.to(value.dtype) @ value
    return mixed.transpose(1, 2)


def _dense_mask(sequences: Sequences, batch: int, seq: int, causal: bool, device: torch.device) -> Tensor:
    """Cells of a rectangle that see each other, (batch, 1, seq, seq) bool."""
    owner = sequences.layout.seq_of_token()
    if sequences.real is not None:  # a padding cell is a sequence of its own
        padded = -1 - torch.arange(batch * seq, device=device)
        owner = padded.index_copy(0, sequences.real, owner)
    rows = owner.unflatten(0, (batch, seq))
    mask: Tensor = rows[:, None, :, None] == rows[:, None, None, :]
    return mask.tril() if causal else mask
