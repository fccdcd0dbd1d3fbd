"""Names of fields and columns as people write them, layouts of dates, and advice on a table of unknown columns."""

from __future__ import annotations

import re
import shlex
import tomllib
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from unpad.errors import nearest

Cells = Mapping[str, Any]  # of a row, by their names
Advise = Callable[[Sequence[Cells]], str]  # first rows of a file -> what to do about it

# Fields of conversations, and of rows with one request and one reply, such as Alpaca's instruction, input and output.
MESSAGES = ("messages", "conversations")
REQUESTS = ("instruction", "prompt", "question")
REPLIES = ("output", "completion", "response", "answer")

_OF_TALKS = frozenset((*MESSAGES, *REQUESTS, *REPLIES, "system", "history", "tools", "chosen", "rejected"))
COLUMN = "COLUMN"  # stands for a name that the user knows

# Names that show that a line is the header of a table.
_OTHERS = "text chosen rejected image id label review comment content body title split"
COLUMNS = frozenset((*MESSAGES, *REQUESTS, *REPLIES, *_OTHERS.split()))

_NAMES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
EVENT_LIKE = {field: frozenset(names.split()) for field, names in _NAMES["events"].items()}  # as `folded` spells them
ID_LIKE = EVENT_LIKE["id"]
_UNITS = {"minute": "minutes", "minutes": "minutes", "day": "days", "days": "days", "tag": "days", "tage": "days"}
_NUMBER = re.compile(r"\s*[<>]?\s*[+-]?(\d+(?:[.,]\d*)?|[.,]\d+)([eE][+-]?\d+)?\s*")
_SENTENCE = re.compile(r"\S+(\s+\S+){2,}[.!]|\w+[。！]")  # a question may be the name of a column
_FILLERS = re.compile(r"[\s_\u200b-\u200d\u2060\ufeff]+")
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")  # endings of files that are read
MOST_READ = 200  # characters of a name or a cell that show what it is


def folded(name: str) -> str:
    """A name without what people spell in different ways: capitals, blanks, underscores, and characters of no width."""
    return _FILLERS.sub("", unicodedata.normalize("NFKC", name)).casefold()


class SpellingError(Exception):
    """Two fields are other spellings of one known field; its arguments are both, and the known name."""


@lru_cache(maxsize=64)
def spelling(present: tuple[str, ...], known: tuple[str, ...]) -> dict[str, str]:
    """Fields that are known ones in another spelling, with the known name of each.

    A field of the exact name comes first: beside `text`, `Text` is a field of its own.

    Raises:
        SpellingError: two fields could be the same known one.
    """
    missing = {folded(name): name for name in known if name not in present}
    spelled: dict[str, str] = {}
    for name in present:
        if name in known or (meant := missing.get(folded(name))) is None:
            continue
        if other := next((written for written, taken in spelled.items() if taken == meant), None):
            raise SpellingError(other, name, meant)
        spelled[name] = meant
    return spelled


def setting(kind: str, path: Path | str, **fields: str | Sequence[str]) -> str:
    """Override that names fields of a source, quoted for a shell: 'data.text={path: a.csv, field: body}'."""
    values = {
        name: in_yaml(value) if isinstance(value, str) else f"[{', '.join(map(in_yaml, value))}]"
        for name, value in {"path": str(path), **fields}.items()
    }
    return shlex.quote(f"data.{kind}={{{', '.join(f'{name}: {value}' for name, value in values.items())}}}")


def in_yaml(text: str) -> str:
    """A text as a value inside braces of YAML, quoted where it would be read as something else."""
    plain = re.fullmatch(r"[^\W\d][\w./ -]*|[./~][\w./ -]+", text) and text == text.strip()
    words = ("null", "true", "false", "yes", "no", "on", "off", "y", "n", "~")
    return text if plain and text.lower() not in words else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def looks_like_data(names: Sequence[str]) -> bool:
    """True if the first row of a table seems to be one of its rows rather than the names of its columns."""
    begun = [name[:MOST_READ].strip() for name in names]
    return any(
        _NUMBER.fullmatch(name) or is_date_like(name) or len(name.split()) > 6 or _SENTENCE.fullmatch(name)
        for name in begun
    )


# --------------------------------------------------------------------------- dates


_DAYS = (
    *("%Y-%m-%d", "%Y/%m/%d", "%Y.%m.%d", "%Y%m%d", "%Y年%m月%d日"),
    *("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y"),
    *("%d.%m.%y", "%d/%m/%y", "%m/%d/%y", "%d-%m-%y"),
    *("%d %b %Y", "%d-%b-%Y", "%d-%b-%y", "%d%b%Y", "%b %d, %Y", "%d %B %Y", "%B %d, %Y"),
)
_CLOCKS = ("%H:%M", "%H:%M:%S", "%I:%M %p", "%I:%M%p", "%I:%M:%S %p", "%H.%M", "%H:%M:%S.%f", "%H:%M:%S%z", "%H%M")
_WIDTHS = {
    "Y": r"\d{4}", "m": r"\d{1,2}", "d": r"\d{1,2}", "y": r"\d{2}", "b": "[A-Za-z]{3}", "B": "[A-Za-z]{3,9}",
    "H": r"\d{1,2}", "I": r"\d{1,2}", "M": r"\d{2}", "S": r"\d{2}", "p": "[AaPp][Mm]", "f": r"\d{1,6}",
    "z": r"(?:Z|[+-]\d{2}:?\d{2})",
}  # fmt: skip
_JOINTS = (" ", "T", ", ", ":", "  ", "")
MOST_TRIED = 20_000  # different texts that are held against a layout
ENOUGH = 0.9  # share of the texts that a layout must fit

# What may be shown of a text that should be a date: digits, signs, names of months and zones; nothing else identifies
# so little. A bare number may be an id.
_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}\.?"
_DATE_LIKE = re.compile(
    rf"(?i)\s*(?:\d{{1,4}}\s?[-/.年]\s?\d{{1,2}}\s?[-/.月]\s?\d{{1,4}}日?|\d{{1,2}}[ .-]*{_MONTH}[ ,.-]*\d{{2,4}}"
    rf"|{_MONTH} ?\d{{1,2}},? ?\d{{2,4}})(?:[ T,:]*\d{{1,2}}[:.]\d{{2}}(?:[:.]\d{{2}}(?:\.\d{{1,9}})?)?)?"
    r"\s?(?:[ap]\.?m\.?)?\s?(?:Z|UTC|[+-]\d{2}:?\d{2})?\s*"
)


def is_date_like(text: str) -> bool:
    """True for a text that is written like a date, whether or not there is such a day."""
    return _DATE_LIKE.fullmatch(text) is not None


def parse(text: str, layout: str) -> datetime | None:
    """A time in a layout of strptime; None if the text is not in it."""
    try:
        return datetime.strptime(text.strip(), layout)
    except ValueError:
        return None


def layouts_of(texts: Collection[str]) -> list[str]:
    """The common layouts that fit a column, as strptime writes them; several where days and months look alike.

    Args:
        texts: the different texts of the column.
    """
    tried = [text for text in texts if text.strip()][:MOST_TRIED]
    if not tried:
        return []
    first = next((text for text in tried if is_date_like(text)), tried[0]).strip()
    known = [layout for layout, pattern in _patterns() if pattern.fullmatch(first)]
    counts = {
        layout: sum(parse(text, layout) is not None for text in tried) for layout in known if parse(first, layout)
    }
    most = max(counts.values(), default=0)
    if most < ENOUGH * len(tried):
        return []
    best = [layout for layout, number in counts.items() if number == most]
    with_century = [layout for layout in best if "%Y" in layout]
    readings: dict[tuple[datetime | None, ...], str] = {}  # of all texts, and the first layout that reads them so
    for layout in with_century or best:
        readings.setdefault(tuple(parse(text, layout) for text in tried), layout)
    return list(readings.values())


@cache
def _patterns() -> list[tuple[str, re.Pattern[str]]]:
    """Every known layout with an expression that its texts match: strptime compiles each layout anew, which is slow."""
    layouts = [*_DAYS, *(day + joint + clock for day in _DAYS for joint in _JOINTS for clock in _CLOCKS)]
    return [
        (layout, re.compile(re.sub(r"\\?%[A-Za-z]", lambda match: _WIDTHS[match[0][-1]], re.escape(layout))))
        for layout in layouts
    ]


def layout_advice(texts: Collection[str]) -> str:
    """Setting that reads a column of dates, or what keeps one from being proposed; "" where they are in no common
    layout."""
    layouts = layouts_of(texts)
    if not layouts:
        return ""
    if len(layouts) == 1:
        return f'unit: timestamp, format: "{layouts[0]}"'
    either = " or ".join(f'"{layout}"' for layout in layouts[:3])
    return f"unit: timestamp, and format: {either}: no row tells the day from the month, so say which"


# --------------------------------------------------------------------------- advice


def advice(kind: str, path: Path | str, rows: Sequence[Cells], *, asked: dict[str, str] | None = None) -> str:
    """Advise on rows without the fields of a kind: the setting that names the right one, where one is likely.

    Args:
        kind: section of the recipe's `data` that reads them; "" where `unpad data check` is to find it out.
        rows: the first of them.
        asked: fields that the source names, by what they are.
    """
    present = list(dict.fromkeys(name for row in rows for name in row))
    if close := _meant(asked or {}, present):
        return f'did you mean "{", ".join(close.values())}"? {setting(kind or "text", path, **(asked or {}) | close)}'
    if looks_like_data(present):
        return "begin the file with a line of names for its columns, such as text,label"
    if kind in ("images", "text", "") and (pictures := _fields_of(rows, is_picture)):
        return _as_pictures(kind, path, rows, pictures[0])
    if kind in ("chat", "text", "") and (talks := _fields_of(rows, _is_conversation)):
        way = f'if "{talks[0]}" holds the conversations: {setting("chat", path, field=talks[0])}'
        return way if len(talks) == 1 else "two replies to one request? name the better chosen, the other rejected"
    if kind not in ("text", "chat", ""):
        return f"name the field of the prompt: {setting(kind, path, field=COLUMN)}" if kind == "pairs" else ""
    names = set(map(folded, present))
    if kind != "chat":
        if names & {*REQUESTS, "input"} and names & set(REPLIES):
            return f"the rows are requests with replies: {shlex.quote(f'data.chat={path}')}"
        if as_events := _as_events(path, rows):
            return as_events
    return _by_columns(kind, path, rows)


def _by_columns(kind: str, path: Path | str, rows: Sequence[Cells]) -> str:
    """Advice that names columns with texts where it is clear which is which, else leaves their names to the user."""
    texts, others = _columns(rows)
    if not texts:
        return "" if kind == "text" else "write rows with prompt and completion, with messages, or with text"
    is_pair, is_one = len(texts) == 2 and not others, len(texts) == 1 and _OF_TALKS.isdisjoint(others)
    request, reply = texts if is_pair else (COLUMN, COLUMN)
    field = max(texts, key=texts.__getitem__) if is_pair or is_one else COLUMN
    ways = []
    if kind != "text" and (is_pair or not is_one):
        which = f'if "{request}" is the request and "{reply}" the reply: ' if is_pair else "name the columns: "
        ways.append(which + "unpad train chat " * (not kind) + setting("chat", path, prompt=request, reply=reply))
    if kind != "chat":
        which = f'if "{field}" is the text: ' if is_pair or is_one else "name the column of a text: "
        ways.append(which + "unpad train small " * (not kind) + setting("text", path, field=field))
    return "; ".join(ways)


def _meant(asked: Mapping[str, str], present: list[str]) -> dict[str, str]:
    """The first field that rows lack of those that a source names, with the name of the nearest that they have."""
    for what, name in asked.items():
        if name not in present and nearest(name, present).startswith("did you mean"):
            return {what: nearest(name, present).removeprefix("did you mean ").rstrip("?").split(" or ")[0]}
    return {}


def _columns(rows: Sequence[Cells]) -> tuple[dict[str, int], list[str]]:
    """Fields with texts of several words, and the characters of each; and the others, but for ids and dates.

    A field of conversations is one of the others: it is known what it is, but not what the texts beside it are.
    """
    texts, others = dict[str, int](), dict[str, None]()
    for name, value in ((name, value) for row in rows for name, value in row.items() if value not in ("", None)):
        is_text = isinstance(value, str) and (" " in value.strip() or len(value) > 20 or not value.isascii())
        if folded(name) in _OF_TALKS:
            others[name] = None
        elif is_text and not is_date_like(value):
            texts[name] = texts.get(name, 0) + len(value)
        elif not folded(name).endswith("id") and not (isinstance(value, str) and is_date_like(value)):
            others[name] = None
    return texts, [name for name in others if name not in texts]


def _is_conversation(value: object) -> bool:
    turns = value if isinstance(value, list) else []
    keys = [{folded(key) for key in turn} for turn in turns if isinstance(turn, dict)]
    return 0 < len(keys) == len(turns) and all(key & {"role", "from"} and key & {"content", "value"} for key in keys)


def is_picture(value: object) -> bool:
    """True for a text that ends like the name of a picture."""
    return isinstance(value, str) and value.lower().endswith(PICTURES)


def _fields_of(rows: Sequence[Cells], is_it: Callable[[object], bool]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name, value in row.items() if is_it(value)))


def _as_pictures(kind: str, path: Path | str, rows: Sequence[Cells], field: str) -> str:
    """Advice on a table of pictures, of which `field` has the files."""
    rename = "rename the column of the classes to label (one class a picture), and "
    train = "unpad train images " * (not kind) + setting("images", path, field=field)
    return f'if "{field}" holds the pictures: {rename * all("label" not in row for row in rows)}{train}'


# --------------------------------------------------------------------------- tables of patients


def _as_events(path: Path | str, rows: Sequence[Cells]) -> str:
    """Advice on a table of events of patients; "" for another table."""
    what, present = "a table of patients' events (docs/patients.md)?", [name for row in rows for name in row]
    columns = {one: next((name for name in present if folded(name) in known), "") for one, known in EVENT_LIKE.items()}
    if not all(columns.values()):
        return ""
    if not str(path).lower().endswith((".csv", ".tsv", ".parquet")):
        return f"{what} write it as CSV, with columns {', '.join(columns.values())}"
    train = f"unpad train events_labels {_events_setting(path, rows, columns)} events.labels=null"
    labels = f"events.labels={{path: LABELS.csv, id: {in_yaml(columns['id'])}, label: COLUMN}}"
    return f"{what} {train}; to predict outcomes, in place of null: {shlex.quote(labels)}"


def _events_setting(path: Path | str, rows: Sequence[Cells], columns: dict[str, str]) -> str:
    """Override that reads a table of events by its columns."""
    times = {str(row.get(columns["time"], "")) for row in rows} - {""}
    form = {"unit": "timestamp"}
    if all(map(_NUMBER.fullmatch, times)):
        form = {"unit": _UNITS.get(folded(columns["time"]), "hours")}
    elif len(layouts := layouts_of(times)) == 1:
        form["format"] = layouts[0]
    if any(re.fullmatch(r"-?\d+,(\d{1,2}|\d{4,})", str(row.get(columns["value"]))) for row in rows):
        form["decimal"] = ","
    return setting("events", path, **columns, **form)
