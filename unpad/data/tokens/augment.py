"""Chinese text augmentation: synonyms, deletion, function words and clause order, seeded by the example itself.

A copy depends on the seed, the example's content and the number of the copy alone, so neither order nor the number of
processes changes it. In conversations only users' turns are changed; replies stay exact. Role markers and special
tokens in a text keep their places; the text between them is changed stretch by stretch.
"""

import hashlib
import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from unpad.data.sources.example import Example, Turn
from unpad.data.sources.files import refuse_special, unreadable
from unpad.data.tokens.words import HAN, segment
from unpad.errors import SourceError
from unpad.recipes.data import AugmentSettings
from unpad.terminal.table import number_of

PACKAGED_SYNONYMS = Path(__file__).with_name("synonyms.txt")
MAX_SPAN = 4  # most segments of a dictionary word that is still found

# Markers that stay as they are in a text: special tokens such as <|eos|>, and the words before a speaker's turn.
_MARKER = re.compile(
    r"(<\|[^<>|\s]{1,40}\|>|</?s>|\[(?:PAD|UNK|CLS|SEP|MASK)\]"
    r"|(?:用户|助手|系统|问|答)[：:]|\b(?:User|Assistant|System|Human)[：:])"
)
_CLAUSE_END = re.compile(r"([，。；！？\n]+[”’」』）》]*)")


Synonyms = Mapping[str, Sequence[str]]


def copies_of(examples: Sequence[Example], settings: AugmentSettings, synonyms: Synonyms, seed: int) -> list[Example]:
    """Return `multiplier` rounds of changed copies.

    Args:
        examples: training examples only; held-out examples are never augmented.
    """
    copies = range(1, settings.multiplier + 1)
    return [augment(example, settings, synonyms, seed, copy) for copy in copies for example in examples]


def augment(example: Example, settings: AugmentSettings, synonyms: Synonyms, seed: int, copy: int) -> Example:
    """Return changed copy number `copy` (from 1) of an example, named `where#copy`.

    Roles, assistant and system turns, keywords, group and split stay the same; no turn becomes empty.
    """
    content = [[turn.role, turn.content] for turn in example.turns]
    key = json.dumps([seed, copy, content], ensure_ascii=True).encode()
    draws = random.Random(int.from_bytes(hashlib.sha256(key).digest(), "big"))

    def change(turn: Turn) -> Turn:
        if turn.role not in ("text", "user"):
            return turn
        return replace(turn, content=_change_text(turn.content, settings, synonyms, draws))

    return replace(example, where=f"{example.where}#{copy}", turns=tuple(map(change, example.turns)))


def load_synonyms(path: Path | None) -> dict[str, tuple[str, ...]]:
    """Read the packaged synonym groups and the user's; a word of the user's file has only the synonyms given there.

    A file has one group of at least two words per line, separated by spaces; empty lines and lines that start with #
    are skipped.

    Raises:
        SourceError: the file cannot be read, or has lines without a group; the error names each of them.
    """
    return _read_groups(PACKAGED_SYNONYMS) | (_read_groups(path) if path is not None else {})


def _read_groups(path: Path) -> dict[str, tuple[str, ...]]:
    refuse_special(path, f"augment.synonyms_file: {path}")
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        raise unreadable(error, f"augment.synonyms_file: {path}") from None
    others: dict[str, dict[str, None]] = {}  # a dict keeps the order of the file
    bad: list[tuple[int, str]] = []
    for number, line in enumerate(lines, start=1):
        try:
            group = line.decode().split()
        except UnicodeDecodeError:
            bad.append((number, "not UTF-8"))
            continue
        if not group or group[0].startswith("#"):
            continue
        fault = _group_fault(group)
        if fault:
            bad.append((number, fault))
            continue
        for word in group:
            others.setdefault(word, {}).update(dict.fromkeys(other for other in group if other != word))
    if bad:
        shown = "; ".join(f"{path}:{number}: {fault}" for number, fault in bad[:20]) + "; ..." * (len(bad) > 20)
        what = f"{number_of(len(bad), 'lines')} without a group of synonyms"
        raise SourceError(what, where=shown, fix="write two or more words per line with spaces between")
    return {word: tuple(known) for word, known in others.items()}


def _group_fault(group: list[str]) -> str:
    if len(set(group)) < 2:
        return "fewer than two different words"
    wrong = next(
        (word for word in group if not any(map(str.isalpha, word)) or re.search(r"[,，、；;=：:\x00]", word)), ""
    )
    return f"{wrong!r} is not one word" if wrong else ""


# --------------------------------------------------------------------------- one text


def _change_text(text: str, settings: AugmentSettings, synonyms: Synonyms, draws: random.Random) -> str:
    """Change the stretches between markers: clause order, then synonyms, deletion and insertion word by word."""
    units: list[str] = []
    fixed: list[bool] = []
    for position, stretch in enumerate(_MARKER.split(text)):
        if position % 2:  # a marker
            units.append(stretch)
            fixed.append(True)
        elif stretch:
            if draws.random() < settings.reorder:
                stretch = _reorder(stretch, draws)
            for word in _join_known(segment(stretch), synonyms):
                is_replaced = word in synonyms and draws.random() < settings.synonyms
                units.append(_pick(synonyms[word], draws) if is_replaced else word)
                fixed.append(False)
    survivors = _survivors(units, fixed, settings.delete, draws)
    return "".join(_insert(survivors, settings.insert_words, settings.insert, draws))


def _reorder(text: str, draws: random.Random) -> str:
    """Shuffle the clauses; the punctuation at their ends stays in place."""
    parts = _CLAUSE_END.split(text)
    places = [place for place in range(0, len(parts), 2) if parts[place].strip()]
    if len(places) < 2:
        return text
    order = places
    while order == places:
        order = sorted(places, key=lambda _: draws.random())
    moved = list(parts)
    for place, source in zip(places, order, strict=True):
        moved[place] = parts[source]
    return "".join(moved)


def _join_known(segments: Sequence[str], synonyms: Synonyms) -> list[str]:
    """Join neighbouring segments that together are a word of the dictionary, the longest first."""
    units, position = [], 0
    while position < len(segments):
        for span in range(min(MAX_SPAN, len(segments) - position), 0, -1):
            unit = "".join(segments[position : position + span])
            if span == 1 or unit in synonyms:
                break
        units.append(unit)
        position += span
    return units


def _survivors(
    units: Sequence[str], fixed: Sequence[bool], rate: float, draws: random.Random
) -> list[tuple[str, bool]]:
    """Drop words at `rate`, never the last one; return (unit, whether a function word may follow).

    Punctuation, spaces, numbers and markers do not count as words.
    """
    is_word = [not marker and any(map(str.isalpha, unit)) for unit, marker in zip(units, fixed, strict=True)]
    heights = [draws.random() if word else 1.0 for word in is_word]
    highest = max((height for height, word in zip(heights, is_word, strict=True) if word), default=1.0)
    limit = min(rate, highest)
    return [
        (unit, word and HAN.search(unit) is not None)
        for unit, word, height in zip(units, is_word, heights, strict=True)
        if height >= limit
    ]


def _insert(
    units: Iterable[tuple[str, bool]], function_words: Sequence[str], rate: float, draws: random.Random
) -> Iterable[str]:
    """Yield the units, at `rate` with a function word after a Chinese word."""
    for unit, open_after in units:
        yield unit
        if open_after and function_words and draws.random() < rate:
            yield _pick(function_words, draws)


def _pick(choices: Sequence[str], draws: random.Random) -> str:
    return choices[int(draws.random() * len(choices))]
