"""Pipeline parallelism: the blocks of a decoder are divided by cost among processes, each with its own device.

Every process is a stage: it holds the weights, gradients and moments of its blocks, and computes one micro-batch while
the other stages compute others. The first stage also has the embedding, the last the norm and the head. Only the stream
between two blocks is sent, and its gradient back; the layouts of all micro-batches come from the plan, which every
process has.

The bits equal those of one process, because every sum has the same order: gradients of micro-batches go through
`processes/sums.py`, a tied head's gradient of a micro-batch is added to the embedding's before rounding, and the norm
of all gradients is the norm of their norms in the model's order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.batching.plan import Plan
from unpad.models.contract import ScoresTokens
from unpad.models.decoder import Config, Decoder
from unpad.nn.block import Stream
from unpad.nn.flops import sizes_of, training_operations
from unpad.nn.linear import compute_dtype
from unpad.nn.losses import Terms, cross_entropy, token_nll
from unpad.nn.precision import wide_dtype
from unpad.processes.group import TIMEOUT_S, Group, lost_processes

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


class PipelinedDecoder(ScoresTokens):
    """One stage of a decoder; the other processes of the group have the other stages.

    Parameters keep their names in the decoder; parameters of other stages are on the meta device and take no memory.
    Every method that computes or gathers is collective: all processes call it with equal batches.

    Args:
        decoder: the whole model, with equal weights in all processes; must not be used afterwards.
        group: the processes, one per stage, in the order of the stages.
        device: that the stage computes on.
        timeout_s: seconds that a stage waits for another.
    """

    config: Config

    def __init__(self, decoder: Decoder, group: Group, device: torch.device, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__()
        self.config, self.causal, self.head_dim = decoder.config, decoder.causal, decoder.head_dim
        self.group = group
        self.spans = stage_blocks(decoder.config, decoder.vocab_size, group.size)
        is_last, tied = group.rank == group.size - 1, decoder.head is None
        ranks = range(group.size)
        stages, ties = _connected(ranks, timeout_s), _connected((0, ranks[-1]), timeout_s) if tied else None
        head = decoder.embed.weight.detach().to(device).requires_grad_() if is_last and tied else None
        for name, module in decoder.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                is_own = self._stage_of(name) == group.rank
                module.to(device if is_own else "meta").requires_grad_(is_own)
        for name, module in decoder.named_children():
            self.add_module(name, module)
        if is_last and not tied:
            head = decoder.head_weight
        span = self.spans[group.rank]
        self.part = Part(decoder, span, group.rank, group.size, head, stages, ties, device)

    def _stage_of(self, name: str) -> int:
        """The stage that has a parameter or module of the decoder."""
        part, _, rest = name.partition(".")
        if part == "blocks":
            index = int(rest.partition(".")[0])
            return next(stage for stage, blocks in enumerate(self.spans) if index in blocks)
        return 0 if part in ("embed", "position_embed") else self.group.size - 1

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
        """See `Decoder`."""
        return self.part.decoder.count_targets(batch)

    # ----------------------------------------------------------------------- passes

    @torch.no_grad()
    def forward(self, batch: RaggedBatch) -> Tensor:
        """Hidden states, (total_tokens, width), in every process."""
        dtype = compute_dtype(torch.empty(0, dtype=self.part.dtype, device=self.part.device))
        shape = (batch.total_tokens, self.config.width)
        return self._computed(batch, shape, dtype, lambda stream: self.part.hidden(stream, None))

    @torch.no_grad()
    def losses(self, batch: RaggedBatch) -> Terms:
        """See `Decoder`; the gradients come from `pipeline_schedule.run_update`."""

        def measured(stream: Stream) -> Tensor:
            terms = self.part.losses(stream, batch, self.label_smoothing)
            return torch.stack([terms["cross_entropy"][0], terms["nll"][0]])

        loss, nll = self._computed(batch, (2,), wide_dtype(self.part.dtype), measured)
        return {"cross_entropy": (loss, batch.num_targets), "nll": (nll, batch.num_targets)}

    @torch.no_grad()
    def token_nll(self, batch: RaggedBatch) -> Tensor:
        """See `Decoder`, in every process."""

        def measured(stream: Stream) -> Tensor:
            assert self.part.head is not None, "the last stage has the head"
            hidden = self.part.hidden(stream, batch.target_index)
            return token_nll(hidden, self.part.head, batch.labels.index_select(0, batch.target_index))

        return self._computed(batch, (len(batch.target_index),), wide_dtype(self.part.dtype), measured)

    @torch.no_grad()
    def embed_tokens(self, ids: Tensor) -> Tensor:
        """Embeddings of token ids, (num,) int64 -> (num, width), in every process."""
        import torch.distributed as dist

        part = self.part
        embedded = torch.empty((len(ids), self.config.width), dtype=wide_dtype(part.dtype), device=ids.device)
        if part.is_first:
            embedded = part.decoder.embed_tokens(ids)
        with lost_processes():
            dist.broadcast(embedded, 0, part.stages)
        return embedded

    def _computed(
        self, batch: RaggedBatch, shape: tuple[int, ...], dtype: torch.dtype, last: Callable[[Stream], Tensor]
    ) -> Tensor:
        """Run a batch through all stages, and send what the last stage computes from its stream to every process."""
        import torch.distributed as dist

        part = self.part
        if part.is_first:
            stream = part.decoder.embedded(batch)
        else:
            x = torch.empty((batch.total_tokens, self.config.width), dtype=part.dtype, device=part.device)
            delta = torch.empty_like(x, dtype=compute_dtype(x))
            with lost_processes():
                dist.recv(x, part.rank - 1, part.stages)
                dist.recv(delta, part.rank - 1, part.stages)
            stream = part.decoder.stream_of(batch, x, delta)
        result = torch.empty(shape, dtype=dtype, device=part.device)
        if part.is_last:
            result = last(stream)
        else:
            stream = part.through(stream)
            assert stream.delta is not None, "a stage has a block"
            with lost_processes():
                dist.send(stream.x, part.rank + 1, part.stages)
                dist.send(stream.delta, part.rank + 1, part.stages)
        with lost_processes():
            dist.broadcast(result, part.size - 1, part.stages)
        return result

    # ----------------------------------------------------------------------- weights

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the weights of this stage from those of the whole model; otherwise as in nn.Module."""
        tied = state_dict.get("embed.weight")
        if self.part.ties is not None and self.part.head is not None and tied is not None:
            with torch.no_grad():
                self.part.head.copy_(tied)
        stage_state = {name: tensor for name, tensor in state_dict.items() if self._stage_of(name) == self.group.rank}
        return super().load_state_dict(stage_state, strict=False, assign=assign)

    def gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of all stages by name, on the CPU, in the leading process; unchanged in the others.

        Args:
            tensors: of this stage, such as weights or the optimizer's state; other stages' are on the meta device.
        """
        import torch.distributed as dist

        local = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items() if not tensor.is_meta}
        listed_by_rank = self.group.exchange(
            {name: (str(values.dtype), list(values.shape)) for name, values in local.items()}
        )
        if not self.group.leads:
            with lost_processes():
                for tensor in local.values():
                    dist.send(tensor, 0, self.part.stages)
            return dict(tensors)
        whole = dict(local)
        for rank, listed in enumerate(listed_by_rank[1:], start=1):
            for name, (dtype, shape) in listed.items():
                whole[name] = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
                with lost_processes():
                    dist.recv(whole[name], rank, self.part.stages)
        return whole

    def whole_decoder(self) -> Decoder | None:
        """The decoder with the weights of all stages, on the processor, in the leading process; None in the others."""
        weights = self.gathered(self.state_dict())
        if not self.group.leads:
            return None
        decoder = Decoder(self.config, self.part.decoder.vocab_size).to(self.part.dtype)
        decoder.load_state_dict(weights)
        return decoder


def _connected(ranks: Sequence[int], timeout_s: float) -> ProcessGroup:
    """A subgroup of processes, created by all of them, with a time limit on its messages."""
    import torch.distributed as dist

    with lost_processes():
        group: ProcessGroup = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
    return group
