"""The optimizer kernels of unpad/native/adamw.py against torch.optim.AdamW and fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unpad.native import library
from unpad.native.adamw import adamw_, grad_square_sum

pytestmark = pytest.mark.skipif(not library.enabled(), reason=library.describe())

BF16 = torch.bfloat16
SHAPES = [(1,), (7,), (16,), (33, 5), (0,), (256, 70), (3, 16384)]  # the last is more than one chunk
LRS = [1e-3, 1e-2, 3e-3, 1e-3, 1e-3, 2e-3, 1e-3]
DECAYS = [0.1, 0.0, 0.3, 0.1, 0.0, 0.0, 0.1]
BETAS, EPS = (0.9, 0.95), 1e-8


def tensors(seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * scale for shape in SHAPES]


class Ours:
    """State of the kernel over several updates."""

    def __init__(self, copies: list[Tensor | None]) -> None:
        self.values = tensors(0)
        self.exp_avgs = [torch.zeros_like(value) for value in self.values]
        self.exp_avg_sqs = [torch.zeros_like(value) for value in self.values]
        self.copies = copies
        self.steps = 0

    def step(self, grads: list[Tensor], grad_scale: float = 1.0) -> None:
        self.steps += 1
        adamw_(
            self.values,
            grads,
            self.exp_avgs,
            self.exp_avg_sqs,
            self.copies,
            lrs=LRS,
            weight_decays=DECAYS,
            steps=[self.steps] * len(SHAPES),
            betas=BETAS,
            eps=EPS,
            grad_scale=grad_scale,
        )


def copies() -> list[Tensor | None]:
    """A bf16 copy of every second value."""
    return [torch.empty(shape, dtype=BF16) if i % 2 else None for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_several_updates_are_those_of_torch(dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        ours = Ours(copies())
        exact = [value.double().requires_grad_() for value in tensors(0)]
        groups = [{"params": [p], "lr": lr, "weight_decay": wd} for p, lr, wd in zip(exact, LRS, DECAYS, strict=True)]
        optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=EPS)
        for step in range(5):
            grads = [grad.to(dtype) for grad in tensors(step + 1, 0.1)]
            ours.step(grads, 0.5)
            for parameter, grad in zip(exact, grads, strict=True):
                parameter.grad = grad.double() * 0.5
            optimizer.step()
            for value, copy in zip(ours.values, ours.copies, strict=True):
                assert copy is None or torch.equal(copy, value.to(BF16))
        start = tensors(0)
        for i, parameter in enumerate(exact):  # what was learned, not what was there before, to fp32 rounding
            moved = parameter.detach() - start[i].double()
            assert (ours.values[i].double() - parameter).norm() <= 1e-4 * moved.norm() + 1e-7 * start[i].norm()
            state = optimizer.state[parameter]
            assert torch.allclose(ours.exp_avgs[i].double(), state["exp_avg"], rtol=1e-5, atol=1e-8)
            assert torch.allclose(ours.exp_avg_sqs[i].double(), state["exp_avg_sq"], rtol=1e-5, atol=1e-12)
    finally:
        torch.set_num_threads(1)


def test_threads_change_no_update() -> None:
    one, two = Ours(copies()), Ours(copies())
    one.step(tensors(1))
    torch.set_num_threads(2)
    try:
        two.step(tensors(1))
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(one.values, two.values, strict=True))


def test_each_tensor_has_its_own_step() -> None:
    value = [torch.ones(20), torch.ones(20)]
    moments = [[torch.zeros(20), torch.zeros(20)] for _ in range(2)]
    options = {"lrs": [0.1, 0.1], "weight_decays": [0.0, 0.0], "betas": BETAS, "eps": EPS}
    adamw_(value, [torch.ones(20)] * 2, *moments, [None, None], steps=[1, 100], **options)
    assert value[0][0] == pytest.approx(0.9, abs=1e-6)  # the first update is as long as the learning rate
    expected = 1 - 0.1 * (0.1 / (1 - 0.9**100)) / (0.05 / (1 - 0.95**100)) ** 0.5
    assert value[1][0] == pytest.approx(expected, abs=1e-6)


def test_a_nan_in_a_gradient_stays_in_its_place() -> None:
    ours, grads = Ours(copies()), tensors(1)
    grads[3][32, 4] = float("nan")
    ours.step(grads)
    assert ours.values[3].isnan().sum() == 1
    assert ours.values[3][32, 4].isnan()
    assert ours.copies[3] is not None
    assert ours.copies[3][32, 4].isnan()


def test_autograd_notices_that_values_changed() -> None:
    ours = Ours(copies())
    before = [value._version for value in ours.values]
    ours.step(tensors(1))
    assert all(value._version > version for value, version in zip(ours.values, before, strict=True))


def test_square_sum_is_exact_and_the_same_for_any_threads() -> None:
    grads = [grad.to(BF16) if i % 2 else grad for i, grad in enumerate(tensors(1))]
    expected = sum(float(grad.double().square().sum()) for grad in grads)
    one = grad_square_sum(grads)
    assert one == pytest.approx(expected, rel=1e-6)
    assert one == grad_square_sum(grads)
    torch.set_num_threads(2)
    try:
        assert one == grad_square_sum(grads)
    finally:
        torch.set_num_threads(1)


def test_square_sum_reads_a_transposed_gradient_and_no_gradient() -> None:
    assert grad_square_sum([]) == 0.0
    assert grad_square_sum([torch.arange(6.0).view(2, 3).t()]) == 55.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_nan_and_inf_show_in_the_square_sum(bad: float, dtype: torch.dtype) -> None:
    for at in (0, 16, 98):
        grad = torch.zeros(99, dtype=dtype)
        grad[at] = bad
        assert not torch.tensor(grad_square_sum([torch.ones(5), grad])).isfinite()


def test_operators_describe_themselves_rightly() -> None:
    grads = [torch.randn(3), torch.randn(4).to(BF16)]
    values, first, second = ([torch.rand(3), torch.rand(4)] for _ in range(3))
    arguments = (values, grads, first, second, [None, torch.empty(4, dtype=BF16)])
    settings = ([0.1, 0.1], [0.0, 0.1], [1, 2], *BETAS, EPS, 1.0)
    operator = torch.ops.unpad.adamw_.default
    torch.library.opcheck(operator, (*arguments, *settings), test_utils=("test_schema", "test_faketensor"))
