"""Updates of a pipelined decoder: each process's share, gradient sums, norms and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from unpad.batching.plan import Plan
from unpad.errors import RecipeError, needs_memory
from unpad.models import lower_sizes
from unpad.models.contract import Model, Trainable
from unpad.models.decoder import Decoder
from unpad.nn.precision import wide_dtype
from unpad.processes.group import ALONE, Group, lost_processes
from unpad.processes.sums import ExactSum, GradientSum
from unpad.recipes.recipe import Recipe, stages_of
from unpad.training.parallel.parallelism import Parallelism
from unpad.training.parallel.pipeline import PipelinedDecoder
from unpad.training.parallel.pipeline_part import share_at_work
from unpad.training.passes import MicroResult, Passes
from unpad.training.stage import StageSetup

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
        from unpad.training.parallel.pipeline_schedule import run_update

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
