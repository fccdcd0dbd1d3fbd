"""The decoder's parts follow their published formulas, and the whole model its promises."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.profiler import ProfilerActivity, profile

from tests.conftest import VOCAB, random_batch, random_sequences, tiny_model
from tests.helpers.tiny_models import DECODERS
from unpad.batching.batch import RaggedBatch, from_padded, from_sequences, to_padded
from unpad.batching.layout import PaddedLayout, build_layout
from unpad.errors import RecipeError
from unpad.models import build_model, model_config
from unpad.models.decoder import Config, Decoder, RopeScaling
from unpad.nn.activation import GATED
from unpad.nn.block import Attention, Block, BlockConfig, FeedForward, Stream
from unpad.nn.norm import Norm
from unpad.nn.rope import rotary_frequencies, rotary_table, rotate, sinusoidal_table
from unpad.recipes.file import load_recipe

SIZES = {"width": 8, "blocks": 1, "heads": 2, "hidden": 6}


def randomize(module: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64) * 0.5
    return module


# --------------------------------------------------------------------------- the start of training


def test_matrices_start_at_a_fiftieth_and_those_that_write_to_the_stream_smaller():
    torch.manual_seed(0)
    model = build_model(model_config({**SIZES, "width": 64, "hidden": 128, "blocks": 8}), 500)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            writes = name.endswith(("to_out.weight", "down.weight"))
            assert float(parameter.detach().std()) == pytest.approx(0.02 / 4 if writes else 0.02, rel=0.05), name


@pytest.mark.parametrize("wanted", [[0, 1, 2, 3], [0, 1, 2, 2], [3, 2, 1, 0], [2], []])
def test_wanted_tokens_come_in_the_order_they_are_asked_in(wanted):
    model, batch = tiny_model().eval(), random_batch([5])
    everything, index = model(batch), torch.tensor(wanted, dtype=torch.int64)
    torch.testing.assert_close(model(batch, wanted=index), everything[index])


def test_sinusoidal_positions_are_as_small_as_the_embeddings_that_they_are_added_to():
    model = tiny_model(positions="sinusoidal").eval()
    batch = random_batch([5, 9])
    table = 0.02 * sinusoidal_table(64, 16)[batch.position_ids]
    # Inputs other than tokens get the whole table.
    vectors = replace(batch, input_ids=None, inputs_embeds=model.embed(batch.input_ids) - 49 * table)
    torch.testing.assert_close(model(batch), model(vectors), rtol=1e-12, atol=1e-12)


# --------------------------------------------------------------------------- norms


@pytest.mark.promise("llm.rmsnorm")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_rmsnorm_is_g_times_x_over_the_root_of_the_mean_square(dtype, tolerance):
    torch.manual_seed(0)
    norm = Norm("rmsnorm", 32, 1e-6)
    norm.weight.data = torch.randn(32)
    x = (torch.randn(7, 32, dtype=torch.float64) * 3).to(dtype)
    wide = x.double()
    expected = norm.weight.double() * wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    residual, got = norm.to(dtype)(x)
    assert residual is x or torch.equal(residual, x)
    assert (got.double() - expected).norm() <= tolerance * expected.norm()


# --------------------------------------------------------------------------- positions


@pytest.mark.promise("llm.rotary")
@settings(deadline=None, max_examples=30)
@given(i=st.integers(0, 300), j=st.integers(0, 300), shift=st.integers(0, 3000), factor=st.sampled_from([1.0, 4.0]))
def test_rotary_scores_depend_on_the_distance_alone(i, j, shift, factor):
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 16, dtype=torch.float64), torch.randn(1, 2, 16, dtype=torch.float64)
    frequencies = rotary_frequencies(16, 10000.0, "linear" if factor > 1 else "none", factor)

    def score(a: int, b: int) -> Tensor:
        turned = [rotate(x, *rotary_table(torch.tensor([p]), frequencies, torch.float64)) for x, p in ((q, a), (k, b))]
        return (turned[0] * turned[1]).sum(-1)

    torch.testing.assert_close(score(i, j), score(i + shift, j + shift), rtol=1e-9, atol=1e-9)


def test_rotary_turns_each_pair_by_position_times_its_frequency():
    frequencies = rotary_frequencies(8, 10000.0, "none", 1.0)
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64))
    x = torch.zeros(1, 1, 8, dtype=torch.float64)
    x[0, 0, 1] = 1.0  # first of the pair (1, 5), whose frequency is 0.1
    turned = rotate(x, *rotary_table(torch.tensor([7]), frequencies, torch.float64))[0, 0]
    assert float(turned[1]) == pytest.approx(math.cos(0.7), abs=1e-12)
    assert float(turned[5]) == pytest.approx(math.sin(0.7), abs=1e-12)


@pytest.mark.promise("llm.context")
def test_context_extension_keeps_new_positions_within_the_angles_of_training():
    plain = rotary_frequencies(16, 10000.0, "none", 1.0)
    linear = rotary_frequencies(16, 10000.0, "linear", 4.0)
    ntk = rotary_frequencies(16, 10000.0, "ntk", 4.0)
    torch.testing.assert_close(linear * 400, plain * 100)
    assert float(ntk[0]) == float(plain[0])  # the quickest channel, which tells neighbours apart, stays
    assert float(ntk[-1] * 400) == pytest.approx(float(plain[-1] * 100))  # the slowest is stretched in full
    assert bool((ntk.diff() < 0).all())


def test_sinusoidal_positions_follow_their_formula():
    table = sinusoidal_table(50, 6)
    for position in (0, 3, 49):
        for i in range(3):
            angle = position / 10000 ** (2 * i / 6)
            assert float(table[position, 2 * i]) == pytest.approx(math.sin(angle), abs=1e-12)
            assert float(table[position, 2 * i + 1]) == pytest.approx(math.cos(angle), abs=1e-12)


@pytest.mark.promise("llm.rotary")
def test_positions_past_the_context_are_refused_unless_it_is_extended():
    batch = from_sequences(random_sequences([66]))
    with pytest.raises(RecipeError, match=r"position 64 is outside the model's context of 64"):
        tiny_model()(batch)
    for method in ("linear", "ntk"):
        model = tiny_model(context_method=method, context_factor=4.0)
        assert model.config.longest == 256
        assert torch.isfinite(model(batch)).all()
        with pytest.raises(RecipeError, match="context of 256"):
            model(from_sequences(random_sequences([258])))


# --------------------------------------------------------------------------- feed-forward and attention

FORMULAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda up, _: up.clamp_min(0),
    "gelu": lambda up, _: up * 0.5 * (1 + torch.erf(up / math.sqrt(2))),
    "geglu": lambda gate, value: gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))) * value,
    "swiglu": lambda gate, value: gate / (1 + torch.exp(-gate)) * value,
}


@pytest.mark.promise("llm.geglu")
@pytest.mark.parametrize("activation", FORMULAS)
def test_feed_forward_follows_its_formula(activation):
    layer = FeedForward(BlockConfig(**SIZES, activation=activation, bias=True))
    randomize(layer)
    x = torch.randn(5, 8, dtype=torch.float64)
    gate_weight, value_weight = layer.up.weight[:6], layer.up.weight[6:]
    gate = x @ gate_weight.T + layer.up.bias[:6]
    value = x @ value_weight.T + layer.up.bias[6:] if layer.activation in GATED else gate
    expected = FORMULAS[activation](gate, value) @ layer.down.weight.T + layer.down.bias
    assert layer.up.weight.shape == (12 if activation in ("geglu", "swiglu") else 6, 8)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.promise("llm.grouped")
def test_grouped_queries_equal_full_heads_whose_keys_and_values_are_repeated():
    grouped = tiny_model(kv_heads=2).eval()
    full = tiny_model().eval()
    weights = dict(grouped.state_dict())
    for index in range(2):
        name = f"blocks.{index}.attention.to_qkv.weight"
        q, k, v = weights[name].split([16, 8, 8])  # 4 query heads, 2 key heads and 2 value heads of 4 channels
        repeated = [part.unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1) for part in (k, v)]
        weights[name] = torch.cat([q, *repeated])
    full.load_state_dict(weights)
    batch = random_batch([9, 1, 20, 5])
    with torch.no_grad():
        torch.testing.assert_close(grouped(batch), full(batch), rtol=1e-12, atol=1e-12)


@pytest.mark.promise("llm.causal")
@pytest.mark.parametrize("kind", DECODERS)
@settings(deadline=None, max_examples=10)
@given(length=st.integers(2, 30), data=st.data())
def test_a_changed_token_changes_no_earlier_score(kind, length, data):
    model = tiny_model(**DECODERS[kind]).eval()
    sequence = random_sequences([length + 1])[0]
    at = data.draw(st.integers(1, length - 1))
    changed = [*sequence[:at], (sequence[at] + 1) % VOCAB, *sequence[at + 1 :]]
    with torch.no_grad():
        before, after = (model.logits(model(from_sequences([s]))) for s in (sequence, changed))
    assert torch.equal(before[:at], after[:at])
    assert not torch.equal(before[at], after[at])


# --------------------------------------------------------------------------- padded views of single layers


def layers() -> dict[str, Callable[[Tensor, Any], Tensor]]:
    """Every layer as a function of (flat tokens, layout)."""
    attention = randomize(Attention(BlockConfig(**SIZES, kv_heads=1, bias=True)))
    made: dict[str, Callable[[Tensor, Any], Tensor]] = {
        "attention": lambda x, layout: attention(x, Stream(x, None, layout))
    }
    norms = {kind: randomize(Norm(kind, 8, 1e-6)) for kind in ("rmsnorm", "layernorm")}
    for name, norm in norms.items():
        made[name] = lambda x, _, norm=norm: norm(x, x.sin())[1]
    for activation in FORMULAS:
        forward = randomize(FeedForward(BlockConfig(**SIZES, activation=activation)))
        made[activation] = lambda x, _, forward=forward: forward(x)
    block = randomize(Block(BlockConfig(**SIZES, norm="layernorm")))
    made["block"] = lambda x, layout: block(Stream(x, x.sin(), layout)).hidden()
    return made


@pytest.mark.promise("batch.layers")
@pytest.mark.parametrize("name", list(layers()))
def test_every_layer_gives_a_rectangle_what_it_gives_each_row_alone(name):
    layer = layers()[name]
    lengths = [5, 1, 7]
    layout = build_layout(np.array(lengths))
    torch.manual_seed(2)
    x = torch.randn(sum(lengths), 8, dtype=torch.float64)
    alone = torch.cat([layer(part, build_layout(np.array([len(part)]))) for part in x.split(lengths)])
    torch.testing.assert_close(layer(x, layout), alone, rtol=1e-12, atol=1e-12)
    for side in ("left", "right"):
        padded, mask = to_padded(x, layout, side, pad_to=9)
        rectangle = layer(padded.flatten(0, 1), PaddedLayout(mask)).unflatten(0, mask.shape)
        torch.testing.assert_close(from_padded(rectangle, mask), alone, rtol=1e-12, atol=1e-12)


@pytest.mark.promise("batch.layers")
@pytest.mark.parametrize("name", list(layers()))
def test_gradients_of_every_layer_equal_finite_differences(name):
    layer, layout = layers()[name], build_layout(np.array([3, 1, 0, 4]))
    torch.manual_seed(3)
    assert gradcheck(lambda x: layer(x, layout), torch.randn(8, 8, dtype=torch.float64, requires_grad=True))


# --------------------------------------------------------------------------- one matrix product per projection


def matrix_products(model: Decoder, batch: RaggedBatch) -> tuple[int, int]:
    """Number of linear layers called, and of matrix products run, in a forward and backward pass."""
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        model.losses(batch)["cross_entropy"][0].backward()
    counts = {event.key: event.count for event in trace.key_averages()}
    return counts.get("aten::linear", 0), counts.get("aten::mm", 0) + counts.get("aten::addmm", 0)


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("form", ["flat", "rectangle"])
def test_a_last_block_that_leaves_tokens_out_changes_nothing(kind, form):
    """Outputs, losses and gradients where half of the tokens predict something or less, and where most do."""
    model = randomize(Decoder(Config(**{**SIZES, "blocks": 2}, **DECODERS[kind]), VOCAB))
    for share in (0.3, 0.8):
        batch = random_batch([5, 1, 9, 3], seed=2, share=share)
        batch = batch.pad("left") if form == "rectangle" else batch
        found = []
        for wanted in (None, batch.target_index):
            model.zero_grad()
            hidden = model(batch, wanted=wanted)
            hidden = hidden.index_select(0, batch.target_index) if wanted is None else hidden
            (hidden * torch.arange(hidden.numel()).view_as(hidden)).sum().backward()
            found.append([hidden.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def test_the_last_block_ends_with_the_tokens_that_predict_something():
    model, seen = tiny_model(), []
    for block in model.blocks:
        block.feed_forward.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    batch = random_batch([6, 2, 10, 4], seed=2, share=0.3)
    model.losses(batch)
    assert seen == [18, batch.num_targets]
    seen.clear()
    model.last_hidden(batch)
    assert seen == [18, 4]
    seen.clear()
    model(batch)
    assert seen == [18, 18]


@pytest.mark.promise("batch.projections")
def test_projections_are_one_matrix_product_each_however_many_sequences():
    model = tiny_model(torch.float32, context=128, tied=False).eval()
    found = {matrix_products(model, random_batch(lengths, share=1.0)) for lengths in ([121], [13] * 10, [2] * 120)}
    assert len(found) == 1, found
    linears, products = found.pop()
    assert linears == 4 * 2  # q, k and v at once, output, up, down, in two blocks; the loss has the head's
    assert products == 3 * (linears + 1)  # forward, and a gradient for inputs and one for weights


# --------------------------------------------------------------------------- configuration


@pytest.mark.promise("cli.overrides")
def test_presets_are_the_published_sizes_and_every_field_overrides_them():
    small, large = (model_config({"preset": name}) for name in ("zh_gpt", "llm"))
    assert (small.width, small.blocks, small.heads, small.hidden, small.context) == (256, 2, 8, 512, 128)
    assert (small.positions, small.activation, small.norm, small.bias, small.dropout) == (
        "sinusoidal", "relu", "layernorm", True, 0.1,
    )  # fmt: skip
    assert (large.width, large.blocks, large.heads, large.hidden, large.context) == (512, 6, 8, 2048, 512)
    assert (large.positions, large.activation, large.norm, large.eps) == ("rotary", "geglu", "rmsnorm", 1e-6)
    assert small.causal
    assert large.causal
    changed = model_config({"preset": "llm", "width": 768, "blocks": 12, "heads": 12, "hidden": 3072, "context": 1024})
    assert (changed.width, changed.blocks, changed.context, changed.activation) == (768, 12, 1024, "geglu")


def test_the_recipe_small_has_the_parameters_its_comment_states():
    recipe = load_recipe("small", [])
    sizes = model_config(recipe.model)
    assert recipe.tokenizer.vocab_size == 6000
    with torch.device("meta"):
        model = build_model(sizes, 6000)
    assert sum(p.numel() for p in model.parameters()) == 9_542_720


@pytest.mark.promise("cli.overrides")
@pytest.mark.parametrize("field", [f for f in Config.model_fields if f not in ("kind", "preset")])
def test_every_default_can_be_overridden(field):
    values: dict[str, Any] = {
        "width": 64, "blocks": 3, "heads": 4, "kv_heads": 2, "hidden": 96, "norm": "layernorm", "eps": 1e-3,
        "activation": "relu", "bias": True, "dropout": 0.2, "attention_dropout": 0.3,
        "causal": False, "context": 77, "positions": "learned",
        "rope_theta": 500.0, "context_method": "ntk", "context_factor": 2.0, "tied": False, "embed_dropout": 0.1,
        "rope_scaling": RopeScaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_context=64),
        "no_rope_blocks": [1], "head_width": 6, "qkv_bias": True, "qk_norm": True, "branch_norms": True,
        "sliding_window": 5, "sliding_blocks": [0], "sliding_rope_theta": 100.0, "embed_scale": 4.0, "vocab_size": 600,
    }  # fmt: skip
    window = {"sliding_window": 5} if field in ("sliding_blocks", "sliding_rope_theta") else {}
    section = {**window, field: values[field]}
    assert getattr(model_config(section), field) == values[field] != getattr(model_config({}), field)


def test_a_model_may_have_more_rows_than_the_tokenizer_has_ids_and_never_fewer():
    model = build_model(model_config({**SIZES, "vocab_size": 130}), 123)
    assert model.vocab_size == len(model.embed.weight) == 130
    with pytest.raises(RecipeError, match="the tokenizer has 131 ids, the model 130"):
        build_model(model_config({**SIZES, "vocab_size": 130}), 131)


@pytest.mark.promise("train.refusals")
def test_ids_outside_of_the_vocabulary_are_an_error_and_never_a_number():
    model = tiny_model().eval()
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        model(from_sequences([[1, VOCAB, 2]]))
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        model.losses(from_sequences([[1, 2, VOCAB]]))
