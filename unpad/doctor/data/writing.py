"""Texts that a program has changed on their way: escaped, joined, reversed or shuffled words, cells without a value,
marks of another program's format, and texts that repeat themselves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unicodedata import combining, normalize

import numpy as np

from unpad.data.sources.example import Example
from unpad.terminal.finding import Finding, Severity, Value

LEAST, LEAST_CHARACTERS, MOST_CHARACTERS = 20, 1000, 300_000
SOME, MUCH = 0.005, 0.03  # of the characters, that are escapes
ESCAPES: dict[str, re.Pattern[str]] = {
    "@backslashes": re.compile(r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2})"),
    "@percents": re.compile(r"(?:%[0-9A-Fa-f]{2}){2,}|%20"),
    "@base64": re.compile(r"(?<!\S)(?=\S*\d)(?=\S*[a-z])(?=\S*[A-Z])[A-Za-z0-9+/]{40,}={0,2}(?!\S)"),
}
LINE_ENDS, COMMANDS = re.compile(r"\\n"), re.compile(r"\\[a-mo-su-z]{2}")  # formulas have both
WITH_ENDS = 0.3  # of the rows, that have ends of lines written out, where none has a real one
# What programs write into cells without a value, and forums in place of what was removed.
NOTHING = re.compile(
    r"\s*[\[<(\"']?(?:nan|none|null|nil|n/?a|#n/a|#ref!|#value!|undefined|missing|deleted|removed|empty|unknown|nat|"
    r"tbd|todo|lorem ipsum.*|test)[\])>\"']?[.。]?\s*",
    re.IGNORECASE,
)
SOME_CELLS, MANY_CELLS = 0.05, 0.2  # of the texts, or of the replies
TOKENS = re.compile(
    r"<\|[a-z_]+\|>|\[/?INST\]|<</?SYS>>|</?s>|\[(?:CLS|SEP|PAD|UNK|MASK)\]|<(?:pad|unk|eos|bos|start_of_turn|"
    r"end_of_turn)>",
    re.IGNORECASE,
)
SPEAKERS = re.compile(
    r"(?:^\W{0,6}|#{2,}\s*)(human|user|assistant|ai|bot|system|instruction|input|response|output|question|answer|prompt|"
    r"completion|q|a|用户|助手|系统|问|答|问题|回答)\s*[:：]",
    re.IGNORECASE | re.MULTILINE,
)
WORDS = re.compile(r"[^\W_]+(?:/[^\W_]+)?")
MANY_MARKS, MARKED_REPLIES = 0.3, 0.1  # of the rows, and of them those with tokens or own prefixes inside a reply
SHOWN = 30  # characters
LATIN = re.compile(r"[A-Za-z\u00c0-\u024f\u0400-\u04ff]")
MOSTLY = 0.6  # of the characters
LONG_WORD, APART = 18.0, 0.03  # characters of a word, and share of blanks
BEFORE = re.compile(r"(?:^|\s)[.,;!?](?=[^\W\d_])")
AFTER = re.compile(r"[^\W\d_][.,;!?](?:\s|$)")
REVERSED, LEAST_ENDS = 0.8, 30
LEAST_WORDS, MOST_WORDS = 3000, 40_000
RECURRING, NO_ORDER = (
    3,
    0.99,
)  # occurrences of a word, and share of the different pairs of neighbours, that shuffled words have
LISTED, MANY_LISTED = ",;|/、，；", 0.4  # marks of lists, and share of the words that end with one
UNIT = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\s\u3040-\u30ff\u3400-\u9fff]+")  # a word, or such a character
CLAUSE = re.compile(r"(?<=[.!?])\s+|[。！？；\n]")
PLAIN_WORD = re.compile(r"(?<!\S)[^\W\d_]+(?:['’-][^\W\d_]+)*(?=[.!?]?(?:\s|$))")  # lists have a comma behind it
MANY_RUNS, MANY_DIFFERENT = 0.5, 60  # share of the lines with a word, and words with letters that are not
LEAST_RUN, IN_ORDER = 5, 0.9  # words of a line, and share of neighbours that rise, or fall
LETTERS, LONG_SORTED = re.compile(r"[^\W\d_]+"), 5  # letters of a word that are looked at
FORMS, LEAST_LETTERS = 1.5, 15  # words of the same letters, and different letters of a language
BACKWARDS, FINAL = 0.7, ".!?。！？"  # of the lines
REPEATING = 0.3  # of the texts, that say all of it twice
LEAST_PARTS, ANEW = 5, 0.34  # sentences, and share of them that are different; songs have more


def check_writing(rows: dict[str, list[Example]], prefixes: Sequence[str] = ()) -> list[Finding]:
    """Findings on the first rows of every kind.

    Args:
        prefixes: of the roles, as the template of the recipe writes them.
    """
    found = []
    for kind, examples in rows.items():
        fields = (f"data.{kind}",)
        learnt = [(turn.content, row.where) for row in examples for turn in row.turns if _is_learnt(turn.role)]
        if len(learnt) < LEAST:
            continue
        learnt_unasked = [
            pair for pair, asked in zip(learnt, _asked(examples), strict=True) if not _offers(asked, pair[0])
        ]
        asked = [(turn.content, row.where) for row in examples for turn in row.turns if turn.role == "user"]
        found += _nothing(learnt_unasked, fields) or [
            replace(one, severity="fault", values={**one.values, "part": "@asked"})
            for one in _share("no_value", asked, NOTHING.fullmatch, MANY_CELLS, fields)
        ]  # fmt: skip
        found += [*_marks(kind, examples, prefixes, fields)]
        texts, size = list[tuple[str, str]](), 0
        for row in examples:
            texts += [(turn.content, row.where) for turn in row.turns]
            size += sum(len(turn.content) for turn in row.turns)
            if size > MOST_CHARACTERS:
                break
        if size >= LEAST_CHARACTERS:
            others = [(turn.content, row.where) for row in examples for turn in row.turns if not _is_learnt(turn.role)]
            order = _order(learnt, fields) or (_order(others, fields) if others else [])
            found += [*_escaped(texts, size, fields), *order, *_repeating(learnt, fields)]
    return found


def _is_learnt(role: str) -> bool:
    return role in ("text", "assistant")


def _asked(examples: Sequence[Example]) -> list[str]:
    """The text before each learnt message."""
    return [
        "\n".join(turn.content for turn in row.turns[:at])
        for row in examples
        for at, turn in enumerate(row.turns)
        if _is_learnt(turn.role)
    ]


def _offers(asked: str, reply: str) -> bool:
    """True if a question names its reply, such as `none`, as one that may be given."""
    return len(reply) <= SHOWN and reply.strip().casefold().strip(".") in WORDS.findall(asked.casefold())


def _share(
    code: str, texts: Sequence[tuple[str, str]], is_bad: Callable[[str], object], least: float, fields: tuple[str, ...]
) -> list[Finding]:
    """A finding where a share of the texts is bad."""
    bad = [(text, where) for text, where in texts if is_bad(text)]
    if len(bad) < max(least * len(texts), 5):
        return []
    values: dict[str, Value] = {"shown": " ".join(bad[0][0].split())[:40], "where": bad[0][1]}
    return [Finding(code, "warning", len(bad) / len(texts), fields, values)]


def _nothing(texts: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    """Cells without a value. A word such as `unknown` alone may be a class; several different ones beside it are."""
    answers = Counter(text.strip().casefold() for text, _ in texts)
    if len(answers) < 10 and len(texts) >= 10 * len(answers):
        return []
    found = _share("no_value", texts, NOTHING.fullmatch, SOME_CELLS, fields)
    return [replace(one, severity="fault" if one.number >= MANY_CELLS else "warning",
                    values={**one.values, "part": "@learnt"}) for one in found]  # fmt: skip


def _marks(kind: str, examples: Sequence[Example], prefixes: Sequence[str], fields: tuple[str, ...]) -> list[Finding]:
    """Roles and ends as another program writes them, inside of messages or of texts. One name before a colon, such as
    that of an answer at the end of its reasoning, is a part of many texts: a dialogue has two."""
    if kind == "vqa":
        return []
    bad, own = list[tuple[re.Match[str], str]](), list[tuple[re.Match[str], str]]()
    written = "|".join(re.escape(one.strip()) for one in prefixes if len(one.strip()) > 1)
    in_reply = re.compile("|".join(one for one in (written, f"(?i:{TOKENS.pattern})") if one))
    for row in examples:
        replies = (in_reply.search(turn.content) for turn in row.turns if turn.role == "assistant")
        own += [(mark, row.where) for mark in replies if mark][:1]
        text = "\n".join(turn.content for turn in row.turns)
        tokens, speakers = TOKENS.search(text), list(SPEAKERS.finditer(text))
        several = len({one[1].casefold() for one in speakers}) > 1
        first = tokens or (speakers[0] if several else None)
        if first is not None and (kind != "text" or several or len(TOKENS.findall(text)) > 1):
            bad.append((first, row.where))
    if len(bad) < max(MANY_MARKS * len(examples), LEAST):
        bad = own
    if len(bad) < max(MARKED_REPLIES * len(examples), LEAST):
        return []
    found, where = bad[0]
    shown = " ".join(found.string[found.start() : found.start() + 40].split())
    severity: Severity = "note" if kind == "text" else "warning"
    return [Finding("other_marks", severity, len(bad) / len(examples), fields, {"shown": shown, "where": where})]


def _escaped(texts: Sequence[tuple[str, str]], size: int, fields: tuple[str, ...]) -> list[Finding]:
    for kind, pattern in ESCAPES.items():
        share = sum(len(one) for text, _ in texts for one in pattern.findall(text)) / size
        if share >= SOME:
            return [_escape(kind, pattern, share, "warning" if share >= MUCH else "note", texts, fields)]
    having = sum(bool(LINE_ENDS.search(text)) for text, _ in texts)
    if having < WITH_ENDS * len(texts) or any("\n" in text.strip() for text, _ in texts):  # code has both
        return []
    share = sum(len(one) for text, _ in texts for one in LINE_ENDS.findall(text)) / size
    if sum(len(COMMANDS.findall(text)) for text, _ in texts) > having / 2:
        return []
    return [_escape("@backslashes", LINE_ENDS, share, "warning", texts, fields)]


def _escape(
    kind: str,
    pattern: re.Pattern[str],
    share: float,
    severity: Severity,
    texts: Sequence[tuple[str, str]],
    fields: tuple[str, ...],
) -> Finding:
    found, where = next((found, where) for text, where in texts if (found := pattern.search(text)))
    shown = " ".join(found.string[max(found.start() - 4, 0) : found.start() + SHOWN].split())
    return Finding("escaped", severity, share, fields, {"kind": kind, "shown": shown, "where": where})


def _order(texts: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    """Words without blanks, texts from right to left, and words or letters in an order that nobody writes."""
    whole = " ".join(text for text, _ in texts)
    if len(LATIN.findall(whole)) >= MOSTLY * len(whole.replace(" ", "")):
        long = [text for text, _ in texts if len(text) >= 40]
        if len(long) >= LEAST:
            blanks = sum(text.count(" ") for text in long) / sum(map(len, long))
            words = sum(map(len, long)) / sum(len(text.split()) for text in long)
            few_letters = len({letter for letter in whole.casefold() if letter.isalpha()}) < LEAST_LETTERS
            if (
                blanks < APART
                and words > LONG_WORD
                and not few_letters
                and not any("http" in text for text in long[:20])
            ):
                return [_changed("@joined", 1 - blanks, texts, fields)]
        before, after = len(BEFORE.findall(whole)), len(AFTER.findall(whole))
        if before + after >= LEAST_ENDS and before >= REVERSED * (before + after):
            return [_changed("@reversed", before / (before + after), texts, fields)]
    for look in (_sorted, _backwards, _letters_shuffled, _any_order):
        if found := look(texts):
            return [_changed(*found, texts, fields)]
    return []


def _changed(how: str, share: float, texts: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> Finding:
    values: dict[str, Value] = {"how": how, "shown": " ".join(texts[0][0].split())[:40], "where": texts[0][1]}
    return Finding("changed_words", "warning", share, fields, values)


def _lines(texts: Sequence[tuple[str, str]]) -> list[str]:
    """Different lines of texts, up to MOST_CHARACTERS."""
    lines = list(dict.fromkeys(line for text, _ in texts for line in text.splitlines() if line.strip()))
    sizes = np.cumsum([len(line) for line in lines])
    return lines[: int(np.searchsorted(sizes, MOST_CHARACTERS)) + 1]


def _sorted(texts: Sequence[tuple[str, str]]) -> tuple[str, float] | None:
    """Words of a line that rise or fall by the alphabet or their length, as those of no language do; or letters of a
    word that do. Lists with commas may."""
    runs = [own for line in _lines(texts) if len(own := PLAIN_WORD.findall(line)) >= LEAST_RUN]
    if len(runs) < LEAST or sum(map(len, runs)) < MOSTLY * len(" ".join(text for text, _ in texts).split()):
        return None
    if share := _in_one_order(runs, (str, str.casefold, _plain_letters)):
        return "@sorted", share
    if share := _in_one_order(runs, (len,)):
        return "@by_size", share
    letters = [list(word.casefold()) for own in runs for word in own if len(set(word)) >= LONG_SORTED]
    if len(letters) >= 10 * LEAST and (share := _in_one_order(letters, (str,))):
        return "@letters_sorted", share
    return None


def _in_one_order(runs: Sequence[Sequence[str]], keys: Sequence[Callable[[str], Any]]) -> float:
    """The share of neighbours that rise, or that fall, by one of the keys; 0 where fewer do than IN_ORDER."""
    having = Counter(one for own in runs for one in set(own))
    common = (
        {one for one, num in having.items() if num > MANY_RUNS * len(runs)} if len(having) > MANY_DIFFERENT else set()
    )
    neighbours = [pair for own in runs for pair in pairwise(own) if not any(one in common for one in pair)]
    if len(set(neighbours)) < 2 * LEAST:  # one sentence in all lines says nothing
        return 0.0
    for key in keys:
        pairs = [(key(one), key(other)) for one, other in neighbours]
        different = [one < other for one, other in pairs if one != other]
        if len(different) >= 5 * LEAST:
            rising: float = sum(different) / len(different)
            if max(rising, 1 - rising) >= IN_ORDER:
                return max(rising, 1 - rising)
    return 0.0


def _plain_letters(word: str) -> str:
    return "".join(one for one in normalize("NFKD", word.casefold()) if not combining(one))


def _backwards(texts: Sequence[tuple[str, str]]) -> tuple[str, float] | None:
    """Lines of words from the last to the first: the mark and the capital that belong to their ends have changed
    places."""
    lines = [line.split() for line in _lines(texts)]
    lines = [words for words in lines if len(words) >= LEAST_RUN and not words[0].startswith(("http", "#", "*", "-"))]
    # Rows of a table begin with a number and end with a name.
    lines = [words for words in lines if sum(map(str.isalpha, (word.strip(FINAL) for word in words))) > len(words) / 2]
    if len(lines) < LEAST:
        return None
    marked = [(words[0][-1] in FINAL, words[-1][-1] in FINAL) for words in lines]
    capital = [(words[0][:1].isupper(), words[-1][:1].isupper()) for words in lines if not words[-1].isupper()]
    by_mark = float(np.mean([first and not last for first, last in marked]))
    by_capital = sum(last and not first for first, last in capital) / len(lines)
    neither = float(np.mean([last for _, last in marked])) <= 1 - BACKWARDS
    share = max(by_mark, by_capital if neither else 0.0)
    return ("@word_by_word", share) if share >= BACKWARDS else None


def _letters_shuffled(texts: Sequence[tuple[str, str]]) -> tuple[str, float] | None:
    """Long words with the same letters in many orders; in a language hardly any two words are so."""
    words = {word.casefold() for line in _lines(texts) for word in LETTERS.findall(line) if len(word) >= LONG_SORTED}
    letters = {letter for word in words for letter in word}
    alike = {"".join(sorted(word)) for word in words}
    if len(alike) < 2 * LEAST or len(letters) < LEAST_LETTERS or len(words) < FORMS * len(alike):
        return None
    return "@letters_shuffled", len(words) / len(alike)


def _any_order(texts: Sequence[tuple[str, str]]) -> tuple[str, float] | None:
    """Words, or characters of scripts without blanks, in no order: pairs of neighbours recur, and hardly more in a
    text, a line or a sentence than in a shuffled one. Lists may be so."""
    for parts in (
        [text for text, _ in texts],
        _lines(texts),
        [part for text, _ in texts for part in CLAUSE.split(text)],
    ):
        words, size = list[list[str]](), 0
        parts_with = Counter(word for part in parts for word in UNIT.findall(part.casefold()))
        for own in dict.fromkeys(tuple(UNIT.findall(part.casefold())) for part in parts):
            words.append(
                [word for word in own if parts_with[word] >= RECURRING]
            )  # others have one neighbour in any order
            size += len(words[-1])
            if size > MOST_WORDS:
                break
        listed = sum(word[-1] in LISTED for own in words for word in own) / max(size, 1)
        spoken = sum(any(map(str.isalpha, word)) for own in words for word in own) / max(size, 1)
        letters = {letter for own in words for word in own for letter in word if letter.isalpha()}
        if size < LEAST_WORDS or listed >= MANY_LISTED or spoken < MOSTLY or len(letters) < LEAST_LETTERS:
            continue
        draw = np.random.default_rng(0)
        shuffled = [_num_pairs([draw.permutation(own).tolist() for own in words]) for _ in range(3)]
        usual = float(np.mean(shuffled))
        recurring = 1 - usual / max(sum(len(own) - 1 for own in words if own), 1)
        share = _num_pairs(words) / max(usual, 1)
        if share >= NO_ORDER and recurring >= 0.05:
            return "@shuffled", share
    return None


def _num_pairs(lists: Sequence[Sequence[str]]) -> int:
    return len({pair for own in lists for pair in pairwise(own)})


def _repeating(texts: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    """Texts with the first half again as the second, or lines that follow themselves."""

    def repeats(text: str) -> bool:
        parts = [part for part in CLAUSE.split(text) if len(part) >= LEAST_LETTERS]
        if len(parts) >= LEAST_PARTS and len(set(parts)) <= ANEW * len(parts):
            return True
        plain = " ".join(text.split())
        half = (len(plain) + 1) // 2
        return len(plain) >= 20 and plain[:half].strip() == plain[-half:].strip()

    return _share("said_twice", texts, repeats, REPEATING, fields)
