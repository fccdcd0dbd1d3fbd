"""Measure a model on sequences, each exactly once, in batches; several processes share the batches by cost."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from unpad.batching.balance import assign, micro_cost
from unpad.batching.batch import RaggedBatch
from unpad.batching.pieces import TargetCount
from unpad.batching.plan import Micro, Plan, plan
from unpad.data.family import Data
from unpad.errors import needs_memory
from unpad.models.contract import Model
from unpad.models.cost import cells_per_token
from unpad.processes.group import ALONE, Group
from unpad.recipes.training import PlanSettings
from unpad.terminal.progress import counted

DataType = TypeVar("DataType", bound=Data, covariant=True)
Work = Callable[[RaggedBatch], dict[str, np.ndarray]]


def once_each(seq_ids: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Count one target for every whole sequence, labelled or not, (n,) int64."""
    return np.asarray((np.asarray(starts) == 0).astype(np.int64))


@dataclass(frozen=True, eq=False)
class Measuring(Generic[DataType]):
    """A model and the sequences to measure it on. No result depends on how they are batched or shared.

    Args:
        seq_ids: (n,) different sequences of the data.
        settings: the recipe's plan section; its sizes and its stride apply.
        group: the processes that measure equal weights on equal data; all of them call with equal arguments.
        overflow: `plan.overflow` for sequences beyond the model's context.
        targets: counts targets inside spans; default those of the data. Sequences without a target are left out.
    """

    model: Model
    data: DataType
    seq_ids: np.ndarray
    settings: PlanSettings
    group: Group = ALONE
    overflow: str = "error"
    targets: TargetCount | None = None

    def micros(self) -> Iterator[Micro]:
        """Yield micro-batches with every sequence once; the model is in evaluation mode meanwhile."""
        epoch = self._plan()
        with _evaluating(self.model):
            yield from counted(map(epoch.micro, range(epoch.num_micros)), "computing", epoch.num_micros, "batches")

    def results(self, work: Work) -> Iterator[tuple[Micro, dict[str, np.ndarray]]]:
        """Compute something of every micro-batch, and yield them in order with the results.

        One process computes them one by one. Of several processes each computes a share by cost, and all of them yield
        the same results with every bit, in the same order: a sum over them depends on no number of processes.

        Args:
            work: arrays of one micro-batch on the device, by name; a function of the batch and the weights alone, which
                are in evaluation mode. It tells the other processes nothing itself.

        Raises:
            UnpadError: that of `work` or of loading, in all processes.
            OutOfMemoryError: a micro-batch does not fit.
        """
        if self.group.size == 1:
            yield from ((micro, self._compute(work, micro)) for micro in self.micros())
            return
        local: dict[str, np.ndarray] = {}
        with self.group.together():
            epoch = self._plan()
            micros = [epoch.micro(number) for number in range(epoch.num_micros)]
            ratio = cells_per_token(self.model)
            costs = [micro_cost(micro, ratio, self.data.table.attended) for micro in micros]
            share = assign(costs, self.group.size)[self.group.rank]
            with _evaluating(self.model):
                for number in counted(share, "computing", len(share), "batches"):
                    computed = self._compute(work, micros[number])
                    local |= {f"{number} {name}": values for name, values in computed.items()}
        results: list[dict[str, np.ndarray]] = [{} for _ in micros]
        for part in self.group.exchange_arrays(local):
            for key, values in part.items():
                place, _, name = key.partition(" ")
                results[int(place)][name] = values
        yield from zip(micros, results, strict=True)

    def collect(self, work: Work) -> dict[str, np.ndarray]:
        """Values per sequence by name, (n, ...) in the order of `seq_ids`; those of the parts of a sequence that was
        cut are added, and those of a sequence without a target are 0.

        Args:
            work: as in `results`; its arrays are (num_seqs, ...).
        """
        collected: dict[str, np.ndarray] = {}
        place = self.places()
        for micro, arrays in self.results(work):
            for name, values in arrays.items():
                if name not in collected:
                    collected[name] = np.zeros((len(self.seq_ids), *values.shape[1:]), values.dtype)
                np.add.at(collected[name], place[micro.seq_ids], values)
        return collected

    def places(self) -> np.ndarray:
        """Place of each sequence of the data in `seq_ids`, (num_sequences,) int64; -1 for all others."""
        places = np.full(len(self.data.table.positions), -1, np.int64)
        places[self.seq_ids] = np.arange(len(self.seq_ids))
        return places

    def _compute(self, work: Work, micro: Micro) -> dict[str, np.ndarray]:
        with needs_memory("a micro-batch of an evaluation", "lower plan.tokens_per_micro"):
            return work(self.data.load(micro).to(self.model.device))

    def _plan(self) -> Plan:
        """Plan micro-batches with every sequence that has a target, once each."""
        fields = {"overflow": self.overflow, "drop_last": False, "strategy": "pack", "window": None}
        fields["tokens_per_step"] = self.settings.tokens_per_micro
        return plan(
            self.data.table.positions,
            self.settings.model_copy(update=fields),
            seed=0,
            epoch=0,
            max_tokens=self.model.config.longest,
            context_field=self.model.config.context_field,
            seq_ids=self.seq_ids,
            targets=self.targets or self.data.count_targets,
        )


@contextmanager
def _evaluating(model: Model) -> Iterator[None]:
    """Put a model into evaluation mode for the block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
