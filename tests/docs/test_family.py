"""The family of CONTRIBUTING.md, built from its own code blocks, works from `data check` to the report."""

from __future__ import annotations

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
for words in sys.stdin.read().splitlines():
    print("$", words, flush=True)
    app(words.split(), standalone_mode=False)
"""


def build(folder: Path) -> int:
    """Copy the package and add the section's files and its field to the copy; return the number of files."""
    section = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("## Add a data family\n")[1].split("\n## ")[0]
    shutil.copytree(ROOT / "unpad", folder / "unpad", ignore=shutil.ignore_patterns("__pycache__"))
    (field, *files) = re.findall(r"```(?:python|yaml)\n(.*?)```", section, re.DOTALL)
    recipe = folder / "unpad/recipes/data.py"
    recipe.write_text(recipe.read_text("utf-8").replace("    root: str", f"{field}    root: str", 1), "utf-8")
    for text in files:
        name, body = re.fullmatch(r"# (\S+)\n(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
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


@pytest.mark.slow
def test_the_family_of_the_example_needs_six_files_and_one_field_and_works_with_every_verb(tmp_path: Path) -> None:
    assert build(tmp_path) == 6
    write_series(tmp_path / "series.jsonl")
    data = "data.series=series.jsonl"
    words = [
        "data check series.jsonl --kind series", f"plan series {data}", f"prove series {data}",
        f"train series {data} --out run", "eval run", "report run",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", VERBS], input="\n".join(words), cwd=tmp_path, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    shown = done.stdout
    assert "rows read 120 = rows used 120 + bad rows 0" in shown
    assert "all 20 lines hold" in shown
    accuracy = float(re.search(r"accuracy +([\d.]+)", shown)[1])  # type: ignore[index]
    assert accuracy > 0.8
    assert "are classified correctly" in (tmp_path / "run" / "report.html").read_text("utf-8")
