"""Ratio of two costs of a model: one token, and one pair of positions that attend."""

from __future__ import annotations

import math

from torch import nn

from unpad.models.contract import Model
from unpad.models.decoder import Decoder
from unpad.nn.block import Attention


def cells_per_token(model: Model) -> float:
    """Number of pairs of positions that cost as much attention as the rest of one token; infinite without attention.

    Counted in multiplications of training: 6 per weight of a matrix product and token, 12 per channel of the query
    heads and pair, half of them in causal attention (as `nn/flops.py`). A pair is one of the length**2 of a sequence.
    Every token is taken to pass every matrix, the head over the vocabulary and a vision tower included, and attention
    within a window that is shorter than the longest sequence is counted at the whole window, so that its cost is the
    token's. Attention through inducing points, pooling and pruning grow with the tokens and are left out.

    It only decides how work is shared out; results do not depend on it.
    """
    weights = channels = 0
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            weights += sum(one.numel() for one in module.parameters(recurse=False) if one.dim() > 1)
        if isinstance(module, Decoder) and module.head is None:
            weights += module.embed.weight.numel()
        if isinstance(module, Attention):
            attended = module.heads * module.head_dim
            if module.window is not None and module.window < model.config.longest:
                weights += 2 * attended * module.window
            else:
                channels += attended if module.causal else 2 * attended
    return weights / channels if channels else math.inf
