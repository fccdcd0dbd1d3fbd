import numpy as np
import pytest

from unpad.batching.layout import attention_cells, length_groups
from unpad.batching.plan import plan
from unpad.recipes.training import PlanSettings, strategy_names
from unpad.trials.strategy_table import advise_batch_size, advise_bucket_width, compare

LENGTHS = np.clip(np.random.default_rng(0).lognormal(4, 0.7, 600), 2, 400).astype(np.int64)


def cells_of(micro) -> int:
    """Query-key pairs of one micro-batch, counted from the micro-batch alone."""
    sizes = (micro.stops - micro.starts).tolist()
    if micro.pad_to:
        return len(sizes) * micro.pad_to**2
    if micro.fill_to > sum(sizes):
        sizes += [1] * (micro.fill_to - sum(sizes))  # filler is sequences of one token
    sizes = np.array(sorted(sizes, reverse=True))
    return attention_cells(sizes, length_groups(sizes))


@pytest.mark.promise("plan.table")
@pytest.mark.parametrize("name", strategy_names())
def test_a_row_of_the_table_equals_a_recount(name):
    chosen = PlanSettings(overflow="truncate_right", max_tokens=300, tokens_per_micro=1000)
    row = next(row for row in compare(LENGTHS, chosen, seed=3) if row.name == name)
    made = plan(LENGTHS, chosen.model_copy(update={"strategy": name}), seed=3, epoch=0)
    micros = [micro for i in range(made.num_steps) for micro in made.step(i)]
    tokens = [int((m.stops - m.starts).sum()) for m in micros]
    cells = [m.pad_to * len(m.seq_ids) if m.pad_to else m.fill_to or t for m, t in zip(micros, tokens, strict=True)]
    assert (row.name, row.steps, row.micros) == (name, made.num_steps, len(micros))
    assert (row.real_tokens, row.padded_tokens) == (sum(tokens), sum(cells))
    assert row.pad_share == pytest.approx(1 - sum(tokens) / sum(cells))
    assert (row.micro_tokens_min, row.micro_tokens_max) == (min(tokens), max(tokens))
    assert row.to_json()["micro_tokens_mean"] == pytest.approx(np.mean(tokens))
    assert row.attention_cells_needed == int((np.minimum(LENGTHS, 300) ** 2).sum())
    assert row.attention_cells_computed == sum(cells_of(m) for m in micros)
    assert row.ledger == made.ledger
    means = [np.concatenate([m.stops - m.starts for m in made.step(i)]).mean() for i in range(made.num_steps)]
    assert row.length_correlation == pytest.approx(np.corrcoef(means[:-1], means[1:])[0, 1])


@pytest.mark.promise("plan.batch-size")
@pytest.mark.parametrize(
    ("num", "value"), [(50, 2), (99, 2), (100, 4), (499, 4), (500, 8), (1000, 8), (1001, 16), (10**6, 16)]
)
def test_batch_size_follows_the_size_of_the_corpus(num, value):
    advice = advise_batch_size(num, np.array([3, 9]))
    assert (advice["value"], advice["helps"]) == (value, True)


@pytest.mark.promise("plan.batch-size")
def test_batching_is_not_advised_where_it_cannot_help():
    assert not advise_batch_size(49, np.array([3, 9]))["helps"]
    assert not advise_batch_size(800, np.array([9, 9]))["helps"]
    assert not advise_batch_size(0, np.zeros(0, np.int64))["helps"]


@pytest.mark.promise("plan.bucket-width")
@pytest.mark.parametrize(("median", "value"), [(49, 8), (50, 16), (100, 16), (101, 32)])
def test_bucket_width_follows_the_median_length(median, value):
    assert advise_bucket_width(np.array([1, median, 500]))["value"] == value


@pytest.mark.promise("plan.bucket-width")
def test_bucket_width_shows_the_pad_share_of_a_plan_of_each_width():
    shares = advise_bucket_width(LENGTHS)["pad_shares"]
    for width, share in shares.items():
        made = plan(LENGTHS, PlanSettings(strategy="bucket", bucket_width=width), seed=7, epoch=0)
        assert share == pytest.approx(made.pad_share, abs=0.02)
    assert 0 < shares[8] < shares[32]
