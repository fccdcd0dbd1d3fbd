"""What only a GPU runs: the flash kernel of attention, and an optimizer that continues there."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.attention_cases import error
from unpad.batching.layout import build_layout
from unpad.nn.attend import Attend
from unpad.nn.attention import reference_attention, self_attention
from unpad.nn.kernel import Kernel, noted
from unpad.recipes.training import OptimSettings
from unpad.training.optim import load_optimizer_tensors, make_optimizer, optimizer_tensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and -m gpu")]
LENGTHS = np.array([1, 5, 300, 64, 1000, 2, 129])


@pytest.mark.parametrize(
    ("kv_heads", "causal", "window"), [(8, True, None), (8, False, None), (2, True, None), (2, True, 17)]
)
def test_the_flash_kernel_is_attention_and_a_sequence_does_not_see_the_others(kv_heads, causal, window):
    torch.manual_seed(0)
    drawn = torch.randn(int(LENGTHS.sum()), 8 + 2 * kv_heads, 64, device="cuda")
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
    assert error(out, truth) < 0.005
    assert error(qkv.grad, wide.grad) < 0.008
    for part, expected in zip(qkv.detach().split(LENGTHS.tolist()), out.split(LENGTHS.tolist()), strict=True):
        alone = self_attention(part, build_layout(np.array([len(part)])).to(qkv.device), 8, how)
        assert torch.equal(alone, expected)


def test_a_loaded_optimizer_makes_the_step_of_the_saved_one():
    def after(continued: bool) -> Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = make_optimizer(model, OptimSettings(lr=0.1))
        for step in range(4):
            if continued and step == 2:  # through the processor, as a checkpoint goes
                saved = {name: value.cpu() for name, value in optimizer_tensors(model, optimizer).items()}
                optimizer = make_optimizer(model, OptimSettings(lr=0.1))
                load_optimizer_tensors(model, optimizer, saved)
            optimizer.zero_grad()
            model(torch.ones(2, 8, device="cuda")).square().sum().backward()
            optimizer.step()
        return model.weight.detach().cpu()

    assert torch.equal(after(False), after(True))
