"""What only a GPU runs: the flash kernel of attention, and an optimizer that continues there."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.attention_cases import as_on_a_card, error
from unpad.batching.layout import build_layout
from unpad.nn.attend import Attend
from unpad.nn.attention import reference_attention, self_attention
from unpad.nn.kernel import Kernel, noted
from unpad.recipes.training import OptimSettings
from unpad.training.optim import load_optimizer_tensors, make_optimizer, optimizer_tensors

pytestmark = [pytest.mark.gpu, pytest.mark.nightly]
HAS_CARD = torch.cuda.is_available()
LENGTHS = np.array([1, 5, 300, 64, 2, 129, 4096 if HAS_CARD else 500])


@pytest.fixture
def card():
    """A GPU; where there is none, or `-m gpu` does not ask for it, the processor, that these tests stay in order."""
    with nullcontext() if HAS_CARD else as_on_a_card():
        yield "cuda" if HAS_CARD else "cpu"


@pytest.mark.parametrize(
    ("kv_heads", "causal", "window", "size"),
    [(8, True, None, 64), (8, False, None, 20), (2, True, None, 128), (2, True, 17, 64)],
)
def test_the_flash_kernel_is_attention_and_a_sequence_does_not_see_the_others(
    kv_heads, causal, window, size, card, record_property
):
    torch.manual_seed(0)
    drawn = torch.randn(int(LENGTHS.sum()), 8 + 2 * kv_heads, size, device=card)
    qkv, wide = drawn.bfloat16().requires_grad_(), drawn.bfloat16().double().requires_grad_()
    layout = build_layout(LENGTHS).to(qkv.device)
    how = Attend(causal, window)
    with noted() as kernels:
        out = self_attention(qkv, layout, 8, how)
    assert kernels == {Kernel.VARLEN_FLASH}
    q, k, v = wide.split([8, kv_heads, kv_heads], 1)
    truth = reference_attention(q, k, v, layout, how)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    truth.backward(gradient.double())
    record_property("errors", errors := (error(out, truth), error(qkv.grad, wide.grad)))
    assert errors[0] < 0.005
    assert errors[1] < 0.008
    for part, expected in zip(qkv.detach().split(LENGTHS.tolist()), out.split(LENGTHS.tolist()), strict=True):
        alone = self_attention(part, build_layout(np.array([len(part)])).to(qkv.device), 8, how)
        assert torch.equal(alone, expected)


def test_a_loaded_optimizer_makes_the_step_of_the_saved_one(card):
    def after(continued: bool) -> Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8).to(card)
        optimizer = make_optimizer(model, OptimSettings(lr=0.1))
        for step in range(4):
            if continued and step == 2:  # through the processor, as a checkpoint goes
                saved = {name: value.cpu() for name, value in optimizer_tensors(model, optimizer).items()}
                optimizer = make_optimizer(model, OptimSettings(lr=0.1))
                load_optimizer_tensors(model, optimizer, saved)
            optimizer.zero_grad()
            model(torch.ones(2, 8, device=card)).square().sum().backward()
            optimizer.step()
        return model.weight.detach().cpu()

    assert torch.equal(after(False), after(True))
