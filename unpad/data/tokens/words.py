"""Words of Chinese text: segmentation, and the vocabulary of a tokenizer with the words of the training texts.

Segmentation is rjieba's dictionary walk without its hidden Markov model, so a word is a word of the dictionary, a run
of latin letters or digits, or a single character. Joining the segments gives the text back. The dictionary makes the
vocabulary and is not needed after: a text is encoded by the longest word of the vocabulary that begins at each place,
and what has none is spelled in UTF-8 bytes.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import rjieba
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from unpad.errors import SourceError

FORMAT = "unpad-words-1"
SPECIALS = ("<|pad|>", "<|unk|>", "<|bos|>", "<|eos|>")
FIRST_BYTE = len(SPECIALS)
FIRST_TOKEN = FIRST_BYTE + 256
# The library's search for the longest word takes the cube of what it is given: runs of letters are cut at 64, and any
# other character stands alone, as no word crosses these places.
LETTERS = r"\p{L}\p{M}\p{N}"
PIECES = f"[{LETTERS}]{{1,64}}|[^{LETTERS}]"
HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
WORD = re.compile(r"[^\W_]{2,64}")


def segment(text: str) -> list[str]:
    """Cut a text into words, spaces and punctuation; joined they are the text.

    Raises:
        SourceError: the text has a lone surrogate, which is not a character and has no UTF-8.
    """
    try:
        return list(rjieba.cut(text, hmm=False))
    except UnicodeEncodeError as error:
        raise surrogate_error(text, error.start) from None


def mostly_chinese(texts: Iterable[str]) -> bool:
    """True if more than half of the letters are Chinese characters."""
    return sum(2 * len(HAN.findall(text)) - sum(map(str.isalpha, text)) for text in texts) > 0


def surrogate_error(text: str, position: int) -> SourceError:
    what = f"a text holds half of a surrogate pair, U+{ord(text[position]):04X}, as its character {position}"
    return SourceError(what, fix="write the text as valid UTF-8")


class WordTokenizer:
    """Tokenizer of earlier runs, by rjieba's words: 4 special ids, 256 bytes, the reserved strings, then `tokens`.

    A text equal to a reserved string becomes its one id; inside a longer text that string is ordinary words.
    """

    kind = "words"
    pad_id, bos_id, eos_id = 0, 2, 3
    stop_ids = frozenset({3})
    chat = None
    specials = dict(enumerate(SPECIALS))  # noqa: RUF012

    def __init__(self, tokens: Sequence[str], reserved: Sequence[str] = ()) -> None:
        self.tokens, self.reserved = tuple(tokens), tuple(reserved)
        self.added: list[str] = []  # no byte is ever missing
        bytes_ = [bytes([byte]) for byte in range(256)]
        words = [text.encode() for text in (*self.reserved, *self.tokens)]
        self.pieces: tuple[bytes, ...] = (*(b"" for _ in SPECIALS), *bytes_, *words)
        self.vocab_size = len(self.pieces)
        self._reserved_ids = {text: FIRST_TOKEN + i for i, text in enumerate(self.reserved)}
        self._ids = {text: FIRST_TOKEN + len(reserved) + i for i, text in enumerate(self.tokens)}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of every text, no special id among them."""
        return [
            [self._reserved_ids[text]] if text in self._reserved_ids else list(self._spelling(segment(text)))
            for text in texts
        ]

    def encode_counted(self, texts: Sequence[str]) -> tuple[list[list[int]], list[str]]:
        """Return the ids of every text, and its lost characters: none, as there is a token for every byte."""
        return self.encode_batch(texts), [""] * len(texts)

    def _spelling(self, segments: Iterable[str]) -> Iterator[int]:
        """Ids of segments; unknown ones are spelled in characters, and those in bytes."""
        for text in segments:
            if text in self._ids:
                yield self._ids[text]
            elif len(text) == 1:
                yield from (FIRST_BYTE + byte for byte in text.encode())
            else:
                yield from self._spelling(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Join the texts of the ids; special ids are skipped, bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.pieces.__getitem__, ids)).decode("utf-8", errors="replace")

    def to_bytes(self) -> bytes:
        fields = {"format": FORMAT, "specials": SPECIALS, "reserved": self.reserved, "tokens": self.tokens}
        return json.dumps(fields, ensure_ascii=False, indent=0).encode()


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


def train_words(texts: Iterable[str], vocab_size: int, min_count: int, reserved: Sequence[str]) -> bytes:
    """Build the tokenizer.json of a vocabulary: specials, bytes, reserved strings, characters, then words, each by
    descending count and then by text.

    Args:
        vocab_size: upper limit of ids, specials and bytes included.
        min_count: rarer words are left out; characters never are, since words are spelled in them.
        reserved: strings that become special tokens; no text that has one inside gets its id.
    """
    words = Counter(chain.from_iterable(map(segment, texts)))
    characters: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            characters[character] += count
    marks = [text for text in dict.fromkeys(reserved) if text.strip() not in ("", *SPECIALS, *BYTES)]
    ranked = chain(
        (character for character in _by_count(characters) if not character.isascii()),  # ASCII: bytes already
        (word for word in _by_count(words) if words[word] >= min_count and WORD.fullmatch(word)),
    )
    room = max(0, vocab_size - FIRST_TOKEN - len(marks))
    letters = {byte: letter for letter, byte in BYTES.items()}
    spelled = ("".join(map(letters.__getitem__, text.encode())) for text in ranked if text not in marks)
    vocabulary = [*SPECIALS, *(letters[byte] for byte in range(256)), *marks, *islice(spelled, room)]
    ids = {token: id for id, token in enumerate(vocabulary)}
    model = models.WordPiece(ids, unk_token=SPECIALS[1], continuing_subword_prefix="", max_input_chars_per_word=256)
    library = tokenizers.Tokenizer(model)
    cut = pre_tokenizers.Split(tokenizers.Regex(PIECES), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([cut, to_bytes])
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([*SPECIALS, *marks])
    return library.to_str().encode()


def _by_count(counts: Counter[str]) -> list[str]:
    return sorted(counts, key=lambda text: (-counts[text], text))


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level vocabularies: printable Latin-1 as it is, the other bytes from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES = _byte_alphabet()
