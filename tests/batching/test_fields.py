"""Every field of a batch has a kind, and a new one travels with its batch by that kind alone."""

from dataclasses import dataclass, field, fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import random_batch
from tests.helpers.patients import random_patients
from unpad.batching import fields as fieldss
from unpad.batching.batch import RaggedBatch, concatenate
from unpad.batching.layout import Layout, build_layout
from unpad.models.set_sequence.event_sets import EventSets
from unpad.nn.preference import Pairs

META, LENGTHS = torch.device("meta"), [3, 0, 2, 4]


@dataclass(frozen=True)
class Days(fieldss.BatchPart):
    """A part that nothing in the library has heard of, with levels of its own: days, hours and visitors."""

    days: Layout = field(metadata=fieldss.runs(fieldss.SEQUENCE, "day"))
    hours: Layout = field(metadata=fieldss.runs("day", "hour"))
    noise: Tensor = field(metadata=fieldss.per("hour"))
    weight: Tensor = field(metadata=fieldss.per_token(pad=-1))
    marked: Tensor = field(metadata=fieldss.token_places())
    visitor: Tensor = field(metadata=fieldss.sequence_of("visitor"))
    age: Tensor = field(metadata=fieldss.per("visitor"))
    year: Tensor | None = field(default=None, metadata=fieldss.per_sequence())


def with_days(year: bool = True) -> RaggedBatch:
    """Four sequences with 1, 2, 0 and 1 days of 2, 1, 3 and 1 hours, and visitors of the last and the first."""
    batch = random_batch([length + 1 for length in LENGTHS])
    return batch.with_part(
        Days(
            days=build_layout(np.array([1, 2, 0, 1])), hours=build_layout(np.array([2, 1, 3, 1])),
            noise=torch.arange(7.0), weight=torch.arange(9.0), marked=torch.tensor([1, 2, 5, 8]),
            visitor=torch.tensor([0, 0, 3]), age=torch.tensor([30, 40, 50]),
            year=torch.tensor([2000, 2001, 2002, 2003]) if year else None,
        )
    )  # fmt: skip


def assert_same(one: RaggedBatch, two: RaggedBatch) -> None:
    for ours, theirs in ((one, two), *zip(one.parts, two.parts, strict=True)):
        for name, value in vars(ours).items():
            other = vars(theirs)[name]
            if isinstance(value, Layout):
                assert torch.equal(value.cu_seqlens, other.cu_seqlens), name
            elif isinstance(value, Tensor):
                assert torch.equal(value, other), name
            elif name != "parts":
                assert value is None is other, name


@pytest.mark.parametrize("holder", [RaggedBatch, EventSets, Pairs, Days])
def test_every_field_has_a_kind(holder):
    assert fields(holder)
    for one in fields(holder):
        assert isinstance(one.metadata.get(fieldss.KIND), fieldss.Kind), f"{holder.__name__}.{one.name}"


def test_these_are_all_parts_that_families_add():
    ours = {part for part in fieldss.BatchPart.__subclasses__() if part.__module__.startswith("unpad.")}
    assert ours == {EventSets, Pairs}


def test_a_part_is_selected_with_its_sequences():
    part = with_days().select([3, 1, 0, 3]).require(Days)
    assert part.days.lengths().tolist() == [1, 2, 1, 1]
    assert part.hours.lengths().tolist() == [1, 1, 3, 2, 1]
    assert part.noise.tolist() == [6, 2, 3, 4, 5, 0, 1, 6]
    assert part.weight.tolist() == [5, 6, 7, 8, 0, 1, 2, 5, 6, 7, 8]
    assert part.marked.tolist() == [0, 3, 5, 6, 7, 10]
    assert part.visitor.tolist() == [0, 2, 2, 3]
    assert part.age.tolist() == [50, 30, 40, 50]
    assert part.year.tolist() == [2003, 2001, 2000, 2003]
    assert with_days(year=False).select([1]).require(Days).year is None


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_parts_that_are_joined_are_the_part(cut):
    batch = with_days()
    assert_same(concatenate([batch.select(range(cut)), batch.select(range(cut, 4))]), batch)
    assert_same(concatenate([batch.select([i]) for i in range(4)]), batch)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_moves_tokens_and_nothing_else_of_a_part(side):
    batch = with_days()
    padded = batch.pad(side, pad_to=5)
    part, before = padded.require(Days), batch.require(Days)
    real = padded.layout.attention_mask.flatten()
    assert part.weight[real].tolist() == before.weight.tolist()
    assert (part.weight[~real] == -1).all()
    assert part.weight[part.marked].tolist() == before.weight[before.marked].tolist()
    assert part.noise is before.noise
    assert_same(padded.flat(), batch)
    assert batch.flat() is batch


def test_a_part_goes_to_the_device_of_its_batch():
    moved = with_days().to(META)
    part = moved.require(Days)
    assert {value.device for value in vars(part).values() if isinstance(value, Tensor)} == {META}
    assert part.hours.cu_seqlens.device == moved.labels.device == META


def test_dropping_tokens_leaves_what_is_counted_otherwise():
    batch = with_days()
    kept = torch.tensor([True, False, True, True, True, False, True, True, True])
    left = batch.keep(kept)
    part = left.require(Days)
    assert left.layout.lengths().tolist() == [2, 0, 2, 3]
    assert part.weight.tolist() == [0, 2, 3, 4, 6, 7, 8]
    assert part.marked.tolist() == [1, 6]
    assert part.noise is batch.require(Days).noise
    assert left.target_index.tolist() == left.loss_mask.nonzero().flatten().tolist()


def test_a_batch_is_asked_for_a_part_by_its_type():
    batch = random_batch([3, 4])
    assert batch.part(EventSets) is None
    with pytest.raises(AssertionError, match="no EventSets"):
        batch.require(EventSets)
    both = random_patients([4, 0, 9]).with_part(with_days().require(Days))
    other = replace(both.require(EventSets), durations=None)
    assert both.with_part(other).part(EventSets) is other
    assert len(both.with_part(other).parts) == 2


def test_batches_of_different_fields_are_not_joined():
    batch = random_batch([3, 4])
    with pytest.raises(AssertionError, match="some of these batches have `seq_ids`"):
        concatenate([batch, replace(batch, seq_ids=torch.arange(2))])
    with pytest.raises(ValueError, match="shorter"):
        concatenate([with_days(), batch])
