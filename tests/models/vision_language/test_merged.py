"""Images become fewer visual tokens before the language model, sample by sample and image by image."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.gradients import assert_same_update
from tests.helpers.merging import BLOCKS, MERGES, WIDTH, merging
from tests.helpers.models import generate
from tests.helpers.vision import IMAGE, PATCH, VOCAB, Row, prepare
from unpad.batching.batch import RaggedBatch
from unpad.errors import RecipeError
from unpad.inference.engine import advance, prefill
from unpad.models import build_model, model_config
from unpad.models.vision_language.model import VisionLanguage
from unpad.nn.native import library
from unpad.proof.pruned import plain_pass
from unpad.recipes.training import GenerateSettings

# Images before, within and after the question, three in one row, none, a single patch, more slots than patches; the
# answers of the last two are predicted from an image.
ROWS: list[Row] = [
    ("1 5 <image> 7 8", [(3, 4)], "9 10"),
    ("2 3 4", [], "5 6"),
    ("7 <image> 8 9 <image> <image> 4", [(2, 3), (4, 1), (1, 3)], "1"),
    ("1 2 3 4 5 6 7 8 9 10 11 12 13 14 <image> 19", [(5, 5)], "20 21 22"),
    ("6", [], "3"),
    ("<image>", [(1, 1)], "3 4"),
    ("12 13 <image>", [(6, 2)], "8 2"),
]
# Tokens that 0.4 leaves of the images of every row; 5 per image for slots.
LEFT = [4, 0, 2 + 1 + 1, 10, 0, 1, 4]
every_merge = pytest.mark.parametrize("merge", MERGES)
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(scope="module")
def batch() -> RaggedBatch:
    return prepare(ROWS).batch


def left_rows(model: VisionLanguage, run: RaggedBatch) -> list[Tensor]:
    """Hidden states of each sequence, of the tokens that are left."""
    hidden, lengths = model(run), run.layout.lengths()
    patches = torch.zeros_like(lengths).index_add(0, run.media_seqs, run.media.layout.lengths())
    return list(hidden.split((lengths - patches + model.kept[-1]).tolist()))


# --------------------------------------------------------------------------- alone = together = a plain reference


@pytest.mark.promise("vqa.merge-simple", "vqa.merge-slots", "vqa.methods")
@pytest.mark.parametrize(
    ("merge", "prune", "mode"),
    [
        *((merge, "none", "merge_only") for merge in MERGES),
        ("simple", "learned", "soft"), ("slots", "learned", "hard"), ("similarity", "uniform", "hard"),
        ("question", "class_token", "hard"), (None, "class_token", "hard"),
    ],
)  # fmt: skip
def test_every_sample_equals_itself_alone_and_the_reference(merge, prune, mode, batch):
    model = merging(merge, mode, prune)
    alone = [batch.select([i]) for i in range(batch.num_seqs)]
    with torch.no_grad():
        together = left_rows(model, batch)
        kept = torch.stack(model.kept)  # (blocks, num_seqs)
        for sample, (one, row) in enumerate(zip(alone, together, strict=True)):
            plain = plain_pass(model, one, mode)
            torch.testing.assert_close(row, plain.hidden, **CLOSE)
            assert kept[:, sample].tolist() == plain.kept
            torch.testing.assert_close(model(one), row, **CLOSE)
        nll = torch.cat([model.token_nll(one) for one in alone])
        for run in (batch, batch.pad("right"), batch.pad("left", pad_to=50, pad_id=IMAGE)):
            torch.testing.assert_close(model.token_nll(run), nll, **CLOSE)
        with library.switched_off():
            torch.testing.assert_close(model.token_nll(batch), nll, **CLOSE)
    order = [3, 0, 6, 2, 5, 1, 4]
    shuffled = [batch.select(order[:3]), batch.select([]), batch.select(order[3:])]
    grads = assert_same_update(model, alone, [batch.pad("left", pad_id=7)], shuffled)
    if model.merger is not None and mode != "hard":
        assert all(grads[f"merger.{name}"].norm() > 1e-12 for name, _ in model.merger.named_parameters())


@pytest.mark.promise("vqa.visual-tokens")
@every_merge
@torch.no_grad()
def test_the_language_model_reads_as_many_tokens_as_promised(merge, batch):
    model = merging(merge)
    assert model.mode == model.train().mode == "merge_only"
    model.eval()
    model(batch)
    expected = [5 * len(row[1]) for row in ROWS] if merge == "slots" else LEFT
    assert [one.tolist() for one in model.kept] == [expected] * BLOCKS
    model.mode = "origin"
    assert model(batch).shape == (batch.total_tokens, WIDTH)
    assert model.kept == []


@pytest.mark.promise("vqa.visual-tokens")
@every_merge
@torch.no_grad()
def test_an_image_stays_at_its_own_place_and_text_where_it_was(merge, batch):
    reading = merging(merge)._read(batch)
    short, visual = reading.batch, reading.visual
    is_visual = torch.zeros(short.total_tokens, dtype=torch.bool)
    is_visual[visual.index] = True
    text = batch.input_ids != IMAGE
    for name in ("input_ids", "position_ids", "labels"):
        assert torch.equal(getattr(short, name)[~is_visual], getattr(batch, name)[text]), name
    assert torch.equal(short.position_ids[is_visual], batch.position_ids[batch.media_index[visual.source]])
    assert torch.equal(short.labels[short.target_index], batch.labels[batch.target_index])
    for seq, positions in enumerate(short.position_ids.split(short.layout.lengths().tolist())):
        assert (positions.diff() >= 0).all(), f"sequence {seq} is in order"
        assert (positions.diff() > 0).all() or merge == "slots", "only slots may share a position"
    owner = batch.media.layout.seq_of_token()[visual.source]
    assert torch.equal(owner, owner.sort()[0]), "images keep their order"


@torch.no_grad()
def test_leaving_all_is_no_merging(batch):
    for variant in ("similarity", "class_token"):
        model = merging(variant, ratio=1.0)
        merged = model(batch)
        model.mode = "origin"
        torch.testing.assert_close(merged, model(batch), **CLOSE)


@pytest.mark.promise("vqa.merge-question")
@pytest.mark.parametrize("merge", ["question", "slots"])
@torch.no_grad()
def test_the_question_has_a_say_and_the_answer_has_none(merge):
    model, seen = merging(merge), []
    for question, answers in (("7 8", ["9 10"]), ("7 8", ["33 40 2 1"]), ("7 8", None), ("30 41", ["9 10"])):
        reading = model._read(prepare([(f"1 5 <image> {question}", [(5, 5)], "")], answers=answers).batch)
        seen.append(reading.batch.inputs_embeds[reading.visual.index])
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
    assert (seen[3] - seen[0]).abs().max() > 1e-4


@pytest.mark.promise("vqa.methods")
def test_the_class_token_ranks_by_its_own_weights():
    """In a tower that has one; the patches that are left are those that it looks at most."""
    section = {
        "kind": "vision_language", "image_id": IMAGE, "merge": {"variant": "class_token", "ratio": 0.5},
        "vision": {
            "width": 8, "blocks": 2, "heads": 2, "hidden": 12, "patch": PATCH, "positions": "learned", "side": 4,
            "feature_layer": -1,
        },
        "language": {"width": WIDTH, "blocks": 1, "heads": 2},
    }  # fmt: skip
    torch.manual_seed(0)
    model = build_model(model_config(section), VOCAB).double().eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    media = prepare([("<image> 1", [(4, 4)], "2"), ("3 <image>", [(4, 4)], "2")]).batch.media
    weights: list[Tensor] = []

    def look(module: Any, arguments: tuple[Any, ...]) -> None:
        x, layout = arguments[0], arguments[1].layout
        q, k = module.queries_and_keys(x, None)
        for start, stop in zip(layout.cu_seqlens[:-1].tolist(), layout.cu_seqlens[1:].tolist(), strict=True):
            scores = torch.einsum("hd,khd->hk", q[start], k[start:stop]) / 2
            weights.append(scores.softmax(-1)[:, 1:].mean(0))

    model.tower.blocks[1].attention.register_forward_pre_hook(look)
    with torch.no_grad():
        features, received = model.tower.look(media, wants_attention=True)
        torch.testing.assert_close(received, torch.cat(weights), **CLOSE)
        assert torch.equal(features, model.tower(media))


# --------------------------------------------------------------------------- decoding


@pytest.mark.parametrize(
    ("merge", "prune", "mode"),
    [
        ("slots", "none", "merge_only"), ("simple", "learned", "hard"), ("question", "learned", "soft"),
        ("similarity", "none", "merge_only"),
    ],
)  # fmt: skip
@torch.no_grad()
def test_decoding_with_a_cache_equals_the_whole_pass(merge, prune, mode):
    """The last row has one patch and so, with slots, more tokens than it was announced with."""
    model, steps = merging(merge, mode, prune), 12
    rows: list[Row] = [*ROWS[:4], ("<image>", [(1, 1)], "")]
    ids = " ".join(str(3 + i) for i in range(steps + 1))
    whole = prepare([(row[0], row[1], ids) for row in rows]).batch
    expected = [plain_pass(model, whole.select([i]), mode).hidden for i in range(len(rows))]
    cache, hidden = prefill(model, prepare(rows, answers=None).batch, most=40 + steps)
    live = torch.arange(len(rows))
    for step in range(steps):
        torch.testing.assert_close(hidden, torch.stack([expected[row][step - steps - 1] for row in live]), **CLOSE)
        if step == 4:
            live = live[3:]
            cache.reorder(live)
        hidden = advance(model, cache, torch.full((cache.num_rows,), 3 + step))


@pytest.mark.promise("vqa.merge-slots")
@torch.no_grad()
def test_a_cache_grows_as_far_as_it_must_where_slots_are_more_than_patches():
    model, asked = merging("slots"), GenerateSettings(max_new_tokens=40, temperature=0)
    (ids,) = generate(model, prepare([ROWS[5]], answers=None).batch, asked, eos_id=-1)
    whole = prepare([(ROWS[5][0], ROWS[5][1], " ".join(map(str, ids)))]).batch
    assert model.logits(model(whole))[4:].argmax(1).tolist() == ids


# --------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"merge": {"variant": "slots"}}, "variant=slots needs slots"),
        ({"merge": {"variant": "slots", "slots": 4, "ratio": 0.5}}, "and no ratio"),
        ({"merge": {"variant": "simple"}}, "needs ratio"),
        ({"merge": {"variant": "simple", "ratio": 0.5, "slots": 3}}, "and no slots"),
        ({"merge": {"variant": "question", "ratio": 0.5, "inner": 9, "heads": 2}}, "not a multiple of heads"),
        ({"merge": {"variant": "class_token", "ratio": 0.5}, "vision": {"feature_layer": 0}}, "no block of it runs"),
    ],
)
def test_settings_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(RecipeError, match=message):
        model_config({"kind": "vision_language", **fields})


def test_modes_are_those_that_mean_something():
    assert merging(None).modes == ("origin",)
    assert merging("slots").modes == ("origin", "merge_only")
    assert merging("slots", prune="learned").modes == ("origin", "merge_only", "soft", "hard")
    assert merging(None, prune="uniform").modes == ("origin", "hard")
    with pytest.raises(RecipeError, match="has no mode merge_only\n  do: use origin or soft or hard"):
        merging(None, "merge_only", prune="learned")
