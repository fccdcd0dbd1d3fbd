"""Names of fields and columns as people write them: near spellings of the known ones, and the setting that names
another."""

from __future__ import annotations

import json
import re
import shlex
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from unpad.errors import nearest

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
    return _different(tried, with_century or best)


@cache
def _patterns() -> list[tuple[str, re.Pattern[str]]]:
    """Every known layout with an expression that its texts match: strptime compiles each layout anew, which is slow."""
    layouts = [*_DAYS, *(day + joint + clock for day in _DAYS for joint in _JOINTS for clock in _CLOCKS)]
    return [
        (layout, re.compile(re.sub(r"\\?%[A-Za-z]", lambda match: _WIDTHS[match[0][-1]], re.escape(layout))))
        for layout in layouts
    ]


def _different(texts: Sequence[str], layouts: Sequence[str]) -> list[str]:
    """One of the layouts that read all texts alike, the first."""
    readings: dict[tuple[datetime | None, ...], str] = {}
    for layout in layouts:
        readings.setdefault(tuple(parse(text, layout) for text in texts), layout)
    return list(readings.values())


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

# Names that tables of hospitals give to their columns, as `folded` spells them.
_ID_LIKES = (
    "id subjectid mrn patient patientid patid patientno patientnr patientnumber patientkey pid pat person personid "
    "subject case caseid caseno hadmid stayid icustayid encounter encounterid admissionid visitid studyid fallnr "
    "patientennr 患者id 病人id 病历号 住院号"
)
ID_LIKE = frozenset(_ID_LIKES.split())
_TIME_LIKES = (
    "time date datetime timestamp charttime storetime takenat collectedat collected starttime eventtime resulttime "
    "when minute minutes hour hours day days datum zeit zeitpunkt stunde stunden tag tage 时间 日期"
)
_UNITS = {"minute": "minutes", "minutes": "minutes", "day": "days", "days": "days", "tag": "days", "tage": "days"}
_CODE_LIKES = (
    "code test testname variable item itemid lab labtest analyte parameter measurement concept conceptid component "
    "vital icd atc 项目 检验项目"
)
_VALUE_LIKES = "value result valuenum numericvalue resultvalue reading valueasnumber ergebnis wert 结果 数值"
EVENT_LIKE = {
    "id": ID_LIKE,
    "time": frozenset(_TIME_LIKES.split()),
    "code": frozenset(_CODE_LIKES.split()),
    "value": frozenset(_VALUE_LIKES.split()),
}
_NUMBER = re.compile(r"\s*[<>]?\s*[+-]?(\d+(?:[.,]\d*)?|[.,]\d+)([eE][+-]?\d+)?\s*")
_SENTENCE = re.compile(r"\S+(\s+\S+){2,}[.!]|\w+[。！]")  # a question may be the name of a column
_FILLERS = re.compile(r"[\s_\u200b-\u200d\u2060\ufeff]+")
MOST_CODE, LEAST_WIDE = 60, 3  # characters of a code or an id; columns of measurements that have one each
_OMOP = re.compile(
    r"(?:measurement|condition|procedure|observation|device|drugexposure|visit)(?:(conceptid)|(?:start)?date(?:time)?)"
)
# Public sets of other forms: the fields that tell them, what they are, their rows in Python as `rewrite` has it, and
# where these go.
_SETS = (
    ({"resourceType", "subject"}, "resources of FHIR? the results as a table (docs/patients.md)",
     '[{"id": r["subject"]["reference"], "time": r["effectiveDateTime"], "code": r["code"]["coding"][0]["code"], '
     '"value": r.get("valueQuantity", {}).get("value")} for r in x if "effectiveDateTime" in r]', "events.csv"),
    ({"query", "tools", "answers"}, "requests with calls of tools? as conversations, the tools in the system text",
     '[{"messages": [{"role": k, "content": r[n]} for k, n in '
     '(("system", "tools"), ("user", "query"), ("assistant", "answers"))]} for r in x]', "rows.jsonl"),
    ({"winner", "conversation_a", "conversation_b"}, "two models' replies? as pairs, ties left out",
     '[{"chosen": r["conversation_" + w], "rejected": r["conversation_" + o]} '
     'for r in x for w, o in ("ab", "ba") if r["winner"] == "model_" + w]', "pairs.jsonl"),
    ({"winner_model_a", "response_a", "response_b"}, "two models' replies? as pairs, ties left out",
     '[{"prompt": r["prompt"], "chosen": r["response_" + w], "rejected": r["response_" + o]} '
     'for r in x for w, o in ("ab", "ba") if int(r["winner_model_" + w])]', "pairs.jsonl"),
)  # fmt: skip
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


def rewrite(path: Path, rows: str, out: Path | str) -> str:
    """Command that writes other rows of a file into a new one, CSV or JSON lines by its name, and checks them.

    Args:
        rows: expression of Python for a list of them as objects, where `x` is what the file holds; those of CSV have
            equal keys.
    """
    form, name, file = path.suffix.lower(), json.dumps(str(path), ensure_ascii=False), shlex.quote(str(out))
    modules, x = {"json"}, f'list(map(json.loads, open({name}, "rb")))'
    if form == ".json":
        x = f'json.load(open({name}, "rb"))'
    elif form == ".parquet":
        modules, x = {"json", "pyarrow.parquet"}, f"pyarrow.parquet.read_table({name}).to_pylist()"
    elif form in (".csv", ".tsv"):
        modules.add("csv")
        x = f'open({name}, encoding="utf-8-sig"); d = max(",;\\t", key=x.readline().count); x.seek(0)'
        x += "; x = list(csv.DictReader(x, delimiter=d))"
    write = 'print(*map(json.dumps, y), sep="\\n")'
    if file.endswith(".csv"):
        modules |= {"csv", "sys"}
        write = "csv.writer(sys.stdout).writerows([y[0], *map(dict.values, y)])"
    code = shlex.quote(f"import {', '.join(sorted(modules))}; x = {x}; y = {rows}; {write}")
    return f"python -c {code} > {file} && unpad data check {file}"


def looks_like_data(names: Sequence[str]) -> bool:
    """True if the first row of a table seems to be one of its rows rather than the names of its columns."""
    begun = [name[:MOST_READ].strip() for name in names]
    return any(
        _NUMBER.fullmatch(name) or is_date_like(name) or len(name.split()) > 6 or _SENTENCE.fullmatch(name)
        for name in begun
    )


# --------------------------------------------------------------------------- advice


def advice(kind: str, path: Path, rows: Sequence[Cells], *, asked: dict[str, str] | None = None) -> str:
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
    if known := next((known for known in _SETS if known[0] <= set(present)), None):
        return f"{known[1]}: {rewrite(path, *known[2:])}"
    if (field := _field_of(rows, is_picture) if kind in ("images", "text", "") else None) is not None:
        return _labelled(path, rows, field)
    if (field := _field_of(rows, _is_conversation) if kind in ("chat", "text", "") else None) is not None:
        return f'if "{field}" holds the conversations: {setting("chat", path, field=field)}'
    return _as_text(kind, path, rows)


def _as_text(kind: str, path: Path, rows: Sequence[Cells]) -> str:
    """Advice on rows of texts, or of tables of patients; arguments as of `advice`."""
    if kind == "pairs":
        return f"name the field of the prompt: {setting(kind, path, field=COLUMN)}"
    if kind not in ("text", "chat", ""):
        return ""
    names = {folded(name) for row in rows for name in row}
    if kind != "chat":
        if names & {*REQUESTS, "input"} and names & set(REPLIES):
            return f"the rows are requests with replies: {shlex.quote(f'data.chat={path}')}"
        if as_events := _as_events(path, rows):
            return as_events
    return _by_columns(kind, path, rows)


def _by_columns(kind: str, path: Path, rows: Sequence[Cells]) -> str:
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
    if not isinstance(value, list) or not value:
        return False
    keys = [{folded(key) for key in turn} for turn in value if isinstance(turn, dict)]
    return len(keys) == len(value) and all(key & {"role", "from"} and key & {"content", "value"} for key in keys)


def is_picture(value: object) -> bool:
    """True for a text that ends like the name of a picture."""
    return isinstance(value, str) and value.lower().endswith(PICTURES)


def _field_of(rows: Sequence[Cells], is_it: Any) -> str | None:
    return next((name for row in rows for name, value in row.items() if is_it(value)), None)


def _labelled(path: Path, rows: Sequence[Cells], field: str) -> str:
    """Advice on a table of pictures, by what its columns or the names of the pictures hold."""
    cells = _cells(rows)
    if "label" in cells:
        return f'if "{field}" holds the pictures: {setting("images", path, field=field)}'
    names = [name.rpartition("/")[2] for name in cells.pop(field)]
    marks = [name for name, values in cells.items() if {*values} <= {"0", "1", "0.0", "1.0"}]
    joined = next((name for name, values in cells.items() if any("|" in value for value in values)), None)
    few = next((name for name, values in cells.items() if _are_few(values) and not name.lower().endswith("id")), None)
    mark = next((mark for mark in "_- " if _are_few([name.partition(mark)[0] for name in names])), None)
    name = json.dumps(joined or few or next(iter(cells), ""), ensure_ascii=False)
    if joined:
        what, label = f"{name} joins classes by |, of which the first counts", f'r[{name}].split("|")[0]'
    elif len(marks) > 1:
        what, label = "each class has a column", f"max({json.dumps(marks)}, key=lambda c: float(r[c]))"
    elif few:
        what, label = f"{name} is the class", f"r[{name}]"
    elif mark:
        what, label = "its name begins with the class", f'r[{json.dumps(field)}].split("/")[-1].split("{mark}")[0]'
    elif len(cells) == 1:
        what = f"LABELS.csv has the class beside {name}"
        label = f'{{s[{name}]: s["COLUMN"] for s in csv.DictReader(open("LABELS.csv"))}}[r[{name}]]'
    else:
        fix = "rename the column of the classes to label, and "
        return f'if "{field}" holds the pictures: {fix}{setting("images", path, field=field)}'
    taken = f'[{{**r, "image": r[{json.dumps(field, ensure_ascii=False)}], "label": {label}}} for r in x]'
    return f'if "{field}" holds the pictures and {what}: {rewrite(path, taken, path.with_name("rows.jsonl"))}'


def _cells(rows: Sequence[Cells]) -> dict[str, list[str]]:
    """Filled cells of every column, as texts."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [str(row[name]) for row in rows if row.get(name) not in (None, "")] for name in names}


def _are_few(cells: Sequence[str]) -> bool:
    """True for different texts that repeat, such as classes and codes."""
    return 1 < len({*cells}) <= len(cells) / 2


# --------------------------------------------------------------------------- tables of patients


def _as_events(path: Path, rows: Sequence[Cells]) -> str:
    """Advice on a table of events of patients, or of facts or outcomes of theirs; "" for another table."""
    nested = _field_of(rows, lambda value: isinstance(value, list) and value and isinstance(value[0], dict)) or ""
    events = [{**row, **event, nested: ""} for row in rows for event in (row.get(nested) or () if nested else [{}])]
    columns = _event_columns(events)
    if not all(columns.values()) and not _OMOP.fullmatch(folded(columns["code"])):
        kept = [columns["id"], columns["time"]]
        return _as_wide(path, rows, kept) or _as_outcomes(path, rows, kept) or _as_facts(path, rows, columns["id"])
    if path.suffix.lower() not in (".csv", ".tsv", ".parquet"):
        of = [f"{json.dumps(field)}: {'r' if name in rows[0] else 'e'}.get({json.dumps(name, ensure_ascii=False)})"
              for field, name in columns.items() if name]  # fmt: skip
        within = f" for e in r[{json.dumps(nested)}]" if nested else ""
        taken = f"[{{{', '.join(of)}}} for r in x{within}]"
        return "patients' events (docs/patients.md)? as a table: " + rewrite(path, taken, "events.csv")
    return _with_events(_item(path, rows, columns), columns["id"])


def _with_events(item: str, id: str) -> str:
    """Advice to train on a table of patients by its item of `data.events`."""
    labels = f"events.labels={{path: LABELS.csv, id: {in_yaml(id)}, label: COLUMN}}"
    train = f"unpad train events_labels {shlex.quote(f'data.events={item}')} events.labels=null"
    outcomes = f"to predict outcomes, in place of null: {shlex.quote(labels)}"
    return f"a table of patients' events (docs/patients.md)? {train}; {outcomes}"


def _item(path: Path, rows: Sequence[Cells], columns: Mapping[str, str]) -> str:
    """Item of `data.events` that reads a table by its columns."""
    times = {str(row.get(columns["time"], "")) for row in rows} - {""}
    unit = layout_advice(times)
    if all(map(_NUMBER.fullmatch, times)):
        unit = f"unit: {_UNITS.get(folded(columns['time']), 'hours')}"
    elif not unit or " or " in unit:
        unit = "unit: timestamp"
    if any(re.fullmatch(r"-?\d+,(\d{1,2}|\d{4,})", str(row.get(columns["value"]))) for row in rows):
        unit += ', decimal: ","'
    named = ", ".join(f"{field}: {in_yaml(name) if name else 'null'}" for field, name in columns.items())
    return f"{{path: {in_yaml(str(path))}, {named}, {unit}}}"


def _event_columns(rows: Sequence[Cells]) -> dict[str, str]:
    """Columns of id, time, code and value by their names, or else by what they hold; "" for each that is not found."""
    cells = _cells(rows)
    found = {field: next((name for name in cells if folded(name) in known), "") for field, known in EVENT_LIKE.items()}
    for name in reversed(cells):  # the first of each kind counts
        if omop := _OMOP.fullmatch(folded(name)):
            found["time" if omop[1] is None else "code"] = name
    if found["code"] in cells and _OMOP.fullmatch(folded(found["code"])):
        return found  # its names are all known
    if any(len(cell) > MOST_CODE for values in cells.values() for cell in values):
        return found  # texts, not codes

    def find(field: str, fits: Callable[[list[str]], bool]) -> None:
        free = (name for name, values in cells.items() if name not in found.values() and values and fits(values))
        found[field] = found[field] or next(free, "")

    find("time", lambda values: all(map(is_date_like, values)))
    find("value", lambda values: _are_numbers(values) and any(re.search("[.,]", value) for value in values))
    find("id", lambda values: 2 * len({*values}) <= len(values) and not any(" " in value for value in values))
    find("value", _are_numbers)
    if sum(_are_numbers(values) for name, values in cells.items() if name != found["id"]) < LEAST_WIDE:
        find("code", lambda values: _are_few(values) and not _are_numbers(values))
    return found


def _are_numbers(cells: Sequence[str]) -> bool:
    return all(map(_NUMBER.fullmatch, cells))


def _as_wide(path: Path, rows: Sequence[Cells], kept: list[str]) -> str:
    """Advice on a table with a column for each of three measurements or more; "" for another table.

    Args:
        kept: columns of the id and of the time, "" where there is none.
    """
    cells = _cells(rows)
    measured = [name for name in cells if name not in kept and _are_numbers(cells[name])]
    if not all(kept) or len(measured) < LEAST_WIDE:
        return ""
    id, time = (json.dumps(name, ensure_ascii=False) for name in kept)
    taken = f'[{{"id": r[{id}], "time": r[{time}], "code": k, "value": v}} '
    taken += f'for r in x for k, v in r.items() if k not in ({id}, {time}) and v not in ("", None)]'
    what = f"a column for each measurement ({', '.join(measured[:3])})? events have a row for each"
    return f"{what}: {rewrite(path, taken, 'events.csv')}"


def _as_outcomes(path: Path, rows: Sequence[Cells], kept: list[str]) -> str:
    """Advice on a table with a row for each id of patients, and with a column of 0 and 1, or dates and a column of few
    words; arguments as of `_as_wide`."""
    cells = {name: [str(row[name]) for row in rows if row.get(name) not in (None, "")] for name in rows[0]}
    ids = cells.get(kept[0], [])
    if folded(kept[0]) in ("", "id") or len(set(ids)) < len(ids):
        return ""
    few = [name for name, values in cells.items() if name not in kept and 2 <= len(set(values)) <= len(values) / 3]
    marks = [name for name in few if set(cells[name]) <= {"0", "1"}]
    dated = any(values and all(map(is_date_like, values)) for values in cells.values())
    labels = marks or [name for name in few if dated and folded(name) not in ("sex", "gender")]
    if not labels:
        return ""
    item = f"{{path: {in_yaml(str(path))}, id: {in_yaml(kept[0])}, label: {in_yaml(labels[-1])}}}"
    return f"outcomes of patients (docs/patients.md)? beside a table of their events, with events.labels: {item}"


def _as_facts(path: Path, rows: Sequence[Cells], id: str) -> str:
    """Advice on OMOP's table of persons, with a row for each; "" for another table."""
    if folded(id) != "personid":
        return ""
    facts = [name for name in rows[0] if name != id and len({row.get(name) for row in rows} - {"", None}) > 1]
    return _with_events(f"{{path: {in_yaml(str(path))}, id: {id}, static: [{', '.join(map(in_yaml, facts))}]}}", id)
