"""Traces of programs in texts: letters that were lost, pieces of another tokenizer, masks, padding, running numbers,
and rows that are beginnings of others."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from unpad.data.sources.example import Example
from unpad.terminal.finding import Finding, Value

LEAST, LEAST_ROWS, MOST_CHARACTERS = 20, 40, 300_000
LOST_LETTER = re.compile(r"(?<![^\s\"'(])[^\W\d_]+\?[^\W\d_?/=]+(?![/=&])|(?<!\S)\?{2,}(?=\s|$)")
PIECE = re.compile(r"[^\W\d_]@@(?=\s|$)|(?<!\S)##[^\W\d_]|[▁Ġ][^\W\d_]")
MASK = re.compile(
    r"<unk>|\[UNK\]|<oov>|\[MASK\]|<mask>|\[REDACTED\]|█{2,}|"
    r"[\[<](?:NAME|PERSON|DATE|LOCATION|ADDRESS|EMAIL|PHONE|NUMBER|NUM|URL|USER|ENTITY)(?:[_ -]?\d+)?[\]>]|"
    r"(?<![\w\\$}])\{\{?\s?[a-z]{3,}(?:[_ .][a-z]+)*\s?\}?\}(?![\w}])|"  # slots of a form that nobody filled in
    r"[\[<](?:your|insert|customer|client|company|product|first|last|user|recipient)[ _][^\]>\n]{2,25}[\]>]",
    re.IGNORECASE,
)
CODE = re.compile(r"\bdef |\bfunction\b|=>|\);|\):|\bf[\"']|\$\{|</\w|\\begin")  # may have slots
MISREAD = re.compile(r"(?<![\w.@/-])[^\W\d_]*[a-zà-ÿ][0158@][a-zà-ÿ][^\W\d_]*(?![\w@/-]|\.\w)")
APART, MARK = re.compile(r"[^\W\d_] [,.](?=\s|$)"), re.compile(r"[^\W\d_] ?[,.](?=\s|$)")
HYPHEN = re.compile(r"[a-zà-ÿ]-\n[a-zà-ÿ]")
PADDING = re.compile(r"(\S{1,12}?)(?:\s?\1){11,}\s*$")
NUMBER = re.compile(r"\W{0,2}(\d{1,9})(?=[\s.:)\],;|])")
MANY_ROWS, MANY_PIECES, MANY_MASKS, MOSTLY_APART = 0.3, 0.05, 0.03, 0.9  # shares of rows, of words, and of marks
DOUBLED = 0.3  # of the words, that are said twice
LEAST_GROWTH = 8  # characters that a row has more than its beginning; near-duplicates have fewer
RISING, LEAST_START = (
    0.97,
    20,
)  # share of the rows with a number larger than the one before, and characters of a start
END = 300  # characters of a row that are searched for padding


def check_residue(rows: dict[str, list[Example]]) -> list[Finding]:
    """Findings on the first rows of every kind, at most one each of a kind of trace."""
    found = []
    for kind, examples in rows.items():
        fields = (f"data.{kind}", f"data.{kind}.field")
        texts, size = list[tuple[str, str]](), 0
        for row in examples:
            texts.append(("\n".join(turn.content for turn in row.turns), row.where))
            size += len(texts[-1][0])
            if size > MOST_CHARACTERS:
                break
        if len(texts) < LEAST:
            continue
        learnt = [(row.turns[-1].content, row.where) for row in examples if row.turns]
        found += [*_lost_letters(texts, fields), *_in_words(texts, fields), *_apart(texts, fields)]
        found += [*_hyphens(texts, fields), *(_padding(learnt, fields) or _doubled(texts, fields))]
        found += [*_numbered(learnt, fields), *_starts(examples, fields)] if kind in ("text", "chat") else []
    return found


def _of_rows(
    code: str, texts: Sequence[tuple[str, str]], search: Callable[[str], re.Match[str] | None], fields: tuple[str, ...]
) -> list[Finding]:
    """A finding where a pattern is in many rows."""
    having = [(match, where) for text, where in texts if (match := search(text))]
    if len(having) < max(MANY_ROWS * len(texts), LEAST / 2):
        return []
    match, where = having[0]
    shown = " ".join(match.string[max(match.start() - 12, 0) : match.start() + 24].split())
    values: dict[str, Value] = {"shown": shown, "where": where}
    return [Finding(code, "warning", len(having) / len(texts), fields, values)]


def _lost_letters(texts: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    """Question marks inside words; a text without other letters than those of ASCII has lost them."""
    whole = "".join(text for text, _ in texts)
    inside, letters = len(LOST_LETTER.findall(whole)), sum(map(str.isalpha, whole))
    others = sum(one.isalpha() and one > "\x7f" for one in whole)
    if inside < max(0.002 * letters, LEAST) or others > inside:
        return []
    return _of_rows("lost_letters", texts, LOST_LETTER.search, fields)


def _in_words(texts: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    """Marks of a tokenizer's pieces, and masks in place of words."""
    words = max(sum(len(text.split()) for text, _ in texts), 1)
    for code, pattern, least in (
        ("word_pieces", PIECE, MANY_PIECES), ("masked_words", MASK, MANY_MASKS), ("misread", MISREAD, MANY_PIECES)
    ):  # fmt: skip
        if code == "masked_words":
            texts = [one for one in texts if not CODE.search(one[0])]
        if sum(len(pattern.findall(text)) for text, _ in texts) >= least * words:
            return _of_rows(code, texts, pattern.search, fields)
    return []


def _apart(texts: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    """Blanks before commas and full stops, which no language has."""
    apart, marks = (sum(len(pattern.findall(text)) for text, _ in texts) for pattern in (APART, MARK))
    if marks < 5 * LEAST or apart < MOSTLY_APART * marks:
        return []
    return _of_rows("marks_apart", texts, APART.search, fields)


def _hyphens(texts: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    lines = sum(text.count("\n") for text, _ in texts)
    if sum(len(HYPHEN.findall(text)) for text, _ in texts) < max(0.05 * lines, LEAST):
        return []
    return _of_rows("hyphens", texts, HYPHEN.search, fields)


def _padding(texts: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    """One sign again and again at the end of rows."""
    return _of_rows("padded_text", texts, lambda text: PADDING.search(text[-END:]), fields)


def _doubled(texts: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    """Every word twice."""
    lists = [words for text, _ in texts if len(words := text.split()) >= 8 and len(set(words)) >= 4]
    pairs = sum(one == other for words in lists for one, other in pairwise(words))
    share = pairs / max(sum(len(words) - 1 for words in lists), 1)
    if len(lists) < LEAST or share < DOUBLED:
        return []
    values: dict[str, Value] = {"how": "@doubled", "shown": " ".join(texts[0][0].split())[:40], "where": texts[0][1]}
    return [Finding("changed_words", "warning", share, fields, values)]


def _numbered(texts: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    """Rows, or their lines, that begin with a number which rises through the whole file; lists begin anew."""
    for parts in (texts, [(line, where) for text, where in texts for line in text.splitlines()]):
        found = [(int(match[1]), text, where) for text, where in parts if (match := NUMBER.match(text))]
        if len(found) < LEAST_ROWS or len(found) < 0.9 * len(parts):
            continue
        numbers = np.array([number for number, _, _ in found])
        share = float((np.diff(numbers) > 0).mean())
        if share >= RISING and len(np.unique(numbers)) >= RISING * len(numbers):
            values: dict[str, Value] = {"shown": " ".join(found[1][1].split())[:40], "where": found[1][2]}
            return [Finding("row_numbers", "warning", share, fields, values)]
    return []


def _starts(examples: Sequence[Example], fields: tuple[str, ...]) -> list[Finding]:
    """Rows that are the beginning of another row, as a text that was saved again and again, or every step of a
    conversation."""
    whole = {"\0".join(turn.content for turn in row.turns): row.where for row in examples}
    ordered = sorted(whole)
    if len(ordered) < LEAST_ROWS:
        return []
    starts = [
        one
        for one, other in pairwise(ordered)
        if len(one) >= LEAST_START and len(other) >= len(one) + LEAST_GROWTH and other.startswith(one)
    ]
    share = len(starts) / len(ordered)
    if share < MANY_ROWS:
        return []
    values: dict[str, Value] = {"shown": " ".join(starts[0].replace("\0", " ").split())[:40], "where": whole[starts[0]]}
    return [Finding("grown_rows", "warning", share, fields, values)]
