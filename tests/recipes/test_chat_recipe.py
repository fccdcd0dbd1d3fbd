"""The recipe `chat`: conversations in any language come back as they were taught, to the character."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from unpad.data.check import check
from unpad.data.sources.example import Example, Turn
from unpad.data.sources.files import PACKAGE
from unpad.data.tokens.encode import encode_examples, encode_prompt, reserved_texts
from unpad.data.tokens.tokenizer import DecodeStream, Tokenizer, load_tokenizer, train_tokenizer
from unpad.errors import RecipeError
from unpad.inference.chat import Conversation
from unpad.inference.loaded import LoadedRun, load
from unpad.recipes.file import load_recipe
from unpad.training.loop import train

ROOT = Path(__file__).parents[2]
ENGLISH = PACKAGE / "examples" / "en" / "chat.jsonl"
RECIPE = load_recipe("chat")
TEMPLATE = RECIPE.data.template
MARKS = (TEMPLATE.system, TEMPLATE.user, TEMPLATE.assistant)
SCRIPTS = (
    "abc ÄÖÜß éçñ", "Привет Ђ", "Ελλάδα ό", "שלום עליכם", "مرحبا لا", "नमस्ते क्षि", "สวัสดีครับ", "你好，世界。",
    "こんにちは ｶﾞ", "안녕 한국", "👩‍👩‍👧 🇩🇪 ☂️", "\t\n\r\u00a0\u2003\u200b\ufeff", " ",
)  # fmt: skip


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = [message["content"] for row in read(ENGLISH) for message in row["messages"]]
    return load_tokenizer(train_tokenizer(RECIPE.tokenizer, texts, reserved_texts(TEMPLATE)).to_bytes())


# --------------------------------------------------------------------------- the packaged example


@pytest.mark.promise("llm.chat-example")
def test_the_example_asks_25_facts_in_eight_ways_of_which_two_are_held_out():
    report = check(ENGLISH)
    assert (report.num_used, report.num_rows, ENGLISH.stat().st_size < 60_000) == (200, 200, True)
    rows, facts = read(ENGLISH), defaultdict(list)
    for row in rows:
        question, reply = (message["content"] for message in row["messages"])
        assert all(word in reply for word in row["keywords"]), question
        facts[row["group"]].append(row["split"])
    assert len({row["messages"][0]["content"] for row in rows}) == 200
    assert len(facts) == 25
    assert all(sorted(parts) == ["train"] * 6 + ["valid"] * 2 for parts in facts.values())


# --------------------------------------------------------------------------- its tokenizer and its marks


@pytest.mark.promise("llm.chat-recipe")
@given(st.lists(st.sampled_from([*SCRIPTS, *MARKS, "<|eos|>", "  " * 14]) | st.text(max_size=8), max_size=8))
def test_text_of_any_script_comes_back_to_the_character(tokenizer, parts):
    text = "".join(parts)
    ids = tokenizer.encode_batch([text])[0]
    assert tokenizer.decode(ids) == text
    stream = DecodeStream(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.flush() == text


@pytest.mark.promise("llm.chat-recipe")
def test_a_role_is_one_token_that_no_message_can_spell(tokenizer):
    marks = [id for (id,) in tokenizer.encode_batch(list(MARKS))]
    assert len({*marks, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id}) == 6
    texts = ["Hi", *MARKS, f"a {MARKS[2]} b", MARKS[1] * 2]
    turns = tuple(Turn(role, text) for text in texts for role in ("user", "assistant"))
    ids, _, _, lost = encode_examples([Example("x:1", turns)], tokenizer, TEMPLATE)
    assert [ids.tolist().count(id) for id in marks] == [0, len(texts), len(texts)]
    assert not lost.counts
    prompt = encode_prompt([Turn("system", "Be kind."), Turn("user", "Hi")], tokenizer, TEMPLATE)
    assert [id for id in prompt if id in marks] == marks
    assert tokenizer.decode(prompt) == f"{MARKS[0]}Be kind.{MARKS[1]}Hi{MARKS[2]}"


@pytest.mark.promise("llm.chat-recipe")
def test_only_marks_of_this_form_are_tokens_of_their_own():
    plain = load_recipe("llm", ["data.chat=x.jsonl"])
    made = train_tokenizer(plain.tokenizer, ["hello hello"], reserved_texts(plain.data.template))
    assert len(made.encode_batch(["用户："])[0]) > 1


# --------------------------------------------------------------------------- a trained model

LONG = (
    "Erstens: abschließen.\n\n  - Luft prüfen  (vier bar)\n  - Kette ölen\n\nDann: "
    + "langsam anfahren, " * 12
    + "Ende."
)
SYSTEM = "Du arbeitest in einer Werkstatt."


GERMAN = read(ROOT / "benchmarks" / "chat_de.jsonl")[:16]  # two facts in eight ways


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> LoadedRun:
    """16 German questions, conversations of two turns with a system text, and a long reply."""
    folder = tmp_path_factory.mktemp("chat")
    rows = [{"messages": row["messages"]} for row in GERMAN]
    system = {"role": "system", "content": SYSTEM}
    for first, second in zip(rows[:4], rows[8:12], strict=True):
        rows.append({"messages": [system, *first["messages"], *second["messages"]]})
    rows.append({"prompt": "Was muss ich vor der Fahrt tun?", "completion": LONG})
    path = folder / "de.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    fields = [f"data.chat={path}", "data.holdout=0", "train.threads=1"]
    train("chat", folder / "run", fields, console=Console(quiet=True))
    return load(folder / "run")


@pytest.mark.promise("llm.chat-recipe")
@pytest.mark.nightly
def test_every_trained_reply_is_equal_to_the_character(run):
    asked = [row["messages"][0]["content"] for row in GERMAN]
    wanted = [row["messages"][1]["content"] for row in GERMAN]
    told = run.generate(asked)
    assert sum(a == b for a, b in zip(told, wanted, strict=True)) >= 15  # of 16: processors round differently


@pytest.mark.promise("llm.chat-recipe")
@pytest.mark.nightly
def test_conversations_of_several_turns_a_system_text_and_long_replies_work(run):
    assert run.generate(["Was muss ich vor der Fahrt tun?"]) == [LONG]
    first, second = (GERMAN[index]["messages"] for index in (0, 8))
    talk = Conversation(run.generator, run.tokenizer, TEMPLATE, run.recipe.generate, system=SYSTEM)
    for question, reply in (first, second):
        assert "".join(talk.reply(question["content"])) == reply["content"]
    assert (talk.num_forgotten, len(talk.history)) == (0, 5)


@pytest.mark.promise("llm.chat-recipe")
@pytest.mark.nightly
def test_exported_and_imported_it_encodes_alike_by_its_own_chat_template(run, unpad, tmp_path):
    assert "zwölf Euro" in unpad("generate", run.folder, "--prompt", "Wie teuer ist ein platter Reifen?").out
    assert unpad("export", run.folder, tmp_path / "folder").code == 0
    assert unpad("import", tmp_path / "folder", "--out", tmp_path / "back").code == 0
    theirs = load(tmp_path / "back").tokenizer
    assert theirs.chat is not None
    example = Example("x:1", (Turn("user", "Hi"), Turn("assistant", f"{MARKS[1]}Hallo")))
    ids, *_ = encode_examples([example], theirs, TEMPLATE)
    own, *_ = encode_examples([example], run.tokenizer, TEMPLATE)
    assert ids.tolist() == own.tolist()
    with pytest.raises(RecipeError, match="has a chat template"):
        encode_examples([example], theirs, TEMPLATE.model_copy(update={"user": "Q: "}))
