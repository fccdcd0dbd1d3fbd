"""English texts for the recipe `small`: the sayings of Debian's package fortunes, one JSON line each.

    apt-get download fortunes && dpkg -x fortunes_*.deb fortunes
    python benchmarks/small.py fortunes/usr/share/games/fortunes sayings_en.jsonl

A file of fortunes holds sayings with lines of a percent sign between them; indexes (.dat) and second names (.u8) are
left out. benchmarks/small.md has what the recipe reaches on them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def sayings(folder: Path) -> list[str]:
    """The sayings of all files, by name of the file and in their order; empty ones left out."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.suffix)
    pieces = (piece for path in files for piece in path.read_text("utf-8", errors="replace").split("\n%\n"))
    return [text for piece in pieces if (text := piece.strip("\n").removesuffix("\n%")).strip(" \n%")]


def main(folder: str, out: str) -> None:
    found = sayings(Path(folder))
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in found)
    Path(out).write_text(lines, encoding="utf-8")
    print(f"{len(found):,} sayings, {sum(map(len, found)):,} characters")


if __name__ == "__main__":
    main(*sys.argv[1:])
