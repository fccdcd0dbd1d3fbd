"""Tokens against the text that they spell: characters that are lost, a vocabulary of other text, and doubled marks."""

from __future__ import annotations

import re

import numpy as np

from unpad.data.text import TextData
from unpad.data.tokens.lost import LostCharacters
from unpad.data.tokens.tokenizer import Tokenizer, train_tokenizer
from unpad.data.vqa import VqaData
from unpad.doctor.subject import Subject
from unpad.recipes.data import TokenizerSettings
from unpad.terminal.finding import Finding, Severity, Value

SAMPLE = 400  # sequences
LEAST_CHARACTERS, MOST_CHARACTERS = 500, 200_000
LOST, MANY_LOST = 0.01, 0.1
MANY_TOKENS, VERY_MANY_TOKENS = 2.0, 3.0  # times those of a tokenizer of this text
DOUBLED = 0.5  # of the sequences
SMALLEST_VOCABULARY, LARGEST_VOCABULARY = 1000, 8000  # of the tokenizer that this one is compared with
LEAST_PER_CHARACTER = 0.75  # tokens: below, a small vocabulary of one's own is no trouble
MOSTLY_OTHERS = 0.3  # characters beyond ASCII: `words` takes at most a token for one of Chinese
RARE = 20  # occurrences, that a word may need to be one
NAMED = 3  # lost characters


def check_tokens(subject: Subject[TextData | VqaData], lost: LostCharacters) -> list[Finding]:
    """Findings on the tokens of the training sequences, and on characters that the tokenizer lost."""
    data = subject.data
    ids = np.random.default_rng(0).permutation(subject.stage.train_ids)[:SAMPLE]
    sequences = [data.tokens_of(seq) for seq in ids.tolist()]
    return [*_lost(lost), *_other(subject, data.tokenizer, sequences), *_doubled(data.tokenizer, sequences)]


def _lost(lost: LostCharacters) -> list[Finding]:
    if lost.share < LOST:
        return []
    values: dict[str, Value] = {"common": " ".join(lost.common[:NAMED])}
    severity: Severity = "fault" if lost.share >= MANY_LOST else "warning"
    return [Finding("unknown_tokens", severity, lost.share, ("tokenizer.path", "tokenizer.kind"), values)]


def _other(subject: Subject, tokenizer: Tokenizer, sequences: list[np.ndarray]) -> list[Finding]:
    """Compare a tokenizer that came as a file, or with a small vocabulary, with one made from half of the sample, on
    the other half."""
    settings = subject.setup.recipe.tokenizer
    if settings.kind != "file" and settings.vocab_size >= SMALLEST_VOCABULARY and settings.min_count <= RARE:
        return []
    template = subject.setup.recipe.data.template  # its prefixes are tokens of their own
    prefixes = re.compile(
        "|".join(re.escape(one) for one in (template.system, template.user, template.assistant) if one) or "$^"
    )
    texts = [prefixes.sub("\n", tokenizer.decode(one.tolist())).strip("\n") for one in sequences]
    learnt, judged = _halves(texts)
    characters = sum(map(len, judged))
    if characters < LEAST_CHARACTERS:
        return []
    size = min(max(tokenizer.vocab_size, SMALLEST_VOCABULARY), LARGEST_VOCABULARY)
    own = train_tokenizer(TokenizerSettings(kind="bpe", vocab_size=size), learnt, [])
    here, best = (sum(map(len, one.encode_batch(judged))) / characters for one in (tokenizer, own))
    ratio = here / max(best, 1e-9)
    if ratio < MANY_TOKENS:
        return []
    unused = 1 - len(np.unique(np.concatenate(sequences))) / tokenizer.vocab_size
    values: dict[str, Value] = {"per_character": here, "unused": unused}
    severity: Severity = "fault" if ratio >= VERY_MANY_TOKENS else "warning"
    if settings.kind != "file":
        others = sum(not one.isascii() for text in judged for one in text) / characters
        if here < LEAST_PER_CHARACTER or (settings.kind == "words" and others > MOSTLY_OTHERS):
            return []
        if settings.min_count > RARE:
            values = {"least": settings.min_count, "per_character": here}
            return [Finding("words_too_rare", "warning", ratio, ("tokenizer.min_count",), values)]
        values = {"size": settings.vocab_size, "per_character": here}
        return [Finding("small_vocabulary", "warning", ratio, ("tokenizer.vocab_size", "tokenizer.kind"), values)]
    return [Finding("other_tokenizer", severity, ratio, ("tokenizer.path", "tokenizer.kind"), values)]


def _halves(texts: list[str]) -> tuple[list[str], list[str]]:
    taken, size = list[str](), 0
    for text in texts:
        if size > MOST_CHARACTERS:
            break
        taken.append(text)
        size += len(text)
    return taken[::2], taken[1::2]


def _doubled(tokenizer: Tokenizer, sequences: list[np.ndarray]) -> list[Finding]:
    long = [one for one in sequences if len(one) > 3]
    found = []
    for mark, place, at, ids in (
        ("BOS", "@begin", slice(0, 2), {tokenizer.bos_id}),
        ("EOS", "@end", slice(-2, None), {tokenizer.eos_id}),
    ):
        share = sum(set(one[at].tolist()) == ids for one in long) / max(len(long), 1)
        if share >= DOUBLED:
            values: dict[str, Value] = {"mark": mark, "place": place}
            found.append(Finding("double_marks", "warning", share, ("data.template", "data"), values))
    return found
