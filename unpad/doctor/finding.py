"""Findings: a decorator that gives a check its code, severity and words in two languages, and their ranking."""

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from string import Formatter
from typing import Any, Literal, ParamSpec

from unpad.terminal.table import wrapped

Severity = Literal["fault", "warning", "note"]
Language = Literal["en", "zh"]
Words = tuple[str, str]
Value = float | int | str | Words  # a pair: words in English and in Chinese
SEVERITIES: dict[Severity, Words] = {
    "fault": ("FAULT", "故障"),
    "warning": ("warning", "警告"),
    "note": ("note", "提示"),
}
INDENT = 4
P = ParamSpec("P")


def level(is_fault: bool) -> Severity:
    """Severity of a trouble that is a fault where it is large."""
    return "fault" if is_fault else "warning"


class Found:
    """Result of a check that found something.

    Args:
        number: the measured value, `{number}` in the words; NaN if the values describe it.
        fields: fields of the recipe, or files, to change, the most likely first.
        severity: replaces that of the finding.
        values: further values in the words, by name; others are left out.
    """

    def __init__(self, number: float, *fields: str, severity: Severity | None = None, **values: Value) -> None:
        self.number, self.fields, self.severity, self.values = number, fields, severity, values


@dataclass(frozen=True)
class Finding:
    """A thing that is wrong.

    Args:
        code: of its check.
        severity: fault: a run cannot learn, or is not safe; warning: it learns worse or slower, or can be lost; note:
            worth knowing.
        number, fields, values: see `Found`.
        explains: codes of findings that only follow from this one.
        words: reason and advice, in English and in Chinese.
    """

    code: str
    severity: Severity
    number: float
    fields: tuple[str, ...]
    values: dict[str, Value]
    explains: frozenset[str]
    words: tuple[Words, Words]

    def said(self, language: Language) -> dict[str, float | str]:
        """The values in a language."""
        place = int(language == "zh")
        return {name: value[place] if isinstance(value, tuple) else value for name, value in self.values.items()}

    def sentences(self, language: Language) -> Words:
        """The reason, with its number, and what to do."""
        values, words = self.said(language), self.words[int(language == "zh")]
        reason, advice = (text.format(number=self.number, **values) for text in words)
        return reason, advice

    def lines(self, rank: int, language: Language) -> list[str]:
        """Rank, severity and fields, then the reason and the advice, as text for the terminal."""
        place = int(language == "zh")
        reason, advice = self.sentences(language)
        head = f"{rank:>2}  {SEVERITIES[self.severity][place]}  {', '.join(self.fields)}"
        do = ("do: ", "办法：")[place]
        return [head, *wrapped(reason, indent=INDENT), *wrapped(f"{do}{advice}", indent=INDENT)]

    def to_json(self, language: Language) -> dict[str, Any]:
        """The finding for programs."""
        reason, advice = self.sentences(language)
        number = None if math.isnan(self.number) else self.number
        figures = {"number": number, "fields": list(self.fields), "values": self.said(language)}
        return {"code": self.code, "severity": self.severity, **figures, "reason": reason, "do": advice}


def finding(
    code: str, severity: Severity = "warning", *, explains: Iterable[str] = (), en: Words, zh: Words
) -> Callable[[Callable[P, Found | None]], Callable[P, list[Finding]]]:
    """Make a check of a function: called with the same arguments, it returns a list of its finding, or an empty one.

    Args:
        explains: codes of findings that are left out beside this one, as they follow from it.
        en, zh: reason and advice with values in braces, the same in both languages.
    """
    names = [{name for text in words for _, name, _, _ in Formatter().parse(text) if name} for words in (en, zh)]
    assert names[0] == names[1], f"{code}: the languages differ in {names[0] ^ names[1]}"

    def decorate(check: Callable[P, Found | None]) -> Callable[P, list[Finding]]:
        @wraps(check)
        def checked(*args: P.args, **kwargs: P.kwargs) -> list[Finding]:
            result = check(*args, **kwargs)
            if result is None:
                return []
            values = {name: value for name, value in result.values.items() if name in names[0]}
            level = result.severity or severity
            return [Finding(code, level, result.number, result.fields, values, frozenset(explains), (en, zh))]

        return checked

    return decorate


def ranked(findings: list[Finding]) -> list[Finding]:
    """Findings by severity, in their order otherwise, without those that one above a note explains."""
    explained = {code for cause in findings if cause.severity != "note" for code in cause.explains}
    order, kept = list(SEVERITIES), [item for item in findings if item.code not in explained]
    return sorted(kept, key=lambda item: order.index(item.severity))


def serious(findings: list[Finding]) -> list[Finding]:
    """Findings above a note."""
    return [item for item in findings if item.severity != "note"]


def listed(findings: list[Finding], language: Language) -> list[str]:
    """All findings by their rank as text, each after a blank line."""
    return [line for rank, item in enumerate(findings, 1) for line in ("", *item.lines(rank, language))]


def language_of(asked: str | None) -> Language:
    """The language that is asked for; otherwise that of the locale, English where it is neither of the two."""
    if asked is not None:
        return "zh" if asked == "zh" else "en"
    given = next((value for name in ("LC_ALL", "LC_MESSAGES", "LANG") if (value := os.environ.get(name))), "")
    return "zh" if given.lower().startswith("zh") else "en"
