"""The words of one finding, in English and Chinese."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """The words of a finding."""

    reason: str
    advice: str
    reason_zh: str
    advice_zh: str
