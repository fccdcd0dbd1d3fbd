"""Labels, masks, positions, classes and images that are not those of the sequence are counted one by one."""

from dataclasses import replace

import pytest
import torch

from tests.conftest import random_batch
from tests.helpers.vision import Row
from tests.helpers.vision import prepare as prepare_images
from unpad.batching.batch import RaggedBatch
from unpad.proof.certificate import _crossing, _images_line, _labels_line
from unpad.proof.line import Line
from unpad.proof.measure import Variant

BATCH = replace(random_batch([5, 4, 6], share=1.0), seq_labels=torch.tensor([1, 0, 1]))
ALONE = [BATCH.select([i]) for i in range(3)]


def wrong(batch: RaggedBatch, rows: list[int] | None = None) -> float:
    line = _labels_line(ALONE, [Variant("good", [BATCH], [[0, 1, 2]]), Variant("packed", [batch], [rows or [0, 1, 2]])])
    assert line.measured is not None
    assert line == Line("labels stay within their sequence", "", line.measured, 0.0, line.measured == 0)
    return line.measured


def at(values: torch.Tensor, place: int, value: int) -> torch.Tensor:
    return values.index_fill(0, torch.tensor([place]), value)


@pytest.mark.parametrize("make", [lambda: BATCH, lambda: BATCH.pad("right"), lambda: BATCH.pad("left", pad_to=9)])
def test_what_is_right_is_right_however_it_is_batched(make):
    assert wrong(make()) == 0
    assert wrong(BATCH.select([2, 0]), [2, 0]) == 0


def test_each_fault_counts():
    assert wrong(replace(BATCH, labels=at(BATCH.labels, 6, int(BATCH.labels[6]) + 1))) == 1
    assert wrong(replace(BATCH, position_ids=BATCH.position_ids + 1)) == BATCH.total_tokens
    unmasked = at(BATCH.loss_mask, 6, 0)
    assert wrong(replace(BATCH, loss_mask=unmasked, target_index=unmasked.nonzero().flatten())) == 1
    assert wrong(replace(BATCH, seq_labels=torch.tensor([1, 1, 0]))) == 2
    assert wrong(BATCH, [1, 0, 2]) >= 2, "sequences of other lengths"
    padded = BATCH.pad("right")
    assert wrong(replace(padded, target_index=torch.cat([padded.target_index, torch.tensor([4])]))) == 1


def test_filler_may_have_no_label():
    counted = replace(BATCH, seq_labels=None)
    unlabelled = replace(
        counted,
        loss_mask=counted.loss_mask & (torch.arange(counted.total_tokens) < 7),
        target_index=counted.target_index[counted.target_index < 7],
    )
    assert wrong(unlabelled, [0, 1, -1]) == 0
    assert wrong(counted, [0, 1, -1]) == 5


def test_labels_that_lead_into_the_next_sequence_are_crossing_if_all_do_and_there_are_two():
    ids, ends = BATCH.input_ids, [end - 1 for end in BATCH.layout.cu_seqlens.tolist()[1:-1]]
    into_next = BATCH.labels.clone()
    into_next[ends] = ids[[end + 1 for end in ends]]
    crossing = replace(BATCH, labels=into_next)
    assert (_crossing(BATCH), _crossing(crossing)) == ([False, False], [True, True])
    assert _crossing(replace(crossing, labels=at(into_next, ends[0], int(into_next[ends[0]]) + 1))) == [False, True]
    masked = at(BATCH.loss_mask, ends[1], 0)
    assert _crossing(replace(crossing, loss_mask=masked)) == [True], "one label is left"
    assert _crossing(crossing.pad("right")) == []


def test_the_label_at_the_only_boundary_leaves_it_open_if_it_is_the_next_token():
    good = random_batch([5, 4], share=1.0)
    crossing = replace(good, labels=at(good.labels, 3, int(good.input_ids[4])))
    lines = [
        _labels_line([one.select([i]) for i in (0, 1)], [Variant("packed", [one], [[0, 1]])])
        for one in (good, crossing)
    ]
    assert [line.passed for line in lines] == [True, None]
    assert "by chance or by a fault" in lines[1].note


ROWS: list[Row] = [
    ("1 5 <image> 7 8", [(3, 4)], "9"),
    ("2 3 4", [], "5"),
    ("7 <image> 8 <image>", [(1, 2), (2, 2)], "1"),
]


@pytest.mark.parametrize("side", ["", "left", "right"])
def test_images_belong_to_the_sequence_in_which_their_patches_lie(side):
    packed = prepare_images(ROWS).batch
    batch = packed.pad(side) if side else packed
    assert batch.media_seqs is not None
    line = _images_line([random_batch([3]), batch])
    assert line == Line("images stay within their sequence", "", 0.0, 0.0, True)
    line = _images_line([batch, replace(batch, media_seqs=torch.tensor([0, 0, 2]))])
    assert (line.measured, line.passed) == (2, False), "the two patches of its image"
    lost = replace(batch, media_index=batch.media_index[1:])
    assert _images_line([lost]).measured == 3, "patches without a place: all sequences"
