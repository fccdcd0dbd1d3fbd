"""What a reader of the package has to hold in mind does not grow."""

import ast
import math
import subprocess
from pathlib import Path

import pytest

from benchmarks.size import (
    CEILINGS,
    code_lines,
    counts,
    doubled_names,
    family_names,
    imports_of_tests,
    reached,
    short_modules,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def counted() -> dict[str, int]:
    return counts()


@pytest.mark.parametrize("name", sorted(CEILINGS.keys() - {"processor seconds of make test"}))
def test_what_is_counted_stays_below_its_ceiling(name, counted):
    """A commit that raises a count lowers the same one elsewhere by as much; ceilings only fall."""
    assert counted[name] <= CEILINGS[name], "python benchmarks/size.py --all lists the places"


def test_ceilings_only_fall():
    """Compared with the last commits that changed the table, so that neither a draft nor a commit raises one."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    try:
        commits = git("log", "-2", "--format=%H", "--", "benchmarks/size.py").split()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git, or no history")
    for commit in commits:
        for node in ast.parse(git("show", f"{commit}:benchmarks/size.py")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CEILINGS":
                before = ast.literal_eval(node.value)
                raised = [name for name in before if CEILINGS.get(name, math.inf) > before[name]]
                assert raised == [], "lower the same count elsewhere instead"


def test_every_count_sees_what_it_counts():
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
