"""A model sharded with torch's FSDP2: each process holds some rows of every weight, gradient and moment.

The weights of a block are whole in every process while the block computes, and sharded before and after; weights
outside the blocks are whole during a pass. Gradients are added over the processes as the backward pass of each block
ends.

FSDP2 needs the same number of passes in every process: shorter shares of an update end with empty batches. By default
it divides sums by the number of processes, block by block; the step divides by the counts of the whole update, so
gradients are sums here.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from unpad import storage
from unpad.batching.batch import RaggedBatch
from unpad.errors import RecipeError, needs_memory
from unpad.models import lower_sizes
from unpad.models.adapters import kept_weights
from unpad.models.contract import HasLatent, Model, PrunesTokens, Trainable
from unpad.models.objective import set_objective
from unpad.nn.block import Block
from unpad.nn.linear import Linear
from unpad.processes.divided import is_divided, own_rows, whole_tensors
from unpad.processes.group import ALONE, Group, lost_connections
from unpad.processes.sums import GradientSum
from unpad.recipes.recipe import Recipe
from unpad.run import checkpoint
from unpad.run.checkpoint import PREFIX, Held, State, model_tensors, model_weights
from unpad.run.folder import STATE
from unpad.run.saving import Saving, Work
from unpad.terminal.table import number_of
from unpad.training.optim import freeze
from unpad.training.parallel.parallelism import Lockstep, Parallelism, Replicas
from unpad.training.stage import StageSetup, epoch_plan


def save_shards(folder: Path, state: State, keep: int, group: Group, then: Work = lambda: None) -> Saving:
    """Begin to write a checkpoint like `checkpoint.save`; collective.

    All processes must see the same folder, so several hosts need a shared file system. Every process writes, flushes
    and hashes one file for the model and one for all else; then the first process writes the state and the manifest,
    renames the folder, and calls `then`.

    Args:
        state: this process's tensors, sharded or whole.

    Raises:
        NonFiniteError, DiskError: as `checkpoint.save`, in all processes.
    """
    target = checkpoint.step_folder(folder, state.step)
    values = checkpoint.state_file(state, group.size)
    temporary = Path(group.of_leader(lambda: str(_begin(target))))
    tensors, rows = dict[str, Tensor](), dict[str, int]()
    for name, tensor in state.tensors.items():
        if not is_divided(tensor) and not group.leads:
            continue
        own, first = own_rows(tensor)
        if own.numel() or not is_divided(tensor):
            tensors[name], rows[name.removeprefix(PREFIX)] = own, first

    def end(entries_of_all: Sequence[dict[str, storage.Entry]]) -> None:
        entries = {name: entry for listed in entries_of_all for name, entry in listed.items()}
        entries[STATE] = storage.write_part(temporary, STATE, values)
        storage.end_folder(temporary, target, entries)
        checkpoint.remove_old(folder, state.step, keep)
        then()

    write = partial(_write_own, temporary, rows, group)
    part, sharing = State(state.step, tensors, {}), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Saving(group, part, write, end, drop=partial(storage.discard, temporary), sharing=sharing)


def _begin(target: Path) -> Path:
    storage.make_folder(target.parent)
    storage.clean_leftovers(target.parent, alone=True)
    return storage.begin_folder(target)


def _write_own(temporary: Path, rows: Mapping[str, int], group: Group, own: State) -> dict[str, storage.Entry]:
    """Write the files of this process, and return their entries of the manifest.

    Args:
        rows: as of `places`; own: with the tensors that this process writes.
    """
    files = checkpoint.tensor_files(own, partial(checkpoint.places, rows=rows))
    storage.check_space(temporary, sum(map(len, files.values())))
    return {
        shard: storage.write_part(temporary, shard, data)
        for name, data in files.items()
        for shard in [checkpoint.shard_name(name, group.rank, group.size)]
    }


T = TypeVar("T")


def divided_blocks(model: Model) -> list[Block]:
    """Blocks that are sharded one by one: those that every pass computes. Optional ones are sharded with the model."""
    left_out = {id(module) for name in model.optional for module in model.get_submodule(name).modules()}
    return [module for module in model.modules() if isinstance(module, Block) and id(module) not in left_out]


class _Calls(nn.Module):
    """A module around the methods of a model, for FSDP2 to gather its weights: the methods call each other, and the
    weights must stay whole to the end of the outermost call.

    Raises:
        LostProcessError: another process is gone, or silent.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self._runs = False

    def __call__(self, method: Callable[..., T], *args: object, **options: object) -> T:
        if self._runs:
            return method(*args, **options)
        self._runs = True
        try:
            with lost_connections():
                result: T = super().__call__(method, *args, **options)
        finally:
            self._runs = False
        return result

    def forward(self, method: Callable[..., T], *args: object, **options: object) -> T:
        return method(*args, **options)


class Sharding(Parallelism):
    """A model sharded among the processes of a group, and the `GradientSum` of its updates.

    Args:
        model: whole, with the same weights in every process; sharded afterwards.
        empty: a batch without sequences, of the model's family.
        device: where the model computes; a model on the CPU is moved there block by block.
        half: whether the weights of blocks travel in bf16; their gradients are added in fp32.

    Attributes:
        used: indices of the parameters that got a gradient from a micro-batch of this process.
    """

    unequal = "the model is divided among processes (train.shard), so the bits of gradients depend on their number"

    def __init__(
        self, model: Model, empty: RaggedBatch, group: Group, device: torch.device, *, half: bool = False
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        # A block may return a view: rows without those that complete a product. Nothing writes into it.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
        super().__init__(group)
        self.model, self.empty, self.used = model.requires_grad_(True), empty, set[int]()
        self.holders = group.size
        self._scale, mesh = 1.0, init_device_mesh(device.type, (group.size,))
        self.num_blocks = len(blocks := divided_blocks(model))
        sent, added = (torch.bfloat16, torch.float32) if half else (None, None)
        travel = MixedPrecisionPolicy(sent, added, cast_forward_inputs=False)  # the stream stays in fp32
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=travel)
            for module in block.modules():
                if isinstance(module, Linear):
                    module.recasts = True
        calls = _Calls(model)
        fully_shard(calls, mesh=mesh, reshard_after_forward=False)
        for name in model.all_computing():  # FSDP2 gathers the weights around a call of one
            setattr(model, name, partial(calls, getattr(model, name)))
        self._parts = [module for module in calls.modules() if isinstance(module, FSDPModule)]
        for part in self._parts:  # the setters of a part do not apply to nested ones
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            part.set_reduce_scatter_unused_params(True)
        with lost_connections():
            for part in self._parts:
                part.unshard()
        for index, parameter in enumerate(model.parameters()):
            parameter.register_post_accumulate_grad_hook(self._noting(index))
        self.reshard()

    def _noting(self, index: int) -> Callable[[Tensor], None]:
        return lambda _: self.used.add(index)

    def reshard(self) -> None:
        """Free the rows of other processes outside the blocks, which passes without gradient leave in place."""
        for part in self._parts:
            part.reshard()

    # ----------------------------------------------------------------------- as of Parallelism

    @classmethod
    def check_model(cls, recipe: Recipe, model: Model, num_processes: int, *, goes_on: bool) -> None:
        """See `Parallelism`."""
        if num_processes == 1 and not goes_on:
            raise _refused("one process has nobody to divide the model with", "add --processes 2 or more")
        if recipe.lora is not None:
            raise _refused("with adapters the weights of the model stay as they are, and every process holds them")
        if isinstance(model, HasLatent) and recipe.collapse.policy != "off":
            what = "the watch for posterior collapse copies and reads a model that one process holds"
            raise _refused(what, "set collapse.policy=off")
        if isinstance(model, PrunesTokens) and "hard" in model.modes:
            raise _refused("model.prune reads weights of blocks between these, where they are divided")

    @classmethod
    def divide(
        cls, recipe: Recipe, model: Model, stages: Sequence[StageSetup], group: Group, device: torch.device, half: bool
    ) -> tuple[Model, Parallelism]:
        """See `Parallelism`; a run without a step keeps its model whole."""
        with group.together():
            empty = empty_batch(stages)
            if empty is not None:
                for stage in stages:
                    freeze(model, stage.recipe.train.freeze)
                    set_objective(model, stage.recipe, of_pairs=stage.of_pairs)
                    check_divided_stage(stage.name, model, empty, of_pairs=stage.of_pairs)
        if empty is None:
            return model.to(device), Replicas(group)
        with needs_memory("the model", lower_sizes(model.config)):
            return model, cls(model, empty.to(device), group, device, half=half)

    def gradient_sum(self, kind: str, model: Trainable) -> GradientSum | None:
        """See `Parallelism`."""
        return self

    def lockstep(self, num_passes: int) -> Lockstep | None:
        """See `Parallelism`."""
        return Lockstep(num_passes, self.empty)

    @contextmanager
    def evaluating(self) -> Iterator[Group]:
        """See `Parallelism`."""
        yield ALONE
        self.reshard()

    def gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Parallelism`."""
        return whole_tensors(tensors, self.group)

    def save(self, folder: Path, state: State, keep: int, then: Work | None = None) -> Saving:
        """See `Parallelism`: every process writes the rows that it holds."""
        weights = model_weights(state.tensors) if then else {}
        whole = replace(state, tensors=model_tensors(self.gathered(weights)))
        return save_shards(folder, state, keep, self.group, lambda: then and then(whole))

    def held(self, model: Model) -> Held:
        """See `Parallelism`: the weights, also under the names of their moments."""
        weights = kept_weights(model)
        held = model_tensors(weights)

        def find(name: str) -> Tensor | None:
            return held[name] if name in held else weights.get(name.removeprefix("optim.").rpartition(".")[0])

        return find

    def whole_model(self, model: Model) -> Model | None:
        """See `Parallelism`."""
        return None

    def describe(self) -> list[str]:
        """See `Parallelism`."""
        num = self.num_blocks
        return [
            f"weights, gradients and optimizer divided among {self.group.size} processes by FSDP2, "
            f"{number_of(num, 'blocks')} each for itself; gradients are added in fp32, so bits depend on the number of "
            "processes"
        ]

    # ----------------------------------------------------------------------- as of GradientSum

    def begin(self, *, rounded: bool, takes: int) -> None:
        """See `GradientSum`; nothing is rounded."""
        self.used = set()

    def take(self, scale: float = 1.0) -> None:
        """See `GradientSum`; FSDP2 has added the gradients over the processes."""
        self._scale = scale

    def finish(self, group: Group, used: set[int]) -> None:
        """See `GradientSum`. Zeros that FSDP2 leaves where no process has a gradient are removed: decay would move
        these weights."""
        for index, parameter in enumerate(self.model.parameters()):
            if index not in used:
                parameter.grad = None
            elif self._scale != 1.0 and parameter.grad is not None:
                parameter.grad.mul_(1.0 / self._scale)

    def give_up(self) -> None:
        """See `GradientSum`; FSDP2 communicates only within passes."""


# --------------------------------------------------------------------------- what cannot be divided


def check_divided_stage(stage: str, model: Model, empty: RaggedBatch, *, of_pairs: bool) -> None:
    """Refuse a stage that cannot train a divided model.

    Args:
        model: with the stage's frozen parameters and its objective set.
        of_pairs: whether the stage learns preferences.

    Raises:
        RecipeError: it compares replies, or some batches train nothing.
    """
    if of_pairs:
        raise _refused(f"stage {stage} compares replies under the weights it starts from, which one process holds")
    terms = model.losses(empty)
    if not any(terms[name][0].requires_grad for name in model.weights):
        what = f"stage {stage} freezes everything that a batch without images trains"
        raise _refused(what, "leave a part of the language model to train")


def _refused(what: str, fix: str = "") -> RecipeError:
    return RecipeError(what, where="train.shard", fix=f"{fix}{', or ' * bool(fix)}set train.shard=none")


def empty_batch(stages: Sequence[StageSetup]) -> RaggedBatch | None:
    """A batch of a run's data without sequences; None where no stage has a step."""
    for stage in stages:
        first = epoch_plan(stage, 0) if stage.train_ids.size else None
        if first is not None and first.num_steps:
            return stage.data.load(first.step(0)[0]).flat().select([])
    return None
