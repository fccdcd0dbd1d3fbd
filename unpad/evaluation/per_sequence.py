"""Log-likelihoods of tokens, added up by sequence."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.batching.layout import Layout
from unpad.data.family import Data
from unpad.data.measuring import Measuring
from unpad.models.contract import ScoresTokens
from unpad.nn.precision import Precision, autocast


@torch.no_grad()
def token_sums(over: Measuring[Data], precision: Precision = "fp32") -> tuple[np.ndarray, np.ndarray]:
    """Negative log-likelihood of the targets of every sequence in nats, and their number, each (num_seqs,).

    Args:
        precision: that products are computed in; sums are in fp64.
    """
    model = over.model
    assert isinstance(model, ScoresTokens), "a model of text predicts tokens"

    def measure(batch: RaggedBatch) -> dict[str, np.ndarray]:
        with autocast(precision, over.device):
            sums, counts = per_sequence(model.token_nll(batch), batch)
        return {"nll": sums, "targets": counts}

    values = over.collect(measure)
    return values["nll"], values["targets"]


def per_sequence(nll: Tensor, batch: RaggedBatch) -> tuple[np.ndarray, np.ndarray]:
    """Add up (num_targets,) values by sequence; returns sums in fp64 and counts, each (num_seqs,)."""
    assert isinstance(batch.layout, Layout)
    bounds = batch.layout.cu_seqlens[1:].long()
    sequence = torch.searchsorted(bounds, batch.target_index, right=True).cpu().numpy()
    sums = np.bincount(sequence, weights=nll.cpu().double().numpy(), minlength=batch.num_seqs)
    return sums, np.bincount(sequence, minlength=batch.num_seqs)
