"""Sequences as the model got them: the page of `unpad data show`, and the section of a run's report on `shown.json`."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from unpad.errors import CheckpointError
from unpad.run.report.section import PageSection, document, table
from unpad.storage import write_atomic
from unpad.storage.reading import read_shaped

SHOWN = "shown.json"  # of a run
STYLE = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
KEY = "<p class=key><b>Learnt tokens</b>, context, and <i>special tokens</i>.</p>"


def keep_shown(folder: Path, sequences: Sequence[dict[str, Any]]) -> None:
    """Write sequences, as `Shown.to_json`, into a run.

    Raises:
        DiskError: they cannot be written.
    """
    write_atomic(folder / SHOWN, json.dumps(sequences, ensure_ascii=False))


def draw(folder: Path) -> list[PageSection]:
    """The sequences of a run; nothing without the file, or with one that cannot be read."""
    try:
        cards = _cards(read_shaped(folder / SHOWN, list[dict[str, Any]]))
    except (CheckpointError, LookupError, TypeError, ValueError, AttributeError):
        return []
    return [PageSection("What was learnt", "the first sequences as the model got them", table=cards, folded=True)]


def page(title: str, line: str, sequences: Sequence[dict[str, Any]]) -> str:
    """A page of sequences, as `Shown.to_json`; `line` stands above them."""
    head = f"<header><h1>{escape(title)}</h1><p>{escape(line)}</p></header>"
    return document(escape(title), STYLE, head + _cards(sequences))


def _cards(sequences: Sequence[dict[str, Any]]) -> str:
    key = KEY if any(one["spans"] for one in sequences) else ""
    css = " class=seen" if all(one["pictures"] for one in sequences) else ""
    return f"{key}<div{css}>{''.join(map(_card, sequences))}</div>"


def _card(one: dict[str, Any]) -> str:
    facts = "".join(f"<p>{escape(fact)}</p>" for fact in one["facts"])
    pictures = "".join(f'<img alt="" src="{escape(picture)}">' for picture in one["pictures"])
    text = f"<pre>{''.join(map(_span, one['spans']))}</pre>" if one["spans"] else ""
    rows = table(one["heads"], one["rows"], range(len(one["heads"]))) if one["rows"] else ""
    return f"<section class='box seq'><h3>{escape(one['where'])}</h3>{facts}{pictures}{text}{rows}</section>"


def _span(span: dict[str, Any]) -> str:
    text = escape(span["text"])
    text = f"<i>{text}</i>" if span["special"] else text
    return f"<b>{text}</b>" if span["learnt"] else text
