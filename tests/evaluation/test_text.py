"""Held-out numbers are sums over targets: no batching, window or precision of the plan can change them."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import tiny_model
from tests.helpers.models import random_model
from tests.helpers.toy import write_toy
from unpad.batching.loader import load_micro, load_steps
from unpad.batching.plan import plan
from unpad.data.measuring import Measuring
from unpad.data.sources.split import Split
from unpad.data.text import TextData, open_data
from unpad.evaluation.family import per_sequence
from unpad.evaluation.metrics import Metric
from unpad.evaluation.text import DocumentSums, document_nll, summarise
from unpad.models.decoder import Decoder
from unpad.recipes.file import load_recipe
from unpad.recipes.training import PlanSettings, strategy_names

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[TextData, int]:
    data = open_data(load_recipe(str(write_toy(tmp_path_factory.mktemp("toy")))), None)
    return data, data.num_outputs


def model_of(vocab_size: int, **fields: Any) -> Decoder:
    sizes = {"width": 16, "blocks": 1, "heads": 2, "hidden": 24, "context": 64, "dropout": 0.2, **fields}
    return random_model(sizes, vocab_size, 0.2)  # away from the even distribution of fresh weights


def unigram_model(vocab_size: int, **fields: Any) -> tuple[Decoder, torch.Tensor]:
    """A model whose head ignores everything before a token; its distribution is known by hand."""
    model = model_of(vocab_size, tied=False, norm="layernorm", **fields)
    log_p = torch.randn(vocab_size, dtype=torch.float64).log_softmax(-1)
    model.norm.weight.data.zero_()  # hidden states are the norm's bias: 1 in the first channel
    model.norm.bias.data.zero_()[0] = 1
    model.head.weight.data.zero_()[:, 0] = log_p.float()
    return model, log_p


def measure(model: Decoder, data: TextData, ids: np.ndarray, **settings: Any) -> DocumentSums:
    return document_nll(Measuring(model, data, ids, PlanSettings(**settings)))


def numbers(metric: Metric) -> list[float]:
    return [metric.value, metric.low, metric.high, metric.num]


@pytest.mark.promise("train.perplexity")
def test_no_batching_changes_a_number(corpus):
    data, vocab_size = corpus
    model, ids = model_of(vocab_size), np.arange(len(data.tokens))
    expected = summarise(measure(model, data, ids))
    assert set(expected) == {"loss", "perplexity", "bits_per_char", "bits_per_byte"}
    for size in (1, 7, 64, 1000, 1 << 20):
        for strategy in ("pack", "fixed", "rows"):
            other = summarise(measure(model, data, ids, tokens_per_micro=size, strategy=strategy, drop_last=True))
            for name, metric in expected.items():
                assert numbers(other[name]) == pytest.approx(numbers(metric), rel=1e-6), (size, strategy, name)
    assert model.training, "the model is given back as it was"


@pytest.mark.promise("train.perplexity")
def test_the_sums_equal_those_of_every_strategy_training_has(corpus):
    data, vocab_size = corpus
    tokens = data.tokens
    model = model_of(vocab_size).eval()
    sums = measure(model, data, np.arange(len(tokens)))
    for name in strategy_names():
        settings = PlanSettings(strategy=name, tokens_per_micro=100, tokens_per_step=300, row_tokens=64)
        made = plan(np.maximum(tokens.lengths - 1, 0), settings, seed=1, epoch=0, targets=tokens.count_targets)
        nll, count = 0.0, 0
        for micros in load_steps(partial(load_micro, tokens, pad_id=0), made, CPU, group_lengths=False):
            for batch in micros:
                with torch.no_grad():
                    total, num = model.losses(batch)["nll"]
                nll, count = nll + float(total), count + num
        assert count == int(sums.targets.sum())
        assert math.exp(nll / count) == pytest.approx(math.exp(sums.mean_nll()), rel=1e-6)


@pytest.mark.promise("train.perplexity")
def test_values_equal_those_computed_by_hand(corpus):
    data, vocab_size = corpus
    tokens = data.tokens
    model, log_p = unigram_model(vocab_size)
    ids = np.array([3, 0, 70])
    nll = [-float(log_p[tokens.tokens(int(i))][tokens.loss_mask(int(i))].sum()) for i in ids]
    targets = sum(int(tokens.loss_mask(int(i)).sum()) for i in ids)
    sums = measure(model, data, ids)
    assert sums.nll == pytest.approx(nll, rel=1e-6)
    values = summarise(sums)
    assert values["loss"].value == pytest.approx(sum(nll) / targets, rel=1e-6)
    assert values["perplexity"].value == pytest.approx(math.exp(sum(nll) / targets), rel=1e-6)
    characters, num_bytes = int(tokens.target_chars[ids].sum()), int(tokens.target_bytes[ids].sum())
    assert values["bits_per_char"].value == pytest.approx(sum(nll) / math.log(2) / characters, rel=1e-6)
    assert values["bits_per_byte"].value == pytest.approx(sum(nll) / math.log(2) / num_bytes, rel=1e-6)
    assert num_bytes > 2 * characters, "Chinese takes three bytes a character"


@pytest.mark.promise("train.perplexity")
@pytest.mark.parametrize("stride", [None, 1, 3, 5])
@pytest.mark.parametrize("context", [5, 8])
def test_windows_leave_no_target_out_and_count_none_twice(corpus, context, stride):
    data, vocab_size = corpus
    tokens = data.tokens
    ids = np.arange(len(tokens))
    short, log_p = unigram_model(vocab_size, context=context)
    sums = measure(short, data, ids, stride=stride, overflow="truncate_left", max_tokens=context)
    assert sums.targets.tolist() == tokens.num_targets.tolist()
    expected = [-float(log_p[tokens.tokens(i)][tokens.loss_mask(i)].sum()) for i in range(len(tokens))]
    assert sums.nll == pytest.approx(expected, rel=1e-5)


def test_loss_of_a_batch_is_given_to_its_sequences():
    from tests.conftest import random_batch

    model, batch = tiny_model().eval(), random_batch([5, 1, 0, 9], share=0.6)
    nll, counts = per_sequence(model.token_nll(batch), batch)
    for i in range(4):
        alone = batch.select([i])
        assert counts[i] == alone.num_targets
        assert nll[i] == pytest.approx(float(model.token_nll(alone).sum()), rel=1e-12)


# --------------------------------------------------------------------------- summaries


def sums_of(nll: list[float], targets: list[int]) -> DocumentSums:
    return DocumentSums(np.array(nll), np.array(targets), np.array(targets) * 2, np.array(targets) * 6)


@pytest.mark.promise("train.perplexity")
def test_a_loss_beyond_numbers_is_infinite_perplexity_and_no_crash():
    values = summarise(sums_of([1e6, 2e6], [10, 10]))
    assert values["perplexity"].value == math.inf
    assert values["loss"].value == pytest.approx(1.5e5)


@pytest.mark.promise("train.perplexity")
def test_intervals_hold_the_value_and_narrow_with_more_documents():
    rng = np.random.default_rng(0)
    widths = []
    for num in (10, 100, 1000):
        targets = rng.integers(5, 50, num)
        values = summarise(sums_of((targets * rng.normal(3, 0.5, num)).tolist(), targets.tolist()))
        for name, metric in values.items():
            assert metric.low < metric.value < metric.high, name
        widths.append(values["loss"].high - values["loss"].low)
    assert widths[0] > 2 * widths[1] > 4 * widths[2]


def test_intervals_are_the_same_every_time_and_one_document_has_none():
    sums = sums_of([5.0, 9.0, 2.0], [2, 3, 1])
    assert summarise(sums) == summarise(sums)
    one = summarise(sums_of([6.0], [2]))["loss"]
    assert (one.value, one.num, one.note) == (3.0, 1, "no interval: one group")
    assert math.isnan(one.low)
    assert math.isnan(one.high)


@pytest.mark.promise("data.near-duplicates")
def test_a_held_out_part_is_measured_apart_from_training(corpus):
    data, vocab_size = corpus
    tokens = data.tokens
    held, trained = np.flatnonzero(tokens.split == Split.HOLDOUT), np.flatnonzero(tokens.split == Split.TRAIN)
    assert not set(held) & set(trained)
    model = model_of(vocab_size)
    both = measure(model, data, np.concatenate([held, trained]))
    assert measure(model, data, held).nll == pytest.approx(both.nll[: len(held)], rel=1e-5)
