"""The passes of one update through the stages of a pipeline, by torch.distributed.pipelining.

Its stages receive into buffers of one shape, so every micro-batch is padded to the largest of its update while it is
sent: the sender appends rows of zeros, and the receiver cuts them off. Computing the padding, as with `plan.fill_to`,
would change the last bits of gradients: matrix libraries sum over tokens in blocks, and the block size depends on the
number of tokens.

The schedule is 1F1B (Narayanan et al. 2021, arXiv 2006.09503), which keeps the activations of as many micro-batches as
there are stages. Updates of fewer micro-batches than that run as GPipe (Huang et al. 2019, arXiv 1811.06965), all
forward passes first; the gradients are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

from unpad.batching.batch import RaggedBatch
from unpad.nn.losses import Terms
from unpad.nn.precision import DTYPES, autocast
from unpad.processes.group import lost_processes
from unpad.training.parallel.pipeline_part import Part
from unpad.training.passes import Passes


@dataclass(frozen=True)
class _Update:
    """One update, equal in every stage.

    Args:
        passes: of all micro-batches with targets.
        micros: micro-batches by place in the update.
    """

    passes: Passes
    micros: Mapping[int, RaggedBatch]
    label_smoothing: float

    @property
    def each_micro(self) -> bool:
        """True if a tied head sends its gradient with every micro-batch, to be rounded with the embedding's; else it
        sends once."""
        return self.passes.sums is not None

    @property
    def fill_to(self) -> int:
        """Tokens of a filled micro-batch."""
        return max(batch.total_tokens for batch in self.micros.values())


def run_update(part: Part, passes: Passes, label_smoothing: float) -> dict[int, Terms]:
    """Add the gradients of an update to those of this stage's parameters.

    Args:
        passes: of all micro-batches with targets, at least one.

    Returns:
        Loss terms by the places of micro-batches, detached, in the last stage; none in the others.

    Raises:
        LostProcessError: another stage is gone or silent.
    """
    micros = {number: batch for number, batch in passes.micros if number is not None}
    update = _Update(passes, micros, label_smoothing)
    work = _Work(part, update)
    stage = _Stage(work, *_travelling(part, update))
    num = len(update.micros)
    kind = Schedule1F1B if num >= part.size else ScheduleGPipe
    schedule = kind(stage, n_microbatches=num, loss_fn=lambda output, _: output, scale_grads=False)
    places = torch.arange(num)
    with lost_processes():
        try:
            schedule.step(place=places, target=places if part.is_last else None, return_outputs=False)
            work.finish()
        except Exception:
            if work.failure is None:  # of a message
                raise
    if work.failure is not None:
        raise work.failure
    return work.terms


def _travelling(part: Part, update: _Update) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Shapes and dtypes of the tensors that a stage receives and sends, as tensors without memory."""
    shape = (update.fill_to, part.decoder.config.width)
    dtype = part.dtype if update.passes.precision == "fp32" else DTYPES[update.passes.precision]
    x = torch.empty(shape, dtype=part.dtype, device="meta", requires_grad=True)
    delta = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    state = (torch.empty(len(_draws_state(part.device)), dtype=torch.uint8, device="meta"),) if part.draws else ()
    stream, loss = (x, delta, *state), (torch.empty((), dtype=part.dtype, device="meta", requires_grad=True),)
    return () if part.is_first else stream, loss if part.is_last else stream


class _Work(nn.Module):
    """Passes of one stage over the micro-batches of an update.

    Attributes:
        terms: loss terms by place, in the last stage.
        failure: error of a failed pass.
    """

    def __init__(self, part: Part, update: _Update) -> None:
        super().__init__()
        self.part, self.update = part, update
        self.terms: dict[int, Terms] = {}
        self.failure: BaseException | None = None
        self._numbers = list(update.micros)
        self._sent: list[tuple[dist.Work | None, Tensor]] = []

    def forward(self, *received: Tensor, place: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The forward pass of one micro-batch.

        Args:
            received: x and delta of the stream, (fill_to, width), and the state of the generator if something draws;
                nothing in the first stage.
            place: (1,) int64, among the micro-batches with targets.

        Returns:
            The same for the next stage; the loss in the last one.
        """
        try:
            return self._forward(received, self._numbers[int(place)])
        except Exception as error:
            self.failure = error
            raise

    def _forward(self, received: tuple[Tensor, ...], number: int) -> Tensor | tuple[Tensor, ...]:
        part, update = self.part, self.update
        batch = update.micros[number]
        with autocast(update.passes.precision, batch.position_ids.device):
            if part.is_first:
                update.passes.seed_draws(number)
                stream = part.decoder.embedded(batch)
            else:
                x, delta, *state = received
                if state:
                    _set_draws(state[0], part.device)
                num = batch.total_tokens
                stream = part.decoder.stream_of(batch, x[:num], delta[:num])
            if not part.is_last:
                stream = part.through(stream)
                assert stream.delta is not None, "a stage has a block"
                filled = [F.pad(entry, (0, 0, 0, update.fill_to - len(entry))) for entry in (stream.x, stream.delta)]
                return (*filled, _draws_state(part.device)) if part.draws else tuple(filled)
            terms = part.losses(stream, batch, update.label_smoothing)
        self.terms[number] = {name: (total.detach(), count) for name, (total, count) in terms.items()}
        return update.passes.loss(terms)

    def after_backward(self) -> None:
        """Take the gradients of a micro-batch."""
        if self.update.each_micro:
            self._add_tied()
        if self.update.passes.sums is not None:
            self.update.passes.sums.take(self.update.passes.scale)

    def finish(self) -> None:
        """End the update."""
        if not self.update.each_micro:
            self._add_tied()
        for work, _ in self._sent:
            if work is not None:
                work.wait()

    def _add_tied(self) -> None:
        """Add the gradient of a tied head to the embedding's. In one process autograd adds the same two numbers, and
        the order of two does not matter."""
        part = self.part
        if part.ties is None:
            return
        if part.is_first:
            gradient = part.decoder.embed.weight.grad
            assert gradient is not None, "the first stage embeds every token"
            received = torch.empty_like(gradient)
            dist.recv(received, part.size - 1, part.ties)
            gradient.add_(received)
        elif part.head is not None:
            assert part.head.grad is not None, "the last stage has the targets"
            sent, part.head.grad = part.head.grad.contiguous(), None
            self._sent.append((dist.isend(sent, 0, part.ties), sent))


class _Stage(PipelineStage):
    """A stage that takes its gradients after the backward pass of every micro-batch."""

    def __init__(self, work: _Work, received: tuple[Tensor, ...], sent: tuple[Tensor, ...]) -> None:
        part = work.part
        super().__init__(work, part.rank, part.size, part.device, received, sent, group=part.stages)
        self.work = work

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        try:
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        except Exception as error:
            self.work.failure = error.__cause__ or error
            raise
        self.work.after_backward()


def _draws_state(device: torch.device) -> Tensor:
    """State of the generators that a pass draws from, (bytes,) uint8: first the processor's, then the GPU's."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states).to(device)


def _set_draws(state: Tensor, device: torch.device) -> None:
    """Continue the draws of another process."""
    num_bytes = len(torch.get_rng_state())
    torch.set_rng_state(state[:num_bytes].cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[num_bytes:].cpu(), device)
