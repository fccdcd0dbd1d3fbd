"""A stand-in for a card on the processor: its choice of kernels, and its attention by the definition."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from unpad.batching.layout import build_layout
from unpad.nn import attention, linear
from unpad.nn.attend import Attend
from unpad.nn.attention import reference_attention
from unpad.nn.kernel import Kernel
from unpad.nn.native import library


def _attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float | None, reach: list[int]) -> Tensor:
    layout = build_layout(np.diff(bounds.numpy()).astype(np.int64))
    how = Attend(causal=reach[1] == 0, window=reach[0] + 1 if reach[0] >= 0 else None, scale=scale)
    return reference_attention(q.float(), k.float(), v.float(), layout, how)


def _forward(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, *given: Any, **more: Any) -> tuple[Tensor, ...]:
    _, _, _, _, scale, reach, *_ = given
    out = _attend(q, k, v, bounds, scale, reach).to(q.dtype)
    return out, q.new_zeros(q.shape[1], len(q), dtype=torch.float32), torch.zeros(2, dtype=torch.uint64)


def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, ...]:
    _, _, bounds, _, _, _, _, _, scale, reach = given

    def gradients() -> tuple[Tensor, ...]:
        wanted = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(_attend(*wanted, bounds, scale, reach), wanted, grad.float())

    with ThreadPoolExecutor(1) as fresh:  # an operator's own thread records nothing
        return fresh.submit(gradients).result()


torch.library.register_kernel(varlen._varlen_attn._qualname, "cpu", _forward)
torch.library.register_kernel(varlen._varlen_attn_backward._qualname, "cpu", _backward)


@contextmanager
def standing_in() -> Iterator[None]:
    """Compute inside as a card does: no native kernels, rows as they are, and variable-length attention."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_load", lambda: (None, "of a card"))
        patch.setattr(attention, "choose_kernels", lambda *_, **__: (Kernel.VARLEN_FLASH,))
        patch.setattr(linear, "round_rows", lambda x: x)
        yield
