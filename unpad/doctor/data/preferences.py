"""Pairs of replies: which of the two is chosen must follow from something, and must not be told by a mark."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from zlib import crc32

import numpy as np

from unpad.data.sources.example import Example
from unpad.doctor.data.joins import shared_words, words_of
from unpad.doctor.data.talks import check_talks
from unpad.doctor.data.texts import check_texts
from unpad.doctor.data.writing import check_writing
from unpad.doctor.subject import Subject
from unpad.terminal.finding import Finding, Severity, Value

LEAST = 60  # pairs
FEATURES = 512  # places of hashed words
COMMON = 0.2  # share of the pairs where just one reply has a word
TWO_SIDES = 0.9  # mean size over root mean square: 0.80 of a bell, 0.87 of a box, 1 of two points
BALANCED = 0.25  # share of the pairs on the smaller side
ONE_HAS = 0.65  # share of the pairs where just one reply has a word; of replies that know nothing of each other 0.5
BOTH_WAYS, MANY_BOTH_WAYS = 0.1, 0.3  # of the pairs, that another pair contradicts
SAME = 0.1  # of the pairs
MOST_COMPARED, DIFFERENT = 600, 0.8  # pairs, and share of different replies
SPECIFIC, LIKE_OTHERS = 0.6, 0.4  # share of replies with a word of a question, and of the words that the others have
ONE_REJECTED, LEAST_REPLY = 0.5, 8  # share of one rejected reply, and its characters
LARGE_BETA, SMALL_BETA = 2.0, 0.003
ALL_HAVE, NONE_HAVE = 0.95, 0.05  # shares of the replies of one side and of the other that have a mark
LONGER, TIMES = 0.98, 1.5  # share of the pairs with one reply longer, and by how much in the middle one
FINAL = ".!?。！？…\"'”’)]）】」』`"
ARTEFACTS = {
    "no_value",
    "repeats_question",
    "read_as",
    "bytes_as_letters",
    "replaced",
    "markup",
    "escaped",
    "other_marks",
}
OTHER_WORDS, USUAL_WORDS = 0.05, 0.3  # of the words that the two sides share, and two halves of one side
MARKS = re.compile(r"[\s_.,;:!?'\"“”‘’«»„`*…—–。，、；：！？「」『』]+")
MANY_WRONG = 0.4  # of the pairs that may be labelled the wrong way round


def check_preferences(subject: Subject, rows: dict[str, list[Example]]) -> list[Finding]:
    """Findings on pairs of replies, and on the settings of the stages that learn from them."""
    pairs = [row for row in rows.get("pairs", []) if row.rejected is not None]
    found = _settings(subject)
    if len(pairs) < LEAST:
        return found
    asked = [row.turns[-2].content if len(row.turns) > 1 else "" for row in pairs]
    replies = [(row.turns[-1].content, row.rejected.content) for row in pairs if row.rejected is not None]
    where = [row.where for row in pairs]
    found += _both_ways(asked, replies, where) or _exchanged(replies)
    found += _artefacts(pairs)
    found += _same(replies, where) or _elsewhere(asked, replies, where)
    return [*found, *(_one_rejected(replies) or _told_apart(replies))]


def _artefacts(pairs: Sequence[Example]) -> list[Finding]:
    """Traces of programs in the rejected replies alone: findings that the chosen ones do not have."""
    other = [replace(row, turns=(*row.turns[:-1], row.rejected)) for row in pairs if row.rejected is not None]
    told = [[*check_texts({"pairs": rows}), *check_talks({"pairs": rows}), *check_writing({"pairs": rows})]
            for rows in (list(pairs), other)]  # fmt: skip
    known = {one.code for one in told[0]}
    return [one for one in told[1] if one.code in ARTEFACTS and one.code not in known]


def _same(replies: Sequence[tuple[str, str]], where: Sequence[str]) -> list[Finding]:
    """Pairs of one reply, up to blanks, marks and capitals; operators and brackets of code are none of these."""
    same = [at for at, pair in enumerate(replies) if len({MARKS.sub("", one).casefold() for one in pair}) == 1]
    if len(same) < max(SAME * len(replies), 5):
        return []
    values: dict[str, Value] = {"shown": replies[same[0]][0][:40], "where": where[same[0]]}
    return [Finding("same_pair", "warning", len(same) / len(replies), ("data.pairs",), values)]


def _elsewhere(asked: Sequence[str], replies: Sequence[tuple[str, str]], where: Sequence[str]) -> list[Finding]:
    """Replies of one side that fit the questions of other rows, and their own no better than any, where those of the
    other side fit their own: whether a reply is about its question tells which is better."""
    num = min(len(asked), MOST_COMPARED)
    words = [words_of(text) for text in asked[:num]]
    fits = [shared_words(words, [words_of(pair[side]) for pair in replies[:num]]) for side in (0, 1)]
    own = [float(np.mean(np.diag(one)) - one.mean()) for one in fits]
    errors = [max(float(one.std()) / num**0.5, 1e-9) for one in fits]
    for side in (0, 1):
        best = float(np.median(fits[side].max(0)))
        others = float(np.median(np.diag(fits[1 - side])))
        different = len({pair[side] for pair in replies[:num]}) >= DIFFERENT * num
        # Replies to no question, as evasive ones are, share no words with any.
        specific = float((np.diag(fits[side]) > 0).mean()) >= SPECIFIC
        specific &= float(fits[side].mean()) >= LIKE_OTHERS * float(fits[1 - side].mean()) and best >= others / 2
        if own[side] < 3 * errors[side] and own[1 - side] >= 15 * errors[1 - side] and different and specific:
            values: dict[str, Value] = {"side": SIDES[side], "shown": replies[0][side][:40], "where": where[0]}
            return [Finding("reply_elsewhere", "warning", own[side] / errors[side], ("data.pairs",), values)]
    return []


def _both_ways(asked: Sequence[str], replies: Sequence[tuple[str, str]], where: Sequence[str]) -> list[Finding]:
    """Pairs that occur again with the other reply chosen, or with their chosen reply rejected elsewhere."""
    rejected: dict[str, set[str]] = defaultdict(set)
    for question, (_, worse) in zip(asked, replies, strict=True):
        rejected[question].add(worse)
    contradicted = [i for i, question in enumerate(asked) if replies[i][0] in rejected[question]]
    share = len(contradicted) / len(asked)
    if share < BOTH_WAYS:
        return []
    severity: Severity = "fault" if share >= MANY_BOTH_WAYS else "warning"
    first = contradicted[0]
    values: dict[str, Value] = {"where": where[first], "shown": replies[first][0][:40]}
    return [Finding("both_ways", severity, share, ("data.pairs",), values)]


def _exchanged(replies: Sequence[tuple[str, str]]) -> list[Finding]:
    """A way in which the two replies differ in nearly all pairs, with the chosen one on either side of it.

    Where replies are of two kinds and one is preferred, the difference of a pair is about the same in all pairs. Where
    some pairs are exchanged it has two signs, and hardly any pair lies between them.
    """
    words = [tuple(set(words_of(text)) for text in pair) for pair in replies]
    lengths = np.array([math.log((1 + len(better)) / (1 + len(worse))) for better, worse in replies])
    tried: list[tuple[str, list[np.ndarray]]] = [("@length", [lengths])]
    single = Counter(word for better, worse in words for word in better ^ worse)
    for word, num in single.most_common(5):
        if num >= ONE_HAS * len(words):
            signs = np.array([(word in better) - (word in worse) for better, worse in words], float)
            tried.append((word, [signs[signs != 0]]))
    known = [word for word, num in single.items() if num >= COMMON * len(words)]
    if len(known) >= 2:
        tried.append(("@words", _together(words, known)))
    for name, parts in tried:
        smaller = [_smaller_side(part) for part in parts]
        if min(smaller) >= BALANCED:
            values: dict[str, Value] = {"kind": name, "pairs": len(replies)}
            return [Finding("exchanged", "warning", smaller[0], ("data.pairs",), values)]
    return []


def _smaller_side(differences: np.ndarray) -> float:
    """The share of the smaller of two sides; 0 where most differences are between them, or there are none."""
    size = float(np.sqrt((differences**2).mean()))
    if size <= 0 or float(np.abs(differences).mean()) < TWO_SIDES * size:
        return 0.0
    return float(min((differences > 0).mean(), (differences < 0).mean()))


def _together(words: Sequence[tuple[set[str], ...]], known: Sequence[str]) -> list[np.ndarray]:
    """Differences of two halves of the pairs along the way in which those of the other half differ most, whatever the
    sign, so that chance finds none."""
    places = {word: crc32(word.encode()) % FEATURES for word in known}
    bags = np.zeros((len(words), FEATURES))
    for row, (better, worse) in enumerate(words):
        for word in (better ^ worse) & places.keys():
            bags[row, places[word]] += 1 if word in better else -1
    halves = [bags[::2], bags[1::2]]
    return [half @ np.linalg.svd(halves[1 - i], full_matrices=False)[2][0] for i, half in enumerate(halves)]


def _one_rejected(replies: Sequence[tuple[str, str]]) -> list[Finding]:
    """One reply that is the rejected, or the chosen, one of most pairs: its words alone tell which is worse."""
    for side, name in ((1, "@rejected"), (0, "@chosen")):
        counts = Counter(pair[side] for pair in replies)
        reply, num = counts.most_common(1)[0]
        if num >= ONE_REJECTED * len(replies) and len(reply) >= LEAST_REPLY:
            values: dict[str, Value] = {"side": name, "shown": reply[:40]}
            return [Finding("one_rejected", "warning", num / len(replies), ("data.pairs",), values)]
    return []


def _told_apart(replies: Sequence[tuple[str, str]]) -> list[Finding]:
    """The first mark that nearly all replies of one side have and hardly one of the other: how they begin or end, a
    character, a word, or their length. Words and lengths may be what people prefer."""
    if found := _other_words(replies):
        return found
    sides = [[_features(reply) for reply in side] for side in zip(*replies, strict=True)]
    shares = [{one: num / len(side) for one, num in Counter(one for own in side for one in own).items()}
              for side in sides]  # fmt: skip
    best: tuple[int, float, int, str] | None = None
    for side in (0, 1):
        for (kind, mark), share in shares[side].items():
            other = shares[1 - side].get((kind, mark), 0.0)
            if share >= ALL_HAVE and other <= NONE_HAVE:
                best = min(best or (len(KINDS), 0.0, 0, ""), (KINDS.index(kind), other - share, side, mark))
    if best is None:
        return _by_length(replies)
    kind, apart, side, mark = KINDS[best[0]], -best[1], best[2], best[3]
    shown = next(pair[side] for pair in replies if (kind, mark) in _features(pair[side]))
    values: dict[str, Value] = {"kind": f"@by_{kind}", "mark": mark, "side": SIDES[side], "shown": shown[:40]}
    meant = kind in ("word", "begin", "end") and re.sub(r"[\s,.!?:'’，。！？：-]", "", mark).isalpha()
    severity: Severity = "note" if meant else "warning"
    return [Finding("told_apart", severity, apart, ("data.pairs",), values)]


SIDES = ("@chosen", "@rejected")
PARTS = (1, 2, 3)  # words at the beginning or end of a reply
KINDS = ("blank", "begin", "end", "final", "sign", "word")


def _features(reply: str) -> set[tuple[str, str]]:
    """Marks of a reply, each with its kind."""
    words = reply.split()
    if not words:
        return set()
    found = {("begin", " ".join(words[:num])) for num in PARTS} | {("end", " ".join(words[-num:])) for num in PARTS}
    if not reply[0].isalnum() and not reply[0].isspace():
        found.add(("begin", reply[0]))
    found |= {("blank", "@front") for _ in range(reply != reply.lstrip())}
    found |= {("blank", "@back") for _ in range(reply != reply.rstrip())}
    found.add(("final", "@has_mark" if words[-1][-1] in FINAL else "@has_none"))
    found |= {("sign", one) for one in set(reply) if not one.isalnum() and not one.isspace() and one not in FINAL}
    return found | {("word", one) for one in set(words_of(reply))}


def _other_words(replies: Sequence[tuple[str, str]]) -> list[Finding]:
    """Two sides with hardly a word in common, as two languages have, where halves of one side share many."""

    def counts(side: int, part: slice) -> Counter[str]:
        return Counter(word for pair in replies[part] for word in words_of(pair[side]))

    def shared(one: Counter[str], other: Counter[str]) -> float:
        return sum(min(num / one.total(), other[word] / other.total()) for word, num in one.items() if other.total())

    even, odd = slice(0, None, 2), slice(1, None, 2)
    across = shared(counts(0, even), counts(1, odd))
    within = min(shared(counts(side, even), counts(side, odd)) for side in (0, 1))
    if across > OTHER_WORDS or within < USUAL_WORDS:
        return []
    values: dict[str, Value] = {"kind": "@by_words", "mark": f"{across:.0%}", "side": SIDES[0]}
    return [Finding("told_apart", "warning", 1.0, ("data.pairs",), {**values, "shown": replies[0][0][:40]})]


def _by_length(replies: Sequence[tuple[str, str]]) -> list[Finding]:
    """A note: people may prefer short or long replies, but the model learns that alone where nothing else differs."""
    ratios = np.array([(1 + len(better)) / (1 + len(worse)) for better, worse in replies])
    for name, times in zip(SIDES, (ratios, 1 / ratios), strict=True):
        longer = float((times > 1).mean())
        if longer >= LONGER and float(np.median(times)) >= TIMES:
            values: dict[str, Value] = {"times": float(np.median(times)), "side": name}
            return [Finding("told_by_length", "note", longer, ("data.pairs",), values)]
    return []


def _settings(subject: Subject) -> list[Finding]:
    """The factor of the reward, and the smoothing, of the stages of pairs."""
    found, values = list[Finding](), dict[str, Value]()
    for stage in subject.setup.stages:
        train = stage.recipe.train
        if not stage.of_pairs or not stage.train_ids.size or train.max_epochs == 0:
            continue
        is_first = stage.name == next(one.name for one in subject.setup.stages if one.train_ids.size)
        given = train.init_from is not None or "from" in subject.setup.recipe.model or subject.setup.base is not None
        if is_first and not given:
            values = {"stage": stage.name}
            found.append(
                Finding("untrained_reference", "fault", 1.0, ("model.from", "train.init_from", "stages"), values)
            )
        if not SMALL_BETA <= train.beta < LARGE_BETA:
            field = subject.setup.recipe.field_of(stage.name, "train.beta")
            which = "@stay" if train.beta >= LARGE_BETA else "@wander"
            values = {"stage": stage.name, "field": field, "which": which}
            found.append(Finding("beta", "warning", train.beta, (field,), values))
        if train.label_smoothing >= MANY_WRONG:
            field = subject.setup.recipe.field_of(stage.name, "train.label_smoothing")
            found.append(Finding("smoothing", "warning", train.label_smoothing, (field,), {"field": field}))
    return found
