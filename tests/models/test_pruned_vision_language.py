"""Visual tokens leave the language model sample by sample: as if they had never been there, and nobody else's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.vision import IMAGE, PATCH, VOCAB, Row, prepare
from unpad.batch import RaggedBatch, from_sequences
from unpad.errors import RecipeError
from unpad.generate import advance, generate, prefill
from unpad.interchange.preprocess import Prepared
from unpad.layout import PaddedLayout, build_layout
from unpad.models import build_model, model_config
from unpad.models.vision_language import VisionLanguage, _Pruning
from unpad.native import library
from unpad.nn.block import Stream
from unpad.nn.rope import rotary_frequencies, rotary_table, rotate
from unpad.objective import WEIGHTS
from unpad.recipe import Generate
from unpad.step import accumulate

WIDTH, BLOCKS, HEADS, KV_HEADS = 32, 4, 2, 1
# Eight samples: images before, within and after the question, several, none, a single visual token; two prompts end
# with an image, from which the answer is then predicted.
ROWS: list[Row] = [
    ("1 5 <image> 7 8", [(3, 4)], "9 10"),
    ("<image> 3", [(2, 2)], "4 5 6 7 8 9 1 2"),
    ("2 3 4", [], "5 6"),
    ("7 <image> 8 9 11 <image> <image> 4", [(2, 3), (4, 1), (1, 3)], "1"),
    ("1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 <image> 19", [(5, 5)], "20 21 22"),
    ("6", [], "3"),
    ("<image>", [(1, 1)], "3 4"),
    ("12 13 14 <image>", [(6, 2)], "8 2"),
]
TEXT_ROWS = [2, 5]
METHODS: dict[str, dict[str, Any]] = {
    "learned": {"threshold": 0.5},
    "learned, top share": {"keep": 0.4},
    "random": {"method": "random", "keep": 0.4},
    "uniform": {"method": "uniform", "keep": 0.4},
    "attention": {"method": "attention", "keep": 0.4},
}
PATHS = {"native": nullcontext, "torch": library.switched_off}
both_paths = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def pruned(mode: str | None = None, positions: str = "rotary", blocks: int = BLOCKS, **prune: Any) -> VisionLanguage:
    section = {
        "kind": "vision_language", "image_id": IMAGE,
        "vision": {"width": 8, "blocks": 1, "heads": 2, "hidden": 12, "patch": PATCH, "positions": "grid"},
        "language": {
            "width": WIDTH, "blocks": blocks, "heads": HEADS, "kv_heads": KV_HEADS, "hidden": 24, "context": 64,
            "positions": positions,
        },
        "prune": {"layers": [0, 2], "inner": 8, "heads": 2, **prune},
    }  # fmt: skip
    torch.manual_seed(0)
    model = build_model(model_config(section), VOCAB)
    assert isinstance(model, VisionLanguage)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    for head in model.pruners.values():  # of a decided opinion, for some tokens and against others
        head.to_logit.weight.data.mul_(4)
    model = model.double().eval()
    model.mode = mode
    return model


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare(ROWS)


def left_rows(model: VisionLanguage, batch: RaggedBatch) -> list[Tensor]:
    """Hidden states of each sequence, of the tokens that are left."""
    hidden, lengths = model(batch), batch.layout.lengths()
    if model.kept:
        lengths = lengths - model.kept[0] + model.kept[-1]
    return list(hidden.split(lengths.tolist()))


def gradients(model: VisionLanguage, micros: Sequence[RaggedBatch]) -> tuple[dict[str, Tensor], dict[str, float]]:
    model.zero_grad()
    sums, counts = accumulate(model, micros, WEIGHTS, "fp32")
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return grads, {name: float(value) / counts[name] for name, value in sums.items()}


# --------------------------------------------------------------------------- a reference by masks


class Reference:
    """One sample computed densely, where nothing moves: in all later blocks removed keys have a bias of minus infinity.
    In soft mode keys have log p, and values are multiplied by p.

    Attributes:
        kept: visual tokens that entered each block.
        hidden: states of the tokens that are left, after the last norm.
    """

    def __init__(self, model: VisionLanguage, prepared: Prepared, sample: int) -> None:
        batch = model._read_images(prepared.batch.select([sample]))
        total, config = batch.total_tokens, model.config.language
        visual, there = torch.zeros(total, dtype=torch.bool), torch.ones(total, dtype=torch.bool)
        for start, stop in prepared.vision_spans[sample]:
            visual[start : stop + 1] = True
        last_of_prompt = total - 1 if prepared.answer_spans is None else prepared.answer_spans[sample][0]
        self.needed = torch.arange(total) == last_of_prompt
        question = ~visual & (torch.arange(total) <= last_of_prompt)
        frequencies = rotary_frequencies(config.head_dim, config.rope_theta, "none", 1.0)
        rotary = rotary_table(torch.arange(total), frequencies, torch.float64)
        x, self.kept, p = model.decoder._embed(batch), [], torch.ones(total, dtype=torch.float64)
        for index, block in enumerate(model.decoder.blocks):
            self.kept.append(int((visual & there).sum()))
            qkv = block.attention.to_qkv(block.norm_1(x)[1]).unflatten(-1, (-1, config.head_dim))
            q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
            if config.positions == "rotary":
                q, k = rotate(q, *rotary), rotate(k, *rotary)
            k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
            # A removed token still sees itself, or its row would be NaN; nobody sees that row.
            visible = torch.ones(total, total, dtype=torch.bool).tril() & (there | torch.eye(total, dtype=torch.bool))
            scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(config.head_dim) + p.log()
            weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
            x = x + block.attention.to_out(torch.einsum("hqk,khd->qhd", weights, v * p[:, None, None]).flatten(1))
            x = x + block.feed_forward(block.norm_2(x)[1])
            if index not in model.config.prune.layers or not bool(visual.any()):
                continue
            if model.mode == "soft":
                p[visual] *= self._judged(model, index, x, visual, question)[1]
                p[self.needed] = 1
            else:
                there = there & ~self._removed(model, index, x, weights, visual & there, question)
        self.hidden = model.decoder.norm(x)[1][there]

    @staticmethod
    def _judged(
        model: VisionLanguage, index: int, x: Tensor, visual: Tensor, question: Tensor
    ) -> tuple[Tensor, Tensor]:
        layouts = [build_layout(np.array([int(mask.sum())])) for mask in (visual, question)]
        head = model.pruners[str(index)]
        return head(x[visual], layouts[0], x[question], layouts[1], model.temperature)

    def _removed(
        self, model: VisionLanguage, index: int, x: Tensor, weights: Tensor, visual: Tensor, question: Tensor
    ) -> Tensor:
        """(total_tokens,) bool."""
        config, num = model.config.prune, int(visual.sum())
        if config.method == "attention":
            scores = weights[:, question.nonzero().flatten()[-1], visual].mean(0)
        else:
            scores, probability = self._judged(model, index, x, visual, question)
        scores = torch.where(self.needed[visual], math.inf, scores)
        kept = torch.zeros(num, dtype=torch.bool)
        if config.keep is None:
            kept = (probability > config.threshold) | self.needed[visual]
            kept[scores.argmax()] = True
        else:
            kept[scores.argsort(descending=True, stable=True)[: math.ceil(config.keep * num)]] = True
        removed = torch.zeros_like(visual)
        removed[visual] = ~kept
        return removed


ROWS_FOR_ATTENTION = [row for row in ROWS if row[0] != "<image>"]  # that question has no token to look with


@both_paths
@pytest.mark.parametrize("method", ["learned", "learned, top share", "attention"])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
@torch.no_grad()
def test_removal_equals_a_mask_over_what_is_removed(method: str, positions: str, path: Any) -> None:
    model = pruned(positions=positions, **METHODS[method])
    prepared = prepare(ROWS_FOR_ATTENTION if method == "attention" else ROWS)
    batch = prepared.batch
    with path():
        together = left_rows(model, batch)
        kept = torch.stack(model.kept)  # (blocks, num_seqs)
        for sample, hidden in enumerate(together):
            one = Reference(model, prepared, sample)
            torch.testing.assert_close(hidden, one.hidden, **CLOSE)
            torch.testing.assert_close(left_rows(model, batch.select([sample]))[0], one.hidden, **CLOSE)
            assert kept[:, sample].tolist() == one.kept
    assert kept.shape == (BLOCKS, batch.num_seqs)
    assert torch.equal(kept[1], kept[2]), "nothing happens between the heads"
    assert (kept[0] > kept[1]).any()
    assert (kept[2] > kept[3]).any(), "the second head removes some more"
    images = kept[:, kept[0] > 1]
    assert len({*(images[3] / images[0]).tolist()}) > 2, "samples keep different shares"


@torch.no_grad()
def test_tokens_that_are_left_keep_their_positions(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted anew after a removal they would give something else, and the reference would tell."""
    model, keep = pruned(), Stream.keep
    expected = torch.cat([Reference(model, prepared, sample).hidden for sample in range(len(ROWS))])

    def counted_anew(stream: Stream, kept: Tensor) -> Stream:
        left = keep(stream, kept)
        assert torch.equal(left.position_ids, stream.position_ids[kept])
        places = torch.cat([torch.arange(n) for n in left.layout.lengths().tolist()])
        return Stream(left.x, left.delta, left.layout, places, model.decoder._rotary(places, left.x.dtype))

    torch.testing.assert_close(model(prepared.batch), expected, **CLOSE)
    monkeypatch.setattr(Stream, "keep", counted_anew)
    assert (model(prepared.batch) - expected).abs().max() > 1e-3


# --------------------------------------------------------------------------- nothing removed, nothing changed


@both_paths
@pytest.mark.parametrize(
    "settings", [{"threshold": 0.0}, *({**METHODS[name], "keep": 1.0} for name in METHODS)], ids=["threshold", *METHODS]
)
@torch.no_grad()
def test_keeping_all_is_no_pruning(settings: dict[str, Any], path: Any, prepared: Prepared) -> None:
    model, batch = pruned(**settings), prepared.batch
    with path():
        for run in (batch, batch.pad("left", pad_id=IMAGE)):
            model.mode = "hard"
            hidden, nll = model(run), model.token_nll(run)
            assert torch.stack(model.kept).eq(model.kept[0]).all()
            model.mode = "off"
            assert torch.equal(hidden, model(run))
            assert torch.equal(nll, model.token_nll(run))
            assert model.kept == []


@torch.no_grad()
def test_samples_without_images_are_untouched_and_every_other_keeps_a_token(prepared: Prepared) -> None:
    model, batch = pruned(threshold=0.9999), prepared.batch
    hard = left_rows(model, batch)
    expected = [int(sum(rows * columns for rows, columns in row[1])) for row in ROWS]
    assert model.kept[0].tolist() == expected
    assert model.kept[-1].tolist() == [min(num, 1) for num in expected]
    model.mode = "off"
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


@pytest.mark.parametrize(
    ("mode", "method", "kernels"),
    [("soft", "learned", "native"), ("soft", "learned", "torch"), *(("hard", name, "native") for name in METHODS)],
)
def test_every_sample_equals_itself_alone_in_outputs_losses_and_gradients(
    mode: str, method: str, kernels: str, prepared: Prepared
) -> None:
    model, batch, path = pruned(mode, **METHODS[method]), prepared.batch, PATHS[kernels]
    alone = [batch.select([i]) for i in range(batch.num_seqs)]
    order = np.random.default_rng(0).permutation(batch.num_seqs).tolist()
    with path():
        with torch.no_grad():
            for one, row in zip(alone, left_rows(model, batch), strict=True):
                torch.testing.assert_close(left_rows(model, one)[0], row, **CLOSE)
            nll = torch.cat([model.token_nll(one) for one in alone])
            for run in (batch, batch.pad("right"), batch.pad("left", pad_to=50, pad_id=IMAGE)):
                torch.testing.assert_close(model.token_nll(run), nll, **CLOSE)
        grads, terms = gradients(model, alone)
        shuffled = [batch.select(order[:3]), batch.select([]), batch.select(order[3:])]
        for micros in ([batch], [batch.pad("left", pad_id=7)], shuffled):
            found, other_terms = gradients(model, micros)
            assert terms == pytest.approx(other_terms, abs=1e-10, rel=1e-10)
            for name, grad in grads.items():
                torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-10, msg=f"{name} {micros}")
    if mode == "soft":
        assert all(grads[name].norm() > 1e-12 for name in grads if name.startswith("pruners."))


@torch.no_grad()
def test_the_answer_has_no_say_and_the_question_has() -> None:
    model, seen = pruned("soft"), []
    for question, answers in (("7 8", ["9 10"]), ("7 8", ["33 40 2 1"]), ("7 8", None), ("30 41", ["9 10"])):
        batch = prepare([(f"1 5 <image> {question}", [(5, 5)], "")], answers=answers).batch
        pruning = model._pruning(batch)
        model.decoder(model._read_images(batch), None, pruning)
        seen.append(torch.stack(pruning._probabilities))
    torch.testing.assert_close(seen[1], seen[0], **CLOSE)
    torch.testing.assert_close(seen[2], seen[0], **CLOSE)
    assert (seen[3] - seen[0]).abs().max() > 1e-3


def _chosen(model: VisionLanguage, batch: RaggedBatch) -> list[int]:
    """The visual tokens that are left at the end."""
    pruning = model._pruning(batch)
    model.decoder(model._read_images(batch), None, pruning)
    return pruning._source.tolist()


# --------------------------------------------------------------------------- soft removal


@both_paths
@torch.no_grad()
def test_soft_removal_equals_its_definition(path: Any, prepared: Prepared) -> None:
    model = pruned("soft")
    model.temperature = 0.7
    with path():
        for sample, hidden in enumerate(left_rows(model, prepared.batch)):
            torch.testing.assert_close(hidden, Reference(model, prepared, sample).hidden, **CLOSE)


@both_paths
@torch.no_grad()
def test_probabilities_of_zero_and_one_are_removal(
    path: Any, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(pruning: _Pruning, index: int, stream: Stream) -> tuple[Tensor, Tensor]:
        source = pruning._source
        kept = source % 2 == 0 if index == 0 else (source % 4 == 0) | (source == 54)
        logits = torch.where(kept, 1e4, -1e4).double()
        return logits, torch.sigmoid(logits)

    monkeypatch.setattr(_Pruning, "_judge", judge)
    model, batch = pruned("soft"), prepared.batch
    source = torch.arange(batch.media.total_tokens)
    stays = torch.ones(batch.total_tokens, dtype=torch.bool)
    stays[batch.media_index] = (source % 4 == 0) | (source == 54) | (source == 66)
    with path():
        soft = model(batch)
        model.mode = "hard"
        torch.testing.assert_close(soft[stays], model(batch), **CLOSE)
        model.mode = "off"
        assert (soft - model(batch)).abs().max() > 0.01


def test_the_loss_of_the_task_reaches_every_parameter_of_the_heads(prepared: Prepared) -> None:
    model = pruned().train()
    assert model.mode == "soft"
    torch.manual_seed(0)
    model.losses(prepared.batch)["cross_entropy"][0].backward()
    for name, parameter in model.pruners.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.norm() > 1e-12, name
    assert model.kept == []


def test_the_gradient_of_the_heads_equals_finite_differences(prepared: Prepared) -> None:
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
def test_a_low_temperature_brings_soft_near_hard(prepared: Prepared) -> None:
    model, batch, distances = pruned(layers=[1]), prepared.batch, []
    expected = model.token_nll(batch)
    model.mode = "soft"
    for temperature in (1.0, 0.1, 1e-5):
        model.temperature = temperature
        distances.append(float((model.token_nll(batch) - expected).abs().max()))
    assert distances[2] < 1e-6 < distances[1] < distances[0]


# --------------------------------------------------------------------------- decoding


def prompts_and_whole(length: int) -> tuple[RaggedBatch, RaggedBatch]:
    """The prompts, and the same with the tokens 3, 4, 5 ... after each."""
    ids = " ".join(str(3 + i) for i in range(length + 1))  # the last is only a label
    return prepare(ROWS, answers=None).batch, prepare([(row[0], row[1], ids) for row in ROWS]).batch


@both_paths
@pytest.mark.parametrize("method", ["learned", "attention"])
@torch.inference_mode()
def test_decoding_with_a_cache_equals_the_whole_pass(method: str, path: Any) -> None:
    model = pruned(**METHODS[method])
    prompts, whole = prompts_and_whole(12)
    with path():
        rows = left_rows(model, whole)
        assert any(len(row) < n for row, n in zip(rows, whole.layout.lengths().tolist(), strict=True))
        cache, hidden = prefill(model, prompts, most=64)
        assert cache.lengths.tolist() == prompts.layout.lengths().tolist()
        counted = [one.tolist() for one in model.kept]
        for step in range(12):
            torch.testing.assert_close(hidden, torch.stack([row[step - 13] for row in rows]), **CLOSE)
            if step in (3, 8):
                live = np.ones(cache.num_rows, bool)
                live[[0, cache.num_rows // 2]] = False
                rows = [rows[row] for row in cache.keep(live)]
            if step == 5:
                cache.reorder(torch.tensor([1, 1, 0, 3]))
                rows = [rows[1], rows[1], rows[0], rows[3]]
            hidden = advance(model, cache, torch.full((cache.num_rows,), 3 + step))
        assert [one.tolist() for one in model.kept] == counted


@torch.inference_mode()
def test_the_cache_is_smaller_by_what_was_removed() -> None:
    model, prompts = pruned(method="uniform", keep=0.25, layers=[0]), prepare(ROWS, answers=None).batch
    cache, _ = prefill(model, prompts, most=prompts.layout.max_seqlen + 5)
    left = prompts.layout.lengths() - model.kept[0] + model.kept[-1]
    per_token = len(ROWS) * 2 * KV_HEADS * (WIDTH // HEADS) * 8  # keys and values in fp64
    longest = prompts.layout.max_seqlen
    assert int(left.max()) < longest - 10
    assert cache.num_bytes == per_token * (longest + 5 + (BLOCKS - 1) * (int(left.max()) + 5))
    model.mode = "off"
    whole, _ = prefill(model, prompts, most=longest + 5)
    assert whole.num_bytes == per_token * BLOCKS * (longest + 5)


@both_paths
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0, "beams": 3}])
def test_eight_prompts_are_continued_as_each_alone(settings: dict[str, Any], path: Any) -> None:
    model, prompts = pruned(), prepare(ROWS, answers=None).batch
    asked = Generate(max_new_tokens=8, **settings)
    with path():
        together = generate(model, prompts, asked, eos_id=7)
        for sample, ids in enumerate(together):
            one = prompts.select([sample])
            assert generate(model, one, asked, eos_id=7, indices=[sample]) == [ids]
        model.mode = "off"
        assert generate(model, prompts, asked, eos_id=7) != together


def test_text_is_continued_as_without_pruning() -> None:
    model, asked = pruned(), Generate(max_new_tokens=5, temperature=0)
    expected = generate(model.decoder, [[1, 2, 3], [4]], asked, eos_id=-1)
    assert generate(model, [[1, 2, 3], [4]], asked, eos_id=-1) == expected


# --------------------------------------------------------------------------- settings


def test_modes_follow_training_unless_chosen() -> None:
    model = pruned()
    assert model.mode == "hard"
    assert model.train().mode == "soft"
    model.mode = "off"
    assert model.eval().mode == "off"
    model.mode = None
    assert model.mode == "hard"
    ranking = pruned(**METHODS["uniform"])
    assert ranking.mode == ranking.train().mode == "hard"
    assert not list(ranking.pruners)
    with pytest.raises(RecipeError, match="uniform has no probabilities"):
        ranking.mode = "soft"


def test_a_model_without_pruning_has_nothing_of_it() -> None:
    language = {"width": WIDTH, "blocks": 2, "heads": HEADS}
    model = build_model(model_config({"kind": "vision_language", "language": language}), VOCAB)
    assert isinstance(model, VisionLanguage)
    assert model.mode == "off"
    assert not any(name.startswith("pruners") for name in model.state_dict())
    with pytest.raises(RecipeError, match="no prune section"):
        model.mode = "hard"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": [0, 3]}, "nothing reads visual tokens after the last of 4 blocks"),
        ({"layers": [1, 0]}, "not ascending"),
        ({"layers": [1, 1]}, "not ascending"),
        ({"layers": [-1]}, "not ascending"),
        ({"layers": []}, "at least 1 item"),
        ({"method": "random"}, "keep must say"),
        ({"inner": 9, "heads": 3}, "even multiple"),
        ({"keep": 0.0}, "greater than 0"),
        ({"threshold": 1.0}, "less than 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        pruned(**settings)


def test_soft_removal_does_not_decode() -> None:
    with pytest.raises(RecipeError, match="no cache"):
        generate(pruned("soft"), prepare(ROWS, answers=None).batch, Generate(max_new_tokens=2), eos_id=-1)


@torch.no_grad()
def test_random_depends_on_the_id_of_the_sample_alone(prepared: Prepared) -> None:
    model = pruned(**METHODS["random"])
    one = prepared.batch.select([4])
    other = prepare(ROWS, sample_ids=[70 + i for i in range(len(ROWS))]).batch.select([4])
    assert _chosen(model, one) == _chosen(model, one)
    assert _chosen(model, one) != _chosen(model, other)


@pytest.mark.parametrize("mode", ["soft", "hard"])
@torch.no_grad()
def test_low_precision_is_near(mode: str, prepared: Prepared) -> None:
    settings = {"keep": 0.5} if mode == "hard" else {}
    model, batch = pruned(mode, layers=[1], **settings), prepared.batch
    exact = model.token_nll(batch)
    model = model.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model.token_nll(batch)
    assert low.isfinite().all()
    assert (low - exact).norm() < 0.1 * exact.norm()


def test_a_text_batch_runs_no_head() -> None:
    model = pruned().train()
    for head in model.pruners.values():
        head.register_forward_hook(lambda *_: pytest.fail("a head ran"))
    model.losses(from_sequences([[1, 2, 3], [4, 5]]))["cross_entropy"][0].backward()


@torch.no_grad()
def test_removed_cells_of_a_rectangle_become_padding(prepared: Prepared) -> None:
    masks: list[Tensor] = []
    model, batch = pruned(), prepared.batch.pad("right")

    def look(module: Any, arguments: tuple[Any, ...]) -> None:
        assert isinstance(arguments[2], PaddedLayout)
        masks.append(arguments[2].attention_mask)

    for block in model.decoder.blocks:
        block.register_forward_pre_hook(look)
    assert model(batch).shape == (batch.total_tokens, WIDTH)
    counts = torch.stack([mask.sum(1) for mask in masks])
    assert torch.equal(counts[0] - counts, model.kept[0] - torch.stack(model.kept))
