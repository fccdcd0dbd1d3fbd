"""The operator of native activations; tests/nn has what all paths do."""

from __future__ import annotations

import pytest
import torch

from unpad.nn.native import library

pytestmark = pytest.mark.skipif(not library.enabled(), reason=library.describe())
BF16 = torch.bfloat16


def test_operators_describe_themselves_rightly() -> None:
    x, grad = torch.randn(3, 14).to(BF16), torch.randn(3, 7).to(BF16)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.unpad.activation.default, ("swiglu", x), test_utils=utils)
    torch.library.opcheck(torch.ops.unpad.activation_backward.default, ("swiglu", grad, x), test_utils=utils)
