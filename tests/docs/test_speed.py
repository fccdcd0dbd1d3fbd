"""The speeds in docs/speed.md are those of the tables in benchmarks/speed/."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COLUMNS = {  # heads of columns as sides of the benchmark, of which the fastest counts
    "ours": ["ours"],
    "ours, torch kernels": ["ours, torch kernels"],
    "Trainer, defaults": ["peer, defaults"],
    "Trainer, its best": ["peer, best", "peer, our tokens per step"],
    "one at a time, torch": ["one at a time, torch"],
    "our products alone": ["our products alone"],
}
ROWS = {  # parts of names of rows
    "W1": ("small GPT",),
    "W2": ("Llama",),
    "W3": ("encoder",),
    "chat": ("onversations",),
    "sayings": ("Chinese sayings",),
    "pretraining": ("Chinese statements",),
}


def tables(text: str) -> list[list[list[str]]]:
    """Cells of each Markdown table, the head first."""
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()] for table in found]


def speeds(workload: str) -> dict[str, str]:
    """Tokens per second of each side, as the table of the workload writes them."""
    rows = next(
        table
        for table in tables((ROOT / f"benchmarks/speed/{workload}.md").read_text(encoding="utf-8"))
        if table[0][:1] == ["side"]
    )
    at = rows[0].index("tokens/s")
    return {row[0]: row[at] for row in rows[2:]}


def claims(page: str) -> list[tuple[str, str, str]]:
    """(workload, column, figure) of every speed in tables of a page."""
    found, text = [], (ROOT / page).read_text(encoding="utf-8")
    for part in re.split(r"^## ", text, flags=re.MULTILINE):
        for table in tables(part):
            for row in table[2:]:
                names = [name for name, parts in ROWS.items() if any(part in row[0] for part in parts)]
                forced = "AVX2" in row[0] or part.startswith("With AVX2")
                for column, figure in zip(table[0], row, strict=True):
                    if names and column in COLUMNS and re.fullmatch(r"[\d,]+", figure):
                        found.append((names[0] + "-avx2" * forced, column, figure))
    return found


@pytest.mark.parametrize(("page", "least"), [("docs/speed.md", 45)])
def test_every_speed_is_one_that_was_measured(page, least):
    found = claims(page)
    assert len(found) >= least, "the tables of the page have other heads or rows than this test knows"
    for workload, column, figure in found:
        measured = [speeds(workload)[side] for side in COLUMNS[column] if side in speeds(workload)]
        assert figure == max(measured, key=lambda one: int(one.replace(",", ""))), (page, workload, column)
