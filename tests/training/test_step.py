"""One step: any split into micro-batches is the same step, clipping bounds it, and a bad one changes nothing."""

import math
import traceback
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.conftest import random_batch, tiny_model
from unpad.batching.batch import RaggedBatch, from_sequences
from unpad.errors import OutOfMemoryError
from unpad.models.decoder import Decoder
from unpad.nn.losses import Terms
from unpad.recipes.training import OptimSettings
from unpad.training.optim import make_optimizer
from unpad.training.step import LossScaler, StepResult, accumulate, train_step

WEIGHTS = {"cross_entropy": 1.0}


def step(model: Decoder, micros: list[RaggedBatch], clip: float | None = 1.0, **options: object) -> StepResult:
    optimizer = options.pop("optimizer", None) or make_optimizer(model, OptimSettings(lr=1e-3))
    return train_step(model, micros, optimizer, **{"weights": WEIGHTS, "precision": "fp32", "clip": clip, **options})


def values(model: Decoder) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


# Adam divides a gradient by its own size: below eps that would show the rounding of gradients that are nearly zero.
@pytest.mark.promise("train.micro-batches")
@pytest.mark.parametrize(("dtype", "eps", "tolerance"), [(torch.float64, 1e-6, 1e-12), (torch.float32, 1e-3, 1e-6)])
@settings(deadline=None, max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=9),
    cuts=st.sets(st.integers(0, 9)),
    seed=st.integers(0, 9),
)
def test_any_split_into_micro_batches_is_the_same_adam_step(dtype, eps, tolerance, lengths, cuts, seed):
    batch = random_batch([20, *lengths], seed)
    bounds = sorted({0, batch.num_seqs, *(cut for cut in cuts if cut < batch.num_seqs)})
    parts = [batch.select(range(a, b)) for a, b in pairwise(bounds)]
    whole, split = tiny_model(dtype), tiny_model(dtype)
    optimizers = [make_optimizer(model, OptimSettings(lr=1e-3, eps=eps)) for model in (whole, split)]
    for _ in range(2):
        one = step(whole, [batch], optimizer=optimizers[0])
        many = step(split, [batch.select([]), *parts], optimizer=optimizers[1])
        assert one.num_targets == many.num_targets == batch.num_targets
        assert one.terms == pytest.approx(many.terms, rel=tolerance)
        assert one.grad_norm == pytest.approx(many.grad_norm, rel=max(tolerance, 1e-12) * 10)
    for name, value in values(whole).items():
        assert (values(split)[name] - value).abs().max() <= tolerance, name


@pytest.mark.promise("train.micro-batches")
def test_the_divisor_is_the_step_s_own_number_of_targets():
    """A short last micro-batch weighs by its targets; a mean of means would give it the weight of a full one."""
    batch = random_batch([30, 30, 2], share=1.0)
    model = tiny_model()
    accumulate(model, [batch.select([0, 1]), batch.select([2])], WEIGHTS, "fp32")
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    for part in (batch.select([0, 1]), batch.select([2])):
        total, count = model.losses(part)["cross_entropy"]
        (total / count / 2).backward()
    mean_of_means = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    (model.losses(batch)["cross_entropy"][0] / batch.num_targets).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert (mean_of_means - expected).norm() > 0.1 * expected.norm()


def test_every_term_is_divided_by_its_own_count():
    class TwoTerms(nn.Module):
        """Each batch has its number of targets for one term, and half as many plus one for the other."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(3.0))

        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            return super().parameters(recurse)

        def count_targets(self, batch: RaggedBatch) -> dict[str, int]:
            return {"a": batch.num_targets, "b": batch.num_targets // 2 + 1, "shown": 1}

        def losses(self, batch: RaggedBatch) -> Terms:
            counts = self.count_targets(batch)
            return {
                "a": (self.a * counts["a"], counts["a"]), "b": (self.b * counts["b"], counts["b"]),
                "shown": (self.a * 100, 1),
            }  # fmt: skip

    model = TwoTerms()
    micros = [random_batch([9], share=1.0), random_batch([4, 7], share=1.0)]
    sums, counts = accumulate(model, micros, {"a": 1.0, "b": 0.5}, "fp32")
    assert (model.a.grad, model.b.grad) == (
        pytest.approx(1.0),
        pytest.approx(0.5),
    )  # `shown` has no weight: no gradient
    assert counts == {"a": 17, "b": 10, "shown": 2}
    assert float(sums["b"]) / counts["b"] == pytest.approx(3.0)


@pytest.mark.promise("train.micro-batches")
def test_parameters_do_not_move_before_the_update():
    model = tiny_model()
    before = values(model)
    accumulate(model, [random_batch([5, 9]), random_batch([3])], WEIGHTS, "fp32")
    assert same(values(model), before)


@pytest.mark.promise("train.gradient-norm", "train.clipping")
@pytest.mark.parametrize("limit", [1e-3, 0.5, 1e3])
def test_the_reported_norm_is_before_clipping_and_what_is_applied_is_within_the_limit(limit):
    model = tiny_model()
    batch = random_batch([12, 8, 15])
    accumulate(model, [batch], WEIGHTS, "fp32")
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    result = step(model, [batch.select([0]), batch.select([1, 2])], clip=limit)
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-10)
    applied = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert applied <= limit * (1 + 1e-9)
    assert applied == pytest.approx(min(limit, float(norm)), rel=1e-5)


@pytest.mark.promise("train.clipping")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing(value, where):
    model = tiny_model(torch.float32)
    optimizer = make_optimizer(model, OptimSettings(lr=1e-3))
    assert step(model, [random_batch([9])], optimizer=optimizer).updated
    before = values(model)
    moments = [{k: v.clone() for k, v in state.items()} for state in optimizer.state.values()]
    if where == "gradient":
        handle = model.norm.weight.register_hook(lambda gradient: gradient * value)
    else:
        model.embed.weight.data[7] = value
        before = values(model)
        handle = None
    result = step(model, [from_sequences([[7, 8, 9]]), random_batch([9])], optimizer=optimizer)
    assert not result.updated
    assert all(torch.equal(value, values(model)[name]) or name == "embed.weight" for name, value in before.items())
    for state, kept in zip(optimizer.state.values(), moments, strict=True):
        assert all(torch.equal(state[name], kept[name]) for name in kept)
    if handle is not None:
        handle.remove()
        assert step(model, [random_batch([9])], optimizer=optimizer).updated


def test_an_infinite_loss_with_finite_gradients_changes_nothing():
    model = tiny_model(torch.float32)
    before, right = values(model), model.losses

    def overflowing(batch: RaggedBatch) -> Terms:
        terms = right(batch)
        return terms | {"cross_entropy": (terms["cross_entropy"][0] + torch.inf, terms["cross_entropy"][1])}

    model.losses = overflowing
    result = step(model, [random_batch([9])])
    assert math.isfinite(result.grad_norm)
    assert not result.updated
    assert same(values(model), before)


@pytest.mark.promise("train.refusals")
def test_a_step_without_targets_is_legal_and_changes_nothing():
    model = tiny_model()
    before = values(model)
    batch = random_batch([6, 3], share=0.0)
    for micros in ([batch], [batch.select([])], []):
        result = step(model, micros)
        assert (result.num_targets, result.grad_norm, result.updated) == (0, 0.0, True)
    assert same(values(model), before)


def failing_with(error: RuntimeError) -> Decoder:
    """A model whose losses raise `error`, caused by a KeyError."""
    model = tiny_model()

    def losses(batch: RaggedBatch) -> Terms:
        raise error from KeyError("the cause")

    model.losses = losses
    return model


def test_out_of_memory_names_the_largest_micro_batch():
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    micros = [random_batch([9, 5]), random_batch([30, 4, 2]), random_batch([3])]
    with pytest.raises(OutOfMemoryError, match="a micro-batch of 3 sequences, 33 tokens, the longest 29") as caught:
        step(failing_with(error), micros)
    assert "plan.tokens_per_micro" in caught.value.fix
    assert "GiB" in caught.value.where
    assert caught.value.__cause__ is error


class ForeignError(RuntimeError):
    """An error of a foreign layer."""


def test_an_error_of_another_kind_keeps_its_type_its_cause_and_its_traceback():
    error = ForeignError("a plain fault")
    with pytest.raises(ForeignError) as caught:
        step(failing_with(error), [random_batch([9, 5])])
    assert caught.value is error
    assert isinstance(error.__cause__, KeyError)
    assert [entry.name for entry in caught.traceback][-1] == "losses"
    report = "".join(traceback.format_exception(error))
    assert "the cause" in report
    assert "direct cause of the following exception" in report


# --------------------------------------------------------------------------- precision


def test_the_scale_halves_on_overflow_and_doubles_after_a_while():
    scaler = LossScaler(scale=8.0, growth_interval=3)
    scaler.update(False)
    assert (scaler.scale, scaler.good_steps) == (4.0, 0)
    for _ in range(2):
        scaler.update(True)
    assert (scaler.scale, scaler.good_steps) == (4.0, 2)
    scaler.update(True)
    assert (scaler.scale, scaler.good_steps) == (8.0, 0)
    for _ in range(20):
        scaler.update(False)
    assert scaler.scale == 1.0


@pytest.mark.promise("train.precisions")
@pytest.mark.parametrize(("precision", "scaler", "near"), [("fp16", LossScaler(1024.0), 0.01), ("bf16", None, 0.05)])
def test_a_step_in_low_precision_is_about_that_of_fp32_and_no_scale_is_left(precision, scaler, near):
    batch = random_batch([12, 8, 15])
    exact, low = tiny_model(torch.float32), tiny_model(torch.float32)
    expected = step(exact, [batch], clip=None)
    result = step(low, [batch], clip=None, precision=precision, scaler=scaler)
    assert result.updated
    assert result.terms["nll"] == pytest.approx(expected.terms["nll"], rel=0.01)
    assert result.terms["nll"] != expected.terms["nll"]
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=near)
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in low.parameters())


@pytest.mark.promise("train.precisions")
def test_an_fp16_overflow_skips_the_step_and_the_next_scale_is_smaller():
    model = tiny_model(torch.float32)
    scaler = LossScaler(scale=2.0**60)
    before = values(model)
    results = []
    while not results or not results[-1].updated:
        assert same(values(model), before)
        results.append(step(model, [random_batch([12, 8])], precision="fp16", scaler=scaler))
        assert len(results) < 70
    assert len(results) > 10
    assert scaler.scale == 2.0 ** (60 - len(results) + 1)
    assert not same(values(model), before)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_of_frozen_parameters_are_forgotten(precision):
    """What an earlier stage left in them counts neither in the norm nor against the next stage's gradients."""
    model, batch = tiny_model(torch.float32, width=32, heads=2), random_batch([9, 5, 12])
    parts = [batch.select([0]), batch.select([1, 2])]
    step(model, [batch], precision=precision)
    model.embed.weight.requires_grad_(False)
    left = step(model, parts, precision=precision)
    assert model.embed.weight.grad is None
    norm = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert left.grad_norm * min(1.0, 1.0 / left.grad_norm) == pytest.approx(min(float(norm), 1.0), rel=1e-3)


def test_a_model_of_bf16_parameters_trains():
    model, batch = tiny_model(torch.float32, width=32, heads=2).to(torch.bfloat16), random_batch([9, 5, 12])
    optimizer = make_optimizer(model, OptimSettings(lr=1e-2))
    losses = [step(model, [batch], optimizer=optimizer).terms["nll"] for _ in range(8)]
    assert losses[-1] < losses[0]
