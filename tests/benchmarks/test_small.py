"""Sayings of files in the form of Debian's fortunes."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_sayings_are_cut_at_lines_of_a_percent_sign_and_indexes_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "fortunes"
    folder.mkdir()
    (folder / "b").write_text("Third.\n%\n\n%\n", encoding="utf-8")
    (folder / "a").write_text("One\n\tof two lines, 50%\n%\nSecond: naïve.\n%\n", encoding="utf-8")
    (folder / "a.dat").write_bytes(b"\x00\xff")
    (folder / "a.u8").write_text("One", encoding="utf-8")
    out = tmp_path / "out.jsonl"
    runpy.run_path(str(ROOT / "benchmarks" / "small.py"))["main"](str(folder), str(out))
    texts = [json.loads(line)["text"] for line in out.read_text("utf-8").splitlines()]
    assert texts == ["One\n\tof two lines, 50%", "Second: naïve.", "Third."]
