"""What becomes of conversations under the chat templates of released models that TRL ships.

    python benchmarks/templates.py                  # all of them, twenty seconds; writes docs/internals/templates.md
    python benchmarks/templates.py qwen3 gemma3     # prints these alone

Each template gets a small byte-level tokenizer with the special tokens that it spells. Every conversation is encoded
as training does, and by `apply_chat_template` of transformers, at the date that templates are told here. The replies
are looked for by the prompts that transformers renders, or by its masks where a template marks replies itself.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers.utils import chat_template_utils

from unpad.data.sources.example import Example, Turn
from unpad.data.tokens.encode import encode_examples, encode_prompt
from unpad.data.tokens.jinja_process import TODAY
from unpad.data.tokens.tokenizer import Tokenizer, load_tokenizer, with_import
from unpad.errors import SourceError
from unpad.recipes.data import Template

PAGE = Path(__file__).parents[1] / "docs" / "internals" / "templates.md"
THOUGHTS = "<think>\nThe user asks.\nSo I say it.\n</think>\n\n"
SPELLED = "What do {} and <think> mean?"
CONVERSATIONS: dict[str, list[tuple[str, str]]] = {
    "one turn": [("user", "What is this?"), ("assistant", "This is a reply.")],
    "several": [
        *(("user", "one"), ("assistant", "The first reply.\n\nIts second paragraph.")),
        *(("user", "two"), ("assistant", "Second"), ("user", "three"), ("assistant", "A third one!")),
    ],
    "system, Chinese": [("system", "请简短回答。"), ("user", "你好，世界"), ("assistant", "你好！很高兴见到你。")],
    "thoughts": [
        *(("user", "one"), ("assistant", THOUGHTS + "The first reply.")),
        *(("user", "two"), ("assistant", THOUGHTS + "The second reply.")),
    ],
    "spelled": [("user", SPELLED), ("assistant", "They are {}.")],
    "field": [("user", "one"), ("assistant", "The reply.")],  # with the thoughts in reasoning_content
}
# Tokens that end a reply; which of them a model has, its generation_config.json says.
STOPS = (
    *("<|im_end|>", "<end_of_turn>", "<turn|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>"),
    *("<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<|eot|>", "<|end_of_turn|>"),
)
GLM_STOPS = ("<|user|>", "<|observation|>")
_SPECIAL = re.compile(r"<[^<>\s'\"{}()=:,]{1,40}>|\[gMASK\]|\[/?INST\]")
_TAGS = ("<think>", "</think>")
PATTERN = (  # of Qwen and others: line breaks belong together
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Case:
    """A template with its two tokenizers."""

    name: str
    source: str
    stops: tuple[str, ...]
    ours: Tokenizer
    theirs: Any

    @property
    def is_marked(self) -> bool:
        return "generation %}" in self.source or "generation -%}" in self.source


class _Today(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> _Today:
        return cls(TODAY.year, TODAY.month, TODAY.day)


def folder() -> Path:
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        sys.exit("trl is not installed; do: pip install unpad[hf]")
    return Path(found.origin).parent / "chat_templates"


def case(name: str) -> Case:
    source = (folder() / f"{name}.jinja").read_text(encoding="utf-8")
    stops = [stop for stop in STOPS if stop in source] or ["</s>"]
    if "[gMASK]" in source:
        stops = ["<|endoftext|>", *GLM_STOPS]
    specials = [*dict.fromkeys(["<|endoftext|>", "<s>", *stops, *_SPECIAL.findall(source)])]
    library = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[one for one in specials if one not in _TAGS], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    texts = [text for talk in CONVERSATIONS.values() for _, text in talk]
    library.train_from_iterator([*texts, "\n\n", "assistant\n\n"] * 9, trainer)
    library.add_tokens([*_TAGS])
    names = {"bos_token": "<s>", "eos_token": stops[0]}
    own = {"pad": "<|endoftext|>", "bos": "<s>", "eos": stops[0], "stops": stops, "chat_template": source}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library, **names)
    theirs.chat_template = source
    ours = load_tokenizer(with_import(library.to_str().encode(), {**own, "names": names}))
    return Case(name, source, tuple(stops), ours, theirs)


def talk_of(case: Case, kind: str) -> tuple[list[Turn], list[dict[str, str]]]:
    """The conversation as our turns, and as messages of transformers."""
    talk = [(role, text.replace("{}", case.stops[0])) for role, text in CONVERSATIONS[kind]]
    messages = [{"role": role, "content": text} for role, text in talk]
    turns = [Turn(role, text) for role, text in talk]  # type: ignore[arg-type]
    if kind == "field":
        turns[-1] = Turn("assistant", talk[-1][1], thoughts="The user asks.")
        messages[-1] |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "The user asks.")
    return turns, messages


def judge(case: Case, kind: str) -> str:
    """What becomes of a conversation: a letter of the page, or the reason why it is refused.

    Raises:
        AssertionError: something is silently other than the page says.
    """
    turns, messages = talk_of(case, kind)
    try:
        expected = case.theirs.apply_chat_template(messages, return_dict=True)["input_ids"]
    except Exception:  # of the template, in Jinja
        expected = None
    try:
        tokens, counts, _, _ = encode_examples([Example("talk:1", tuple(turns))], case.ours, Template())
    except SourceError as error:
        return "–" if expected is None else f"{error.what}; {error.fix}"
    ids, mask = tokens.tolist(), counts.tolist()
    assert expected is not None, "transformers refuses it"
    letter = _compared(case, kind, messages, ids, expected)
    _check_replies(case, kind, turns, messages, ids, mask, letter)
    return letter


def _compared(case: Case, kind: str, messages: list[dict[str, str]], ids: list[int], expected: list[int]) -> str:
    decode = case.theirs.decode
    if ids == expected:
        return "="
    if decode(ids) == decode(expected):
        if kind == "spelled":
            one = case.theirs.convert_tokens_to_ids(case.stops[0])
            plain, _ = talk_of(case, "one turn")
            other = encode_examples([Example("talk:1", tuple(plain))], case.ours, Template())[0].tolist()
            assert ids.count(one) == other.count(one), "a message makes a special token"
            return "t"
        return "c"
    prompt = case.theirs.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
    said = prompt + messages[-1]["content"].removeprefix("<think>\n") + case.stops[0]
    theirs = case.theirs(said, add_special_tokens=False)["input_ids"]
    assert ids == theirs, "neither the text of the template nor its prompt and the reply"
    return "p"


def _check_replies(
    case: Case, kind: str, turns: list[Turn], messages: list[dict[str, str]], ids: list[int], mask: list[bool],
    letter: str,
) -> None:  # fmt: skip
    runs = list(_runs(ids, mask))
    replies = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
    assert len(runs) == len(replies), "a reply is lost"
    if case.is_marked:
        if kind != "spelled":
            given = case.theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            assert mask == [bool(one) for one in given["assistant_masks"]], "not what the template marks"
        return
    text = case.theirs.decode(ids)
    for index, (start, stop) in zip(replies, runs, strict=True):
        prompt = case.theirs.apply_chat_template(messages[:index], add_generation_prompt=True, tokenize=False)
        said = case.theirs.decode(ids[start:stop])
        is_last = index == len(turns) - 1
        if text.startswith(prompt):
            assert text[len(prompt) :].startswith(said), "a reply does not begin where its prompt ends"
            assert case.theirs.decode(ids[:start]) == prompt, "a reply does not begin where its prompt ends"
        else:
            assert not is_last, "the last reply does not follow its prompt"
            assert said.lstrip().startswith(turns[index].content.split("</think>")[-1].lstrip()[:5])
        assert any(said.endswith(end) for end in case.stops), "a reply does not end with a token that ends one"
        if is_last and turns[index].thoughts + turns[index].content.partition("</think>")[1]:
            assert "The user asks." in said, "the thoughts of the last reply are not learned"
        if is_last and letter != "t":
            assert encode_prompt(turns[:index], case.ours, Template()) == ids[:start], "a chat has another prompt"


def _runs(ids: list[int], mask: list[bool]) -> Iterator[tuple[int, int]]:
    start = None
    for place, counts in enumerate([*mask, False]):
        if counts and start is None:
            start = place
        elif not counts and start is not None:
            yield start, place
            start = None


def page(rows: dict[str, list[str]]) -> str:
    reasons: dict[str, int] = {}
    lines = [f"| template | {' | '.join(CONVERSATIONS)} |", "|---|" + "---|" * len(CONVERSATIONS)]
    for name, cells in rows.items():
        shown = [cell if len(cell) == 1 else f"({reasons.setdefault(cell, len(reasons) + 1)})" for cell in cells]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    known = [cell for cells in rows.values() for cell in cells]
    count = {letter: known.count(letter) for letter in "=cpt–"}
    refused = len(known) - sum(count.values())
    notes = "\n".join(f"{number}. {reason}" for reason, number in reasons.items())
    return HEAD.format(
        number=len(rows), trl=transformers.utils.import_utils.importlib.metadata.version("trl"),
        equal=count["="], cut=count["c"], prompt=count["p"], text=count["t"], theirs=count["–"], refused=refused,
    ) + "\n".join(lines) + "\n\n" + f"Refused:\n\n{notes}\n"  # fmt: skip


HEAD = """\
# Chat templates

`python benchmarks/templates.py` writes this page. The {number} chat templates that TRL {trl} ships, each with six
conversations: what [training](../chat.md#conversations-of-imported-models) makes of them beside
`apply_chat_template` of transformers, with a small byte-level tokenizer that has the template's special tokens. Every
reply that is taken was also looked for by the prompts that transformers renders, or by its mask where the template has
generation marks; the command ends with an error if one is elsewhere, if the prompt of `unpad chat` is other than
what training has before the last reply, or if the thoughts of the last reply are not learned.
For templates it is always 26 July 2024 here.

- `=` ({equal}): the ids of transformers.
- `c` ({cut}): its text. The prompt ends with a line break after `<think>` and the reply begins with one, and in the
  whole text both are one token; the ids here are those of a model in use.
- `p` ({prompt}): the template leaves the thoughts of the last reply out, and its prompt opens them, so the reply
  follows that prompt; the ids are those of both texts together.
- `t` ({text}): its text; the message spells a special token, which stays text.
- `–` ({theirs}): transformers refuses it too.
- a number ({refused}): refused with the place of the row, the reason below and what to do.

"""


def main(names: list[str]) -> None:
    chat_template_utils.datetime = _Today
    rows: dict[str, list[str]] = {}
    wrong = 0
    for name in names or sorted(path.stem for path in folder().glob("*.jinja")):
        one, cells = case(name), list[str]()
        for kind in CONVERSATIONS:
            try:
                cells.append(judge(one, kind))
            except AssertionError as error:
                wrong += 1
                cells.append(f"WRONG: {error}")
        rows[name] = cells
        print(name, *cells, sep=" | ", flush=True)
    if wrong:
        sys.exit(f"{wrong} conversations are silently other than the page says")
    if not names:
        PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
