"""The batch sampler for loops of one's own: every sequence once, updates of equal batches, and resuming."""

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from unpad import BatchSampler
from unpad.errors import PlanError, RecipeError, ResumeError

LENGTHS = np.random.default_rng(0).integers(2, 60, 90).tolist()


def sampler(**changes) -> BatchSampler:
    return BatchSampler(LENGTHS, **{"tokens": 128, "gradient_accumulation_steps": 2, **changes})


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=60),
    tokens=st.integers(1, 100),
    steps=st.integers(1, 3),
    world_size=st.integers(1, 3),
    epoch=st.integers(0, 9),
)
def test_every_update_has_its_batches_on_every_rank_and_every_sequence_comes_once(
    lengths, tokens, steps, world_size, epoch
):
    fields = {"tokens": tokens, "gradient_accumulation_steps": steps, "world_size": world_size}
    ranks = [BatchSampler(lengths, rank=rank, **fields) for rank in range(world_size)]
    for one in ranks:
        one.set_epoch(epoch)
    batches = [list(one) for one in ranks]
    assert {len(own) for own in batches} == {len(ranks[0])}
    assert len(ranks[0]) % steps == 0
    assert Counter(index for own in batches for batch in own for index in batch) == Counter(range(len(lengths)))
    for start in range(0, len(ranks[0]), steps):
        update = [batch for own in batches for batch in own[start : start + steps]]
        num_targets = sum(lengths[index] - 1 for batch in update for index in batch)
        assert num_targets == sum(batch.num_targets for batch in update)
        assert {batch.num_items for batch in update} == {max(num_targets, 1) / len(update)}
        assert all(
            sum(lengths[index] for index in batch) <= max(tokens, lengths[batch[0]]) for batch in update if batch
        )


def test_epochs_have_orders_of_their_own_and_a_seed_repeats_them():
    one, first = sampler(), list(sampler())
    assert first == list(sampler()) != list(sampler(seed=1))
    one.set_epoch(1)
    assert list(one) != first


@pytest.mark.parametrize("done", [0, 3, 4])
def test_a_resumed_sampler_goes_on_with_the_next_batch_and_later_epochs_begin_at_their_first(done):
    whole, stopped, resumed = sampler(), sampler(), sampler()
    stopped.set_epoch(1)
    batches = list(islice(stopped, done + 1))  # one of them is fetched ahead
    assert stopped.state_dict()["position"] == done + 1
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict(position=done))))
    with pytest.raises(ResumeError, match="is of epoch 1, and epoch 2"):
        resumed.set_epoch(2)
    rest = []
    for epoch in range(resumed.epoch, 3):
        resumed.set_epoch(epoch)
        rest += list(resumed)
    for epoch in (1, 2):
        whole.set_epoch(epoch)
        batches += list(whole)[(done + 1 if epoch == 1 else 0) :]
    assert batches[: done - done % 2] + rest == batches  # an update that has begun is computed again


@pytest.mark.parametrize("changes", [{"tokens": 64}, {"gradient_accumulation_steps": 4}, {"targets": [1] * 90}])
def test_a_state_of_another_plan_is_refused(changes):
    with pytest.raises(ResumeError, match="another plan"):
        sampler(**changes).load_state_dict(sampler().state_dict())


@pytest.mark.slow
def test_workers_of_a_loader_give_each_sequence_once():
    loader = DataLoader(range(90), batch_sampler=sampler(), collate_fn=list, num_workers=2)
    assert [len(one) for one in loader] == [len(one) for one in sampler()]
    assert sorted(index for batch in loader for index in batch) == list(range(90))


def test_what_would_train_rows_twice_is_refused(monkeypatch):
    with pytest.raises(RecipeError, match="shared out among ranks already"):
        sampler(rank=0, world_size=2).batch_size  # noqa: B018 - accelerate and Lightning ask for it
    assert not hasattr(sampler(), "batch_size")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RecipeError, match="each would take every row"):
        sampler()
    with pytest.raises(RecipeError, match="no rank 2 of 2"):
        sampler(rank=2, world_size=2)
    with pytest.raises(PlanError, match="4 targets of 2 sequences, and 90 lengths"):
        sampler(targets=[2, 2])
