"""Classes, and the two sides of the split: names and files of classes, classes that one side lacks, held-out rows that
look otherwise than those to train on, and answers that need no picture."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from unpad.data.images import ImageData
from unpad.data.patients import EventData
from unpad.data.pictures.alike import small_copies
from unpad.data.pixels.decode import decode
from unpad.data.pixels.formats import ImageError
from unpad.data.sources.images import ImageExample, read_bytes
from unpad.data.text import TextData
from unpad.data.vqa import VqaData
from unpad.doctor.data.rows import label_fields, sampled
from unpad.doctor.subject import Subject
from unpad.terminal.finding import Finding, Severity, Value

LEAST_ROWS, LEAST_HELD, MOST_PICTURES = 40, 16, 3000
SPELT_TWICE = 0.03  # of the rows, with a class or answer mostly spelt in another way
LEAST_LETTERS = 3  # of a name
NO_NAME = re.compile(r"nan|nat|null|#?n/a|#ref!|#value!|undefined", re.IGNORECASE)
LONE, FEW_OF_CLASS = 0.3, 2  # share of the rows that are of classes with so few
UNSEEN_CLASS, LACKING, PER_CLASS = 0.1, 0.5, 4  # shares of held-out rows and of classes, and rows for each class
OTHER_SHARES = 0.4  # of the rows, that would have to change class
TOLD, NOT_TOLD, RECURS = 0.97, 0.75, 8  # shares of rows that a property, or no knowledge, names; rows per value
TOLD_BY_SHAPE, NEIGHBOURS = 0.9, 2  # share of rows, and of neighbours on either side
APART, SURELY = 2.0, 6.0  # deviations between the sides, and standard errors
COMMON = 0.05  # share of the patients with a code
FLOOR, LOG_FLOOR = 0.02, 0.15  # least deviation of a share, and of a logarithm: twice as long is no other kind
WITHOUT_PICTURE, LEAST_ASKED = 0.98, 3  # share of answers that their questions alone tell, and rows of a question


# Numbers of some rows of a side, by name; a name with @ is a word of the output.
Properties = dict[str, np.ndarray]


def check_sides(subject: Subject, properties: Callable[[np.ndarray], Properties]) -> list[Finding]:
    """Findings on the two sides of the split.

    Args:
        properties: of the rows of some sequences, in which the sides are compared.
    """
    return [*_shares(subject), *_apart(subject, properties)]


def check_classes(subject: Subject[ImageData]) -> list[Finding]:
    """Findings on names of classes and files of pictures."""
    data = subject.data
    names = np.array(data.classes)[data.labels[subject.stage.train_ids]]
    found = [*_spelt_twice(subject, names.tolist()), *_no_names(subject, names.tolist()), *_lone(subject)]
    return [*found, *_shortcut(subject), *_lost_aspect(subject)]


def check_codes(subject: Subject[EventData]) -> list[Finding]:
    """A finding on codes of events under several spellings."""
    data, starts = subject.data, subject.data.sets.events_of
    owner = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    codes = data.code[np.isin(owner, subject.stage.train_ids)]
    names = [data.codes[code] for code in codes[codes > 0].tolist()]
    return _spelt_twice(subject, names, ("data.events", "data.events.code", "static"))


def check_answers(subject: Subject[VqaData]) -> list[Finding]:
    """Findings on answers, by themselves and beside their questions."""
    answers = [subject.data.examples[seq].answer for seq in subject.stage.train_ids.tolist()]
    return [*_spelt_twice(subject, answers), *_without_picture(subject)]


def _plain(name: str) -> str:
    """A name without what people spell in several ways: capitals, accents, blanks, and marks around it."""
    plain = unicodedata.normalize("NFKD", name).casefold()
    # Signs that tell results apart, as in `rh+` and `> 5`, stay.
    return re.sub(r"[^\w+<>=*#%]+|_+", " ", "".join(one for one in plain if not unicodedata.combining(one))).strip()


def _spelt_twice(subject: Subject, names: Sequence[str], fields: tuple[str, ...] = ()) -> list[Finding]:
    """One class or answer under several spellings."""
    counts = Counter(names)
    spellings: dict[str, list[str]] = defaultdict(list)
    for name, _ in counts.most_common():
        # Letters, numbers and short codes differ by less.
        if len(_plain(name)) >= LEAST_LETTERS and any(map(str.isalpha, name)):
            spellings[_plain(name)].append(name)
    several = [own for own in spellings.values() if len(own) > 1]
    other = sum(counts[name] for own in several for name in own[1:])
    if not several or other < max(SPELT_TWICE * len(names), 3):
        return []
    values: dict[str, Value] = {"first": several[0][0], "second": several[0][1], "classes": len(several)}
    return [Finding("spelt_twice", "warning", other / len(names), fields or label_fields(subject), values)]


def _no_names(subject: Subject[ImageData], names: Sequence[str]) -> list[Finding]:
    """A class that is the sign of an empty cell; `none` and `unknown` may be classes."""
    counts = Counter(name for name in names if NO_NAME.fullmatch(name.strip()))
    if sum(counts.values()) < max(SPELT_TWICE * len(names), 3):
        return []
    shown = counts.most_common(1)[0][0]
    values: dict[str, Value] = {"part": "@learnt", "shown": shown, "where": "label"}
    return [Finding("no_value", "warning", sum(counts.values()) / len(names), label_fields(subject), values)]


def _lone(subject: Subject[ImageData]) -> list[Finding]:
    """Classes of one or two rows, as names of files or numbers of rows have them."""
    data = subject.data
    labels = data.labels[subject.stage.train_ids]
    counts = np.bincount(labels, minlength=len(data.classes))
    share = float((counts[labels] <= FEW_OF_CLASS).mean()) if len(labels) else 0.0
    if len(labels) < LEAST_ROWS or share < LONE:
        return []
    least = int(np.flatnonzero((counts > 0) & (counts <= FEW_OF_CLASS))[0])
    values: dict[str, Value] = {"classes": int((counts > 0).sum()), "shown": data.classes[least]}
    return [Finding("lone_classes", "fault", share, label_fields(subject), values)]


def _shares(subject: Subject) -> list[Finding]:
    """Classes that one side lacks, or has to quite another share."""
    known = subject.data.class_labels()
    if known is None:
        return []
    labels = known[0]
    ours, theirs = (labels[ids][labels[ids] >= 0] for ids in (subject.stage.train_ids, subject.stage.held_out_ids))
    num = int(max(ours.max(initial=0), theirs.max(initial=0))) + 1
    if len(ours) < LEAST_ROWS or len(theirs) < max(LEAST_HELD, PER_CLASS * num):
        return []
    trained, held = (np.bincount(one, minlength=num) / len(one) for one in (ours, theirs))
    unseen, lacking = float(held[trained == 0].sum()), float((held[trained > 0] == 0).mean())
    moved = float(np.abs(trained - held).sum() / 2)
    if unseen < UNSEEN_CLASS and lacking < LACKING and moved < OTHER_SHARES:
        return []
    values: dict[str, Value] = {"unseen": unseen, "lacking": int((held[trained > 0] == 0).sum()), "sequences": num}
    severity: Severity = "fault" if unseen >= 0.5 else "warning"
    return [Finding("other_classes", severity, moved, (*label_fields(subject), "data.holdout"), values)]


def _shortcut(subject: Subject[ImageData]) -> list[Finding]:
    """The size, the mode or the kind of the file alone tells the class."""
    data, ids = subject.data, subject.stage.train_ids
    labels = data.labels[ids]
    if len(ids) < LEAST_ROWS or np.bincount(labels).max() > NOT_TOLD * len(labels):
        return []
    properties: list[tuple[str, Callable[[ImageExample], object]]] = [
        ("@picture_size", lambda one: (one.width, one.height)),
        ("@picture_mode", lambda one: one.mode),
        ("@picture_file", lambda one: one.path.suffix.casefold()),
    ]
    for name, of in properties:
        seen: dict[object, Counter[int]] = defaultdict(Counter)
        for seq, label in zip(ids.tolist(), labels.tolist(), strict=True):
            seen[of(data.examples[seq])][label] += 1
        told = sum(counts.most_common(1)[0][1] for counts in seen.values()) / len(ids)
        if 2 <= len(seen) <= len(ids) / RECURS and told >= TOLD:
            value, counts = max(seen.items(), key=lambda one: sum(one[1].values()))
            shown = " x ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            values: dict[str, Value] = {
                "property": name,
                "shown": shown,
                "target": data.classes[counts.most_common(1)[0][0]],
            }
            return [Finding("shortcut", "warning", told, label_fields(subject), values)]
    return []


def _lost_aspect(subject: Subject[ImageData]) -> list[Finding]:
    """Classes that the width and height of the files tell, where all pictures are brought to one size."""
    data, size = subject.data, subject.setup.recipe.images.size
    ids = subject.stage.train_ids
    counts = np.bincount(data.labels[ids], minlength=len(data.classes))
    ids = ids[counts[data.labels[ids]] >= RECURS]
    if len(ids) < LEAST_ROWS or len(np.unique(data.labels[ids])) < 2 or size not in ("square", "letterbox"):
        return []
    shapes = np.array([(data.examples[seq].width, data.examples[seq].height) for seq in ids.tolist()], float)
    measures = [("@picture_aspect", np.log(shapes[:, 0] / shapes[:, 1])), ("@picture_size", np.log(shapes.prod(1)))]
    most = float(np.bincount(data.labels[ids]).max() / len(ids))
    for name, numbers in measures[: 2 if size == "square" else 0] + measures[1:]:
        told = _told_by(numbers, data.labels[ids])
        if told >= TOLD_BY_SHAPE and told >= 1 - (1 - most) / 4:
            fields = ("images.size", "images.square", *label_fields(subject))
            return [Finding("lost_aspect", "warning", told, fields, {"property": name, "size": size})]
    return []


def _told_by(numbers: np.ndarray, labels: np.ndarray) -> float:
    """The share of rows that a number names the class of, by the classes of the nearest other rows."""
    mixed = np.random.default_rng(0).permutation(len(numbers))  # equal numbers stand in no order of classes
    order = mixed[np.argsort(numbers[mixed], kind="stable")]
    own, right = labels[order], 0
    for at in range(len(own)):
        near = np.concatenate([own[max(at - NEIGHBOURS, 0) : at], own[at + 1 : at + 1 + NEIGHBOURS]])
        right += int(np.bincount(near).argmax() == own[at])
    return right / len(own)


def _without_picture(subject: Subject[VqaData]) -> list[Finding]:
    """Questions that recur with one answer each, whatever their picture."""
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for seq in subject.stage.train_ids.tolist():
        one = subject.data.examples[seq]
        if one.question:
            answers[one.question][one.answer] += 1
    known = [counts for counts in answers.values() if sum(counts.values()) >= LEAST_ASKED]
    num = sum(sum(counts.values()) for counts in known)
    told = sum(counts.most_common(1)[0][1] for counts in known) / max(num, 1)
    different = {counts.most_common(1)[0][0] for counts in known}
    if num < max(LEAST_ROWS, len(subject.stage.train_ids) / 2) or told < WITHOUT_PICTURE or len(different) < 2:
        return []
    question = next(question for question, counts in answers.items() if sum(counts.values()) >= LEAST_ASKED)
    values: dict[str, Value] = {"question": question[:50], "answer": answers[question].most_common(1)[0][0][:30]}
    return [Finding("without_picture", "warning", told, ("data.vqa",), values)]


# --------------------------------------------------------------------------- both sides


def _apart(subject: Subject, properties: Callable[[np.ndarray], Properties]) -> list[Finding]:
    """The property in which held-out rows differ most from those to train on."""
    kinds = subject.data.table.kind
    held = subject.stage.held_out_ids
    kind = int(np.bincount(kinds[held]).argmax()) if len(held) else 0  # one kind of data may be held out alone
    ours, theirs = (properties(ids[kinds[ids] == kind]) for ids in (subject.stage.train_ids, held))
    worst: tuple[float, str, float, float] = (0.0, "", 0.0, 0.0)
    for name in ours.keys() & theirs.keys():
        one, other = ours[name], theirs[name]
        if len(one) < LEAST_ROWS or len(other) < LEAST_HELD:
            continue
        floor = LOG_FLOOR if name.startswith("@log") else FLOOR
        spread = max(float(np.sqrt((one.var() + other.var()) / 2)), floor)
        distance = abs(float(other.mean() - one.mean())) / spread
        errors = distance / (1 / len(one) + 1 / len(other)) ** 0.5
        if errors >= SURELY:
            worst = max(worst, (distance, name, float(one.mean()), float(other.mean())))
    distance, name, here, there = worst
    if distance < APART:
        return []
    values: dict[str, Value] = {"property": name, "here": here, "there": there}
    fields = (*label_fields(subject), "data.holdout")
    return [Finding("sides_apart", "warning", distance, fields, values)]


def measure_texts(data: TextData | VqaData, ids: np.ndarray) -> Properties:
    """Lengths, and shares of kinds of characters."""
    decoded = [data.tokenizer.decode(data.tokens_of(seq).tolist()) for seq in sampled(ids).tolist()]
    texts = [text for text in decoded if text]

    def shares(is_one: Callable[[str], bool]) -> np.ndarray:
        return np.array([sum(map(is_one, text)) / len(text) for text in texts])

    return {
        "@log_length": np.log10([len(text) for text in texts]) if texts else np.zeros(0),
        "@capitals": shares(str.isupper),
        "@beyond_ascii": shares(lambda one: one > "\x7f"),
        "@blanks": shares(str.isspace),
        "@decimals": shares(str.isdecimal),
        "@begun_capital": np.array([float(text[0].isupper()) for text in texts]),
        "@ended_mark": np.array([float(text.rstrip()[-1:] in tuple(".!?。！？…")) for text in texts]),
    }


def measure_pictures(data: ImageData | VqaData, ids: np.ndarray) -> Properties:
    """Colours and sizes."""
    examples = [data.album.images[image] for image in np.flatnonzero(data.shown(sampled(ids))).tolist()]
    if not examples:
        return {}
    copies = small_copies(examples).reshape(len(examples), -1, 3) / 255.0
    return {
        "@brightness": copies.mean((1, 2)),
        "@contrast": copies.mean(2).std(1),
        "@log_detail": _detail(examples),
        "@colour": (copies.max(2) - copies.min(2)).mean(1),
        "@warmth": (copies[..., 0] - copies[..., 2]).mean(1),
        "@log_pixels": np.log10([one.width * one.height for one in examples]),
        "@log_aspect": np.log10([one.width / one.height for one in examples]),
    }


def _detail(examples: Sequence[ImageExample]) -> np.ndarray:
    """The logarithm (base 10) of the difference of neighbouring pixels, which blur makes small."""

    def of(example: ImageExample) -> float:
        try:
            pixels = decode(read_bytes(example)).pixels[..., :3].astype(np.float32).mean(2)
        except ImageError:  # training reports the damage
            return 0.0
        steps = [np.abs(np.diff(pixels, axis=axis)).mean() for axis in (0, 1) if pixels.shape[axis] > 1]
        return float(np.log10(max(np.mean(steps), 0.1))) if steps else 0.0

    return np.array([of(example) for example in examples])


def measure_patients(data: EventData, ids: np.ndarray) -> Properties:
    """Values of every code, in standard deviations, whether a patient has it, and the events of a patient."""
    found = {"@log_events": np.log10(1 + np.diff(data.sets.events_of)[ids])}
    owner = np.repeat(np.arange(len(data.sets.events_of) - 1), np.diff(data.sets.events_of))
    having = np.zeros((len(data.sets.events_of) - 1, len(data.codes)), bool)
    having[owner, data.code] = True
    for code in np.flatnonzero(having.mean(0) >= COMMON).tolist():
        found[f"{data.codes[code]} (0/1)" if code else "@unknown_code"] = having[ids, code].astype(np.float64)
    chosen = np.isin(owner, ids) & ~np.isnan(data.standard)
    for code in np.flatnonzero(np.bincount(data.code[chosen], minlength=1) >= LEAST_HELD).tolist():
        if code:
            found[data.codes[code]] = data.standard[chosen & (data.code == code)].astype(np.float64)
    return found
