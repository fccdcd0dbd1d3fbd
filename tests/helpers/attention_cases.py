"""Calls of attention in one batch, and what they should return, in plain operations."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from unpad.batching.layout import Layout, build_layout
from unpad.nn import kernel, linear
from unpad.nn.attend import Attend
from unpad.nn.attention import reference_attention, self_attention
from unpad.nn.native import library
from unpad.nn.rope import rotary_frequencies, rotary_table, rotate


class Case(NamedTuple):
    """One call, its inputs as leaves."""

    qkv: Tensor  # (total_tokens, heads + 2 * kv_heads, head_dim)
    cu_seqlens: Tensor
    heads: int
    kv_heads: int
    causal: bool
    rotary: tuple[Tensor, Tensor] | None
    key_bias: Tensor | None
    dropout: float
    grad: Tensor  # (total_tokens, heads, head_dim)
    window: int | None = None

    def run(self, **changed: object) -> Tensor:
        case = self._replace(**changed)
        longest = int(case.cu_seqlens.diff().max()) if len(case.cu_seqlens) > 1 else 0
        how = Attend(case.causal, case.window, case.dropout, rotary=case.rotary, key_bias=case.key_bias)
        return self_attention(case.qkv, Layout(case.cu_seqlens, longest), case.heads, how)

    def gradients(self, out: Tensor) -> list[Tensor]:
        leaves = [self.qkv] if self.key_bias is None else [self.qkv, self.key_bias]
        return list(torch.autograd.grad(out, leaves, self.grad.to(out.dtype), materialize_grads=True))


SEED = 5_000_000_011  # needs both halves of 64 bits


def make_case(
    lengths: list[int], dtype: torch.dtype, heads: int = 4, kv_heads: int = 2, head_dim: int = 32, causal: bool = True,
    rotary: bool = False, bias: bool = False, dropout: float = 0.0, spread: float = 1.0,
) -> Case:  # fmt: skip
    torch.manual_seed(sum(lengths) + head_dim)
    total = sum(lengths)
    wide = torch.promote_types(dtype, torch.float32)
    qkv = torch.randn(total, heads + 2 * kv_heads, head_dim, dtype=torch.float64).mul(spread).to(dtype)
    cu_seqlens = build_layout(np.array(lengths, np.int64)).cu_seqlens
    tables = None
    if rotary:
        positions = torch.cat([torch.arange(0), *map(torch.arange, lengths)])
        tables = rotary_table(positions, rotary_frequencies(head_dim, 100.0, "none", 1.0), wide)
    key_bias = None
    if bias:  # every third key is hidden, but never the first one, which all queries of a sequence see
        key_bias = torch.randn(total, dtype=torch.float64).to(wide)
        key_bias[2::3] = -math.inf
        key_bias[cu_seqlens[:-1][cu_seqlens[:-1] < total].long()] = 0.5
        key_bias.requires_grad_()
    grad = torch.randn(total, heads, head_dim, dtype=torch.float64).to(dtype)
    return Case(qkv.requires_grad_(), cu_seqlens, heads, kv_heads, causal, tables, key_bias, dropout, grad)


def in_double(case: Case) -> Case:
    """The same numbers as fp64 leaves."""
    bias = None if case.key_bias is None else case.key_bias.detach().double().requires_grad_()
    rotary = None if case.rotary is None else (case.rotary[0].double(), case.rotary[1].double())
    return case._replace(
        qkv=case.qkv.detach().double().requires_grad_(), key_bias=bias, rotary=rotary, grad=case.grad.double()
    )


def mix(x: Tensor) -> Tensor:
    """The finaliser of MurmurHash3 on 32 bits kept in int64."""
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B & 0xFFFFFFFF
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ (x >> 16)


def kept(queries: Tensor, keys: Tensor, heads: int, dropout: float) -> Tensor:
    """Which weights stay, (heads, queries, keys) bool, from places in the run."""
    row = queries[None, :] * heads + torch.arange(heads)[:, None]
    low = mix(torch.full_like(row, SEED & 0xFFFFFFFF) ^ mix(row & 0xFFFFFFFF))
    bits = mix(mix(low ^ (SEED >> 32) ^ (row >> 32))[..., None] ^ (keys * 0x9E3779B9 & 0xFFFFFFFF))
    return bits >= int(dropout * 2**32)


def definition(case: Case) -> Tensor:
    """One sequence at a time, in plain operations and the type of the inputs."""
    q, k, v = case.qkv.split([case.heads, case.kv_heads, case.kv_heads], 1)
    if case.rotary is not None:
        q, k = rotate(q, *case.rotary), rotate(k, *case.rotary)
    k, v = (x.repeat_interleave(case.heads // case.kv_heads, 1) for x in (k, v))
    outputs = [q[:0]]
    for start, stop in pairwise(case.cu_seqlens.tolist()):
        scores = torch.einsum("qhd,khd->hqk", q[start:stop], k[start:stop]) / math.sqrt(q.shape[-1])
        if case.key_bias is not None:
            scores = scores + case.key_bias[start:stop]
        if case.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -math.inf)
        if case.window is not None:
            scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).tril(-case.window), -math.inf)
        weights = scores.softmax(-1)
        if case.dropout:
            places = torch.arange(start, stop)
            weights = weights * kept(places, places, case.heads, case.dropout) / (1 - case.dropout)
        outputs.append(torch.einsum("hqk,khd->qhd", weights.to(v.dtype), v[start:stop]))
    return torch.cat(outputs)


def error(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm."""
    assert got.shape == wanted.shape
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm().clamp_min(1e-300))


def parts(qkv_like: Tensor, case: Case) -> tuple[Tensor, ...]:
    return qkv_like.split([case.heads, case.kv_heads, case.kv_heads], 1)


# --------------------------------------------------------------------------- a card's kernel


@contextmanager
def as_on_a_card() -> Iterator[None]:
    """Choose kernels and rows inside as on a card, and compute what its flash kernel does, where it would."""
    _register_flash()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_load", lambda: (None, "of a card"))
        patch.setattr(kernel, "card_version", lambda device: 9)
        patch.setattr(linear, "round_rows", lambda x: x)
        yield


@cache
def _register_flash() -> None:
    import torch.nn.attention.varlen  # defines the operators

    def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float | None, window: Any) -> Tensor:
        how = Attend(window[1] == 0, window[0] + 1 if window[0] >= 0 else None, scale=scale)
        return reference_attention(q.float(), k.float(), v.float(), Layout(bounds, 0), how).to(q.dtype)

    def forward(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        assert len(bounds) > 1, "batch size must be positive"
        assert q.shape[2] % 8 == 0, "head_size must be a multiple of 8"
        assert q.shape[2] <= 256, "only supports head dimension at most 256"
        assert not (torch.version.hip and rest[9:]), "num_splits is not supported on ROCm"
        out = attend(q, k, v, bounds, *rest[4:6])
        return out, q.new_zeros(q.shape[1], len(q), dtype=torch.float32), torch.zeros(2, dtype=torch.uint64)

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        scores = partial(attend, bounds=rest[2], scale=rest[8], window=rest[9])
        with ThreadPoolExecutor(1) as worker:  # an operator below a dispatch mode has no functorch; a new thread has
            return worker.submit(lambda: torch.func.vjp(scores, q, k, v)[1](grad)).result()

    torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", forward)
    torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu", backward)
