"""Columns of `unpad compare` are counted from the files of each run."""

import json

from tests.helpers.run_folders import run_directory
from unpad.run.compare import compare


def test_the_table_has_every_measure_of_the_files_in_its_order(tmp_path):
    folders = [run_directory(tmp_path / name) for name in ("one", "two")]
    rows = [json.loads(line) for line in (folders[0] / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["kind"] == "eval" and row["stage"] == "pretrain":
            row["loss"] = 0.01  # of another task
    for folder in folders:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = [row for row in rows if row["kind"] == "train"]
    best = min((row for row in rows if row["kind"] == "eval" and row["stage"] == "tune"), key=lambda row: row["loss"])
    tokens = sum(row["tokens"] for row in train)
    assert rows[-1]["kind"] == "eval"
    found = compare([str(folder) for folder in folders], tmp_path / "both.html")
    with (folders[1] / "log.jsonl").open("a") as log:
        log.write('{"time": "2026-01-01T00:00:00+00:00", "kind": "environment", "torch": "2.13.0", "threads": 8}\n')
    other = compare([str(folder) for folder in folders], tmp_path / "both.html")
    assert other.measures == {**found.measures, "threads": ["2", "8"]}
    assert list(found.measures.items()) == [
        ("state", ["finished"] * 2),
        ("steps", ["60"] * 2),
        ("real tokens", [f"{tokens / 1000:.3g}k"] * 2),
        (
            "training loss, newest",
            [f"{sum(row['loss'] for row in train[-3:]) / 3:.4f}"] * 2,
        ),  # a twentieth of the steps
        ("held-out loss, best check", [f"{best['loss']:.4f}"] * 2),
        ("at step", [str(best["step"])] * 2),
        ("bits per char there", ["2.5000"] * 2),
        ("tokens per second", found.measures["tokens per second"]),
        ("time in steps", ["6.0s"] * 2),
        ("peak memory, GB", ["0.60"] * 2),
        ("padding", [f"{1 - tokens / 60_000:.1%}"] * 2),
    ]
    assert (found.names, found.recipes, found.notes) == (["one", "two"], {}, [])
    assert found.to_json() == {"runs": ["one", "two"], "recipes": {}, "measures": found.measures, "notes": []}
    text = found.lines()
    assert [" ".join(line.split()) for line in text[:3]] == ["recipe one two", "no field differs", ""]
    assert text[3].split() == ["reached", "one", "two"]
    assert [line[: len(name)] for line, name in zip(text[4:], found.measures, strict=True)] == list(found.measures)
