"""A field that is read beside a longer text of the same rows that is not."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.doctor.sentences import rich_sentences
from tests.helpers.families import rewritten, text, write_rows
from unpad.doctor.data.unread import check_unread
from unpad.doctor.subject import TimeBudget, open_subject
from unpad.terminal.finding import Finding

Rows = list[dict[str, str]]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNPAD_CACHE", str(tmp_path / "cache"))


def written(folder: Path, rows: Rows, kind: str) -> str:
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        return write_rows(path, rows)
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
    return str(path)


def found(tmp_path: Path, rows: Rows, field: str | None, kind: str = "jsonl") -> list[Finding]:
    recipe = text(tmp_path / "data")
    source = {"path": written(tmp_path / "data", rows, kind), **({"field": field} if field else {})}
    recipe = rewritten(recipe, {"data": {"text": [source], "chat": []}})
    return check_unread(open_subject(str(recipe), (), TimeBudget(600.0, time.monotonic)))


def articles(short: str) -> Rows:
    """Rows of an address, a title or a summary, beside an article."""
    said = rich_sentences(120)
    first = {"address": "https://example.org/{i}/{word}.html", "title": "{word} of the {i}th", "summary": "{line}"}
    return [
        {
            short: first[short].format(i=i, word=line.split()[0], line=line),
            "article": " ".join(said[j % 120] for j in range(i, i + 5)),
            "tag": "news",
        }
        for i, line in enumerate(said)
    ]


@pytest.mark.promise("doctor.questions")
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize("short", ["address", "title"])
def test_a_longer_text_beside_what_is_read_is_told(short: str, kind: str, tmp_path: Path) -> None:
    (one,) = found(tmp_path, articles(short), short, kind)
    assert (one.code, one.severity, one.values["other"]) == ("unread_text", "warning", "article")


def test_sentences_that_are_read_were_chosen(tmp_path: Path) -> None:
    (one,) = found(tmp_path, articles("summary"), "summary")
    assert one.severity == "note"


@pytest.mark.parametrize("short", ["address", "title", "summary"])
def test_the_longest_text_has_no_finding(short: str, tmp_path: Path) -> None:
    assert found(tmp_path, articles(short), "article") == []


def test_words_that_all_rows_share_are_no_text(tmp_path: Path) -> None:
    licence = "You may copy and change this, if you name all of those who wrote it, and give it on in the same way"
    rows = [{"text": f"word {i}", "licence": licence} for i in range(60)]
    assert found(tmp_path, rows, None) == []
