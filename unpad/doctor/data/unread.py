"""Texts beside those that a recipe reads: a field of the same rows that nothing reads, and that holds much more."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from unpad.data.sources.example import BadRow
from unpad.data.sources.files import SourceFile
from unpad.data.sources.rows import rows
from unpad.data.text import TextData
from unpad.data.tokens.corpus_files import list_files
from unpad.doctor.data.writing import FINAL, UNIT
from unpad.doctor.subject import Subject
from unpad.terminal.finding import Finding, Severity, Value

MOST_ROWS, LEAST_ROWS = 400, 20  # that are looked at
PRESENT, DIFFERENT = 0.8, 0.8  # shares of the rows that have another text, and of different ones among them
MORE, MANY_WORDS = 3.0, 6.0  # times the words of what is read, and words of the other text
ENDED, SHORT = 0.3, 15.0  # share of what is read that ends with a mark, and its words: sentences were chosen
KNOWN = ("split", "group", "keywords", "id", "uid", "uuid", "url", "uri", "path", "file", "filename", "hash", "sha256")


@dataclass
class _Column:
    texts: list[str] = field(default_factory=list)

    @property
    def words(self) -> float:
        """Words with letters of a text, on average; of scripts without blanks, characters by two."""
        spoken = [one for text in self.texts for one in UNIT.findall(text) if any(map(str.isalpha, one))]
        plain = [one for one in spoken if "//" not in one and "=" not in one]
        return sum(0.5 if len(one) == 1 and one > "\u3000" else 1.0 for one in plain) / max(len(self.texts), 1)

    @property
    def ended(self) -> float:
        return sum(text.rstrip()[-1:] in tuple(FINAL) for text in self.texts) / max(len(self.texts), 1)


def check_unread(subject: Subject[TextData]) -> list[Finding]:
    """Findings on fields of rows of texts that are not read."""
    recipe, found = subject.setup.recipe, list[Finding]()
    for file in list_files(recipe, ["text"]) if recipe.data.sources("text") else []:
        if file.file.format == "text" or found:
            continue
        name, columns, num = file.file.field or "text", defaultdict[str, _Column](_Column), 0
        with suppress(OSError):
            for row in islice(rows(file.file, recipe.data, (name,), _names(file.file)), MOST_ROWS):
                value: Any = None if isinstance(row, BadRow) else row[1]
                if type(value) is dict:
                    num += 1
                    for key, text in value.items():
                        if isinstance(text, str) and text.strip():
                            columns[key].texts.append(text.strip())
        found += _compare(file.kind, name, columns, num)
    return found


def _names(file: SourceFile) -> tuple[str, ...]:
    """All columns of a parquet file, where only those that are asked for are read; else none."""
    if file.format != "parquet":
        return ()
    import pyarrow.parquet as pq

    return tuple(pq.read_schema(file.path).names)


def _compare(kind: str, name: str, columns: dict[str, _Column], num: int) -> list[Finding]:
    read = columns.get(name)
    if num < LEAST_ROWS or read is None:
        return []
    others = {
        key: one.words
        for key, one in columns.items()
        if key != name
        and key.casefold() not in KNOWN
        and len(one.texts) >= PRESENT * num
        and len(set(one.texts)) >= DIFFERENT * len(one.texts)
    }
    other = max(others, key=lambda key: others[key], default="")
    if not other or others[other] < max(MORE * read.words, MANY_WORDS):
        return []
    chosen = read.words >= SHORT or read.ended >= ENDED
    severity: Severity = "note" if chosen else "warning"
    values: dict[str, Value] = {
        "read": name,
        "other": other,
        "words": read.words,
        "shown": " ".join(read.texts[0].split())[:40],
        "beside": " ".join(columns[other].texts[0].split())[:40],
    }
    return [Finding("unread_text", severity, others[other], (f"data.{kind}.field", f"data.{kind}"), values)]
