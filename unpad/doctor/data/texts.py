"""Characters of texts and conversations: a wrong encoding, markup, unseen marks, and rows that are no text."""

from __future__ import annotations

import json
import lzma
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import islice

import numpy as np

from unpad.data.sources.example import Example
from unpad.data.sources.rows import TEXT_KINDS, read_rows
from unpad.data.text import TextData
from unpad.data.tokens.corpus_files import list_files
from unpad.doctor.subject import Subject
from unpad.terminal.finding import Finding, Severity, Value

MOST_READ = 2000  # rows of a kind of data
LEAST_CHARACTERS, MOST_CHARACTERS = 200, 400_000
# Encodings in which programs read UTF-8 by mistake.
MISTAKEN = ("cp1252", "latin-1", "gb18030", "big5", "shift_jis", "euc_kr", "cp1251", "cp437", "mac_roman", "koi8_r")
FITS, SOUND = 0.9, 0.8  # shares of other characters that the encoding has, and of its bytes that are UTF-8
OTHERS = re.compile("[\u0080-\uffff]")
LEAST_OTHERS = 4  # characters beyond ASCII of a row that is judged
GARBLED, LEAST_ROWS = 0.2, 5  # of the rows that are judged
RUN = re.compile("[\u0080-\u00ff]{4,}")  # Latin letters with accents stand alone or in pairs
IN_RUNS, REPLACED = 0.05, 0.002  # shares of the characters
TAGS = (
    "p|br|div|span|a|td|tr|th|table|tbody|li|ul|ol|b|i|u|em|strong|h[1-6]|img|html|body|head|script|style|font|sup|sub"
)
MARKUP = re.compile(rf"</?(?:{TAGS})(?:\s[^<>]*)?/?>|&(?:[a-z]{{2,8}}|#\d{{2,6}}|#x[0-9a-f]{{2,6}});", re.IGNORECASE)
FENCED = re.compile(r"```.*?```", re.DOTALL)
# Markup of other programs, which is no code to be learnt.
MARKUPS = {
    "@html": MARKUP,
    "@wiki": re.compile(
        r"\[\[[^\W\d_][^\[\]\n]{0,80}\]\]|\{\{[^\W\d_][^{}\n]{0,120}\}\}|^={2,4}[^=\n]+={2,4}$", re.MULTILINE
    ),
    "@subtitles": re.compile(r"(?:\d+\n)?\d\d:\d\d:\d\d[.,]\d{3} --> \d\d:\d\d:\d\d[.,]\d{3}"),
}
SOME_MARKUP, MUCH_MARKUP, MARKED_ROWS = 0.02, 0.08, 0.9  # shares of the characters, and of the rows
UNSEEN, MANY_UNSEEN, UNSEEN_ROWS = 0.001, 0.005, 0.5  # shares of the characters, and of the rows
DECOMPOSED = 0.002  # of the characters, that are an accent behind its letter
# The joiners are part of writing in Persian and of signs, marks of direction of Arabic and Hebrew.
USUAL_CONTROLS = "\t\n\r\f\u200c\u200d\u200e\u200f"
NO_TEXT = 0.5  # of the rows
IN_JSON = 0.4  # of the characters of a row that is JSON
DIGITS, SPACES = 0.7, 0.4  # of the characters of a row
LEAST_ORDERED, MOST_ORDERED = 3000, 60_000  # characters
NO_ORDER, FEW_LETTERS = 0.95, 22  # letters of genes or proteins, which are packed no smaller
CUT_ALIKE, LEAST_CUT, LEAST_LONG = 0.25, 20, 20  # share of the rows, rows, and characters of a row
MARKS = ",.;:!?，。；：！？、…\"'”’)]}）》」』`"
FINAL, OF_WORDS, INSIDE = 0.15, 0.3, 0.3  # shares of cut rows that end with a mark, at most, and have one inside
BEGUN, BEGUN_MARK = 0.3, 0.03  # shares of cut rows that begin inside a sentence, or with a mark, as pieces of one text
SHOWN = 30
ENDED = re.compile(r"[.!?。！？…][\"'”’)\]）】」』]*(?=\s|$)|[。！？]")  # ends of sentences
SHORT_LINE, OF_ONE_WIDTH, GOES_ON = 160, 0.5, 0.4  # characters, and shares of the rows
UP_TO, INSIDE_ROWS = 0.75, 0.6  # of the width, and share of the sentences that end inside a row


def originals(subject: Subject[TextData]) -> dict[str, list[Example]]:
    """The first rows of every kind of texts, conversations or pairs that a stage learns, as files have them."""
    recipe, found = subject.setup.recipe, dict[str, list[Example]]()
    learning = [stage for stage in subject.setup.stages if stage.recipe.train.max_epochs != 0]
    kinds = {kind for stage in learning for kind in stage.kinds}
    for file in list_files(recipe, TEXT_KINDS):
        if file.kind in kinds:
            rows = (row for row in read_rows(file.kind, file.file, recipe.data) if isinstance(row, Example))
            found.setdefault(file.kind, []).extend(islice(rows, MOST_READ))
    return found


def check_texts(rows: dict[str, list[Example]]) -> list[Finding]:
    """Findings on the characters of some rows of every kind."""
    found = []
    for kind, examples in rows.items():
        texts, size = list[tuple[str, str]](), 0
        for row in examples:
            texts.append(("\n".join(turn.content for turn in row.turns), row.where))
            size += len(texts[-1][0])
            if size > MOST_CHARACTERS:
                break
        whole, fields = "\n".join(text for text, _ in texts), (f"data.{kind}",)
        if len(whole) >= LEAST_CHARACTERS:
            found += [*_encoding(whole, texts, fields), *_markup(whole, texts, fields)]
            found += [*_unseen(whole, texts, fields), *(_no_text(texts, fields) or _no_order(texts, fields))]
            found += _wrapped(examples, fields) if kind == "text" else []
            found += _cut_alike(examples, fields)
    return found


def mistaken_encoding(text: str) -> tuple[str, float]:
    """The encoding in which UTF-8 was read to give a text, and the share of its bytes that say so; "" for sound text.

    Bytes of UTF-8 that another encoding has made into characters are UTF-8 again in that encoding. Sound text is not:
    its bytes in an older encoding do not follow the rule of leading and continuing bytes.
    """
    best = ("", 0.0)
    others = _num_others(text)
    for name in MISTAKEN:
        raw = bytes(byte for byte in text.encode(name, errors="ignore"))
        kept = sum(character > "\x7f" for character in raw.decode(name, errors="ignore"))
        if kept < FITS * others:
            continue
        high = sum(byte > 0x7F for byte in raw)
        read = raw.decode("utf-8", errors="ignore")
        sound = sum(len(character.encode()) for character in read if character > "\x7f") / max(high, 1)
        if sound > max(SOUND, best[1]):
            best = (name, sound)
    return best


def _encoding(whole: str, texts: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    judged = [(mistaken_encoding(text), text, where) for text, where in texts if _num_others(text) >= LEAST_OTHERS]
    garbled = [(name, text, where) for (name, _), text, where in judged if name]
    if len(garbled) >= max(GARBLED * len(judged), LEAST_ROWS):
        name = Counter(name for name, _, _ in garbled).most_common(1)[0][0]
        _, text, where = garbled[0]
        found = OTHERS.search(text)
        assert found is not None, "garbled by such characters"
        values: dict[str, Value] = {"encoding": name, "shown": _around(found), "where": where}
        return [Finding("read_as", "fault", len(garbled) / len(judged), fields, values)]
    replaced, in_runs = whole.count("\ufffd") / len(whole), sum(map(len, RUN.findall(whole))) / len(whole)
    if in_runs >= IN_RUNS:
        code, share, pattern = "bytes_as_letters", in_runs, RUN
    elif replaced >= REPLACED:
        code, share, pattern = "replaced", replaced, re.compile("\ufffd")
    else:
        return []
    shown, where = next((_around(found), where) for text, where in texts if (found := pattern.search(text)))
    values = {"shown": shown, "where": where}
    return [Finding(code, "warning" if code == "replaced" else "fault", share, fields, values)]


def _num_others(text: str) -> int:
    return sum(character > "\x7f" for character in text)


def _around(found: re.Match[str]) -> str:
    start = max(found.start() - 5, 0)
    return " ".join(found.string[start : start + SHOWN].split())


def _markup(whole: str, texts: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    plain = FENCED.sub("", whole)  # code between fences is to be written
    for kind, pattern in MARKUPS.items():
        tags = [tag.group() for tag in pattern.finditer(plain)]
        share = sum(map(len, tags)) / len(whole)
        if share >= SOME_MARKUP:
            having = sum(bool(pattern.search(FENCED.sub("", text))) for text, _ in texts)
            many = share >= MUCH_MARKUP or having >= MARKED_ROWS * len(texts)
            severity: Severity = "warning" if many else "note"
            shown = " ".join(tags[len(tags) // 2].split())[:SHOWN]
            return [Finding("markup", severity, share, fields, {"kind": kind, "shown": shown})]
    return []


def _unseen(whole: str, texts: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    """Control characters and marks without width, and accents apart from their letters."""
    composed = 1 - len(unicodedata.normalize("NFC", whole)) / len(whole)
    if composed >= DECOMPOSED:
        shown = next(text[max(at - 8, 0) : at + 8] for text, _ in texts for at, one in enumerate(text)
                     if unicodedata.combining(one) or "\u1160" <= one <= "\u11ff")  # fmt: skip
        return [Finding("decomposed", "warning", composed, fields, {"shown": " ".join(shown.split())})]
    known = {character: whole.count(character) for character in set(whole) if _is_unseen(character)}
    share = sum(known.values()) / len(whole)
    if share < UNSEEN:
        return []
    common = max(known, key=lambda one: known[one])
    values: dict[str, Value] = {"shown": f"U+{ord(common):04X}"}
    rows = sum(common in text for text, _ in texts) / len(texts)
    many = share >= MANY_UNSEEN or rows >= UNSEEN_ROWS
    return [Finding("unseen", "warning" if many else "note", share, fields, values)]


def _is_unseen(character: str) -> bool:
    return character not in USUAL_CONTROLS and unicodedata.category(character) in ("Cc", "Cf", "Co", "Cs")


def _no_text(texts: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    """Rows of digits, JSON that was read as text, and words with letters that stand apart."""
    for why, is_bad in (
        ("@digits", _is_digits),
        ("@json", _is_json),
        ("@literal", _is_literal),
        ("@apart", _stands_apart),
    ):
        bad = [(text, where) for text, where in texts if is_bad(text.strip())]
        if len(bad) >= max(NO_TEXT * len(texts), 2):
            values: dict[str, Value] = {"why": why, "where": bad[0][1], "shown": " ".join(bad[0][0].split())[:SHOWN]}
            return [Finding("no_text", "warning", len(bad) / len(texts), fields, values)]
    return []


def _no_order(texts: Sequence[tuple[str, str]], fields: tuple[str, ...]) -> list[Finding]:
    """Characters in an order that says nothing: text in which it does is packed smaller than the same ones shuffled."""
    whole = "".join(text for text, _ in texts)[:MOST_ORDERED]
    if len(whole) < LEAST_ORDERED:
        return []
    shuffled = "".join(np.random.default_rng(0).permutation(list(whole)))
    packed, other = (len(lzma.compress(one.encode("utf-16-le"))) for one in (whole, shuffled))
    if packed < NO_ORDER * other:
        return []
    values: dict[str, Value] = {"shown": " ".join(texts[0][0].split())[:SHOWN], "where": texts[0][1]}
    few = len({one for one in whole.casefold() if one.isalpha()}) <= FEW_LETTERS and whole.count(" ") < len(whole) / 50
    return [Finding("no_order", "note" if few else "warning", packed / other, fields, values)]


def _cut_alike(examples: Sequence[Example], fields: tuple[str, ...]) -> list[Finding]:
    """Texts or replies that often have just the largest length there is, in characters or bytes, and no end.

    Rows that also begin inside a sentence are pieces of longer texts, where nothing is lost.
    """
    ends = [(row.turns[-1].content, row.where) for row in examples if row.turns and row.turns[-1].content.strip()]
    inside_words = {word for text, _ in ends for word in text.split()[:-1]}  # a form ends with what is nowhere else
    for unit, sizes in (
        ("@characters", [len(text) for text, _ in ends]),
        ("@bytes", [len(text.encode()) for text, _ in ends]),
        ("@of_words", [len(text.split()) for text, _ in ends]),
    ):
        most = max(sizes, default=0)
        cut = [one for one, size in zip(ends, sizes, strict=True) if size == most]
        if unit == "@of_words":
            last = Counter(text.split()[-1] for text, _ in cut)
            cut = [one for one in cut if (word := one[0].split()[-1]) in inside_words and last[word] <= len(cut) / 4]
        if most < LEAST_LONG or len(cut) < max(CUT_ALIKE * len(ends), LEAST_CUT):
            continue
        final, inside, begun, marks = (
            sum(map(is_so, (text for text, _ in cut))) / len(cut)
            for is_so in (
                lambda text: text[-1] in MARKS,
                lambda text: any(one in MARKS for one in text[1:-1]),
                lambda text: text[0].islower() or text[0].isspace(),
                lambda text: text[0] in MARKS,
            )
        )
        if (
            final <= (OF_WORDS if unit == "@of_words" else FINAL)
            and inside >= INSIDE
            and begun <= BEGUN
            and marks <= BEGUN_MARK
        ):
            text, where = cut[0]
            values: dict[str, Value] = {"most": most, "unit": unit, "shown": " ".join(text[-SHOWN:].split())}
            return [Finding("cut_alike", "warning", len(cut) / len(ends), fields, {**values, "where": where})]
    return []


def _wrapped(examples: Sequence[Example], fields: tuple[str, ...]) -> list[Finding]:
    """Rows that are lines of a text with a break at one width: sentences go on in the next row, and end inside rows.

    Verses end sentences at the end of lines, and lists have none.
    """
    rows = [(row.turns[-1].content.strip(), row.where) for row in examples if row.turns]
    rows = [row for row in rows if row[0]]
    lengths = np.array([len(text) for text, _ in rows])
    if len(rows) < 2 * LEAST_LONG or not LEAST_LONG <= np.median(lengths) <= SHORT_LINE:
        return []
    width = float(np.quantile(lengths, 0.95))
    at_width = float(((lengths >= UP_TO * width) & (lengths <= 1.05 * width)).mean())
    ends = [[one.end() for one in ENDED.finditer(text)] for text, _ in rows]
    inside = sum(end < len(text) for (text, _), own in zip(rows, ends, strict=True) for end in own)
    closing = sum(end == len(text) for (text, _), own in zip(rows, ends, strict=True) for end in own)
    cut = [not own or own[-1] < len(text) for (text, _), own in zip(rows, ends, strict=True)]
    cased = [text[0].isalpha() and text[0] == text[0].lower() for text, _ in rows[1:]]
    going = [at for at, (one, low) in enumerate(zip(cut, cased, strict=False)) if one and low]
    one_size = float((lengths == lengths.max()).mean())  # pieces of a text that was cut anew, at one length
    few_ends = inside + closing < len(rows) / 8
    if at_width < OF_ONE_WIDTH or one_size >= OF_ONE_WIDTH or few_ends or inside < INSIDE_ROWS * (inside + closing):
        return []
    if len(going) < GOES_ON * len(rows):
        return []
    text, where = rows[going[0]]
    values: dict[str, Value] = {"width": width, "shown": text[-SHOWN:], "next": rows[going[0] + 1][0][:SHOWN]}
    values["where"] = where
    return [Finding("wrapped_lines", "warning", len(going) / len(rows), ("data.separator", *fields), values)]


def _is_digits(text: str) -> bool:
    if any(one in "=<>≈" for one in text):  # an equation says something
        return False
    return sum(one.isdecimal() for one in text) >= DIGITS * sum(not one.isspace() for one in text)


def _is_json(text: str) -> bool:
    if not text.startswith("{"):
        return False
    try:
        row = json.loads(text.splitlines()[0])
    except ValueError:
        return False
    longest = max((len(one) for one in row.values() if isinstance(one, str)), default=0)
    return longest >= IN_JSON * len(text)  # a row with its text; other objects may be what is to be written


def _is_literal(text: str) -> bool:
    """A list, mapping or bytes of texts as Python prints them."""
    ends = (("['", "']"), ('["', '"]'), ("{'", "}"), ("b'", "'"), ('b"', '"'), ("('", ")"))
    return any(text.startswith(begin) and text.endswith(end) for begin, end in ends)


def _stands_apart(text: str) -> bool:
    return text.count(" ") >= SPACES * len(text) and len(text) >= SHOWN
