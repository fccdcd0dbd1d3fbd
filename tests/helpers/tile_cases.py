"""Calls of the kernels that multiply tiles: attention, and the head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.targets import running
from unpad.nn.losses import cross_entropy
from unpad.nn.native.attention import attention_backward, attention_forward
from unpad.nn.native.cross_entropy import supports_head
from unpad.nn.rope import rotary_frequencies, rotary_table

SEED = 5_000_000_011  # of dropout; needs both halves of 64 bits
NAMES = ("out", "log_z", "queries", "keys", "values", "key bias")


class Case(NamedTuple):
    """One call of attention."""

    lengths: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 32
    causal: bool = True
    rotary: bool = False
    qkv_bias: bool = False
    key_bias: bool = False
    dropout: float = 0.0
    window: int = 0
    scale: float = 1.0  # of queries and keys: with 8 some rows need a shift before exponentiation

    def inputs(self) -> Inputs:
        torch.manual_seed(sum(self.lengths) + self.head_dim)
        total, rows = sum(self.lengths), self.heads + 2 * self.kv_heads
        qkv = torch.randn(total, rows, self.head_dim)
        qkv[:, : -self.kv_heads] *= self.scale
        positions = torch.cat([torch.arange(0), *map(torch.arange, self.lengths)])
        tables = rotary_table(positions, rotary_frequencies(self.head_dim, 100.0, "none", 1.0), torch.float32)
        key_bias = None
        if self.key_bias:  # every third key is hidden, so that every query sees one that is not
            key_bias = torch.randn(total).masked_fill((positions % 3 == 2) & (self.window != 1), -torch.inf)
        return Inputs(
            qkv.bfloat16(), torch.randn(rows * self.head_dim).bfloat16() if self.qkv_bias else None, key_bias,
            *(tables if self.rotary else (None, None)), torch.randn(total, self.heads, self.head_dim).bfloat16(),
        )  # fmt: skip


class Inputs(NamedTuple):
    qkv: Tensor  # (total_tokens, heads + 2 * kv_heads, head_dim)
    qkv_bias: Tensor | None
    key_bias: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    grad: Tensor  # (total_tokens, heads, head_dim)

    def double(self) -> Inputs:
        return Inputs(*(None if x is None else x.double() for x in self))

    def part(self, start: int, stop: int) -> Inputs:
        """Tokens from `start` to `stop`."""
        whole = self._replace(qkv_bias=None)
        return Inputs(*(None if x is None else x[start:stop] for x in whole))._replace(qkv_bias=self.qkv_bias)


def attend(case: Case, given: Inputs, lengths: Sequence[int], bases: Tensor | None = None) -> list[Tensor]:
    """Everything that NAMES lists, the gradient of the key bias summed over heads."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    arguments = (
        *(given.qkv, given.qkv_bias, given.key_bias, cu_seqlens, case.heads, case.kv_heads, case.causal),
        *(case.head_dim**-0.5, given.cos, given.sin, case.dropout, SEED, bases, case.window),
    )
    out, log_z = attention_forward(*arguments)
    grad_qkv, grad_bias = attention_backward(given.grad, out, log_z, *arguments, case.key_bias)
    parts = grad_qkv.split([case.heads, case.kv_heads, case.kv_heads], 1)
    return [out, log_z, *parts, *([grad_bias] if case.key_bias else [])]


def attend_by(target: str, case: Case) -> list[Tensor]:
    with running(target):
        return attend(case, case.inputs(), case.lengths)


# --------------------------------------------------------------------------- the head


class Problem(NamedTuple):
    hidden: Tensor  # (num_rows, width)
    weight: Tensor  # (vocab_size, width)
    labels: Tensor
    smoothing: float = 0.0

    def solved(self) -> list[Tensor]:
        """Loss and nll, each a sum, and the gradients of hidden and weight."""
        hidden, weight = self.hidden.detach().requires_grad_(), self.weight.detach().requires_grad_()
        loss, nll = cross_entropy(hidden, weight, self.labels, self.smoothing)
        return [loss.detach(), nll, *torch.autograd.grad(loss, [hidden, weight])]

    def solved_by(self, target: str) -> list[Tensor]:
        with running(target):
            assert supports_head(self.hidden, self.weight.bfloat16()) == (target != "avx512_bf16")
            return self.solved()

    def exact(self) -> list[Tensor]:
        """The same in fp64, of the weight that computes."""
        hidden, weight = self.hidden.double().requires_grad_(), self.weight.bfloat16().double().requires_grad_()
        logits = hidden @ weight.T
        nll = F.cross_entropy(logits, self.labels, reduction="sum")
        loss = F.cross_entropy(logits, self.labels, reduction="sum", label_smoothing=self.smoothing)
        return [loss.detach(), nll.detach(), *torch.autograd.grad(loss, [hidden, weight])]


def drawn(num: int, width: int, vocab_size: int, smoothing: float = 0.0, spread: float = 0.05) -> Problem:
    torch.manual_seed(num + width)
    hidden, weight = torch.randn(num, width).bfloat16(), torch.randn(vocab_size, width) * spread
    return Problem(hidden, weight, torch.randint(vocab_size, (num,)), smoothing)
