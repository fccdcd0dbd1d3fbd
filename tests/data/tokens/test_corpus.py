"""Encoded once, split by content, read back by number; a damaged cache is built again."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.corpus import CHATS, TEXTS, make_recipe, messages, prepare, write_corpus
from tests.helpers.tokenizers import word_list
from unpad.data.sources.example import Turn
from unpad.data.sources.reader import read_file
from unpad.data.sources.split import Split, Wanted
from unpad.data.tokens import corpus_files
from unpad.data.tokens.encode import encode_prompt, reserved_texts
from unpad.data.tokens.token_set import TokenSet
from unpad.data.tokens.tokenizer import Tokenizer, train_tokenizer
from unpad.data.tokens.words import FIRST_TOKEN, WordTokenizer
from unpad.errors import SourceError
from unpad.recipes.recipe import Recipe


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))
    write_corpus(tmp_path)
    return tmp_path


@pytest.mark.promise("versions.fingerprint")
def test_the_fingerprint_of_texts_and_conversations_is_that_of_version_0_1_0(tmp_path, monkeypatch):
    """Runs go on under a later version only if it finds the data that they were trained on."""
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "plain.txt").write_text("".join(f"This is number {i} of some short texts.\n\n" for i in range(20)))
    rows = [{"messages": messages(f"Who is number {i}?", f"Number {i} is the one after {i - 1}.")} for i in range(20)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = make_recipe(tmp_path, data={"text": "plain.txt"})
    reserved = reserved_texts(recipe.data.template)
    words = [piece.decode() for piece in prepare(recipe)[1].pieces[FIRST_TOKEN + len(reserved) :]]
    tokens = prepare(recipe, tokenizer=WordTokenizer(words, reserved))[0]
    assert tokens.fingerprint() == "9c8034f8493ace94873b4a3743c979802c5f47df8d7d56a008e84fda7306c643"


def test_what_was_read_under_a_named_format_is_refused_without_it(folder: Path) -> None:
    (folder / "rows.txt").write_text("".join(json.dumps({"text": text}) + "\n\n" for text in TEXTS))
    tokens, _, _ = prepare(make_recipe(folder, data={"text": {"path": "rows.txt", "format": "text"}}))
    assert len(tokens) > len(TEXTS)
    with pytest.raises(SourceError, match="JSON"):
        prepare(make_recipe(folder, data={"text": "rows.txt"}))


def contents(tokens: TokenSet) -> list[tuple[list[int], list[bool]]]:
    return [(tokens.tokens(i).tolist(), tokens.loss_mask(i).tolist()) for i in range(len(tokens))]


class Counting:
    """A tokenizer that counts the texts it is given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.texts = tokenizer, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        self.texts += texts
        return self.tokenizer.encode_batch(texts)

    def encode_counted(self, texts: Sequence[str]) -> tuple[list[list[int]], list[str]]:
        self.texts += texts
        return self.tokenizer.encode_counted(texts)


# --------------------------------------------------------------------------- what a sequence holds


@pytest.mark.promise("train.replies-only")
def test_texts_carry_loss_on_all_but_bos_and_chats_on_replies_alone(folder: Path) -> None:
    tokens, tokenizer, _ = prepare(make_recipe(folder))
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    text = tokenizer.encode_batch([TEXTS[0]])[0]
    assert tokens.tokens(0).tolist() == [bos, *text, eos]
    assert tokens.loss_mask(0).tolist() == [False, *[True] * (len(text) + 1)]
    first = int(np.flatnonzero(tokens.kind == 1)[0])
    lead, question, follow, answer = tokenizer.encode_batch(["用户：", CHATS[0][0], "助手：", CHATS[0][1]])
    assert tokens.tokens(first).tolist() == [bos, *lead, *question, *follow, *answer, eos]
    context = 1 + len(lead) + len(question) + len(follow)
    assert tokens.loss_mask(first).tolist() == [False] * context + [True] * (len(answer) + 1)
    assert tokens.target_chars[first] == len(CHATS[0][1])
    assert tokens.target_bytes[first] == len(CHATS[0][1].encode())
    assert tokens.num_targets[first] == len(answer) + 1
    assert tokens.where(first) == f"{folder / 'chat.jsonl'}:1"
    assert tokens.where(20) == f"{folder / 'text' / 'b.json'}[0]"
    assert tokens.keywords(first) == ("这是",)
    groups = [group for part in tokens.parts for group in part.shard.groups]
    assert (groups[first], groups[0]) == ("g0", "")


def test_separators_systems_and_every_reply_of_a_long_conversation(folder: Path) -> None:
    turns = [("system", "简短"), ("user", "一"), ("assistant", "二"), ("user", "三"), ("assistant", "四")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    (folder / "chat.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n")
    recipe = make_recipe(folder, data={"template": {"separator": "\n"}})
    tokens, tokenizer, _ = prepare(recipe)
    i = len(tokens) - 1

    def ids(text: str) -> list[int]:
        return tokenizer.encode_batch([text])[0]

    context = [
        tokenizer.bos_id, *ids("系统："), *ids("简短"), *ids("\n"), *ids("用户："), *ids("一"), *ids("\n"),
        *ids("助手："),
    ]  # fmt: skip
    first = [*ids("二"), tokenizer.eos_id]
    between = [*ids("\n"), *ids("用户："), *ids("三"), *ids("\n"), *ids("助手：")]
    second = [*ids("四"), tokenizer.eos_id]
    assert tokens.tokens(i).tolist() == context + first + between + second
    expected = [False] * len(context) + [True] * len(first) + [False] * len(between) + [True] * len(second)
    assert tokens.loss_mask(i).tolist() == expected
    prompt = encode_prompt([Turn("system", "简短"), Turn("user", "一"), Turn("assistant", "二"), Turn("user", "三")],
                           tokenizer, recipe.data.template)  # fmt: skip
    assert prompt == tokens.tokens(i).tolist()[: -len(second)], "a prompt is what training shows before a reply"


@pytest.mark.parametrize("kind", ["words", "bpe"])
@pytest.mark.parametrize("content", ["助手：", "<|eos|>", "你好<|bos|>助手：<|eos|>", "用户："])
def test_role_tags_and_special_tokens_in_a_message_are_ordinary_text(folder: Path, kind: str, content: str) -> None:
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "好"}]}
    (folder / "chat.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n")
    recipe = make_recipe(folder, tokenizer={"kind": kind, "vocab_size": 600})
    tokens, tokenizer, _ = prepare(recipe)
    lead, follow, answer = tokenizer.encode_batch(["用户：", "助手：", "好"])
    message = tokens.tokens(len(tokens) - 1).tolist()[1 + len(lead) : -len(follow) - len(answer) - 1]
    assert tokenizer.decode(message) == content
    assert not {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id} & set(message)
    if kind == "words":
        assert not {*lead, *follow} & set(message), "the role's own id"


# --------------------------------------------------------------------------- cache


@pytest.mark.promise("data.encoded-once")
def test_a_document_is_encoded_once_and_a_warm_start_reads_no_row(folder, monkeypatch):
    recipe = make_recipe(folder)
    tokenizer = Counting(train_tokenizer(recipe.tokenizer, TEXTS, reserved_texts(recipe.data.template)))
    cold, _, report = prepare(recipe, tokenizer=tokenizer)
    given = [*TEXTS, *(message for chat in CHATS for message in chat)]
    assert sorted(set(tokenizer.texts) - {"系统：", "用户：", "助手："}) == sorted(given)
    assert sum(text in given for text in tokenizer.texts) == len(given)
    assert (report.work.hits, report.work.misses, report.work.encoded) == (0, 3, 70)
    tokenizer.texts.clear()
    monkeypatch.setattr(corpus_files, "read_file", lambda *_: pytest.fail("a warm start reads no row"))
    warm, _, report = prepare(recipe, tokenizer=tokenizer)
    assert tokenizer.texts == []
    assert (report.work.hits, report.work.misses, report.work.encoded) == (3, 0, 0)
    assert contents(warm) == contents(cold)
    assert warm.split.tolist() == cold.split.tolist()
    assert warm.fingerprint() == cold.fingerprint()


@pytest.mark.promise("data.encoded-once")
def test_one_changed_file_is_encoded_alone(folder: Path) -> None:
    recipe = make_recipe(folder)
    _, tokenizer, _ = prepare(recipe)
    before = os.stat(folder / "text" / "b.json")
    (folder / "text" / "b.json").write_text((folder / "text" / "b.json").read_text().replace("山谷", "平原"))
    os.utime(folder / "text" / "b.json", ns=(before.st_atime_ns, before.st_mtime_ns))
    tokens, _, report = prepare(recipe, tokenizer=tokenizer)
    assert (report.work.hits, report.work.misses, report.work.encoded) == (2, 1, 20)
    assert tokenizer.decode(tokens.tokens(20).tolist()) == TEXTS[20].replace("山谷", "平原")


@pytest.mark.promise("data.encoded-once")
@pytest.mark.parametrize(
    "change",
    [
        {"data": {"template": {"user": "问："}}},
        {"tokenizer": {"vocab_size": 300}},
        {"tokenizer": {"kind": "bpe", "vocab_size": 500}},
    ],
)
def test_what_changes_the_tokens_changes_the_shards(folder: Path, change: dict[str, Any]) -> None:
    first, _, _ = prepare(make_recipe(folder))
    second, _, report = prepare(make_recipe(folder, **change))
    assert report.work.misses == 3
    assert first.fingerprint() != second.fingerprint()


def as_file(folder: Path, recipe: Recipe) -> Path:
    """The tokenizer of a recipe as a file, so that no change of the corpus changes it."""
    path = folder / "tokenizer.json"
    path.write_bytes(prepare(recipe)[1].to_bytes())
    return path


def with_file(path: Path) -> dict[str, Any]:
    return {"kind": "file", "path": str(path)}


def test_another_field_separator_or_template_never_meets_old_shards(folder: Path) -> None:
    """With a tokenizer of a file, whose bytes are the same for all of them."""
    rows = [{"text": f"第{i}句话。", "title": f"题目{i}。"} for i in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    (folder / "plain.txt").write_text("".join(f"第{i}段。###第{i}段又。\n\n" for i in range(20)))
    tokenizer = with_file(as_file(folder, make_recipe(folder)))

    def shown(**data: Any) -> set[str]:
        tokens, opened, _ = prepare(make_recipe(folder, data=data, tokenizer=tokenizer))
        return {opened.decode(tokens.tokens(i).tolist()) for i in range(len(tokens))}

    def field(name: str) -> list[dict[str, str]]:
        return [{"path": "rows.jsonl", "field": name}]

    assert shown(text=field("text"), chat=[]) == {row["text"] for row in rows}
    assert shown(text=field("title"), chat=[]) == {row["title"] for row in rows}
    assert len(shown(text="plain.txt", chat=[])) == 20
    assert len(shown(text="plain.txt", chat=[], separator="###")) == 21
    assert all("用户：" in text for text in shown(text=[]))
    assert all("问：" in text for text in shown(text=[], template={"user": "问："}))


def test_copies_follow_the_split_the_synonyms_and_nothing_older(folder: Path) -> None:
    tokenizer = with_file(as_file(folder, make_recipe(folder)))
    (folder / "synonyms.txt").write_text("山谷 峡谷\n", encoding="utf-8")
    augment = {"multiplier": 1, "synonyms": 1.0, "synonyms_file": str(folder / "synonyms.txt")}

    def copies(**train: Any) -> tuple[set[int], set[int], str]:
        tokens, opened, _ = prepare(
            make_recipe(folder, data={"chat": []}, tokenizer=tokenizer, augment=augment, train=train)
        )
        content = np.concatenate([part.shard.content_key for part in tokens.parts])
        held_out = set(content[tokens.split == Split.HOLDOUT].tolist())
        ids = np.flatnonzero(tokens.copy > 0)
        return set(content[ids].tolist()), held_out, opened.decode(tokens.tokens(int(ids[0])).tolist())

    first, held_out, text = copies()
    assert not first & held_out
    assert "峡谷" in text
    # The seed of the draws is the same key of the cache in both; only the split differs.
    for name in ("a.json", "b.json"):
        texts = json.loads((folder / "text" / name).read_text())
        rows = [{"text": one, "split": "holdout" if i % 2 else "train"} for i, one in enumerate(texts)]
        (folder / "text" / name).write_text(json.dumps(rows, ensure_ascii=False))
    declared, held_out, _ = copies()
    assert declared != first
    assert not declared & held_out
    (folder / "synonyms.txt").write_text("山谷 盆地\n", encoding="utf-8")
    assert "盆地" in copies()[2], "an edited synonym file makes new copies"


def test_copies_of_another_split_of_the_same_files_are_not_reused(folder: Path) -> None:
    tokenizer = with_file(as_file(folder, make_recipe(folder)))
    settings = {"data": {"chat": []}, "tokenizer": tokenizer, "augment": {"multiplier": 1, "synonyms": 1.0}}

    def sides(holdout: float) -> tuple[set[int], set[int]]:
        tokens, _, _ = prepare(make_recipe(folder, **{**settings, "data": {"chat": [], "holdout": holdout}}))
        content = np.concatenate([part.shard.content_key for part in tokens.parts])
        return set(content[tokens.copy > 0].tolist()), set(content[tokens.split == Split.HOLDOUT].tolist())

    few, _ = sides(0.1)
    copied, held_out = sides(0.5)
    assert held_out & few, "texts that had copies are held out now"
    assert not held_out & copied


def test_a_tokenizer_never_saw_what_another_seed_holds_out(folder: Path) -> None:
    texts = [f"{chr(0x4E00 + i)}句" for i in range(40)]
    (folder / "text" / "a.json").write_text(json.dumps(texts[:20], ensure_ascii=False))
    (folder / "text" / "b.json").write_text(json.dumps(texts[20:], ensure_ascii=False))
    for seed in (0, 1, 2):
        tokens, tokenizer, _ = prepare(make_recipe(folder, data={"chat": [], "holdout": 0.3}, train={"seed": seed}))
        held_out = [texts[i] for i in np.flatnonzero(tokens.split == Split.HOLDOUT)]
        assert held_out
        for text in held_out:
            assert len(tokenizer.encode_batch([text[0]])[0]) == 3, "spelled in bytes: it is in no vocabulary"


def test_changed_code_never_meets_old_shards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _, _ = prepare(make_recipe(folder))
    monkeypatch.setattr("unpad.data.tokens.cache.code_key", lambda: "another version")
    second, _, report = prepare(make_recipe(folder))
    assert report.work.misses == 3
    assert first.fingerprint() == second.fingerprint(), "a run may be resumed by a later version"


def test_the_same_file_under_another_name_is_a_hit_and_is_named_anew(folder: Path) -> None:
    _, tokenizer, _ = prepare(make_recipe(folder))
    (folder / "chat.jsonl").rename(folder / "other.jsonl")
    tokens, _, report = prepare(make_recipe(folder, data={"chat": "other.jsonl"}), tokenizer=tokenizer)
    assert report.work.misses == 0
    assert tokens.where(len(tokens) - 1) == f"{folder / 'other.jsonl'}:30"


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "flip": lambda path: path.write_bytes(path.read_bytes()[:-100] + b"\xff" + path.read_bytes()[-99:]),
    "truncate": lambda path: os.truncate(path, path.stat().st_size // 2),
    "zero": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "delete": lambda path: path.unlink(),
}


@pytest.mark.promise("data.encoded-once")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_built_again_to_the_same_bytes(folder: Path, damage: str) -> None:
    recipe = make_recipe(folder, augment={"multiplier": 1})
    cold, _, _ = prepare(recipe)
    files = sorted(path for path in (folder / "cache").rglob("*") if path.is_file())
    assert len(files) == 8  # 3 shards, 3 of copies, the tokenizer, the leak report
    whole = [path.read_bytes() for path in files]
    # Another process does the damage while this one maps the old files; a mapping of ours must not see it.
    for path in files:
        path.with_suffix(".new").write_bytes(path.read_bytes())
        path.with_suffix(".new").rename(path)
        DAMAGE[damage](path)
    again, _, report = prepare(recipe)
    assert len(report.work.events) == (0 if damage == "delete" else 8)
    assert report.work.misses == 6
    assert contents(again) == contents(cold)
    assert [path.read_bytes() for path in files] == whole


# --------------------------------------------------------------------------- rows, split, copies


def test_a_file_that_changes_while_it_is_read_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_and_touch(*arguments: Any) -> Any:
        rows = read_file(*arguments)
        arguments[1].path.write_text('["另一句。"]')
        return rows

    monkeypatch.setattr(corpus_files, "read_file", read_and_touch)
    with pytest.raises(SourceError, match="changed while it was read"):
        prepare(make_recipe(folder, data={"chat": []}))


@pytest.mark.promise("train.refusals")
def test_an_empty_corpus_and_one_without_training_part_are_refused(folder: Path) -> None:
    with pytest.raises(SourceError, match="names no data"):
        prepare(make_recipe(folder, data={"text": [], "chat": []}))
    (folder / "empty.jsonl").write_text("")
    with pytest.raises(SourceError, match="no usable chat example"):
        prepare(make_recipe(folder, data={"chat": "empty.jsonl"}))
    (folder / "held.jsonl").write_text('{"text": "一", "split": "holdout"}\n')
    with pytest.raises(SourceError, match="nothing to train on"):
        prepare(make_recipe(folder, data={"text": "held.jsonl", "chat": []}))


def test_the_split_follows_seed_and_declaration(folder: Path) -> None:
    rows = [{"text": text, "split": "holdout"} if i < 5 else {"text": text} for i, text in enumerate(TEXTS)]
    (folder / "declared.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"text": "declared.jsonl", "chat": []}
    splits = [prepare(make_recipe(folder, data=data, train={"seed": seed}))[0].split for seed in (1, 1, 2)]
    assert splits[0].tolist() == splits[1].tolist() != splits[2].tolist()
    for split in splits:
        assert split[:5].tolist() == [1] * 5
        assert 0 < split[5:].sum() < 35
    tokens, _, report = prepare(make_recipe(folder, data={**data, "holdout": 0.0}))
    assert tokens.split.sum() == 5
    assert report.leaks[Split.HOLDOUT].num_holdout == 5


@pytest.mark.promise("chinese.copies")
def test_only_training_originals_get_copies(folder: Path) -> None:
    augment = {"multiplier": 2, "delete": 0.3}
    plain, _, _ = prepare(make_recipe(folder))
    tokens, tokenizer, report = prepare(make_recipe(folder, augment=augment))
    assert (report.work.hits, report.work.misses) == (3, 3), "originals are not encoded again"
    originals = tokens.copy == 0
    num_train = int((plain.split == Split.TRAIN).sum())
    assert originals[: len(plain)].all()
    assert tokens.split[originals].tolist() == plain.split.tolist()
    assert not tokens.split[~originals].any()
    assert [int((tokens.copy == copy).sum()) for copy in (1, 2)] == [num_train, num_train]
    keys = np.concatenate([part.shard.content_key for part in tokens.parts])
    assert set(keys[~originals]) == set(keys[originals & (tokens.split == Split.TRAIN)])
    assert tokens.where(len(tokens) - 1).endswith("#2")
    assert len({tokenizer.decode(tokens.tokens(i).tolist()) for i in range(len(tokens))}) > len(plain)
    again, _, report = prepare(make_recipe(folder, augment=augment))
    assert report.work.misses == 0
    assert contents(again) == contents(tokens)
    _, _, report = prepare(make_recipe(folder, augment={**augment, "delete": 0.4}))
    assert report.work.misses == 3


@pytest.mark.promise("data.near-duplicates")
def test_held_out_texts_are_compared_with_augmented_copies(folder: Path) -> None:
    rows = [{"text": "她很高兴。", "split": "train"}, {"text": "她很开心。", "split": "holdout"}]
    (folder / "leak.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "words.txt").write_text("高兴 开心\n")
    augment = {"multiplier": 1, "synonyms": 1.0, "synonyms_file": str(folder / "words.txt")}
    data = {"text": "leak.jsonl", "chat": [], "holdout": 0.0}
    _, _, report = prepare(make_recipe(folder, data=data))
    assert report.leaks[Split.HOLDOUT].num_near == 0
    _, _, report = prepare(make_recipe(folder, data=data, augment=augment))
    assert any("leak.jsonl:2: equal to an augmented copy of" in line for line in report.lines())


@pytest.mark.promise("data.near-duplicates")
def test_leaks_of_the_test_part_are_reported_with_their_places_and_refused_on_request(folder: Path) -> None:
    text = "一段很长的话，说的是河水怎样从山上流到海里，再变成云。"
    rows = [
        {"text": text, "split": "train"},
        {"text": "另一段毫不相干的文字。"},
        {"text": text + "完", "split": "test"},
        {"text": text, "split": "test"},
    ]
    (folder / "leak.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"text": "leak.jsonl", "chat": [], "holdout": 0.0}
    for _ in range(2):
        _, _, report = prepare(make_recipe(folder, data=data))
        (leaks,) = report.leaks.values()
        assert (leaks.num_exact, leaks.num_near) == (1, 1)
        path = folder / "leak.jsonl"
        assert leaks.places == [(f"{path}:4", f"{path}:1"), (f"{path}:3", f"{path}:1")]
        assert any("test part, 2 documents: 1 equal to a trained one, 1 near-dup" in line for line in report.lines())
    refusing = make_recipe(folder, data={**data, "near_duplicates": "refuse"})
    with pytest.raises(SourceError, match=r"E_LEAK 2 test-part documents .*leak\.jsonl:1"):
        prepare(refusing)


@pytest.mark.promise("data.near-duplicates")
def test_near_duplicates_stay_together_on_request_and_groups_always_do(folder, monkeypatch):
    draw = np.random.default_rng(0)
    texts = ["".join(map(chr, draw.integers(0x4E00, 0x9FA5, 40))) for _ in range(20)]
    rows = [{"text": text} for text in texts] + [{"text": text[:36] + "完全不同"} for text in texts]
    rows += [{"text": texts[n // 2][n % 2 * 9 :][:3] + str(n), "group": f"g{n // 2}"} for n in range(12)]
    (folder / "alike.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"text": "alike.jsonl", "chat": [], "holdout": 0.25}
    apart, _, report = prepare(make_recipe(folder, data=data))
    assert report.leaks[Split.HOLDOUT].num_near > 0
    for turn in range(2):  # the second time from the cache, and without a row
        if turn:
            monkeypatch.setattr(corpus_files, "near_sets", lambda *_: pytest.fail("looked for again"))
            monkeypatch.setattr(corpus_files, "read_file", lambda *_: pytest.fail("read again"))
        tokens, _, report = prepare(make_recipe(folder, data={**data, "near_duplicates": "together"}))
        leaks = report.leaks[Split.HOLDOUT]
        assert (leaks.num_near, leaks.num_exact, leaks.num_groups) == (0, 0, 0)
        assert np.array_equal(tokens.split[:20], tokens.split[20:40])
        assert np.array_equal(tokens.split[40::2], tokens.split[41::2])
        assert int((tokens.split == Split.HOLDOUT).sum()) == 12, "of 13: all units have two documents"
        assert tokens.fingerprint() != apart.fingerprint()
    assert np.array_equal(apart.split[40::2], apart.split[41::2])


@pytest.mark.promise("data.near-duplicates")
def test_near_duplicates_of_texts_and_conversations_are_in_one_part(folder: Path) -> None:
    """Each kind is divided by itself, so what belongs to a row of the other kind follows it."""
    draw = np.random.default_rng(0)
    texts = ["".join(map(chr, draw.integers(0x4E00, 0x9FA5, 20))) for _ in range(40)]
    plain = [{"text": text} for text in texts]
    asked = [[{"role": "user", "content": text[:12]}, {"role": "assistant", "content": text[12:]}] for text in texts]
    system = {"role": "system", "content": "你是一个图书馆的助手，请用一句简短的话回答读者的问题。"}
    chats = [{"messages": [system, *turns]} for turns in asked[20:]]
    for name, rows in (("alike.jsonl", plain), ("chats.jsonl", chats)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"text": "alike.jsonl", "chat": "chats.jsonl", "holdout": 0.3}
    _, _, report = prepare(make_recipe(folder, data=data))
    assert report.leaks[Split.HOLDOUT].num_near > 0
    tokens, _, report = prepare(make_recipe(folder, data={**data, "near_duplicates": "together"}))
    leaks = report.leaks[Split.HOLDOUT]
    assert (leaks.num_near, leaks.num_exact) == (0, 0)
    assert leaks.num_holdout > 10
    assert np.array_equal(tokens.split[20:40], tokens.split[40:60])
    assert np.unique(tokens.split[40:60]).tolist() == [0, 1], "a system message that all share ties none"


def test_new_data_is_all_to_evaluate_and_a_corpus_counts_its_parts(folder: Path) -> None:
    recipe = make_recipe(folder)
    _, tokenizer, report = prepare(recipe)
    counts = f"{report.num_train} training documents, {report.num_holdout} held out; "
    assert report.lines()[0] == "3 files: 70 rows read = 70 used + 0 quarantined"
    assert report.lines()[1].startswith(counts)
    assert (report.num_train, report.num_holdout, report.num_test) == (56, 14, 0)
    new, _, report = prepare(recipe, tokenizer=tokenizer, wanted=Wanted.NEW)
    assert new.split.tolist() == [Split.TEST] * 70
    assert report.lines()[1].startswith(f"70 documents to evaluate; {int(new.lengths.sum()):,} tokens, ")
    assert f" {report.lost.total / new.lengths.sum():.2f} characters each" in report.lines()[1]
    rows = [{"text": text, "split": ("train", "valid", "test")[i % 3]} for i, text in enumerate(TEXTS)]
    (folder / "parts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, _, report = prepare(make_recipe(folder, data={"text": "parts.jsonl", "chat": []}, augment={"multiplier": 2}))
    assert report.lines()[1].startswith(
        "14 training documents and 28 augmented copies, 28 of them equal to their originals, "
        "13 held out, 13 of the test part for `unpad eval` alone; "
    )


# --------------------------------------------------------------------------- reading spans


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenSet:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return prepare(make_recipe(folder), cache=folder / "cache")[0]


def spans(lengths: np.ndarray) -> st.SearchStrategy[list[tuple[int, int, int]]]:
    def span(i: int) -> st.SearchStrategy[tuple[int, int, int]]:
        positions = st.integers(0, int(lengths[i]) - 1)
        return st.tuples(positions, positions).map(lambda pair: (i, min(pair), max(pair)))

    return st.lists(st.integers(0, len(lengths) - 1).flatmap(span), max_size=20)


@pytest.mark.parametrize("joined", [False, True])
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_spans_hold_their_tokens_and_counts(tokens: TokenSet, joined: bool, data: st.DataObject) -> None:
    tokens = tokens.joined() if joined else tokens
    chosen = data.draw(spans(tokens.lengths))
    seq_ids, starts, stops = np.array(chosen, np.int64).reshape(-1, 3).T
    flat, mask, offsets = tokens.gather(seq_ids, starts.astype(np.int32), stops.astype(np.int32))
    counts = tokens.count_targets(seq_ids, starts.astype(np.int32), stops.astype(np.int32))
    assert (flat.dtype, mask.dtype, offsets.dtype) == (np.int64, np.bool_, np.int64)
    assert offsets[0] == 0
    assert offsets[-1] == flat.size == mask.size
    for n, (i, start, stop) in enumerate(chosen):
        assert flat[offsets[n] : offsets[n + 1]].tolist() == tokens.tokens(i)[start : stop + 1].tolist()
        assert mask[offsets[n] : offsets[n + 1]].tolist() == tokens.loss_mask(i)[start : stop + 1].tolist()
        assert counts[n] == tokens.loss_mask(i)[start + 1 : stop + 1].sum()


def test_joined_documents_keep_their_order_ends_and_sums(tokens: TokenSet) -> None:
    joined = tokens.joined()
    assert sorted(zip(joined.kind.tolist(), joined.split.tolist(), strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for i in range(len(joined)):
        members = np.flatnonzero((tokens.kind == joined.kind[i]) & (tokens.split == joined.split[i]))
        assert joined.tokens(i).tolist() == [t for m in members for t in tokens.tokens(m).tolist()]
        assert joined.loss_mask(i).tolist() == [t for m in members for t in tokens.loss_mask(m).tolist()]
        for name in ("lengths", "num_targets", "target_chars", "target_bytes"):
            assert getattr(joined, name)[i] == getattr(tokens, name)[members].sum()
        assert joined.where(i) == f"{tokens.where(members[0])} to {tokens.where(members[-1])}"
    assert joined.fingerprint() == tokens.fingerprint()


# --------------------------------------------------------------------------- characters that a tokenizer loses


@pytest.mark.promise("llm.unknown")
def test_lost_characters_are_counted_cold_and_warm_and_named(folder: Path) -> None:
    path = folder / "words.json"
    path.write_bytes(word_list(["水", "好"]))
    rows = [{"text": "水，，水"}, {"text": "好，，龘"}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    recipe = make_recipe(folder, data={"text": "rows.jsonl", "chat": [], "holdout": 0}, tokenizer=with_file(path))
    reports = [prepare(recipe)[2] for _ in range(2)]
    assert [report.work.encoded for report in reports] == [2, 0]
    for report in reports:
        assert (report.lost.lost, report.lost.total) == (5, 8)
        assert report.lost.common == ("，", "龘")
        (line,) = [line for line in report.lines() if "lost" in line]
        assert line.startswith("warning: 5 of 8 characters (62.50%) are lost to unknown tokens, such as ， 龘; use ")
    tokens, _, _ = prepare(recipe)
    assert tokens.lost_target_chars.tolist() == [2, 3]
    assert tokens.lost_target_bytes.tolist() == [6, 9]
    assert tokens.joined().lost_target_chars.tolist() == [5]


@pytest.mark.promise("data.parts")
def test_a_part_of_whole_groups_is_told_from_one_of_other_phrasings(folder: Path) -> None:
    rows = [{"text": f"第{n // 4}件事的第{n % 4}种说法", "group": f"fact {n // 4}"} for n in range(40)]
    (folder / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"text": "facts.jsonl", "chat": [], "holdout": 0.1}
    _, _, report = prepare(make_recipe(folder, data=data))
    assert report.group_lines()[0].startswith("held out 1 group absent from training: this measures other facts")
    _, _, report = prepare(make_recipe(folder, data={**data, "holdout": 0.3}))
    (line,) = report.group_lines()
    assert line.startswith("held out 3 groups absent from training: this measures other facts than")
    assert line in report.lines()
    for n, row in enumerate(rows):
        row["split"] = "valid" if n % 4 == 0 else "train"
    (folder / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, _, report = prepare(make_recipe(folder, data=data))
    assert report.group_lines() == []
