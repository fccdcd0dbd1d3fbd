"""docs/recipes.md lists every field of every section as the code has it."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_tables_of_fields_are_those_of_the_sections() -> None:
    fields = runpy.run_path(str(DOCS / "fields.py"))
    page = (DOCS / "recipes.md").read_text(encoding="utf-8")
    assert page == fields["page"](), "a field has changed; write the tables with: python docs/fields.py"
