"""The pages: links lead somewhere, Python runs, and both READMEs say the same."""

from __future__ import annotations

import inspect
import re
import unicodedata
from pathlib import Path

import pytest
import torch

import unpad
from unpad.proof.measure import BOUNDS, EXACT, NATIVE_ERROR

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ENGLISH, CHINESE = (path.read_text(encoding="utf-8") for path in PAGES[:2])


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_to_a_heading_of_it(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text(encoding="utf-8"))):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def test_every_page_is_in_the_list_of_pages() -> None:
    listed = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES[3:] if page.name != "README.md" and f"({page.name})" not in listed] == []


def python_blocks() -> list[tuple[str, str]]:
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/python.md")}
    blocks = [
        (f"{page}-{index}", block)
        for page, text in texts.items()
        for index, block in enumerate(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S))
    ]
    return blocks


def block_cases() -> list[object]:
    """Every block of Python; those that train whole runs are slow."""
    return [
        pytest.param(name, block, id=name, marks=[pytest.mark.slow] if "unpad.train" in block else [])
        for name, block in python_blocks()
    ]


@pytest.mark.parametrize(("name", "block"), block_cases())
def test_python_of_the_pages_runs(
    name: str, block: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    exec(compile(block.replace("train.max_steps=100", "train.max_steps=3"), name, "exec"), {})
    printed = capsys.readouterr().out
    assert printed
    assert "FAIL" not in printed
    assert "NOT PROVEN" not in printed


def test_every_public_name_has_a_heading_of_its_own_or_in_a_group() -> None:
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (\w+)$", text, re.MULTILINE)
    assert set(headings) <= set(unpad.__all__)
    assert [name for name in unpad.__all__ if f"\n{name}(" not in text and name not in headings] == []


def test_signatures_of_the_page_are_those_of_the_functions() -> None:
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    plain = "".join(block for block in re.split(r"^```", text, flags=re.MULTILINE)[1::2] if block[0] == "\n")
    signatures = re.findall(r"^([a-z_]+)\((.*?)\) -> ", plain, re.MULTILINE | re.DOTALL)
    assert [name for name in unpad.__all__ if name.islower() and name not in dict(signatures)] == []
    for name, parameters in signatures:
        named = re.findall(r"(?:^|, |,\n +)\**(\w+)", re.sub(r"\[[^]]*\]+", "", parameters))
        assert named == list(inspect.signature(getattr(unpad, name)).parameters), name


def test_the_first_page_is_short() -> None:
    assert len(ENGLISH.encode()) <= 7500


def test_speeds_of_the_pages_are_those_that_were_measured() -> None:
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    first = ["W1", "W2", "W3", "chat"]
    tables = {
        ENGLISH: [*first, "W1-avx2", "chat-avx2"],
        page: [*first, "sayings", "pretraining"],
        page.partition("## With AVX2 alone")[2]: ["W1-avx2", "W3-avx2", "chat-avx2"],
    }
    for text, files in tables.items():
        rows = re.findall(r"^\| [^|]+? (\| [\d,]+ \| .*)$", text, re.MULTILINE)[: len(files)]
        for file, row in zip(files, rows, strict=True):
            measured = (ROOT / "benchmarks" / "speed" / f"{file}.md").read_text(encoding="utf-8")
            assert [speed for speed in re.findall(r"[\d,]+", row) if f"| {speed} |" not in measured] == [], file


def test_tolerances_of_the_page_are_those_of_the_certificate() -> None:
    text = (ROOT / "docs" / "certificate.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (fp\d+|bf16)[^|]*\| (\S+) \| (\S+) \| (\S+) \|$", text, re.MULTILINE)
    bounds = {name: tuple(map(float, numbers)) for name, *numbers in rows}
    assert bounds == {"fp64": (EXACT,) * 3, **BOUNDS}
    assert f"at most {NATIVE_ERROR['bf16']} times (fp32: {NATIVE_ERROR['fp32']} times)" in text
    assert NATIVE_ERROR["fp16"] == NATIVE_ERROR["bf16"]


def shape(text: str) -> list[str]:
    """Headings by depth, rows of tables by their number of cells, code without comments, folders of the tree."""
    lines, inside = [], False
    for line in text.splitlines():
        inside ^= line.startswith("```")
        folder = re.match(r" *\w+/ ", line)
        if inside or line.startswith("    "):
            lines.append(folder[0] if folder else re.sub(r"\s*#.*", "", line))
        elif line.startswith("#"):
            lines.append(line.partition(" ")[0])
        elif line.startswith("|"):
            lines.append("|" * line.count("|"))
    return lines


def test_both_first_pages_have_the_same_headings_tables_and_code() -> None:
    assert shape(CHINESE) == shape(ENGLISH)


def test_both_first_pages_have_the_same_numbers_and_links() -> None:
    for pattern in (r"\d[\d,]*(?:\.\d+)?(?:e-\d+)?(?: %)?", r"\]\((?!README)([^)]+)\)"):
        numbers = [sorted(re.findall(pattern, prose(page))) for page in (ENGLISH, CHINESE)]
        assert numbers[0] == numbers[1]


def test_chinese_is_punctuated_in_full_width() -> None:
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose(CHINESE))
    for before, mark in re.findall(r"(.)([,;:?!()])", text):
        assert unicodedata.category(before) != "Lo", f"{before}{mark}"
