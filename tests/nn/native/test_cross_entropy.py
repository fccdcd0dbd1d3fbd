"""The operator of native cross-entropy; tests/nn/test_scores.py has what all paths do."""

import pytest
import torch

from tests.helpers.paths import LOWEST
from tests.helpers.scores import random_scores
from unpad.nn.native import library

pytestmark = pytest.mark.skipif(not library.enabled(), reason=library.describe())


def test_operator_describes_itself_rightly():
    arguments = (*random_scores(3, 7, LOWEST), 0.1, True)
    operator = torch.ops.unpad.cross_entropy_.default
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
