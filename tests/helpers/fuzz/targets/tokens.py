"""Targets: tokenizer files, chat templates, synonyms, prompts."""

import json
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from tests.helpers.chat_folder import CHATML, MARKED, NO_SYSTEM, THINKING, byte_level
from tests.helpers.fuzz.mutate import TOKENS, damage_bytes, damage_json, damaged, damaged_json, either
from tests.helpers.fuzz.target import Target, WrongError, read_at
from tests.helpers.thinking import FAMILIES
from unpad.data.sources.example import Turn
from unpad.data.tokens import jinja_process
from unpad.data.tokens.augment import load_synonyms
from unpad.data.tokens.chat_template import MOST_TEXT, NONCHARACTERS, ChatTemplate
from unpad.data.tokens.encode import encode_prompt
from unpad.data.tokens.folder_tokenizer import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, folder_tokenizer
from unpad.data.tokens.tokenizer import DecodeStream, Tokenizer, load_tokenizer, train_tokenizer
from unpad.errors import CheckpointError, RecipeError, SourceError
from unpad.inference.prompts import lost_of, prompt_warning
from unpad.recipes.data import Template, TokenizerSettings

TEXTS = ["hello world 你好 <|eos|>[SEP]</s>\u0301 😀 1234", "", "a" * 50, " ", "<s>[UNK]<|im_end|>"]
CORPUS = ["hello world 你好", "low lower lowest"] * 5


def _trained(model: Any, trainer: Any, pre: Any, decoder: Any, normalizer: Any = None) -> bytes:
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer, library.decoder = pre, decoder
    if normalizer is not None:
        library.normalizer = normalizer
    library.train_from_iterator(CORPUS, trainer)
    return library.to_str().encode()


def foreign_tokenizers() -> list[bytes]:
    """A tokenizer.json of every kind of model of the library."""
    names = ["<unk>", "<s>", "</s>", "<pad>"]
    quiet = {"show_progress": False}
    digits = pre_tokenizers.Split(tokenizers.Regex("[0-9]+"), "isolated")
    return [
        _trained(
            models.BPE(),
            trainers.BpeTrainer(vocab_size=300, special_tokens=["<|pad|>", "<|bos|>", "<|eos|>"], **quiet),
            pre_tokenizers.ByteLevel(), decoders.ByteLevel(),
        ),
        _trained(
            models.WordPiece(unk_token="[UNK]"),
            trainers.WordPieceTrainer(vocab_size=80, special_tokens=["[UNK]", "[PAD]", "[CLS]", "[SEP]"], **quiet),
            pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(), normalizers.BertNormalizer(),
        ),
        _trained(
            models.Unigram(), trainers.UnigramTrainer(vocab_size=60, special_tokens=names, unk_token="<unk>", **quiet),
            pre_tokenizers.Metaspace(), decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
        ),
        _trained(
            models.WordLevel(unk_token="<unk>"),
            trainers.WordLevelTrainer(vocab_size=60, special_tokens=names, **quiet),
            pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), digits]), decoders.WordPiece(),
        ),
    ]  # fmt: skip


def _check(tokenizer: Tokenizer) -> None:
    """Ids within the vocabulary, none of them special; the stream, and the tokenizer's own bytes, give the same."""
    encoded = tokenizer.encode_batch(TEXTS)
    ids = {one for row in encoded for one in row}
    if ids and not (min(ids) >= 0 and max(ids) < tokenizer.vocab_size):
        raise WrongError("an id outside of the vocabulary")
    if {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id} & ids:
        raise WrongError("ordinary text has a special id")
    if [row for row, _ in zip(*tokenizer.encode_counted(TEXTS), strict=True)] != encoded:
        raise WrongError("ids depend on whether lost characters are counted")
    tokenizer.decode(encoded[0])
    stream = DecodeStream(tokenizer)
    "".join(map(stream.push, encoded[0])) + stream.flush()
    again = load_tokenizer(tokenizer.to_bytes())
    if again.to_bytes() != tokenizer.to_bytes() or again.encode_batch(TEXTS) != encoded:
        raise WrongError("a tokenizer does not come back from its own bytes")


def _tokenizer(seeds: Callable[[], list[bytes]], share: float, folder: Path) -> Target:
    files = seeds()
    make = either(0.6, damaged_json([json.loads(one) for one in files], share), damaged(files))
    return Target(make, lambda data: _check(load_tokenizer(data)), (SourceError,))


def _own(kind: str) -> Callable[[], list[bytes]]:
    settings = TokenizerSettings.model_validate({"kind": kind, "vocab_size": 400})
    return lambda: [train_tokenizer(settings, CORPUS, ["用户："]).to_bytes()]


def chat_template(folder: Path) -> Target:
    """Templates in Jinja that come with a model: they refuse a conversation, or mark what the model says."""
    seeds = [source.encode() for source in (CHATML, THINKING, MARKED, NO_SYSTEM, *FAMILIES.values())]
    pieces = [
        *(b"{% for i in range(9) %}", b"{% endfor %}", b"{{ messages }}"),
        *(b"{{ 1/0 }}", b"{{ ''.__class__ }}", b"{% set x = 1 %}"),
        *(b"{{ raise_exception('no') }}", b"{{ strftime_now('%Y') }}"),
        *(b"{{ messages | tojson }}", b"{% macro a() %}", b"{#"),
        *(b"{{ range(10**7) | list | length }}", b"{{ 'a' * 10**9 }}"),
        *(b"{% include 'x' %}", b"{{ messages[9].role }}", b"{{ x.y.z }}"),
    ]  # fmt: skip
    turns = [
        [Turn("user", "a"), Turn("assistant", "b")],
        [
            Turn("user", "a"),
            Turn("assistant", "<think>\nb</think>\n\nc"),
            Turn("user", "d"),
            Turn("assistant", "e", "f"),
        ],
        [Turn("user", "a"), Turn("assistant", " <think>b</think></think> c\n")],
        [Turn("system", "s"), Turn("user", "你好"), Turn("assistant", "b\n"), Turn("user", "c"), Turn("assistant", "")],
    ]

    def run(data: bytes) -> None:
        template = ChatTemplate(
            data.decode("utf-8", "replace"), {"bos_token": "<s>", "eos_token": "<|im_end|>"}, ["<|im_end|>"]
        )
        refusals = []
        for talk in turns:
            try:
                template.prompted(talk[:-1])
                marked = template.marked(talk)
            except SourceError as error:  # of this conversation; the others are tried
                refusals.append(error)
                continue
            if len(marked.replies) != sum(turn.role == "assistant" for turn in talk):
                raise WrongError("a template loses a reply")
            if not NONCHARACTERS.isdisjoint(marked.text):
                raise WrongError("a mark is left in the text")
        if len(refusals) == len(turns):
            raise refusals[0]

    return Target(damaged(seeds, [*seeds, *pieces, *pieces]), run, (SourceError,))


_START = ("'a'", "[1]", "(1,)", "{}", "7", "1.5", "messages", "messages[0].content", "''", "none", "namespace(x=1)")
_VALUE = ("x", "y", "n.x", "messages", "m.content", "bos_token", "'ab'", "3", "10**9", "[x, y]", "(x, n.x)", "{x: y}")
_STEP = (
    *(
        "A + B", "A ~ B ~ A", "A * B", "A ** B", "A % B", "A - B", "A // B", "-A", "[A, B]", "(A, A)", "{A: B}",
        "A == B",
    ),
    *("A in B", "A[B]", "A[1:]", "A[::-1]", "A.x", "A if B else A", "A and B", "A | F", "A | F | F", "A.M", "A is T"),
    *("f(A)", "f(f(A))", "namespace(x=A)", "dict(x=A)", "range(9999)", "g(A, 9)", "[A] + [B]", "A | string"),
)  # fmt: skip
_FILTER = (
    *("join(B)", "replace(A, B)", "indent(B, true)", "tojson", "tojson(indent=B)", "list", "sort", "unique", "string"),
    *("map('upper')", "map(attribute='x')", "select", "selectattr('x', '==', B)", "sum", "sum(start=B)", "round(B)"),
    *("int", "int(0, 16)", "float", "length", "reverse", "dictsort", "groupby('x')", "items", "max", "first", "safe"),
    *(
        "escape", "title", "default(B)", "wordcount", "trim", "first", "last", "count", "upper", "center(B)",
        "attr('x')",
    ),
)  # fmt: skip
_METHOD = (
    *("join(B)", "split(B)", "split()", "replace(A, B)", "upper()", "format(B)", "center(B)", "items()", "get(B)"),
    *("count(B)", "index(B)", "copy()", "splitlines()", "zfill(B)", "keys()", "strip()", "values()"),
)
_BLOCK = (
    *(
        "{% for x in A %}S{% endfor %}", "{% for x in range(99999) if B %}S{% else %}S{% endfor %}",
        "{% if A %}S{% endif %}",
    ),
    *("{% for m in messages %}S S{% endfor %}", "{% set x = A %}S", "{% set n.x = A %}S", "{% set y %}S{% endset %}"),
    *(
        "{% macro f(x) %}S S{% endmacro %}S", "{% call f(A) %}S{% endcall %}", "{% filter F %}S{% endfilter %}",
        "{{ A }}S",
    ),
    *(
        "{% generation %}S{% endgeneration %}", "{% for i in range(60) %}{% set n.x = A %}S{% endfor %}{{ n.x }}",
        "{{ A }}",
    ),
)  # fmt: skip
_PLACE = re.compile(r"(?<![A-Za-z_'])[ABFMTS](?![A-Za-z'])")
_LAST = {"S": "", "F": "string", "M": "upper()", "T": "string"}
_WORDS = {
    "A": _VALUE, "B": _VALUE, "F": _FILTER, "M": _METHOD, "T": ("string", "eq(y)", "in(y)", "mapping"), "S": _BLOCK,
}  # fmt: skip


def _drawn(rng: random.Random) -> str:
    """A template of loops, macros, filters and methods that feed each other."""
    x, y, inner = (rng.choice(_START) for _ in range(3))
    text = f"{{% set n = namespace(x={inner}) %}}{{% set x = {x} %}}{{% set y = {y} %}}{{% set m = messages[0] %}}"
    text += "{% macro f(x) %}{{ x }}{{ caller() if caller else '' }}{% endmacro %}"
    text += "{% macro g(x, i) %}{% if i %}S{{ g(x, i - 1) }}S{% endif %}{% endmacro %}{{ g(x, 7) }}"
    text += "S S S S"
    for _ in range(rng.choice((5, 9, 15, 30))):
        if places := list(_PLACE.finditer(text)):
            place = rng.choice(places)
            text = text[: place.start()] + _word(place[0], rng) + text[place.end() :]
    return _PLACE.sub(lambda found: _LAST.get(found[0], "x"), text)


def _word(kind: str, rng: random.Random) -> str:
    if kind in "AB" and rng.random() < 0.4:
        return f"({rng.choice(_STEP)})"
    return rng.choice(_WORDS[kind])


def chat_budget(folder: Path) -> Target:
    """Templates that go on, grow or nest: each ends within its bounds."""
    jinja_process.MOST_SECONDS = 0.2
    turns = [Turn("user", "a b"), Turn("assistant", "b")]

    def run(data: bytes) -> None:
        template = ChatTemplate(data.decode("utf-8", "replace"), {"bos_token": "<s>"}, ["<|im_end|>"])
        if len(template.prompted(turns).text) > MOST_TEXT + 100:
            raise WrongError("a template makes too much text")

    return Target(lambda rng: _drawn(rng).encode(), run, (SourceError,))


def tokenizer_folder(folder: Path) -> Target:
    """The files of a foreign folder that describe its tokenizer."""
    values: dict[str, Any] = {
        TOKENIZER: json.loads(byte_level(CORPUS).to_str()),
        TOKENIZER_CONFIG: {
            "eos_token": "<|im_end|>", "bos_token": {"content": "<s>"}, "chat_template": CHATML, "pad_token": None,
        },
        "special_tokens_map.json": {
            "eos_token": {"content": "<|im_end|>", "lstrip": False},
            "unk_token": "<|endoftext|>",
        },
        "generation_config.json": {"eos_token_id": [2, 0]},
        "chat_template.json": {"chat_template": [{"name": "default", "template": CHATML}]},
    }  # fmt: skip
    files = {name: json.dumps(value).encode() for name, value in values.items()} | {CHAT_TEMPLATE: MARKED.encode()}

    def make(rng: random.Random) -> bytes:
        name = rng.choice(sorted(files))
        if name in values and rng.random() < 0.7:
            return name.encode() + b"\0" + damage_json(values[name], rng, 0.02 if name == TOKENIZER else 0.2)
        return name.encode() + b"\0" + damage_bytes(files[name], list(files.values()), rng)

    def run(data: bytes) -> None:
        name, _, body = data.partition(b"\0")
        for file, content in files.items():
            (folder / file).write_bytes(body if file.encode() == name else content)
        tokenizer = load_tokenizer(folder_tokenizer(folder))
        _check(tokenizer)
        encode_prompt([Turn("user", "hello 你好")], tokenizer, Template())

    return Target(make, run, (SourceError, CheckpointError, RecipeError))


def synonyms(folder: Path) -> Target:
    """A dictionary of synonyms."""
    seeds = ["高兴 快乐\n# note\n\n大 巨大 庞大\n".encode(), b"\xef\xbb\xbfa b\r\nc d\r\n"]
    return Target(damaged(seeds), read_at(folder / "synonyms.txt", load_synonyms), (SourceError,))


def prompts(folder: Path) -> Target:
    """Lines that somebody asks: every text is encoded, and what the tokenizer loses is told."""
    own = [load_tokenizer(one) for kind in ("words", "bpe") for one in _own(kind)()]
    loaded = [*own, *map(load_tokenizer, foreign_tokenizers())]
    seeds = [text.encode() for text in TEXTS] + ["你好，世界！👋".encode(), *TOKENS]

    def make(rng: random.Random) -> bytes:
        return bytes([rng.randrange(len(loaded))]) + damage_bytes(rng.choice(seeds), seeds, rng)

    def run(data: bytes) -> None:
        tokenizer = loaded[data[0] % len(loaded)] if data else loaded[0]
        text = data[1:].decode("utf-8", "surrogateescape")
        ids = tokenizer.encode_batch([text])[0]
        if {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id} & set(ids):
            raise WrongError("ordinary text has a special id")
        if tokenizer is own[0] and tokenizer.decode(ids) != text:
            raise WrongError("words do not spell a text")
        prompt_warning(lost_of(tokenizer, [text]))

    return Target(make, run, (SourceError,))


BUILDERS: dict[str, Callable[[Path], Target]] = {
    "tokenizer_words": partial(_tokenizer, _own("words"), 0.02),
    "tokenizer_bpe": partial(_tokenizer, _own("bpe"), 0.01),
    "tokenizer_foreign": partial(_tokenizer, foreign_tokenizers, 0.02),
    "tokenizer_folder": tokenizer_folder,
    "chat_template": chat_template,
    "chat_budget": chat_budget,
    "synonyms": synonyms,
    "prompts": prompts,
}
