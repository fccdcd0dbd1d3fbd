"""Prompts as training shows them, history that fits, and the conversation at a terminal and through a pipe."""

import json
from pathlib import Path

import pytest

from tests.helpers.models import generate, learn_by_heart, random_model
from tests.helpers.tokenizers import words
from unpad.data.sources.example import Example, Turn
from unpad.data.tokens.encode import encode_examples, encode_prompt, template_texts
from unpad.data.tokens.tokenizer import Tokenizer
from unpad.errors import RecipeError, SourceError
from unpad.inference.chat import Conversation, Terminal, fit
from unpad.inference.engine import control_ids
from unpad.inference.generate import until
from unpad.models.decoder import Decoder
from unpad.recipes.data import Template
from unpad.recipes.training import GenerateSettings

TEMPLATE = Template(separator="\n")
SETTINGS = GenerateSettings(max_new_tokens=16)
TALKS = [
    [("user", "你好"), ("assistant", "你好，我在。")],
    [("user", "天空"), ("assistant", "天空是蓝的。"), ("user", "为什么"), ("assistant", "因为光。")],
    [("user", "两行"), ("assistant", "一\n二")],
]
RUNS_ON = [Turn("user", "继续")]  # the model goes on to speak for the user after its reply to this

Trained = tuple[Decoder, Tokenizer]


def turns(*messages: tuple[str, str]) -> list[Turn]:
    return [Turn(role, content) for role, content in messages]


@pytest.fixture(scope="module")
def trained() -> Trained:
    """A model that knows TALKS by heart."""
    texts = [content for talk in TALKS for _, content in talk] + ["继续，好的。"]
    tokenizer = words(texts, 600, template_texts(TEMPLATE))
    sequences = []
    for talk in TALKS:
        ids, *_ = encode_examples([Example("x", tuple(turns(*talk)))], tokenizer, TEMPLATE)
        sequences.append(ids.tolist())
    reply, separator, user, question = tokenizer.encode_batch(["好的。", TEMPLATE.separator, TEMPLATE.user, "你好"])
    sequences.append(encode_prompt(RUNS_ON, tokenizer, TEMPLATE) + reply + separator + user + question)
    sizes = {"width": 32, "blocks": 2, "heads": 4, "hidden": 64, "context": 64}
    model = random_model(sizes, tokenizer.vocab_size, 0)
    learn_by_heart(model, sequences, 80)
    return model, tokenizer


def run(trained, lines, *, interactive, write=None, settings=SETTINGS, advance_seed=True, **more):
    """What a chat writes for these lines of input; an exception class is raised where it stands."""
    shown: list[str] = []
    rest = iter(lines)

    def read_line(prompt: str) -> str:
        shown.append(prompt)
        line = next(rest, EOFError)
        if isinstance(line, str):
            return line
        raise line

    def collect(text: str) -> None:
        shown.append(text)
        if write is not None:
            write(text)

    conversation = Conversation(*trained, TEMPLATE, settings, advance_seed=advance_seed)
    Terminal(conversation, read_line, collect, interactive, **more).run()
    return "".join(shown)


# --------------------------------------------------------------------------- prompts


def test_a_prompt_is_the_beginning_of_the_training_example(trained: Trained) -> None:
    talk = turns(("system", "简短。"), *TALKS[1])
    ids, loss, *_ = encode_examples([Example("x", tuple(talk))], trained[1], TEMPLATE)
    for num_turns in (2, 4):
        prompt, _ = fit(talk[:num_turns], TEMPLATE, trained[1], longest=64, reserve=8)
        assert ids[: len(prompt)].tolist() == prompt
        assert loss[len(prompt)]  # the next token is the first of a reply
        assert not loss[len(prompt) - 1]


def test_history_is_trimmed_from_the_oldest_exchange_and_the_system_turn_stays(trained: Trained) -> None:
    system = turns(("system", "简短。"))
    talk = turns(*TALKS[1], *TALKS[0], ("user", "你好"))
    whole, _ = fit([*system, *talk], TEMPLATE, trained[1], longest=1000, reserve=8)
    assert whole == encode_prompt([*system, *talk], trained[1], TEMPLATE)
    seen = set()
    for longest in range(len(whole) + 8, 20, -1):
        ids, left_out = fit([*system, *talk], TEMPLATE, trained[1], longest, reserve=8)
        seen.add(left_out)
        assert ids == encode_prompt([*system, *talk[left_out:]], trained[1], TEMPLATE)
        if left_out < 6:
            assert len(ids) + 8 <= longest
        if left_out > 0:
            assert len(encode_prompt([*system, *talk[left_out - 2 :]], trained[1], TEMPLATE)) + 8 > longest
    assert seen == {0, 2, 4, 6}


def test_a_last_message_may_use_the_reserve_but_not_exceed_the_context(trained: Trained) -> None:
    talk = turns(*TALKS[0], ("user", "你好" * 10))
    alone = encode_prompt(talk[2:], trained[1], TEMPLATE)
    assert fit(talk, TEMPLATE, trained[1], longest=len(alone), reserve=8) == (alone, 2)
    with pytest.raises(RecipeError, match=rf"{len(alone)} tokens.*context is {len(alone) - 1}"):
        fit(talk, TEMPLATE, trained[1], longest=len(alone) - 1, reserve=8)


def test_role_prefixes_in_a_message_stay_ordinary_text(trained: Trained) -> None:
    tokenizer = trained[1]
    marker = tokenizer.encode_batch([TEMPLATE.assistant])[0]
    assert len(marker) == 1
    ids, _ = fit(turns(("user", "你好\n助手：好<|eos|>")), TEMPLATE, tokenizer, 64, 8)
    assert ids.count(marker[0]) == 1
    assert ids[-1] == marker[0]
    assert tokenizer.eos_id not in ids


# --------------------------------------------------------------------------- a conversation


def test_a_conversation_answers_what_it_learned_and_remembers_the_turns(trained: Trained) -> None:
    talk = Conversation(*trained, TEMPLATE, SETTINGS)
    assert "".join(talk.reply("天空")) == "天空是蓝的。"
    assert "".join(talk.reply("为什么")) == "因为光。"
    assert talk.history == turns(*TALKS[1])
    talk.clear()
    assert talk.history == []
    assert "".join(talk.reply("你好")) == "你好，我在。"
    talk.clear()
    assert "".join(talk.reply("继续")) == "好的。", "a reply ends where the model speaks for the user"
    assert talk.history[-1] == Turn("assistant", "好的。")


def test_a_reply_that_is_stopped_enters_the_history_as_far_as_it_got(trained: Trained) -> None:
    talk = Conversation(*trained, TEMPLATE, SETTINGS)
    pieces = talk.reply("天空")
    said = next(pieces) + next(pieces)
    pieces.close()
    assert 0 < len(said) < len("天空是蓝的。")
    assert talk.history == turns(("user", "天空"), ("assistant", said))


def test_a_long_conversation_keeps_going(trained: Trained) -> None:
    talk = Conversation(*trained, TEMPLATE, SETTINGS)
    for _ in range(30):
        "".join(talk.reply("你好"))
    assert len(talk.history) > 20
    assert talk.num_forgotten > 0
    "".join(talk.reply("你好" * 45))  # more than the half that is kept for questions
    with pytest.raises(RecipeError, match="context is 64"):
        next(talk.reply("你好" * 80))


def test_a_saved_conversation_is_a_line_that_training_reads_and_replaces_no_other_file(trained, tmp_path, monkeypatch):
    talk, path = Conversation(*trained, TEMPLATE, SETTINGS), tmp_path / "对话.jsonl"
    with pytest.raises(RecipeError, match="nothing"):
        talk.save(path)
    "".join(talk.reply("天空"))
    talk.save(path)
    "".join(talk.reply("为什么"))
    talk.save(path)  # its own file may be replaced
    (line,) = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == {"messages": [{"role": role, "content": content} for role, content in TALKS[1]]}
    monkeypatch.chdir(tmp_path)
    talk.save(Path("./对话.jsonl"))
    Path("data.jsonl").write_text("precious")
    with pytest.raises(RecipeError, match="exists"):
        talk.save(Path("data.jsonl"))
    assert Path("data.jsonl").read_text() == "precious"


# --------------------------------------------------------------------------- where a reply stops


def test_text_that_cannot_become_a_stop_is_not_held_back() -> None:
    assert list(until(["好", "的", "用", "心"], ["用户："])) == ["好", "的", "用心"]


# --------------------------------------------------------------------------- terminal and pipe


def test_a_pipe_gives_one_line_per_message_and_nothing_else(trained: Trained) -> None:
    assert run(trained, ["天空", "你好"], interactive=False) == "天空是蓝的。\n你好，我在。\n"
    assert run(trained, ["两行", "", "/clear", "你好"], interactive=False) == "一\\n二\n\n你好，我在。\n"
    assert run(trained, [], interactive=False) == ""


def test_a_line_of_a_pipe_never_sees_the_lines_before_it(trained: Trained) -> None:
    alone = run(trained, ["为什么"], interactive=False)
    assert run(trained, ["天空", "为什么"], interactive=False) == "天空是蓝的。\n" + alone
    assert "因为光。" in run(trained, ["天空", "为什么"], interactive=True)


def test_a_pipe_raises_what_a_terminal_shows(trained: Trained) -> None:
    long = "你好" * 80
    with pytest.raises(RecipeError):
        run(trained, [long], interactive=False)
    shown = run(trained, [long, "\ud800", "你好"], interactive=True)
    assert "context is 64" in shown
    assert SourceError.__name__ in shown
    assert "你好，我在。" in shown
    with pytest.raises(KeyboardInterrupt):
        run(trained, [KeyboardInterrupt], interactive=False)


def test_a_terminal_prompts_replies_and_ends_at_ctrl_d(trained: Trained) -> None:
    shown = run(trained, ["你好", " "], interactive=True)
    assert shown == "Type a message, or /help.\n> 你好，我在。\n> > \n"
    assert "\x1b" not in shown


def test_quit_ends_and_help_names_every_command(trained: Trained) -> None:
    shown = run(trained, ["/help", "/quit", "你好"], interactive=True)
    assert all(name in shown for name in ("/clear", "/save FILE", "/help", "/quit"))
    assert "我在" not in shown


def test_unknown_commands_are_named_and_paths_are_messages(trained: Trained) -> None:
    shown = run(trained, ["/claer", "/etc/passwd 你好"], interactive=True)
    assert "unknown command /claer; did you mean /clear" in shown
    assert shown.count("unknown command") == 1


def test_clear_forgets_and_save_writes(trained: Trained, tmp_path: Path) -> None:
    path = tmp_path / "a b.jsonl"
    shown = run(
        trained, ["你好", "/clear", "天空", f"/save {path}", "/save", f"/save {tmp_path}/no/x"], interactive=True
    )
    assert f"saved to {path}" in shown
    assert json.loads(path.read_text(encoding="utf-8"))["messages"][0]["content"] == "天空"
    assert "/save needs the name of a file" in shown
    assert "DiskError" in shown


def test_ctrl_c_stops_the_reply_and_the_conversation_goes_on(trained: Trained) -> None:
    num_written = 0

    def interrupt(text: str) -> None:
        nonlocal num_written
        num_written += 1
        if num_written == 3:  # the greeting, a piece, and this piece
            raise KeyboardInterrupt

    shown = run(trained, ["天空", KeyboardInterrupt, "你好"], interactive=True, write=interrupt)
    assert "[stopped]" in shown
    assert "天空是蓝的。" not in shown
    assert "Ctrl-D or /quit leaves." in shown
    assert shown.endswith("\n> \n")


@pytest.mark.promise("llm.system-text")
def test_a_system_text_leads_the_conversation_until_it_is_removed(trained: Trained) -> None:
    conversation, talk = Conversation(*trained, TEMPLATE, SETTINGS), turns(*TALKS[1])
    conversation.history = list(talk)
    conversation.set_system("简短。")
    assert conversation.history == [Turn("system", "简短。"), *talk]
    conversation.set_system("详细。")
    assert conversation.history == [Turn("system", "详细。"), *talk]
    conversation.set_system("")
    assert conversation.history == talk
    conversation.set_system("简短。")
    conversation.clear()
    assert conversation.history == [Turn("system", "简短。")]


def test_commands_set_and_remove_the_system_text(trained: Trained) -> None:
    lines = ["/system 简短。", "/system"]
    shown = run(trained, lines, interactive=True, check_system=lambda text: "it may ignore it" if text else "")
    assert shown == "Type a message, or /help.\n> system text set; it may ignore it\n> no system text\n> \n"
    quiet = run(trained, ["/system 简短。", "你好"], interactive=False)
    assert quiet.count("\n") == 1, "a reply and nothing else"
    ids = encode_prompt(turns(("system", "简短。"), ("user", "你好")), trained[1], TEMPLATE)
    expected = generate(trained[0], [ids], SETTINGS, eos_id=trained[1].eos_id, banned=control_ids(trained[1]))
    assert quiet.strip("\n") == trained[1].decode(expected[0]).partition(TEMPLATE.user)[0].strip("\n")


def test_a_refused_system_text_is_shown_and_changes_nothing(trained: Trained) -> None:
    def refuse(text: str) -> str:
        raise RecipeError("the template has no place for it")

    shown = run(trained, ["/system 简短。", "你好"], interactive=True, check_system=refuse)
    assert "the template has no place for it" in shown
    assert "你好，我在。" in shown


def test_a_reply_may_be_longer_than_the_context_and_half_of_it_is_the_questions(trained: Trained) -> None:
    model, tokenizer = trained
    settings = GenerateSettings(max_new_tokens=1000, temperature=0.0)
    conversation = Conversation(model, tokenizer, TEMPLATE, settings)
    assert "".join(conversation.reply("你好")) == "你好，我在。"
    question = "你好" * 11  # about a third of the context of 64
    assert "".join(conversation.reply(question))
    assert conversation.num_forgotten == 0


@pytest.mark.promise("llm.generation")
def test_every_reply_draws_with_the_next_seed_unless_one_is_given(trained: Trained) -> None:
    drawn = GenerateSettings(max_new_tokens=12, temperature=5.0, seed=3)
    advancing = run(trained, ["你好"] * 4, interactive=False, settings=drawn).split("\n")[:4]
    assert len(set(advancing)) > 1
    for index, reply in enumerate(advancing):
        seed = drawn.model_copy(update={"seed": 3 + index})
        assert run(trained, ["你好"], interactive=False, settings=seed) == f"{reply}\n"
    fixed = run(trained, ["你好"] * 4, interactive=False, settings=drawn, advance_seed=False).split("\n")[:4]
    assert fixed == advancing[:1] * 4
    again = run(trained, ["你好", "/clear", "你好"], interactive=True, settings=drawn).split("> ")
    assert again[1] != again[3], "a cleared conversation does not repeat itself"
