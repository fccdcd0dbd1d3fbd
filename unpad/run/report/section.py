"""Parts of a report page that belong to one family of data or one watch, looked up by name in this folder."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from unpad.errors import SourceError
from unpad.recipes.recipe import Recipe
from unpad.run.report import svg
from unpad.storage.reading import misfit

Reading = dict[str, Any]
IN_USE = "in use"  # ends the row of the weights that verbs load, which is bold
# A browser runs no script and loads nothing for the page, regardless of the contents of the run's files.
POLICY = (
    "<meta http-equiv=Content-Security-Policy "
    "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'none'; base-uri 'none'\">"
)
STYLE = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")


def document(title: str, style: str, body: str) -> str:
    """HTML of a whole page.

    Args:
        style: CSS beside that of all pages.
    """
    return f"""<!doctype html>
<html lang=en><meta charset=utf-8>{POLICY}<meta name=viewport content="width=device-width,initial-scale=1">
<title>{title} · unpad</title>
<style>{STYLE}{svg.STYLE}{style}</style>
<main>{body}</main></html>
"""


@dataclass(frozen=True)
class Performance:
    """A measure that the page shows first, beside what a guess reaches.

    Args:
        name: of the measure, in evaluations.
        guess: the measure of an evaluation that is its value for a guess, or that value; None where it is not known.
        guessed: how the guess is made.
        is_share: whether it is told in percent.
    """

    name: str
    title: str
    guess: str | float | None = None
    guessed: str = "by chance"
    is_share: bool = False

    def shown(self, value: float) -> str:
        return f"{value:.1%}" if self.is_share else f"{value:.3f}"


@dataclass(frozen=True)
class PageSection:
    """Part of a page: a heading, and what stands below it, in this order.

    Args:
        note: beside the title, smaller.
        figures: HTML of each, as of `svg.py`.
        table: as of `table`.
        text: below all.
        folded: whether only the heading shows until a click.
    """

    title: str
    note: str = ""
    figures: Sequence[str] = ()
    table: str = ""
    text: str = ""
    folded: bool = False

    def html(self) -> str:
        """The section; empty with nothing below its heading but a note."""
        head = escape(self.title) + (f" <small>{escape(self.note)}</small>" if self.note else "")
        figures = f"<div class=plots>{''.join(self.figures)}</div>" if self.figures else ""
        text = f"<p class=none>{escape(self.text)}</p>" if self.text else ""
        below = f"{figures}{self.table}{text}"
        return f"<details><summary>{head}</summary>{below}</details>" if self.folded else f"<h2>{head}</h2>{below}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], text: Collection[int] = (0,), css: str = "") -> str:
    """HTML of a table.

    Args:
        text: places of the columns of text; others are of numbers, at the right.
        css: class of the table.
    """
    sides = [" class=l" if place in text else "" for place in range(len(heads))]

    def line(tag: str, cells: Sequence[str]) -> str:
        best = " class=best" if cells[-1].startswith(IN_USE) else ""
        shown = (f"<{tag}{side}>{escape(cell)}</{tag}>" for side, cell in zip(sides, cells, strict=True))
        return f"<tr{best}>{''.join(shown)}</tr>"

    body = line("th", heads) + "".join(line("td", row) for row in rows)
    return f"<div class=box><table{f' class={css}' if css else ''}>{body}</table></div>"


@dataclass(frozen=True)
class FamilySection:
    """Part of the page of a family: `SECTION` of `report/<family>.py`.

    Args:
        draw: sections of an evaluation, given `evaluation.json`; raises KeyError if the file lacks what is drawn; none
            by default.
        perplexity: whether exp of the loss is meaningful.
        title, adds: heading and contents announced on the page before `unpad eval` has run; empty announces nothing.
        private: whether the page shows people, so that only its owner may read it.
        performance: measures in the first places of the page.
        length_unit: unit of a sequence's length, plural; equals the second of `UNITS` of the data family, but without
            loading its libraries.
    """

    draw: Callable[[dict[str, Any]], list[PageSection]] = lambda evaluation: []
    perplexity: bool = True
    title: str = ""
    adds: str = ""
    private: bool = False
    performance: tuple[Performance, ...] = ()
    length_unit: str = "tokens"


NO_SECTION = FamilySection()


def family_section(family: str) -> FamilySection:
    """Section of a family; one without content for a family that has no file here."""
    if not (Path(__file__).parent / f"{family}.py").is_file():
        return NO_SECTION
    return import_module(f"unpad.run.report.{family}").SECTION


def part_note(evaluation: dict[str, Any]) -> str:
    """The part of the data that `evaluation.json` measures; empty if it does not say."""
    if evaluation["part"] is None:
        return ""
    note = f"These figures are of the part {evaluation['part']}"
    if best_of := evaluation["best_of"]:
        note += f", by which the weights were chosen: they are the best of {best_of} checks of the same rows"
    return f"{note}."


def readings_section(kind: str, rows: list[Reading], recipe: Recipe | None) -> list[PageSection]:
    """The readings of a watch, by `section(rows, recipe)` of `report/<kind>.py`; nothing without that file.

    Args:
        rows: of `metrics.jsonl`, at least one, in the order of the file.

    Raises:
        SourceError: the values of a row do not match the file's READING; names step and field.
    """
    if kind not in {path.stem for path in Path(__file__).parent.glob("*.py")}:
        return []
    module = import_module(f"unpad.run.report.{kind}")
    shape = getattr(module, "READING", None)
    if shape is None:  # a file here that draws something else
        return []
    for row in rows:
        if fault := misfit(row["values"], shape):
            fix = "correct the line of this step from a backup, or delete it"
            raise SourceError(f"metrics.jsonl: values.{fault}", where=f"row {kind} of step {row['step']}", fix=fix)
    return [module.section(rows, recipe)]
