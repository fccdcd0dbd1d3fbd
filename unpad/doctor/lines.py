"""The examination as text for 80 columns, or a narrower terminal, and its sweep of learning rates as an SVG file."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from unpad.doctor.trials.sweep import HIGHEST, LOWEST, Sweep
from unpad.doctor.words import Language, sentences, severity_name, word
from unpad.run.report.svg import WIDE, Axes, Curve, picture
from unpad.storage import write_atomic
from unpad.terminal.finding import Finding
from unpad.terminal.table import cells, columns, wrapped

INDENT = 4
COLUMNS, ROWS = 60, 9  # of the drawing, at most
LEFT = 7  # cells of what stands at its left
MARK = 6  # cells of a learning rate below it, with a blank


def finding_lines(number: int, finding: Finding, language: Language) -> list[str]:
    """A finding: its rank, severity and fields, the reason, and what to do."""
    reason, advice = sentences(finding, language)
    head = f"{number:>2}  {severity_name(finding.severity, language)}  {', '.join(finding.fields)}"
    return [head, *wrapped(reason, indent=INDENT), *wrapped(f"{word('do', language)}{advice}", indent=INDENT)]


def fact_lines(facts: list[tuple[str, str]]) -> list[str]:
    """Names with their values, which continue below themselves."""
    column = max((cells(name) for name, _ in facts), default=0) + 2
    lines = []
    for name, value in facts:
        first, *more = wrapped(value, columns() - column)
        lines.append(f"{name}{' ' * (column - cells(name))}{first}")
        lines += [" " * column + line for line in more]
    return lines


def drawing(sweep: Sweep, rate: float, language: Language) -> list[str]:
    """The sweep as characters: the loss over the learning rate, the range, and the recipe's own rate."""
    if not len(sweep.rates):
        return []
    decades, wide = math.log10(HIGHEST / LOWEST), min(COLUMNS, columns() - LEFT)

    def column(value: float) -> int:
        return min(max(round(math.log10(value / LOWEST) / decades * (wide - 1)), 0), wide - 1)

    top, bottom = max(1.0, min(float(sweep.losses.max()), 1.5)), float(sweep.losses.min())
    canvas = np.full((ROWS, wide), " ")
    for value, loss in zip(sweep.rates, sweep.losses, strict=True):
        height = (top - min(loss, top)) / max(top - bottom, 1e-12)
        canvas[round(height * (ROWS - 1)), column(float(value))] = "*"
    lines = [word("sweep", language, steps=len(sweep.rates))]
    for row, cells_of_row in enumerate(canvas):
        level = top - row / (ROWS - 1) * (top - bottom)
        lines.append(f"{level:5.0%} |{''.join(cells_of_row)}".rstrip())
    axis = ["-"] * wide
    if sweep.low is not None and sweep.high is not None:
        axis[column(sweep.low) : column(sweep.high) + 1] = "=" * (column(sweep.high) - column(sweep.low) + 1)
    lines.append(f"      +{''.join(axis)}")
    room = min(wide + MARK, columns() - LEFT)
    marks = [" "] * room
    for power in range(0, round(decades) + 1, math.ceil(MARK * decades / wide)):
        value = LOWEST * 10**power
        at = min(column(value), room - MARK + 1)
        marks[at : at + MARK - 1] = f"{value:.0e}"
    lines.append(f"{' ' * LEFT}{''.join(marks)}".rstrip())
    at, said = LEFT + column(min(max(rate, LOWEST), HIGHEST)), word("recipe", language, rate=rate)
    fits = at + 2 + cells(said) <= columns()
    lines.append(f"{' ' * at}^ {said}" if fits else f"{' ' * (at - 1 - cells(said))}{said} ^")
    return lines


HIGHEST_DRAWN = 1.5  # of the first loss: what diverges would press the rest flat


def write_picture(path: Path, sweep: Sweep, rate: float, language: Language) -> None:
    """Draw the loss over the learning rate, with the range and the recipe's own rate.

    Raises:
        DiskError: the file cannot be written.
    """
    shown = sweep.losses <= HIGHEST_DRAWN
    x, y = np.log10(sweep.rates[shown]), sweep.losses[shown]
    marks = [(word("recipe", language, rate=rate), float(np.log10(rate)))]
    if sweep.low is not None and sweep.high is not None:
        marks += [(f"{end:.1e}", float(np.log10(end))) for end in (sweep.low, sweep.high)]
    title = word("sweep", language, steps=len(sweep.rates))
    axes = Axes(size=WIDE, begin=float(np.log10(LOWEST)), powers=True, over=word("rate", language))
    write_atomic(path, picture(title, Curve("main", [(x, y)]), axes, marks))
