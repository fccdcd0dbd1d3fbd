"""What `attach` keeps of a trainer and what it refuses, row by row of the table in docs/internals/attach.md."""

from pathlib import Path

import pytest

from tests.hf.kept import SETUPS

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "attach.md"
pytestmark = pytest.mark.filterwarnings("default")  # trainers of other packages warn of their own affairs


def rows_of_the_table() -> list[str]:
    """First column of the table below "What attach keeps, what it refuses"."""
    text = PAGE.read_text().split("**What `attach` keeps, what it refuses**", 1)[1]
    lines = [line for line in text.split("\n\n", 2)[1].splitlines() if line.startswith("|")]
    return [line.split(" | ")[0].strip("| ") for line in lines[2:]]


DEAR = {
    "reads_rows", "no_mean_over_targets", "stock_collators", "right_losses", "hides_the_end", "ignores_the_count",
    "own_divisors", "pads_with_the_end", "made_anew", "mended", "metrics", "own_evaluation",
    "changes_the_data",
}  # fmt: skip
CASES = [
    pytest.param(made, marks=[pytest.mark.nightly] if made.__name__ in DEAR else [], id=made.__name__)
    for setups in SETUPS.values()
    for made in setups
]


@pytest.mark.parametrize("made", CASES)
def test_what_the_table_says_is_so(made, tmp_path):
    made(tmp_path)


def test_every_row_of_the_table_has_a_set_up():
    assert rows_of_the_table() == list(SETUPS)
