"""Preferences of a model between the replies of held-out pairs, against the weights that training started from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from unpad.batching.batch import RaggedBatch
from unpad.data.once import each_micro, slots
from unpad.data.text import TextData
from unpad.evaluation.metrics import HeldOut, Metric, mean_of
from unpad.evaluation.per_sequence import per_sequence
from unpad.models.contract import LearnsPreferences, Model, ScoresTokens
from unpad.nn.precision import Precision, autocast
from unpad.processes.group import ALONE, Group
from unpad.recipes.training import PlanSettings


class Margins(NamedTuple):
    """Of every pair, the loss in nats, the margin of the chosen reply's reward, and its group; (num_pairs,) each."""

    loss: np.ndarray
    margin: np.ndarray
    group: np.ndarray

    @property
    def right(self) -> np.ndarray:
        """1 where the chosen reply has the larger reward, (num_pairs,) float64."""
        return (self.margin > 0).astype(np.float64)


@torch.no_grad()
def log_probabilities(
    model: Model,
    data: TextData,
    seq_ids: np.ndarray,
    settings: PlanSettings,
    device: torch.device,
    precision: Precision = "fp32",
    group: Group = ALONE,
) -> np.ndarray:
    """Log-probability of the targets of every sequence, (num,) float64 in nats, summed in double.

    Args:
        seq_ids: (num,) sequences that the model takes whole.
        settings: the recipe's plan section; only its sizes matter, as no result depends on the batching.
    """
    assert isinstance(model, ScoresTokens), "a model of text predicts tokens"
    settings = settings.model_copy(update={"max_tokens": None})  # a limit of training, not of the model
    slot, log_p = slots(data, seq_ids), np.zeros(len(seq_ids))

    def measure(batch: RaggedBatch) -> dict[str, np.ndarray]:
        with autocast(precision, device):
            nll = model.token_nll(batch.to(device)).cpu()
        return {"nll": per_sequence(nll, batch)[0]}

    for micro, found in each_micro(model, data, seq_ids, settings, measure, group=group):
        log_p[slot[micro.seq_ids]] = -found["nll"]
    return log_p


def whole_pairs(model: Model, data: TextData, seq_ids: np.ndarray) -> np.ndarray:
    """The replies among some sequences whose pair the model takes whole, (num,) int64 in order."""
    assert data.replies is not None, "data of pairs"
    pair = data.replies.pair
    too_long = data.table.positions > model.config.longest
    kept: np.ndarray = seq_ids[(pair[seq_ids] >= 0) & ~np.isin(pair[seq_ids], pair[too_long])]
    return kept


def margins(
    model: Model,
    data: TextData,
    seq_ids: np.ndarray,
    settings: PlanSettings,
    device: torch.device,
    group: Group = ALONE,
) -> Margins:
    """Compare the replies of pairs by their implicit rewards, in the model's own precision.

    Args:
        seq_ids: (num,) replies, of every pair both; those of pairs beyond the model's context are left out.
    """
    assert isinstance(model, LearnsPreferences), "a model of pairs learns preferences"
    assert model.beta is not None, "set with the objective"
    assert data.replies is not None, "data of pairs"
    seq_ids = whole_pairs(model, data, seq_ids)
    gain = np.zeros(len(data.table))
    log_p = log_probabilities(model, data, seq_ids, settings, device, group=group)
    gain[seq_ids] = log_p - data.replies.reference[seq_ids]
    chosen = seq_ids[data.replies.is_chosen(seq_ids)]
    margin = model.beta * (gain[chosen] - gain[data.replies.rejected_of(chosen)])
    return Margins(np.logaddexp(0, -margin), margin, data.table.group[chosen])


def held_out(
    model: Model,
    data: TextData,
    seq_ids: np.ndarray,
    settings: PlanSettings,
    device: torch.device,
    group: Group = ALONE,
) -> HeldOut:
    """Loss per pair, share of pairs whose chosen reply has the larger reward, and the mean margin."""
    found = margins(model, data, seq_ids, settings, device, group)
    values = {"loss": found.loss.mean(), "accuracy": found.right.mean(), "margin": found.margin.mean()}
    return HeldOut(float(values["loss"]), {name: float(value) for name, value in values.items()}, len(found.loss))


def summarise(found: Margins) -> dict[str, Metric]:
    """`loss`, `accuracy` and `margin` of pairs, with intervals over groups, such as pairs of one prompt."""
    return {
        "loss": mean_of(found.loss, found.group),
        "accuracy": mean_of(found.right, found.group, share=True),
        "margin": mean_of(found.margin, found.group),
    }
