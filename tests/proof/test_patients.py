"""The certificate on patients: it passes, and it catches what goes wrong when histories are batched."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from unpad.batching.batch import RaggedBatch
from unpad.batching.layout import build_layout
from unpad.batching.plan import Micro
from unpad.data.patients import EventData
from unpad.models.set_sequence import linear_path
from unpad.models.set_sequence.event_sets import EventSets
from unpad.models.set_sequence.linear_path import LastValues
from unpad.proof import recipe
from unpad.proof import sample as samples

pytestmark = pytest.mark.slow

SMALL = [
    "model.width=16", "model.heads=2", "model.hidden=16", "model.latent=4", "model.levels=1", "model.inducing=2",
    "model.blocks=1", "model.decoder_layers=1", "precision=fp32", "train.threads=1",
]  # fmt: skip


def failed() -> set[str]:
    return {line.name for line in recipe.prove_recipe("events", SMALL).lines if line.passed is False}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate of half the sequences, batched by one strategy and not as many at once: enough to find a fault."""
    monkeypatch.setattr(samples, "choose", partial(samples.choose, most=8))
    monkeypatch.setattr(samples, "many_of", lambda *_: [])
    monkeypatch.setattr(recipe, "strategy_names", lambda: ["pack"])


def plant(monkeypatch: pytest.MonkeyPatch, fault: Callable[[RaggedBatch, EventSets], RaggedBatch]) -> None:
    """Let the loader make this of every batch that has three patients or more."""
    load = EventData.load

    def broken(data: EventData, micro: Micro) -> RaggedBatch:
        batch = load(data, micro)
        sets = batch.part(EventSets)
        return batch if sets is None or batch.num_seqs < 3 else fault(batch, sets)

    monkeypatch.setattr(EventData, "load", broken)


def moved(lengths: np.ndarray, at: int) -> np.ndarray:
    """The same runs, the boundary behind run `at` one place earlier."""
    lengths = lengths.copy()
    lengths[at] -= 1
    lengths[at + 1] += 1
    return lengths


def first_of_two(lengths: np.ndarray) -> int:
    """A run of two or more that another follows."""
    return int(np.flatnonzero(lengths[:-1] > 1)[0])


@pytest.mark.promise("patients.verbs")
def test_patients_pass_and_no_line_is_left_open():
    certificate = recipe.prove_recipe("events", SMALL)
    assert certificate.passed
    assert [line.name for line in certificate.lines if line.passed is None and line.applies] == []
    assert "a set never changes an earlier output" in {line.name for line in certificate.lines}


@pytest.mark.usefixtures("few")
def test_a_boundary_between_patients_that_is_off_by_one_is_caught(monkeypatch):
    def fault(batch: RaggedBatch, events: EventSets) -> RaggedBatch:
        lengths = events.history.lengths().numpy()
        return batch.with_part(replace(events, history=build_layout(moved(lengths, first_of_two(lengths)))))

    plant(monkeypatch, fault)
    assert "plan pack = alone" in failed()


@pytest.mark.nightly
@pytest.mark.usefixtures("few")
def test_a_last_value_that_is_read_past_the_end_of_a_patient_is_caught(monkeypatch):
    read = linear_path.last_values

    def fault(code: Tensor, value: Tensor, has_value: Tensor, lengths: Tensor) -> LastValues:
        longer = lengths.clone()
        if len(lengths) > 2 and lengths[1] > 0:
            longer[:2] += torch.tensor([1, -1])
        return read(code, value, has_value, longer)

    monkeypatch.setattr(linear_path, "last_values", fault)
    assert {"plan pack = alone", "no gradient crosses between sequences"} <= failed()


@pytest.mark.nightly
@pytest.mark.usefixtures("few")
def test_an_event_in_the_set_of_the_next_patient_is_caught(monkeypatch):
    def fault(batch: RaggedBatch, events: EventSets) -> RaggedBatch:
        last = events.history.cu_seqlens[1:-1].numpy() - 1  # the last set of every patient but the last
        members = events.members.lengths().numpy()
        at = int(next(index for index in last if index >= 0 and members[index] > 1))
        return batch.with_part(replace(events, members=build_layout(moved(members, at))))

    plant(monkeypatch, fault)
    assert "plan pack = alone" in failed()


@pytest.mark.usefixtures("few")
def test_an_empty_patient_that_shifts_the_labels_is_caught(monkeypatch):
    def fault(batch: RaggedBatch, events: EventSets) -> RaggedBatch:
        """As if patients without events were left out of everything but the labels."""
        return replace(batch, seq_labels=torch.roll(batch.seq_labels, 1))

    plant(monkeypatch, fault)
    assert {"labels stay within their sequence", "plan pack = alone"} <= failed()
