"""Tokenizers: built from the training texts (words, byte-level BPE) or read from any tokenizer.json.

A text becomes ordinary ids only: no special id is added, and a text that spells a special token stays text.
`encode.py` adds the special ids.
"""

import codecs
import json
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from unpad.data.tokens.chat_template import END_THINK, THINK, ChatTemplate
from unpad.data.tokens.lost import uncovered
from unpad.data.tokens.words import BYTES, FORMAT, SPECIALS, mostly_chinese, parse_words, surrogate_error, train_words
from unpad.errors import RecipeError, SourceError
from unpad.recipes import data as recipe_data
from unpad.storage.reading import read_file

TOKENIZER = "tokenizer.json"  # of a run
MAX_TOKENIZER_BYTES = 1 << 27  # the largest have some 60 MB
MOST_IDS = 1 << 22  # largest vocabularies have some 260,000
IMPORTED = "unpad"  # key of what an imported folder says besides its tokenizer.json
MARK = re.compile(r"<\|\w+\|>")  # a role's mark that belongs to no language
WORDS = 8000  # least vocabulary of words that auto chooses; Chinese characters alone are some 3,000
FIRST = 10_000  # texts whose script chooses a kind
MAX_TOKEN_BYTES = 24  # eight Chinese characters; longer merges only memorise lines that the corpus repeats
# Bytes of UTF-8, from the first to the last, that may follow in a state, and the state after them; see `spelling`.
UTF8 = (
    (0, 0x00, 0x7F, 0), (0, 0xC2, 0xDF, 1), (0, 0xE0, 0xEF, 2), (0, 0xF0, 0xF4, 3), (0, 0xE0, 0xE0, 4),
    (0, 0xED, 0xED, 5), (0, 0xF0, 0xF0, 6), (0, 0xF4, 0xF4, 7), (1, 0x80, 0xBF, 0), (2, 0x80, 0xBF, 1),
    (3, 0x80, 0xBF, 2), (4, 0xA0, 0xBF, 1), (5, 0x80, 0x9F, 1), (6, 0x90, 0xBF, 2), (7, 0x80, 0x8F, 2),
)  # fmt: skip
TRAINED = {"BPE": "bpe", "WordPiece": "words"}  # models of tokenizers that are made here, and their kinds
CHARS_PER_CALL = 500_000  # texts per call of the library: its records take about 100 bytes per token

DRAWN = ("dropout", "alpha")  # of models, BPE and Unigram, that draw the tokens of a text
SPECIAL_NAMES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


class Tokenizer(Protocol):
    """Conversion of texts to ids and back.

    Attributes:
        vocab_size: the largest id plus one.
        stop_ids: ids that end a reply: EOS, and others of a model that was imported.
        specials: names of the special tokens, by id.
        added: names of pad, bos and eos tokens that were missing in a file and added after its vocabulary.
    """

    kind: str
    vocab_size: int
    pad_id: int
    bos_id: int
    eos_id: int
    stop_ids: frozenset[int]
    specials: dict[int, str]
    added: list[str]

    @property
    def chat(self) -> ChatTemplate | None:
        """Template of conversations that came with an imported model; None: that of the recipe."""

    @property
    def pieces(self) -> tuple[bytes, ...] | None:
        """Bytes of each id, b"" for a special one; None if they depend on the neighbours."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of every text; no special id is added or comes from the text."""

    def encode_counted(self, texts: Sequence[str]) -> tuple[list[list[int]], list[str]]:
        """Return the ids of every text, and its characters that only the unknown token or no token stands for."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids; special ids are skipped."""

    def to_bytes(self) -> bytes:
        """Return the tokenizer.json of a run: equal tokenizers give equal bytes."""


def train_tokenizer(
    settings: recipe_data.TokenizerSettings, texts: Iterable[str], reserved: Sequence[str]
) -> Tokenizer:
    """Build a vocabulary from the training texts; equal texts in equal order give an equal tokenizer.

    Args:
        settings: kind words, bpe, or auto, which is words for mostly Chinese texts; a file is opened by
            `open_tokenizer_file`.
        reserved: the template's strings. Kind words gives each one id, kind bpe those of the form <|user|>: a text that
            is equal to it becomes this id, and other programs read them as special tokens.

    Raises:
        SourceError: a text is not valid Unicode.
    """
    if settings.kind == "auto":
        first = list(islice(texts := iter(texts), FIRST))
        words = {"kind": "words", "vocab_size": max(settings.vocab_size, WORDS)}
        settings = settings.model_copy(update=words if mostly_chinese(first) else {"kind": "bpe"})
        texts = chain(first, texts)
    if settings.kind == "words":
        return _open_library(train_words(texts, settings.vocab_size, settings.min_count, reserved))
    assert settings.kind == "bpe", "a file is opened, not trained"
    marks = [text for text in dict.fromkeys(reserved) if MARK.fullmatch(text) and text not in SPECIALS]
    library = tokenizers.Tokenizer(models.BPE())
    # GPT-2's pattern separates letters (a whole run of Chinese), digits, punctuation and white space.
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        min_frequency=max(2, settings.min_count),  # a pair seen once saves nothing
        special_tokens=[*SPECIALS, *marks],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=MAX_TOKEN_BYTES,
        show_progress=False,
    )
    library.train_from_iterator(_valid(texts), trainer)
    return _open_library(library.to_str().encode())


def load_tokenizer(data: bytes) -> Tokenizer:
    """Load the output of `to_bytes`, or a tokenizer.json of another project.

    Raises:
        SourceError: the bytes are not a tokenizer.
    """
    try:
        fields = json.loads(data)
        if isinstance(fields, dict) and fields.get("format") == FORMAT:
            return parse_words(fields)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"not a tokenizer: {error}"[:200], fix="use a tokenizer.json") from None
    return _open_library(data)


def kept_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    """Load the tokenizer among the files that a run keeps.

    Raises:
        SourceError: the file is damaged; names it.
    """
    try:
        return load_tokenizer(files[TOKENIZER])
    except SourceError as error:
        raise SourceError(error.what, where=TOKENIZER, fix="put the file of the run back, or use another run") from None


def open_tokenizer_file(path: Path) -> Tokenizer:
    """Open the tokenizer.json that a recipe names.

    Raises:
        RecipeError: there is no such file.
        SourceError: the file is not a tokenizer, or not a sound one.
    """
    if path.is_dir():
        what = "tokenizer.path is a folder, and the file in it is wanted"
        raise RecipeError(what, where=str(path), fix=f"name {path / 'tokenizer.json'}, or set model.from={path}")
    if not path.is_file():
        raise RecipeError("there is no such tokenizer file", where=str(path), fix="correct tokenizer.path")
    try:
        fix = "name a tokenizer.json in tokenizer.path"
        return load_tokenizer(read_file(path, SourceError, MAX_TOKENIZER_BYTES, fix))
    except SourceError as error:
        raise SourceError(error.what, where=str(path), fix=error.fix) from None


class LibraryTokenizer:
    """A tokenizer.json run by the `tokenizers` library, which encodes a batch on all cores.

    Args:
        library: its added tokens include pad, bos and eos, all marked special.
        fields: the JSON object it was read from.
        pad, bos, eos: names of those tokens.
        added: those of the three that were missing in the file; their ids come after the vocabulary.
        imported: what the folder of the tokenizer says besides, in the form of `with_import`.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        fields: dict[str, Any],
        pad: str,
        bos: str,
        eos: str,
        added: list[str],
        imported: dict[str, Any],
    ) -> None:
        library.encode_special_tokens = True  # "encode" as in: as text
        self._library, self.added, self._imported = library, added, imported
        vocabulary: dict[str, int] = library.get_vocab(with_added_tokens=True)
        self.pad_id, self.bos_id, self.eos_id = vocabulary[pad], vocabulary[bos], vocabulary[eos]
        self.vocab_size = max(vocabulary.values()) + 1
        stops = imported.get("stops", [eos])
        self.stop_ids = frozenset(vocabulary[name] for name in stops)
        source = imported.get("chat_template")
        self.chat = None if source is None else ChatTemplate(source, imported["names"], stops)
        special = {token["content"] for token in fields["added_tokens"] if token["special"]}
        # A reply shows its thoughts, so their marks are text to whoever reads it, whatever the file calls them.
        shown = {THINK, END_THINK} if self.chat is not None else set[str]()
        self.specials = {vocabulary[name]: name for name in special - shown}
        # The unknown token is special too, but some files use it for texts that they cannot spell.
        unknown = _unknown_token(fields["model"])
        self._unknown_id = vocabulary.get(unknown) if unknown is not None else None
        # One that is also pad, bos or eos would end a text, or hide in it; it stands for nothing, so it is left out.
        self._left_out = self._unknown_id if unknown in (pad, bos, eos) else None
        self._control = {name: vocabulary[name] for name in special - {unknown}}
        self.pieces: tuple[bytes, ...] | None = None
        self.byte_ids: frozenset[int] = frozenset()
        model = fields["model"].get("type")
        is_bpe = model == "BPE"
        is_ours = model in TRAINED and [vocabulary.get(name) for name in SPECIALS] == [0, 1, 2, 3]
        # Marks of the template are read back as their text, by which a reply ends where the model speaks for the user.
        self._marks = (
            {name: vocabulary[name] for name in special - set(SPECIALS)} if is_ours and self.chat is None else {}
        )
        decoder = fields.get("decoder") or {}
        if decoder.get("type") == "ByteLevel":
            skipped = self.specials.keys() - self._marks.values()
            texts = {id: _token_bytes(token) for token, id in vocabulary.items() if id not in skipped}
            texts |= {id: name.encode() for name, id in self._marks.items()}
            self.pieces = tuple(texts.get(id, b"") for id in range(self.vocab_size))
        elif '"ByteFallback"' in json.dumps(decoder):
            self.byte_ids = frozenset(id for token, id in vocabulary.items() if re.fullmatch("<0x[0-9A-F]{2}>", token))
        # Byte-level files that were trained on few texts lack bytes, and drop them without a token. So does any
        # byte-pair encoding with characters, if it has no unknown token.
        byte_level = self.pieces is not None
        self.kind = TRAINED[model] if is_ours and byte_level else "file"
        self._missing_bytes = {byte for letter, byte in BYTES.items() if byte_level and letter not in vocabulary}
        self._drops = is_bpe and (bool(self._missing_bytes) or (unknown is None and not byte_level))
        self._dropped: dict[str, bool] = {}
        falls_back = bool(fields["model"].get("byte_fallback")) and len(self.byte_ids) == 256
        cuts = '"Removed"' in json.dumps(fields.get("pre_tokenizer")) or not _respells(fields.get("normalizer"))
        self._keeps_all = (falls_back or ((is_bpe or is_ours) and byte_level and not self._missing_bytes)) and not cuts
        self._spaces_count = fields.get("pre_tokenizer") is None  # where nothing cuts at them, nothing puts them back

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of every text.

        Raises:
            SourceError: a text is not valid Unicode, or the tokenizer fails on it.
        """
        return [ids for ids, _ in self._encode(texts, counted=False)]

    def encode_counted(self, texts: Sequence[str]) -> tuple[list[list[int]], list[str]]:
        """Return the ids of every text, and its characters that only the unknown token or no token stands for.

        Raises:
            SourceError: as `encode_batch`.
        """
        encoded = self._encode(texts, counted=not self._keeps_all)
        return [ids for ids, _ in encoded], [lost for _, lost in encoded]

    def _encode(self, texts: Sequence[str], counted: bool) -> list[tuple[list[int], str]]:
        """Encode texts; return the ids and, if `counted`, the lost characters of each."""
        encoded: list[tuple[list[int], str]] = []
        for part in _parts(list(_valid(texts))):
            encoded += self._encode_whole(part, counted)
        control = frozenset(self._control.values())
        for index, (ids, _) in enumerate(encoded):
            if not control.isdisjoint(ids):
                encoded[index] = self._encode_apart(texts[index], control, counted)
        if self._left_out is not None:
            encoded = [([id for id in ids if id != self._left_out], lost) for ids, lost in encoded]
        for index, text in enumerate(texts if self._marks else ()):
            if text in self._marks:
                encoded[index] = [self._marks[text]], ""
        return encoded

    def _encode_whole(self, texts: list[str], counted: bool) -> list[tuple[list[int], str]]:
        with _library_errors("the tokenizer fails on a text"):
            if not counted:  # twice as fast, as it keeps no offsets
                return [(item.ids, "") for item in self._library.encode_batch_fast(texts, add_special_tokens=False)]
            items = self._library.encode_batch(texts, add_special_tokens=False)
            return [(item.ids, self._lost(text, item)) for text, item in zip(texts, items, strict=True)]

    def _lost(self, text: str, item: tokenizers.Encoding) -> str:
        """Characters of a text that only the unknown token, or no token, stands for."""
        if self._drops:
            return "".join(character for character in text if self._is_dropped(character))
        return uncovered(text, item.ids, item.offsets, self._unknown_id, self._spaces_count)

    def _is_dropped(self, character: str) -> bool:
        """True for a character without a token; offsets do not tell, as those after a dropped one are moved."""
        known = self._dropped.get(character)
        if known is None:
            if self.pieces is not None:
                known = not self._missing_bytes.isdisjoint(character.encode())
            else:
                known = not self._library.encode(character, add_special_tokens=False).ids
            self._dropped[character] = known = known and (self._spaces_count or not character.isspace())
        return known

    def _encode_apart(self, text: str, control: frozenset[int], counted: bool) -> tuple[list[int], str]:
        """Encode a text with special strings that the model itself knows, such as a word list, cut in their middle."""
        pattern = "|".join(map(re.escape, sorted(self._control, key=len, reverse=True)))
        cuts = [0, *((match.start() + match.end() + 1) // 2 for match in re.finditer(pattern, text)), len(text)]
        for parts in ([text[a:b] for a, b in pairwise(cuts)], list(text)):
            encoded = self._encode_whole(parts, counted)
            ids = [id for part_ids, _ in encoded for id in part_ids]
            if control.isdisjoint(ids):
                return ids, "".join(lost for _, lost in encoded)
        name = next(name for name, id in self._control.items() if id in ids)
        raise SourceError(f"the tokenizer makes its special token {name} of ordinary text", fix="use another tokenizer")

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids; special ids are skipped, bytes that are not UTF-8 become U+FFFD."""
        if self.pieces is not None:
            return b"".join(map(self.pieces.__getitem__, ids)).decode("utf-8", errors="replace")
        with _library_errors("the tokenizer fails on its own ids"):
            return str(self._library.decode(list(ids), skip_special_tokens=True))

    def to_bytes(self) -> bytes:
        return with_import(self._library.to_str().encode(), self._imported) if self._imported else self.plain_bytes()

    def plain_bytes(self) -> bytes:
        """The tokenizer.json that other programs read."""
        return self._library.to_str().encode()

    def encode_marked(self, text: str, plain: Sequence[slice], cuts: Collection[int]) -> tuple[list[int], list[slice]]:
        """Encode the text of a template; its special strings become special tokens.

        Args:
            plain: parts in which special strings are ordinary text; in order.
            cuts: places that no token reaches across.

        Returns:
            The ids, and the characters that each stands for.

        Raises:
            SourceError: as `encode_batch`.
        """
        inside = [part for part in plain if any(name in text[part] for name in self._control)]
        ids, places = self._encode_parts(text, inside, set())
        crossed = {cut for cut in cuts if any(place.start < cut < place.stop for place in places)}
        crossed |= {cut for cut in cuts if self._reads_on(text, ids, inside, cut)}
        # A part by itself may begin with another token than inside the text, so only those that must be are cut.
        return self._encode_parts(text, inside, crossed) if crossed else (ids, places)

    def _encode_parts(self, text: str, inside: Sequence[slice], cuts: set[int]) -> tuple[list[int], list[slice]]:
        """Encode a text, cut at `cuts` and around the parts `inside`; special strings in `inside` are text."""
        ids: list[int] = []
        places: list[slice] = []
        bounds = sorted({0, len(text), *cuts, *(end for part in inside for end in (part.start, part.stop))})
        for start, stop in pairwise(bounds):
            is_plain = any(part.start <= start and stop <= part.stop for part in inside)
            if is_plain:
                (part_ids,) = self.encode_batch([text[start:stop]])
                ids += part_ids
                places += [slice(start, stop)] * len(part_ids)
                continue
            with _library_errors("the tokenizer fails on a text"):
                item = self._marking.encode(text[start:stop], add_special_tokens=False)
            ids += item.ids
            places += [slice(start + first, start + last) for first, last in item.offsets]
        return ids, places

    def _reads_on(self, text: str, ids: Sequence[int], inside: Sequence[slice], cut: int) -> bool:
        """True where the tokens before a place are others if the text ends there: some patterns leave the last of
        several white spaces to the word that follows."""
        if not text[cut : cut + 1].strip() or text[max(cut - 2, 0) : cut].strip() or cut < 2:
            return False
        alone, _ = self._encode_parts(text[:cut], [part for part in inside if part.stop <= cut], set())
        return list(ids[: len(alone)]) != alone

    def special_names(self) -> dict[str, str]:
        """Texts of BOS, EOS and PAD, by the names that transformers has for them."""
        texts = {id: text for text, id in self._library.get_vocab(with_added_tokens=True).items()}
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        return {name: texts[id] for name, id in ids.items()}

    def refuse_special(self, texts: Iterable[str]) -> None:
        """Refuse messages that spell special tokens, where a template does not show which part of its text they are.

        Raises:
            SourceError: names the token.
        """
        for text in texts:
            for name in self._control:
                if name in text:
                    what = f"a message spells the special token {name}, and the chat template changes messages"
                    raise SourceError(what, fix="remove it from the message")

    @cached_property
    def _marking(self) -> tokenizers.Tokenizer:
        """The library's tokenizer with special strings as special tokens; a setting of its own would be shared."""
        return tokenizers.Tokenizer.from_str(self._library.to_str())


def with_import(data: bytes, imported: dict[str, Any]) -> bytes:
    """A tokenizer.json with what its folder says besides.

    Args:
        imported: pad, bos and eos, names of tokens; stops, names of those that end a reply; chat_template, or None;
            names of special tokens in it, such as bos_token.
    """
    return json.dumps({**json.loads(data), IMPORTED: imported}, ensure_ascii=False).encode()


@lru_cache(4)
def spelling(pieces: tuple[bytes, ...], num_ids: int) -> np.ndarray:
    """What each id makes of a text that ends within a character, by the UTF-8 of the Unicode standard (table 3-7).

    Args:
        pieces: bytes of each id.
        num_ids: rows of a model, which may be more.

    Returns:
        (8, num_ids) int8: the state after an id in each state, -1 where its bytes cannot follow. State 0 is between
        characters, 1 to 3 lack so many bytes, 4 to 7 follow the bytes E0, ED, F0 and F4. No id without bytes follows
        a part of a character. A state that no id follows goes on as if it were 0.
    """
    follows = np.full((8, 256), -1, np.int8)
    for state, first, last, then in UTF8:
        follows[state, first : last + 1] = then
    lengths = np.zeros(num_ids, np.int64)
    lengths[: len(pieces)] = [len(piece) for piece in pieces]
    starts, joined = np.cumsum(lengths) - lengths, np.frombuffer(b"".join(pieces), np.uint8)
    after = np.repeat(np.arange(8, dtype=np.int8)[:, None], num_ids, 1)
    after[1:, lengths == 0] = -1
    for place in range(lengths.max(initial=0)):
        ids = np.flatnonzero(lengths > place)
        states = after[:, ids]
        after[:, ids] = np.where(states < 0, -1, follows[states, joined[starts[ids] + place]])
    after[(after[:, lengths > 0] < 0).all(1)] = 0
    return after


class DecodeStream:
    """Incremental decoder of ids; its parts joined are `decode` of all ids.

    A part never ends within a character and is never revised. One `push` costs the same after a million ids as at the
    start. If `pieces` is None, this holds for decoders that look at most one token back, and runs of byte tokens are
    buffered until they end, because one bad byte changes the whole run.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, id: int) -> str:
        """Add one id and return the text that it completes, perhaps none."""
        pieces = self._tokenizer.pieces
        if pieces is not None:
            return self._utf8.decode(pieces[id])
        assert isinstance(self._tokenizer, LibraryTokenizer)
        if id in self._tokenizer.specials:
            return ""
        self._pending.append(id)
        return "" if id in self._tokenizer.byte_ids else self._settle()

    def flush(self) -> str:
        """Return the rest of the text; an unfinished character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True) + (self._settle() if self._pending else "")

    def _settle(self) -> str:
        known = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode(self._context + self._pending)
        self._context, self._pending = self._pending[-1:], []
        return text[len(known) :]


# --------------------------------------------------------------------------- reading a tokenizer.json


def _open_library(data: bytes) -> LibraryTokenizer:
    """Read a tokenizer.json, mark its pad, bos and eos as special and add those it lacks."""
    with _library_errors("not a tokenizer.json that the tokenizers library can read"):
        fields = json.loads(data)
        imported: dict[str, Any] = fields.pop(IMPORTED, {})
        whole = json.dumps(fields, ensure_ascii=False) if imported else data.decode()
        vocabulary = tokenizers.Tokenizer.from_str(whole).get_vocab(with_added_tokens=True)
        largest = max(vocabulary.values(), default=0)
        if largest >= MOST_IDS:  # the library writes a file with a line for every id below it
            raise ValueError(f"a token has the id {largest:,}; at most {MOST_IDS:,} ids are read")
        fields["truncation"] = fields["padding"] = None  # the plan alone truncates and pads
        eos = imported.get("eos") or _first(SPECIAL_NAMES["eos"], vocabulary)
        bos = imported.get("bos") or _first(SPECIAL_NAMES["bos"], vocabulary)
        pads = [name for name in SPECIAL_NAMES["pad"] if name not in (eos, bos)]
        pad = imported.get("pad") or _first(pads, vocabulary)
        added = [name for name in (pad, bos, eos) if name not in vocabulary]
        entries = {token["content"]: token for token in fields.get("added_tokens") or []}
        next_id = max(vocabulary.values(), default=-1) + 1
        for name in (pad, bos, eos):
            plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            if name not in vocabulary:
                vocabulary[name], next_id = next_id, next_id + 1
            entries[name] = {"id": vocabulary[name], "content": name, **plain, **entries.get(name, {}), "special": True}
        fields["added_tokens"] = sorted(entries.values(), key=lambda token: token["id"])
        library = tokenizers.Tokenizer.from_str(json.dumps(fields, ensure_ascii=False))
        loaded = library.get_vocab(with_added_tokens=True)
        if len(set(loaded.values())) != len(loaded) or min(loaded.values()) < 0:
            raise ValueError("two tokens share an id")
        tokenizer = LibraryTokenizer(library, fields, pad, bos, eos, added, imported)
    if drawn := {name: value for name in DRAWN if (value := fields["model"].get(name))}:
        said = " and ".join(f"{name} is {value}" for name, value in drawn.items())
        what = f"the tokenizer draws the tokens of a text anew each time: {said} in its model"
        raise SourceError(what, fix=f"set {' and '.join(drawn)} to null in the tokenizer.json")
    return tokenizer


@contextmanager
def _library_errors(what: str) -> Iterator[None]:
    """Turn errors of the library, panics of its Rust code included, into a SourceError."""
    try:
        yield
    except BaseException as error:
        # A panic is not an Exception, and its class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        detail = (str(error).splitlines() or [type(error).__name__])[0][:160]
        raise SourceError(f"{what}: {detail}", fix="check or replace the tokenizer.json") from None


def _first(names: Sequence[str], vocabulary: dict[str, int]) -> str:
    return next((name for name in names if name in vocabulary), names[0])


def _respells(normalizer: dict[str, Any] | None) -> bool:
    """True for a normalizer that writes every character in some way, and removes none."""
    if normalizer is None or normalizer["type"] in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend"):
        return True
    if normalizer["type"] == "Replace":
        return bool(normalizer.get("content"))
    return normalizer["type"] == "Sequence" and all(map(_respells, normalizer["normalizers"]))


def _unknown_token(model: dict[str, Any]) -> str | None:
    if model.get("unk_id") is not None:
        return str(model["vocab"][model["unk_id"]][0])
    return model.get("unk_token")


def _valid(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise surrogate_error(text, error.start) from None
        yield text


def _parts(texts: list[str]) -> Iterator[list[str]]:
    """Cut a list of texts into runs of about CHARS_PER_CALL characters."""
    start, chars = 0, 0
    for position, text in enumerate(texts):
        chars += len(text)
        if chars >= CHARS_PER_CALL:
            yield texts[start : position + 1]
            start, chars = position + 1, 0
    if start < len(texts):
        yield texts[start:]


def _token_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; an added token, with any other character, is its own UTF-8."""
    if all(character in BYTES for character in token):
        return bytes(BYTES[character] for character in token)
    return token.encode()
