"""Words of Chinese text: segmentation, and a tokenizer with the words of the training texts as its vocabulary.

Segmentation is rjieba's dictionary walk without its hidden Markov model, so a word is a word of the dictionary, a run
of latin letters or digits, or a single character. Joining the segments gives the text back.
Unknown words are spelled in characters and unknown characters in UTF-8 bytes; every string comes back from its ids.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any

import rjieba

from unpad.errors import SourceError

FORMAT = "unpad-words-1"
SPECIALS = ("<|pad|>", "<|unk|>", "<|bos|>", "<|eos|>")
FIRST_BYTE = len(SPECIALS)
FIRST_TOKEN = FIRST_BYTE + 256
MAX_REMEMBERED = 500_000  # spellings of unknown segments kept; about 100 MB when full


def segment(text: str) -> list[str]:
    """Cut a text into words, spaces and punctuation; joined they are the text.

    Raises:
        SourceError: the text has a lone surrogate, which is not a character and has no UTF-8.
    """
    try:
        return list(rjieba.cut(text, hmm=False))
    except UnicodeEncodeError as error:
        raise surrogate_error(text, error.start) from None


def surrogate_error(text: str, position: int) -> SourceError:
    what = f"a text holds half of a surrogate pair, U+{ord(text[position]):04X}, as its character {position}"
    return SourceError(what, fix="write the text as valid UTF-8")


class WordTokenizer:
    """Tokenizer of words: 4 special ids, 256 bytes, the reserved strings, then `tokens`. ASCII characters are bytes.

    Encoding is serial: rjieba holds the interpreter's lock, so threads gain nothing, and transferring the ids from
    another process costs half of computing them. Threads may share an instance.
    """

    kind = "words"
    pad_id, bos_id, eos_id = 0, 2, 3
    stop_ids = frozenset({3})
    chat = None
    specials = dict(enumerate(SPECIALS))  # noqa: RUF012

    def __init__(self, tokens: Sequence[str], reserved: Sequence[str] = ()) -> None:
        first = FIRST_TOKEN + len(reserved)
        self.tokens, self.reserved = tuple(tokens), tuple(reserved)
        self.added: list[str] = []  # no byte is ever missing
        self.vocab_size = first + len(self.tokens)
        self.pieces: tuple[bytes, ...] = (
            *(b"" for _ in SPECIALS),
            *(bytes([byte]) for byte in range(256)),
            *(text.encode() for text in (*self.reserved, *self.tokens)),
        )
        self._reserved_ids = {text: FIRST_TOKEN + i for i, text in enumerate(self.reserved)}
        self._spelling = _Spelling(self.tokens, first)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of every text, no special id among them.

        A text equal to a reserved string becomes its one id. Inside a longer text that string is spelled in ordinary
        words, so no text of a user becomes a role marker.
        """
        return [self._encode(text) for text in texts]

    def encode_counted(self, texts: Sequence[str]) -> tuple[list[list[int]], list[str]]:
        """Return the ids of every text, and its lost characters: none, as there is a token for every byte."""
        return self.encode_batch(texts), [""] * len(texts)

    def _encode(self, text: str) -> list[int]:
        if text in self._reserved_ids:
            return [self._reserved_ids[text]]
        return list(chain.from_iterable(map(self._spelling.__getitem__, segment(text))))

    def decode(self, ids: Sequence[int]) -> str:
        """Join the texts of the ids; special ids are skipped, bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.pieces.__getitem__, ids)).decode("utf-8", errors="replace")

    def to_bytes(self) -> bytes:
        fields = {"format": FORMAT, "specials": SPECIALS, "reserved": self.reserved, "tokens": self.tokens}
        return json.dumps(fields, ensure_ascii=False, indent=0).encode()


class _Spelling(dict[str, tuple[int, ...]]):
    """Map of segments to ids; a segment outside the vocabulary is spelled at its first use and cached."""

    def __init__(self, tokens: Sequence[str], first: int) -> None:
        super().__init__((token, (first + i,)) for i, token in enumerate(tokens))
        self.update((chr(byte), (FIRST_BYTE + byte,)) for byte in range(128))
        self.full = len(self) + MAX_REMEMBERED

    def __missing__(self, text: str) -> tuple[int, ...]:
        if len(text) == 1:
            ids = tuple(FIRST_BYTE + byte for byte in text.encode())
        else:
            ids = tuple(chain.from_iterable(map(self.__getitem__, text)))
        if len(self) < self.full and len(text) <= 32:
            self[text] = ids
        return ids


def parse_words(fields: dict[str, Any]) -> WordTokenizer:
    """Load the tokenizer from the JSON object of `to_bytes`.

    Raises:
        ValueError: the object is not a tokenizer of words.
    """
    tokens, reserved = fields.get("tokens"), fields.get("reserved")
    for name, texts in (("tokens", tokens), ("reserved", reserved)):
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f'"{name}" is not a list of words')
        if len(set(texts)) != len(texts):
            raise ValueError(f'a word occurs twice in "{name}"')
        "".join(texts).encode()  # a lone surrogate raises a ValueError too
    return WordTokenizer(tokens or [], reserved or [])


def train_words(texts: Iterable[str], vocab_size: int, min_count: int, reserved: Sequence[str]) -> WordTokenizer:
    """Build a vocabulary: reserved strings, then characters, then words, each by descending count and then by text.

    Args:
        vocab_size: upper limit of ids, specials and bytes included.
        min_count: rarer words are left out; characters never are, since words are spelled in them.
        reserved: strings that become one id if a text consists of one.
    """
    words: Counter[str] = Counter()
    for text in texts:
        words.update(segment(text))
    characters: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            characters[character] += count
    ranked = chain(
        (character for character in _by_count(characters) if not character.isascii()),  # ASCII: bytes already
        (word for word in _by_count(words) if len(word) > 1 and words[word] >= min_count),
    )
    reserved_words = list(dict.fromkeys(text for text in reserved if text))
    room = max(0, vocab_size - FIRST_TOKEN - len(reserved_words))
    return WordTokenizer(list(islice(ranked, room)), reserved_words)


def _by_count(counts: Counter[str]) -> list[str]:
    return sorted(counts, key=lambda text: (-counts[text], text))
