"""What fields mean that no reader asks for: metadata, marks of what is not to be learned, what completes a request."""

import json
import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from unpad.data.sources.example import Turn, Unread
from unpad.data.sources.faults import type_name
from unpad.data.sources.row import UNSEEN, Row, is_blank, listed


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words of names, without the s of a plural. A field is metadata by the last word that is no filler.
_METADATA = _words(
    "id uuid idx index hash sha url uri link source origin dataset corpus subset version licence license language "
    "lang copyright locale country region date time timestamp year created updated modified category genre topic "
    "tag domain subject split fold meta metadata model engine author annotator worker file filename path line page seed"
)
_DATES = _words("date time timestamp created updated modified")
_SCORES = _words("score rating reward margin")  # are named, and refuse no row
_FILLERS = _words("at by code no name number value")
_COUNTS = _words("num n number count")  # first words that make a count of what follows
_PLACES = _words("id idx index turn number position order time timestamp")  # numbers of a message
_TRAINED = _words("train trainable training learn learned loss supervise weight")
_MASKED = _words("mask masked ignore ignored skip skipped exclude excluded")
_WANTED = _words("label desirable desired accepted accept chosen preferred wanted correct approved good")
_UNWANTED = _words("rejected undesirable undesired unwanted bad wrong incorrect")
_GOOD, _BAD = _TRAINED | _WANTED, _MASKED | _UNWANTED
_NOT = _words("no not non never dont")
_COMPLETING = _words(
    "context passage document article background paragraph image picture photo audio video choice option attachment "
    "tool function kwarg history"
)
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_A-Za-z]+")
_IDENTIFYING = re.compile(r"[0-9a-fA-F-]{16,}|\w+://\S+|www\.\S+")
LONGEST_METADATA, LONGEST_NUMBER, LONG_PART = 200, 40, 40  # characters of a text


@lru_cache(maxsize=1024)
def words_of(name: str) -> tuple[str, ...]:
    """Words of a name in lower case, without the s of a plural: ("prompt", "id") of promptIds."""
    return tuple(re.sub(r"(?<=.[^s])s$", "", word.lower()) for word in _WORDS.findall(name))


@lru_cache(maxsize=1024)
def _last(name: str) -> str:
    words = words_of(name)
    telling = [word for word in words if word not in _FILLERS] or list(words)
    return telling[-1] if telling else ""


def is_metadata(name: str, value: Any) -> bool:
    """True for an id, a source, a url, a licence, a date, a hash or a category, by its name, or by its value if it
    is an id; not for what has a truth value, nor for a number under a plural, which says how often."""
    value = listed(value)
    if _truth_values(name, value):
        return False
    if number_of(value) is not None and name.lower().endswith("s"):
        return _is_count(name)
    if type(value) is list and all(is_metadata("", item) for item in value):
        return True
    if type(value) is str:
        text = value.strip()
        if _IDENTIFYING.fullmatch(text):
            return True
        if len(text) > LONGEST_METADATA:
            return False
    return _last(name) in _METADATA or _is_count(name)


def _truth_values(name: str, value: Any) -> list[str]:
    """Paths of the truth values in a value, such as metadata.usable."""
    if type(value) is bool:
        return [name]
    parts = [(name, part) for part in value] if type(value) is list else []
    if type(value) is dict:
        parts = [(f"{name}.{key}", part) for key, part in value.items()]
    return list(dict.fromkeys(path for within, part in parts for path in _truth_values(within, part)))


@lru_cache(maxsize=1024)
def _is_count(name: str) -> bool:
    words = words_of(name)
    return len(words) > 1 and (words[0] in _COUNTS or words[-1] == "count")


def number_of(value: Any) -> float | None:
    """A number, a truth value as 0 or 1, or either of them in a text, as tables have them; None for anything else."""
    if type(value) is str:
        folded = value.strip().lower() if len(value) <= LONGEST_NUMBER else ""
        if folded in ("true", "false"):
            return float(folded == "true")
        try:
            return float(folded)
        except ValueError:
            return None
    return float(value) if type(value) in (bool, int, float) else None


@lru_cache(maxsize=1024)
def _says_wanted(name: str, wanted: frozenset[str], unwanted: frozenset[str]) -> bool | None:
    """Whether "true" under a name says yes (train) or no (masked); None where it has words of neither, or of both."""
    words = set(words_of(name))
    yes, no = bool(words & wanted), bool(words & unwanted)
    return None if yes == no or words & _NOT else yes


def read_marks(row: Row, message: dict[str, Any], known: Collection[str], place: str, is_reply: bool) -> bool:
    """Whether a message of a row is to be learned where it is a reply.

    Fields that may weigh or invert the reply, or hold what completes the message, are doubts of the row.

    Args:
        known: fields that the reader reads; place: of the message.
    """
    learned = True
    for name, value in message.items():
        number, wanted = number_of(value), _says_wanted(name, _TRAINED, _MASKED)
        if name in known or is_blank(value) or (_last(name) in _PLACES if wanted is None else not is_reply):
            continue
        if wanted is not None and number in (0, 1) and (wanted or type(value) is bool):
            learned = learned and wanted == bool(number)
        elif wanted is not None or (number is not None and 0 <= number <= 1):
            row.doubt(name, f'{place}."{name}" is {shown(value)}, which may weigh or mask it, and is not read')
        elif _completes(name) or (type(value) in (list, dict) and not is_metadata(name, value)):
            row.doubt(name, f'{place}."{name}" is {shown(value)}, which is not read')
        elif not is_metadata(name, value):
            row.pass_over(re.sub(r'"|\d+', "", f"{place}.{name}"))
    return learned


def doubt_unread(row: Row, turns: Sequence[Turn]) -> None:
    """Doubt a row with a field that nobody read and that may invert, weigh or complete it.

    What only repeats the messages, or says that the row is as wanted, counts as read.

    Args:
        turns: all messages of the row.
    """
    texts = [turn.content.strip() for turn in turns]
    asked = [turn.content.strip() for turn in turns if turn.role != "assistant"]
    lengths = len(turns), len(turns) - len(asked)
    for name, value in row.unread().items():
        items, number, wanted = listed(value), number_of(value), _says_wanted(name, _GOOD, _BAD)
        if is_blank(value) or (type(items) is not list and is_metadata(name, value) and not _completes(name)):
            continue
        if type(value) is str and value.strip().lower() in _UNWANTED:
            number = 0
        if type(value) is str and number is None and _repeats(value.strip(), asked if _completes(name) else texts):
            row.get(name)
        elif type(items) is list and (
            _says_wanted(name, _TRAINED, _MASKED) is not None
            or (len(items) in lengths and all(item is None or _is_share(item) for item in items))
        ):
            row.doubt(name, f'"{name}" is a list that may weigh or mask messages, and is not read')
        elif _completes(name):
            row.doubt(name, f'"{name}" is {shown(value)} that completes the request, and is not read here')
        elif None in (wanted, number) or not _SCORES.isdisjoint(words_of(name)):
            continue
        elif bool(number) != wanted or (number != 1 and "weight" in words_of(name)):
            row.doubt(name, f'"{name}" is {shown(value)}, so the row is not one to learn as it is')
        else:
            row.get(name)


@lru_cache(maxsize=1024)
def _completes(name: str) -> bool:
    last = _last(name)
    return last in _COMPLETING or (last in ("url", "path", "file") and not _COMPLETING.isdisjoint(words_of(name)))


def _is_share(value: Any) -> bool:
    return type(value) in (bool, int, float) and 0 <= value <= 1


def _repeats(text: str, texts: Sequence[str]) -> bool:
    """True for a text that is a message or a long part of one, or has all messages in it."""
    is_part = len(text) >= LONG_PART and any(text in content for content in texts)
    return is_part or text in texts or all(content in text for content in texts)


def shown(value: Any) -> str:
    """A number or a truth value as it is, of anything else the type."""
    if value is UNSEEN:
        return "a column of bytes"
    return json.dumps(value) if type(value) in (bool, int, float) else type_name(value)


def count_unread(unread: Unread, row: Row) -> None:
    """Count the fields of a row that was read."""
    unread.num_rows += 1
    for name, value in row.unread().items():
        count_field(unread, name, value)


def count_field(unread: Unread, name: str, value: Any, num_rows: int = 1) -> None:
    """Count a field that nobody read in rows with one value; of metadata, each of its fields.

    Dates and names such as replaced_by_id are metadata where every row has one.
    """
    quiet, number, items = is_metadata(name, value), number_of(value), listed(value)
    if type(items) is dict and _last(name) in ("meta", "metadata"):
        for key, part in items.items():
            count_field(unread, f"{name}.{key}", part, num_rows)
        return
    if is_blank(value) or is_blank(name) or (quiet and _last(name) not in _DATES and len(words_of(name)) == 1):
        return
    if quiet:
        unread.usual.add(name)
    within = _truth_values(name, items) if type(items) in (dict, list) else []
    for path in within or [name]:
        if not within and (quiet or number is None or not 0 <= number <= 1):
            unread.marks.discard(path)
        elif path not in unread.counts:
            unread.marks.add(path)
        unread.counts[path] += num_rows
