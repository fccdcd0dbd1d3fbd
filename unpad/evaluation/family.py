"""Measures of each family of data: one file each in this folder, and what these have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol

import numpy as np
import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.data.family import Data
from unpad.data.measuring import DataType, Measuring
from unpad.evaluation.metrics import HeldOut, NewFacts
from unpad.models.contract import Model, ScoresTokens
from unpad.nn.precision import Precision, autocast
from unpad.recipes.recipe import Recipe

if TYPE_CHECKING:  # training measures models, and loads no runs
    from unpad.evaluation.rows import Evaluation
    from unpad.inference.loaded import LoadedRun


Prompt = Sequence[int] | RaggedBatch  # ids; or a batch of one with images among its tokens


Numbers = dict[str, np.ndarray]  # of one input, by name


@dataclass(frozen=True, eq=False)
class HeldOutInputs:
    """Held-out inputs of a run, of sizes as unlike as there are, and what computes the numbers that it answers with.

    Args:
        seq_ids: of the inputs in the data.
        compute: from inputs to the numbers of each, in one pass of the model.
    """

    data: Data
    seq_ids: list[int]
    inputs: list[Any]
    compute: Callable[[Sequence[Any]], list[Numbers]]

    def alone(self) -> list[Numbers]:
        """Numbers of every input in a pass of its own."""
        return [numbers for one in self.inputs for numbers in self.compute([one])]


@dataclass(frozen=True, eq=False)
class TrainedModel(Generic[DataType]):
    """A model with the weights that its run ends with.

    Args:
        kinds: parts of the data that the last stage trained on.
        anew: whether steps were taken; else only what is missing is made, as after a kill right after the last step.
    """

    model: Model
    data: DataType
    recipe: Recipe
    kinds: tuple[str, ...]
    folder: Path
    step: int
    anew: bool

    def wants(self, is_kept: Callable[[Path, int], bool]) -> bool:
        """True if a keepsake is to be made; `is_kept` is True if the run has the keepsake of a step."""
        return self.anew or not is_kept(self.folder, self.step)


class FamilyMeasures(Protocol):
    """Members of a module such as `evaluation/text.py`; see also `check_new` and `keepsakes`, which it may have, and
    `simple(training, over, rows)`, the answers of simple methods to the rows that were measured."""

    def held_out(self, over: Measuring[Any]) -> HeldOut:
        """Measure a model in training; processes that share the work return the same."""

    def evaluate(self, run: LoadedRun, over: Measuring[Any], num_shown: int) -> Evaluation:
        """Measure a run, for `unpad eval`, with `num_shown` examples."""

    def held_out_prompts(self, data: Any, most: int) -> list[Prompt]:
        """Prompts of held-out data, of lengths as unlike as there are; in families whose models generate."""

    def held_out_inputs(self, run: LoadedRun, data: Any, most: int) -> HeldOutInputs:
        """Inputs of held-out data; in families whose models answer in numbers."""


def evenly(rows: np.ndarray, lengths: np.ndarray, most: int) -> list[int]:
    """At most so many of some rows, evenly among those ordered by their lengths, (num_sequences,)."""
    ordered = rows[np.argsort(lengths[rows], kind="stable")]
    places = np.linspace(0, len(ordered) - 1, min(most, len(ordered))).round().astype(np.int64)
    return ordered[np.unique(places)].tolist()


def measures_of(family: str) -> FamilyMeasures:
    """Return the module of this folder that measures a family."""
    return import_module(f"unpad.evaluation.{family}")


def held_out(over: Measuring[Data]) -> HeldOut:
    """Measure a model on held-out sequences, in its own precision (fp32 unless it was converted); processes that share
    the work return the same."""
    result = measures_of(over.data.family).held_out(over)
    return replace(result, loss=float(result.loss))  # a comparison with a number of numpy is no bool of JSON


def check_new(data: Data, path: Path) -> NewFacts:
    """Refuse new data that the run knows nothing about, or tell what it does not know; nothing for a family without
    `check_new`.

    Raises:
        SourceError: the data is refused.
    """
    check: Callable[[Data, Path], NewFacts] | None = getattr(measures_of(data.family), "check_new", None)
    return ([], {}) if check is None else check(data, path)


def keepsakes(ended: TrainedModel[Data]) -> None:
    """Keep in the run what its page shows of the model that training ends with, such as replies; nothing for a family
    without `keepsakes`.

    Raises:
        DiskError: it cannot be written.
    """
    keep: Callable[[TrainedModel[Data]], None] | None = getattr(measures_of(ended.data.family), "keepsakes", None)
    if keep is not None:
        keep(ended)


# --------------------------------------------------------------------------- log-likelihoods of tokens


@torch.no_grad()
def token_sums(over: Measuring[Data], precision: Precision = "fp32") -> tuple[np.ndarray, np.ndarray]:
    """Negative log-likelihood of the targets of every sequence in nats, and their number, each (num_seqs,).

    Args:
        precision: that products are computed in; sums are in fp64.
    """
    model = over.model
    assert isinstance(model, ScoresTokens), "a model of text predicts tokens"

    def measure(batch: RaggedBatch) -> dict[str, np.ndarray]:
        with autocast(precision, over.model.device):
            sums, counts = per_sequence(model.token_nll(batch), batch)
        return {"nll": sums, "targets": counts}

    values = over.collect(measure)
    return values["nll"], values["targets"]


def per_sequence(nll: Tensor, batch: RaggedBatch) -> tuple[np.ndarray, np.ndarray]:
    """Add up (num_targets,) values by sequence; returns sums in fp64 and counts, each (num_seqs,)."""
    bounds = batch.flat_layout.cu_seqlens[1:].long()
    sequence = torch.searchsorted(bounds, batch.target_index, right=True).cpu().numpy()
    sums = np.bincount(sequence, weights=nll.cpu().double().numpy(), minlength=batch.num_seqs)
    return sums, np.bincount(sequence, minlength=batch.num_seqs)
