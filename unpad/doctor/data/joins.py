"""Columns that were joined to the wrong rows: replies, or pictures, that fit another row better than their own.

Three measures, none of which needs a model. Words that one reply alone has say which question it belongs to. What a
question and its reply share is counted at every distance between their rows, and in parts of the file, as a column may
slip from some row on. Where they share nothing, like questions still have like replies, and like pictures like answers.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from zlib import crc32

import numpy as np

from unpad.data.pictures.alike import small_copies
from unpad.data.sources.example import Example
from unpad.data.sources.vqa import VqaExample
from unpad.data.vqa import VqaData
from unpad.terminal.finding import Finding, Value

MOST_ROWS, LEAST_ROWS = 1000, 40
MOST_LETTERS = 1200  # of a question or reply
FURTHEST, PARTS = 12, (1, 2, 4)  # rows by which a column may slip, and parts in which it is looked for
SURELY, CLEARLY = 5.0, 6.0  # standard errors of the difference to the own row, and deviations of other distances
NOT_OWN = 0.6  # of what the other row's fit, that the own row's may have
FEATURES = 2048  # places of hashed words
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_]+")
EASTERN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
MOST_QUESTIONS = 0.03  # share of the questions with a word, beyond which it names none of them
VOTES = 2  # words that point to one reply
ELSEWHERE, TO_OWN = 0.12, 0.3  # of the questions, and of those with words that point to their own reply
NEAREST, LIKE, RARE_REPLY = 6, 0.2, 0.03  # questions that are compared, their cosine, and share of a reply
UNLIKE_OTHERS = 0.08  # of the rows, with a reply that is none of those of similar questions
BY_ONE, ONE_EACH = 0.3, 0.9  # of the questions, where one word is enough, if each points to a reply of its own
SHORT = 25  # words of a question or reply, on average
LEAST_NAMED, LEAST_OF_COLOUR, NEAR_HUE = 40, 6, 25.0  # rows with a colour, and degrees of its hue
FITS_NOT, COULD_FIT = 1.5, 8.0  # standard errors of the own order, and of the best one
# Names of colours with a hue, and its degrees.
COLOURS = {
    word: hue
    for hue, words in (
        (0, "red rot rouge rojo rosso vermelho красный 红 赤"),
        (55, "yellow gelb jaune amarillo giallo amarelo жёлтый желтый 黄"),
        (130, "green grün vert verde зелёный зеленый 绿 緑"),
        (230, "blue blau bleu azul blu синий 蓝 青"),
    )
    for word in words.split()
}
CHAIN = 0.1  # of the replies that are the next question, as in a talk that was cut into its lines


@dataclass(frozen=True)
class _Slip:
    """A distance at which two columns fit better than in their own rows.

    Args:
        start, stop: rows of the part; distance: row of the one that fits, less the own row; errors: of the difference.
    """

    start: int
    stop: int
    distance: int
    errors: float


def check_joins(rows: dict[str, list[Example]]) -> list[Finding]:
    """Findings on replies of other rows."""
    found = [one for kind in ("chat", "pairs") for one in _talks(rows.get(kind, []), f"data.{kind}")]
    if any(one.code == "slipped" for one in found):
        return found
    other = [replace(row, turns=(*row.turns[:-1], row.rejected)) for row in rows.get("pairs", []) if row.rejected]
    return [*found, *(one for one in _talks(other, "data.pairs") if one.code == "slipped")]


def _talks(examples: Sequence[Example], field: str) -> list[Finding]:
    pairs = [(*pair, row.where) for row in examples[:MOST_ROWS] if (pair := _question_and_reply(row)) is not None]
    if len(pairs) < LEAST_ROWS:
        return []
    asked, replied, where = ([pair[i] for pair in pairs] for i in range(3))
    if np.mean([one == other for one, other in zip(replied, asked[1:], strict=False)]) >= CHAIN:
        return []
    asked_words, replied_words = [words_of(text) for text in asked], [words_of(text) for text in replied]
    slip = _slip(shared_words(asked_words, replied_words)) or _slip(_alike(_bags(asked_words), _bags(replied_words)))
    if slip is not None:
        return [_slipped("slipped", slip, where, field)]
    return _elsewhere(asked, replied, asked_words, replied_words, where, field)


def _question_and_reply(row: Example) -> tuple[str, str] | None:
    """The last message of a user and the reply to it."""
    last = len(row.turns) - 1
    if last < 1 or row.turns[last].role != "assistant" or row.turns[last - 1].role != "user":
        return None
    return row.turns[last - 1].content[:MOST_LETTERS], row.turns[last].content[:MOST_LETTERS]


def words_of(text: str) -> list[str]:
    """Words, and of scripts without blanks pairs of characters, in their order."""
    parts = [part.casefold() for part in WORD.findall(text)]
    return [
        part + after if EASTERN.match(part) and EASTERN.match(after) else part
        for part, after in zip(parts, [*parts[1:], ""], strict=False)
    ]


def _slipped(code: str, slip: _Slip, where: Sequence[str], field: str) -> Finding:
    whole = slip.stop - slip.start == len(where)
    values: dict[str, Value] = {
        "distance": abs(slip.distance),
        "way": "@after" if slip.distance > 0 else "@before",
        "first": where[slip.start],
        "last": where[slip.stop - 1],
    }
    return Finding(code, "fault" if whole else "warning", slip.errors, (field,), values)


# --------------------------------------------------------------------------- fit of rows at a distance


def _bags(words: Sequence[list[str]]) -> np.ndarray:
    """Rarer words count more; rows of length 1, centred, (num_rows, FEATURES) float32."""
    bags = np.zeros((len(words), FEATURES), np.float32)
    for row, own in enumerate(words):
        bags[row, [crc32(word.encode()) % FEATURES for word in set(own)]] = 1
    return _centred(bags * _rarity(bags))


def _rarity(bags: np.ndarray) -> np.ndarray:
    weights: np.ndarray = np.log(len(bags) / np.maximum(bags.sum(0), 1))
    return weights


def _centred(features: np.ndarray) -> np.ndarray:
    features = features - features.mean(0)
    unit: np.ndarray = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-6)
    return unit


def shared_words(asked: Sequence[list[str]], replied: Sequence[list[str]]) -> np.ndarray:
    """Overlap of each question with each reply: rare words, as a share of the reply's, (num_rows, num_rows)."""
    bags = []
    for words in (asked, replied):
        bag = np.zeros((len(words), FEATURES), np.float32)
        for row, own in enumerate(words):
            bag[row, [crc32(word.encode()) % FEATURES for word in set(own)]] = 1
        bags.append(bag)
    weights = _rarity(np.concatenate(bags) / 2) ** 2
    weights[weights < 0] = 0
    sizes = [np.sqrt(np.maximum((bag * weights).sum(1), 1e-6)) for bag in bags]
    shared: np.ndarray = (bags[0] * weights) @ bags[1].T / (sizes[0][:, None] * sizes[1][None])
    return shared


def _alike(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Likeness of each row of one column to the rows of the other, as of its own: that of row `i` with `i + k` is
    the mean over rows `j` of the likeness of `i` and `j`, times that of `i + k` and `j + k`, (num_rows, num_rows)."""
    num = len(left)
    ours, theirs = left @ left.T, right @ right.T
    np.fill_diagonal(ours, 0)
    np.fill_diagonal(theirs, 0)
    fits = np.zeros((num, num), np.float32)
    rows = np.arange(num)
    for distance in _distances(num):
        place = (rows + distance) % num
        fits[rows, place] = (ours * theirs[np.ix_(place, place)]).mean(1)
    return fits


def _distances(num: int) -> list[int]:
    """Distances that are looked at: the near ones, and others to compare them with."""
    far = np.unique(np.linspace(FURTHEST + 1, num - FURTHEST - 1, 60).astype(int)).tolist()
    return [*range(-FURTHEST, FURTHEST + 1), *far]


def _slip(fits: np.ndarray) -> _Slip | None:
    """The first part of the rows, and the distance, at which they fit clearly better than in their own places.

    Args:
        fits: (num_rows, num_rows), of a row of the first column and one of the second.
    """
    num = len(fits)
    for parts in PARTS:
        size = num // parts
        if size < LEAST_ROWS:
            break
        for part in range(parts):
            rows = np.arange(part * size, num if part == parts - 1 else (part + 1) * size)
            if found := _best(fits, rows):
                return found
    return None


def _best(fits: np.ndarray, rows: np.ndarray) -> _Slip | None:
    num = len(fits)
    own = fits[rows, rows]
    far = np.array([fits[rows, (rows + k) % num].mean() for k in _distances(num) if abs(k) > FURTHEST])
    usual, spread = float(far.mean()), max(float(far.std()), 1e-9)
    best: _Slip | None = None
    for distance in range(-FURTHEST, FURTHEST + 1):
        other = fits[rows, (rows + distance) % num]
        gain = other - own
        errors = float(gain.mean() / max(float(gain.std()) / len(rows) ** 0.5, 1e-9))
        above = float(other.mean()) - usual
        if not distance or errors < SURELY or above < CLEARLY * spread or own.mean() - usual > NOT_OWN * above:
            continue
        if best is None or errors > best.errors:
            best = _Slip(int(rows[0]), int(rows[-1]) + 1, distance, errors)
    return best


# --------------------------------------------------------------------------- words of one reply alone


def _elsewhere(
    asked: Sequence[str],
    replied: Sequence[str],
    asked_words: Sequence[list[str]],
    replied_words: Sequence[list[str]],
    where: Sequence[str],
    field: str,
) -> list[Finding]:
    """Questions with words that point to the reply of another row, or a reply unlike those of similar questions."""
    words = dict(zip(asked, asked_words, strict=True))
    own, others, by_one = _pointed(asked, replied, words, _only(replied, replied_words, words))
    short = max(np.median([len(own) for own in column]) for column in (asked_words, replied_words)) <= SHORT
    if short and len(by_one) >= BY_ONE * len(words) and len(set(by_one.values())) >= ONE_EACH * len(by_one):
        others = by_one
    if len(others) < max(ELSEWHERE * len(words), LEAST_ROWS / 3, TO_OWN * own):
        others = _unlike_others(asked, replied, asked_words)
        if len(others) < max(UNLIKE_OTHERS * len(asked), LEAST_ROWS / 3):
            return []
    question, reply = next(iter(others.items()))
    values: dict[str, Value] = {
        "where": where[asked.index(question)],
        "question": question[:40],
        "other": where[replied.index(reply)],
        "reply": reply[:40],
        "num": len(others),
    }
    # A note: replies to requests from one template share names with other requests, too.
    return [Finding("other_replies", "note", len(others) / len(words), (field,), values)]


def _only(
    replied: Sequence[str], replied_words: Sequence[list[str]], asked_words: dict[str, list[str]]
) -> dict[str, str]:
    """The reply of every word that one reply alone has, and few questions."""
    having: dict[str, set[str]] = defaultdict(set)
    for text, words in dict(zip(replied, replied_words, strict=True)).items():
        for word in words:
            having[word].add(text)
    common = Counter(word for words in asked_words.values() for word in set(words))
    most = max(MOST_QUESTIONS * len(asked_words), 3)
    return {word: next(iter(texts)) for word, texts in having.items() if len(texts) == 1 and common[word] <= most}


def _pointed(
    asked: Sequence[str], replied: Sequence[str], words: dict[str, list[str]], only: dict[str, str]
) -> tuple[int, dict[str, str], dict[str, str]]:
    """The number of questions with a word of their own reply; of the others those with several words of another one
    reply, and those with a word that no other question has; each with that reply."""
    own_replies: dict[str, set[str]] = defaultdict(set)
    for question, reply in zip(asked, replied, strict=True):
        own_replies[question].add(reply)
    common = Counter(word for own in words.values() for word in set(own))
    num_own = 0
    others, by_one = dict[str, str](), dict[str, str]()
    for question, own in words.items():
        votes = Counter(_votes(own, only))
        if votes.keys() & own_replies[question]:
            num_own += 1
        elif votes:
            reply, num = votes.most_common(1)[0]
            if num >= VOTES:
                others[question] = reply
            if any(common[word] == 1 and only.get(word) == reply for word in own):
                by_one[question] = reply
    return num_own, others, by_one


def _unlike_others(asked: Sequence[str], replied: Sequence[str], asked_words: Sequence[list[str]]) -> dict[str, str]:
    """Questions whose own reply is none of those of the most similar ones, two of which have one and the same reply
    that is rare elsewhere; with that reply."""
    likeness = _bags(asked_words)
    likeness = likeness @ likeness.T
    np.fill_diagonal(likeness, 0)
    counts, found = Counter(replied), dict[str, str]()
    for row, near in enumerate(np.argsort(-likeness, 1)[:, :NEAREST]):
        near = near[likeness[row, near] >= LIKE]
        theirs = Counter(replied[other] for other in near)
        if len(near) >= VOTES and replied[row] not in theirs:
            reply, num = theirs.most_common(1)[0]
            if num >= VOTES and counts[reply] <= RARE_REPLY * len(replied):
                found[asked[row]] = reply
    return found


def _votes(words: Sequence[str], only: dict[str, str]) -> Iterator[str]:
    """The replies that words point to; pairs of characters that share one count once."""
    skip = False
    for word in words:
        if word in only and not skip:
            yield only[word]
            skip = bool(EASTERN.match(word)) and len(word) > 1
        else:
            skip = False


# --------------------------------------------------------------------------- pictures


def check_joined_pictures(data: VqaData) -> list[Finding]:
    """A finding on pictures of other rows, by the answers to questions that recur."""
    rows = _of_one_picture(data)
    if len(rows) < LEAST_ROWS:
        return []
    copies = small_copies(data.album.images).reshape(len(data.album.images), -1).astype(np.float32)
    shown = np.array([row.images[0] for row in rows])
    pictures = np.concatenate([copies, copies.reshape(len(copies), 24, -1).mean(1)], 1)[shown]
    pictures = (pictures - pictures.mean(0)) / np.maximum(pictures.std(0), 1)
    answers = sorted({row.answer for row in rows})
    said = np.zeros((len(rows), len(answers)), np.float32)
    said[np.arange(len(rows)), [answers.index(row.answer) for row in rows]] = 1
    by_question: dict[str, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        by_question[row.question].append(place)
    for places in by_question.values():
        said[places] -= said[places].mean(0)
    where = [row.where for row in rows]
    slip = _slip(_alike(_centred(pictures), said))
    if slip is not None:
        return [_slipped("slipped_pictures", slip, where, "data.vqa")]
    colours = _fit_of_colours(data, rows)
    if colours is None or colours.errors >= FITS_NOT or colours.best < COULD_FIT:
        return []
    first = rows[colours.first]
    values: dict[str, Value] = {"rows": colours.rows, "best": colours.best}
    values |= {"answer": first.answer[:40], "where": first.where}
    return [Finding("pictures_apart", "warning", colours.errors, ("data.vqa",), values)]


def show_their_colours(data: VqaData) -> bool:
    """True if pictures clearly show the colours that their answers name, and so are those of their questions."""
    colours = _fit_of_colours(data, _of_one_picture(data))
    return colours is not None and colours.errors >= CLEARLY


def _of_one_picture(data: VqaData) -> list[VqaExample]:
    return [row for row in data.examples if len(row.images) == 1 and row.question][:MOST_ROWS]


class _Colours(NamedTuple):
    """Colours of answers that pictures show more than other pictures do, in standard errors: in their own order, and in
    the best one; the number of answers with a colour, and the first of them."""

    errors: float
    best: float
    rows: int
    first: int


def _fit_of_colours(data: VqaData, rows: Sequence[VqaExample]) -> _Colours | None:
    """Measure answers with the name of one colour; None for too few."""
    named = [(row, hues.pop()) for row, one in enumerate(rows)
             if len(hues := {COLOURS[word] for word in _colour_words(one.answer)}) == 1]  # fmt: skip
    used = [hue for hue, num in Counter(hue for _, hue in named).items() if num >= LEAST_OF_COLOUR]
    named = [(row, hue) for row, hue in named if hue in used]
    if len(named) < LEAST_NAMED or len(used) < 2:
        return None
    copies = small_copies(data.album.images).reshape(len(data.album.images), -1, 3).astype(np.float32)
    shown = np.sqrt(_shares_of_hues(copies[[rows[row].images[0] for row, _ in named]], used))  # (num_named, num_used)
    shown -= shown.mean(0)
    own = np.array([used.index(hue) for _, hue in named])
    fit = float(shown[np.arange(len(own)), own].sum())
    error = max(float(np.sqrt((shown**2).mean(0)[own].sum())), 1e-9)
    best = sum(float(np.sort(shown[:, hue])[::-1][:num].sum()) for hue, num in enumerate(np.bincount(own)))
    return _Colours(fit / error, best / error, len(named), named[0][0])


def _colour_words(answer: str) -> list[str]:
    plain = answer.casefold()
    return [word for word in COLOURS if (word in plain if EASTERN.match(word) else word in WORD.findall(plain))]


def _shares_of_hues(pictures: np.ndarray, hues: Sequence[int]) -> np.ndarray:
    """The share of each picture's pixels that have a hue and a strong colour, (num_pictures, num_hues)."""
    high, low = pictures.max(2), pictures.min(2)
    spread = np.maximum(high - low, 1e-6)
    red, green, blue = pictures[..., 0], pictures[..., 1], pictures[..., 2]
    turn = np.where(high == red, (green - blue) / spread % 6, np.where(high == green, (blue - red) / spread + 2,
                    (red - green) / spread + 4)) * 60  # fmt: skip
    strong = (spread >= 0.35 * np.maximum(high, 1)) & (high >= 60)
    away = [np.minimum(np.abs(turn - hue), 360 - np.abs(turn - hue)) for hue in hues]
    shares: np.ndarray = np.stack([((one <= NEAR_HUE) & strong).mean(1) for one in away], 1)
    return shares
