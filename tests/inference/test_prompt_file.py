"""`unpad generate --file`: all prompts of a file, in its order, continued where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.families import Finished
from tests.helpers.shell import Shell
from unpad.errors import RecipeError, RunInUseError, SourceError
from unpad.inference import bulk, prompt_file
from unpad.inference.loaded import LoadedRun, load
from unpad.inference.prompt_file import answer_prompts
from unpad.storage import LineLog


@pytest.fixture(scope="module")
def run(finished: Finished) -> LoadedRun:
    return load(finished("text").run)


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """More prompts than fit into the engine at once."""
    monkeypatch.setattr(prompt_file, "ROWS", 2)
    monkeypatch.setattr(bulk, "AHEAD", 3)


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


PROMPTS = [{"prompt": f"what is {'the ' * (i % 4)}number {i}?"} for i in range(9)]


@pytest.mark.promise("serving.bulk")
def test_answers_are_those_of_generate_in_the_order_of_the_file(run: LoadedRun, tmp_path: Path) -> None:
    file = written(tmp_path / "in.jsonl", [*PROMPTS[:4], {**PROMPTS[4], "id": [7]}, *PROMPTS[5:]])
    assert answer_prompts(run, file, tmp_path / "out.jsonl") == [f"9 prompts answered: {tmp_path / 'out.jsonl'}"]
    found = answers(tmp_path / "out.jsonl")
    expected = run.replies([run.prompt(row["prompt"]) for row in PROMPTS], range(9))
    assert [row["line"] for row in found] == list(range(1, 10))
    assert [{**reply.to_json()}.items() <= row.items() for reply, row in zip(expected, found, strict=True)] == [
        True
    ] * 9
    assert [row.get("id") for row in found] == [None] * 4 + [[7]] + [None] * 4
    with pytest.raises(RecipeError, match="did not make"):  # all prompts would draw alike from here on
        answer_prompts(run, file, tmp_path / "out.jsonl", same_seed=True)
    answer_prompts(run, file, tmp_path / "same.jsonl", same_seed=True)
    assert {row["seed"] for row in answers(tmp_path / "same.jsonl")} == {run.recipe.generate.seed}


@pytest.mark.promise("serving.bulk")
def test_a_file_that_was_cut_anywhere_is_continued_to_the_same_bytes(run: LoadedRun, tmp_path: Path) -> None:
    file, whole = written(tmp_path / "in.jsonl", PROMPTS[:4]), tmp_path / "whole.jsonl"
    answer_prompts(run, file, whole)
    content = whole.read_bytes()
    ends = [0, *(i + 1 for i, byte in enumerate(content) if byte == 10)]
    for cut in sorted({*ends, *(end + 5 for end in ends[:-1]), len(content) - 1}):
        (tmp_path / "out.jsonl").write_bytes(content[:cut])
        [line] = answer_prompts(run, file, tmp_path / "out.jsonl")
        assert (tmp_path / "out.jsonl").read_bytes() == content
        before = content[:cut].count(b"\n")
        assert (f"{before} of them before" in line) == (before > 0)


def test_conversations_end_with_a_message_of_the_user(run: LoadedRun, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    asked = {"messages": [*said, {"role": "user", "content": "and now?"}]}
    answer_prompts(run, written(tmp_path / "in.jsonl", [asked]), tmp_path / "out.jsonl")
    [answer] = answers(tmp_path / "out.jsonl")
    assert answer["prompt"] == "and now?"
    assert answer["prompt_tokens"] > len(run.prompt("and now?").ids)
    with pytest.raises(SourceError, match="E_ROLE"):
        answer_prompts(run, written(tmp_path / "in.jsonl", [{"messages": said}]), tmp_path / "other.jsonl")


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": 5}, "E_TYPE"),
        ({"id": 1}, 'no field "prompt" or "messages"'),
        ({"prompt": ""}, "E_EMPTY"),
        ({"prompt": "word " * 5000}, "context"),
        ({"prompt": "a", "temperature": 1}, "unknown field"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "beside"),
        ("not an object", "E_"),
    ],
)
def test_a_row_that_is_no_prompt_is_named_and_nothing_is_written(
    run: LoadedRun, tmp_path: Path, row: Any, what: str
) -> None:
    file = written(tmp_path / "in.jsonl", [PROMPTS[0], row])
    with pytest.raises(SourceError, match=what) as refused:
        answer_prompts(run, file, tmp_path / "out.jsonl")
    assert refused.value.where == f"{file}:2"
    assert not (tmp_path / "out.jsonl").exists()


def test_files_of_others_are_left_alone(run: LoadedRun, tmp_path: Path, finished: Finished) -> None:
    file, out = written(tmp_path / "in.jsonl", PROMPTS[:2]), tmp_path / "out.jsonl"
    answer_prompts(run, file, out)
    kept = out.read_bytes()
    (tmp_path / "longer.jsonl").write_bytes(kept + kept.splitlines(keepends=True)[0])
    other = load(finished("text").run, ["generate.temperature=1"])
    changed = written(tmp_path / "changed.jsonl", [PROMPTS[1], PROMPTS[0]])
    for name in ("notes.txt", "notes2.txt"):
        (tmp_path / name).write_text("my notes" + ("\n" if "2" in name else ""))
    for model, prompts, target in (
        (other, file, out),
        (run, changed, out),
        (run, file, tmp_path / "longer.jsonl"),
        (run, file, tmp_path / "notes.txt"),
        (run, file, tmp_path / "notes2.txt"),
    ):
        before = target.read_bytes()
        with pytest.raises(RecipeError, match="did not make"):
            answer_prompts(model, prompts, target)
        assert target.read_bytes() == before
    assert out.read_bytes() == kept


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("in.jsonl", '{"id": 1}\n'),
        ("in.jsonl", '[{"prompt": "a"}, {"prompt": "b"}]'),
        ("in.csv", "prompt,text\na,b\nc,d\n"),
        ("in.txt", "a line\nand a second one\n"),
    ],
)
def test_what_to_do_about_a_file_is_nothing_that_the_command_lacks(
    run: LoadedRun, tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(SourceError) as refused:
        answer_prompts(run, tmp_path / name, tmp_path / "out.jsonl")
    assert refused.value.fix == 'write JSON lines such as {"prompt": "..."}'


def test_ctrl_c_says_how_many_are_answered_and_the_same_command_goes_on(
    unpad: Shell, finished: Finished, run: LoadedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, whole, out = written(tmp_path / "in.jsonl", PROMPTS), tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    answer_prompts(run, file, whole)
    append = LineLog.append

    def interrupted(log: LineLog, line: dict[str, Any]) -> None:
        if line["line"] == 4:
            raise KeyboardInterrupt
        append(log, line)

    with monkeypatch.context() as patch:
        patch.setattr(LineLog, "append", interrupted)
        ended = unpad("generate", finished("text").run, "--file", file, "--out", out)
    assert (ended.code, len(answers(out))) == (130, 3)
    assert ended.err.splitlines() == [
        "Interrupted: stopped by Ctrl-C; 3 of 9 prompts are answered",
        f"  at: {out}",
        "  do: give the same command again, which goes on behind them",
    ]
    assert unpad("generate", finished("text").run, "--file", file, "--out", out).code == 0
    assert out.read_bytes() == whole.read_bytes()


def test_two_commands_do_not_write_the_same_answers(run: LoadedRun, tmp_path: Path) -> None:
    file, out = written(tmp_path / "in.jsonl", PROMPTS[:2]), tmp_path / "out.jsonl"
    with bulk._alone(out), pytest.raises(RunInUseError, match="another command"):
        answer_prompts(run, file, out)
    answer_prompts(run, file, out)
    assert len(answers(out)) == 2


def test_the_command_wants_both_files_and_no_other_prompts(unpad: Shell, finished: Finished, tmp_path: Path) -> None:
    folder, file = finished("text").run, written(tmp_path / "in.jsonl", PROMPTS[:2])
    assert unpad("generate", folder, "--file", file).code == 2
    assert unpad("generate", folder, "--file", file, "--out", tmp_path / "o.jsonl", "--prompt", "x").code == 2
    done = unpad("generate", folder, "--file", file, "--out", tmp_path / "o.jsonl")
    assert done.code == 0
    assert len(answers(tmp_path / "o.jsonl")) == 2
