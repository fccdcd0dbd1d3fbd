"""Division of a run's model and updates among its processes.

Here each holds the whole model and computes micro-batches of its own (data parallel). `sharding.py` divides every
weight among processes, and `pipeline_stages.py` the blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.batching.plan import Plan
from unpad.models.contract import Model, Trainable
from unpad.nn.draws import GeneratorState, UnmeasuredError
from unpad.processes import divided
from unpad.processes.fast_sums import FastSum
from unpad.processes.group import ALONE, Group
from unpad.processes.sums import ExactSum, GradientSum
from unpad.run import checkpoint
from unpad.training.passes import MicroResult, Passes
from unpad.training.room import DoesNotFitError


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
    """Division of a run's model and updates among its processes; methods are collective.

    Args:
        group: the processes.

    Attributes:
        replicates: whether every process holds the whole model, and computes its passes by itself. In passes that wait
            for those of other processes, one that fails ends by its own error, and the others notice that it has gone.
        sharing: processes that micro-batches of an update are shared out to; ALONE where each computes all of them.
        holders: number of processes that a checkpoint's tensors are divided among.
    """

    replicates = False
    holders = 1

    def __init__(self, group: Group) -> None:
        self.group = self.sharing = group

    # ----------------------------------------------------------------------- training

    @abstractmethod
    def gradient_sum(self, kind: str, model: Trainable) -> GradientSum | None:
        """The sum that a recipe's `train.sums` names; None where autograd adds the gradients of one process."""

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

    def gradient_sum(self, kind: str, model: Trainable) -> GradientSum | None:
        """As of Parallelism."""
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

    @contextmanager
    def evaluating(self) -> Iterator[Group]:
        """As of Parallelism: passes are shared out like micro-batches."""
        yield self.group


ONE_PROCESS = Replicas(ALONE)
