"""Promises of docs/internals/features.md with the tests that show each.

python docs/promises.py              all of them
python docs/promises.py plan batch   those whose id begins with one of the words

A test names its promises by `@pytest.mark.promise("id", ...)`, a whole file by `pytestmark`. No test is imported.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "internals" / "features.md"
BULLET = re.compile(r"^- \*\*([a-z]+\.[a-z0-9-]+)\*\* (.*(?:\n  .*)*)", re.MULTILINE)


def promises(page: str) -> list[tuple[str, str]]:
    """Id and words of each promise, in the order of the page."""
    return [(name, " ".join(words.split())) for name, words in BULLET.findall(page)]


def tests() -> dict[str, list[str]]:
    """Tests by the id that they name, each as pytest names it."""
    found = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, test in marks(path.read_text(encoding="utf-8")):
            place = path.relative_to(ROOT).as_posix()
            found[name].append(f"{place}::{test}" if test else place)
    return dict(found)


def marks(source: str) -> Iterator[tuple[str, str]]:
    """(id, name of the test) for each id that a file of tests names; the name is empty where `pytestmark` does."""
    if "mark.promise(" not in source:
        return
    for node in ast.parse(source).body:
        name = getattr(node, "name", "")
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "promise":
                yield from ((ast.literal_eval(argument), name) for argument in call.args)


def main(words: list[str]) -> int:
    """Print the chosen promises, each above its tests; 1 if there are none."""
    chosen = [
        (name, text)
        for name, text in promises(PAGE.read_text(encoding="utf-8"))
        if name.startswith(tuple(words or [""]))
    ]
    found = tests() if chosen else {}
    for name, text in chosen:
        print(f"{name}  {text}")
        for test in found.get(name, ["(no test)"]):
            print(f"  {test}")
    if not chosen:
        print(f"No promise begins with {' or '.join(words)}.", file=sys.stderr)
    return int(not chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
