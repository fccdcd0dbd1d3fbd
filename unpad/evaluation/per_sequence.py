"""Sums of a batch's targets by sequence."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.batching.layout import Layout


def per_sequence(nll: Tensor, batch: RaggedBatch) -> tuple[np.ndarray, np.ndarray]:
    """Add up (num_targets,) values by sequence; returns sums in fp64 and counts, each (num_seqs,)."""
    assert isinstance(batch.layout, Layout)
    bounds = batch.layout.cu_seqlens[1:].long()
    sequence = torch.searchsorted(bounds, batch.target_index, right=True).numpy()
    sums = np.bincount(sequence, weights=nll.double().numpy(), minlength=batch.num_seqs)
    return sums, np.bincount(sequence, minlength=batch.num_seqs)
