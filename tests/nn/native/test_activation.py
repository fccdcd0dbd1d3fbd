"""The operator of native activations; tests/nn has what all paths do."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.paths import LOWEST
from unpad.nn.native import library

pytestmark = pytest.mark.skipif(not library.enabled(), reason=library.describe())


def test_operators_describe_themselves_rightly() -> None:
    x, grad = torch.randn(3, 14).to(LOWEST), torch.randn(3, 7).to(LOWEST)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.unpad.activation.default, ("swiglu", x), test_utils=utils)
    torch.library.opcheck(torch.ops.unpad.activation_backward.default, ("swiglu", grad, x), test_utils=utils)
