"""What a reader of the package has to hold in mind does not grow."""

from __future__ import annotations

import pytest

from benchmarks.size import (
    code_lines,
    counts,
    doubled_names,
    family_names,
    imports_of_tests,
    reached,
    short_modules,
)

# Lower a number where a change made it smaller; code lines and files also grow with features, which then say so here.
MOST = {
    "code lines": 60_500,  # checks of the doctor, a server, quantized weights, rows of evaluations, scales and captions
    "files": 450,
    "doubled class names": 1,
    "modules from training/loop.py": 128,
    "family names outside of families": 0,
    "imports between test files": 0,
    "files in the largest folder": 23,
    "short modules with one importer": 1,
}


@pytest.fixture(scope="module")
def counted() -> dict[str, int]:
    return counts()


@pytest.mark.parametrize("name", MOST)
def test_what_is_counted_stays_below_its_limit(name: str, counted: dict[str, int]) -> None:
    assert counted[name] <= MOST[name], "python benchmarks/size.py --all lists the places"


def test_every_count_sees_what_it_counts() -> None:
    asks = "if isinstance(data, TextData) or data.family == 'images':\n    pass\n"
    files = {
        "unpad/a/b.py": asks + "class Plan:\n    '''Three\n    lines.'''\n    x = 1\n",
        "unpad/a/c.py": "class Plan: ...",
    }
    assert len(family_names(files)) == 2
    assert doubled_names(files) == ["Plan"]
    assert code_lines(files["unpad/a/b.py"]) == 4
    assert code_lines('x = """one\n\n# three"""\n\n"""docstring"""  # said\n') == 3
    assert imports_of_tests({"tests/a/test_b.py": "from tests.c.test_d import x\n"}) == ["tests/a/test_b.py:1"]
    loop = {"unpad/training/loop.py": "import unpad.a.b\nif TYPE_CHECKING:\n    import unpad.a.c\n"}
    assert reached(files | loop) == {"unpad.training.loop", "unpad.a.b"}
    used = {"unpad/a/b.py": "x = 1\n", "unpad/a/c.py": "from unpad.a.b import x\n"}
    assert short_modules(used) == ["unpad/a/b.py"]
    assert short_modules(used | {"unpad/a/b.py": '"""One number (apart: others read it)."""\nx = 1\n'}) == []
    assert short_modules({"unpad/a/b.py": "x = 1\n", "unpad/a/__init__.py": used["unpad/a/c.py"]}) == []
