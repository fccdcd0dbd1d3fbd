"""`unpad predict`: a row for each row of data, as alone, in every format; rows that cannot be used are named."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.helpers.families import Finished
from tests.helpers.shell import Shell
from unpad.data.sources.example import Turn
from unpad.data.tokens.encode import encode_prompt
from unpad.errors import RecipeError, SourceError
from unpad.inference.embed import embed_file
from unpad.inference.images import ask, classify
from unpad.inference.loaded import load
from unpad.inference.predict import Predictions, predict
from unpad.storage import LineLog
from unpad.storage.parquet import write_table

pytestmark = pytest.mark.slow

QUARANTINE = ["data.on_bad_row=quarantine"]


@pytest.fixture
def pictures(finished: Finished, tmp_path: Path) -> Path:
    """Six pictures of a finished run in a folder."""
    folder = tmp_path / "new"
    folder.mkdir()
    for number, path in enumerate(sorted((finished("images").recipe.parent / "pictures").rglob("*.png"))[::16]):
        shutil.copy(path, folder / f"{number}.png")
    return folder


def table_of(folder: Path, ending: str) -> Path:
    """A table of the pictures of a folder, with an id and a column that nobody reads."""
    rows = [{"id": f"a{i}", "image": path.name, "ward": "x"} for i, path in enumerate(sorted(folder.glob("*.png")))]
    path = folder / f"table{ending}"
    with path.open("w", encoding="utf-8", newline="") as file:
        if ending == ".csv":
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".csv":
        return list(csv.DictReader(path.read_text("utf-8").splitlines()))
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.promise("cli.predict")
@pytest.mark.parametrize("kind", ["folder", "file", ".jsonl", ".csv"])
def test_pictures_get_the_classes_of_each_alone_under_their_names_and_ids(finished, pictures, kind):
    run, paths = load(finished("images").run), sorted(pictures.glob("*.png"))
    data = pictures if kind == "folder" else paths[0] if kind == "file" else table_of(pictures, kind)
    found = predict(run, data)
    paths = paths[:1] if kind == "file" else paths
    alone = [classify(run, [path], 1)[0].top[0] for path in paths]
    assert [(row["class"], row["probability"]) for row in found.rows] == alone
    names = [path.name if kind.startswith(".") else str(path) for path in paths]
    assert [row["image"] for row in found.rows] == names
    assert [row.get("id") for row in found.rows] == [f"a{i}" if kind[0] == "." else None for i in range(len(paths))]
    assert len({row["class"] for row in found.rows}) == (1 if kind == "file" else 2), "the model tells pictures apart"


@pytest.mark.promise("cli.predict")
def test_files_of_every_format_hold_the_rows_that_json_has(unpad, finished, pictures, tmp_path):
    run = finished("images").run
    told = json.loads(unpad("predict", run, pictures, "--json").out)
    for ending in (".csv", ".jsonl", ".parquet"):
        out = tmp_path / f"out{ending}"
        assert unpad("predict", run, pictures, "--out", out).out == f"6 pictures predicted: {out}\n"
        rows = read_rows(out)
        if ending != ".csv":
            assert rows == told
        assert [(row["image"], float(row["probability"])) for row in rows] == [
            (row["image"], row["probability"]) for row in told
        ]
    for name in ("out.txt", "out", "none/out.csv"):
        assert unpad("predict", run, pictures, "--out", tmp_path / name).code in (2, 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "out.csv", "out.jsonl", "out.parquet"]


@pytest.mark.promise("cli.predict")
def test_rows_that_cannot_be_used_stop_it_or_are_written_with_their_fault(unpad, finished, pictures, tmp_path):
    run, table, out = finished("images").run, table_of(pictures, ".jsonl"), tmp_path / "out.csv"
    (pictures / "1.png").write_bytes(b"")
    with table.open("a", encoding="utf-8") as file:
        file.write('{"id": "b"}\n{"id": "c", "image": "../new/0.png"}\n')
    refused = unpad("predict", run, table, "--out", out, code=3)
    assert (out.exists(), f"at: {table}:2\n" in refused.err, "E_EMPTY" in refused.err) == (False, True, True)
    assert f"\n  {table}:7: E_MISSING" in refused.err
    assert "data.on_bad_row=quarantine" in refused.err
    told = unpad("predict", run, table, "--out", out, *QUARANTINE, code=3)
    assert told.out == f"5 pictures predicted, 3 with a fault: {out}\n"
    codes = {row["id"]: row["fault"].partition(" ")[0] for row in read_rows(out) if row["fault"]}
    assert codes == {"a1": "E_EMPTY", "b": "E_MISSING", "c": "E_PATH"}
    assert not any(row["class"] or row["probability"] for row in read_rows(out) if row["fault"])
    table.write_text('{"id": "b"}\n{"id": "c"}\n')
    assert "E_MISSING" in unpad("predict", run, table, *QUARANTINE, code=3).err
    table.write_text("")
    assert "there are no pictures in it" in unpad("predict", run, table, code=3).err


@pytest.mark.promise("cli.predict")
def test_patients_get_the_numbers_of_embed_under_their_ids(finished: Finished, tmp_path: Path) -> None:
    folder = finished("patients").recipe.parent / "tables"
    run = load(finished("patients").run)
    tmp_path.chmod(0o755)
    for data in (folder, None):
        found = predict(run, data, tmp_path / "out.parquet")
        embed_file(run, data, "patient", tmp_path / "vectors.parquet")
        vectors = pq.read_table(tmp_path / "vectors.parquet").drop_columns("embedding")
        assert pq.read_table(tmp_path / "out.parquet").to_pylist() == vectors.to_pylist() == found.rows
        assert len({row["probability"] for row in found.rows}) > 50
        assert set(found.rows[0]) >= ({"mark", "trained"} if data else {"split", "label"})
    assert (tmp_path / "out.parquet").stat().st_mode & 0o77 == 0, "for the owner only"


@pytest.mark.promise("cli.predict")
@pytest.mark.parametrize("kind", ["questions", "conversations"])
def test_replies_to_a_table_are_continued_and_then_written_whole(unpad, finished, tmp_path, monkeypatch, kind):
    run, out = finished(kind).run, tmp_path / "out.csv"
    if kind == "questions":
        shutil.copy(min((finished(kind).recipe.parent / "pictures").rglob("*.png")), tmp_path / "0.png")
    rows = [
        {"id": i, "image": "0.png", "question": f"{'亮' * i}不亮？"}
        if kind == "questions"
        else {"prompt": f"{'天' * i}吗"}
        for i in range(1, 5)
    ]
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    said = "answer" if kind == "questions" else "reply"
    told = json.loads(unpad("predict", run, file, "--json", code=0).out)
    append = LineLog.append

    def interrupted(log: LineLog, line: dict[str, Any]) -> None:
        if line["line"] == 3:
            raise KeyboardInterrupt
        append(log, line)

    with monkeypatch.context() as patch:
        patch.setattr(LineLog, "append", interrupted)
        assert unpad("predict", run, file, "--out", out).code == 130
    assert (out.exists(), (tmp_path / "out.csv.part.jsonl").read_bytes().count(b"\n")) == (False, 2)
    unpad("predict", run, file, "--out", out, code=0)
    assert not (tmp_path / "out.csv.part.jsonl").exists()
    assert [row[said] for row in read_rows(out)] == [row[said] for row in told]
    unpad("predict", run, file, "--out", tmp_path / "out.jsonl", code=0)
    assert [row[said] for row in read_rows(tmp_path / "out.jsonl")] == [row[said] for row in told]


@pytest.mark.promise("cli.predict")
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("in.txt", "你好\n\n天吗\n"),
        ("in.csv", "prompt;ward\n你好;3\n天吗;4\n"),
        ("in.jsonl", '{"prompt": "你好"}\n{"prompt": "天吗"}'),
        ("in.jsonl", '{"instruction": "你好", "output": "好"}\n{"messages": [{"role": "user", "content": "天吗"}]}'),
    ],
)
def test_prompts_are_read_from_texts_and_tables(finished: Finished, tmp_path: Path, name: str, content: str) -> None:
    run = load(finished("conversations").run)
    (tmp_path / name).write_text(content, "utf-8")
    found = predict(run, tmp_path / name)
    replies = run.replies([run.prompt("你好"), run.prompt("天吗")], [run.recipe.generate.seed + i for i in range(2)])
    assert [(row["prompt"], row["reply"]) for row in found.rows] == [(one.prompt.text, one.text) for one in replies]
    assert [row["seed"] for row in found.rows] == [one.seed for one in replies]


@pytest.mark.promise("cli.predict")
def test_a_row_of_a_conversation_is_asked_as_it_trains_without_its_reply(finished: Finished, tmp_path: Path) -> None:
    run = load(finished("conversations").run)
    row = {"question": "吗", "context": "天好", "history": [["你好", "好"]], "answer": "好", "id": "a"}
    (tmp_path / "in.jsonl").write_text(json.dumps(row), "utf-8")
    [found] = predict(run, tmp_path / "in.jsonl").rows
    turns = [Turn("user", "你好"), Turn("assistant", "好"), Turn("user", "吗\n天好")]
    ids = encode_prompt(turns, run.tokenizer, run.recipe.data.template)
    assert (found["id"], found["prompt"], found["prompt_tokens"]) == ("a", "吗\n天好", len(ids))
    (tmp_path / "in.jsonl").write_text(json.dumps({**row, "persona": "a pirate"}), "utf-8")
    with pytest.raises(SourceError, match='unknown field "persona"'):
        predict(run, tmp_path / "in.jsonl")
    named = load(run.folder, ["data.chat={path: tickets.csv, prompt: Customer message, reply: Agent}"])
    (tmp_path / "in.csv").write_text("id,Customer message,Agent,question\na,你好,好,3\n", "utf-8")
    [found] = predict(named, tmp_path / "in.csv").rows
    assert (found["id"], found["prompt"], found["prompt_tokens"]) == ("a", "你好", len(run.prompt("你好").ids))


@pytest.mark.promise("cli.predict")
def test_what_a_run_cannot_predict_is_refused_with_what_it_can(unpad, finished, tmp_path, pictures):
    picture = pictures / "0.png"
    assert "no data is named" in unpad("predict", finished("images").run, code=2).err
    assert "--question" in unpad("predict", finished("questions").run, picture, code=2).err
    assert "tables in the form" in unpad("predict", finished("patients").run, picture, code=2).err
    assert "`prompt`" in unpad("predict", finished("conversations").run, picture, code=2).err
    assert "unpad predict" in unpad("infer", finished("patients").run, "--image", picture, code=2).err
    for words in (["folder"], ["file.gguf"], ["folder", "--family", "llama"]):
        for family in ("images", "patients"):
            assert "copy the run's folder" in unpad("export", finished(family).run, *words, code=2).err
    told = unpad("export", finished("questions").run, "folder").err
    assert ("llava: " in told, "llama: " in told) == (True, False)
    table = table_of(pictures, ".jsonl")
    assert "`unpad predict` needs none" in unpad("eval", finished("images").run, "--data", table, code=3).err
    assert "name it with --data" in unpad("eval", finished("images").run, *QUARANTINE, code=2).err
    asked = unpad("infer", finished("images").run, "--file", table, "--out", tmp_path / "out.jsonl", code=2)
    assert "unpad predict" in asked.err
    refused = unpad("embed", finished("patients").run, "--out", tmp_path / "out.csv", code=2)
    assert "unpad predict RUN DATA --out out.csv" in refused.err


@pytest.mark.promise("cli.predict")
def test_from_python_images_are_paths_bytes_or_pictures(finished: Finished, pictures: Path) -> None:
    run, paths = load(finished("images").run), sorted(pictures.glob("*.png"))
    (pictures / "bad.png").write_bytes(b"")
    *rows, bad = run.classify(
        [str(paths[0]), paths[1], paths[2].read_bytes(), Image.open(paths[3]), pictures / "bad.png"]
    )
    assert [row["image"] for row in rows] == [str(paths[0]), str(paths[1]), "image 2", "image 3"]
    assert [row["top"] for row in rows] == [dict(classify(run, [path])[0].top) for path in paths[:4]]
    assert (bad["class"], bad["fault"].partition(" ")[0]) == (None, "E_EMPTY")
    assert run.classify(paths[0]) == run.classify([paths[0]])
    assert run.predict(str(pictures / "0.png"))[0].items() <= run.classify(paths[0])[0].items()
    with pytest.raises(RecipeError, match="answers no questions"):
        run.ask([{"image": "0.png", "question": "?"}])


@pytest.mark.promise("cli.predict")
def test_from_python_questions_are_rows(finished: Finished) -> None:
    run = load(finished("questions").run)
    first, second = sorted((finished("questions").recipe.parent / "pictures").rglob("*.png"))[::9][:2]
    asked = [
        {"image": str(first), "question": "亮不亮？", "id": 7}, {"image": [second, second], "question": "?"},
        {"question": "天"}, {"image": "none.png", "question": "?"}, {"image": first},
    ]  # fmt: skip
    rows = run.ask(asked)
    assert rows[0].items() >= {**asked[0], "answer": ask(run, [first], "亮不亮？")[0].text}.items()
    assert [row["fault"].partition(" ")[0] for row in rows] == ["", "", "", "E_MISSING", "E_NULL"]
    assert ["answer" in row for row in rows] == [True] * 3 + [False] * 2
    assert run.ask(asked[1:2]) == rows[1:2]


@pytest.mark.promise("cli.predict")
def test_bad_rows_of_patients_are_left_out_where_the_command_says_so(unpad, finished, tmp_path):
    run, folder = finished("patients").run, tmp_path / "tables"
    shutil.copytree(finished("patients").recipe.parent / "tables", folder)
    tests = pq.read_table(folder / "tests.parquet").to_pylist()
    tests[5]["days"] = None
    pq.write_table(pa.Table.from_pylist(tests), folder / "tests.parquet")
    risks, vectors = tmp_path / "risks.csv", tmp_path / "vectors.parquet"
    verbs = (3, "predict", run, folder, "--out", risks), (0, "embed", run, "--data", folder, "--out", vectors)
    for code, *verb in verbs:
        assert "data.on_bad_row=quarantine" in unpad(*verb, code=3).err
        told = unpad(*verb, *QUARANTINE, code=code)
        assert "quarantined: " in told.err + told.out
    assert f"160 patients predicted, without 1 bad row: {risks}\n" in unpad(*verbs[0][1:], *QUARANTINE).out
    assert [row["id"] for row in read_rows(risks)] == [str(row["id"]) for row in read_rows(vectors)]
    assert unpad("eval", run, "--data", folder, code=3)
    assert unpad("eval", run, "--data", folder, *QUARANTINE, code=0)


def test_a_run_that_did_not_finish_says_so(unpad: Shell, finished: Finished, pictures: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished("images").run, run)
    assert "did not finish" not in unpad("predict", run, pictures / "0.png", code=0).err
    log = run / "log.jsonl"
    log.write_text(log.read_text("utf-8").replace('"finished"', '"stopped"'), "utf-8")
    step = load(run).step
    for verb in (("predict", run, pictures / "0.png"), ("eval", run)):
        told = unpad(*verb, code=0)
        assert f"note: training did not finish: stopped at step {step:,}" in told.err + told.out


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet"])
def test_tables_have_the_fields_of_all_rows(tmp_path: Path, ending: str) -> None:
    write_table(tmp_path / f"out{ending}", [{"id": 7, "notes": ["a", "b"]}, {"id": "x", "fault": "E"}])
    shown = {
        ".csv": [{"id": "7", "notes": "a; b", "fault": ""}, {"id": "x", "notes": "", "fault": "E"}],
        ".jsonl": [{"id": 7, "notes": ["a", "b"]}, {"id": "x", "fault": "E"}],
        ".parquet": [{"id": "7", "notes": ["a", "b"], "fault": None}, {"id": "x", "notes": None, "fault": "E"}],
    }
    assert read_rows(tmp_path / f"out{ending}") == shown[ending]


def test_a_terminal_shows_the_first_rows_in_80_columns_and_counts_the_others() -> None:
    rows = [
        {
            "image": f"{'folder/' * 9}{i}.png",
            "class": "狗" * 30,
            "probability": 0.5,
            "notes": [],
            "mark": "",
            "fault": "",
        }
        for i in range(23)
    ]
    lines = Predictions(rows, "pictures").table()
    assert lines[0].split() == ["image", "class", "probability"]
    assert re.fullmatch(r"….*/0.png +狗+… +50.0%", lines[1])
    assert (len(lines), lines[-1]) == (22, "... and 3 more: --out FILE.csv")
    assert max(map(len, lines)) <= 80
    assert Predictions([{"line": 1, "prompt": "a", "reply": "", "seed": 5}], "prompts").table() == [
        "line  prompt  reply", "1     a       (no answer)"
    ]  # fmt: skip
