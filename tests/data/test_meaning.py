"""Claims that sequences are what their rows say, and faults that they notice."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from unpad.data.check import check
from unpad.data.meaning import claims
from unpad.data.sources.example import Turn
from unpad.data.tokens import encode
from unpad.data.tokens.corpus import open_corpus
from unpad.data.tokens.tokenizer import LibraryTokenizer
from unpad.data.tokens.words import WordTokenizer
from unpad.recipes.file import load_recipe

TEXT, REPLIES, TYPED = (
    "text comes back from its ids", "only replies are learnt, each to its end",
    "special tokens that a user types stay text",
)  # fmt: skip
KINDS = ("words", "bpe")


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))
    turns = [("user", "hi there"), ("assistant", "Good day.\nYes?"), ("user", "你好"), ("assistant", "你好。")]
    rows = [{"messages": [{"role": r, "content": f"{c} {i}"} for r, c in turns]} for i in range(8)]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def wrong(path: Path, kind: str = "bpe", what: str = "chat") -> dict[str, tuple[str, ...]]:
    recipe = load_recipe("chat", [f"data.{what}={path}", f"tokenizer.kind={kind}"])
    return {claim.name: claim.wrong for claim in claims(open_corpus(recipe), recipe) if claim.tried}


@pytest.mark.parametrize("kind", KINDS)
def test_claims_hold_of_conversations_pairs_and_texts(chats, kind):
    assert wrong(chats, kind) == {TEXT: (), REPLIES: (), TYPED: ()}
    rows = [json.loads(line) for line in chats.read_text().splitlines()]
    for row in rows:
        row["messages"][1]["train"] = False
    partly = chats.with_name("partly.jsonl")
    partly.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert wrong(partly, kind) == {TEXT: (), REPLIES: (), TYPED: ()}
    pairs, texts = chats.with_name("pairs.jsonl"), chats.with_name("texts.jsonl")
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    rows = [{"prompt": prompt, "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(6)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts.write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(6)))
    recipe = load_recipe("dpo", [f"data.pairs={pairs}", "model={kind: decoder}", f"tokenizer.kind={kind}"])
    assert [claim.wrong for claim in claims(open_corpus(recipe), recipe)] == [(), (), ()]
    recipe = load_recipe("small", [f"data.text={texts}", f"tokenizer.kind={kind}"])
    assert [(claim.name, claim.wrong) for claim in claims(open_corpus(recipe), recipe)] == [(TEXT, ())]


def learns_users(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Turn, "has_loss", property(lambda turn: turn.role != "system"))


def changed(patch: pytest.MonkeyPatch, change: Callable[[encode.Encoded], dict[str, np.ndarray]]) -> None:
    part = encode._encode_part
    patch.setattr(encode, "_encode_part", lambda job, span: replace(one := part(job, span), **change(one)))


def shifts_the_mask(patch: pytest.MonkeyPatch) -> None:
    changed(patch, lambda one: {"loss_mask": np.roll(one.loss_mask, 1)})


def learns_the_prompts_end(patch: pytest.MonkeyPatch) -> None:
    changed(patch, lambda one: {"loss_mask": one.loss_mask | np.roll(one.loss_mask, -2)})


def cuts_the_end(patch: pytest.MonkeyPatch) -> None:
    changed(patch, lambda one: {"loss_mask": one.loss_mask & np.roll(one.loss_mask, -1)})


def other_order(patch: pytest.MonkeyPatch) -> None:
    contents = encode._encode_contents
    patch.setattr(encode, "_encode_contents", lambda *given: (lambda ids, lost: (ids[::-1], lost))(*contents(*given)))


def lower_case(patch: pytest.MonkeyPatch) -> None:
    for kind in (LibraryTokenizer, WordTokenizer):
        decode = kind.decode
        patch.setattr(kind, "decode", lambda self, ids, decode=decode: decode(self, ids).replace("Y", "J"))


def marks_names(patch: pytest.MonkeyPatch) -> None:
    counted = LibraryTokenizer.encode_counted

    def marked(self: LibraryTokenizer, texts: list[str]) -> tuple[list[list[int]], list[str]]:
        ids, lost = counted(self, texts)
        return [[*i, self.eos_id] if "<|" in text else i for i, text in zip(ids, texts, strict=True)], lost

    patch.setattr(LibraryTokenizer, "encode_counted", marked)


def test_data_check_of_a_recipe_with_a_tokenizer_names_a_claim_that_is_wrong(chats, monkeypatch):
    recipe = load_recipe("chat", [f"data.chat={chats}"])
    tokenizer = chats.with_name("tokenizer.json")
    tokenizer.write_bytes(open_corpus(recipe).tokenizer.to_bytes())
    given = [f"data.chat={chats}", "tokenizer.kind=file", f"tokenizer.path={tokenizer}"]
    assert not any("not so" in note for note in check(Path("chat"), overrides=given).notes)
    lower_case(monkeypatch)
    assert any(f"not so: {TEXT}; 8 of 32 texts" in note for note in check(Path("chat"), overrides=given).notes)


@pytest.mark.parametrize(
    ("fault", "claim", "said"),
    [
        (learns_users, REPLIES, "2 replies to learn, and 4 runs"),
        (shifts_the_mask, REPLIES, "2 replies to learn, and 3 runs"),
        (learns_the_prompts_end, REPLIES, "is not its reply"),
        (cuts_the_end, REPLIES, "a reply is not learnt to its end"),
        (other_order, REPLIES, "is not its reply"),
        (lower_case, TEXT, "8 of 32 texts come back with other characters"),
        (marks_names, TYPED, "became special tokens"),
    ],
)
def test_a_fault_is_noticed_by_the_claim_on_it(fault, claim, said, chats, monkeypatch):
    fault(monkeypatch)
    found = wrong(chats)
    assert said in " ".join(found[claim]), found
