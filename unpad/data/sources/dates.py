"""Dates and times in texts: layouts that are common in tables, and which of them a column may have."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from datetime import datetime
from functools import cache

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
    counts = {layout: _num_fitting(tried, layout) for layout in known if parse(first, layout)}
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
        (layout, re.compile(re.sub(r"\\?%[A-Za-z]", lambda found: _WIDTHS[found[0][-1]], re.escape(layout))))
        for layout in layouts
    ]


def _num_fitting(texts: Sequence[str], layout: str) -> int:
    return sum(parse(text, layout) is not None for text in texts)


def _different(texts: Sequence[str], layouts: Sequence[str]) -> list[str]:
    """One of the layouts that read all texts alike, the first."""
    readings: dict[tuple[datetime | None, ...], str] = {}
    for layout in layouts:
        readings.setdefault(tuple(parse(text, layout) for text in texts), layout)
    return list(readings.values())


def layout_advice(texts: Collection[str]) -> str:
    """Setting that reads a column of dates, or what keeps one from being proposed; "" where they are in no common
    layout."""
    found = layouts_of(texts)
    if not found:
        return ""
    if len(found) == 1:
        return f'unit: timestamp, format: "{found[0]}"'
    either = " or ".join(f'"{layout}"' for layout in found[:3])
    return f"unit: timestamp, and format: {either}: no row tells the day from the month, so say which"
