"""Prompts of a run from the command line and from Python: alone as among others, with a system text, as JSON."""

import json
from pathlib import Path

import pytest

from tests.helpers.families import Finished
from tests.helpers.shell import Shell
from tests.helpers.tokenizers import dropping_bpe
from tests.helpers.toy import quiet, write_toy
from unpad.data.tokens.tokenizer import open_tokenizer_file
from unpad.errors import RecipeError
from unpad.inference.loaded import LoadedRun, load
from unpad.inference.prompts import count_system_turns, encode, system_note
from unpad.recipes.recipe import Recipe
from unpad.training.loop import train

pytestmark = pytest.mark.slow

STEPS = ["train.max_steps=2", "train.eval_every=100"]
QUESTIONS = ["小猫喜欢什么？", "谁看见月亮", "一", "爷爷走过一座桥", "小猫喜欢什么？"]


@pytest.fixture
def run(finished: Finished) -> Path:
    return finished("text").run


def told_of_system(root: Path) -> Path:
    """A run on conversations half of which have a system turn."""
    recipe = write_toy(root / "toy")
    rows = [json.loads(line) for line in (root / "toy" / "chats.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rows[::2]:
        row["messages"].insert(0, {"role": "system", "content": "简短"})
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (root / "toy" / "chats.jsonl").write_text(lines, encoding="utf-8")
    train(str(recipe), root / "run", STEPS, console=quiet())
    return root / "run"


@pytest.mark.promise("llm.generation")
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]])
def test_a_prompt_gets_what_it_gets_alone_also_at_a_temperature(run: Path, order: list[int]) -> None:
    loaded, settings = load(run), {"temperature": 1.5, "max_new_tokens": 10, "precision": "fp32"}
    alone = [loaded.generate([question], **settings)[0] for question in QUESTIONS]
    assert loaded.generate([QUESTIONS[i] for i in order], **settings) == [alone[i] for i in order]
    assert len(set(alone)) > 2
    seeds = [5, 6, 7, 8, 9]
    seeded = [loaded.generate([q], seed=seed, **settings)[0] for q, seed in zip(QUESTIONS, seeds, strict=True)]
    asked = [QUESTIONS[i] for i in order]
    assert loaded.generate(asked, seeds=[seeds[i] for i in order], **settings) == [seeded[i] for i in order]
    assert seeded[0] != seeded[4], "one question with two seeds"
    with pytest.raises(RecipeError, match="5 prompts and 1 seed are"):
        loaded.generate(QUESTIONS, seeds=[1])


@pytest.mark.promise("llm.system-text")
def test_json_says_all_of_a_reply_and_its_seed_gives_it_again(unpad: Shell, run: Path) -> None:
    settings = ["temperature=1.5", "max_new_tokens=6"]
    asked = [word for question in QUESTIONS[::4] for word in ("--prompt", question)]
    found = json.loads(unpad("generate", run, *asked, *settings, "--json").out)
    assert [row["prompt"] for row in found] == QUESTIONS[::4]
    assert [row["seed"] for row in found] == [0, 1], "the same question is drawn twice"
    assert found[0]["reply"] != found[1]["reply"]
    tokenizer = load(run).tokenizer
    for row in found:
        assert row["finished"] in ("eos", "length")
        assert row["tokens"] <= 6
        assert (row["finished"] == "length") == (row["tokens"] == 6)
        assert row["prompt_tokens"] == len(load(run).prompt_ids(row["prompt"]))
        assert (row["system"], row["unknown_characters"], row["mostly_unknown"]) == ("", 0, False)
        assert len(tokenizer.encode_batch([row["reply"]])[0]) > 0
    again = json.loads(unpad("generate", run, "--prompt", QUESTIONS[0], *settings, "seed=1", "--json").out)
    assert again[0]["reply"] == found[1]["reply"]
    given = json.loads(unpad("generate", run, *asked, *settings, "seed=7", "--json").out)
    assert [row["seed"] for row in given] == [7, 7]
    assert given[0]["reply"] == given[1]["reply"]


def test_a_reply_follows_the_schema_of_a_file_and_a_bad_one_is_named_by_its_line(run, unpad, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"enum":\n ["小猫", {"a": 1}]}')
    asked = unpad("generate", run, "--prompt", "你好", "max_new_tokens=40", "--schema", file, code=0)
    assert json.loads(asked.out) in ("小猫", {"a": 1})
    several = unpad("generate", run, "--schema", file, "--json", "max_new_tokens=40", stdin="你好\n小猫\n", code=0)
    assert all(json.loads(row["reply"]) in ("小猫", {"a": 1}) for row in json.loads(several.out))
    bad = (('{"a":\n1,}', 2, 3, "not JSON"), ('{\n\n"not": {}}', 3, 2, 'Unimplemented keys: ["not"]'))
    for text, line, code, said in bad:
        file.write_text(text)
        told = unpad("generate", run, "--prompt", "你好", "--schema", file, code=code)
        assert f"schema.json:{line}\n" in told.err
        assert said in told.err


@pytest.mark.promise("llm.system-text")
def test_a_system_text_becomes_the_system_turn_of_training(unpad: Shell, run: Path) -> None:
    loaded = load(run)
    shown = loaded.tokenizer.decode(loaded.prompt("你好", "简短").ids)
    assert shown == "系统：简短用户：你好助手："
    one = json.loads(unpad("generate", run, "--prompt", "你好", "--system", "简短", "--json").out)
    assert one[0]["system"] == "简短"
    assert one[0]["prompt_tokens"] == len(loaded.prompt("你好", "简短").ids)
    for told in (unpad("generate", run, "--prompt", "你好", "--system", "简短"),
                 unpad("chat", run, "--system", "简短", stdin="你好\n")):  # fmt: skip
        assert told.code == 0
        assert "note: no conversation that this run was trained on has a system turn" in told.err


def test_a_run_trained_on_system_turns_and_one_that_does_not_say(unpad, tmp_path, monkeypatch):
    path = told_of_system(tmp_path)
    assert load(path).num_system is not None
    assert (load(path).num_system or 0) >= 15
    told = unpad("generate", path, "--prompt", "你好", "--system", "简短")
    assert (told.code, told.err) == (0, "")
    (path / "log.jsonl").unlink()
    assert load(path).num_system is None
    assert "does not record" in unpad("chat", path, "--system", "简短", stdin="").err
    assert count_system_turns([{"kind": "data", "system_turns": 3}, {"kind": "data", "system_turns": 4}]) == 4
    assert count_system_turns([{"kind": "data"}, {"kind": "eval", "system_turns": 3}]) is None
    assert system_note(4) == ""


def test_what_is_lost_of_a_prompt_is_of_its_system_text_too(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(dropping_bpe("系统：用户助手你好"))
    tokenizer = open_tokenizer_file(tmp_path / "tokenizer.json")
    recipe = Recipe(**{"data": {"chat": "chats.jsonl"}})
    for text, system, lost, total in (("你好", "", 0, 2), ("你好", "简短", 2, 4), ("短", "你好简短", 3, 5)):
        found = encode(recipe, tokenizer, text, system).lost
        assert (found.lost, found.total) == (lost, total)


@pytest.mark.promise("llm.system-text")
def test_runs_without_a_place_for_a_system_text_refuse_it(unpad: Shell, tmp_path: Path) -> None:
    texts = [{"name": "pretrain", "use": ["text"], "train": {"max_epochs": 1}}]
    write_toy(tmp_path / "a", data={"chat": []}, stages=texts)
    train(str(tmp_path / "a" / "toy.yaml"), tmp_path / "texts", STEPS, console=quiet())
    write_toy(tmp_path / "b", data={"template": {"system": ""}})
    train(str(tmp_path / "b" / "toy.yaml"), tmp_path / "bare", STEPS, console=quiet())
    for path, what in ((tmp_path / "texts", "on no conversations"), (tmp_path / "bare", "an empty prefix")):
        for told in (unpad("generate", path, "--prompt", "你好", "--system", "简短"),
                     unpad("chat", path, "--system", "简短", stdin="你好\n")):  # fmt: skip
            assert told.code == 2
            assert what in told.err
        assert isinstance(load(path), LoadedRun)
    assert "an empty prefix" in unpad("chat", tmp_path / "bare", stdin="/system 简短\n").err
    note = "note: this run was trained on plain text: it continues the text rather than answering\n"
    told = unpad("chat", tmp_path / "texts", stdin="你好\n小猫\n")
    assert (told.code, told.err, len(told.out.splitlines())) == (0, note, 2)
    assert unpad("chat", tmp_path / "bare", stdin="你好\n").err == ""


@pytest.mark.promise("llm.generation")
def test_a_question_without_a_picture_is_put_as_in_training(finished: Finished, unpad: Shell) -> None:
    run = finished("questions").run
    loaded = load(run)
    data = loaded.data()
    counts = data.rows.counts[: len(data.tokens_of(0))]
    assert loaded.prompt_ids(data.examples[0].question) == data.tokens_of(0)[: counts.argmax()].tolist()
    assert "no picture is given; `unpad infer" in unpad("generate", run, "--prompt", "what").err
    assert "no picture is given; `unpad infer" in unpad("chat", run, stdin="what\n").err


@pytest.mark.promise("llm.context")
def test_replies_and_contexts_beyond_the_trained_one_are_refused(run: Path, unpad: Shell) -> None:
    loaded = load(run)
    longest = loaded.model.config.longest
    beyond = unpad("generate", run, "--prompt", "小猫喜欢什么？", f"max_new_tokens={longest}", code=2)
    assert "after a prompt of" in beyond.err
    with pytest.raises(RecipeError, match="after a prompt of"):
        loaded.generate(["小猫"], max_new_tokens=longest)
    assert "does not fit into the context" in unpad("chat", run, f"max_new_tokens={longest + 1}").err
    with pytest.raises(RecipeError, match="was trained on contexts of"):
        load(run, [f"model.context={8 * longest}", "model.positions=rotary"])
    assert loaded.generate(["小猫"]), "the default ends with the context"
