"""Losses of rows of logits, and their gradient in place, by every path against torch in fp64."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.grid import pairs
from tests.helpers.paths import NATIVE_DTYPES, PATHS, Path, on
from tests.helpers.scores import random_scores
from unpad.nn.losses import _score
from unpad.nn.native import library

pytestmark = pytest.mark.promise("speed.kernels")

BF16, FP32, DOUBLE = torch.bfloat16, torch.float32, torch.float64
SHAPES = [(0, 16), (1, 1), (1, 512), (3, 7), (17, 16), (50, 33), (9, 1000), (5, 8003)]


@pytest.fixture(params=PATHS, autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[Path]:
    with on(request.param):
        yield request.param


def error(actual: Tensor, expected: Tensor) -> float:
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1.0)) if actual.numel() else 0.0


@pytest.mark.parametrize(
    ("shape", "dtype", "smoothing", "path"), pairs(SHAPES, [BF16, FP32, DOUBLE], [0.0, 0.1], PATHS), indirect=["path"]
)
@pytest.mark.usefixtures("path")
def test_losses_and_gradient_are_those_of_torch(shape, dtype, smoothing):
    logits, labels = random_scores(*shape, dtype)
    exact = logits.clone().double().requires_grad_()  # logits are overwritten
    loss, nll = _score(logits, labels, smoothing, True)
    expected = F.cross_entropy(exact, labels, label_smoothing=smoothing, reduction="none")
    expected.sum().backward()
    plain = F.cross_entropy(exact.detach(), labels, reduction="none")
    bound = 1e-12 if dtype == DOUBLE else 1e-6
    assert loss.dtype == nll.dtype == torch.promote_types(dtype, torch.float32)
    assert error(loss, expected.detach()) < bound
    assert error(nll, plain) < bound
    grad_error = (logits.double() - exact.grad).abs()
    if dtype == DOUBLE:
        assert (grad_error <= 1e-13).all()
    elif dtype == FP32:  # the error of exp grows with the logit's distance from the largest, some 40 at most
        assert (grad_error <= exact.grad.abs() * 4e-6 + 1e-7).all()
    else:  # each number rounded once, after a subtraction in fp32
        assert (grad_error <= exact.grad.abs() / 256 + 1e-7).all()


@pytest.mark.parametrize("dtype", [BF16, FP32, DOUBLE], ids=["bf16", "fp32", "double"])
def test_logits_stay_when_no_gradient_is_wanted(dtype):
    logits, labels = random_scores(20, 33, dtype)
    before = logits.clone()
    loss, nll = _score(logits, labels, 0.1, False)
    again = _score(logits, labels, 0.1, True)
    assert torch.equal(loss, again[0])
    assert torch.equal(nll, again[1])
    assert not torch.equal(logits, before)
    logits.copy_(before)
    _score(logits, labels, 0.1, False)
    assert torch.equal(logits, before)


@pytest.mark.skipif("native" not in PATHS, reason=library.describe())
@pytest.mark.parametrize("dtype", [dtype for dtype in NATIVE_DTYPES if dtype != DOUBLE], ids=str)
def test_kernels_count_thousands_of_unlikely_tokens_beside_a_likely_one(path, dtype):
    """Each has 4e-8 of the likeliest's probability, too little for fp32 to add to 1; together they have 3.3e-4."""
    if path == "torch":
        pytest.skip("torch rounds many of them away")
    logits = torch.full((1, 8000), -17.0, dtype=dtype)
    logits[0, 0] = 0.0
    expected = F.cross_entropy(logits.double(), torch.tensor([0]), reduction="none")
    loss, _ = _score(logits, torch.tensor([0]), 0.0, True)
    assert float(loss) == pytest.approx(float(expected), rel=0.02)
    assert float(logits[0, 0]) == pytest.approx(float(-expected), rel=0.02)


@pytest.mark.parametrize(
    ("column", "dtype", "path"), pairs([0, 15, 16, 32], [BF16, FP32, DOUBLE], PATHS), indirect=["path"]
)
def test_a_nan_anywhere_makes_its_row_nan(dtype, column):
    logits, labels = random_scores(3, 33, dtype)
    logits[1, column] = float("nan")
    loss, nll = _score(logits, labels, 0.0, True)
    assert loss.isnan().tolist() == nll.isnan().tolist() == [False, True, False]
    assert logits[1].isnan().all()
    assert logits[::2].isfinite().all()


def test_infinite_logits_count_as_in_torch():
    logits, _ = random_scores(3, 33, BF16)
    labels = torch.tensor([1, 2, 3])
    logits[0, 5], logits[1, 5] = float("-inf"), float("inf")
    expected = F.cross_entropy(logits.double(), labels, reduction="none")
    loss, _ = _score(logits, labels, 0.0, True)
    assert not loss[1].isfinite()
    assert error(loss[::2], expected[::2]) < 1e-6
    assert logits[0, 5].abs() < 1e-30


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[3e4, 2.9e4, -3e4]], dtype=BF16)
    expected = F.cross_entropy(logits.double(), torch.tensor([1]), reduction="none")
    loss, _ = _score(logits, torch.tensor([1]), 0.0, True)
    assert error(loss, expected) < 1e-6


def test_threads_change_nothing():
    logits, labels = random_scores(300, 500, BF16)
    other = logits.clone()
    one = _score(logits, labels, 0.1, True)
    torch.set_num_threads(2)
    two = _score(other, labels, 0.1, True)
    assert torch.equal(logits, other)
    assert torch.equal(one[0], two[0])


def test_autograd_notices_that_logits_changed():
    logits, labels = random_scores(3, 7, DOUBLE)
    version = logits._version
    _score(logits, labels, 0.0, True)
    assert logits._version > version
