"""Weights that a run of pairs started from, and the log-probabilities of pairs under them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
from torch import Tensor

from unpad.data.measuring import Measuring
from unpad.data.text import TextData
from unpad.errors import CheckpointError, RecipeError, SourceError
from unpad.evaluation.preferences import log_probabilities, whole_pairs
from unpad.inference.loaded import LoadedRun
from unpad.interchange.origin import starting_weights
from unpad.models.contract import Model
from unpad.recipes.recipe import stages_of
from unpad.run import checkpoint
from unpad.run.base import fingerprint
from unpad.run.folder import CHECKPOINTS
from unpad.run.reference import read_reference


def put_reference(run: LoadedRun, data: TextData, seq_ids: np.ndarray, *, is_own: bool) -> None:
    """Give replies of pairs their log-probabilities under the weights that the run started from.

    Args:
        seq_ids: (n,) replies.
        is_own: whether the data is the run's own, whose values it keeps; else the weights must be at hand.

    Raises:
        CheckpointError: the values that the run keeps are missing or damaged.
        SourceError: the weights are needed, and not at hand.
    """
    assert data.replies is not None, "data of pairs"
    named, values = read_reference(run.folder)
    if is_own and len(values) == len(data.table):
        data.replies.reference[:] = values
        return
    start = _start(run, named.weights)
    ids = whole_pairs(start, data, seq_ids)
    data.replies.reference[ids] = log_probabilities(Measuring(start, data, ids, run.recipe.plan))


def _start(run: LoadedRun, wanted: str) -> Model:
    """The model with the weights that the run's last stage started from, found by their fingerprint."""
    model = copy.deepcopy(run.model)
    for weights in _candidates(run):
        with suppress(CheckpointError):
            checkpoint.put_weights(model, weights, str(run.folder), model.additions)
            if fingerprint(model.state_dict()) == wanted:
                return model
    raise SourceError(
        "new pairs are compared with the weights that training started from, and these are not at hand",
        where=str(run.folder),
        fix="put the run of train.init_from back as it was, or evaluate the run's own pairs",
    )


def _candidates(run: LoadedRun) -> Iterator[dict[str, Tensor]]:
    """Weights that the last stage may have started from: the ends of the stages before it, then another run's."""
    for stage in reversed(stages_of(run.recipe)[:-1]):
        with suppress(CheckpointError):
            state = checkpoint.load(run.folder / CHECKPOINTS / f"best-{stage.name}", checkpoint.WEIGHTS)
            yield checkpoint.model_weights(state.tensors)
    if run.recipe.train.init_from:
        with suppress(CheckpointError, RecipeError):
            yield starting_weights(run.recipe.train.init_from)[0]
