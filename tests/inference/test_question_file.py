"""`unpad infer --file`: every row of a table is answered as alone, in its order, or has its fault."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.families import Finished
from tests.helpers.shell import Shell
from unpad.errors import RecipeError, SourceError
from unpad.inference import bulk, question_file
from unpad.inference.images import ask
from unpad.inference.loaded import LoadedRun, load
from unpad.inference.question_file import answer_questions
from unpad.storage import LineLog

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(finished: Finished) -> LoadedRun:
    return load(finished("questions").run)


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """More questions than fit into the engine at once."""
    monkeypatch.setattr(question_file, "ROWS", 2)
    monkeypatch.setattr(bulk, "AHEAD", 3)


@pytest.fixture
def rows(finished: Finished, tmp_path: Path) -> list[dict[str, Any]]:
    """Questions of several lengths about eight pictures, which are copied beside the table."""
    folder = finished("questions").recipe.parent / "pictures"
    paths = sorted(folder.rglob("*.png"))[:8]
    made = []
    for number, path in enumerate(paths):
        shutil.copy(path, tmp_path / f"{number}.png")
        made.append({"image": f"{number}.png", "question": "亮不亮？" if number % 2 else "Is it dark, or is it light?"})
    return made


def written(path: Path, rows: list[Any]) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.promise("serving.bulk")
def test_every_row_is_answered_as_alone_in_the_order_of_the_table(
    run: LoadedRun, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    file, out = written(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    lines, done = answer_questions(run, file, out)
    assert (lines, done.faults) == ([f"8 questions answered: {out}"], 0)
    found = answers(out)
    assert [row["line"] for row in found] == list(range(1, 9))
    for row, made in zip(rows, found, strict=True):
        alone = ask(run, [tmp_path / row["image"]], row["question"])[0].to_json()
        assert {**made, "image": alone["image"]}.items() >= {key: alone[key] for key in ("answer", "mark")}.items()
        assert (made["image"], made["question"], made["notes"]) == (row["image"], row["question"], alone["notes"])
        assert made["unknown_characters"] == alone["unknown_characters"]
        again = written(tmp_path / "one.jsonl", [row])
        answer_questions(run, again, tmp_path / f"{made['line']}.jsonl")
        assert answers(tmp_path / f"{made['line']}.jsonl") == [{**made, "line": 1}]
    warm = load(run.folder, ["generate.temperature=2", "generate.precision=bf16"])  # not of answers about images
    answer_questions(warm, file, tmp_path / "warm.jsonl")
    assert [row["answer"] for row in answers(tmp_path / "warm.jsonl")] == [row["answer"] for row in found]


def test_csv_and_rows_of_data_for_training_are_read(run: LoadedRun, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    with (tmp_path / "in.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["id", "image", "question", "hospital"])
        writer.writeheader()
        writer.writerows({"id": f"a{i}", "hospital": "x", **row} for i, row in enumerate(rows))
    answer_questions(run, tmp_path / "in.csv", tmp_path / "out.jsonl")
    of_csv = answers(tmp_path / "out.jsonl")
    assert [row["id"] for row in of_csv] == [f"a{i}" for i in range(8)]
    trained = [
        {**rows[0], "answer": "暗", "split": "test"},
        {"image": ["1.png", "2.png"], "question": "Are both alike?", "answers": ["yes"]},
        {"image": None, "question": "What is 1 plus 1?", "answer": "2"},
        {"image": "3.png", "caption": "a dark picture"},
    ]
    answer_questions(run, written(tmp_path / "in.jsonl", trained), tmp_path / "trained.jsonl")
    found = answers(tmp_path / "trained.jsonl")
    assert [row["fault"] for row in found] == [""] * 4
    assert found[0]["answer"] == of_csv[0]["answer"]
    assert found[3]["question"] == "Describe the picture."


@pytest.mark.promise("serving.bulk")
def test_a_row_that_cannot_be_answered_is_written_with_its_code_and_the_others_go_on(
    run: LoadedRun, rows: list[dict[str, Any]], tmp_path: Path, unpad: Shell
) -> None:
    (tmp_path / "cut.png").write_bytes((tmp_path / "0.png").read_bytes()[:-20])
    bad: list[tuple[Any, str]] = [
        ({"image": "cut.png", "question": "?"}, "E_TRUNCATED"), ({"image": "none.png", "question": "?"}, "E_MISSING"),
        ({"image": "../0.png", "question": "?"}, "E_PATH"), ({"image": "0.png"}, "E_NULL"), ("{", "E_JSON"),
        ({"image": "0.png", "question": "long " * 3000}, "E_CONTEXT"), ({"question": "?"}, "E_MISSING"),
    ]  # fmt: skip
    bad = [({"id": i, **row} if type(row) is dict else row, code) for i, (row, code) in enumerate(bad)]
    mixed = [row for good, (row, _) in zip(rows, bad, strict=False) for row in (row, good)]
    file, out = written(tmp_path / "in.jsonl", mixed), tmp_path / "out.jsonl"
    done = unpad("infer", run.folder, "--file", file, "--out", out)
    assert (done.code, done.out) == (3, f"7 questions answered, 7 with a fault: {out}\n")
    found = answers(out)
    assert [row["line"] for row in found] == list(range(1, 15))
    assert [row["fault"].partition(" ")[0] for row in found[::2]] == [code for _, code in bad]
    assert not any("answer" in row for row in found[::2])
    assert [row.get("id") for row in found[::2]] == [0, 1, 2, 3, None, 5, 6]
    assert "source" not in "".join(row["fault"] for row in found)
    answer_questions(run, written(tmp_path / "good.jsonl", rows[:7]), tmp_path / "good-out.jsonl")
    good = answers(tmp_path / "good-out.jsonl")
    assert [row["answer"] for row in found[1::2]] == [row["answer"] for row in good]


@pytest.mark.promise("serving.bulk")
def test_a_table_that_was_ended_anywhere_is_continued_to_the_same_bytes(
    run: LoadedRun, rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unpad: Shell
) -> None:
    mixed = [*rows[:2], "{", {"image": "none.png", "question": "?"}, *rows[2:4]]
    file, whole, out = written(tmp_path / "in.jsonl", mixed), tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    answer_questions(run, file, whole)
    content = whole.read_bytes()
    ends = [0, *(i + 1 for i, byte in enumerate(content) if byte == 10)]
    for cut in (*ends, ends[2] + 5, len(content) - 1):
        out.write_bytes(content[:cut])
        _, done = answer_questions(run, file, out)
        assert out.read_bytes() == content
        assert (done.before, done.faults) == (content[:cut].count(b"\n"), 2)
    append = LineLog.append

    def interrupted(log: LineLog, line: dict[str, Any]) -> None:
        if line["line"] == 4:
            raise KeyboardInterrupt
        append(log, line)

    out.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(LineLog, "append", interrupted)
        ended = unpad("infer", run.folder, "--file", file, "--out", out)
    assert (ended.code, len(answers(out))) == (130, 3)
    assert "3 of 6 questions are answered" in ended.err
    assert unpad("infer", run.folder, "--file", file, "--out", out).code == 3
    assert out.read_bytes() == content
    for changed in ([*mixed[:2], rows[2], *mixed[3:]], mixed[:5]):  # a row was mended, or left out
        with pytest.raises(RecipeError, match="did not make"):
            answer_questions(run, written(file, changed), out)
        assert out.read_bytes() == content


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("in.jsonl", "", "no questions"), ("in.csv", "picture,asked\n0.png,?\n", "E_MISSING"),
        ("in.jsonl", '{"question": "?"}\n{"question": "!"}\n', "E_MISSING"),
        ("in.jsonl", "image,question\n0.png,?\n", "E_ENCODING"), ("in.jsonl", '[{"image": "a"}]', "E_ENCODING"),
    ],
)  # fmt: skip
def test_a_table_without_any_question_is_refused_and_nothing_is_written(
    run: LoadedRun, tmp_path: Path, name: str, content: str, what: str
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(SourceError, match=what) as refused:
        answer_questions(run, tmp_path / name, tmp_path / "out.jsonl")
    assert refused.value.fix == question_file.EXAMPLE
    assert not (tmp_path / "out.jsonl").exists()


def test_the_command_wants_both_files_a_run_that_answers_and_no_other_images(
    unpad: Shell, finished: Finished, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    folder, file = finished("questions").run, written(tmp_path / "in.jsonl", rows[:1])
    assert "name it e.jsonl" in unpad("infer", folder, "--file", file, "--out", tmp_path / "e.csv").err
    both = ("--file", file, "--out", tmp_path / "out.jsonl")
    assert unpad("infer", folder).code == 2
    assert unpad("infer", folder, "--file", file).code == 2
    assert unpad("infer", folder, *both, "--question", "?").code == 2
    assert unpad("infer", folder, *both, "--image", tmp_path / "0.png").code == 2
    told = unpad("infer", finished("images").run, *both)
    assert (told.code, "answers no questions" in told.err) == (2, True)
    assert unpad("infer", folder, *both).code == 0
