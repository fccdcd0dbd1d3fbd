"""A decoder whose blocks are divided among processes, each with a device of its own: pipeline parallelism.

Every process is a stage: it holds the weights, gradients and moments of its blocks, and computes them for one
micro-batch while the others compute theirs for other ones. The first also has the embedding, the last the norm and the
head. Only the stream between two blocks travels, and its gradient back; the layouts of all micro-batches come from the
plan, which every process has.

Bits are those of one process. What is added in another order there is not added here: gradients of micro-batches go
through `processes/sums.py`, a tied head's part of a micro-batch is added to the embedding's before it is rounded, and
the norm of all gradients is that of their norms in the model's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.errors import UnpadError
from unpad.models.contract import ScoresTokens
from unpad.models.decoder import Config, Decoder
from unpad.nn.block import Stream
from unpad.nn.flops import sizes_of, training_operations
from unpad.nn.linear import compute_dtype
from unpad.nn.losses import Terms, cross_entropy, token_nll
from unpad.nn.precision import Precision, wide_dtype
from unpad.processes.group import ALONE, Group, lost_processes
from unpad.processes.sums import GradientSum
from unpad.training.share import MicroResult, Share, gradient_sum

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def divide(costs: Sequence[float], head: float, num_stages: int) -> list[range]:
    """Blocks of every stage: consecutive ones, at least one each, so that the dearest stage is as cheap as can be.

    Args:
        costs: of every block; at least as many as stages.
        head: cost of what the last stage has besides.
    """
    assert 0 < num_stages <= len(costs), (num_stages, len(costs))
    num = len(costs)
    # cheapest[first]: the dearest of the stages that begin with block `first`, and where the second of them begins.
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
    one = replace(whole, blocks=1, head_weights=0, ending_weights=0, windows=())
    windows = [config.attention_of(index).window for index in range(config.blocks)]
    blocks = [replace(one, windows=() if window is None else (window,)) for window in windows]
    head = training_operations(replace(whole, blocks=0, ending_weights=0, windows=()), lengths, config.longest)
    return divide([training_operations(block, lengths, 0) for block in blocks], head, num_stages)


@dataclass(frozen=True, eq=False)
class Part:
    """The part of a decoder that one stage computes.

    Args:
        decoder: modules of other stages are on the meta device.
        blocks: of this stage.
        rank: of its process, among `size`.
        head: (vocab_size, width), of the last stage, a leaf of its own if it is a copy of the embedding; else None.
        ties: connects the first stage with the last if the head is the embedding; else None.
        device: that computes.
    """

    decoder: Decoder
    blocks: range
    rank: int
    size: int
    head: Tensor | None
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
        """Of the weights."""
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
        """Hidden states that the last stage ends with; as of `Decoder.finished`."""
        return self.decoder.finished(stream, self.blocks.start, wanted=wanted)

    def losses(self, stream: Stream, batch: RaggedBatch, label_smoothing: float) -> Terms:
        """Loss terms in the last stage; as of `Decoder.losses`."""
        assert self.head is not None, "the last stage has the head"
        labels = batch.labels.index_select(0, batch.target_index)
        loss, nll = cross_entropy(self.hidden(stream, batch.target_index), self.head, labels, label_smoothing)
        return {"cross_entropy": (loss, batch.num_targets), "nll": (nll, batch.num_targets)}


class PipelinedDecoder(ScoresTokens):
    """One stage of a decoder, in a process that the others of its group have the other stages of.

    Parameters have the names that they have in the decoder; those of other stages are on the meta device, where they
    take no memory. Every method that computes or gathers is collective: all processes call it with equal batches.

    Args:
        decoder: the whole model, with equal weights in all processes; it must not be used any more.
        group: the processes, one per stage, in the order of the stages.
        device: that the stage computes on.
    """

    config: Config

    def __init__(self, decoder: Decoder, group: Group, device: torch.device) -> None:
        super().__init__()
        self.config, self.causal, self.head_dim = decoder.config, decoder.causal, decoder.head_dim
        self.group = group
        self.spans = stage_blocks(decoder.config, decoder.vocab_size, group.size)
        is_last, tied = group.rank == group.size - 1, decoder.head is None
        head = decoder.embed.weight.detach().to(device).requires_grad_() if is_last and tied else None
        for name, module in decoder.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                is_own = self._stage_of(name) == group.rank
                module.to(device if is_own else "meta").requires_grad_(is_own)
        for name, module in decoder.named_children():
            self.add_module(name, module)
        if is_last and not tied:
            head = decoder.head_weight
        own = self.spans[group.rank]
        self.part = Part(decoder, own, group.rank, group.size, head, _ties(group) if tied else None, device)

    def _stage_of(self, name: str) -> int:
        """The stage that has a parameter or module of the decoder."""
        part, _, rest = name.partition(".")
        if part == "blocks":
            index = int(rest.partition(".")[0])
            return next(stage for stage, blocks in enumerate(self.spans) if index in blocks)
        return 0 if part in ("embed", "position_embed") else self.group.size - 1

    def describe(self) -> str:
        """The stages in one line."""
        spans = [f"{blocks.start} to {blocks[-1]}" if len(blocks) > 1 else f"{blocks.start}" for blocks in self.spans]
        return f"pipeline stages: blocks {', '.join(spans[:-1])} and {spans[-1]}, one stage in each process"

    # ----------------------------------------------------------------------- training

    def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
        """As of `Decoder`."""
        return self.part.decoder.count_targets(batch)

    def gradient_sum(self, kind: str) -> GradientSum:
        """The sum over micro-batches that a recipe's `train.sums` names."""
        return _OfStage(gradient_sum(self.group, kind, list(self.parameters())), each_micro=kind == "exact")

    def accumulate(
        self,
        micros: Mapping[int, RaggedBatch],
        share: Share,
        loss: Callable[[Terms], Tensor],
        precision: Precision,
        scale: float,
    ) -> dict[int, MicroResult]:
        """Add the gradients of an update to those of this stage's parameters.

        Args:
            micros: all micro-batches with targets by their places in the update.
            share: of all micro-batches.
            loss: what the backward pass of a micro-batch begins with.
            scale: that `share.sums` takes out.

        Returns:
            Results of the micro-batches by their places, in the last stage; none in the others.

        Raises:
            LostProcessError: another stage is gone or silent.
        """
        from unpad.training.pipeline_schedule import PipelineUpdate, run_update

        if not micros:
            return {}
        each_micro = isinstance(share.sums, _OfStage) and share.sums.each_micro
        update = PipelineUpdate(micros, share, loss, precision, scale, self.label_smoothing, each_micro)
        return {number: MicroResult(terms, {}) for number, terms in run_update(self.part, update).items()}

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """L2 norm of the gradients of all stages; those of this stage come in the order of its parameters."""
        numbers = [number for number, parameter in enumerate(self.parameters()) if parameter.grad is not None]
        norms = torch._foreach_norm(list(gradients)) if gradients else ()
        told = self.group.exchange([[n, float(norm)] for n, norm in zip(numbers, norms, strict=True)])
        every = [norm for _, norm in sorted((number, norm) for own in told for number, norm in own)]
        norms_of_all = torch.tensor(every, dtype=wide_dtype(self.part.dtype))
        norm: Tensor = torch.linalg.vector_norm(norms_of_all)
        return norm

    @torch.no_grad()
    def share_tied(self) -> None:
        """Give the last stage the embedding of the first as its head, after an update."""
        part = self.part
        if part.ties is None:
            return
        import torch.distributed as dist

        with lost_processes():
            if part.is_first:
                dist.send(part.decoder.embed.weight.detach(), part.size - 1, part.ties)
            elif part.head is not None:
                received = torch.empty_like(part.head)
                dist.recv(received, 0, part.ties)
                part.head.copy_(received)

    # ----------------------------------------------------------------------- evaluation

    @torch.no_grad()
    def forward(self, batch: RaggedBatch) -> Tensor:
        """Hidden states, (total_tokens, width), in every process."""
        dtype = compute_dtype(torch.empty(0, dtype=self.part.dtype, device=self.part.device))
        shape = (batch.total_tokens, self.config.width)
        return self._computed(batch, shape, dtype, lambda stream: self.part.hidden(stream, None))

    @torch.no_grad()
    def losses(self, batch: RaggedBatch) -> Terms:
        """As of `Decoder`, but for the gradients: these come from `accumulate`."""

        def measured(stream: Stream) -> Tensor:
            terms = self.part.losses(stream, batch, self.label_smoothing)
            return torch.stack([terms["cross_entropy"][0], terms["nll"][0]])

        loss, nll = self._computed(batch, (2,), wide_dtype(self.part.dtype), measured)
        return {"cross_entropy": (loss, batch.num_targets), "nll": (nll, batch.num_targets)}

    @torch.no_grad()
    def token_nll(self, batch: RaggedBatch) -> Tensor:
        """As of `Decoder`, in every process."""

        def measured(stream: Stream) -> Tensor:
            assert self.part.head is not None, "the last stage has the head"
            hidden = self.part.hidden(stream, batch.target_index)
            return token_nll(hidden, self.part.head, batch.labels.index_select(0, batch.target_index))

        return self._computed(batch, (len(batch.target_index),), wide_dtype(self.part.dtype), measured)

    @torch.no_grad()
    def embed_tokens(self, ids: Tensor) -> Tensor:
        """Embeddings of token ids, (num,) int64 -> (num, width), in every process."""
        import torch.distributed as dist

        embedded = torch.empty((len(ids), self.config.width), dtype=wide_dtype(self.part.dtype), device=ids.device)
        if self.part.is_first:
            embedded = self.part.decoder.embed_tokens(ids)
        with lost_processes():
            dist.broadcast(embedded, 0)
        return embedded

    def _computed(
        self, batch: RaggedBatch, shape: tuple[int, ...], dtype: torch.dtype, last: Callable[[Stream], Tensor]
    ) -> Tensor:
        """Take a batch through all stages, and tell every process what the last computes of its stream."""
        import torch.distributed as dist

        part = self.part
        if part.is_first:
            stream = part.decoder.embedded(batch)
        else:
            x = torch.empty((batch.total_tokens, self.config.width), dtype=part.dtype, device=part.device)
            delta = torch.empty_like(x, dtype=compute_dtype(x))
            with lost_processes():
                dist.recv(x, part.rank - 1)
                dist.recv(delta, part.rank - 1)
            stream = part.decoder.stream_of(batch, x, delta)
        result = torch.empty(shape, dtype=dtype, device=part.device)
        if part.is_last:
            result = last(stream)
        else:
            stream = part.through(stream)
            assert stream.delta is not None, "a stage has a block"
            with lost_processes():
                dist.send(stream.x, part.rank + 1)
                dist.send(stream.delta, part.rank + 1)
        with lost_processes():
            dist.broadcast(result, part.size - 1)
        return result

    # ----------------------------------------------------------------------- weights

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the weights of this stage from those of the whole model; as of nn.Module otherwise."""
        tied = state_dict.get("embed.weight")
        if self.part.ties is not None and self.part.head is not None and tied is not None:
            with torch.no_grad():
                self.part.head.copy_(tied)
        own = {name: tensor for name, tensor in state_dict.items() if self._stage_of(name) == self.group.rank}
        return super().load_state_dict(own, strict=False, assign=assign)

    def gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of all stages by name, on the processor, in the leading process; in the others as they are.

        Args:
            tensors: of this stage, such as weights or the optimizer's state; those on the meta device are of others.
        """
        import torch.distributed as dist

        own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items() if not tensor.is_meta}
        told = self.group.exchange({name: (str(one.dtype), list(one.shape)) for name, one in own.items()})
        if not self.group.leads:
            with lost_processes():
                for tensor in own.values():
                    dist.send(tensor, 0, self.group.messages)
            return dict(tensors)
        found = dict(own)
        for rank, listed in enumerate(told[1:], start=1):
            for name, (dtype, shape) in listed.items():
                found[name] = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
                with lost_processes():
                    dist.recv(found[name], rank, self.group.messages)
        return found

    def whole(self) -> Decoder | None:
        """The decoder with the weights of all stages, on the processor, in the leading process; None in the others."""
        weights = self.gathered(self.state_dict())
        if not self.group.leads:
            return None
        decoder = Decoder(self.config, self.part.decoder.vocab_size).to(self.part.dtype)
        decoder.load_state_dict(weights)
        return decoder


class _OfStage:
    """Sum of the gradients of one stage over micro-batches: the parameters are its own, and no process adds to them.

    Args:
        each_micro: whether a tied head sends its gradient with every micro-batch, so that it is rounded with the
            embedding's, and not once per update.
    """

    def __init__(self, inner: GradientSum | None, *, each_micro: bool) -> None:
        assert inner is not None, "several processes have a sum"
        self.inner, self.each_micro = inner, each_micro
        self.used: set[int] = set()  # none that another process has

    def begin(self, *, rounded: bool) -> None:
        """As of GradientSum."""
        self.inner.begin(rounded=rounded)

    def take(self, scale: float = 1.0) -> None:
        """As of GradientSum."""
        self.inner.take(scale)

    def finish(self, group: Group, used: set[int]) -> None:
        """As of GradientSum; `group` and `used` are those of all stages."""
        self.inner.finish(ALONE, self.inner.used)


def _ties(group: Group) -> ProcessGroup:
    import torch.distributed as dist

    with lost_processes():
        made: ProcessGroup = dist.new_group([0, group.size - 1])
    return made


def untold(model: object) -> AbstractContextManager[None]:
    """Raise an error of a pipeline stage at once: the other stages wait for what this one computes, and cannot be told.

    They end when its process ends. Other models tell their errors as `Group.together` does.
    """
    return _raised_at_once() if isinstance(model, PipelinedDecoder) else nullcontext()


@contextmanager
def _raised_at_once() -> Iterator[None]:
    try:
        yield
    except UnpadError as error:
        error.is_agreed = True
        raise
