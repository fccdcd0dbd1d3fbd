"""Visit every sequence of a data set exactly once, in batches; several processes share the batches by cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from unpad.batching.batch import RaggedBatch
from unpad.batching.pieces import TargetCount
from unpad.batching.plan import Micro, Plan, plan
from unpad.batching.shares import assign, micro_cost
from unpad.data.family import Data
from unpad.errors import needs_memory
from unpad.models.contract import Model
from unpad.models.cost import cells_per_token
from unpad.processes.group import ALONE, Group
from unpad.recipes.training import PlanSettings
from unpad.terminal.progress import counted


def once_each(seq_ids: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Count one target for every whole sequence, labelled or not, (n,) int64."""
    targets: np.ndarray = (np.asarray(starts) == 0).astype(np.int64)
    return targets


def every_micro(
    model: Model,
    data: Data,
    seq_ids: np.ndarray,
    settings: PlanSettings,
    overflow: str = "error",
    targets: TargetCount | None = None,
) -> Iterator[Micro]:
    """Yield micro-batches with every sequence that has a target, once each; the model is in evaluation mode meanwhile.

    Args:
        settings: the recipe's plan section; its sizes and its stride apply.
        overflow: `plan.overflow` for sequences beyond the model's context.
        targets: counts targets inside spans; default those of the data.
    """
    epoch = _plan_once(model, data, seq_ids, settings, overflow, targets)
    with _evaluating(model):
        micros = (micro for step in range(epoch.num_steps) for micro in epoch.step(step))
        yield from counted(micros, "computing", epoch.num_micros, "batches")


def each_micro(
    model: Model,
    data: Data,
    seq_ids: np.ndarray,
    settings: PlanSettings,
    work: Callable[[RaggedBatch], dict[str, np.ndarray]],
    *,
    overflow: str = "error",
    targets: TargetCount | None = None,
    group: Group = ALONE,
) -> Iterator[tuple[Micro, dict[str, np.ndarray]]]:
    """Compute something of every micro-batch of `every_micro`, and yield them in order with what was found.

    One process computes them one by one. Of several processes each computes a share by cost, and all of them yield
    the same results with every bit, in the same order: a sum over them depends on no number of processes. The model is
    in evaluation mode while `work` runs.

    Args:
        work: arrays of one loaded micro-batch by name; a function of the batch and the weights alone. It tells the
            other processes nothing itself.
        group: the processes that evaluate equal weights on equal data; all of them call this with equal arguments.

    Raises:
        UnpadError: that of `work` or of loading, in all processes.
        OutOfMemoryError: a micro-batch does not fit.
    """

    def compute(micro: Micro) -> dict[str, np.ndarray]:
        with needs_memory("a micro-batch of an evaluation", "lower plan.tokens_per_micro"):
            return work(data.load(micro))

    if group.size == 1:
        for micro in every_micro(model, data, seq_ids, settings, overflow, targets):
            yield micro, compute(micro)
        return
    own: dict[str, np.ndarray] = {}
    with group.together():
        epoch = _plan_once(model, data, seq_ids, settings, overflow, targets)
        micros = [micro for step in range(epoch.num_steps) for micro in epoch.step(step)]
        ratio = cells_per_token(model)
        costs = [micro_cost(micro, ratio, data.table.attended) for micro in micros]
        share = assign(costs, group.size)[group.rank]
        with _evaluating(model):
            for number in counted(share, "computing", len(share), "batches"):
                own |= {f"{number} {name}": values for name, values in compute(micros[number]).items()}
    found: list[dict[str, np.ndarray]] = [{} for _ in micros]
    for told in group.exchange_arrays(own):
        for key, values in told.items():
            place, _, name = key.partition(" ")
            found[int(place)][name] = values
    yield from zip(micros, found, strict=True)


def _plan_once(
    model: Model,
    data: Data,
    seq_ids: np.ndarray,
    settings: PlanSettings,
    overflow: str,
    targets: TargetCount | None,
) -> Plan:
    """Plan micro-batches with every sequence that has a target, once each."""
    fields = {
        "overflow": overflow,
        "drop_last": False,
        "strategy": "pack",
        "tokens_per_step": settings.tokens_per_micro,
    }
    return plan(
        data.table.positions,
        settings.model_copy(update=fields),
        seed=0,
        epoch=0,
        max_tokens=model.config.longest,
        context_field=model.config.context_field,
        seq_ids=seq_ids,
        targets=targets or data.count_targets,
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


def slots(data: Data, seq_ids: np.ndarray) -> np.ndarray:
    """Place of each sequence in `seq_ids`, (num_sequences,) int64; -1 for other sequences."""
    slot = np.full(len(data.table.positions), -1, np.int64)
    slot[seq_ids] = np.arange(len(seq_ids))
    return slot
