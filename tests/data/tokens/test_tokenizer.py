import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.helpers.tokenizers import dropping_bpe, few_bytes, word_list, word_pieces
from tests.helpers.work import counted
from unpad.data.tokens.tokenizer import (
    DecodeStream,
    LibraryTokenizer,
    Tokenizer,
    load_tokenizer,
    open_tokenizer_file,
    spelling,
    train_tokenizer,
)
from unpad.data.tokens.words import FIRST_TOKEN, SPECIALS, WordTokenizer
from unpad.errors import RecipeError, SourceError
from unpad.recipes import data as recipe_data

TEXTS = [
    "今天天气很好，我们去公园散步。",
    "我们的老师喜欢读书，也喜欢散步！",
    "机器学习需要数据；数据需要整理。",
    "Hello world, 3.14 是圆周率。\n\n第二段　全角空格。",
] * 3
RESERVED = ["用户：", "助手："]
unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def words(vocab_size: int = 1000, min_count: int = 1) -> Tokenizer:
    return train_tokenizer(recipe_data.TokenizerSettings(vocab_size=vocab_size, min_count=min_count), TEXTS, RESERVED)


def bpe(vocab_size: int = 400) -> Tokenizer:
    return train_tokenizer(recipe_data.TokenizerSettings(kind="bpe", vocab_size=vocab_size), TEXTS, RESERVED)


def foreign_bert() -> Library:
    """Word list with special tokens, a post-processor, truncation and padding, as BERT files have."""
    vocabulary = {token: i for i, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "今天", "天气", "很好", "a"])}
    library = Library(models.WordLevel(vocabulary, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    library.enable_truncation(3)
    library.enable_padding(length=8)
    return library


def foreign_gpt() -> Library:
    """Byte-level BPE whose only special token is <|endoftext|>, with an ordinary added token."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=350, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    )
    library.add_tokens(["<think>", "思考"])
    return library


def foreign_llama() -> Library:
    """Unigram over ▁-marked words with byte fallback, whose vocabulary itself holds <s> and </s>."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256))]
    pieces += [("▁", -3.0), ("▁a", -2.0), ("a", -3.0), ("b", -3.0), ("你", -3.0), ("好", -3.0), ("s", -4.0)]
    library = Library(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(content=" ", left=1, right=0)
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return library


def load(library: Library) -> LibraryTokenizer:
    return load_tokenizer(library.to_str().encode())


ALL = {
    "words": words(), "small words": words(vocab_size=300), "bpe": bpe(), "bert": load(foreign_bert()),
    "gpt": load(foreign_gpt()), "llama": load(foreign_llama()),
    "earlier words": WordTokenizer(["今天", "天"], RESERVED),
}  # fmt: skip
OWN = ["words", "small words", "bpe", "gpt", "earlier words"]  # those that can spell every string
WITH_BYTES = [*OWN, "llama"]  # whose decoder drops a space at the beginning


@pytest.mark.promise("chinese.words", "llm.tokenizer")
@settings(deadline=None, max_examples=300)
@given(unicode_text, st.sampled_from(OWN))
def test_decode_restores_every_text(text: str, name: str) -> None:
    tokenizer = ALL[name]
    ids = tokenizer.encode_batch([text])[0]
    assert tokenizer.decode(ids) == text
    assert all(0 <= id < tokenizer.vocab_size for id in ids)
    assert {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id}.isdisjoint(ids)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("marker", [*SPECIALS, "[SEP]", "[CLS]", "[PAD]", "<|endoftext|>", "</s>", "<s>"])
def test_special_text_in_content_becomes_ordinary_ids(name: str, marker: str) -> None:
    tokenizer = ALL[name]
    for text in (marker, f"a{marker}b", f"今天 {marker} 天气", marker * 3, marker[: len(marker) // 2] + marker):
        ids = tokenizer.encode_batch([text])[0]
        assert {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id}.isdisjoint(ids)
        if name in OWN:
            assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_special_text_in_the_training_texts_teaches_no_special_id(kind: Any) -> None:
    texts = ["好<|eos|>的<|bos|>"] * 50
    tokenizer = train_tokenizer(recipe_data.TokenizerSettings(kind=kind, vocab_size=400), texts, [])
    ids = tokenizer.encode_batch(texts[:1])[0]
    assert min(ids) >= len(SPECIALS)
    assert tokenizer.decode(ids) == texts[0]


@pytest.mark.parametrize("name", ALL)
def test_decode_skips_special_ids(name: str) -> None:
    tokenizer = ALL[name]
    ids = tokenizer.encode_batch(["今天 天气 很好"])[0]
    marked = [tokenizer.bos_id, *ids, tokenizer.eos_id, tokenizer.pad_id]
    assert tokenizer.decode(marked) == tokenizer.decode(ids)


def is_begun(text: bytes) -> bool:
    rests = (b"", b"\x80", b"\x80\x80", b"\xa0\x80", b"\x80\x80\x80", b"\x90\x80\x80")
    return any((text + rest).decode("utf-8", "ignore").encode() == text + rest for rest in rests)


@pytest.mark.parametrize("begun", [b"", *(bytes([lead]) for lead in range(0xC2, 0xF5)), b"\xe4\xbd", b"\xf0\x9f\x98"])
def test_a_piece_follows_where_its_bytes_go_on_with_a_character(begun: bytes) -> None:
    pieces = [
        *(bytes([byte]) for byte in range(256)),
        *(bytes([lead, byte]) for lead in (225, 191) for byte in range(256)),
    ]
    table, state = spelling((*pieces, b""), 800), 0
    for byte in begun:
        state = table[state, byte]
    assert [after >= 0 for after in table[state, : len(pieces)]] == [is_begun(begun + piece) for piece in pieces]
    assert (table[state, len(pieces)] >= 0) == (begun == b""), "an end cuts no character"


# --------------------------------------------------------------------------- the vocabulary of words


def test_vocabulary_is_bytes_then_reserved_then_characters_then_words_by_count() -> None:
    tokenizer = words()
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 2, 3)
    assert tokenizer.pieces[4:FIRST_TOKEN] == tuple(bytes([byte]) for byte in range(256))
    tail = [piece.decode() for piece in tokenizer.pieces[FIRST_TOKEN:]]
    assert tail[:2] == RESERVED
    singles = [token for token in tail[2:] if len(token) == 1]
    several = [token for token in tail[2:] if len(token) > 1]
    assert tail[2:] == singles + several
    joined = "".join(TEXTS)
    assert set(singles) == {character for character in joined if not character.isascii()}
    counts = [joined.count(token) for token in singles]
    assert counts == sorted(counts, reverse=True)
    assert {"我们", "散步", "Hello"} <= set(several)


def test_vocabulary_keeps_to_its_limit_and_leaves_out_rare_words() -> None:
    assert words(vocab_size=300).vocab_size == 300
    rare = train_tokenizer(recipe_data.TokenizerSettings(min_count=2), ["天气 散步", "天气 老师"], [])
    assert "天气".encode() in rare.pieces
    assert "老师".encode() not in rare.pieces
    assert "师".encode() in rare.pieces


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from([*"今天气我们用户： .a1龘😀\xe9\u0301", "Hello", "今天", "散步"])).map("".join))
def test_a_text_is_the_longest_words_that_begin_at_each_place(text: str) -> None:
    assume(text not in RESERVED)
    for tokenizer in (ALL["words"], ALL["small words"]):
        place, (ids,) = 0, tokenizer.encode_batch([text])
        for id in ids:
            begin = {piece for piece in tokenizer.pieces[4:] if text.encode().startswith(piece, place)}
            assert tokenizer.pieces[id] == max(begin - {mark.encode() for mark in RESERVED}, key=len)
            place += len(tokenizer.pieces[id])


@pytest.mark.parametrize(
    ("texts", "kind"),
    [(TEXTS, "words"), (["Most of it is English: 好的。"], "bpe"), (["これはペンです。"] * 99, "bpe")],
)
def test_the_script_of_the_texts_chooses_the_kind(texts: list[str], kind: Any) -> None:
    chosen = train_tokenizer(recipe_data.TokenizerSettings(kind="auto", vocab_size=400), iter(texts), RESERVED)
    expected = recipe_data.TokenizerSettings(kind=kind, vocab_size=400 if kind == "bpe" else 8000)
    assert chosen.to_bytes() == train_tokenizer(expected, texts, RESERVED).to_bytes()


@pytest.mark.parametrize("mark", ["用户：", "User", "<|user|>", "é：", "问"])
def test_a_role_marker_is_one_id_that_no_content_contains(mark: str) -> None:
    tokenizer = train_tokenizer(recipe_data.TokenizerSettings(), [f"他说{mark}你好"], [mark, "\n"])
    (marker,) = tokenizer.encode_batch([mark])[0]
    assert tokenizer.decode([marker]) == mark
    for ids in tokenizer.encode_batch([f"他说{mark}你好", f"{mark} {mark}", mark + "\n"]):
        assert marker not in ids


def test_transformers_reads_the_words_with_equal_ids() -> None:
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=Library.from_str(ALL["words"].to_bytes().decode()))
    texts = [*TEXTS, "他说：龘😀 x\n\n  end", "\u0e2a\u0e27\u0e31\u0e2a", "用户："]
    assert theirs(texts)["input_ids"] == (ids := ALL["words"].encode_batch(texts))
    assert theirs.batch_decode(ids) == texts
    assert theirs(typed := ["用户：你好<|eos|>"], split_special_tokens=True)["input_ids"] == ALL["words"].encode_batch(
        typed
    )


# --------------------------------------------------------------------------- saving, loading, sameness


@pytest.mark.promise("llm.tokenizer")
@pytest.mark.parametrize("name", ALL)
def test_saved_and_loaded_is_the_same_tokenizer(name: str) -> None:
    tokenizer = ALL[name]
    again = load_tokenizer(tokenizer.to_bytes())
    assert again.to_bytes() == tokenizer.to_bytes()
    for field in ("kind", "vocab_size", "pad_id", "bos_id", "eos_id", "pieces"):
        assert getattr(again, field) == getattr(tokenizer, field)
    assert again.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)


@pytest.mark.nightly
@pytest.mark.promise("chinese.words")
def test_training_is_the_same_in_another_process() -> None:
    code = (
        "import hashlib, json, sys; from unpad.recipes import data as recipe_data\n"
        "from unpad.data.tokens.tokenizer import train_tokenizer\n"
        "texts = json.load(sys.stdin)\n"
        "for kind in ('words', 'bpe'):\n"
        "    made = train_tokenizer(recipe_data.TokenizerSettings(kind=kind, vocab_size=400), texts, ['用户：'])\n"
        "    print(hashlib.sha256(made.to_bytes()).hexdigest())\n"
    )
    prints = [
        subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(TEXTS), capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "TOKENIZERS_PARALLELISM": parallel},
        ).stdout
        for seed, parallel in (("1", "true"), ("2", "false"))
    ]  # fmt: skip
    assert prints[0] == prints[1]
    assert len(prints[0].split()) == 2


@pytest.mark.promise("data.parallel")
@pytest.mark.parametrize("name", ["words", "bpe"])
def test_parallel_encoding_gives_the_serial_ids(name: str) -> None:
    draws = random.Random(0)
    texts = ["".join(draws.choices("".join(TEXTS) + "龘😀 \n", k=draws.randint(0, 40))) for _ in range(2000)]
    serial = [load_tokenizer(ALL[name].to_bytes()).encode_batch([text])[0] for text in texts[:100]]
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(ALL[name].encode_batch, [texts[i::4] for i in range(4)]))
    together = ALL[name].encode_batch(texts)
    assert together[:100] == serial
    for i in range(4):
        assert parts[i] == together[i::4]


def test_large_batches_are_cut_and_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ALL["bpe"].encode_batch([*TEXTS, "", "好"])
    monkeypatch.setattr("unpad.data.tokens.tokenizer.CHARS_PER_CALL", 20)
    assert ALL["bpe"].encode_batch([*TEXTS, "", "好"]) == whole
    assert ALL["bpe"].encode_batch([]) == []


# --------------------------------------------------------------------------- files of other projects


@pytest.mark.promise("batch.pad-id")
def test_foreign_file_names_its_own_special_tokens() -> None:
    bert = load(foreign_bert())
    assert (bert.kind, bert.pad_id, bert.bos_id, bert.eos_id, bert.added) == ("file", 0, 2, 3, [])
    gpt = load(foreign_gpt())
    assert (gpt.bos_id, gpt.eos_id) == (0, 0)
    assert gpt.added == ["<|pad|>"]
    assert gpt.pad_id == foreign_gpt().get_vocab_size(with_added_tokens=True)
    assert gpt.vocab_size == gpt.pad_id + 1


def test_missing_special_tokens_are_added_after_the_vocabulary() -> None:
    library = Library(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = load(library)
    assert tokenizer.added == ["<|pad|>", "<|bos|>", "<|eos|>"]
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (2, 3, 4, 5)


def test_post_processor_truncation_and_padding_of_a_file_do_nothing() -> None:
    assert load(foreign_bert()).encode_batch(["今天 天气 很好 a a", "a"]) == [[4, 5, 6, 7, 7], [7]]


@pytest.mark.promise("llm.tokenizer")
def test_foreign_file_encodes_as_the_library_does() -> None:
    library = foreign_gpt()
    expected = [library.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert load(library).encode_batch(TEXTS) == expected


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_decode_of_any_ids_equals_the_library(data: st.DataObject) -> None:
    tokenizer = ALL["gpt"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    reference = Library.from_str(tokenizer.to_bytes().decode())
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_end_of_text_that_the_file_does_not_call_special_is_still_never_read_from_text() -> None:
    fields = json.loads(foreign_gpt().to_str())
    for token in fields["added_tokens"]:
        token["special"] = False
    tokenizer = load_tokenizer(json.dumps(fields).encode())
    assert tokenizer.eos_id not in tokenizer.encode_batch(["a<|endoftext|>b"])[0]
    assert tokenizer.decode(tokenizer.encode_batch(["a<|endoftext|>b"])[0]) == "a<|endoftext|>b"


def broken_files() -> dict[str, bytes]:
    merge = json.loads(foreign_gpt().to_str())
    merge["model"]["continuing_subword_prefix"] = "#" * 500  # longer than the merged tokens: the library panics
    return {
        "empty": b"",
        "not JSON": b"hello",
        "not UTF-8": b'{"model": "\xff"}',
        "a list": b"[]",
        "a number": b"1",
        "no model": b'{"version": "1.0"}',
        "nested": b"[" * 100_000,
        "a merge that panics": json.dumps(merge).encode(),
        "words with a hole": b'{"format": "unpad-words-1", "reserved": [], "tokens": ["a", ""]}',
        "words without words": b'{"format": "unpad-words-1", "reserved": []}',
        "words twice": b'{"format": "unpad-words-1", "reserved": [], "tokens": ["ab", "ab"]}',
        "words with a surrogate": b'{"format": "unpad-words-1", "reserved": [], "tokens": ["\\ud800"]}',
    }


@pytest.mark.parametrize("name", broken_files())
def test_broken_file_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(broken_files()[name])
    with pytest.raises(SourceError) as error:
        open_tokenizer_file(path)
    assert error.value.where == str(path)
    assert error.value.fix


def test_missing_file_is_a_recipe_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError):
        open_tokenizer_file(tmp_path / "absent.json")
    with pytest.raises(RecipeError):
        open_tokenizer_file(tmp_path)


def test_damaged_files_raise_nothing_but_our_errors() -> None:
    draws = random.Random(0)
    good = foreign_bert().to_str().encode()
    for _ in range(300):
        damaged = bytearray(good)
        for _ in range(draws.randint(1, 4)):
            damaged[draws.randrange(len(damaged))] = draws.randrange(256)
        try:
            tokenizer = load_tokenizer(bytes(damaged))
            tokenizer.decode(tokenizer.encode_batch(["今天 [SEP] 天气"])[0])
        except SourceError:
            pass


@pytest.mark.parametrize("name", ALL)
def test_lone_surrogate_is_refused_by_name(name: str) -> None:
    with pytest.raises(SourceError, match="U\\+D800"):
        ALL[name].encode_batch(["好", "a\ud800"])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["words", "bpe"])
@pytest.mark.parametrize("unit", ["a", "^", " ", "啊", "龘", "的了", "1"])
def test_a_long_run_takes_linear_time(name: str, unit: str) -> None:
    tokenizer = ALL[name]
    text = unit * (300_000 // len(unit))
    ids, calls = counted(lambda: tokenizer.encode_batch([text])[0])
    assert calls < 20 * len(text)
    assert tokenizer.decode(ids) == text


# --------------------------------------------------------------------------- streaming


@settings(deadline=None, max_examples=400)
@given(st.data(), st.sampled_from(sorted(ALL)))
def test_streamed_parts_joined_are_the_decoded_text(data: st.DataObject, name: str) -> None:
    tokenizer = ALL[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    stream = DecodeStream(tokenizer)
    assert "".join([*[stream.push(id) for id in ids], stream.flush()]) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", [*OWN, "llama"])
def test_stream_never_shows_half_a_character(name: str) -> None:
    tokenizer = ALL[name]
    text = "a龘你😀b好𠮷a"
    stream = DecodeStream(tokenizer)
    shown = ""
    for id in tokenizer.encode_batch([text])[0]:
        shown += stream.push(id)
        assert text.startswith(shown)
    assert shown + stream.flush() == text


# --------------------------------------------------------------------------- characters without a token


@settings(deadline=None, max_examples=100)
@given(text=unicode_text)
@pytest.mark.parametrize("name", WITH_BYTES)
def test_a_tokenizer_with_every_byte_loses_nothing(text: str, name: str) -> None:
    assert ALL[name].encode_counted([text, ""]) == (ALL[name].encode_batch([text, ""]), ["", ""])


LOSSY: list[tuple[bytes, str, str]] = [
    (word_list(["今天", "a"]), "今天 明天，a", "明天，"),
    (word_pieces("ab"), "ab abc  b", "abc"),
    (dropping_bpe("ab"), "ab你b好", "你好"),
    (dropping_bpe("ab"), "你好 a", "你好 "),  # nothing cuts at spaces, so nothing puts them back
    (few_bytes(["ab你"]), "ab你", ""),
    (few_bytes(["ab你"]), "a佛b你", "佛"),  # shares bytes with the character that the file knows
]


@pytest.mark.promise("llm.unknown")
@pytest.mark.parametrize(("data", "text", "lost"), LOSSY)
def test_lost_characters_are_those_of_unknown_tokens_and_of_none(data: bytes, text: str, lost: str) -> None:
    tokenizer = load_tokenizer(data)
    for one, expected in ((text, lost), ("", "")):
        ids, found = tokenizer.encode_counted([one])
        assert found == [expected]
        assert ids == tokenizer.encode_batch([one])


@pytest.mark.promise("llm.unknown")
@pytest.mark.parametrize("unknown", ["[SEP]", "[CLS]", "[PAD]"])
def test_an_unknown_token_that_is_also_a_control_token_never_comes_of_a_text(unknown: str) -> None:
    tokenizer = load_tokenizer(word_list(["今天"], unknown))
    ids, lost = tokenizer.encode_counted(["今天 明天 今天", "明天"])
    assert ids == [[4, 4], []]
    assert lost == ["明天", "明天"]
    assert {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id}.isdisjoint(ids[0])
    assert tokenizer.encode_batch(["今天 明天 今天", "明天"]) == ids


def test_special_tokens_outside_the_vocabulary_are_the_files_own() -> None:
    library = Library(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["[PAD]", "<s>", "</s>"])
    tokenizer = load(library)
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (2, 3, 4, 5)
    assert tokenizer.added == []
    assert tokenizer.specials.keys() == {0, 2, 3, 4} - {0}


def test_a_file_that_draws_the_tokens_of_a_text_is_refused() -> None:
    fields = json.loads(few_bytes(TEXTS))
    fields["model"]["dropout"] = 0.0
    load_tokenizer(json.dumps(fields).encode())
    fields["model"]["dropout"] = 0.5
    with pytest.raises(SourceError, match=r"dropout is 0\.5") as caught:
        load_tokenizer(json.dumps(fields).encode())
    assert caught.value.fix == "set dropout to null in the tokenizer.json"
