"""Balance of a plan among processes is a recount of its shares."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unpad.batching import balance as module
from unpad.batching.balance import BUSY, Costs, assign, finer_cut, micro_cost
from unpad.batching.plan import Plan, plan
from unpad.recipes.training import PlanSettings, strategy_names

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def made_of(lengths: np.ndarray, **fields: object) -> Plan:
    return plan(lengths, PlanSettings(batch_size=3, row_tokens=64, **fields), seed=0, epoch=0)


def texts(num: int, median: float = 200, longest: int = 2000) -> np.ndarray:
    return np.clip(np.random.default_rng(0).lognormal(math.log(median), 1, num), 4, longest).astype(np.int64)


@pytest.mark.parametrize("strategy", strategy_names())
@given(lengths=LENGTHS, num=st.integers(1, 7), ratio=st.sampled_from([20.0, math.inf]), by_set=st.booleans())
@settings(max_examples=30)
def test_efficiency_bound_and_idle_processes_equal_a_recount(strategy, lengths, num, ratio, by_set):
    sizes = np.array(lengths)
    attended = (sizes + 1) // 2 if by_set else None
    made = made_of(sizes, strategy=strategy, tokens_per_step=90, tokens_per_micro=40)
    useful = spent = least = 0.0
    worked = [0] * num
    for index in range(made.num_steps):
        micros = made.step(index)
        shares = assign([micro_cost(micro, ratio, attended) for micro in micros], num)
        loads = [sum(micro_cost(micros[i], ratio, attended) for i in share) for share in shares]
        pieces = [
            tokens + (tokens if attended is None else int(attended[i])) ** 2 / ratio
            for micro in micros
            for i, tokens in zip(micro.seq_ids.tolist(), (micro.stops - micro.starts).tolist(), strict=True)
        ]
        useful += sum(pieces)
        spent += num * max(loads)
        least += max(sum(pieces), num * max(pieces))
        worked = [count + bool(share) for count, share in zip(worked, shares, strict=True)]
    found = Costs(made, ratio, attended).balance(num)
    assert found.efficiency == pytest.approx(useful / spent)
    assert found.bound == pytest.approx(useful / least)
    assert found.efficiency <= found.bound + 1e-9 <= 1 + 2e-9
    assert found.idle == sum(2 * count < made.num_steps for count in worked)


def test_a_long_plan_is_judged_by_updates_spread_over_it(monkeypatch):
    costs = Costs(made_of(texts(2000), tokens_per_step=2048, tokens_per_micro=512), 1000.0)
    whole = costs.balance(4)
    monkeypatch.setattr(module, "MOST_UPDATES", 40)
    assert costs.balance(4) != whole
    assert costs.balance(4).efficiency == pytest.approx(whole.efficiency, abs=0.05)


def test_the_largest_sequence_is_the_longest_or_has_the_largest_set():
    made = made_of(np.array([5, 30, 8]), tokens_per_step=100)
    assert (Costs(made, 10.0).tokens, Costs(made, 10.0).largest) == (30, 30 + 900 / 10)
    attended = np.array([50, 1, 1])
    assert (Costs(made, 10.0, attended).tokens, Costs(made, 10.0, attended).largest) == (5, 5 + 2500 / 10)


def test_one_micro_batch_per_update_leaves_all_processes_but_one_idle():
    found = Costs(made_of(texts(300), tokens_per_step=2048, tokens_per_micro=4096), 1000.0).balance(4)
    assert found.idle == 3
    assert found.efficiency == pytest.approx(1 / 4)


def cut_of(num: int, lengths: np.ndarray, **fields: object) -> tuple[module.BalancedSize | None, Plan]:
    def replan(tokens: int) -> Plan:
        return made_of(lengths, **{**fields, "tokens_per_micro": tokens})

    return finer_cut(replan, 4096, num, 1000.0), replan(4096)


@pytest.mark.parametrize("num", [2, 3, 8])
def test_a_finer_cut_gives_every_process_work(num):
    cut, coarse = cut_of(num, texts(2000, 40, 200), tokens_per_step=4096)
    assert cut.tokens_per_micro < 4096
    assert Costs(coarse, 1000.0).balance(num).idle == num - 1
    fine = made_of(texts(2000, 40, 200), tokens_per_step=4096, tokens_per_micro=cut.tokens_per_micro)
    assert cut.balance == Costs(fine, 1000.0).balance(num)
    assert cut.balance.idle == 0
    assert cut.balance.efficiency >= BUSY


def test_there_is_no_finer_cut_of_fewer_sequences_than_processes():
    assert cut_of(64, texts(200), tokens_per_step=2048)[0] is None
    assert cut_of(2, np.array([50, 50]), tokens_per_step=60)[0] is None


def test_strategies_that_cut_by_sequences_have_no_finer_cut():
    assert cut_of(64, texts(300), tokens_per_step=2048, strategy="fixed")[0] is None


@pytest.mark.parametrize(("num", "strategy"), [(2, "pack"), (16, "pack"), (16, "budget"), (16, "bucket")])
def test_updates_of_the_size_that_fills_processes_keep_them_busy(num, strategy):
    lengths = texts(30_000)
    fields: dict[str, object] = {"strategy": strategy, "tokens_per_micro": 2048}
    fill = Costs(made_of(lengths, tokens_per_step=1 << 40, **fields), 2000.0).fill_tokens(num)

    def busy(tokens: int) -> float:  # padding aside
        costs = Costs(made_of(lengths, tokens_per_step=tokens, **fields), 2000.0)
        return costs.balance(num).efficiency * float(costs.micros.sum() / costs.pieces.sum())

    assert busy(fill) > BUSY - 0.08
    assert busy(fill // 4) < BUSY


def test_sequences_that_no_update_evens_out_have_no_size_that_fills():
    made = made_of(np.append(np.ones(2000, np.int64), 10_000), tokens_per_step=1 << 40, tokens_per_micro=64)
    assert Costs(made, 1.0).fill_tokens(64) is None


def test_an_empty_plan_leaves_every_process_idle():
    made = made_of(np.zeros(0, np.int64), tokens_per_step=10)
    found = Costs(made, 10.0)
    assert found.balance(3).idle == 3
    assert found.fill_tokens(3) is None
    assert (found.tokens, found.largest) == (0, 0.0)
    assert finer_cut(lambda tokens: made, 10, 3, 10.0) is None
