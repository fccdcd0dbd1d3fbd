"""What a run says of the machine it computes on."""

import pytest
import torch

from unpad.nn.native import library
from unpad.training import setup
from unpad.training.setup import _kernels

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ALSO = ", attention through torch for heads of 24"


@pytest.mark.parametrize(
    ("enabled", "native_heads", "device", "precision", "head_dim", "expected"),
    [
        (True, True, CPU, "bf16", 24, "the library"),
        (True, False, CPU, "bf16", 24, "the library" + ALSO),
        (True, False, CPU, "bf16", 0, "the library"),  # a model without attention
        (False, False, CPU, "bf16", 24, "the library"),  # which says why it is not there
        (False, False, CPU, "fp32", 24, "the library"),
        (True, True, CPU, "fp32", 24, "the library"),
        (True, True, CPU, "fp16", 24, "torch kernels (native ones here do not compute in fp16)"),
        (True, False, GPU, "bf16", 24, "torch kernels"),
    ],
)
def test_a_run_names_the_kernels_that_will_compute_it(
    monkeypatch, enabled, native_heads, device, precision, head_dim, expected
):
    monkeypatch.setattr(library, "enabled", lambda: enabled)
    monkeypatch.setattr(library, "computes", lambda dtype: enabled and dtype != torch.float16)
    monkeypatch.setattr(library, "describe", lambda: "the library")
    monkeypatch.setattr(setup, "runs_native", lambda dtype, where, size: native_heads)
    assert _kernels(device, precision, head_dim) == expected
