"""The loss of pairs of replies: its closed form, and its independence of batching."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.attention_cases import error
from tests.helpers.replies import BETA, example, learner, replies
from unpad.batching.batch import RaggedBatch, concatenate
from unpad.models.decoder import Decoder
from unpad.models.objective import Objective
from unpad.nn.losses import CHUNK_BYTES, target_nll, token_nll
from unpad.nn.preference import Pairs, pair_terms
from unpad.training.step import accumulate


def log_p(model: Decoder, batch: RaggedBatch, index: int) -> Tensor:
    """Log-probability of one reply, from its logits alone."""
    alone = batch.select([index])
    log_probs = F.log_softmax(model(alone) @ model.embed.weight.t(), -1)
    return log_probs[alone.target_index, alone.labels[alone.target_index]].sum()


def by_definition(model: Decoder, batch: RaggedBatch, smoothing: float = 0.0) -> Tensor:
    """Mean loss of the pairs: every reply in a forward pass of its own, and the formula of the paper."""
    part, total = batch.require(Pairs), torch.zeros((), dtype=torch.float64)
    for index in range(0, batch.num_seqs, 2):
        gains = [log_p(model, batch, row) - part.reference[row] for row in (index, index + 1)]
        h = BETA * (gains[0] - gains[1])
        total = total - (1 - smoothing) * F.logsigmoid(h) - smoothing * F.logsigmoid(-h)
    return total / (batch.num_seqs // 2)


def gradient_of(model: Decoder, micros: list[RaggedBatch]) -> tuple[Tensor, dict[str, float]]:
    model.zero_grad()
    sums, counts = accumulate(model, micros, Objective.of(model).final(model), "fp32")
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return flat, {name: float(sums[name]) / counts[name] for name in sums}


def sums(model: Decoder, batch: RaggedBatch) -> dict[str, float]:
    return {name: float(total) for name, (total, _) in model.losses(batch).items()}


@pytest.mark.promise("pairs.gradient")
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_batched_pairs_have_the_gradient_of_pair_by_pair(smoothing):
    model, batch = learner(), example()
    model.label_smoothing = smoothing
    loss = by_definition(model, batch, smoothing)
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    ways = {
        "flat": [batch],
        "two micro-batches": [batch.select([2, 3]), batch.select([6, 7, 0, 1, 4, 5])],
        "padded": [batch.pad("right")],
        "padded left": [batch.pad("left", pad_to=50)],
        "in another order": [batch.select([7, 1, 0, 4, 2, 6, 5, 3])],
        "joined": [concatenate([batch.select([4, 5, 2, 3]), batch.select([0, 1, 6, 7])])],
    }
    for name, micros in ways.items():
        got, terms = gradient_of(model, micros)
        assert error(got, wanted) < 1e-10, name
        assert terms["preference"] == pytest.approx(float(loss.detach()), rel=1e-12), name


@pytest.mark.promise("pairs.gradient")
def test_crossed_pairs_have_another_gradient():
    model, batch = learner(), example()
    part = batch.require(Pairs)
    crossed = batch.with_part(replace(part, pair=torch.where(part.chosen, part.pair, part.pair.roll(2))))
    wanted, got = gradient_of(model, [batch])[0], gradient_of(model, [crossed])[0]
    assert error(got, wanted) > 1e-3


def test_a_micro_batch_with_half_a_pair_is_refused():
    model, batch = learner(), example()
    with pytest.raises(AssertionError, match="both replies"):
        model.losses(batch.select([0, 1, 2]))


@torch.no_grad()
def test_terms_are_sums_over_pairs_and_over_the_tokens_of_replies():
    model, batch = learner(), example()
    terms = {name: (float(total), count) for name, (total, count) in model.losses(batch).items()}
    counts = model.count_targets(batch)
    assert {name: count for name, (_, count) in terms.items()} == counts
    scores = torch.stack([log_p(model, batch, row) for row in range(8)]).detach()
    margins = BETA * (scores - batch.require(Pairs).reference).view(4, 2).diff(dim=1)[:, 0].neg()
    assert terms["margin"] == (pytest.approx(float(margins.sum())), 4)
    assert terms["accuracy"] == (float((margins > 0).sum()), 4)
    assert terms["nll"] == (pytest.approx(float(-F.logsigmoid(margins).sum())), 4)
    masks = [int(batch.select([row]).num_targets) for row in range(8)]
    assert terms["cross_entropy"] == (pytest.approx(float(-scores[::2].sum())), sum(masks[::2]))
    assert terms["rejected"] == (pytest.approx(float(-scores[1::2].sum())), sum(masks[1::2]))


@torch.no_grad()
def test_a_pair_drawn_twice_counts_twice():
    model, batch = learner(), example()
    once, twice = sums(model, batch), sums(model, concatenate([batch, batch]))
    assert twice == pytest.approx({name: 2 * total for name, total in once.items()})


@torch.no_grad()
def test_filler_is_of_no_pair():
    model, batch = learner(), example()
    part = replies([2], [0.0], numbers=[-1])
    filler = part.with_part(replace(part.require(Pairs), chosen=torch.tensor([False])))
    filler = replace(filler, loss_mask=torch.zeros_like(filler.loss_mask), target_index=filler.target_index[:0])
    assert model.count_targets(concatenate([batch, filler])) == model.count_targets(batch)
    assert sums(model, concatenate([batch, filler])) == pytest.approx(sums(model, batch))


def test_the_chosen_replies_may_be_learned_as_well():
    model, batch = learner(), example()
    objective = Objective.of(model, {"cross_entropy": 0.5})
    assert objective.final(model) == {"preference": 1.0, "cross_entropy": 0.5}
    model.zero_grad()
    accumulate(model, [batch], objective.final(model), "fp32")
    got = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    chosen = [0, 2, 4, 6]
    num = sum(batch.select([row]).num_targets for row in chosen)
    loss = by_definition(model, batch) - 0.5 * sum((log_p(model, batch, row) for row in chosen), torch.zeros(())) / num
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    assert error(got, wanted) < 1e-10


def test_a_model_that_learns_preferences_can_learn_tokens_again():
    model = learner()
    assert list(Objective.of(model).final(model)) == ["preference"]
    model.learn(None)
    assert list(model.losses(example())) == ["cross_entropy", "nll"]
    assert list(Objective.of(model).final(model)) == ["cross_entropy"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_target_nll_has_the_gradient_of_log_softmax_over_many_chunks(dtype, monkeypatch):
    monkeypatch.setattr("unpad.nn.losses.CHUNK_BYTES", 1)
    assert CHUNK_BYTES > 1
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1100, 8, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(31, 8, generator=generator, dtype=dtype).requires_grad_()
    labels = torch.randint(0, 31, (1100,), generator=generator)
    scale = torch.randn(1100, generator=generator, dtype=dtype)
    nll = target_nll(hidden, weight, labels)
    assert torch.equal(nll.detach(), token_nll(hidden.detach(), weight.detach(), labels))
    got = torch.autograd.grad((nll * scale).sum(), [hidden, weight])
    plain = F.cross_entropy(hidden @ weight.t(), labels, reduction="none")
    wanted = torch.autograd.grad((plain * scale).sum(), [hidden, weight])
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    assert max(error(a, b) for a, b in zip(got, wanted, strict=True)) < bound


def test_a_frozen_head_gets_no_gradient():
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4)
    target_nll(hidden, weight, torch.tensor([1, 2, 3, 4, 5])).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_terms_in_low_precision_are_summed_in_double():
    batch = example()
    terms = pair_terms(torch.full((batch.num_targets,), 1e-3, dtype=torch.float32), batch, BETA, 0.0)
    assert {total.dtype for total, _ in terms.values()} == {torch.float64}
