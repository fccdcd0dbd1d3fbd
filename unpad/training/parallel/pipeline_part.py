"""Division of a decoder into pipeline stages, balanced by cost, and what one stage computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.batching.plan import Plan
from unpad.models.decoder import Config, Decoder
from unpad.nn.block import Stream
from unpad.nn.flops import sizes_of, training_operations
from unpad.nn.losses import Terms, cross_entropy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def divide(costs: Sequence[float], head: float, num_stages: int) -> list[range]:
    """Divide blocks into consecutive stages, at least one block each, so that the most expensive stage costs least.

    Args:
        costs: cost of every block; at least as many as stages.
        head: additional cost of the last stage.
    """
    assert 0 < num_stages <= len(costs), (num_stages, len(costs))
    num = len(costs)
    # cheapest[first]: cost of the most expensive stage from block `first` on, and the block where its second stage
    # begins.
    cheapest = [(sum(costs[first:]) + head, num) for first in range(num)]
    later: list[list[tuple[float, int]]] = [cheapest]
    for stages in range(2, num_stages + 1):
        cheapest = [
            min((max(sum(costs[first:stop]), later[-1][stop][0]), stop) for stop in range(first + 1, num - stages + 2))
            for first in range(num - stages + 1)
        ]
        later.append(cheapest)
    bounds = [0]
    for choices in reversed(later):
        bounds.append(choices[bounds[-1]][1])
    return [range(first, stop) for first, stop in pairwise(bounds)]


def stage_blocks(config: Config, vocab_size: int, num_stages: int) -> list[range]:
    """Blocks of every stage of a decoder, balanced by the operations of training at the longest sequence."""
    whole, lengths = sizes_of(config, vocab_size), [config.longest]
    single = replace(whole, blocks=1, head_weights=0, ending_weights=0, windows=())
    windows = [config.attention_of(index).window for index in range(config.blocks)]
    blocks = [replace(single, windows=() if window is None else (window,)) for window in windows]
    head = training_operations(replace(whole, blocks=0, ending_weights=0, windows=()), lengths, config.longest)
    return divide([training_operations(block, lengths, 0) for block in blocks], head, num_stages)


def share_at_work(plan: Plan, num_stages: int) -> float:
    """Largest possible share of time in which a stage computes: an update of m equal micro-batches takes m +
    `num_stages` - 1 turns."""
    counts = np.diff(plan.step_offsets)
    return float(counts.sum() / max((counts + num_stages - 1).sum(), 1))


@dataclass(frozen=True, eq=False)
class Part:
    """The part of a decoder that one stage computes.

    Args:
        decoder: modules of other stages are on the meta device.
        blocks: of this stage.
        rank: of its process, among `size`.
        head: (vocab_size, width), of the last stage, a leaf of its own if it is a copy of the embedding; else None.
        stages: connects all stages.
        ties: connects the first stage with the last if the head is the embedding; else None.
        device: that computes.
    """

    decoder: Decoder
    blocks: range
    rank: int
    size: int
    head: Tensor | None
    stages: ProcessGroup
    ties: ProcessGroup | None
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.decoder.norm.weight.dtype

    @property
    def draws(self) -> bool:
        """True if blocks or embedding draw from torch's generator in training."""
        config = self.decoder.config
        return max(config.dropout, config.attention_dropout, config.embed_dropout) > 0

    def through(self, stream: Stream) -> Stream:
        """The stream after the blocks of this stage."""
        for index in self.blocks:
            stream = self.decoder.blocks[index](stream, None, index)
        return stream

    def hidden(self, stream: Stream, wanted: Tensor | None) -> Tensor:
        """Final hidden states, in the last stage; see `Decoder.finished`."""
        return self.decoder.finished(stream, self.blocks.start, wanted=wanted)

    def losses(self, stream: Stream, batch: RaggedBatch, label_smoothing: float) -> Terms:
        """Loss terms, in the last stage; see `Decoder.losses`."""
        assert self.head is not None, "the last stage has the head"
        labels = batch.labels.index_select(0, batch.target_index)
        loss, nll = cross_entropy(self.hidden(stream, batch.target_index), self.head, labels, label_smoothing)
        return {"cross_entropy": (loss, batch.num_targets), "nll": (nll, batch.num_targets)}
