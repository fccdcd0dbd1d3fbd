"""Shapes and sums of masks of a batch, in words, for `--verbose`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.batching.layout import Layout, PaddedLayout
from unpad.terminal.table import number_of


def describe_batch(batch: RaggedBatch) -> list[str]:
    """One line with the lengths, then one per tensor: shape, dtype and, for masks, the number of True entries."""
    lengths = batch.layout.lengths()
    longest = int(lengths.max()) if batch.num_seqs else 0
    head = f"{number_of(batch.num_seqs, 'sequences')}, {number_of(batch.total_tokens, 'tokens')}, the longest {longest}"
    return [head, *(f"{name} {_tensor(value)}" for name, value in _tensors(batch))]


def _tensors(holder: Any, prefix: str = "") -> list[tuple[str, Tensor]]:
    """Tensors of a batch and of its parts, by dotted name."""
    found: list[tuple[str, Tensor]] = []
    for field in fields(holder):
        value = vars(holder)[field.name]
        parts = value if isinstance(value, tuple) else (value,)
        for part in parts:
            name = f"{prefix}{field.name}" if part is value else f"{prefix}{type(part).__name__}"
            if isinstance(part, Tensor):
                found.append((name, part))
            elif isinstance(part, Layout):
                found.append((f"{name}.cu_seqlens", part.cu_seqlens))
            elif isinstance(part, PaddedLayout):
                found.append((f"{name}.attention_mask", part.attention_mask))
            elif part is not None:
                found += _tensors(part, f"{name}.")
    return found


def _tensor(value: Tensor) -> str:
    shown = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return shown + (f", {int(value.sum()):,} True" if value.dtype == torch.bool else "")
