"""Tokenizer files of other projects that cannot spell every text, as bytes; and a small tokenizer of words."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from unpad.data.tokens.tokenizer import LibraryTokenizer, load_tokenizer
from unpad.data.tokens.words import train_words

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def words(texts: Sequence[str], vocab_size: int = 300, reserved: Sequence[str] = ()) -> LibraryTokenizer:
    return load_tokenizer(train_words(texts, vocab_size, 1, reserved))


def word_list(words: Sequence[str], unknown: str = "[UNK]") -> bytes:
    """A list of words between punctuation; any other word is the unknown token."""
    library = Tokenizer(models.WordLevel({token: i for i, token in enumerate([*SPECIAL, *words])}, unk_token=unknown))
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    library.add_special_tokens(list(SPECIAL))
    return library.to_str().encode()


def word_pieces(letters: str) -> bytes:
    """WordPiece of single letters; a word with another letter is the unknown token, as a whole."""
    pieces = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
    library = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    library.add_special_tokens(list(SPECIAL))
    return library.to_str().encode()


def dropping_bpe(letters: str, texts: Sequence[str] = ()) -> bytes:
    """Byte-pair encoding of letters without an unknown token or bytes: it drops every other letter."""
    library = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=list(SPECIAL), show_progress=False)
    library.train_from_iterator([letters, *texts], trainer)
    return library.to_str().encode()


def byte_fallback(letters: str) -> bytes:
    """Byte-pair encoding as of Llama: letters, a mark for spaces, and bytes for all others."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters, "▁{"]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    library = Tokenizer(models.BPE(vocabulary, [("▁", "{")], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(parts)
    return library.to_str().encode()


def few_bytes(texts: Sequence[str]) -> bytes:
    """Byte-level byte-pair encoding that has no byte but those of its texts."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=300, special_tokens=list(SPECIAL), show_progress=False)
    )
    return library.to_str().encode()
