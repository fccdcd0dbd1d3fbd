"""Random patients and a model of them without training, for tests of what is done with predictions."""

from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.helpers.models import Stub
from tests.helpers.patients import patient_batch
from unpad.batching.batch import RaggedBatch
from unpad.batching.plan import Micro
from unpad.data.family import SequenceTable, sequence_table
from unpad.models.contract import PredictsSets
from unpad.models.set_sequence.event_sets import EventSets
from unpad.nn.segments import segment_mean, segment_sum

CODES = ("unknown", "creatinine", "heart rate", "hypertension", "age", "sex=f", "glucose")


@dataclass(frozen=True)
class Patients:
    """What evaluation asks of `data/patients.py`, over patients drawn from a seed.

    Args:
        set_sizes: per patient, events of each set.
        labels: (num_patients,) 0, 1 or -1, or places in `classes`; None where the recipe has none.
        timed: whether there are times to the outcome.
    """

    set_sizes: list[list[int]]
    labels: np.ndarray | None
    timed: bool = True
    seed: int = 0
    private: bool = True
    classes: tuple[str, ...] = ()

    family = "patients"
    kinds = ("events",)
    codes = CODES
    num_outputs = len(CODES)
    landmarks, unit = None, "patients"

    @cached_property
    def ids(self) -> np.ndarray:
        return np.array([f"S{1000 - i}" for i in range(len(self.set_sizes))], object)

    @cached_property
    def table(self) -> SequenceTable:
        split = (np.arange(len(self.set_sizes)) % 4 != 0).astype(np.uint8)
        return sequence_table(np.array([sum(sizes) for sizes in self.set_sizes], np.int64), split)

    @cached_property
    def sets(self) -> SimpleNamespace:
        """What is asked of `histories.Sets`: the first set of every third patient holds facts."""
        facts = [n % 3 == 0 and at == 0 for n, sizes in enumerate(self.set_sizes) for at in range(len(sizes))]
        starts = np.cumsum([0, *map(len, self.set_sizes)])
        return SimpleNamespace(sets_of=starts, timeless=np.array(facts, np.bool_))

    def count_targets(self, seq_ids: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        return np.zeros(len(seq_ids), np.int64)  # those of unknown outcome have a place nevertheless

    def where(self, seq_id: int) -> str:
        return f"patients.parquet:{seq_id + 2}"

    def outcome(self, seq_id: int) -> tuple[float, bool]:
        rng = np.random.default_rng([self.seed, seq_id, 1])
        return float(rng.integers(1, 2000)), bool(rng.random() < 0.4)

    def load(self, micro: Micro) -> RaggedBatch:
        ids = micro.seq_ids.tolist()
        rngs = [np.random.default_rng([self.seed, i]) for i in ids]
        lengths = self.table.positions[micro.seq_ids]
        codes = [rng.integers(1, len(CODES), n) for rng, n in zip(rngs, lengths, strict=True)]
        values = [rng.normal(size=n) for rng, n in zip(rngs, lengths, strict=True)]
        has_value = [rng.random(n) < 0.8 for rng, n in zip(rngs, lengths, strict=True)]
        times = [np.sort(-rng.integers(0, 900, len(self.set_sizes[i]))) for rng, i in zip(rngs, ids, strict=True)]
        outcomes = [self.outcome(i) for i in ids]
        batch = patient_batch(
            [self.set_sizes[i] for i in ids],
            codes=np.concatenate([*codes, np.zeros(0, np.int64)]),
            values=np.concatenate([*values, np.zeros(0)]),
            has_value=np.concatenate([*has_value, np.zeros(0, bool)]),
            times=np.concatenate([*times, np.zeros(0)]),
        )
        sets = replace(
            batch.require(EventSets),
            durations=torch.tensor([days for days, _ in outcomes]) if self.timed else None,
            cause=torch.tensor([int(event) for _, event in outcomes]) if self.timed else None,
        )
        return replace(
            batch.with_part(sets),
            seq_ids=torch.tensor(ids, dtype=torch.int64),
            seq_labels=None if self.labels is None else torch.from_numpy(self.labels[micro.seq_ids]),
        )


class Guess(Stub, PredictsSets):
    """A fixed function of a patient's events in the place of a trained model; it looks only at the batch."""

    def __init__(self, hazards: bool = True, classes: int = 2, **weights: float) -> None:
        super().__init__()
        self.num_classes = classes
        self.weights = weights or {
            "classification": 1.0, "hazard": 0.3 * hazards, "reconstruction": 0.1, "next_code": 0.1,
        }  # fmt: skip
        self.has_hazards = hazards
        self.config: Any = SimpleNamespace(longest=1_000_000, context_field="model.context")

    def classify(self, batch: RaggedBatch) -> Tensor:
        return self._classes(self._score(batch))

    def hazards(self, batch: RaggedBatch) -> Tensor | None:
        return self._score(batch)[:, None, None] - torch.tensor([[2.0], [3.0], [1.0]]) if self.has_hazards else None

    def reconstruct(self, batch: RaggedBatch, latents: Tensor | None = None) -> Tensor:
        sets = batch.require(EventSets)
        return segment_mean(sets.values**2, sets.members)

    def code_nll(self, batch: RaggedBatch) -> Tensor:
        return batch.input_ids + batch.require(EventSets).values.abs()

    def next_codes(self, batch: RaggedBatch) -> Tensor:
        sets = batch.require(EventSets)
        counts = torch.zeros(sets.num_sets, len(CODES))
        at = (sets.members.seq_of_token(), batch.input_ids)
        return counts.index_put_(at, torch.ones(len(batch.input_ids)), accumulate=True) + torch.linspace(0, 1, 7)

    def course(self, batch: RaggedBatch, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        sets = batch.require(EventSets)
        score = segment_mean(sets.values, sets.members)[part]
        return self._classes(score).softmax(1), torch.full_like(score, 1 / (len(score) + 1))

    def posterior(self, batch: RaggedBatch) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def vectors(self, batch: RaggedBatch, level: str) -> Tensor:
        sets = batch.require(EventSets)
        values = torch.stack([sets.values, sets.values**2, torch.ones_like(sets.values)], 1)
        return segment_sum(values, batch.layout if level == "patient" else sets.members)

    def losses(self, batch: RaggedBatch) -> dict[str, tuple[Tensor, int]]:
        rebuilt = self.reconstruct(batch)
        return {"classification": (torch.tensor(0.0), 0), "reconstruction": (rebuilt.sum(), len(rebuilt))}

    def _classes(self, score: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(score), score - 0.5, -score, score / 2][: self.num_classes], 1)

    def _score(self, batch: RaggedBatch) -> Tensor:
        return segment_sum(batch.require(EventSets).values, batch.layout)


def draw(num: int = 40, labelled: bool = True, timed: bool = True, seed: int = 0) -> Patients:
    """Patients of one to nine sets of one to five events; every seventh is of unknown outcome."""
    rng = np.random.default_rng(seed)
    sizes = [rng.integers(1, 6, rng.integers(1, 10)).tolist() for _ in range(num)]
    labels = np.where(np.arange(num) % 7 == 3, -1, rng.random(num) < 0.4)
    return Patients(sizes, labels if labelled else None, timed, seed)
