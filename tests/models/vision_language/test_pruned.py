"""Visual tokens leave the language model sample by sample: as if they had never been there, and nobody else's."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.gradients import assert_same_update
from tests.helpers.grid import pairs
from tests.helpers.pruning import BLOCKS, EARLY, HEADS, KV_HEADS, METHODS, ROWS, WIDTH, pass_of, pruned
from tests.helpers.vision import IMAGE, prepare
from unpad.batching.batch import RaggedBatch, from_sequences
from unpad.data.preprocess import Preprocessed
from unpad.errors import RecipeError
from unpad.inference.engine import advance, prefill
from unpad.models.vision_language.model import VisionLanguage
from unpad.models.vision_language.prune_pass import PrunePass
from unpad.nn.block import Stream
from unpad.nn.native import library
from unpad.proof.pruned import plain_pass

TEXT_ROWS = [2, 5]
PATHS = {"native": nullcontext, "torch": library.switched_off}
both_paths = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(scope="module")
def prepared() -> Preprocessed:
    return prepare(ROWS)


def left_rows(model: VisionLanguage, batch: RaggedBatch) -> list[Tensor]:
    """Hidden states of each sequence, of the tokens that are left."""
    hidden, lengths = model(batch), batch.layout.lengths()
    if model.kept:
        lengths = lengths - model.given + model.kept[-1]
    return list(hidden.split(lengths.tolist()))


# --------------------------------------------------------------------------- a reference by masks

ROWS_FOR_ATTENTION = [row for row in ROWS if row[0] != "<image>"]  # that question has no token to look with


@pytest.mark.promise("vqa.hard-pruning")
@pytest.mark.parametrize(
    ("method", "positions", "path"),
    pairs(["learned", "learned, top share", "relevance", "attention"], ["rotary", "learned"], PATHS.values()),
)
@torch.no_grad()
def test_removal_equals_a_mask_over_what_is_removed(method, positions, path):
    model = pruned(positions=positions, **METHODS[method])
    prepared = prepare(ROWS_FOR_ATTENTION if method == "attention" else ROWS)
    batch = prepared.batch
    with path():
        together = left_rows(model, batch)
        kept = torch.stack(model.kept)  # (blocks, num_seqs)
        for sample, hidden in enumerate(together):
            one = plain_pass(model, batch.select([sample]), "hard")
            torch.testing.assert_close(hidden, one.hidden, **CLOSE)
            torch.testing.assert_close(left_rows(model, batch.select([sample]))[0], one.hidden, **CLOSE)
            assert kept[:, sample].tolist() == one.kept
    assert kept.shape == (BLOCKS, batch.num_seqs)
    assert torch.equal(kept[1], kept[2]), "nothing happens between the heads"
    assert (kept[0] > kept[1]).any()
    assert (kept[2] > kept[3]).any(), "the second head removes some more"
    images = kept[:, kept[0] > 1]
    assert len({*(images[3] / images[0]).tolist()}) > 2, "samples keep different shares"


@pytest.mark.promise("vqa.prune-layers")
@both_paths
@pytest.mark.parametrize("method", EARLY)
@torch.no_grad()
def test_removal_before_the_first_block_equals_a_mask(method, path, prepared):
    model, batch = pruned(**EARLY[method]), prepared.batch
    with path():
        for sample, hidden in enumerate(left_rows(model, batch)):
            one = plain_pass(model, batch.select([sample]), "hard")
            torch.testing.assert_close(hidden, one.hidden, **CLOSE)
            assert [int(entered[sample]) for entered in model.kept] == one.kept
    expected = [int(sum(rows * columns for rows, columns in row[1])) for row in ROWS]
    assert model.given.tolist() == expected
    assert model.kept[0].tolist() == [max(-(-6 * num // 10), min(num, 1)) for num in expected]
    assert torch.equal(model.kept[0], model.kept[1])
    assert (model.kept[1] > model.kept[2]).any()


@torch.no_grad()
def test_text_never_sees_what_is_removed_before_the_first_block(prepared):
    """Other pixels in patches that go change nothing; after the first block the text would have seen them."""
    batch, outputs = prepared.batch.select([4]), {}
    for layer in (-1, 0):
        model = pruned(layers=[layer], method="uniform", keep=0.4)
        assert model.tower.config.num_run == 0, "where a tower would spread what patches hold"
        before = left_rows(model, batch)[0]
        pixels = batch.media.inputs_embeds.clone()
        gone = torch.ones(len(pixels), dtype=torch.bool).index_fill(0, model.kept_tokens[-1], False)
        pixels[gone] += 1
        after = left_rows(model, replace(batch, media=replace(batch.media, inputs_embeds=pixels)))[0]
        outputs[layer] = float((before - after).abs().max())
    assert outputs[-1] == 0
    assert outputs[0] > 1e-6


@pytest.mark.promise("vqa.hard-pruning")
@torch.no_grad()
def test_tokens_that_are_left_keep_their_positions(prepared, monkeypatch):
    """Counted anew after a removal they would give something else, and the reference would tell."""
    model, keep = pruned(), Stream.keep
    expected = torch.cat([plain_pass(model, prepared.batch.select([i]), "hard").hidden for i in range(len(ROWS))])

    def counted_anew(stream: Stream, kept: Tensor) -> Stream:
        left = keep(stream, kept)
        assert all(map(torch.equal, left.rotary, (angles[kept] for angles in stream.rotary)))
        places = torch.cat([torch.arange(n) for n in left.layout.lengths().tolist()])
        return Stream(left.x, left.delta, left.layout, model.decoder._rotary(places, left.x.dtype))

    torch.testing.assert_close(model(prepared.batch), expected, **CLOSE)
    monkeypatch.setattr(Stream, "keep", counted_anew)
    assert (model(prepared.batch) - expected).abs().max() > 1e-3


# --------------------------------------------------------------------------- nothing removed, nothing changed


@pytest.mark.promise("vqa.modes")
@both_paths
@pytest.mark.parametrize(
    "settings", [{"threshold": 0.0}, *({**METHODS[name], "keep": 1.0} for name in METHODS)], ids=["threshold", *METHODS]
)
@torch.no_grad()
def test_keeping_all_is_no_pruning(settings, path, prepared):
    model, batch = pruned(**settings), prepared.batch
    with path():
        for run in (batch, batch.pad("left", pad_id=IMAGE)):
            model.mode = "hard"
            hidden, nll = model(run), model.token_nll(run)
            assert torch.stack(model.kept).eq(model.kept[0]).all()
            model.mode = "origin"
            assert torch.equal(hidden, model(run))
            assert torch.equal(nll, model.token_nll(run))
            assert model.kept == []


@pytest.mark.promise("vqa.prune-layers")
@torch.no_grad()
def test_samples_without_images_are_untouched_and_every_other_keeps_a_token(prepared):
    model, batch = pruned(threshold=0.9999), prepared.batch
    hard = left_rows(model, batch)
    expected = [int(sum(rows * columns for rows, columns in row[1])) for row in ROWS]
    assert model.kept[0].tolist() == expected
    assert model.kept[-1].tolist() == [min(num, 1) for num in expected]
    model.mode = "origin"
    for sample, (one, other) in enumerate(zip(hard, left_rows(model, batch), strict=True)):
        assert (len(one) == len(other)) == (expected[sample] < 2)
        if sample in TEXT_ROWS:
            torch.testing.assert_close(one, other, **CLOSE)
    model.mode = "hard"
    text = batch.select(TEXT_ROWS)
    assert model(text).shape == (text.total_tokens, WIDTH)
    assert [one.tolist() for one in model.kept] == [[0, 0]] * BLOCKS
    assert model(batch.select([])).shape == (0, WIDTH)


# --------------------------------------------------------------------------- alone = together


@pytest.mark.promise("vqa.prune-layers")
@pytest.mark.parametrize(
    ("mode", "method", "kernels"),
    [
        ("soft", "learned", "native"),
        ("soft", "learned", "torch"),
        ("soft", "learned, early", "native"),
        ("hard", "learned, early", "native"),
        ("relevance", "relevance", "native"),
        ("relevance", "relevance", "torch"),
        ("relevance", "relevance, early", "native"),
        *(("hard", name, "native") for name in METHODS),
    ],
)
def test_every_sample_equals_itself_alone_in_outputs_losses_and_gradients(mode, method, kernels, prepared):
    early = method.endswith(", early")
    settings = EARLY[method.removesuffix(", early")] if early else METHODS[method]
    model, batch, path = pruned(mode, **settings), prepared.batch, PATHS[kernels]
    alone = [batch.select([i]) for i in range(batch.num_seqs)]
    order = np.random.default_rng(0).permutation(batch.num_seqs).tolist()
    with path():
        with torch.no_grad():
            for one, row in zip(alone, left_rows(model, batch), strict=True):
                torch.testing.assert_close(left_rows(model, one)[0], row, **CLOSE)
            nll = torch.cat([model.token_nll(one) for one in alone])
            for run in (batch, batch.pad("right"), batch.pad("left", pad_to=50, pad_id=IMAGE)):
                torch.testing.assert_close(model.token_nll(run), nll, **CLOSE)
        shuffled = [batch.select(order[:3]), batch.select([]), batch.select(order[3:])]
        grads = assert_same_update(model, alone, [batch], [batch.pad("left", pad_id=7)], shuffled)
    if mode != "hard":
        # Shares of relevance do not depend on what all logits have in common.
        common = ("to_logit.bias",) if mode == "relevance" else ()
        heads = [name for name in grads if name.startswith("pruners.") and not name.endswith(common)]
        assert heads
        assert all(grads[name].norm() > 1e-12 for name in heads)


@pytest.mark.promise("vqa.prune-heads")
@torch.no_grad()
def test_the_answer_has_no_say_and_the_question_has():
    model, seen = pruned("soft"), []
    for question, answers in (("7 8", ["9 10"]), ("7 8", ["33 40 2 1"]), ("7 8", None), ("30 41", ["9 10"])):
        row = prepare([(f"1 5 <image> {question}", [(5, 5)], "")], answers=answers).batch
        seen.append(torch.stack(pass_of(model, row).probabilities))
    torch.testing.assert_close(seen[1], seen[0], **CLOSE)
    torch.testing.assert_close(seen[2], seen[0], **CLOSE)
    assert (seen[3] - seen[0]).abs().max() > 1e-3


@pytest.mark.promise("vqa.prune-heads")
@torch.no_grad()
def test_a_head_without_the_question_chooses_by_the_image_alone():
    rows = [prepare([(f"1 5 <image> {asks}", [(5, 5)], "")], answers=["9"]).batch for asks in ("7 8", "30 41 6")]
    model, seen = pruned("soft", question=False), []
    for row in rows:
        seen.append(torch.stack(pass_of(model, row).probabilities))
        torch.testing.assert_close(left_rows(model, row)[0], plain_pass(model, row, "soft").hidden, **CLOSE)
    torch.testing.assert_close(seen[0], seen[1], **CLOSE)


def _chosen(model: VisionLanguage, batch: RaggedBatch) -> list[int]:
    """The visual tokens that are left at the end."""
    return pass_of(model, batch)._source.tolist()


# --------------------------------------------------------------------------- soft removal


@both_paths
@torch.no_grad()
def test_probabilities_of_zero_and_one_are_removal(path, prepared, monkeypatch):
    def judge(pruning: PrunePass, index: int, entered: Stream, left: Stream) -> Tensor:
        source = pruning._source
        kept = source % 2 == 0 if index == 0 else (source % 4 == 0) | (source == 54)
        return torch.where(kept, 1e4, -1e4).double()

    monkeypatch.setattr(PrunePass, "_judge", judge)
    model, batch = pruned("soft"), prepared.batch
    source = torch.arange(batch.media.total_tokens)
    stays = torch.ones(batch.total_tokens, dtype=torch.bool)
    stays[batch.media_index] = (source % 4 == 0) | (source == 54) | (source == 66)
    with path():
        soft = model(batch)
        model.mode = "hard"
        torch.testing.assert_close(soft[stays], model(batch), **CLOSE)
        model.mode = "origin"
        assert (soft - model(batch)).abs().max() > 0.01


@pytest.mark.promise("vqa.prune-heads")
def test_the_loss_of_the_task_reaches_every_parameter_of_the_heads(prepared):
    model = pruned().train()
    assert model.mode == "soft"
    torch.manual_seed(0)
    model.losses(prepared.batch)["cross_entropy"][0].backward()
    for name, parameter in model.pruners.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.norm() > 1e-12, name
    assert all(torch.equal(entered, model.kept[0]) for entered in model.kept), "nothing is taken out"


@pytest.mark.promise("vqa.prune-layers")
def test_beside_frozen_heads_the_rest_learns_from_what_is_left(prepared):
    """Which is what evaluation keeps; nothing is asked of how much that is."""
    model, batch, left = pruned(keep=0.4).train(), prepared.batch, []
    for parameter in model.pruners.parameters():
        parameter.requires_grad_(False)
    for seed in range(2):
        torch.manual_seed(seed)
        terms = model.losses(batch)
        assert terms["sparsity"][1] == model.count_targets(batch)["sparsity"] == 0
        left.append(model.kept_tokens[-1].tolist())
    assert len(left[0]) == len(left[1]) < batch.media.total_tokens
    with torch.no_grad():
        model.eval()(batch)
    assert left[0] == left[1] == model.kept_tokens[-1].tolist()
    terms["cross_entropy"][0].backward()
    for name, parameter in model.named_parameters():
        if not name.startswith("tower.blocks."):  # features are taken before the tower's only block
            assert (parameter.grad is None) == name.startswith("pruners."), name


def test_frozen_heads_keep_their_temperature_and_stay_soft_for_a_discriminator():
    model = pruned(temperature={"start": 1.0, "end": 0.1, "share": 1.0}, discriminator={"inner": 8}).train()
    model.begin_step(9, 10, {"cross_entropy": 1.0})
    reached = float(model.temperature)
    assert reached < 0.5
    model.pruners.requires_grad_(False)
    model.begin_step(0, 10, {"cross_entropy": 1.0})
    assert (float(model.temperature), model.mode) == (reached, "hard")
    model.begin_step(0, 10, {"cross_entropy": 1.0, "discriminator": 1.0})
    assert (float(model.temperature), model.mode) == (reached, "soft"), "it compares what is hidden by degrees"


def test_the_gradient_of_the_heads_equals_finite_differences(prepared):
    model = pruned("soft")
    weight = model.pruners["0"].to_logit.weight
    weight.grad = None
    model.losses(prepared.batch)["cross_entropy"][0].backward()
    direction, losses = torch.randn_like(weight), []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            weight.add_(step * direction)
            losses.append(float(model.losses(prepared.batch)["cross_entropy"][0]))
            weight.sub_(step * direction)
    slope = (losses[0] - losses[1]) / 2e-5
    assert slope == pytest.approx(float((weight.grad * direction).sum()), rel=1e-5)
    assert abs(slope) > 1e-4


@torch.no_grad()
def test_training_draws_anew_and_evaluation_never(prepared):
    model = pruned("soft")
    model.mode = "soft"

    def softened() -> Tensor:
        return model.losses(prepared.batch)["sparsity"][0].detach()

    assert torch.equal(softened(), softened())
    model.train()
    torch.manual_seed(0)
    assert not torch.equal(softened(), softened())


# --------------------------------------------------------------------------- decoding


def prompts_and_whole(length: int) -> tuple[RaggedBatch, RaggedBatch]:
    """The prompts, and the same with the tokens 3, 4, 5 ... after each."""
    ids = " ".join(str(3 + i) for i in range(length + 1))  # the last is only a label
    return prepare(ROWS, answers=None).batch, prepare([(row[0], row[1], ids) for row in ROWS]).batch


@pytest.mark.promise("vqa.modes", "vqa.hard-pruning")
@both_paths
@pytest.mark.parametrize(
    ("mode", "method"), [("hard", "learned"), ("hard", "attention"), ("hard", "early"), ("soft", "learned")]
)
@torch.no_grad()
def test_decoding_with_a_cache_equals_the_whole_pass(mode, method, path):
    """Of eight samples with different numbers of tokens left, some of which end early or are copied, and of one."""
    model = pruned(mode, **(EARLY["learned"] if method == "early" else METHODS[method]))
    prompts, whole = prompts_and_whole(12)
    rows = [plain_pass(model, whole.select([i]), mode).hidden for i in range(len(ROWS))]
    assert any(len(row) < n for row, n in zip(rows, whole.layout.lengths().tolist(), strict=True)) == (mode == "hard")
    with path():
        cache, hidden = prefill(model, prompts.select([4]), most=64)
        for step in range(3):
            torch.testing.assert_close(hidden[0], rows[4][step - 13], **CLOSE)
            hidden = advance(model, cache, torch.full((1,), 3 + step))
        cache, hidden = prefill(model, prompts, most=64)
        assert cache.lengths.tolist() == prompts.layout.lengths().tolist()
        counted = [one.tolist() for one in model.kept]
        for step in range(12):
            torch.testing.assert_close(hidden, torch.stack([row[step - 13] for row in rows]), **CLOSE)
            if step in (3, 8):
                live = [row for row in range(cache.num_rows) if row not in (0, cache.num_rows // 2)]
                cache.reorder(torch.tensor(live))
                rows = [rows[row] for row in live]
            if step == 5:
                cache.reorder(torch.tensor([1, 1, 0, 3]))
                rows = [rows[1], rows[1], rows[0], rows[3]]
            hidden = advance(model, cache, torch.full((cache.num_rows,), 3 + step))
        assert [one.tolist() for one in model.kept] == counted


@pytest.mark.promise("vqa.hard-pruning")
@torch.inference_mode()
def test_the_cache_is_smaller_by_what_was_removed():
    model, prompts = pruned(method="uniform", keep=0.25, layers=[0]), prepare(ROWS, answers=None).batch
    cache, _ = prefill(model, prompts, most=prompts.layout.max_seqlen + 5)
    left = prompts.layout.lengths() - model.kept[0] + model.kept[-1]
    per_token = 2 * KV_HEADS * (WIDTH // HEADS) * 8  # keys and values in fp64
    most = prompts.layout.max_seqlen + 5  # of every row, with room for what may come
    lengths = prompts.layout.lengths()

    def room(held: Tensor) -> int:
        """Tokens of the buffers of all rows in a layer that holds so many of each."""
        return int(torch.minimum(2 * held, held + most - lengths).sum())

    assert int(left.max()) < prompts.layout.max_seqlen - 10
    assert cache.num_bytes == per_token * (room(lengths) + (BLOCKS - 1) * room(left))
    model.mode = "origin"
    whole, _ = prefill(model, prompts, most=most)
    assert whole.num_bytes == per_token * BLOCKS * room(lengths)


# --------------------------------------------------------------------------- settings


def test_modes_follow_training_unless_chosen():
    model = pruned()
    assert model.mode == "hard"
    assert model.train().mode == "soft"
    model.mode = "origin"
    assert model.eval().mode == "origin"
    model.mode = None
    assert model.mode == "hard"
    for parameter in model.train().pruners.parameters():
        parameter.requires_grad_(False)
    assert model.mode == "hard", "frozen heads learn nothing from removal by degrees"
    ranking = pruned(**METHODS["uniform"])
    assert ranking.mode == ranking.train().mode == "hard"
    assert not list(ranking.pruners)
    with pytest.raises(RecipeError, match="has no mode soft"):
        ranking.mode = "soft"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": [0, 3]}, "nothing reads visual tokens after the last of 4 blocks"),
        ({"layers": [1, 0]}, "not ascending"),
        ({"layers": [1, 1]}, "not ascending"),
        ({"layers": [-2]}, "not ascending"),
        ({"layers": [-1], "method": "attention", "keep": 0.5}, "there is no attention to judge by"),
        ({"layers": [-1], "attention_weight": "fixed"}, "there is no attention to judge by"),
        ({"question": False, "attention_weight": "fixed"}, "hides it from heads"),
        ({"question": False, "method": "random", "keep": 0.5}, "is of heads, and method=random has none"),
        ({"layers": []}, "at least 1 entry"),
        ({"method": "random"}, "keep must say"),
        ({"inner": 9, "heads": 3}, "even multiple"),
        ({"keep": 0.0}, "greater than 0"),
        ({"threshold": 1.0}, "less than 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        pruned(**settings)


@pytest.mark.promise("vqa.hard-pruning")
@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_the_patches_that_enter_each_block_are_named(prepared, method):
    """As many as are counted, fewer and fewer, and of every sample those that it keeps alone."""
    model, batch = pruned(**METHODS[method]), prepared.batch
    model(batch)
    together, counts = model.kept_tokens, model.kept
    assert torch.equal(together[0], torch.arange(batch.media.total_tokens))
    assert [len(one) for one in together] == [int(count.sum()) for count in counts]
    assert len(together[0]) > len(together[1]) == len(together[2]) > len(together[3])
    assert set(together[3].tolist()) <= set(together[1].tolist())
    first = counts[0].cumsum(0) - counts[0]
    for row in range(batch.num_seqs):
        model(batch.select([row]))
        for block, alone in enumerate(model.kept_tokens):
            assert torch.equal(together[block].split(counts[block].tolist())[row] - first[row], alone)
    model.mode = "origin"
    model(batch)
    assert model.kept_tokens == []


def test_random_depends_on_the_id_of_the_sample_alone(prepared):
    model = pruned(**METHODS["random"])
    one = prepared.batch.select([4])
    other = prepare(ROWS, sample_ids=[70 + i for i in range(len(ROWS))]).batch.select([4])
    assert _chosen(model, one) == _chosen(model, one)
    assert _chosen(model, one) != _chosen(model, other)


@pytest.mark.parametrize("mode", ["soft", "hard"])
@torch.no_grad()
def test_low_precision_is_near(mode, prepared):
    settings = {"keep": 0.5} if mode == "hard" else {}
    model, batch = pruned(mode, layers=[1], **settings), prepared.batch
    exact = model.token_nll(batch)
    model = model.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model.token_nll(batch)
    assert low.isfinite().all()
    assert (low - exact).norm() < 0.1 * exact.norm()


def test_a_text_batch_runs_no_head():
    model = pruned().train()
    for head in model.pruners.values():
        head.register_forward_hook(lambda *_: pytest.fail("a head ran"))
    model.losses(from_sequences([[1, 2, 3], [4, 5]]))["cross_entropy"][0].backward()


@torch.no_grad()
def test_removed_cells_of_a_rectangle_become_padding(prepared):
    masks: list[Tensor] = []
    model, batch = pruned(), prepared.batch.pad("right")

    def look(module: Any, arguments: tuple[Any, ...]) -> None:
        masks.append(arguments[0].layout.attention_mask)

    for block in model.decoder.blocks:
        block.register_forward_pre_hook(look)
    assert model(batch).shape == (batch.total_tokens, WIDTH)
    counts = torch.stack([mask.sum(1) for mask in masks])
    assert torch.equal(counts[0] - counts, model.kept[0] - torch.stack(model.kept))
