"""Chat templates of reasoning models: they rewrite replies, and the loss is on what the model says after its prompt."""

from collections.abc import Sequence

import pytest

from tests.helpers.chat_folder import CHATML, MARKED, byte_level, turns_of
from tests.helpers.thinking import DROPPED, DROPPED_MARKED, EMPTY, FAMILIES, LATE, trl_template
from unpad.data.sources.example import Example, Turn
from unpad.data.tokens.encode import encode_examples, encode_prompt
from unpad.data.tokens.tokenizer import Tokenizer, load_tokenizer, with_import
from unpad.errors import SourceError
from unpad.recipes.data import Template

transformers = pytest.importorskip("transformers")

THOUGHT = "<think>\nhm\n</think>\n\nyes"
ONE = [("user", "q"), ("assistant", THOUGHT)]
TWO = [
    ("system", "你好"), ("user", "q"), ("assistant", "<think>\nfirst\n</think>\n\nno"), ("user", "r"),
    ("assistant", THOUGHT),
]  # fmt: skip
PLAIN = [("user", "q"), ("assistant", "no"), ("user", "r"), ("assistant", "yes")]
NAMES = {"bos_token": "<s>", "eos_token": "<|im_end|>"}


def library(special: bool = False):
    made = byte_level(["hello there, hello you", "\n\n\n\n yes \n\nno"] * 3)
    (made.add_special_tokens if special else made.add_tokens)(["<think>", "</think>"])
    return made


def tokenizer_with(source: str, special: bool = False) -> Tokenizer:
    own = {"pad": "<|endoftext|>", "bos": "<s>", "eos": "<|im_end|>", "stops": ["<|im_end|>", "<|endoftext|>"]}
    data = library(special).to_str().encode()
    return load_tokenizer(with_import(data, {**own, "chat_template": source, "names": NAMES}))


def theirs(source: str, special: bool = False) -> transformers.PreTrainedTokenizerFast:
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=library(special), **NAMES)
    made.chat_template = source
    return made


def messages_of(talk: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in talk]


def encoded(source: str, turns: Sequence[Turn], thinking: bool | None = None) -> tuple[list[int], list[bool]]:
    template = Template(thinking=thinking)
    ids, mask, _, _ = encode_examples([Example("x:1", tuple(turns))], tokenizer_with(source), template)
    return ids.tolist(), mask.tolist()


def said(source: str, turns: Sequence[Turn], thinking: bool | None = None) -> list[str]:
    """Texts of the runs of tokens that carry loss."""
    ids, mask = encoded(source, turns, thinking)
    runs: list[list[int]] = []
    for index, (id, counts) in enumerate(zip(ids, mask, strict=True)):
        if counts and (index == 0 or not mask[index - 1]):
            runs.append([])
        if counts:
            runs[-1].append(id)
    return [theirs(source).decode(run) for run in runs]


WHOLE, AFTER_OPENING = THOUGHT + "<|im_end|>", "hm\n</think>\n\nyes<|im_end|>"
SAID = {
    ("late", "one"): [WHOLE],
    ("late", "two"): ["no<|im_end|>", WHOLE],
    ("late", "plain"): ["no<|im_end|>", "<think>\n\n</think>\n\nyes<|im_end|>"],
    ("opened", "one"): [AFTER_OPENING],
    ("opened", "two"): ["no<|im_end|>", AFTER_OPENING],
    ("opened", "plain"): ["no<|im_end|>", "\n</think>\n\nyes<|im_end|>"],
    ("dropped", "one"): [AFTER_OPENING],
    ("dropped", "two"): ["\n\nno<|im_end|>", AFTER_OPENING],
    ("empty", "one"): [AFTER_OPENING],
    ("empty", "two"): ["no<|im_end|>", AFTER_OPENING],
}
TALKS = {"one": ONE, "two": TWO, "plain": PLAIN}


@pytest.mark.promise("models.reasoning")
@pytest.mark.parametrize(("kind", "talk"), SAID)
def test_the_loss_is_on_what_the_model_says_after_its_prompt(kind, talk):
    source, turns = FAMILIES[kind], turns_of(TALKS[talk])
    assert said(source, turns) == SAID[kind, talk]
    # Before the last reply stands the prompt that a chat with the model has, history and all.
    ids, mask = encoded(source, turns)
    start = len(mask) - mask[::-1].index(True)
    while mask[start - 1]:
        start -= 1
    assert ids[:start] == encode_prompt(turns[:-1], tokenizer_with(source), Template())


@pytest.mark.promise("models.reasoning")
@pytest.mark.parametrize(("kind", "talk"), [one for one in SAID if one[0] != "dropped"])
def test_the_ids_are_those_of_transformers(kind, talk):
    source = FAMILIES[kind]
    expected = theirs(source).apply_chat_template(messages_of(TALKS[talk]), return_dict=True)["input_ids"]
    ids, _ = encoded(source, turns_of(TALKS[talk]))
    whole = theirs(source)
    assert whole.decode(ids) == whole.decode(expected)
    if kind in ("late", "empty") or talk != "plain":  # else "\n\n" after <think> is a token of the whole text
        assert ids == expected


@pytest.mark.promise("models.reasoning")
def test_thoughts_that_a_template_drops_are_learned_after_the_prompt_that_opens_them():
    kept = DROPPED.replace(".split('</think>')[-1]", "")
    for content in (THOUGHT, "hm\n</think>\n\nyes", "<think>hm\n</think>\n\nyes"):
        ids, _ = encoded(DROPPED, [Turn("user", "q"), Turn("assistant", content)])
        assert ids == theirs(kept).apply_chat_template(messages_of(ONE), return_dict=True)["input_ids"]


@pytest.mark.parametrize(
    ("kind", "content"), [*((kind, THOUGHT) for kind in FAMILIES), ("opened", THOUGHT[8:]), ("dropped", THOUGHT[8:])]
)
def test_a_chat_goes_on_as_training_did(kind, content):
    """What the model said after an opened prompt has no <think>; it enters the history as a row's reply does."""
    tokenizer = tokenizer_with(FAMILIES[kind])
    turns = turns_of([("user", "q"), ("assistant", content), ("user", "r")])
    ids, _ = encoded(FAMILIES[kind], [*turns, Turn("assistant", THOUGHT)])
    prompt = encode_prompt(turns, tokenizer, Template())
    assert ids[: len(prompt)] == prompt
    asked = theirs(FAMILIES[kind]).apply_chat_template(
        messages_of([(turn.role, turn.content) for turn in turns]), add_generation_prompt=True, return_dict=True
    )
    assert prompt == asked["input_ids"]


@pytest.mark.promise("models.reasoning")
def test_a_model_that_is_told_not_to_think_has_the_empty_thoughts_in_its_prompt():
    turns = turns_of(PLAIN)
    assert said(LATE, turns, thinking=False) == ["no<|im_end|>", "yes<|im_end|>"]
    assert said(EMPTY, turns[:2], thinking=False) == ["no<|im_end|>"]
    ids, mask = encoded(LATE, turns[:2], thinking=False)
    prompt = encode_prompt(turns[:1], tokenizer_with(LATE), Template(thinking=False))
    assert ids[: len(prompt)] == prompt
    assert mask.index(True) == len(prompt)
    assert theirs(LATE).decode(prompt).endswith("<think>\n\n</think>\n\n")
    with pytest.raises(SourceError, match="does not go on from there") as caught:
        encoded(LATE, turns_of(ONE), thinking=False)
    assert "thinking=true" in str(caught.value)


@pytest.mark.parametrize("kind", ["late", "opened"])
def test_thoughts_in_a_field_are_those_in_the_text(kind):
    fielded = [Turn("user", "q"), Turn("assistant", "yes", thoughts="hm")]
    assert encoded(FAMILIES[kind], fielded) == encoded(FAMILIES[kind], turns_of(ONE))
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes", "reasoning_content": "hm"}]
    expected = theirs(FAMILIES[kind]).apply_chat_template(messages, return_dict=True)["input_ids"]
    assert encoded(FAMILIES[kind], fielded)[0] == expected


@pytest.mark.promise("models.thoughts")
@pytest.mark.parametrize("source", [CHATML, MARKED, DROPPED], ids=["chatml", "marked", "dropped"])
def test_thoughts_in_a_field_that_the_template_does_not_read_are_refused(source):
    with pytest.raises(SourceError, match="leaves out the thoughts of the last reply") as caught:
        encoded(source, [Turn("user", "q"), Turn("assistant", "yes", thoughts="hm")])
    assert caught.value.where == "x:1"
    assert "into the content" in str(caught.value)


REFUSED = {
    "middle": (LATE, "<think>a</think>b</think>c", "changes a message"),
    "twice": (LATE, "<think>a<think>b</think>c", "changes a message"),
    "before": (LATE, "Well. <think>a</think>c", "changes a message"),
    "before, dropped": (DROPPED, "Well. <think>a</think>c", "changes a message"),
    "no thoughts": (DROPPED, "yes", "ends with '<think>', and the last reply does not go on from there"),
    "empty thoughts": (EMPTY, "yes", "ends with '<think>', and the last reply does not go on from there"),
    "field alone": (LATE.replace("'</think>' in message.content", "false"), THOUGHT, "thoughts of its own before"),
    "upper": (LATE.replace("answer +", "answer | upper +"), THOUGHT, "changes a message"),
    "dropped, never opened": (DROPPED.replace("A:<think>\\n", "A:"), THOUGHT, "leaves out the thoughts of the last"),
    "dropped, marked": (DROPPED_MARKED, THOUGHT, "leaves out the thoughts of the last"),
}  # fmt: skip


@pytest.mark.promise("models.reasoning")
@pytest.mark.parametrize("fault", REFUSED)
def test_what_cannot_be_placed_is_refused_by_role_and_row(fault):
    source, content, message = REFUSED[fault]
    with pytest.raises(SourceError, match=message) as caught:
        encoded(source, [Turn("user", "q"), Turn("assistant", content)])
    assert caught.value.where == "x:1"
    assert caught.value.fix


def test_the_prompt_is_what_training_had_where_white_space_goes_to_the_word_after_it():
    """GPT-2's pattern leaves the last of two line breaks to what follows."""
    turns = turns_of([("user", "q"), ("assistant", "yes")])
    ids, mask = encoded(LATE, turns, thinking=False)
    assert ids[: mask.index(True)] == encode_prompt(turns[:1], tokenizer_with(LATE), Template(thinking=False))


@pytest.mark.promise("models.reasoning")
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "nemotron_3_nano"])
def test_the_loss_is_where_training_templates_of_trl_have_it(name):
    own, marked = trl_template(name), theirs(trl_template(f"{name}_training"))
    found = marked.apply_chat_template(messages_of(ONE), return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = encoded(own, turns_of(ONE))
    assert ids == found["input_ids"]
    expected = [bool(one) for one in found["assistant_masks"]]
    # TRL counts the <think> and the line break that the prompt has, and the line break after the token that ends.
    opened = 2 if name != "qwen3" else 0
    start, stop = expected.index(True) + opened, len(ids) - 1
    assert mask == [start <= place < stop for place in range(len(ids))]
