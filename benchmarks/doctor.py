"""Plant troubles in small recipes of the four families, and look where `unpad doctor` ranks each; then healthy recipes.

    python benchmarks/doctor.py              some minutes; writes benchmarks/doctor.md
    python benchmarks/doctor.py decay fp16   only the troubles whose name holds one of the words, without writing

The cases are those of tests/doctor, at full length: all steps of each trial.
"""

import os
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.doctor import recipes
from tests.doctor.recipes import codes, examined, quiet_machine
from tests.doctor.test_troubles import HEALTHY
from tests.doctor.troubles import TROUBLES, Trouble
from unpad.doctor.examine import Examination
from unpad.nn.processor import full_processor_name

PAGE = Path(__file__).with_suffix(".md")


def planted(trouble: Trouble, folder: Path) -> Examination:
    """Examine the recipe of a trouble with its fault in place."""
    recipe = trouble.recipe(folder, **trouble.sections)
    with pytest.MonkeyPatch.context() as patch:
        if trouble.plant is not None:
            trouble.plant(patch)
        return examined(recipe, system=quiet_machine(**trouble.readings))


def trouble_row(trouble: Trouble, folder: Path) -> tuple[str, int]:
    """A row of the table, and the rank of the finding; 0 where it is missing."""
    began = time.process_time()
    found = planted(trouble, folder)
    listed = codes(found)
    rank = listed.index(trouble.code) + 1 if trouble.code in listed else 0
    number = next((f"{one.number:.3g}" for one in found.findings if one.code == trouble.code), "")
    others = ", ".join(code for code in listed if code != trouble.code) or "-"
    seconds = time.process_time() - began
    return f"| {trouble.name} | `{trouble.code}` | {rank or 'missed'} | {number} | {others} | {seconds:.1f} |", rank


def healthy_row(family: str, sections: dict[str, object], folder: Path) -> tuple[str, int]:
    """A row of the table of healthy recipes, and the number of findings above a note."""
    found = examined(getattr(recipes, family)(folder, **sections))
    changed = ", ".join(sorted(sections)) or "-"
    return f"| {family} | {changed} | {', '.join(codes(found)) or 'none'} |", len(codes(found))


def in_folder(make: object, *arguments: object) -> tuple[str, int]:
    """Call one of the rows with a folder and a cache of its own."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["UNPAD_CACHE"] = f"{folder}/cache"
        row: tuple[str, int] = make(*arguments, Path(folder) / "data")  # type: ignore[operator]
    print(row[0], flush=True)
    return row


def main() -> None:
    words = sys.argv[1:]
    chosen = [one for one in TROUBLES if not words or any(word in one.name for word in words)]
    rows = [in_folder(trouble_row, one) for one in chosen]
    if words:
        return
    healthy = [in_folder(healthy_row, family, sections) for family, sections in HEALTHY]
    first = sum(rank in (1, 2) for _, rank in rows)
    none = sum(num == 0 for _, num in healthy)
    lines = [
        "# The doctor's findings",
        "",
        f"`python benchmarks/doctor.py`, {datetime.now(UTC):%Y-%m-%d}, {full_processor_name()}: of {len(rows)} planted "
        f"troubles {first} are found first or second; of {len(healthy)} healthy recipes {none} have no finding above a "
        "note. Models and data are small (`tests/doctor/recipes.py`), faults of code are in `tests/doctor/plants.py`. "
        "Seconds are of the processor.",
        "",
        "| planted | finding | rank | number | besides | seconds |",
        "|---|---|---|---|---|---|",
        *(row for row, _ in rows),
        "",
        "| healthy | changed sections | findings above a note |",
        "|---|---|---|",
        *(row for row, _ in healthy),
    ]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
