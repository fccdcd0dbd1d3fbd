"""Texts that a program has changed on their way: escaped, joined, reversed or shuffled words, cells without a value,
marks of another program's format, and texts that repeat themselves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from unpad.data.sources.example import Example
from unpad.doctor.finding import Finding, Severity, Value

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
MARKS = re.compile(
    r"<\|[a-z_]+\|>|\[/?INST\]|<</?SYS>>|</?s>|\[(?:CLS|SEP|PAD|UNK|MASK)\]|<(?:pad|unk|eos|bos|start_of_turn|"
    r"end_of_turn)>|^\W{0,3}(?:human|user|assistant|system|instruction|response|question|answer|q|a|用户|助手|问|答)\s*[:：]",
    re.IGNORECASE | re.MULTILINE,
)
MANY_MARKS = 0.3  # of the rows
SHOWN = 30  # characters
LATIN = re.compile(r"[A-Za-z\u00c0-\u024f\u0400-\u04ff]")
MOSTLY = 0.6  # of the characters
LONG_WORD, APART = 18.0, 0.03  # characters of a word, and share of blanks
BEFORE = re.compile(r"(?:^|\s)[.,;!?](?=[^\W\d_])")
AFTER = re.compile(r"[^\W\d_][.,;!?](?:\s|$)")
REVERSED, LEAST_ENDS = 0.8, 30
LEAST_WORDS, MOST_WORDS = 3000, 40_000
NO_ORDER = 0.99  # of the different pairs of neighbours, that shuffled words have
REPEATING = 0.3  # of the texts, that say all of it twice


def check_writing(rows: dict[str, list[Example]]) -> list[Finding]:
    """Findings on the first rows of every kind."""
    found = []
    for kind, examples in rows.items():
        fields = (f"data.{kind}",)
        learnt = [(turn.content, row.where) for row in examples for turn in row.turns if _is_learnt(turn.role)]
        if len(learnt) < LEAST:
            continue
        found += [*_nothing(learnt, fields), *_marks(kind, examples, fields)]
        texts, size = list[tuple[str, str]](), 0
        for row in examples:
            texts += [(turn.content, row.where) for turn in row.turns]
            size += sum(len(turn.content) for turn in row.turns)
            if size > MOST_CHARACTERS:
                break
        if size >= LEAST_CHARACTERS:
            found += [*_escaped(texts, size, fields), *_order(texts, fields), *_repeating(learnt, fields)]
    return found


def _is_learnt(role: str) -> bool:
    return role in ("text", "assistant")


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
    return [Finding("no_value", "fault", one.number, one.fields, one.values) if one.number >= MANY_CELLS else one
            for one in found]  # fmt: skip


def _marks(kind: str, examples: Sequence[Example], fields: tuple[str, ...]) -> list[Finding]:
    """Roles and ends as another program writes them, inside of messages or of texts."""
    if kind == "vqa":
        return []
    texts = [("\n".join(turn.content for turn in row.turns), row.where) for row in examples]
    several = 1 if kind != "text" else 2  # a text may begin with a word and a colon
    bad = [(text, where) for text, where in texts if len(MARKS.findall(text)) >= several]
    if len(bad) < max(MANY_MARKS * len(texts), LEAST):
        return []
    found = MARKS.search(bad[0][0])
    assert found is not None, "counted before"
    shown = " ".join(bad[0][0][found.start() : found.start() + 40].split())
    severity: Severity = "note" if kind == "text" else "warning"
    return [Finding("other_marks", severity, len(bad) / len(texts), fields, {"shown": shown, "where": bad[0][1]})]


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
    """Words without blanks, texts from right to left, and words in any order, of scripts with blanks."""
    whole = " ".join(text for text, _ in texts)
    if len(LATIN.findall(whole)) < MOSTLY * len(whole.replace(" ", "")):
        return []
    long = [text for text, _ in texts if len(text) >= 40]
    if len(long) >= LEAST:
        blanks = sum(text.count(" ") for text in long) / sum(map(len, long))
        words = sum(map(len, long)) / sum(len(text.split()) for text in long)
        if blanks < APART and words > LONG_WORD and not any("http" in text for text in long[:20]):
            return [_changed("@joined", 1 - blanks, texts, fields)]
    before, after = len(BEFORE.findall(whole)), len(AFTER.findall(whole))
    if before + after >= LEAST_ENDS and before >= REVERSED * (before + after):
        return [_changed("@reversed", before / (before + after), texts, fields)]
    return _any_order([text.casefold().split() for text, _ in texts], texts, fields)


def _changed(how: str, share: float, texts: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> Finding:
    values: dict[str, Value] = {"how": how, "shown": " ".join(texts[0][0].split())[:40], "where": texts[0][1]}
    return Finding("changed_words", "warning", share, fields, values)


def _any_order(words: Sequence[list[str]], texts: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    """Pairs of neighbours recur in a text, and hardly more in a shuffled one than chance has it."""
    if sum(map(len, words)) < LEAST_WORDS:
        return []
    taken, size = list[list[str]](), 0
    for own in words:
        taken.append(own)
        size += len(own)
        if size > MOST_WORDS:
            break
    taken = list(map(list, dict.fromkeys(map(tuple, taken))))
    draw = np.random.default_rng(0)

    def pairs(lists: Sequence[Sequence[str]]) -> int:
        return len({pair for own in lists for pair in pairwise(own)})

    shuffled = float(np.mean([pairs([draw.permutation(own).tolist() for own in taken]) for _ in range(3)]))
    share = pairs(taken) / max(shuffled, 1)
    recurring = 1 - shuffled / max(sum(len(own) - 1 for own in taken if own), 1)
    return [_changed("@shuffled", share, texts, fields)] if share >= NO_ORDER and recurring >= 0.05 else []


def _repeating(texts: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    """Texts of which the second half is the first again, or lines that follow themselves."""

    def repeats(text: str) -> bool:
        plain = " ".join(text.split())
        half = (len(plain) + 1) // 2
        return len(plain) >= 20 and plain[:half].strip() == plain[-half:].strip()

    return _share("said_twice", texts, repeats, REPEATING, fields)
