"""The certificate of a recipe that learns from pairs of replies."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.pairs import write_pairs
from tests.helpers.replies import example, learner
from unpad.batching.batch import RaggedBatch
from unpad.data.replies import Replies
from unpad.nn.preference import Pairs
from unpad.proof.certificate import prove
from unpad.proof.line import Certificate
from unpad.proof.recipe import prove_recipe
from unpad.recipes.training import strategy_names

SMALL = ["model.dropout=0", "tokenizer.vocab_size=400"]


def failed(certificate: Certificate) -> list[str]:
    return [line.name for line in certificate.lines if line.passed is False]


@pytest.mark.promise("pairs.certificate")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_recipe_of_pairs_passes_with_every_strategy(tmp_path, precision):
    certificate = prove_recipe(str(write_pairs(tmp_path)), [*SMALL, f"precision={precision}"])
    assert certificate.passed, failed(certificate)
    names = [line.name for line in certificate.lines]
    for strategy in strategy_names():
        assert f"plan {strategy} = alone" in names
    for claim in ("padded left = alone", "split into micro-batches, one empty = alone"):
        assert claim in names
    assert "no gradient crosses between sequences" in names


def crossed(part: Pairs) -> Pairs:
    """Every rejected reply against the chosen one of the pair before it."""
    rejected = (~part.chosen).nonzero().flatten()
    pair = part.pair.clone()
    pair[rejected] = part.pair[rejected].roll(1)
    return replace(part, pair=pair)


def with_moved_references(part: Pairs) -> Pairs:
    """Every reply has the reference of the one before."""
    return replace(part, reference=part.reference.roll(1))


@pytest.mark.promise("pairs.certificate")
@pytest.mark.parametrize("fault", [crossed, with_moved_references])
def test_replies_or_references_crossed_between_neighbouring_pairs_fail(tmp_path, monkeypatch, fault):
    def with_faulty_pairs(self: Replies, batch: RaggedBatch) -> RaggedBatch:
        made = original(self, batch)
        return made.with_part(fault(made.require(Pairs))) if made.num_seqs > 2 else made

    original = Replies.with_pairs
    monkeypatch.setattr(Replies, "with_pairs", with_faulty_pairs)
    assert "plan pack = alone" in failed(prove_recipe(str(write_pairs(tmp_path)), SMALL))


@pytest.mark.promise("pairs.certificate")
def test_a_plan_that_splits_pairs_fails(tmp_path, monkeypatch):
    monkeypatch.setattr("unpad.proof.sample.plan", lambda *args, bundles, **known: split_plan(*args, **known))
    from unpad.batching.plan import plan as split_plan

    certificate = prove_recipe(str(write_pairs(tmp_path)), [*SMALL, "plan.tokens_per_micro=64"])
    assert not certificate.passed


def test_a_model_is_proved_on_a_batch_of_pairs():
    model, batch = learner(), example()
    certificate = prove(model, batch)
    assert certificate.passed, failed(certificate)


def test_a_loss_that_sees_the_batch_fails(monkeypatch):
    def over_the_batch(nll: torch.Tensor, batch: RaggedBatch, beta: float, smoothing: float) -> object:
        part = batch.require(Pairs)
        moved = replace(part, reference=part.reference + 0.1 * part.reference.mean() * part.chosen)
        return original(nll, batch.with_part(moved), beta, smoothing)

    from unpad.models import decoder

    original = decoder.pair_terms
    monkeypatch.setattr(decoder, "pair_terms", over_the_batch)
    assert not prove(learner(), example()).passed
