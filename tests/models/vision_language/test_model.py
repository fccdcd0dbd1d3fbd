"""Text with images: every sequence equals itself alone, and every image reaches its own place."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers.gradients import assert_same_update, gradients
from tests.helpers.vision import IMAGE, LEARNED, ROWS, SAMPLES, TOWERS, VOCABULARY, picture, prepare, tiny
from unpad.batching.batch import from_padded
from unpad.data.preprocess import preprocess
from unpad.errors import RecipeError, SourceError
from unpad.inference.engine import advance
from unpad.models.contract import WEIGHTS
from unpad.nn.activation import activate
from unpad.nn.cache import CachedRow, KeyValueCache
from unpad.nn.native import library
from unpad.training.optim import freeze
from unpad.training.step import accumulate

# --------------------------------------------------------------------------- alone = together


@pytest.mark.promise("vqa.row-by-row", "vqa.any-images")
@pytest.mark.parametrize("path", [nullcontext, library.switched_off], ids=["native", "torch"])
@pytest.mark.parametrize("kind", TOWERS)
def test_every_sequence_equals_itself_alone_in_outputs_and_gradients(kind, path):
    model, batch = tiny(**TOWERS[kind]), prepare(SAMPLES[kind]).batch
    num_seqs = batch.num_seqs
    with path():
        alone = [batch.select([i]) for i in range(num_seqs)]
        with torch.no_grad():
            hidden = model(batch)
            torch.testing.assert_close(torch.cat([model(one) for one in alone]), hidden, rtol=1e-10, atol=1e-10)
            for padded in (batch.pad("right"), batch.pad("left", pad_to=50, pad_id=IMAGE)):
                mask = padded.layout.attention_mask
                same = from_padded(model(padded).unflatten(0, mask.shape), mask)
                torch.testing.assert_close(same, hidden, rtol=1e-10, atol=1e-10)
        order = np.random.default_rng(0).permutation(num_seqs).tolist()
        split = [batch.select(order[:2]), batch.select([]), batch.select(order[2:])]
        assert_same_update(model, alone, [batch], [batch.pad("left", pad_id=7), batch.select([])], split)


@pytest.mark.promise("vqa.eight-steps")
def test_loss_curves_of_batches_and_of_single_samples_are_equal():
    batch = prepare(ROWS).batch
    curves = []
    for micros in ([batch], [batch.select([i]) for i in range(batch.num_seqs)]):
        model = tiny(**TOWERS["clip"])
        optimizer, curve = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(8):
            optimizer.zero_grad()
            sums, counts = accumulate(model, micros, WEIGHTS, "fp32")
            optimizer.step()
            curve.append(float(sums["cross_entropy"]) / counts["cross_entropy"])
        curves.append(curve)
    assert curves[0] == pytest.approx(curves[1], abs=1e-9)
    assert curves[0][-1] < curves[0][0]


# --------------------------------------------------------------------------- text and images


@pytest.mark.parametrize("positions", ["rotary", "learned", "sinusoidal"])
def test_text_without_images_is_what_the_decoder_makes_of_it(positions):
    model, prepared = tiny(LEARNED, {"positions": positions}), prepare(ROWS)
    batch = prepared.batch
    text_rows = [i for i, spans in enumerate(prepared.vision_spans) if not spans]
    text = batch.select(text_rows)
    with torch.no_grad():
        expected = model.decoder(replace(text, media=None, media_index=None, media_seqs=None))
        assert torch.equal(model(text), expected)
        rows = model(batch).split(batch.layout.lengths().tolist())
        torch.testing.assert_close(torch.cat([rows[i] for i in text_rows]), expected, rtol=1e-10, atol=1e-10)


def test_the_tower_does_not_run_for_text_alone():
    model = tiny(**TOWERS["clip"])
    model.tower.register_forward_hook(lambda *_: pytest.fail("the tower ran"))
    for batch in (prepare([ROWS[2], ROWS[5]]).batch, prepare(ROWS).batch.select([2, 5])):
        model.zero_grad()
        model.losses(batch)["cross_entropy"][0].backward()
        assert all(p.grad is None for part in (model.tower, model.projector) for p in part.parameters())
        assert model.embed.weight.grad is not None


def test_any_id_may_stand_for_an_image():
    batch = prepare(ROWS).batch
    far = replace(batch, input_ids=torch.where(batch.input_ids == IMAGE, -200, batch.input_ids))
    with torch.no_grad():
        assert torch.equal(tiny(**TOWERS["clip"])(batch), tiny(**TOWERS["clip"], image_id=-200)(far))


def test_embeddings_in_place_of_tokens_are_equal():
    model, batch = tiny(**TOWERS["clip"]), prepare(ROWS).batch
    given = replace(batch, input_ids=None, inputs_embeds=model.embed(batch.input_ids).detach().requires_grad_())
    hidden = model(given)
    torch.testing.assert_close(hidden, model(batch), rtol=1e-12, atol=1e-12)
    hidden.sum().backward()
    assert given.inputs_embeds.grad[batch.media_index].abs().max() == 0


def test_a_spliced_batch_holds_its_text_and_its_images_as_vectors_and_nothing_else():
    model, batch = tiny(**TOWERS["clip"]), prepare(ROWS).batch
    visual = model.encode(batch.media)
    spliced = model.splice(batch, visual)
    assert (spliced.media, spliced.media_index, spliced.media_seqs) == (None, None, None)
    embeds = model.embed(batch.input_ids.masked_fill(batch.input_ids == IMAGE, 0))
    embeds = embeds.index_copy(0, batch.media_index, visual)
    assert torch.equal(spliced.inputs_embeds, embeds)
    for name in ("layout", "position_ids", "input_ids", "labels", "loss_mask", "target_index", "seq_ids"):
        assert getattr(spliced, name) is getattr(batch, name), name
    order = [3, 0, 5]  # it is a batch of text like any other
    torch.testing.assert_close(model.decoder(spliced.select(order)), model(batch.select(order)), rtol=1e-10, atol=1e-10)


def test_decoding_with_a_cache_equals_the_whole_pass():
    model, batch = tiny(**TOWERS["clip"]), prepare(ROWS).batch
    # The last token of an answer is no input of the batch; in the whole pass a 3 takes its place.
    whole = prepare([(" ".join([row[0], *row[2].split()[:-1], "3"]), row[1], "1") for row in ROWS]).batch
    with torch.no_grad():
        cache = KeyValueCache([CachedRow(64) for _ in range(batch.num_seqs)])
        cache.begin(batch.layout.lengths().tolist())
        torch.testing.assert_close(model(batch, cache), model(batch), rtol=1e-10, atol=1e-10)
        tokens = torch.full((batch.num_seqs,), 3)
        ends = whole.layout.cu_seqlens[1:].long() - 1
        torch.testing.assert_close(advance(model, cache, tokens), model(whole)[ends], rtol=1e-10, atol=1e-10)
        advance(model, cache, torch.full_like(tokens, IMAGE))  # a model may write any token of its vocabulary


# --------------------------------------------------------------------------- freezing and precision


def test_a_frozen_tower_builds_no_graph_and_changes_no_other_gradient():
    model, batch = tiny(**TOWERS["clip"]), prepare(ROWS).batch
    expected, _ = gradients(model, [batch])
    modes: list[bool] = []
    model.tower.register_forward_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    freeze(model, ["tower.*"])
    found, _ = gradients(model, [batch])
    assert modes == [False]
    for name, grad in found.items():
        if name.startswith("tower."):
            assert grad.abs().max() == 0
        else:
            torch.testing.assert_close(grad, expected[name], rtol=1e-10, atol=1e-12)
    freeze(model, ["decoder.*"])
    found, _ = gradients(model, [batch])
    torch.testing.assert_close(found["tower.class_token"], expected["tower.class_token"], rtol=1e-10, atol=1e-12)
    assert modes == [False, True]


def test_autocast_leaves_the_residual_streams_in_fp32():
    model, batch = tiny(**TOWERS["clip"], dtype=torch.float32), prepare(ROWS).batch
    with torch.no_grad():
        exact = model.logits(model(batch))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model.tower(batch.media).dtype == torch.float32
            close = model.logits(model(batch))
    assert 0 < (close - exact).norm() < 0.05 * exact.norm()


@torch.no_grad()
def test_visual_tokens_may_come_in_low_precision():
    model, batch = tiny(**TOWERS["clip"], dtype=torch.float32), prepare(ROWS).batch
    visual = model.encode(batch.media).bfloat16()
    spliced = model.splice(batch, visual)
    assert spliced.inputs_embeds.dtype == torch.float32
    assert torch.equal(spliced.inputs_embeds[batch.media_index], visual.float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_quick_gelu_is_x_times_the_sigmoid_of_1_702_x(dtype):
    x = torch.linspace(-6, 6, 60, dtype=torch.float64).unflatten(0, (5, 12)).to(dtype)
    expected = x.double() / (1 + torch.exp(-1.702 * x.double()))
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    assert (activate("quick_gelu", x).double() - expected).norm() <= tolerance * expected.norm()


# --------------------------------------------------------------------------- the tower


@pytest.mark.parametrize("layer", range(-3, 3))
def test_features_are_taken_after_the_layer_asked_for(layer):
    model = tiny({**LEARNED, "feature_layer": layer})
    media = prepare(ROWS).batch.media
    counted: list[int] = []
    for index, block in enumerate(model.tower.blocks):
        block.register_forward_hook(lambda *_, at=index: counted.append(at))
    model.tower(media)
    assert counted == list(range(layer if layer >= 0 else 3 + layer))


@pytest.mark.parametrize("layer", [-4, 3])
def test_a_layer_the_tower_does_not_have_is_refused(layer):
    with pytest.raises(RecipeError, match=f"feature_layer {layer} is none of a tower with 2 blocks"):
        tiny({**LEARNED, "feature_layer": layer})


# --------------------------------------------------------------------------- errors


@pytest.mark.promise("vqa.visual-tokens")
def test_a_sequence_with_another_number_of_placeholders_is_named():
    model = tiny(**TOWERS["clip"])
    batch = prepare(ROWS, sample_ids=[10, 11, 12, 13, 14, 15]).batch
    ids = batch.input_ids.clone()
    ids[int(batch.media_index[6])] = 3  # in the second sequence
    for run in (model, model.losses, model.token_nll):
        with pytest.raises(SourceError, match="3 placeholders for 4 visual tokens") as caught:
            run(replace(batch, input_ids=ids))
        assert "sequence 11" in str(caught.value)
    with pytest.raises(SourceError, match="4 placeholders for 0 visual tokens"):
        model(replace(batch, media=None, media_index=None, media_seqs=None))


@pytest.mark.parametrize("image_id", [IMAGE, None])
def test_fewer_places_than_visual_tokens_are_named(image_id):
    model = tiny(**TOWERS["clip"], image_id=image_id)
    batch = prepare(ROWS).batch
    with pytest.raises(SourceError, match="3 placeholders for 4 visual tokens") as caught:
        model(replace(batch, media_index=batch.media_index[:-1]))
    assert "sequence 4" in str(caught.value)


@pytest.mark.promise("vqa.visual-tokens")
def test_visual_tokens_beside_their_placeholders_are_refused():
    batch = prepare(ROWS).batch
    index = batch.media_index.clone()
    index[:4] += 1
    with pytest.raises(SourceError, match="at other places") as caught:
        tiny(**TOWERS["clip"])(replace(batch, media_index=index))
    assert "sequence 0" in str(caught.value)


@pytest.mark.promise("vqa.visual-tokens")
@pytest.mark.parametrize("change", ["another row", "flipped", "twice"])
def test_places_in_another_row_or_order_are_refused_without_an_id_of_placeholders(change):
    batch = prepare(ROWS).batch
    index, model = batch.media_index.clone(), tiny(**TOWERS["clip"], image_id=None)
    model(batch)
    if change == "another row":
        index[0] = batch.layout.cu_seqlens[-1] - 1
    elif change == "flipped":
        index[:4] = index[:4].flip(0)
    else:
        index[1] = index[0]
    with pytest.raises(SourceError, match="visual tokens"):
        model(replace(batch, media_index=index))


@pytest.mark.promise("images.square")
def test_images_that_do_not_fit_the_tower_are_refused():
    model = tiny(**TOWERS["clip"])
    with pytest.raises(SourceError, match="an image has 3 x 1 patches; learned positions know 2 x 2 alone"):
        model(prepare([("1 <image>", [(3, 1)], "2")]).batch)
    batch = preprocess(VOCABULARY, [[picture((2, 2), 3, 0)]], ["1 <image>"], ["2"]).batch
    with pytest.raises(SourceError, match="a patch has 27 values, expected 3 x 2 x 2"):
        model(batch)


def test_an_image_that_leads_past_the_context_is_refused():
    with pytest.raises(RecipeError, match="position 8 is outside the model's context of 5 tokens"):
        tiny(LEARNED, {"context": 5})(prepare(ROWS[:1]).batch)


def test_its_length_direction_heads_and_smoothing_are_those_of_its_decoder():
    model = tiny(LEARNED, {"causal": False})
    assert (model.config.longest, model.causal, model.head_dim) == (64, False, 4)
    model.label_smoothing = 0.1
    assert model.decoder.label_smoothing == model.label_smoothing == 0.1
