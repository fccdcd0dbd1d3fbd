"""A stage: its sequences, the plans of its epochs, and its length, from a table of positions alone."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from unpad.batching.ledger import Ledger
from unpad.batching.plan import Plan, plan
from unpad.data.family import SequenceTable, sequence_table
from unpad.data.sources.split import Split
from unpad.recipes.file import parse_recipe
from unpad.recipes.recipe import stages_of
from unpad.training.optim import Epochs
from unpad.training.stage import (
    StageSetup,
    epoch_plan,
    epochs_per_evaluation,
    last_step,
    make_stage,
    num_epochs,
    plan_inputs,
    stage_epochs,
)

POSITIONS = np.random.default_rng(0).integers(1, 60, 80)
UNEVEN = {"tokens_per_step": 110, "tokens_per_micro": 60}


@dataclass
class Known:
    """The part of `Data` that a stage reads."""

    table: SequenceTable
    kinds: tuple[str, ...] = ("text",)

    def lengths(self, epoch_seed: tuple[int, int]) -> np.ndarray:
        return self.table.positions

    def count_targets(self, seq_ids: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        return stops - starts


def stage_of(table: SequenceTable | None = None, longest: int = 1000, **sections: Any) -> StageSetup:
    table = table or sequence_table(POSITIONS, np.zeros(len(POSITIONS), np.uint8))
    [resolved] = stages_of(parse_recipe({"train": {"max_epochs": 6}, **sections}))
    return make_stage(resolved, Known(table), longest)


def contents(made: Plan) -> list[list[list[int]]]:
    return [[micro.seq_ids.tolist() for micro in made.step(index)] for index in range(made.num_steps)]


def steps_of_every_epoch(stage: StageSetup, num_epochs: int) -> list[int]:
    """Steps epoch by epoch, each planned anew after the steps that were counted before it."""
    counts: list[int] = []
    for epoch in range(num_epochs):
        lengths, settings, known = plan_inputs(stage, epoch)
        counts.append(plan(lengths, settings, epoch=epoch, first_step=sum(counts), **known).num_steps)
    return counts


# --------------------------------------------------------------------------- sequences


def test_a_stage_takes_the_sequences_of_its_kinds_by_their_part():
    rng = np.random.default_rng(1)
    kind, split = rng.integers(0, 2, 200), rng.choice([int(part) for part in Split], 200)
    data = Known(sequence_table(np.ones(200, np.int64), split, kind=kind), ("text", "chat"))
    recipe = parse_recipe(
        {"stages": [{"name": "a", "use": ["chat"]}, {"name": "b", "use": ["text", "chat"]}, {"name": "c"}]}
    )
    stages = [make_stage(one, data, 9) for one in stages_of(recipe)]
    assert [(stage.name, stage.kinds) for stage in stages] == [
        ("a", ("chat",)), ("b", ("text", "chat")), ("c", ("text", "chat")),
    ]  # fmt: skip
    for stage, kinds in zip(stages, ([1], [0, 1], [0, 1]), strict=True):
        for ids, part in ((stage.train_ids, Split.TRAIN), (stage.held_out_ids, Split.HOLDOUT)):
            assert ids.tolist() == [i for i in range(200) if kind[i] in kinds and split[i] == part]


def test_a_stage_keeps_its_best_only_with_held_out_data_and_if_it_is_asked_to():
    held = sequence_table(POSITIONS, np.arange(len(POSITIONS)) % 2)
    keeps = [stage_of(table, train={"max_epochs": 1, "weights": weights}).keeps_best
             for table in (held, None) for weights in ("best", "last")]  # fmt: skip
    assert keeps == [True, False, False, False]


# --------------------------------------------------------------------------- plans


def test_an_epoch_plan_is_that_of_its_seed_its_number_and_its_training_sequences():
    table = sequence_table(POSITIONS, np.arange(len(POSITIONS)) % 2)
    stage = stage_of(table, plan=UNEVEN, train={"max_epochs": 6, "seed": 5})
    for epoch in range(3):
        expected = plan(
            POSITIONS, stage.recipe.plan, seed=5, epoch=epoch, max_tokens=1000, seq_ids=stage.train_ids,
            targets=Known(table).count_targets,
        )  # fmt: skip
        assert contents(epoch_plan(stage, epoch)) == contents(expected)


def test_a_source_of_weight_two_and_a_half_is_planned_two_or_three_times():
    source = np.arange(len(POSITIONS)) % 2
    table = sequence_table(POSITIONS, np.zeros(len(POSITIONS), np.uint8), source=source, weights=(1.0, 2.5))
    found = []
    for epoch in range(2):
        drawn = [i for step in contents(epoch_plan(stage_of(table), epoch)) for micro in step for i in micro]
        found.append(np.bincount(drawn, minlength=len(POSITIONS)))
    for times in found:
        assert set(times[source == 0]) == {1}
        assert set(times[source == 1]) == {2, 3}
    assert (found[0] != found[1]).any()


def test_low_power_bounds_the_micro_batches_and_nothing_else():
    for tokens, expected in ((4096, 512), (513, 512), (512, 512), (100, 100)):
        settings = {"tokens_per_step": 5000, "tokens_per_micro": tokens}
        full, low = stage_of(plan=settings), stage_of(plan=settings, profile="low_power")
        assert plan_inputs(low, 0)[1] == full.recipe.plan.model_copy(update={"tokens_per_micro": expected})
        assert plan_inputs(full, 0)[1] == full.recipe.plan


@pytest.mark.parametrize(("attended", "expected"), [(None, 1000), (POSITIONS, int(POSITIONS.max()))])
def test_the_context_limits_a_sequence_unless_it_is_a_mere_bound(attended, expected):
    table = sequence_table(POSITIONS, np.zeros(len(POSITIONS), np.uint8), attended=attended)
    assert plan_inputs(stage_of(table), 0)[2]["max_tokens"] == expected
    assert plan_inputs(stage_of(table, longest=7), 0)[2]["max_tokens"] == 7
    if attended is not None:
        empty = sequence_table(np.zeros(3, np.int64), np.zeros(3, np.uint8), attended=np.zeros(3, np.int64))
        assert plan_inputs(stage_of(empty), 0)[2]["max_tokens"] == 1


# --------------------------------------------------------------------------- length


@pytest.mark.parametrize(
    ("grow", "max_steps"),
    [({}, None), ({9: 200}, None), ({9: 200, 60: 500}, None), ({9: 200, 60: 500}, 20), ({9: 200, 60: 500}, 1000),
     ({500: 700}, None)],
)  # fmt: skip
def test_epochs_that_grow_by_steps_are_counted_as_they_are_planned(grow, max_steps):
    sections = {
        "plan": {**UNEVEN, "grow": grow, "grow_per": "step"},
        "train": {"max_epochs": 6, "max_steps": max_steps},
    }
    stage = stage_of(**sections)
    counts = steps_of_every_epoch(stage_of(**sections), 6)
    epochs = stage_epochs(stage)
    assert epochs.first == tuple(range(len(epochs.steps)))
    assert epochs.steps == tuple(counts[: len(epochs.steps)])
    grown, end = max(grow, default=1) - 1, max_steps or 10**9
    needed = [epoch for epoch in range(1, 6) if sum(counts[: epoch - 1]) < grown and sum(counts[:epoch]) < end]
    assert len(epochs.steps) == 1 + len(needed)  # every epoch that grows and begins before the end, and no other
    assert [epoch_plan(stage, epoch).num_steps for epoch in (4, 2, 0)] == [counts[epoch] for epoch in (4, 2, 0)]


def test_epochs_that_grow_by_epochs_are_planned_once_for_each_size():
    stage = stage_of(plan={**UNEVEN, "grow": {3: 200, 6: 400, 9: 800}}, train={"max_epochs": 6})
    counts = steps_of_every_epoch(stage, 6)
    assert stage_epochs(stage) == Epochs((0, 2, 5), (counts[0], counts[2], counts[5]))
    endless = stage_of(plan={**UNEVEN, "grow": {3: 200, 9: 800}}, train={"max_epochs": None, "max_steps": 5})
    assert stage_epochs(endless).first == (0, 2, 8)


@pytest.mark.parametrize(
    ("max_epochs", "max_steps", "before", "expected"),
    [(3, None, 0, 30), (3, None, 7, 37), (None, 12, 7, 12), (3, 12, 7, 12), (3, 36, 7, 36), (3, 38, 7, 37),
     (0, 50, 7, 7)],
)  # fmt: skip
def test_a_stage_ends_with_the_first_of_its_limits(max_epochs, max_steps, before, expected):
    stage = stage_of(train={"max_epochs": max_epochs, "max_steps": max_steps})
    assert last_step(stage, before, Epochs((0,), (10,))) == expected


@pytest.mark.promise("run.min-steps")
@pytest.mark.parametrize(
    ("max_epochs", "max_steps", "min_steps", "before", "epochs", "last"),
    [(3, None, 30, 7, 3, 37), (3, None, 31, 7, 4, 47), (3, None, 95, 0, 10, 100), (3, 52, 95, 7, 10, 52),
     (3, None, 1, 0, 3, 30), (None, 12, 95, 7, None, 12), (0, 50, 95, 7, 0, 7)],
)  # fmt: skip
def test_a_stage_of_fewer_steps_than_min_steps_runs_more_epochs_unless_max_steps_ends_it(
    max_epochs, max_steps, min_steps, before, epochs, last
):
    stage = stage_of(train={"max_epochs": max_epochs, "max_steps": max_steps, "min_steps": min_steps})
    of_ten = Epochs((0,), (10,))
    assert num_epochs(stage, of_ten) == epochs
    assert last_step(stage, before, of_ten) == last


@pytest.mark.promise("run.min-steps")
@pytest.mark.parametrize("per", ["epoch", "step"])
def test_a_stage_that_is_lengthened_grows_its_steps_as_one_of_as_many_epochs(per):
    growing = {**UNEVEN, "grow": {3: 200, 9: 400, 90: 800}, "grow_per": per}
    short, long = stage_of(plan=growing, train={"max_epochs": 2, "min_steps": 100}), stage_of(plan=growing)
    epochs = stage_epochs(short)
    found = num_epochs(short, epochs)
    long = stage_of(plan=growing, train={"max_epochs": found})
    assert epochs == stage_epochs(long)
    assert epochs.steps_before(found - 1) < 100 <= epochs.steps_before(found)


@pytest.mark.promise("run.min-steps")
def test_a_stage_that_is_lengthened_is_evaluated_as_often_as_it_would_have_been():
    found = [epochs_per_evaluation(stage_of(train={"max_epochs": 3, "min_steps": least}), Epochs((0,), (10,)))
             for least in (None, 30, 31, 60, 61, 500)]  # fmt: skip
    assert found == [1, 1, 1, 2, 2, 17]


# --------------------------------------------------------------------------- windows

MANY = np.random.default_rng(2).integers(1, 60, 1200)


def windowed(table: dict[str, Any] | None = None, **sections: Any) -> StageSetup:
    """1,200 sequences in six windows."""
    sections["plan"] = {**UNEVEN, "window": 200, **sections.get("plan", {})}
    return stage_of(sequence_table(MANY, np.zeros(1200, np.uint8), **table or {}), **sections)


def drawn(stage: StageSetup, epoch: int = 0) -> list[list[int]]:
    """Sequences of every window of an epoch, in the order of its steps."""
    plans = (epoch_plan(stage, epoch, window) for window in range(stage.windows))
    return [[seq for step in contents(made) for micro in step for seq in micro] for made in plans]


@pytest.mark.promise("batch.windows")
@pytest.mark.parametrize("drop_last", [False, True])
def test_windows_hold_every_sequence_of_an_epoch_once_in_another_order_each_time(drop_last):
    stage = windowed(plan={"drop_last": drop_last})
    first, again, second = (drawn(stage, epoch) for epoch in (0, 0, 1))
    assert first == again
    assert [set(window) for window in first] != [set(window) for window in second]
    assert len(first) == 6
    assert max(map(len, first)) <= 201
    assert drop_last or sorted(np.concatenate(first).tolist()) == list(range(1200))
    ledger = sum((epoch_plan(stage, 0, window).ledger for window in range(6)), Ledger())
    assert ledger.total == MANY.sum()
    assert drop_last == bool(ledger.dropped)


@pytest.mark.promise("batch.windows")
def test_pairs_stay_in_one_micro_batch_and_sources_keep_their_weights():
    bundle = np.concatenate([np.arange(600), np.arange(600)[::-1]])  # replies far apart
    pairs = replace(windowed({"bundle": bundle}, data={"pairs": "unused.jsonl"}), kinds=("pairs",))
    micros = [micro for window in range(6) for step in contents(epoch_plan(pairs, 0, window)) for micro in step]
    assert all(np.array_equal(np.unique(bundle[micro]), np.sort(bundle[micro])[::2]) for micro in micros)
    assert sorted(np.concatenate(micros).tolist()) == list(range(1200))
    weighed = windowed({"source": np.arange(1200) % 2, "weights": (1.0, 2.5)})
    times = np.bincount(np.concatenate(drawn(weighed)))
    assert set(times[::2]) == {1}
    assert times[1::2].sum() == pytest.approx(2.5 * 600, abs=6)


@pytest.mark.promise("batch.windows")
def test_steps_that_grow_are_counted_through_windows_and_the_others_estimated():
    growing = {"plan": {"grow": {100: 400}, "grow_per": "step"}, "train": {"max_epochs": 2}}
    counts = [epoch_plan(windowed(**growing), 0, window).num_steps for window in range(6)]
    assert counts[0] > 1.5 * counts[-1]
    epochs = stage_epochs(windowed(**growing))
    assert epochs.steps == pytest.approx((sum(counts), 6 * counts[-1]), abs=6)
