"""Preferences of a model between the replies of held-out pairs, against the weights that training started from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from unpad.batching.batch import required
from unpad.data.family import Data
from unpad.data.measuring import Measuring
from unpad.data.sources.split import Split
from unpad.errors import CheckpointError, RecipeError, SourceError
from unpad.evaluation.family import token_sums
from unpad.evaluation.metrics import HeldOut
from unpad.interchange.origin import starting_weights
from unpad.models.contract import LearnsPreferences, Model
from unpad.nn.native.quantized import plain_copy
from unpad.nn.precision import Precision
from unpad.recipes.recipe import stages_of
from unpad.run import checkpoint
from unpad.run.base import fingerprint
from unpad.run.folder import CHECKPOINTS
from unpad.run.kept import read_reference

if TYPE_CHECKING:  # training computes references, and loads no runs
    from unpad.evaluation.rows import Columns
    from unpad.inference.loaded import LoadedRun


class Margins(NamedTuple):
    """Loss in nats, margin of the chosen reply's reward, group and chosen sequence of every pair, (num_pairs,)."""

    loss: np.ndarray
    margin: np.ndarray
    group: np.ndarray
    chosen: np.ndarray

    @property
    def right(self) -> np.ndarray:
        """1 where the chosen reply has the larger reward, (num_pairs,) float64."""
        return (self.margin > 0).astype(np.float64)

    def columns(self) -> Columns:
        """Columns of the pairs' rows."""
        num = np.ones(len(self.loss), np.int64)
        return {"loss": self.loss, "num_targets": num, "margin": self.margin, "right": self.right}


def log_probabilities(over: Measuring[Data], precision: Precision = "fp32") -> np.ndarray:
    """Log-probability of the targets of every sequence, (num,) float64 in nats, summed in double.

    Args:
        over: sequences that the model takes whole.
        precision: that products are computed in.
    """
    whole = over.settings.model_copy(update={"max_tokens": None})  # a limit of training, not of the model
    return -token_sums(replace(over, settings=whole), precision)[0]


def whole_pairs(model: Model, data: Data, seq_ids: np.ndarray) -> np.ndarray:
    """Replies among `seq_ids` with their whole pair within the model's context, (num,) int64 in order."""
    pair = required(data.replies).pair
    too_long = data.table.positions > model.config.longest
    return seq_ids[(pair[seq_ids] >= 0) & ~np.isin(pair[seq_ids], pair[too_long])]


def chosen_of(model: Model, data: Data, seq_ids: np.ndarray) -> np.ndarray:
    """The chosen replies of these, (num,) int64 in order."""
    whole = whole_pairs(model, data, seq_ids)
    return whole[required(data.replies).is_chosen(whole)]


def by_length(training: Data, over: Measuring[Data], chosen: np.ndarray) -> tuple[str, np.ndarray]:
    """A choice by length alone, the way that training prefers, and its share of right ones in each pair, (num,)."""
    learnt, longer = np.flatnonzero(training.table.split == Split.TRAIN), []
    for data, ids in ((training, chosen_of(over.model, training, learnt)), (over.data, chosen)):
        replies = required(data.replies)
        longer.append(np.sign(replies.lengths[ids] - replies.lengths[replies.rejected_of(ids)]))
    way = 1 if longer[0].sum() > 0 else -1
    return f"the {'longer' if way > 0 else 'shorter'} reply", (1 + way * longer[1]) / 2


def margins(over: Measuring[Data]) -> Margins:
    """Compare the replies of pairs by their implicit rewards, in the model's own precision.

    Args:
        over: replies, of every pair both; those of pairs beyond the model's context are left out.
    """
    model, data = over.model, over.data
    assert isinstance(model, LearnsPreferences), "a model of pairs learns preferences"
    seq_ids, replies = whole_pairs(model, data, over.seq_ids), required(data.replies)
    gain = np.zeros(len(data.table))
    gain[seq_ids] = log_probabilities(replace(over, seq_ids=seq_ids)) - replies.reference[seq_ids]
    chosen = chosen_of(model, data, seq_ids)
    margin = required(model.beta) * (gain[chosen] - gain[replies.rejected_of(chosen)])
    return Margins(np.logaddexp(0, -margin), margin, data.table.group[chosen], chosen)


def held_out(over: Measuring[Data]) -> HeldOut:
    """Loss per pair, share of pairs with a larger reward for the chosen reply, and the mean margin."""
    pairs = margins(over)
    values = {"loss": pairs.loss.mean(), "accuracy": pairs.right.mean(), "margin": pairs.margin.mean()}
    return HeldOut(float(values["loss"]), {name: float(value) for name, value in values.items()}, len(pairs.loss))


# --------------------------------------------------------------------------- weights that a run started from


def put_reference(run: LoadedRun, data: Data, seq_ids: np.ndarray, *, is_own: bool) -> None:
    """Give replies of pairs their log-probabilities under the weights that the run started from.

    Args:
        seq_ids: (n,) replies.
        is_own: True if the data is the run's own, so that the run has their values; otherwise the weights are needed.

    Raises:
        CheckpointError: the values that the run keeps are missing or damaged.
        SourceError: the weights are needed, and not at hand.
    """
    reference, (named, values) = required(data.replies).reference, read_reference(run.folder)
    if is_own and len(values) == len(data.table):
        reference[:] = values
        return
    start = _start(run, named.weights)
    ids = whole_pairs(start, data, seq_ids)
    reference[ids] = log_probabilities(Measuring(start, data, ids, run.recipe.plan))


def _start(run: LoadedRun, wanted: str) -> Model:
    """The model with the weights that the run's last stage started from, found by their fingerprint."""
    model = plain_copy(run.model)
    for weights in _candidates(run):
        with suppress(CheckpointError):
            checkpoint.put_weights(model, weights, str(run.folder), model.additions)
            if fingerprint(model.state_dict()) == wanted:
                return model
    what = "new pairs are compared with the weights that training started from, and these are not at hand"
    fix = "put the run of train.init_from back as it was, or evaluate the run's own pairs"
    raise SourceError(what, where=str(run.folder), fix=fix)


def _candidates(run: LoadedRun) -> Iterator[dict[str, Tensor]]:
    """Weights that the last stage may have started from: the ends of the stages before it, then another run's."""
    trained = run.folder if run.quantized is None else Path(run.quantized.original)
    for stage in reversed(stages_of(run.recipe)[:-1]):
        with suppress(CheckpointError):
            state = checkpoint.load(trained / CHECKPOINTS / f"best-{stage.name}", checkpoint.WEIGHTS)
            yield checkpoint.model_weights(state.tensors)
    if run.recipe.train.init_from:
        with suppress(CheckpointError, RecipeError):
            yield starting_weights(run.recipe.train.init_from)[0]
