"""The pages: links lead somewhere, Python runs, and both READMEs say the same."""

import inspect
import json
import re
import runpy
from pathlib import Path

import pytest
import torch

import unpad
from unpad.proof.measure import BOUNDS, EXACT, NATIVE_ERROR

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ENGLISH, CHINESE = (path.read_text(encoding="utf-8") for path in PAGES[:2])


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_to_a_heading_of_it(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text(encoding="utf-8"))):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def test_every_page_is_in_the_list_of_pages():
    index = ROOT / "docs" / "README.md"
    listed = index.read_text(encoding="utf-8")
    names = [page.relative_to(index.parent).as_posix() for page in PAGES[3:] if page != index]
    assert [name for name in names if f"({name})" not in listed] == []


def test_pages_of_users_are_short_enough_to_be_read():
    """All but those for people who change the package."""
    pages = [page for page in PAGES if page.parent.name != "internals" and page.name != "CONTRIBUTING.md"]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 45_000


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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "block"), block_cases())
def test_python_of_the_pages_runs(name, block, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    # Eight steps teach a model to end its replies: after three, the 320 of an evaluation take ten seconds.
    exec(compile(block.replace("train.max_steps=100", "train.max_steps=8"), name, "exec"), {})
    printed = capsys.readouterr().out
    assert printed
    assert "FAIL" not in printed
    assert "NOT PROVEN" not in printed


def test_every_public_name_has_a_heading_of_its_own_or_in_a_group():
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (\w+)$", text, re.MULTILINE)
    assert set(headings) <= set(unpad.__all__)
    assert [name for name in unpad.__all__ if f"\n{name}(" not in text and name not in headings] == []


def test_signatures_of_the_page_are_those_of_the_functions():
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    plain = "".join(block for block in re.split(r"^```", text, flags=re.MULTILINE)[1::2] if block[0] == "\n")
    signatures = re.findall(r"^([a-z_]+)\((.*?)\) -> ", plain, re.MULTILINE | re.DOTALL)
    assert [name for name in unpad.__all__ if name.islower() and name not in dict(signatures)] == []
    for name, parameters in signatures:
        named = re.findall(r"(?:^|, |,\n +)\**(\w+)", re.sub(r"\[[^]]*\]+", "", parameters))
        assert named == list(inspect.signature(getattr(unpad, name)).parameters), name


def test_the_first_pages_begin_with_the_demo_and_name_the_tests_beside_it():
    for page in (ENGLISH, CHINESE):
        commands = re.findall(r"^    (.+?) +# (.+)$", page, re.MULTILINE)
        assert commands[0][0] == "make demo"
        assert "`make test`" in commands[0][1]


def test_the_table_of_the_first_pages_is_that_of_the_page_that_runs_the_command():
    """In words: a gradient that is 9e-01 away is 90 % off."""
    proved = (ROOT / "docs" / "hf_prove.md").read_text(encoding="utf-8")
    for page, right, off in ((ENGLISH, "right", "{} % off"), (CHINESE, "正确", "偏差 {} %")):
        table = page.partition("unpad prove --hf config.json")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| (padded right|flattening|TRL packing bfd|unpad)\b.*? \| (.+?) \| (.+?) \|", table, re.M)
        assert len(rows) == 4
        for name, verdict, gradient in rows:
            row = re.search(rf"^{name} +(sound|LEAKING) +(\S+)", proved, re.MULTILINE)
            assert ("**" in verdict) == (row[1] == "LEAKING")
            assert gradient == (right if row[1] == "sound" else off.format(round(100 * float(row[2]))))
    assert "150 decoders, 26 leak" in (ROOT / "docs" / "internals" / "census.md").read_text(encoding="utf-8")


@pytest.mark.promise("llm.chat-example")
def test_the_dialogues_of_the_first_pages_answer_questions_that_are_not_trained():
    for page, language in ((ENGLISH, "en"), (CHINESE, "zh")):
        lines = (ROOT / "unpad" / "examples" / language / "chat.jsonl").read_text("utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if row.get("split", "train") == "train"]
        asked, replies = ({row["messages"][index]["content"] for row in rows} for index in (0, 1))
        said = re.findall(r"^> (.+)\n(.+)$", page, re.MULTILINE)
        assert len(said) == 3
        assert {question for question, _ in said}.isdisjoint(asked)
        assert {reply for _, reply in said} <= replies


@pytest.mark.nightly
def test_speeds_of_the_first_pages_and_of_their_picture_are_those_of_the_page():
    """docs/speed.md itself is held to the measurements by tests/docs/test_speed.py."""
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    chart = runpy.run_path(str(ROOT / "benchmarks" / "speed_chart.py"))
    best, ours = 4, 1
    drawn = chart["rates"](page)
    assert len(drawn) == 4
    assert all(f"{row[column]:,}" in page for row in drawn for column in (ours, best))
    ratios = [row[ours] / row[best] for row in drawn]
    alone = chart["rates"](
        page.partition("## With AVX2 alone")[2], ("W1: small GPT, 20 tokens", "Chinese conversations")
    )
    shown = [f"{min(ratios):.1f}", f"{max(ratios):.1f}", *{f"{row[ours] / row[best]:.1f}" for row in alone}]
    assert shown == ["2.1", "3.5", "1.5"]
    assert "2.1 to 3.5 times" in ENGLISH
    assert "2.1 到 3.5 倍" in CHINESE


def test_tolerances_of_the_page_are_those_of_the_certificate():
    text = (ROOT / "docs" / "certificate.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (fp\d+|bf16)[^|]*\| (\S+) \| (\S+) \| (\S+) \|$", text, re.MULTILINE)
    bounds = {name: tuple(map(float, numbers)) for name, *numbers in rows}
    assert bounds == {"fp64": (EXACT,) * 3, **BOUNDS}
    assert f"at most {NATIVE_ERROR['bf16']} times (fp32: {NATIVE_ERROR['fp32']} times)" in text
    assert NATIVE_ERROR["fp16"] == NATIVE_ERROR["bf16"]


def shape(text: str) -> list[str]:
    """Headings by depth, rows of tables by their number of cells, code without comments, folders of the tree.

    Dialogues are left out: each page has one in its language.
    """
    lines, inside = [], False
    for line in re.sub(r"^```\n> .*?^```\n", "", text, flags=re.MULTILINE | re.DOTALL).splitlines():
        inside ^= line.startswith("```")
        folder = re.match(r" *\w+/ ", line)
        if inside or line.startswith("    "):
            lines.append(folder[0] if folder else re.sub(r"\s*#.*", "", line))
        elif line.startswith("#"):
            lines.append(line.partition(" ")[0])
        elif line.startswith("|"):
            lines.append("|" * line.count("|"))
    return lines


def test_both_first_pages_have_the_same_headings_tables_and_code():
    assert shape(CHINESE) == shape(ENGLISH)


def test_both_first_pages_have_the_same_numbers_and_links():
    for pattern in (r"\d[\d,]*(?:\.\d+)?(?:e-\d+)?(?: %)?", r"\]\((?!README)([^)]+)\)"):
        numbers = [sorted(re.findall(pattern, prose(page))) for page in (ENGLISH, CHINESE)]
        assert numbers[0] == numbers[1]
