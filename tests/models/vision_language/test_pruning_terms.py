"""What teaches the heads reaches them through the model's own losses, and nobody else learns from it."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.pruning import ROWS, WIDTH, pass_of, pruned
from tests.helpers.vision import prepare
from unpad.batching.batch import RaggedBatch
from unpad.batching.layout import build_layout
from unpad.errors import RecipeError
from unpad.models.vision_language import prune
from unpad.models.vision_language.losses import TERMS as ADVERSARY
from unpad.models.vision_language.losses import relevance
from unpad.models.vision_language.model import VisionLanguage
from unpad.models.vision_language.prune import PruneConfig
from unpad.models.vision_language.prune_pass import BlockRecord, PrunePass
from unpad.nn.segments import segment_mean
from unpad.proof.pruned import plain_pass
from unpad.training.step import accumulate

JUDGED: dict[str, Any] = {"discriminator": {"layers": [-1, 1], "inner": 8}}
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
NUM_WITH_IMAGES = sum(bool(row[1]) for row in ROWS)


@pytest.fixture(scope="module")
def batch() -> RaggedBatch:
    return prepare(ROWS).batch


def asked(*names: str, **prune: Any) -> VisionLanguage:
    """A model in training whose next update trains these terms."""
    model = pruned(**{**JUDGED, **prune}).train()
    torch.manual_seed(0)
    model.begin_step(0, 100, dict.fromkeys(names, 1.0))
    return model


def changed(model: VisionLanguage, batch: RaggedBatch, weights: dict[str, float]) -> set[str]:
    """The parameters that one update with weight decay changes."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    optimizer.zero_grad()
    model.begin_step(0, 100, weights)
    accumulate(model, [batch.select([0, 1, 2]), batch.select([]), batch.select([3, 4, 5, 6, 7])], weights, "fp32")
    optimizer.step()
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


@pytest.mark.promise("vqa.prune-heads")
@pytest.mark.parametrize("name", ["cross_entropy", "sparsity", "token_count", "binarisation", "adversarial"])
def test_every_term_reaches_every_parameter_of_every_head(name, batch):
    model = asked(name, target=0.01)
    model.losses(batch)[name][0].backward()
    for head, parameter in model.pruners.named_parameters():
        assert parameter.grad is not None, head
        assert parameter.grad.norm() > 1e-12, head


@pytest.mark.promise("vqa.discriminator")
def test_a_step_of_the_discriminator_changes_only_it_and_one_against_it_all_but_it(batch):
    model = pruned(**JUDGED).train()
    names = {name for name, _ in model.named_parameters()}
    own = {name for name in names if name.startswith("discriminator.")}
    assert changed(model, batch, {"discriminator": 1.0}) == own
    against = changed(model, batch, {"adversarial": 1.0})
    assert not against & own
    assert {name for name in names if name.startswith("pruners.")} <= against


@pytest.mark.promise("vqa.discriminator")
def test_one_backward_pass_gives_each_side_its_own(batch):
    found = []
    for names in (ADVERSARY, ["adversarial"], ["discriminator"]):
        model = asked(*ADVERSARY)
        terms = model.losses(batch)
        torch.stack([terms[name][0] for name in names]).sum().backward()
        found.append({name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name] + found[2][name])
        assert not found[1][name].any() or not found[2][name].any(), name


@pytest.mark.promise("vqa.discriminator")
def test_the_adversary_is_asked_only_where_an_update_wants_it(batch):
    model, passes = asked("cross_entropy", "sparsity"), []
    model.decoder.register_forward_hook(lambda *_: passes.append(1))
    terms, counts = model.losses(batch), model.count_targets(batch)
    assert len(passes) == 1
    assert {name: count for name, (_, count) in terms.items()} == counts
    assert [counts[name] for name in ADVERSARY] == [0, 0]
    model.begin_step(1, 100, {"adversarial": 0.5})
    terms, counts = model.losses(batch), model.count_targets(batch)
    assert len(passes) == 3
    assert {name: count for name, (_, count) in terms.items() if name in counts} == counts
    assert {name for name, (_, count) in terms.items() if count == NUM_WITH_IMAGES} == {
        "sparsity", "token_count", "binarisation", *ADVERSARY, "real_accuracy", "fake_accuracy",
    }  # fmt: skip
    model.eval()
    assert {name for name, count in model.count_targets(batch).items() if count} == {"cross_entropy", "nll"}
    assert {name for name, (_, count) in model.losses(batch).items() if count} == {"cross_entropy", "nll"}


def test_without_a_discriminator_its_terms_are_none_of_the_models():
    assert set(pruned().weights) == {"cross_entropy", "sparsity", "token_count", "binarisation"}
    assert pruned().weights["sparsity"] > 0
    assert pruned(method="uniform", keep=0.5).weights == {"cross_entropy": 1.0}
    assert [pruned(**JUDGED).weights[name] for name in ADVERSARY] == [0, 0]


@pytest.mark.promise("vqa.discriminator")
@torch.no_grad()
def test_what_it_compares_is_the_text_of_both_passes(batch):
    """Text of the whole model, and of the pruned one; block 0 prunes, so what block 1 and the last make differs."""
    model = asked(*ADVERSARY).eval()
    model.mode = "soft"
    seen: list[Tensor] = []
    model.discriminator.judge.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    model.losses(batch)
    for pooled, mode in zip(seen, ("origin", "soft"), strict=False):
        model.mode = mode
        reading = model._read(batch)
        text = torch.ones(batch.total_tokens, dtype=torch.bool)
        text[batch.media_index] = False
        watch = BlockRecord([1, 3], text.nonzero().flatten(), model._pruning(reading))
        model.decoder(reading.batch, None, watch)
        layout, rows = batch.layout.keep(text), [i for i, row in enumerate(ROWS) if row[1]]
        expected = torch.stack([model.discriminator.pool(one, layout) for one in watch.states], 1)[rows]
        torch.testing.assert_close(pooled, expected, **CLOSE)
    assert (seen[0] - seen[1]).abs().max() > 1e-4


@pytest.mark.promise("vqa.prune-losses")
def test_terms_of_a_batch_are_those_of_its_samples(batch):
    model = asked(*ADVERSARY).eval()
    model.mode = "soft"
    alone = [batch.select([i]) for i in range(batch.num_seqs)]
    weights, found = dict.fromkeys(model.weights, 1.0), []
    for micros in (
        alone,
        [batch],
        [batch.pad("left", pad_id=3)],
        [batch.select([5, 3, 1]), batch.select([7, 6, 4, 2, 0])],
    ):
        model.zero_grad()
        sums, counts = accumulate(model, micros, weights, "fp32")
        grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((counts, {name: float(value) for name, value in sums.items()}, grads))
    for counts, sums, grads in found[1:]:
        assert counts == found[0][0]
        assert sums == pytest.approx(found[0][1], rel=1e-10, abs=1e-10)
        torch.testing.assert_close(grads, found[0][2], rtol=1e-9, atol=1e-10)


# --------------------------------------------------------------------------- relevance


def relevant(**prune: Any) -> VisionLanguage:
    """A model whose heads learn relevance, in the mode for it but with the fixed draw of evaluation."""
    return pruned("relevance", **{"method": "relevance", "keep": 0.5, **prune})


@pytest.mark.promise("vqa.relevance")
def test_relevance_is_that_of_the_plain_reference_for_every_sample(batch):
    model = relevant(layers=[-1, 1])
    total, count = model.losses(batch)["relevance"]
    alone = [plain_pass(model, batch.select([sample]), "relevance").terms for sample in range(batch.num_seqs)]
    expected = [terms["relevance"][0] for terms in alone if "relevance" in terms]
    assert count == len(expected) == NUM_WITH_IMAGES
    torch.testing.assert_close(total, torch.stack(expected).sum(), **CLOSE)


@pytest.mark.promise("vqa.relevance")
def test_what_is_found_is_the_difference_that_a_tokens_weight_makes(batch, monkeypatch):
    model, weights = relevant(layers=[1]), torch.linspace(0.1, 0.9, 25, dtype=torch.float64)
    one = batch.select([4])  # with 25 patches
    monkeypatch.setattr(prune, "drawn_noise", lambda *_: weights.logit())

    def loss() -> tuple[Tensor, PrunePass]:
        reading = model._read(one)
        pruning = model._pruning(reading)
        return model.decoder.losses(reading.batch, pruning)["cross_entropy"][0], pruning

    total, pruning = loss()
    [found] = pruning.found(total)
    for place in (0, 7, 24):
        ends = []
        for step in (1e-5, -2e-5):
            weights[place] += step
            ends.append(float(loss()[0].detach()))
        weights[place] += 1e-5
        assert float(found[place]) == pytest.approx(-(ends[0] - ends[1]) / 2e-5, rel=1e-5)
    assert found.min() < 0 < found.max()


@pytest.mark.promise("vqa.relevance")
def test_the_term_is_the_cross_entropy_with_shares_of_what_falls():
    layout = build_layout(np.array([3, 0, 2, 2]))
    found, logits = torch.tensor([2.0, -5.0, 6.0, 1.0, 1.0, -1.0, 0.0]), torch.tensor([1.0, 0, 2, 300, 301, 1, 2])
    total, count = relevance(found, logits.requires_grad_(), layout)
    first, last = logits[:3].log_softmax(0), logits[3:5].log_softmax(0)
    torch.testing.assert_close(total, -(0.25 * first[0] + 0.75 * first[2] + 0.5 * last.sum()))
    assert count == 3, "a sample whose loss falls with no token costs nothing, and counts"
    [gradient] = torch.autograd.grad(total, logits)
    torch.testing.assert_close(gradient[:3], first.exp().detach() - torch.tensor([0.25, 0, 0.75]))
    assert not gradient[5:].any()


@pytest.mark.promise("vqa.relevance")
def test_heads_alone_learn_relevance_and_the_rest_its_own_loss(batch):
    model = pruned(method="relevance", keep=0.5).train()
    assert model.mode == "relevance"
    assert model.weights == {"cross_entropy": 1.0, "relevance": 1.0}
    heads = {name for name in {name for name, _ in model.named_parameters()} if name.startswith("pruners.")}
    assert changed(model, batch, {"relevance": 1.0}) == heads
    assert not changed(model, batch, {"cross_entropy": 1.0}) & heads
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in heads)
    terms = model.losses(batch)
    assert not terms["cross_entropy"][0].requires_grad, "no second way back through a model that stays as it is"
    assert {name: count for name, (_, count) in terms.items()} == model.count_targets(batch)
    for parameter in model.pruners.parameters():
        parameter.requires_grad_(False)
    assert model.mode == "hard", "frozen heads remove"
    assert "relevance" not in {name for name, (_, count) in model.losses(batch).items() if count}


# --------------------------------------------------------------------------- the course of an update


@pytest.mark.promise("vqa.temperature")
@pytest.mark.parametrize(("step", "wanted"), [(0, 1.0), (25, 0.55), (50, 0.1), (99, 0.1)])
def test_the_temperature_follows_the_update(step, wanted):
    model = pruned(temperature={"start": 1, "end": 0.1, "share": 0.5})
    assert model.begin_step(step, 100, {"cross_entropy": 1.0}) == []
    assert float(model.temperature) == pytest.approx(wanted)
    assert float(model.state_dict()["temperature"]) == float(model.temperature), "a checkpoint knows it"


@pytest.mark.promise("vqa.temperature")
def test_by_default_the_temperature_stays_and_evaluation_draws_nothing(batch):
    model = pruned()
    model.begin_step(70, 100, {})
    assert float(model.temperature) == 1
    state = torch.get_rng_state()
    for mode in model.modes:
        model.mode = mode
        model.losses(batch)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.promise("vqa.reinit")
def test_the_discriminator_is_drawn_anew_as_often_as_asked(batch):
    model = asked("discriminator", discriminator={"layers": [1], "inner": 8, "reinit": 1.0})
    before = [p.detach().clone() for p in model.discriminator.parameters()]
    drawn = model.begin_step(1, 100, {"discriminator": 1.0})
    assert {id(p) for p in drawn} == {id(p) for p in model.discriminator.parameters()}
    weights = [(p, q) for p, q in zip(drawn, before, strict=True) if p.dim() == 2]
    assert all(not torch.equal(p, q) for p, q in weights)
    state = torch.get_rng_state()
    assert model.begin_step(2, 100, {"cross_entropy": 1.0}) == [], "only where it trains"
    assert asked("discriminator").begin_step(2, 100, {"discriminator": 1.0}) == []
    torch.set_rng_state(state)
    model = asked("discriminator", discriminator={"layers": [1], "inner": 8, "reinit": 0.3})
    times = sum(bool(model.begin_step(step, 400, {"discriminator": 1.0})) for step in range(400))
    assert 90 < times < 150


# --------------------------------------------------------------------------- targets, and what they do


def test_the_target_is_what_keep_leaves_unless_it_is_said():
    assert PruneConfig(layers=[0, 2]).wanted == (0.5, "ratio")
    assert PruneConfig(layers=[0, 2], keep=0.5).wanted == (0.25, "ratio")
    assert PruneConfig(layers=[0], keep=0.5, target=0.3).wanted == (0.3, "ratio")
    assert PruneConfig(layers=[0], target=12).wanted == (12, "tokens")


@pytest.mark.promise("vqa.prune-losses")
@pytest.mark.parametrize(
    ("settings", "wanted"), [({"target": 3}, "tokens"), ({"target": 0.2, "one_sided": False}, "share")]
)
def test_sparsity_of_the_model_is_its_closed_form(settings, wanted, batch):
    model = pruned("soft", **settings)
    terms, pruning = model.losses(batch), pass_of(model, batch)
    shares = segment_mean(pruning.keep(), pruning.visual_layout)
    tokens = torch.tensor([sum(rows * columns for rows, columns in row[1]) for row in ROWS])
    gap = shares - ((3 / tokens.clamp_min(1)).clamp_max(1) if wanted == "tokens" else 0.2)
    gap = gap.clamp_min(0) if wanted == "tokens" else gap
    torch.testing.assert_close(terms["sparsity"][0], gap.square()[tokens > 0].sum())
    torch.testing.assert_close(terms["token_count"][0], shares[tokens > 0].sum())


@pytest.mark.promise("vqa.prune-losses")
def test_updates_with_sparsity_bring_the_share_to_its_target(batch):
    model = pruned(layers=[1], target=0.25, one_sided=False).float().train()
    optimizer = torch.optim.AdamW(model.pruners.parameters(), lr=3e-3)
    shares, weights = [], {"sparsity": 1.0}
    for step in range(60):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model.begin_step(step, 60, weights)
        sums, counts = accumulate(model, [batch], weights, "fp32")
        optimizer.step()
        shares.append(float(sums["token_count"]) / counts["token_count"])
    # An answer is predicted from the only patch of one sample and from one of twelve of another; these stay.
    assert sum(shares[:3]) / 3 > 0.5
    assert sum(shares[-5:]) / 5 < 0.42


@pytest.mark.promise("vqa.prune-attention")
@pytest.mark.parametrize("weight", ["fixed", "learned"])
@pytest.mark.parametrize("mode", ["soft", "hard"])
def test_the_attention_of_the_question_has_a_say_in_soft_and_hard(weight, mode, batch):
    model, without = (pruned(mode, attention_weight=name, layers=[0, 1]) for name in (weight, "none"))
    with torch.no_grad():
        hidden = model(batch).split((batch.layout.lengths() - model.kept[0] + model.kept[-1]).tolist())
        for sample, row in enumerate(hidden):
            torch.testing.assert_close(row, plain_pass(model, batch.select([sample]), mode).hidden, **CLOSE)
        padded, flat = model.token_nll(batch.pad("left", pad_id=5)), model.token_nll(batch)
        torch.testing.assert_close(padded, flat, **CLOSE)
        assert (flat - without.token_nll(batch)).abs().max() > 5e-3
    if mode == "soft":
        model.losses(batch)["cross_entropy"][0].backward()
        for head in model.pruners.values():
            learns = isinstance(head.attention_weight, torch.nn.Parameter)
            assert learns == (weight == "learned")
            assert not learns or head.attention_weight.grad.norm() > 1e-12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"discriminator": {"layers": [4]}}, "none of 4 blocks"),
        ({"discriminator": {"layers": [0]}}, "nothing to compare"),
        ({"discriminator": {"layers": [-4]}}, "nothing to compare"),
        ({"method": "uniform", "keep": 0.5, "discriminator": {}}, "has none"),
        ({"method": "uniform", "keep": 0.5, "target": 0.5}, "has none"),
        ({"method": "relevance", "keep": 0.5, "target": 0.5}, "has none"),
        ({"method": "relevance"}, "keep must say"),
        ({"method": "uniform", "keep": 0.5, "attention_weight": "fixed"}, "has none"),
        ({"target": 0}, "greater than 0"),
        ({"temperature": {"end": 0.1, "share": 0.5}}, "more than 0, at the start"),
        ({"temperature": 0.0}, "more than 0"),
        ({"temperature": {"end": 1}}, "either steps or share"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        pruned(**settings)


def test_a_discriminator_of_one_layer_has_the_width_of_the_model():
    model = pruned(discriminator={"layers": [-1, 3], "inner": 4})
    assert [layer.weight.shape for layer in model.discriminator.judge.squeeze] == [(4, WIDTH)]
