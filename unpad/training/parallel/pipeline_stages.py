"""Updates of a pipelined decoder: passes through its stages, each process's share, gradient sums, norms, checkpoints.

Its stages receive into buffers of one shape, so every micro-batch is padded to the largest of its update while it is
sent: the sender appends rows of zeros, and the receiver cuts them off. Computing the padding, as with `plan.fill_to`,
would change the last bits of gradients: matrix libraries sum over tokens in blocks, and the block size depends on the
number of tokens.

The schedule is 1F1B (Narayanan et al. 2021, arXiv 2006.09503), which keeps the activations of as many micro-batches as
there are stages. Updates of fewer micro-batches than that run as GPipe (Huang et al. 2019, arXiv 1811.06965), all
forward passes first; the gradients are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

from unpad.batching.batch import RaggedBatch
from unpad.batching.plan import Plan
from unpad.errors import RecipeError, needs_memory
from unpad.models import lower_sizes
from unpad.models.contract import Model, Trainable
from unpad.models.decoder import Decoder
from unpad.nn.losses import Terms
from unpad.nn.precision import DTYPES, autocast, wide_dtype
from unpad.processes.group import ALONE, Group, lost_processes
from unpad.processes.sums import ExactSum, GradientSum
from unpad.recipes.recipe import Recipe, stages_of
from unpad.training.parallel.parallelism import Parallelism
from unpad.training.parallel.pipeline import Part, PipelinedDecoder, share_at_work
from unpad.training.passes import MicroResult, Passes
from unpad.training.stage import StageSetup


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


FIELD = "train.pipeline_stages"
IDLE = 0.2  # share of idle time above which a run says so


class PipelineStages(Parallelism):
    """Every process computes the blocks of its stage for all micro-batches of an update.

    Args:
        model: of this process.
    """

    shares_out = False

    def __init__(self, model: PipelinedDecoder) -> None:
        super().__init__(model.group)
        self.model = model

    @classmethod
    def check_recipe(cls, recipe: Recipe, group: Group) -> None:
        """See `Parallelism`: the processes, the model and its training fit the stages."""
        num = recipe.train.pipeline_stages
        kind, blocks, stages = recipe.model["kind"], recipe.model.get("blocks", 0), stages_of(recipe)
        settings = [stage.recipe for stage in stages]
        without = f"train with {FIELD}=1"
        if kind != "decoder":
            raise RecipeError(f"pipeline stages are of a decoder; model.kind is {kind}", where=FIELD, fix=without)
        if blocks < num:
            what = f"{num} pipeline stages need as many blocks, and the model has {blocks}"
            raise RecipeError(what, where=FIELD, fix=f"lower it to {blocks} or less, or raise model.blocks")
        if recipe.lora is not None:
            what = "pipeline stages train whole weights, and lora trains adapters"
            raise RecipeError(what, where="lora", fix=without)
        if any(stage.of_pairs for stage in stages):
            what = "pipeline stages learn to predict tokens, and data.pairs teaches preferences"
            raise RecipeError(what, where="data.pairs", fix=without)
        if any(stage_settings.train.freeze for stage_settings in settings):
            what = "pipeline stages train every weight"
            raise RecipeError(what, where="train.freeze", fix=f"leave it out, or {without}")
        if any(part.clip is not None for stage_settings in settings for part in stage_settings.optim.groups):
            what = "pipeline stages clip the gradients of all weights together, and a group has a clip of its own"
            raise RecipeError(what, where="optim.groups", fix=f"leave out its clip, or {without}")
        if recipe.train.shard != "none":
            what = "pipeline stages hold whole weights, and train.shard divides them"
            raise RecipeError(what, where="train.shard", fix=f"set train.shard=none, or {without}")
        if group.size != num:
            processes = f"{group.size} process{'es' * (group.size > 1)}"
            fix = f"start one for each stage: --processes {num}; or {without}"
            raise RecipeError(f"there are {num} pipeline stages and {processes}", where=FIELD, fix=fix)

    @classmethod
    def check_sums(cls) -> None:
        """See `Parallelism`."""
        what = "the stages of a model compute every micro-batch together, and share none out"
        raise RecipeError(what, where=FIELD, fix=f"set {FIELD}=1 to prove the sums of whole models")

    @classmethod
    def divide(
        cls, recipe: Recipe, model: Model, stages: Sequence[StageSetup], group: Group, device: torch.device
    ) -> tuple[Model, Parallelism]:
        """See `Parallelism`."""
        assert isinstance(model, Decoder), "`check_recipe` refuses others"
        with needs_memory("a pipeline stage", lower_sizes(model.config)):
            part = PipelinedDecoder(model, group, device, recipe.train.timeout)
            return part, cls(part)

    def gradient_sum(self, kind: str, model: Trainable) -> GradientSum | None:
        """See `Parallelism`."""
        return _OfStage(list(model.parameters())) if kind == "exact" else None

    def compute(self, model: Trainable, passes: Passes) -> dict[int, MicroResult]:
        """See `Parallelism`; the last stage has the results, the others none.

        Raises:
            LostProcessError: another stage is gone or silent.
        """

        passes.begin()
        if not passes.micros:
            return {}
        terms = run_update(self.model.part, passes, self.model.label_smoothing)
        return {number: MicroResult(sums, {}) for number, sums in terms.items()}

    def total_norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """Norm of the norms of all gradients, in the order of the whole model; see `Parallelism`."""
        tensors, parameters = list(gradients), self.model.parameters()
        numbers = [number for number, parameter in enumerate(parameters) if parameter.grad is not None]
        norms = torch._foreach_norm(tensors) if tensors else ()
        norms_of_stages = self.group.exchange([[n, float(norm)] for n, norm in zip(numbers, norms, strict=True)])
        every = [norm for _, norm in sorted((number, norm) for stage in norms_of_stages for number, norm in stage)]
        norms_of_all = torch.tensor(every, dtype=wide_dtype(self.model.part.dtype))
        norm: Tensor = torch.linalg.vector_norm(norms_of_all)
        return norm

    @torch.no_grad()
    def after_update(self) -> None:
        """Copy the embedding of the first stage to the head of the last, if they are tied."""
        part = self.model.part
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

    def gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Parallelism`."""
        return self.model.gathered(tensors)

    def whole_model(self, model: Model) -> Model | None:
        """See `Parallelism`: on the processor, and None in all other processes."""
        return self.model.whole_decoder()

    def describe(self) -> list[str]:
        """See `Parallelism`: the stages."""
        spans = [
            f"{blocks.start} to {blocks[-1]}" if len(blocks) > 1 else f"{blocks.start}" for blocks in self.model.spans
        ]
        return [f"pipeline stages of blocks {', '.join(spans[:-1])} and {spans[-1]}, each in a process of its own"]

    def advice(self, plan: Plan) -> str:
        """See `Parallelism`: if stages are idle for more than IDLE of the time."""
        share, num = share_at_work(plan, self.group.size), plan.num_micros / max(plan.num_steps, 1)
        if share >= 1 - IDLE:
            return ""
        what = f"updates of {num:.1f} micro-batches keep a pipeline stage at work {share:.0%} of the time at best"
        return f"{what}; a lower plan.tokens_per_micro makes more of them"


class _OfStage:
    """Exact sum of the gradients of one stage over micro-batches; other processes contribute nothing.

    Args:
        parameters: parameters of the stage, and those on the meta device, which have no gradient.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.inner = ExactSum(parameters)
        self.used: set[int] = set()  # without those of other processes

    def begin(self, *, rounded: bool, takes: int) -> None:
        """See `GradientSum`."""
        self.inner.begin(rounded=rounded, takes=takes)

    def take(self, scale: float = 1.0) -> None:
        """See `GradientSum`."""
        self.inner.take(scale)

    def finish(self, group: Group, used: set[int]) -> None:
        """See `GradientSum`; `group` and `used` are those of all stages."""
        self.inner.finish(ALONE, self.inner.used)

    def give_up(self) -> None:
        """See `GradientSum`; nothing is sent."""
