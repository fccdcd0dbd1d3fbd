"""The family of docs/internals/extending.md, built from its own code blocks, works from `data check` to the report."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
VERBS = """
import sys
from unpad.cli import app
from unpad.errors import UnpadError
for words in sys.stdin.read().splitlines():
    print("$", words, flush=True)
    try:
        app(words.split(), standalone_mode=False)
    except UnpadError as error:
        print(error, flush=True)
"""


def blocks() -> tuple[str, dict[str, str]]:
    """The field, and the files by name, of the section."""
    page = (ROOT / "docs" / "internals" / "extending.md").read_text("utf-8")
    section = page.split("## Add a data family\n")[1].split("\n## ")[0]
    (field, *files) = re.findall(r"```(?:python|yaml)\n(.*?)```", section, re.DOTALL)
    return field, dict(re.fullmatch(r"# (\S+)\n(.*)", text, re.DOTALL).groups() for text in files)


def build(folder: Path) -> int:
    """Copy the package and add the section's files and its field to the copy; return the number of files."""
    field, files = blocks()
    shutil.copytree(ROOT / "unpad", folder / "unpad")  # with what is compiled
    recipe = folder / "unpad/recipes/data.py"
    recipe.write_text(recipe.read_text("utf-8").replace("    root: UserPath", f"{field}    root: UserPath", 1), "utf-8")
    for name, body in files.items():
        assert not (folder / name).exists()
        (folder / name).write_text(body, "utf-8")
    return len(files)


def write_series(path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for label, mean in 60 * [("low", -1), ("high", 1)]:
        numbers = rng.normal(mean, 1, rng.integers(2, 12)).round(2).tolist()
        rows.append(json.dumps({"numbers": numbers, "label": label}) + "\n")
    path.write_text("".join(rows), "utf-8")


def show(folder: Path, *words: str) -> str:
    """Run verbs of the copy in one process; return their output and the errors that a user can cause."""
    done = subprocess.run(
        [sys.executable, "-c", VERBS], input="\n".join(words), cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def lint(folder: Path) -> None:
    """Check the files that the example adds with ruff, by the rules of the package."""
    python = [str(path) for path in folder.rglob("*.py") if not (ROOT / path.relative_to(folder)).exists()]
    assert len(python) == 5
    for command in (["check"], ["format", "--check", "--diff"]):
        words = [sys.executable, "-m", "ruff", *command, "--no-cache", "--config", str(ROOT / "pyproject.toml")]
        done = subprocess.run([*words, *python], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_family_takes_at_most_150_lines_of_python():
    field, files = blocks()
    python = [field, *(body for name, body in files.items() if name.endswith(".py"))]
    assert len(python) == 6
    assert sum(len(body.splitlines()) for body in python) <= 150


@pytest.mark.nightly
def test_the_family_of_the_example_needs_six_files_and_one_field_and_works_with_every_verb(tmp_path):
    assert build(tmp_path) == 6
    lint(tmp_path)
    write_series(tmp_path / "series.jsonl")
    data = "data.series=series.jsonl"
    shown = show(
        tmp_path,
        "data check series.jsonl --kind series", f"plan series {data}", f"prove series {data}",
        f"doctor series {data} --seconds 2", f"train series {data} --out run", "eval run", "report run",
    )  # fmt: skip
    assert "Error:" not in shown
    assert shown.count("unpad eval run") == 1, "the commands after training name each verb once"
    assert "rows read 120 = rows used 120 + bad rows 0" in shown
    assert re.search(r"all \d+ lines hold", shown)
    assert float(re.search(r"accuracy +([\d.]+)", shown)[1]) > 0.8
    assert "are classified correctly" in (tmp_path / "run" / "report.html").read_text("utf-8")

    (tmp_path / "faults.jsonl").write_text('{"numbers": [1]}\n{"numbers": [1e39], "label": "high"}\n', "utf-8")
    with (tmp_path / "series.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"numbers": [1, 2], "label": "middle"}\n')
    shown = show(tmp_path, "data check faults.jsonl --kind series", "eval run")
    assert 'faults.jsonl:1: E_MISSING no field "label"; there is "numbers"' in shown
    assert "faults.jsonl:2: E_RANGE" in shown
    assert 'SourceError: the class "middle" is none of the run: high, low' in shown
    assert "series.jsonl:121\n  do: train again" in shown
