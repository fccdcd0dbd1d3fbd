"""Questions about images: every field of a row, and every row that cannot be used."""

import json
from pathlib import Path
from typing import Any

from PIL import Image

from unpad.data.check import check
from unpad.data.sources.files import expand
from unpad.data.sources.vqa import DESCRIBE, VqaExample, read_all
from unpad.recipes.data import DataSettings, Source

ROWS: list[dict[str, Any]] = [
    {"image": "a.png", "question": "one?", "answer": "x", "split": "val", "group": "g"},
    {"image": ["b.png", "a.png", "b.png"], "question": "two?", "answers": ["y", "z", {"answer": "z"}], "group": 7},
    {"image": None, "question": "none?", "answers": ["p", "q"], "split": "test"},
    {"image": "b.png", "caption": "a picture", "split": "train"},
    {"image": "b.png", "caption": "unused", "question": "both?", "answer": "w"},
    {"image": ["a.png", "gone.png"], "question": "what?", "answer": "x"},
    {"image": "broken.png", "question": "what?", "answer": "x"},
    {"image": "a.png", "question": "what?", "answer": 5},
]


def test_every_row_is_an_example_or_a_bad_row(tmp_path: Path) -> None:
    for number, name in enumerate(("a.png", "b.png")):
        Image.new("RGB", (3 + number, 2)).save(tmp_path / name)
    (tmp_path / "broken.png").write_bytes((tmp_path / "a.png").read_bytes()[:-9])
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    (file,) = expand([Source(path=str(path))], Path)
    used, images, bad = read_all(file, DataSettings())
    assert [(image.path.name, image.width) for image in images] == [("a.png", 3), ("b.png", 4)]
    assert used == [
        VqaExample(f"{path}:1", (0,), "one?", ("x",), "holdout", False, "g"),
        VqaExample(f"{path}:2", (1, 0, 1), "two?", ("y", "z", "z"), None, False, "7"),
        VqaExample(f"{path}:3", (), "none?", ("p", "q"), "test", False),
        VqaExample(f"{path}:4", (1,), DESCRIBE, ("a picture",), "train", True),
        VqaExample(f"{path}:5", (1,), "both?", ("w",), None, False),
    ]
    assert [one.answer for one in used] == ["x", "z", "p", "a picture", "w"]
    assert [(row.where, row.code, row.num_rows) for row in bad] == [
        (f"{path}:6", "E_MISSING", 1), (f"{path}:7", "E_TRUNCATED", 1), (f"{path}:8", "E_TYPE", 1),
    ]  # fmt: skip
    assert all(row.what and row.fix and row.excerpt for row in bad)
    report = check(path)
    assert (report.num_used, list(report.bad), report.files[0].lengths()["min"]) == (5, bad, 5)
