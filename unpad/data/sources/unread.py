"""What fields mean that no reader asks for: metadata, marks of what is not to be learned, what completes a request."""

import json
import re
import tomllib
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from unpad.data.sources.example import LOUD, SPLIT_NAMES, USUAL, Turn, Unread
from unpad.data.sources.faults import type_name
from unpad.data.sources.row import UNSEEN, Row, is_blank, listed

_ENDS = ("", "e", "d", "ed", "ped", "ged", "ted", "able", "ied", "ion")  # of a stem's forms
_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_NAMES = {kind: frozenset(words.split()) for kind, words in _TABLE["words"].items()}
_NAMES |= {kind: frozenset(s + end for s in stems.split() for end in _ENDS) for kind, stems in _TABLE["stems"].items()}
_TRAINED, _MASKED = _NAMES["trained"], _NAMES["masked"]
_GOOD, _BAD = _TRAINED | _NAMES["wanted"], _MASKED | _NAMES["unwanted"]
_VERDICTS = _BAD | _NAMES["judging"]
_JUDGING = _GOOD | _VERDICTS
_COMPLETING = _NAMES["media"] | _NAMES["completing"]
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_A-Za-z]+")
_IDENTIFYING = re.compile(r"[0-9a-fA-F-]{16,}|\w+://\S+|www\.\S+")
LONGEST_METADATA, LONGEST_NUMBER, LONG_PART = 200, 40, 40  # characters of a text
LONGEST_VERDICT = 3  # words


@lru_cache(maxsize=1024)
def words_of(name: str) -> tuple[str, ...]:
    """Words of a name in lower case, without the s of a plural: ("prompt", "id") of promptIds."""
    return tuple(re.sub(r"(?<=.[^s])s$", "", word.lower()) for word in _WORDS.findall(name))


@lru_cache(maxsize=1024)
def _last(name: str) -> str:
    words = words_of(name)
    telling = [word for word in words if word not in _NAMES["fillers"]] or list(words)
    return telling[-1] if telling else ""


def is_metadata(name: str, value: Any) -> bool:
    """True for an id, a source, a url, a licence, a date, a hash or a category, by its name, or by its value if it is
    an id; not for what has a truth value, a share or a verdict, nor for a number under a plural, which says how often.
    """
    return all(_is_quiet(part, leaf) for _, part, leaf in _leaves(name, name, value))


def _is_quiet(name: str, value: Any) -> bool:
    number, text = number_of(value), value.strip() if type(value) is str else ""
    if type(value) is bool or text.lower() in ("true", "false") or not _JUDGING.isdisjoint(words_of(name)):
        return False
    if _is_telling(name, text):
        return False
    if number is not None and number % 1 > 0 and _last(name) not in (*_NAMES["dates"], "version"):
        return False
    if number is not None and name.lower().endswith("s"):
        return _is_count(name)
    is_long = len(text) > LONGEST_METADATA or _is_verdict(text)
    return _IDENTIFYING.fullmatch(text) is not None or (_is_bookkeeping(name) and not is_long)


def _is_telling(name: str, text: str) -> bool:
    """True for the name of a part of a split, and for the id of a picture, which the row may be about."""
    return text.lower() in SPLIT_NAMES or (_last(name) == "id" and not _NAMES["media"].isdisjoint(words_of(name)))


def tells_of_events(name: str, values: Collection[Any]) -> bool:
    """Whether a column beside patients' events tells them apart, as a category does, or has values of its own, as
    OMOP's value_as_concept_id with its 0 for none.

    Args:
        values: different ones.
    """
    filled = [value for value in values if not is_blank(value)]
    if words_of(name)[:1] == ("value",):
        return any(number_of(value) != 0 for value in filled)
    ends = words_of(name)[-1:]  # of test_source_value, a copy of the code, no kind
    return len(filled) > 1 and not _NAMES["kinds"].isdisjoint(ends)


def _leaves(path: str, name: str, value: Any) -> list[tuple[str, str, Any]]:
    """Path, name and value of the fields within metadata, and of truth values within anything else."""
    items, is_within = listed(value), _is_bookkeeping(name)
    parts = [(f"{path}.{key}", key, part) for key, part in items.items()] if type(items) is dict else []
    if type(items) is list:
        parts = [(path, name.rstrip("s"), part) for part in items]
    leaves = [leaf for part in parts for leaf in _leaves(*part) if is_within or type(leaf[2]) is bool]
    return leaves or [(path, name, value)]


@lru_cache(maxsize=1024)
def _is_bookkeeping(name: str) -> bool:
    return _last(name) in _NAMES["metadata"] or _is_count(name)


@lru_cache(maxsize=1024)
def _is_verdict(text: str) -> bool:
    """True for a short text that judges: rejected, do-not-train."""
    words = frozenset(words_of(text)) if len(text) <= LONGEST_NUMBER else frozenset()
    negated = not (_NAMES["not"].isdisjoint(words) or _GOOD.isdisjoint(words))
    return negated or (len(words) <= LONGEST_VERDICT and not _VERDICTS.isdisjoint(words))


@lru_cache(maxsize=1024)
def _is_count(name: str) -> bool:
    words = words_of(name)
    return len(words) > 1 and (words[0] in _NAMES["counts"] or words[-1] == "count")


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
    return None if yes == no or words & _NAMES["not"] else yes


def read_marks(row: Row, message: dict[str, Any], known: Collection[str], place: str, is_reply: bool) -> bool:
    """Whether a message of a row is to be learned where it is a reply.

    Fields that may weigh or invert the reply, or hold what completes the message, are doubts of the row.

    Args:
        known: fields that the reader reads; place: of the message.
    """
    learned = True
    for name, value in message.items():
        number, wanted = number_of(value), _says_wanted(name, _TRAINED, _MASKED)
        is_place = _last(name) in _NAMES["places"] and type(value) is not bool
        if name in known or is_blank(value) or (is_place if wanted is None else not is_reply):
            continue
        if wanted is not None and number in (0, 1) and (wanted or type(value) is bool):
            learned = learned and wanted == bool(number)
        elif wanted is not None or (number is not None and 0 <= number <= 1):
            row.doubt(name, f'{place}."{name}" is {shown(value)}, which may weigh or mask it, and is not read')
        elif _completes(name) or (type(value) in (list, dict) and not _is_bookkeeping(name)):
            row.doubt(name, f'{place}."{name}" is {shown(value)}, which is not read')
    return learned


def pass_over(row: Row, objects: Sequence[dict[str, Any]], known: Collection[str], path: str) -> None:
    """Note fields of the messages or answers of a row that nobody reads.

    Args:
        known: fields that are read, or looked at by `read_marks`; path: of the objects, such as "messages[]".
    """
    for name in dict.fromkeys(name for one in objects for name in one if name not in known):
        said = [(one.get("role", one.get("from")), one.get(name)) for one in objects]
        speakers = [speaker for speaker, value in said if not is_blank(value)]
        some = any(is_blank(value) and speaker in speakers for speaker, value in said[1:])  # the first has no parent
        if _says_wanted(name, _TRAINED, _MASKED) is None and (some or _last(name) not in _NAMES["places"]):
            row.within[f"{path}.{name}"] = list({repr(value): value for _, value in said}.values()), some


def doubt_answers(row: Row, answers: Sequence[Any]) -> None:
    """Doubt a row with answers, texts or objects, that say they are unwanted or weigh; note their other fields."""
    objects = [answer for answer in answers if type(answer) is dict]
    for name, value in ((name, value) for answer in objects for name, value in answer.items()):
        if _agrees(name, value) is False:
            row.doubt(name, f'"{name}" of an answer is {shown(value)}, so it is not one to learn as it is')
    pass_over(row, objects, ("answer",), "answers[]")


def _agrees(name: str, value: Any) -> bool | None:
    """Whether a value under a name such as chosen, masked or weight says what is to be learned; None for others."""
    wanted = _says_wanted(name, _GOOD, _BAD)
    if wanted is None or not _NAMES["scores"].isdisjoint(words_of(name)):
        return None
    number = 0 if type(value) is str and value.strip().lower() in _NAMES["unwanted"] else number_of(value)
    if number is None:
        return None
    return bool(number) == wanted and (number == 1 or "weight" not in words_of(name))


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
        items, agrees = listed(value), _agrees(name, value)
        is_known = is_metadata(name, value) or (_is_bookkeeping(name) and type(value) is not bool)
        if is_blank(value) or (type(items) is not list and is_known and not _completes(name)):
            continue
        is_text = type(value) is str and agrees is number_of(value) is None
        if is_text and _repeats(value.strip(), asked if _completes(name) else texts):
            row.get(name)
        elif type(items) is list and (
            _says_wanted(name, _TRAINED, _MASKED) is not None
            or (len(items) in lengths and all(item is None or _is_share(item) for item in items))
        ):
            row.doubt(name, f'"{name}" is a list that may weigh or mask messages, and is not read')
        elif _completes(name):
            row.doubt(name, f'"{name}" is {shown(value)} that completes the request, and is not read here')
        elif agrees is False:
            row.doubt(name, f'"{name}" is {shown(value)}, so the row is not one to learn as it is')
        elif agrees:
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
    fields = row.unread()
    unread.read.update(name for name in row.names if name not in fields and not is_blank(row.value[name]))
    read = {words_of(name) for name in row.names if name not in fields}
    for name, value in fields.items():
        if words_of(name)[:-1] not in read or not is_metadata(_last(name), value):  # prompt_id and rejected_model
            count_field(unread, name, value)
    for path, (values, some) in row.within.items():
        count_field(unread, path, *values, some=some)


def count_field(unread: Unread, path: str, *values: Any, num_rows: int = 1, some: bool = False) -> None:
    """Count a field that nobody read in rows with the same values; of metadata, each of its fields.

    Args:
        path: name of a field, or "metadata.name"; some: only some messages of a row have the field.
    """
    says = dict[str, set[float | str | None]]()
    leaves = [leaf for value in values for leaf in _leaves(path, path.rpartition(".")[2], value)]
    for field, name, value in leaves:
        if not (is_blank(name) or is_blank(value)):
            says.setdefault(field, set()).update(_said(name, value, some))
    for field, said in says.items():
        unread.add(field, num_rows, said)


def _said(name: str, value: Any, some: bool) -> set[float | str | None]:
    """What a value is, as `Unread` has it."""
    quiet, number = _is_quiet(name, value), number_of(value)
    is_usual = len(words_of(name)) > 1 or _last(name) in _NAMES["dates"]
    said: set[float | str | None] = {USUAL} if is_usual else set()
    if number is None:
        is_mark = _is_bookkeeping(name) and not _is_telling(name, str(value).strip())
        said.add("" if quiet else 0.5 if is_mark else None)
    else:
        said.add(number if number in (0, 1) else 0.5 if 0 < number < 1 else None)
    return said if quiet and not (some and is_usual) else said | {LOUD}
