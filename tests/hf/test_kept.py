"""What `attach` keeps of a trainer and what it refuses, row by row of the table in docs/huggingface.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.hf.kept import SETUPS

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"
pytestmark = pytest.mark.filterwarnings("default")  # trainers of other packages warn of their own affairs


def rows_of_the_table() -> list[str]:
    """First column of the table below "What attach keeps, what it refuses"."""
    text = PAGE.read_text().split("**What `attach` keeps, what it refuses**", 1)[1]
    lines = [line for line in text.split("\n\n", 2)[1].splitlines() if line.startswith("|")]
    return [line.split(" | ")[0].strip("| ") for line in lines[2:]]


CASES = [(row, number) for row, made in SETUPS.items() for number in range(len(made))]


@pytest.mark.parametrize(("row", "number"), CASES, ids=[SETUPS[row][number].__name__ for row, number in CASES])
def test_what_the_table_says_is_so(row: str, number: int, tmp_path: Path) -> None:
    SETUPS[row][number](tmp_path)


def test_every_row_of_the_table_has_a_set_up() -> None:
    assert rows_of_the_table() == list(SETUPS)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
