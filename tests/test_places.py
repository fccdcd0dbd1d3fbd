"""A checkout may stand anywhere under any name: no source guesses where, or leaves a path unquoted in a shell."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("unpad", "tests", "benchmarks", "docs", "examples")
FILES = [ROOT / "setup.py", *sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
SOURCES = [path for path in FILES if path != Path(__file__)]  # the guesses of this one are examples
# What holds the path of a checkout, of its environment or of a temporary folder.
PATHS = re.compile(r"sys\.executable|sys\.prefix|__file__|ROOT|PACKAGE|HERE|tmp_path|cwd\(\)")
# Without one of these a source has no guess, and is not parsed.
SIGNS = re.compile(r"/unpad|\.split\(\)|sys\.executable|shell *=")


def guesses(source: str) -> Iterator[tuple[int, str]]:
    """Lines of a module that hold for some places of the checkout alone, with what each of them does."""
    if not SIGNS.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)) if re.search(r"(?<![\w.*])/unpad(/|$)", text) and "\n" not in text:
                yield node.lineno, "takes every folder called unpad for the package"
            case ast.Call(func=ast.Attribute(value=ast.JoinedStr() as line, attr="split"), args=[]) if _paths(line):
                yield node.lineno, "splits a command at the blanks of a path"
            case ast.JoinedStr() if _unquoted(node):
                yield node.lineno, "leaves a path unquoted in a line of a shell"
            case ast.keyword(arg="shell", value=ast.Constant(value=True)):
                yield node.value.lineno, "passes a line to a shell"


def _paths(line: ast.JoinedStr) -> list[str]:
    values = [ast.unparse(part.value) for part in line.values if isinstance(part, ast.FormattedValue)]
    return [value for value in values if PATHS.search(value) and "quote(" not in value]


def _unquoted(line: ast.JoinedStr) -> bool:
    """True for a text with an interpreter as a word of a command: no quote before it, a blank behind it."""
    parts = [*line.values, ast.Constant(value="")]
    texts = [part.value if isinstance(part, ast.Constant) else None for part in parts]
    for before, part, after in zip([None, *texts], parts, texts[1:], strict=False):
        if isinstance(part, ast.FormattedValue) and "sys.executable" in ast.unparse(part.value):
            quoted = str(before or "").endswith(('"', "'")) or "quote(" in ast.unparse(part.value)
            if not quoted and str(after or "").startswith(" "):
                return True
    return False


@pytest.mark.promise("install.any-place")
def test_no_source_guesses_where_the_checkout_stands():
    found = []
    for path in SOURCES:
        lines = guesses(path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(ROOT)}:{line}: it {what}" for line, what in lines]
    assert not found


@pytest.mark.promise("install.any-place")
@pytest.mark.parametrize(
    "line",
    [
        'frames = [one for one in frames if "/unpad/" in one]',
        "name = text.rpartition('/unpad/')[2]",
        'subprocess.run(f"{sys.executable} -m unpad recipes", cwd=tmp_path)',
        'subprocess.run(f"cat {tmp_path}/a".split())',
        "subprocess.run(command, shell=True)",
    ],
)
def test_each_kind_of_guess_is_found(line):
    assert len(list(guesses(line))) == 1
