"""Division of a run's model and updates among its processes.

Here each holds the whole model and computes micro-batches of its own (data parallel). `sharding.py` divides every
weight among processes, and `pipeline_stages.py` the blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.batching.plan import Plan
from unpad.models.contract import Model, Trainable
from unpad.nn.draws import GeneratorState, UnmeasuredError
from unpad.processes import divided
from unpad.processes.fast_sums import FastSum
from unpad.processes.group import ALONE, Group
from unpad.processes.sums import ExactSum, GradientSum
from unpad.recipes.recipe import Recipe
from unpad.run import checkpoint
from unpad.training.memory.room import DoesNotFitError, Room
from unpad.training.passes import MicroResult, Passes
from unpad.training.stage import StageSetup


@dataclass(frozen=True)
class Lockstep:
    """Passes over the micro-batches of an update that all processes compute together, as a divided model needs it.

    Args:
        num_passes: of every process.
        empty: a batch without sequences, for those of a process beyond its micro-batches.
    """

    num_passes: int
    empty: RaggedBatch


class Parallelism(ABC):
    """Division of a run's model and updates among its processes; methods are collective. Its classes are the ways to
    divide, of which `divisions.py` finds a recipe's.

    Args:
        group: the processes.

    Attributes:
        replicates: whether every process holds the whole model, and computes its passes by itself. In passes that wait
            for those of other processes, one that fails ends by its own error, and the others notice that it has gone.
        shares_out: whether micro-batches of an update are shared out to the processes; else each computes all of them.
        unequal: why bits are not those of one process that computes the same; "" where they are, with exact sums.
        sharing: processes that micro-batches of an update are shared out to, ALONE without `shares_out`.
        holders: number of processes that a checkpoint's tensors are divided among.
    """

    replicates: ClassVar[bool] = False
    shares_out: ClassVar[bool] = True
    unequal: ClassVar[str] = ""
    holders = 1

    def __init__(self, group: Group) -> None:
        self.group, self.sharing = group, group if self.shares_out else ALONE

    # ----------------------------------------------------------------------- before there is a division

    @classmethod  # noqa: B027 - most refuse nothing
    def check_recipe(cls, recipe: Recipe, group: Group) -> None:
        """Refuse a recipe that asks for this division and that it does not fit, before any data is read.

        Args:
            recipe: with its model section written out.

        Raises:
            RecipeError: names the field that does not fit.
        """

    @classmethod  # noqa: B027 - most refuse nothing
    def check_model(cls, recipe: Recipe, model: Model, num_processes: int, *, goes_on: bool) -> None:
        """Refuse a run whose model cannot be divided so.

        Args:
            goes_on: whether the run was begun before: one process may go on with it, as it holds the whole model.

        Raises:
            RecipeError: names the field to change.
        """

    @classmethod  # noqa: B027 - most refuse nothing
    def check_sums(cls) -> None:
        """Refuse to hold sums over several processes against those of one.

        Raises:
            RecipeError: names the field to change.
        """

    @classmethod
    @abstractmethod
    def divide(
        cls, recipe: Recipe, model: Model, stages: Sequence[StageSetup], group: Group, device: torch.device
    ) -> tuple[Model, Parallelism]:
        """Divide a model, which must not be used any more: the part of this process, and the division.

        Args:
            model: with equal weights in all processes; on the processor without `replicates`.
            stages: of the run; device: that trains.

        Raises:
            RecipeError: a stage cannot train a divided model.
            OutOfMemoryError: a process has no room for its part.
        """

    # ----------------------------------------------------------------------- training

    @classmethod
    def telling(cls, group: Group) -> AbstractContextManager[None]:
        """Block of a run in which a process tells the others its error, where they do not wait within a pass."""
        return nullcontext()

    @abstractmethod
    def gradient_sum(self, kind: str, model: Trainable) -> GradientSum | None:
        """The sum that a recipe's `train.sums` names; None where autograd adds the gradients of one process."""

    def room(self, kind: str, most: int | None) -> Room | None:
        """Room for the passes of a run; None where micro-batches are never cut, as other processes wait for passes of
        this one or for its gradients while it computes.

        Args:
            kind: as in `gradient_sum`; most: as in `Room`.
        """
        return None

    def lockstep(self, num_passes: int) -> Lockstep | None:
        """Passes of an update in which the process with most micro-batches has this number of them."""
        return None

    def compute(self, model: Trainable, passes: Passes) -> dict[int, MicroResult]:
        """Add the gradients of an update to those of this process's parameters; return the results by place.

        Raises:
            OutOfMemoryError: a sequence does not fit by itself.
        """
        return passes.run(model)

    def total_norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """L2 norm of the whole model's gradients, a scalar.

        Args:
            gradients: of this process, in the order of its parameters.
        """
        return divided.total_norm(gradients)

    def after_update(self) -> None:  # noqa: B027 - most have nothing to do
        """Bring weights that several processes hold up to date."""

    @contextmanager
    def evaluating(self) -> Iterator[Group]:
        """Evaluate in the block; yields the processes that share the passes out."""
        yield ALONE  # all compute every pass of a model that they have parts of

    # ----------------------------------------------------------------------- weights

    def gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors in the leading process; what the others get is of no use."""
        return dict(tensors)

    def save(self, folder: Path, state: checkpoint.State, keep: int) -> Path:
        """Write a checkpoint, as of `checkpoint.save`.

        Args:
            state: tensors as this process holds them.
        """
        whole = checkpoint.State(state.step, self.gathered(state.tensors), state.values)
        return folder / self.group.of_leader(lambda: checkpoint.save(folder, whole, keep).name)

    def held(self, model: Model) -> checkpoint.Held:
        """Tensors that a checkpoint is divided as, by their names in it."""
        return checkpoint.nothing_held

    def whole_model(self, model: Model) -> Model | None:
        """The model with all weights, in the leading process at least; None where no process can hold it."""
        return model

    # ----------------------------------------------------------------------- messages

    def describe(self) -> list[str]:
        """Lines on what the processes share, for the beginning of a run."""
        return []

    def advice(self, made: Plan) -> str:
        """A warning if the updates of a plan leave processes idle; "" otherwise."""
        return ""


class Replicas(Parallelism):
    """Every process holds the whole model."""

    replicates = True

    @classmethod
    def divide(
        cls, recipe: Recipe, model: Model, stages: Sequence[StageSetup], group: Group, device: torch.device
    ) -> tuple[Model, Parallelism]:
        """See `Parallelism`: the model stays whole."""
        return model, cls(group)

    @classmethod
    def telling(cls, group: Group) -> AbstractContextManager[None]:
        """See `Parallelism`: they wait for messages alone."""
        return group.failing_together()

    def gradient_sum(self, kind: str, model: Trainable) -> GradientSum | None:
        """See `Parallelism`."""
        parameters = list(model.parameters())
        if kind == "exact":
            return ExactSum(parameters)
        return FastSum(parameters, self.group) if self.group.size > 1 else None

    def compute(self, model: Trainable, passes: Passes) -> dict[int, MicroResult]:
        """See `Parallelism`; where a pass does not fit and may be cut, again from the first, in smaller passes."""
        if passes.room is None:
            return passes.run(model)
        state = GeneratorState(passes.device)
        while True:
            try:
                return passes.run(model)
            except (DoesNotFitError, UnmeasuredError) as error:
                failure = error.with_traceback(None)  # frames hold tensors
            for parameter in model.parameters():
                parameter.grad = None
            passes.room.learn(failure)
            state.restore()

    def room(self, kind: str, most: int | None) -> Room | None:
        """See `Parallelism`: fast sums send gradients within the backward pass."""
        return Room(most) if kind == "exact" or self.group.size == 1 else None

    @contextmanager
    def evaluating(self) -> Iterator[Group]:
        """See `Parallelism`: passes are shared out like micro-batches."""
        yield self.group


ONE_PROCESS = Replicas(ALONE)
