"""docs/internals/templates.md has what benchmarks/templates.py finds."""

from pathlib import Path

import pytest

pytest.importorskip("trl")
transformers = pytest.importorskip("transformers")

from benchmarks.templates import CONVERSATIONS, case, judge  # noqa: E402 - needs both

PAGE = Path(__file__).parents[2] / "docs/internals/templates.md"


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3_5_think", "qwen3_8", "deepseek_r1_distill", "nemotron_3_nano", "gemma3"]
)
def test_the_table_of_templates_is_what_becomes_of_their_conversations(name):
    (row,) = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name} |")]
    one = case(name)
    for kind, cell in zip(CONVERSATIONS, row.split(" | ")[1:], strict=True):
        found = judge(one, kind)
        assert cell.removesuffix(" |")[0] == (found if len(found) == 1 else "("), (kind, found)
