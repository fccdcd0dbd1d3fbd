"""The chunked loss equals the plain one, in value and in every gradient."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.paths import PATHS, Waits, on
from unpad.nn import losses
from unpad.nn.losses import chunk_rows, cross_entropy, target_nll, token_nll
from unpad.nn.native import library


def problem(num: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """hidden (num, 5), weight (11, 5), labels (num,)."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((num, 5), (11, 5))
    )
    return hidden, weight, torch.randint(0, 11, (num,), generator=generator)


@pytest.fixture(params=[*PATHS, "card"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "card":
        monkeypatch.setattr(losses, "_waits", lambda x: True)
        monkeypatch.setattr(losses, "memory_of", lambda device: 0)  # 64 rows
    with on("native" if request.param == "native" else "torch"):
        yield request.param


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_BYTES", 1)  # 64 rows, the least


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num=st.integers(0, 200), smoothing=st.sampled_from([0.0, 0.1, 0.9]), seed=st.integers(0, 99))
def test_value_and_gradients_equal_the_plain_loss(num, smoothing, seed):
    hidden, weight, labels = problem(num, seed=seed)
    inputs = [hidden, weight]
    logits = F.linear(hidden, weight)
    expected = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    expected_grads = torch.autograd.grad(expected * 3.5, inputs)
    loss, nll = cross_entropy(hidden, weight, labels, smoothing)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-10)
    torch.testing.assert_close(nll, F.cross_entropy(logits, labels, reduction="sum"), rtol=1e-12, atol=1e-10)
    assert not nll.requires_grad
    torch.testing.assert_close(torch.autograd.grad(loss * 3.5, inputs), expected_grads, rtol=1e-10, atol=1e-12)
    each = token_nll(hidden.detach(), weight.detach(), labels)
    torch.testing.assert_close(each, F.cross_entropy(logits, labels, reduction="none").detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.promise("train.smoothing")
def test_label_smoothing_has_its_closed_form():
    """Uniform logits: every target costs log(vocabulary), smoothed or not; else (1 - e) nll + e mean(-log p)."""
    hidden, weight = (values.detach() for values in problem(7)[:2])
    labels = problem(7)[2]
    loss, nll = cross_entropy(hidden * 0, weight, labels, 0.3)
    assert float(loss) == pytest.approx(float(nll)) == pytest.approx(7 * torch.log(torch.tensor(11.0)).item())
    loss, nll = cross_entropy(hidden, weight, labels, 0.3)
    log_p = (hidden @ weight.t()).log_softmax(-1)
    assert float(loss) == pytest.approx(0.7 * float(nll) + 0.3 * float(-log_p.mean(-1).sum()))


def test_frozen_inputs_get_no_gradient_and_the_others_the_same():
    hidden, weight, labels = problem(100)
    expected = torch.autograd.grad(cross_entropy(hidden, weight, labels)[0], [hidden, weight])
    for keep in (0, 1):
        inputs = [hidden.detach(), weight.detach()]
        inputs[keep].requires_grad_()
        loss, _ = cross_entropy(inputs[0], inputs[1], labels)
        loss.backward()
        torch.testing.assert_close(inputs[keep].grad, expected[keep])
        assert inputs[1 - keep].grad is None
    with torch.no_grad():
        assert not cross_entropy(hidden, weight, labels)[0].requires_grad


@pytest.mark.promise("train.precisions")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_at_least_fp32_and_gradients_have_the_inputs_dtype(dtype):
    hidden, weight, labels = problem(300, dtype=dtype)
    exact = F.cross_entropy(F.linear(hidden.double(), weight.double()), labels, reduction="sum")
    loss, nll = cross_entropy(hidden, weight, labels)
    assert loss.dtype == nll.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=1e-6 if dtype == torch.float32 else 3e-3)
    loss.backward()
    assert (hidden.grad.dtype, weight.grad.dtype) == (dtype, dtype)


@pytest.mark.parametrize("num", [1024, 1025, 1087, 2000])
def test_rows_that_complete_a_product_change_nothing(num, monkeypatch):
    found = []
    for rows in (64, 1 << 20):  # completed, and too few to be
        monkeypatch.setattr(losses, "ROUND_ROWS", rows)
        hidden, weight, labels = problem(num)
        loss, nll = cross_entropy(hidden, weight, labels, 0.1)
        each = token_nll(hidden.detach(), weight.detach(), labels)
        found.append((loss.detach(), nll, each, *torch.autograd.grad(loss * 2, [hidden, weight])))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_a_label_of_next_to_no_probability_costs_what_it_should():
    hidden = torch.tensor([[1.0, 0.0]], dtype=torch.float32)
    weight = torch.tensor([[0.0, 0.0], [200.0, 0.0], [90.0, 0.0], [99.25, 0.0]], dtype=torch.float32)
    # Above 87 nats fp32 has few digits of the probability, and above 104 none.
    for label, cost in ((0, 200.0), (2, 110.0), (3, 100.75), (1, 0.0)):
        loss, nll = cross_entropy(hidden, weight, torch.tensor([label]))
        assert float(loss) == pytest.approx(cost, abs=1e-4)
        assert float(nll) == pytest.approx(cost, abs=1e-4)


def test_the_weights_gradient_of_many_chunks_is_summed_in_fp32():
    hidden, weight, labels = problem(64 * 150, torch.bfloat16)
    exact = [values.detach().double().requires_grad_() for values in (hidden, weight)]
    F.cross_entropy(F.linear(*exact), labels, reduction="sum").backward()
    cross_entropy(hidden, weight, labels)[0].backward()
    assert float((weight.grad.double() - exact[1].grad).norm() / exact[1].grad.norm()) < 2.5e-3  # rounded once


def test_a_card_computes_many_targets_in_few_chunks_for_its_size():
    most = {ids: -(-16_384 // chunk_rows(80 << 30, 2, ids)) for ids in (32_000, 50_304, 128_256, 151_936)}
    assert most == {32_000: 1, 50_304: 2, 128_256: 4, 151_936: 4}
    assert chunk_rows(8 << 30, 2, 32_000) * 2 * 32_000 <= 256 << 20


def test_no_chunk_waits_for_a_card(path):
    for dtype, smoothing in ((torch.bfloat16, 0.0), (torch.float32, 0.0), (torch.bfloat16, 0.1)):
        inputs = problem(300, dtype)
        with library.switched_off(), Waits() as waits:
            cross_entropy(*inputs, smoothing)[0].backward()
            target_nll(*inputs).sum().backward()
        assert bool(waits.found) == (path != "card")


def sure(dtype: torch.dtype, num: int = 300, share: float = 0.8) -> tuple[Tensor, Tensor, Tensor]:
    """A problem whose first targets, this share, are all but certain; the others are drawn."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 16, generator=generator)
    labels = torch.randint(0, 40, (num,), generator=generator)
    hidden = torch.randn(num, 16, generator=generator) * 0.1
    certain = int(share * num)
    hidden[:certain] += weight[labels[:certain]] * 3
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def leave_out_of_small_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_waits", lambda x: False)  # a card leaves out no target
    monkeypatch.setattr(losses, "memory_of", lambda device: None)
    monkeypatch.setattr(losses, "LEAST_VOCAB", 40)
    monkeypatch.setattr(losses, "CHUNK_BYTES", 1 << 20)  # one chunk


def gradients(*arguments: Any) -> tuple[Tensor, ...]:
    hidden, weight, *_ = arguments
    return torch.autograd.grad(cross_entropy(*arguments)[0], [hidden, weight])


@pytest.mark.promise("train.bf16-head")
def test_bf16_leaves_out_targets_whose_gradient_is_below_its_rounding(monkeypatch):
    leave_out_of_small_problems(monkeypatch)
    problem = sure(torch.bfloat16)
    found = gradients(*problem)
    with losses.all_rows():
        whole = gradients(*problem)
    exact = gradients(*(x.detach().double().requires_grad_() for x in problem[:2]), problem[2])
    assert int((found[0] == 0).all(1).sum()) > 150, "no target was left out"
    assert not (whole[0] == 0).all(1).any()
    for fewer, every, truth in zip(found, whole, exact, strict=True):
        assert float((fewer - every).norm() / every.norm()) < 1.5 * losses.NEGLIGIBLE
        assert float((fewer.double() - truth).norm()) < 1.1 * float((every.double() - truth).norm())


@pytest.mark.promise("train.bf16-head")
@pytest.mark.parametrize(("dtype", "smoothing"), [(torch.float32, 0), (torch.float64, 0), (torch.bfloat16, 0.1)])
def test_wider_and_smoothed_losses_leave_out_no_target(monkeypatch, dtype, smoothing):
    """The gradient of a smoothed loss is not small where the model is sure."""
    leave_out_of_small_problems(monkeypatch)
    problem = sure(dtype)
    found = gradients(*problem, smoothing)
    with losses.all_rows():
        assert all(map(torch.equal, found, gradients(*problem, smoothing)))


def test_targets_left_out_of_each_chunk_add_up(monkeypatch):
    leave_out_of_small_problems(monkeypatch)
    monkeypatch.setattr(losses, "CHUNK_BYTES", 1)
    monkeypatch.setattr(losses, "ROUND_ROWS", 8)
    hidden, weight, labels = sure(torch.bfloat16, num=1000)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    hidden, labels = hidden.detach()[order].requires_grad_(), labels[order]
    found = gradients(hidden, weight, labels)
    with losses.all_rows():
        whole = gradients(hidden, weight, labels)
    assert int((found[0] == 0).all(1).sum()) > 500
    for fewer, every in zip(found, whole, strict=True):
        assert float((fewer - every).norm() / every.norm()) < 1.5 * losses.NEGLIGIBLE
