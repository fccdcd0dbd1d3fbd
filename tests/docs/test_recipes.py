"""docs/recipes.md lists every field of every section as the code has it."""

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [*DOCS.parent.glob("*.md"), *DOCS.rglob("*.md")]


def test_the_tables_of_fields_are_those_of_the_sections():
    fields = runpy.run_path(str(DOCS / "fields.py"))
    page = (DOCS / "recipes.md").read_text(encoding="utf-8")
    assert page == fields["page"](), "a field has changed; write the tables with: python docs/fields.py"


def listed_fields() -> set[str]:
    """Dotted names of all fields in the tables of docs/recipes.md."""
    names, section = set(), ""
    for line in (DOCS / "recipes.md").read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"### (?:`([\w.]+)`|Outside)", line):
            section = f"{heading[1]}." if heading[1] else ""
        elif row := re.match(r"\| `(\w+)` \||As under .*: ", line):
            names |= {section + name for name in ([row[1]] if row[1] else re.findall(r"`(\w+)`", line[row.end() :]))}
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_field_that_a_page_names_exists(page):
    known = listed_fields()
    sections = {name.partition(".")[0] for name in known if "." in name} - {"generate"}  # unpad.generate too
    text = page.read_text(encoding="utf-8")
    named = re.findall(rf"`(?:stages\.\w+\.)?((?:{'|'.join(sorted(sections))})\.[a-z_.0-9]+)[=`]", text)
    files = {".py", ".jsonl", ".json", ".yaml", ".md", ".csv", ".safetensors"}
    assert [
        name
        for name in named
        if Path(name).suffix not in files
        and name not in known
        and name.rpartition(".")[0] not in known  # a key of a mapping
        and not any(field.startswith(f"{name}.") for field in known)
    ] == []
