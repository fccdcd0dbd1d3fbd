"""Noise on embeddings (NEFTune) for flat batches: of each sequence by its own length.

Jain et al. (2023), "NEFTune: Noisy Embeddings Improve Instruction Finetuning".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unpad.hf.mixers import Boundaries
from unpad.hf.prepare import Prepared


def add_noise(prepared: Prepared, alpha: float) -> RemovableHandle:
    """Add noise to the embeddings in training: uniform, at most alpha / sqrt(length of the sequence * width).

    Returns:
        The hook, which its owner removes.
    """
    boundaries = next(hook for hook in prepared.model._forward_pre_hooks.values() if isinstance(hook, Boundaries))

    def noise(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor | None:
        """`out`: (batch, seq, width)."""
        if not module.training:
            return None
        lengths = torch.full((1, 1, 1), out.shape[1], device=out.device)
        if boundaries.layout is not None:
            own = boundaries.layout.cu_seqlens.diff()
            lengths = own.repeat_interleave(own).to(out.device).reshape(*out.shape[:2], 1)
        most = alpha / (lengths * out.shape[2]).float().sqrt()
        return out + torch.empty_like(out).uniform_(-1, 1) * most.to(out.dtype)

    handle: RemovableHandle = prepared.inner.get_input_embeddings().register_forward_hook(noise)
    return handle
