"""Totals over all runs of a script: small JSON files beside this one, which docs/internals/reliability.md shows."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unpad.machine import processor_name
from unpad.storage import write_atomic

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "internals" / "reliability.md"


def load(name: str) -> dict[str, Any]:
    """Totals of an attack by the name of its file; empty before its first session."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"kinds": {}}


def save(name: str, totals: dict[str, Any]) -> None:
    """Write totals with the commit, the date and the processor of this session."""
    totals |= {"commit": _commit(), "date": datetime.now(UTC).date().isoformat(), "processor": processor_name()}
    write_atomic(FOLDER / f"{name}.json", json.dumps(totals, indent=1, ensure_ascii=False) + "\n")


def put_table(name: str, lines: list[str]) -> None:
    """Write a table between its markers in docs/internals/reliability.md."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    assert found, f"{PAGE} has no place for {name}"
    PAGE.write_text(before + begin + "".join(f"{line}\n" for line in lines) + end + after, encoding="utf-8")


def _commit() -> str:
    command = ["git", "-C", str(FOLDER), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
