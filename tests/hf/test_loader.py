"""Flat batches by our plan: every token once, the same number of micro-batches on every rank."""

from collections import Counter
from itertools import pairwise

import datasets
import pytest
import torch
from torch.utils.data import DataLoader

from tests.hf.families import IGNORED, distance, make_model, make_rows, make_sequences, take_gradient, targets_of, truth
from unpad import BatchSampler
from unpad.errors import SourceError
from unpad.hf import Collator, Examples, prepare, steps
from unpad.recipes.training import PlanSettings

SEQUENCES = make_sequences(24, high=30)
ROWS = make_rows(SEQUENCES)


@pytest.mark.promise("processes.hf")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_losses_and_gradients_of_ranks_add_up_to_those_of_one_sequence_at_a_time(world_size):
    model = make_model("qwen3")
    wanted_loss, wanted = truth(model, ROWS)
    prepare(model)
    fields = {"tokens_per_step": 10_000, "tokens_per_micro": 64, "world_size": world_size}
    own = [list(steps(ROWS, rank=rank, **fields)) for rank in range(world_size)]
    assert len({len(step.batches) for (step,) in own}) == 1
    total = 0.0
    for (step,) in own:
        assert int(step.num_targets) == targets_of(ROWS)
        for batch in step.batches:
            loss = model(**batch, num_items_in_batch=step.num_targets).loss
            loss.backward()
            total += float(loss.detach())
    assert total == pytest.approx(wanted_loss, rel=1e-5)
    assert distance(take_gradient(model), wanted) < 1e-5


def test_a_row_that_has_grown_since_it_was_read_is_refused():
    rows = [{"input_ids": list(one)} for one in SEQUENCES]
    examples = Examples(rows)
    rows[3]["input_ids"].append(2)
    with pytest.raises(SourceError, match=f"a row has .{len(SEQUENCES[3]) + 1}, "):
        examples[3]


def test_every_token_is_in_one_batch_and_no_batch_is_padded():
    sequences = Counter()
    silent = {"input_ids": [5, 6, 7], "labels": [IGNORED] * 3}  # is left out; the ledger counts it
    for step in steps([*ROWS, silent], tokens_per_step=128, tokens_per_micro=64, seed=4):
        for batch in step.batches:
            assert batch["input_ids"].shape[1] <= 64
            ends = batch["cu_seq_lens_q"].tolist()
            spans = [slice(start, stop) for start, stop in pairwise(ends)]
            sequences.update(tuple(batch["input_ids"][0, span].tolist()) for span in spans)
            assert all(batch["labels"][0, span.start] == IGNORED for span in spans)
            assert all(batch["position_ids"][0, span].tolist() == list(range(span.stop - span.start)) for span in spans)
    assert sequences == Counter(tuple(row["input_ids"]) for row in ROWS)
    assert Examples([*ROWS, silent]).plan(PlanSettings(), 0, 0).ledger.dropped == {"no_target": 3}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "not tokenized"}], "a row has text and no input_ids"),
        ([{"input_ids": [1, 2, 3], "labels": [1, 2]}], "a row has 3 input_ids and 2 labels"),
        ([{"input_ids": [1]}, {"input_ids": [1, 2], "labels": [1, -100]}], "none of the 2 examples has a target"),
    ],
)
def test_data_that_cannot_be_batched_is_refused(rows, message):
    with pytest.raises(SourceError, match=message):
        Examples(rows)


# --------------------------------------------------------------------------- in loaders of torch


@pytest.mark.parametrize(("workers", "rows"), [(0, ROWS), pytest.param(2, ROWS[:3], marks=pytest.mark.slow)])
def test_means_over_batches_and_ranks_of_a_loader_are_the_mean_over_the_targets_of_an_update(workers, rows):
    model = make_model("qwen3")
    wanted_loss, wanted = truth(model, rows)
    prepare(model)
    examples, losses = Examples(rows), []
    for rank in range(2):  # of three rows one of the four batches is empty
        fields = {"tokens": 400, "gradient_accumulation_steps": 2, "rank": rank, "world_size": 2}
        sampler = BatchSampler(examples.lengths, targets=examples.targets, **fields)
        for batch in DataLoader(examples, batch_sampler=sampler, collate_fn=Collator(), num_workers=workers):
            loss = model(**batch).loss / 4
            loss.backward()
            losses.append(float(loss.detach()))
    assert len(losses) == 4
    assert sum(losses) == pytest.approx(wanted_loss, rel=1e-5)
    assert distance(take_gradient(model), wanted) < 1e-5


def test_a_sampler_with_other_targets_than_its_examples_is_refused():
    examples = Examples(ROWS)
    loader = DataLoader(examples, batch_sampler=BatchSampler(examples.lengths, tokens=64), collate_fn=Collator())
    with pytest.raises(SourceError, match=r"a batch has \d+ targets, and \d+ by its sampler"):
        list(loader)


def test_the_collator_takes_rows_apart_and_leaves_padding_out():
    packed = {"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [2, 3], "name": "a"}
    padded = {"input_ids": [0, 4, 3], "labels": [-100, 4, 3], "attention_mask": [0, 1, 1], "token_type_ids": [0, 0, 0]}
    batch = Collator()([packed, padded])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 4, 3]]
    assert batch["labels"].tolist() == [[IGNORED, 6, IGNORED, 8, 9, IGNORED, 3]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 5, 7]
    assert "num_items_in_batch" not in batch
    with pytest.raises(SourceError, match="a batch of no rows"):
        Collator()([])


def test_a_column_with_a_value_a_token_is_carried_or_refused_by_name():
    rows = [
        {**row, "weight": [0.5 * token for token in row["input_ids"]], "id": number} for number, row in enumerate(ROWS)
    ]
    weighted = datasets.Dataset.from_list(rows)
    for make in (Examples, Collator(), lambda data: list(steps(data))):
        with pytest.raises(SourceError, match="a value for every token in the column weight"):
            make(weighted if make is Examples else rows)
    batches = [Collator(columns=["weight"])([Examples(weighted, columns=["weight"])[0]])]
    batches += [batch for step in steps(Examples(rows, columns=["weight"])) for batch in step.batches]
    for batch in batches:
        assert torch.equal(batch["weight"], 0.5 * batch["input_ids"])
        assert "id" not in batch
    with pytest.raises(SourceError, match="input_ids and 1 weight"):
        Collator(columns=["weight"])([{"input_ids": [1, 2], "weight": [1.0]}])
