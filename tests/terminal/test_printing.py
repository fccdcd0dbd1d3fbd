"""The one place that prints: no byte of a name or a message steers the terminal."""

import ast
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from unpad.errors import SourceError
from unpad.terminal.printing import escaped, print_error, print_json, print_lines, print_styled, print_text

pytestmark = pytest.mark.promise("input.control")

SOURCES = Path(__file__).parents[2] / "unpad"
# A name with an escape sequence, C1 control, line break, separator, override of direction and a byte that is no UTF-8.
HOSTILE = "a\x1b[31m\x9bm\n\u2028\u202e\u2066\x07\r\udcd6z"
SHOWN = r"a\x1b[31m\x9bm\n\u2028\u202e\u2066\x07\r\xd6z"


def test_control_characters_are_shown_and_other_characters_stay():
    assert escaped(HOSTILE) == SHOWN
    whole = "中文　全角 é 👩\u200d👩 שלום\u200f العربية \u00a0"
    assert escaped(whole) == whole
    assert escaped(escaped(HOSTILE)) == SHOWN


def test_every_way_to_print_escapes(capsys):
    print_lines([HOSTILE])
    print_lines([HOSTILE], to_errors=True)
    assert capsys.readouterr() == (f"{SHOWN}\n", f"{SHOWN}\n")
    print_text(f"{HOSTILE}\t")
    assert capsys.readouterr().out == SHOWN.replace("\\n", "\n") + "\t"
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    print_styled(console, f"{HOSTILE} :cat: [bold]")
    assert console.file.getvalue() == f"{SHOWN} :cat: [bold]\n"


def test_json_holds_escapes_and_reads_back(capsys):
    print_json({HOSTILE: ["中", HOSTILE]})
    out = capsys.readouterr().out
    assert json.loads(out) == {HOSTILE: ["中", HOSTILE]}
    assert escaped(out, keep="\n") == out
    assert "中" in out


def test_an_error_has_its_lines_and_no_others(capsys):
    error = SourceError(f"odd {HOSTILE}", where=HOSTILE, fix="do\nit", details=("  one", f"  {HOSTILE}"))
    print_error(error)
    expected = [f"SourceError: odd {SHOWN}", "  one", f"  {SHOWN}", f"  at: {SHOWN}", r"  do: do\nit"]
    assert capsys.readouterr().err.splitlines() == expected
    assert error.what == f"odd {HOSTILE}\n  one\n  {HOSTILE}"


def test_nothing_else_of_the_package_prints():
    found = []
    for path in sorted(SOURCES.rglob("*.py")):
        if path.parent.name != "terminal":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and _prints(node.func):
                    found.append(f"{path.relative_to(SOURCES)}:{node.lineno}")
    assert found == []


def _prints(called: ast.expr) -> bool:
    """True for print, CONSOLE.print and the methods of standard streams that write."""
    if isinstance(called, ast.Name):
        return called.id == "print"
    is_stream = isinstance(called, ast.Attribute) and ast.unparse(called.value) in ("sys.stdout", "sys.stderr")
    return isinstance(called, ast.Attribute) and (called.attr == "print" or (is_stream and "write" in called.attr))
