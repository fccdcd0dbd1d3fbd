"""Division of a run's model and updates among its processes.

In this file each process holds the whole model and computes its own micro-batches (data parallel). `sharding.py`
divides every weight among processes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.models.contract import Model, Trainable
from unpad.processes.group import ALONE, Group
from unpad.processes.sums import ExactSum, FastSum, GradientSum
from unpad.recipes.recipe import Recipe
from unpad.run import checkpoint
from unpad.run.saving import Saving, Work
from unpad.training.memory import DoesNotFitError, Room
from unpad.training.passes import MicroResult, Passes
from unpad.training.stage import StageSetup


@dataclass(frozen=True)
class Lockstep:
    """Passes over the micro-batches of an update that all processes of a divided model compute together.

    Args:
        num_passes: in every process.
        empty: a batch without sequences, for the passes of a process after its own micro-batches.
    """

    num_passes: int
    empty: RaggedBatch


class Parallelism(ABC):
    """Division of a run's model and updates among its processes; methods are collective. Its subclasses are the ways to
    divide; `divisions.py` selects a recipe's.

    Args:
        group: the processes.

    Attributes:
        replicates: whether every process holds the whole model, and computes its passes by itself. Otherwise passes
            wait for other processes: one that fails ends with its own error, and the others notice that it is gone.
        unequal: why the bits differ from a run of one process; "" if they are equal with exact sums.
        holders: number of processes that a checkpoint's tensors are divided among.
    """

    replicates: ClassVar[bool] = False
    unequal: ClassVar[str] = ""
    holders = 1

    def __init__(self, group: Group) -> None:
        self.group = group

    # ----------------------------------------------------------------------- before there is a division

    @classmethod  # noqa: B027 - most refuse nothing
    def check_model(cls, recipe: Recipe, model: Model, num_processes: int, *, goes_on: bool) -> None:
        """Refuse a run with a model that cannot be divided like this.

        Args:
            goes_on: whether the run is resumed: one process may continue it, as it holds the whole model.

        Raises:
            RecipeError: names the field to change.
        """

    @classmethod
    @abstractmethod
    def divide(
        cls, recipe: Recipe, model: Model, stages: Sequence[StageSetup], group: Group, device: torch.device, half: bool
    ) -> "tuple[Model, Parallelism]":
        """Divide a model, which must not be used afterwards; return this process's part and the division.

        Args:
            model: with equal weights in all processes; on the processor without `replicates`.
            stages: stages of the run; device: the device that trains; half: whether weights may travel in
                bf16.

        Raises:
            RecipeError: a stage cannot train a divided model.
            OutOfMemoryError: a process has no room for its part.
        """

    # ----------------------------------------------------------------------- training

    @classmethod
    def telling(cls, group: Group) -> AbstractContextManager[None]:
        """Context in which a process sends its error to the others, unless they wait within a pass."""
        return nullcontext()

    @abstractmethod
    def gradient_sum(self, kind: str, model: Trainable) -> GradientSum | None:
        """The sum of a kind, as of `sum_kind`; None where autograd adds the gradients of one process."""

    def room(self, kind: str, most: int | None) -> Room | None:
        """Room for the passes of a run; None if micro-batches are never cut, because other processes wait for passes or
        gradients of this one.

        Args:
            kind: as in `gradient_sum`; most: as in `Room`.
        """
        return None

    def lockstep(self, num_passes: int) -> Lockstep | None:
        """Passes of an update, given the largest number of micro-batches of a process."""
        return None

    def compute(self, model: Trainable, passes: Passes) -> dict[int, MicroResult]:
        """Add the gradients of an update to those of this process's parameters; return the results by place.

        Raises:
            OutOfMemoryError: a sequence does not fit by itself.
        """
        return passes.run(model)

    @contextmanager
    def evaluating(self) -> Iterator[Group]:
        """Evaluate in the block; yields the processes that share the passes out."""
        yield ALONE  # with parts of the model, all compute every pass

    # ----------------------------------------------------------------------- weights

    def gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors in the leading process; the result in other processes is undefined."""
        return dict(tensors)

    def save(self, folder: Path, state: checkpoint.State, keep: int, then: Work | None = None) -> Saving:
        """Begin to write a checkpoint, as of `checkpoint.save`.

        Args:
            state: this process's tensors.
            then: is called in the leading process once it is written, with a state that has all weights at least.
        """

        def write(copy: checkpoint.State) -> None:
            if self.group.leads:
                checkpoint.save(folder, copy, keep)
                if then is not None:
                    then(copy)

        return Saving(self.group, replace(state, tensors=state.tensors if self.group.leads else {}), write)

    def held(self, model: Model) -> checkpoint.Held:
        """Tensors that determine the division of a checkpoint, by their names in it."""
        return checkpoint.nothing_held

    def whole_model(self, model: Model) -> Model | None:
        """The model with all weights, in the leading process at least; None where no process can hold it."""
        return model

    # ----------------------------------------------------------------------- messages

    def describe(self) -> list[str]:
        """Log lines on the division, for the beginning of a run."""
        return []


class Replicas(Parallelism):
    """Every process holds the whole model."""

    replicates = True

    @classmethod
    def divide(
        cls, recipe: Recipe, model: Model, stages: Sequence[StageSetup], group: Group, device: torch.device, half: bool
    ) -> tuple[Model, Parallelism]:
        """See `Parallelism`: the model stays whole."""
        return model, cls(group)

    @classmethod
    def telling(cls, group: Group) -> AbstractContextManager[None]:
        """See `Parallelism`: processes wait only for messages."""
        return group.failing_together()

    def gradient_sum(self, kind: str, model: Trainable) -> GradientSum | None:
        """See `Parallelism`."""
        parameters = list(model.parameters())
        if kind == "exact":
            return ExactSum(parameters)
        return FastSum(parameters, self.group) if self.group.size > 1 else None

    def compute(self, model: Trainable, passes: Passes) -> dict[int, MicroResult]:
        """See `Parallelism`; if a pass does not fit and may be cut, restarts with smaller passes."""
        if passes.room is None:
            return passes.run(model)
        while True:
            try:
                return passes.run(model)
            except DoesNotFitError as error:
                failure = error.with_traceback(None)  # frames hold tensors
            for parameter in model.parameters():
                parameter.grad = None
            passes.room.learn(failure)

    def room(self, kind: str, most: int | None) -> Room | None:
        """See `Parallelism`: fast sums send gradients within the backward pass."""
        return Room(most) if kind == "exact" or self.group.size == 1 else None

    @contextmanager
    def evaluating(self) -> Iterator[Group]:
        """See `Parallelism`: passes are shared out like micro-batches."""
        yield self.group


ONE_PROCESS = Replicas(ALONE)
