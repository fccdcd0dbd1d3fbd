"""The operations of training are those that a count by hand gives."""

import pytest

from unpad.models.cost import pruner_operations, reading_operations, sizes_of
from unpad.models.decoder import Config
from unpad.nn.block import BlockConfig

pytestmark = pytest.mark.promise("speed.operations")


def test_decoder_equals_a_count_by_hand():
    config = Config(width=8, blocks=2, heads=4, kv_heads=2, hidden=12, activation="swiglu", norm="rmsnorm")
    # One block forward, per token: q 8 x 8, k and v 8 x 4 each, out 8 x 8; gate, up and down 8 x 12 each.
    block = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 12
    assert block == 480
    # Sequences of 3 and 2 tokens, targets at 4 of the 5: two operations per weight and token forward, four backward.
    # Of the token that predicts nothing, the last block computes only what others attend to: q, k and v.
    ending = 8 * 8 + 3 * 8 * 12
    products = 6 * (480 * 2 * 5 - ending * 1)
    head = 6 * 8 * 20 * 4
    # Scores: 2 * 8 per pair of tokens, 9 + 4 pairs; values the same; backward twice both; a causal one takes half.
    attention = (2 * 8 + 2 * 8) * 3 * (9 + 4) * 2 // 2
    training = 3 * reading_operations(sizes_of(config, 20), [[3, 2]] * 2, 4)
    assert training == products + head + attention == 26_688 + 3_840 + 1_248


def test_encoder_with_an_input_product_equals_a_count_by_hand():
    config = BlockConfig(width=4, blocks=1, heads=2, hidden=6, activation="gelu", causal=False)
    block = 4 * 4 * 4 + 2 * 4 * 6
    products = 6 * (block + 10 * 4) * 3
    attention = 3 * (2 * 4 + 2 * 4) * 3 * 3
    head = 6 * 4 * 5 * 3
    assert 3 * reading_operations(sizes_of(config, 5, 10), [[3]], 3) == products + attention + head


def test_blocks_that_read_fewer_tokens_equal_a_count_by_hand():
    sizes = sizes_of(Config(width=8, blocks=3, heads=4, kv_heads=2, hidden=12, activation="swiglu"), 20)
    # Two sequences of 5 and 2 tokens, of which 3 and 2 reach the third block; one output each.
    lengths = [[5, 2], [5, 2], [3, 2]]
    products = 2 * (480 * (7 + 7 + 5) - (8 * 8 + 3 * 8 * 12) * (5 - 2))
    attention = (2 * 8 + 2 * 8) * (29 + 29 + 13) // 2
    head = 2 * 8 * 20 * 2
    assert reading_operations(sizes, lengths, 2) == products + attention + head


@pytest.mark.promise("vqa.cost")
def test_a_head_that_prunes_equals_a_count_by_hand():
    # Samples of 6 and 1 visual tokens with 3 and 2 of a question, of width 8, in a head of 4 channels.
    into = 8 * 4 * (7 + 5)
    attention = 4 * 4 * (7 + 2 * 5 + 7) + 2 * 4 * (6 * 3 + 1 * 2)
    judge = (4 * 2 + 2 * 1) * 7
    assert pruner_operations(8, 4, [6, 1], [3, 2]) == 2 * (into + attention + judge)
