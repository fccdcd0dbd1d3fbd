"""The operator of native cross-entropy; tests/nn/test_scores.py has what all paths do."""

from tests.helpers.paths import LOWEST, check_operator, needs_kernels
from tests.helpers.scores import random_scores

pytestmark = needs_kernels


def test_operator_describes_itself_rightly():
    check_operator("cross_entropy_", *random_scores(3, 7, LOWEST), 0.1, True)
