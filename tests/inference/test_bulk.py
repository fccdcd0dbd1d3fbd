"""`unpad generate --file`, `unpad infer --file`: rows are answered as alone, in order, continued to the same bytes."""

import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.families import Finished
from tests.helpers.shell import Shell
from unpad.errors import RecipeError, RunInUseError, SourceError
from unpad.inference import bulk
from unpad.inference.bulk import Written, answer_prompts, answer_questions
from unpad.inference.images import ask
from unpad.inference.loaded import LoadedRun, load
from unpad.storage import LineLog

PROMPTS = [{"prompt": f"what is {'the ' * (i % 4)}number {i}?"} for i in range(9)]


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than fit into the engine at once."""
    monkeypatch.setattr(bulk, "ROWS", 2)
    monkeypatch.setattr(bulk, "AHEAD", 3)


@pytest.fixture(scope="module")
def text(finished: Finished) -> LoadedRun:
    return load(finished("text").run)


@pytest.fixture(scope="module")
def asks(finished: Finished) -> LoadedRun:
    return load(finished("questions").run)


@pytest.fixture
def questions(finished: Finished, tmp_path: Path) -> list[dict[str, Any]]:
    """Questions of several lengths about eight pictures, which are copied beside the table."""
    folder = finished("questions").recipe.parent / "pictures"
    rows = []
    for number, path in enumerate(sorted(folder.rglob("*.png"))[:8]):
        shutil.copy(path, tmp_path / f"{number}.png")
        rows.append({"image": f"{number}.png", "question": "亮不亮？" if number % 2 else "Is it dark, or is it light?"})
    return rows


def written(path: Path, rows: list[Any]) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.promise("serving.bulk")
def test_answers_are_those_of_generate_in_the_order_of_the_file(text: LoadedRun, tmp_path: Path) -> None:
    file = written(tmp_path / "in.jsonl", [*PROMPTS[:4], {**PROMPTS[4], "id": [7]}, *PROMPTS[5:]])
    done = answer_prompts(text, file, tmp_path / "out.jsonl")
    assert done == Written(f"9 prompts answered: {tmp_path / 'out.jsonl'}", 0, 0)
    rows = answers(tmp_path / "out.jsonl")
    replies = text.replies([text.prompt(row["prompt"]) for row in PROMPTS], range(9))
    assert [row["line"] for row in rows] == list(range(1, 10))
    assert all(reply.to_json().items() <= row.items() for reply, row in zip(replies, rows, strict=True))
    assert [row.get("id") for row in rows] == [None] * 4 + [[7]] + [None] * 4
    with pytest.raises(RecipeError, match="did not make"):  # all prompts would draw alike from here on
        answer_prompts(text, file, tmp_path / "out.jsonl", same_seed=True)
    answer_prompts(text, file, tmp_path / "same.jsonl", same_seed=True)
    assert {row["seed"] for row in answers(tmp_path / "same.jsonl")} == {text.recipe.generate.seed}


@pytest.mark.slow
@pytest.mark.promise("serving.bulk")
def test_every_question_is_answered_as_alone_in_the_order_of_the_table(asks, questions, tmp_path):
    file, out = written(tmp_path / "in.jsonl", questions), tmp_path / "out.jsonl"
    assert answer_questions(asks, file, out) == Written(f"8 questions answered: {out}", 0, 0)
    rows = answers(out)
    assert [row["line"] for row in rows] == list(range(1, 9))
    for question, row in zip(questions, rows, strict=True):
        alone = ask(asks, [tmp_path / question["image"]], question["question"])[0].to_json()
        assert question.items() <= row.items()
        assert all(row[name] == alone[name] for name in ("answer", "mark", "notes", "unknown_characters"))
        again = written(tmp_path / "one.jsonl", [question])
        answer_questions(asks, again, tmp_path / f"{row['line']}.jsonl")
        assert answers(tmp_path / f"{row['line']}.jsonl") == [{**row, "line": 1}]
    warm = load(asks.folder, ["generate.temperature=2", "generate.precision=bf16"])  # not of answers about images
    answer_questions(warm, file, tmp_path / "warm.jsonl")
    assert [row["answer"] for row in answers(tmp_path / "warm.jsonl")] == [row["answer"] for row in rows]


@pytest.mark.slow
def test_csv_and_rows_of_data_for_training_are_read(asks, questions, tmp_path):
    with (tmp_path / "in.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["id", "image", "question", "hospital"])
        writer.writeheader()
        writer.writerows({"id": f"a{i}", "hospital": "x", **row} for i, row in enumerate(questions))
    done = answer_questions(asks, tmp_path / "in.csv", tmp_path / "out.jsonl")
    assert done.unread == ("not read: hospital in 100 % of rows",)
    of_csv = answers(tmp_path / "out.jsonl")
    assert [row["id"] for row in of_csv] == [f"a{i}" for i in range(8)]
    trained = [
        {**questions[0], "answer": "暗", "split": "test"},
        {"image": ["1.png", "2.png"], "question": "Are both alike?", "answers": ["yes"]},
        {"image": None, "question": "What is 1 plus 1?", "answer": "2"},
        {"image": "3.png", "caption": "a dark picture"},
    ]
    answer_questions(asks, written(tmp_path / "in.jsonl", trained), tmp_path / "trained.jsonl")
    rows = answers(tmp_path / "trained.jsonl")
    assert [row["fault"] for row in rows] == [""] * 4
    assert rows[0]["answer"] == of_csv[0]["answer"]
    assert rows[3]["question"] == "Describe the picture."


@pytest.mark.slow
@pytest.mark.promise("serving.bulk")
def test_a_row_that_cannot_be_answered_is_written_with_its_code_and_the_others_go_on(asks, questions, tmp_path, unpad):
    (tmp_path / "cut.png").write_bytes((tmp_path / "0.png").read_bytes()[:-20])
    bad: list[tuple[Any, str]] = [
        ({"image": "cut.png", "question": "?"}, "E_TRUNCATED"), ({"image": "none.png", "question": "?"}, "E_MISSING"),
        ({"image": "../0.png", "question": "?"}, "E_PATH"), ({"image": "0.png"}, "E_MISSING"), ("{", "E_JSON"),
        ({"image": "0.png", "question": "long " * 3000}, "E_CONTEXT"), ({"question": "?"}, "E_MISSING"),
    ]  # fmt: skip
    bad = [({"id": i, **row} if type(row) is dict else row, code) for i, (row, code) in enumerate(bad)]
    mixed = [row for good, (row, _) in zip(questions, bad, strict=False) for row in (row, good)]
    file, out = written(tmp_path / "in.jsonl", mixed), tmp_path / "out.jsonl"
    done = unpad("infer", asks.folder, "--file", file, "--out", out)
    assert (done.code, done.out) == (3, f"7 questions answered, 7 with a fault: {out}\n")
    rows = answers(out)
    assert [row["line"] for row in rows] == list(range(1, 15))
    assert [row["fault"].partition(" ")[0] for row in rows[::2]] == [code for _, code in bad]
    assert not any("answer" in row for row in rows[::2])
    assert [row.get("id") for row in rows[::2]] == [0, 1, 2, 3, None, 5, 6]
    assert "source" not in "".join(row["fault"] for row in rows)
    answer_questions(asks, written(tmp_path / "good.jsonl", questions[:7]), tmp_path / "good-out.jsonl")
    good = answers(tmp_path / "good-out.jsonl")
    assert [row["answer"] for row in rows[1::2]] == [row["answer"] for row in good]


@dataclass
class Command:
    """A command that answers a file: its verb, run and function; rows, and how many of them have a fault."""

    verb: str
    run: LoadedRun
    answer: Callable[[LoadedRun, Path, Path], Written]
    rows: list[Any]
    faults: int


@pytest.fixture(params=["prompts", pytest.param("questions", marks=pytest.mark.slow)])
def command(request: pytest.FixtureRequest) -> Command:
    if request.param == "prompts":
        return Command("generate", request.getfixturevalue("text"), answer_prompts, PROMPTS[:6], 0)
    rows = request.getfixturevalue("questions")
    mixed = [*rows[:2], "{", {"image": "none.png", "question": "?"}, *rows[2:4]]
    return Command("infer", request.getfixturevalue("asks"), answer_questions, mixed, 2)


@pytest.mark.promise("serving.bulk")
def test_a_file_that_was_ended_anywhere_is_continued_to_the_same_bytes(command, tmp_path, monkeypatch, unpad):
    file, whole, out = written(tmp_path / "in.jsonl", command.rows), tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    command.answer(command.run, file, whole)
    content = whole.read_bytes()
    ends = [0, *(i + 1 for i, byte in enumerate(content) if byte == 10)]
    for cut in (*ends, ends[0] + 5, ends[2] + 5, len(content) - 1):
        out.write_bytes(content[:cut])
        done = command.answer(command.run, file, out)
        assert out.read_bytes() == content
        before = content[:cut].count(b"\n")
        assert (done.before, done.faults) == (before, command.faults)
        assert (f"{before} of them before" in done.summary) == (before > 0)
    append = LineLog.append

    def interrupted(log: LineLog, line: dict[str, Any]) -> None:
        if line["line"] == 4:
            raise KeyboardInterrupt
        append(log, line)

    out.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(LineLog, "append", interrupted)
        ended = unpad(command.verb, command.run.folder, "--file", file, "--out", out)
    assert (ended.code, len(answers(out))) == (130, 3)
    assert ended.err.startswith("Interrupted: stopped by Ctrl-C; 3 of 6 ")
    assert ended.err.splitlines()[1:] == [
        f"  at: {out}",
        "  do: give the same command again, which goes on behind them",
    ]
    again = unpad(command.verb, command.run.folder, "--file", file, "--out", out)
    assert again.code == (3 if command.faults else 0)
    assert out.read_bytes() == content


def test_files_of_others_are_left_alone(command: Command, tmp_path: Path) -> None:
    file, out = written(tmp_path / "in.jsonl", command.rows), tmp_path / "out.jsonl"
    command.answer(command.run, file, out)
    kept = out.read_bytes()
    (tmp_path / "longer.jsonl").write_bytes(kept + kept.splitlines(keepends=True)[0])
    other = load(command.run.folder, ["generate.max_new_tokens=3"])
    mended = written(tmp_path / "mended.jsonl", [*command.rows[:2], command.rows[0], *command.rows[3:]])
    shorter = written(tmp_path / "shorter.jsonl", command.rows[:5])
    for name, end in (("notes.txt", ""), ("notes2.txt", "\n")):
        (tmp_path / name).write_text("my notes" + end)
    for run, rows, target in (
        (other, file, out),
        (command.run, mended, out),
        (command.run, shorter, out),
        (command.run, file, tmp_path / "longer.jsonl"),
        (command.run, file, tmp_path / "notes.txt"),
        (command.run, file, tmp_path / "notes2.txt"),
    ):
        before = target.read_bytes()
        with pytest.raises(RecipeError, match="did not make"):
            command.answer(run, rows, target)
        assert target.read_bytes() == before
    assert out.read_bytes() == kept


def test_two_commands_do_not_write_the_same_answers(text: LoadedRun, tmp_path: Path) -> None:
    file, out = written(tmp_path / "in.jsonl", PROMPTS[:2]), tmp_path / "out.jsonl"
    with bulk._alone(out), pytest.raises(RunInUseError, match="another command"):
        answer_prompts(text, file, out)
    answer_prompts(text, file, out)
    assert len(answers(out)) == 2


def test_conversations_end_with_a_message_of_the_user(text: LoadedRun, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    asked = {"messages": [*turns, {"role": "user", "content": "and now?"}]}
    answer_prompts(text, written(tmp_path / "in.jsonl", [asked]), tmp_path / "out.jsonl")
    [answer] = answers(tmp_path / "out.jsonl")
    assert answer["prompt"] == "and now?"
    assert answer["prompt_tokens"] > len(text.prompt("and now?").ids)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": 5}, "E_TYPE"),
        ({"id": 1}, 'no field "prompt" or "messages"'),
        ({"prompt": ""}, "E_EMPTY"),
        ({"prompt": "word " * 5000}, "context"),
        ({"prompt": "a", "temperature": 1}, "unknown field"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "both hold a request"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "E_ROLE"),
        ("not an object", "E_"),
    ],
)
def test_a_row_that_is_no_prompt_is_named_and_nothing_is_written(text, tmp_path, row, what):
    file = written(tmp_path / "in.jsonl", [PROMPTS[0], row])
    with pytest.raises(SourceError, match=what) as refused:
        answer_prompts(text, file, tmp_path / "out.jsonl")
    assert refused.value.where == f"{file}:2"
    assert not (tmp_path / "out.jsonl").exists()


def test_columns_of_a_table_of_prompts_that_nobody_reads_are_named(text: LoadedRun, tmp_path: Path) -> None:
    table = written(tmp_path / "in.csv", ["id,prompt,completion,tone,source", "1,hello,hi,short,web", "2,bye,,,web"])
    done = answer_prompts(text, table, tmp_path / "out.jsonl")
    assert (done.unread, len(answers(tmp_path / "out.jsonl"))) == (("not read: tone in 50 % of rows",), 2)


PROMPT_FIX = 'write JSON lines such as {"prompt": "..."}'
QUESTION_FIX = 'write rows such as {"image": "cat.png", "question": "Which animal?"}, or a CSV with these columns'
ROWS_OF_PROMPTS = (
    ("in.jsonl", '{"id": 1}\n', "E_MISSING"),
    ("in.jsonl", '[{"prompt": "a"}, {"prompt": "b"}]', "E_ENCODING"),
    ("in.csv", "text,reply\na,b\nc,d\n", "E_MISSING"),
    ("in.jsonl", "", "no prompts"),
)
ROWS_OF_QUESTIONS = (
    ("in.jsonl", "", "no questions"),
    ("in.csv", "picture,asked\n0.png,?\n", "E_MISSING"),
    ("in.jsonl", '{"question": "?"}\n{"question": "!"}\n', "E_MISSING"),
    ("in.jsonl", "image,question\n0.png,?\n", "E_ENCODING"),
    ("in.jsonl", '[{"image": "a"}]', "E_ENCODING"),
)


@pytest.mark.parametrize(
    ("kind", "name", "content", "what"),
    [
        *(("text", *row) for row in ROWS_OF_PROMPTS),
        *(pytest.param("asks", *row, marks=pytest.mark.slow) for row in ROWS_OF_QUESTIONS),
    ],
)
def test_what_to_do_about_a_file_without_any_row_is_nothing_that_the_command_lacks(
    request, tmp_path, kind, name, content, what
):
    (tmp_path / name).write_text(content, encoding="utf-8")
    answer: Callable[..., Written] = answer_prompts if kind == "text" else answer_questions
    with pytest.raises(SourceError, match=what) as refused:
        answer(request.getfixturevalue(kind), tmp_path / name, tmp_path / "out.jsonl")
    assert refused.value.fix == (PROMPT_FIX if kind == "text" else QUESTION_FIX)
    assert not (tmp_path / "out.jsonl").exists()


def test_the_commands_want_both_files_and_no_other_inputs(unpad: Shell, finished: Finished, tmp_path: Path) -> None:
    both = ("--file", written(tmp_path / "in.jsonl", PROMPTS[:1]), "--out", tmp_path / "out.jsonl")
    for verb, kind, more in (
        ("generate", "text", ("--prompt", "x")),
        ("infer", "questions", ("--question", "?")),
        ("infer", "questions", ("--image", tmp_path / "0.png")),
    ):
        folder = finished(kind).run
        assert unpad(verb, folder, *both[:2]).code == 2
        assert unpad(verb, folder, *both, *more).code == 2
    assert unpad("infer", folder).code == 2
    assert "name it e.jsonl" in unpad("infer", folder, *both[:2], "--out", tmp_path / "e.csv").err
    refused = unpad("infer", finished("images").run, *both)
    assert (refused.code, "answers no questions" in refused.err) == (2, True)
