"""Isolation is claimed where a change leaves every sequence as many tokens, and where there is something to compare."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.conftest import random_batch, tiny_model
from unpad.batching.batch import RaggedBatch
from unpad.models.contract import Model
from unpad.proof.line import Line
from unpad.proof.measure import Measurement, ProofSubject, Variant, isolation_line

BATCH = random_batch([5, 6, 7])
NOTHING = Measurement([], {}, {}, {}, {})


def line(outputs: Callable[[Model, RaggedBatch], list[Tensor]], batch: RaggedBatch = BATCH) -> Line:
    subject = ProofSubject(tiny_model(), NOTHING, torch.device("cpu"), outputs)
    return isolation_line(subject, Variant("packed", [batch], [list(range(batch.num_seqs))]), "fp32")


def changed(batch: RaggedBatch) -> list[bool]:
    """Whether the tokens of a sequence are not those of BATCH."""
    lengths = BATCH.layout.lengths().tolist()
    pairs = zip(batch.input_ids.split(lengths), BATCH.input_ids.split(lengths), strict=True)
    return [not torch.equal(a, b) for a, b in pairs]


@pytest.mark.parametrize(("shrinks", "passed"), [([], False), ([0], False), ([0, 1, 2], None)])
def test_others_may_be_rounded_otherwise_where_the_own_number_of_tokens_changes(shrinks, passed):
    def outputs(model: Model, batch: RaggedBatch) -> list[Tensor]:
        mine = changed(batch)
        rounding = 1e-7 * any(mine)
        rows = [torch.full((4 - (one and index in shrinks), 2), 1 + rounding) for index, one in enumerate(mine)]
        return [row + one for row, one in zip(rows, mine, strict=True)]

    assert line(outputs).passed is passed


def test_a_sequence_that_keeps_its_tokens_is_compared_beside_one_that_does_not():
    def outputs(model: Model, batch: RaggedBatch) -> list[Tensor]:
        mine = changed(batch)
        return [torch.full((4 - (one and index == 0), 2), float(one)) for index, one in enumerate(mine)]

    assert line(outputs).passed is True


def test_one_sequence_alone_proves_nothing():
    def outputs(model: Model, batch: RaggedBatch) -> list[Tensor]:
        return [batch.input_ids.float()]

    assert line(outputs, random_batch([5])).passed is None
