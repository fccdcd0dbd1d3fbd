"""The ratio of the cost of a token and of a pair of positions is that of the model's weights and widths."""

import math

import pytest

from tests.conftest import VOCAB, tiny_model
from tests.helpers.image_models import small_cnn, tiny_vit
from tests.helpers.patients import tiny_patients_model
from tests.helpers.tiny_models import EXAMPLES
from tests.helpers.vision import tiny
from unpad.models.cost import cells_per_token, reading_operations, sizes_of


@pytest.mark.parametrize("fields", [{}, {"tied": False}, {"kv_heads": 2}, {"causal": False}, {"head_width": 6}])
def test_decoders_agree_with_the_count_of_operations(fields):
    model = tiny_model(**fields)
    sizes = sizes_of(model.config, VOCAB)
    # With targets everywhere: one sequence of two tokens has the tokens of two of one, and two pairs more.
    twice, apart = (reading_operations(sizes, [lengths] * sizes.blocks, 2) for lengths in ([2], [1, 1]))
    pair = (twice - apart) / 2
    assert cells_per_token(model) == (apart / 2 - pair) / pair


def test_attention_within_a_window_grows_with_the_tokens():
    whole, half = tiny_model(), tiny_model(sliding_window=8, sliding_blocks=[0])
    weights = cells_per_token(whole) * 2 * 16
    assert cells_per_token(half) == (weights + 2 * 16 * 8) / 16
    assert cells_per_token(tiny_model(sliding_window=8)) == math.inf
    assert cells_per_token(tiny_model(sliding_window=64)) == cells_per_token(whole), "a window of the context is none"


def test_models_of_images_count_both_orders_of_a_pair():
    model = tiny_vit()
    blocks = sum(weight.numel() for weight in model.blocks.parameters() if weight.dim() > 1)
    others = sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if weight.dim() > 1 and not name.startswith("blocks.")
    )
    config = model.config
    assert cells_per_token(model) == (blocks + others) / (2 * config.blocks * config.heads * config.head_dim)


def test_a_tower_and_a_decoder_count_together():
    model = tiny()
    language, vision = model.config.language, model.config.vision
    channels = language.blocks * language.width + 2 * vision.blocks * vision.width
    assert cells_per_token(model) > cells_per_token(model.decoder) * language.blocks * language.width / channels


def test_patients_attend_in_their_history_alone():
    model = tiny_patients_model()
    looked_up = {"embedding.table.weight", "next_set.values.weight", "next_set.value_bias.weight"}
    products = [weight for name, weight in model.named_parameters() if weight.dim() > 1 and name not in looked_up]
    attended = model.config.blocks * model.config.width
    assert cells_per_token(model) == sum(weight.numel() for weight in products) / attended


def test_a_model_without_attention_costs_its_tokens():
    assert cells_per_token(small_cnn()) == math.inf


@pytest.mark.parametrize("kind", sorted(EXAMPLES))
def test_every_kind_of_model_has_a_ratio(kind):
    assert cells_per_token(EXAMPLES[kind][0]()) > 0
