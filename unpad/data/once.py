"""Visit every sequence of a data set exactly once, in batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from unpad.batching.pieces import TargetCount
from unpad.batching.plan import Micro, plan
from unpad.data.family import Data
from unpad.models.contract import Model
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
    fields = {
        "overflow": overflow,
        "drop_last": False,
        "strategy": "pack",
        "tokens_per_step": settings.tokens_per_micro,
    }
    epoch = plan(
        data.table.positions,
        settings.model_copy(update=fields),
        seed=0,
        epoch=0,
        max_tokens=model.config.longest,
        context_field=model.config.context_field,
        seq_ids=seq_ids,
        targets=targets or data.count_targets,
    )
    was_training = model.training
    model.eval()
    try:
        micros = (micro for step in range(epoch.num_steps) for micro in epoch.step(step))
        yield from counted(micros, "computing", epoch.num_micros, "batches")
    finally:
        model.train(was_training)


def slots(data: Data, seq_ids: np.ndarray) -> np.ndarray:
    """Place of each sequence in `seq_ids`, (num_sequences,) int64; -1 for other sequences."""
    slot = np.full(len(data.table.positions), -1, np.int64)
    slot[seq_ids] = np.arange(len(seq_ids))
    return slot
