"""Visual tokens of a step: the number per sample, and the number that entered each block of the language model."""

from __future__ import annotations

import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.models.contract import PrunesTokens


def visual_tokens(model: object, batch: RaggedBatch) -> dict[str, Tensor]:
    """Visual tokens of every sample with images of a micro-batch, after the model's pass over it: (num_samples,) fp32
    by name; models without visual tokens have none."""
    if not isinstance(model, PrunesTokens) or batch.media is None or batch.media_seqs is None:
        return {}
    lengths = batch.media.layout.lengths().float()
    patches = lengths.new_zeros(batch.num_seqs).index_add_(0, batch.media_seqs, lengths)
    columns = {"visual_tokens": patches}
    columns |= {f"kept_block_{block}": expected for block, expected in enumerate(model.expected)}
    return {name: values.detach()[patches > 0] for name, values in columns.items()}


class VisualTokens:
    """Numbers of visual tokens of the samples with images of one step, micro-batch by micro-batch."""

    def __init__(self) -> None:
        self._columns: dict[str, list[Tensor]] = {}

    def add(self, columns: dict[str, Tensor]) -> None:
        """Add the numbers of one micro-batch, from `visual_tokens`."""
        for name, values in columns.items():
            self._columns.setdefault(name, []).append(values)

    def values(self) -> dict[str, float]:
        """Mean, minimum and maximum per sample, for the patches of its images and for the tokens that entered each
        block.

        In soft removal each token counts by its probability of being kept.
        """
        figures: dict[str, float] = {}
        for name, parts in self._columns.items():
            values = torch.cat(parts)
            if values.numel():
                figures |= {
                    f"{name}_mean": float(values.double().mean()),
                    f"{name}_min": float(values.min()),
                    f"{name}_max": float(values.max()),
                }
        return figures
