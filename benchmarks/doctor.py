"""Plant troubles in small recipes of the four families, and look where `unpad doctor` ranks each; then healthy recipes.

    python benchmarks/doctor.py              some minutes; writes benchmarks/doctor.md
    python benchmarks/doctor.py decay fp16   only the troubles whose name holds one of the words, without writing
    python benchmarks/doctor.py --unseen     troubles of people who do not know the doctor's code

--unseen takes `--from FILE.py` for another module, and words as above.

The cases are those of tests/doctor, at full length: all steps of each trial. Unseen ones are those of
benchmarks/doctor_unseen.py, in the form that tests/doctor/planted.py describes; with words nothing is written.
"""

import os
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.doctor import planted as unseen
from tests.doctor.examining import codes, examined, quiet_machine
from tests.doctor.missed import MISSED
from tests.doctor.test_troubles import HEALTHY
from tests.doctor.troubles import TROUBLES, Trouble
from tests.helpers.families import FAMILIES
from unpad.doctor.examine import Examination
from unpad.machine.load import full_processor_name

PAGE = Path(__file__).with_suffix(".md")
UNSEEN = Path(__file__).with_name("doctor_unseen.py")
BEGIN = "## Planted by people who do not know the doctor's code: "


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
    found = examined(FAMILIES[family](folder, **sections))
    changed = ", ".join(sorted(sections)) or "-"
    return f"| {family} | {changed} | {', '.join(codes(found)) or 'none'} |", len(codes(found))


def in_folder(make: object, *arguments: object) -> tuple[str, int]:
    """Call one of the rows with a folder and a cache of its own."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["UNPAD_CACHE"] = f"{folder}/cache"
        text, number = make(*arguments, Path(folder) / "data")  # type: ignore[operator]
        row = text.replace(f"{folder}/data/", ""), number
    print(row[0], flush=True)
    return row


def unseen_row(trouble: unseen.Planted, folder: Path) -> tuple[str, int]:
    """A row of the table of unseen troubles, and the rank of the right finding; 0 where it is missing."""
    folder.mkdir()
    found = unseen.judge(trouble, folder)
    said, first = ", ".join(found.said[:3]) or "-", found.first.replace("|", "/")
    return f"| {unseen.name_of(trouble)} | {found.cause} | {found.rank or 'missed'} | {said} | {first} |", found.rank


def unseen_healthy_row(made: unseen.Healthy, folder: Path) -> tuple[str, int]:
    """A row of the table of unseen healthy recipes, and the number of findings above a note."""
    folder.mkdir()
    found = unseen.findings(made(folder))
    said = [one.code for one in found] if isinstance(found, list) else [type(found).__name__]
    return f"| {unseen.name_of(made)} | {', '.join(said) or 'none'} |", len(said)


def try_unseen(file: Path, words: list[str]) -> None:
    """Judge the troubles of a module, and write their part of the page unless only some are asked for."""
    troubles, healthy = unseen.load(file)
    chosen = [one for one in troubles if not words or any(word in unseen.name_of(one) for word in words)]
    rows = [in_folder(unseen_row, one) for one in chosen]
    if words:
        return
    sound = [in_folder(unseen_healthy_row, one) for one in healthy]
    first, none = sum(rank in (1, 2) for _, rank in rows), sum(num == 0 for _, num in sound)
    lines = [
        f"{BEGIN}{file.stem}",
        "",
        f"`python benchmarks/doctor.py --unseen --from {file.name}`, {datetime.now(UTC):%Y-%m-%d}, "
        f"{full_processor_name()}: of {len(rows)} troubles {first} are found first or second; of {len(sound)} healthy "
        f"recipes {none} have no finding above a note.",
        "",
        "| planted | cause | rank | findings | the first one says |",
        "|---|---|---|---|---|",
        *(row for row, _ in rows),
        "",
        "| healthy | findings above a note |",
        "|---|---|",
        *(row for row, _ in sound),
    ]
    own, *others = PAGE.read_text(encoding="utf-8").split(BEGIN)
    kept = [f"{BEGIN}{other}".rstrip() for other in others if other.split("\n")[0] != file.stem]
    parts = sorted([*kept, "\n".join(lines)], key=lambda part: part.split("\n")[0])
    PAGE.write_text("\n\n".join([own.rstrip(), *parts]) + "\n", encoding="utf-8")


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["--unseen"]:
        given = words[1:2] == ["--from"]
        try_unseen(Path(words[2]) if given else UNSEEN, words[3 if given else 1 :])
        return
    chosen = [one for one in (*TROUBLES, *MISSED) if not words or any(word in one.name for word in words)]
    rows = [in_folder(trouble_row, one) for one in chosen]
    if words:
        return
    healthy = [in_folder(healthy_row, family, sections) for family, sections in HEALTHY]
    first = sum(rank in (1, 2) for _, rank in rows)
    none = sum(num == 0 for _, num in healthy)
    later = PAGE.read_text(encoding="utf-8").partition(BEGIN)[1:] if PAGE.exists() else ()
    lines = [
        "# The doctor's findings",
        "",
        "Sets of troubles. Those of the first table were planted by the authors of the checks, or are ones that "
        "others found missed and "
        "that checks were then written for: the figure says that the checks work, and not what they find of other "
        "troubles. "
        "Those of the others were planted by people who had not seen the doctor's code; each was tried once, before "
        "any check was changed for it, and the last of these figures is the one to expect.",
        "",
        "## Planted by the authors of the checks",
        "",
        f"`python benchmarks/doctor.py`, {datetime.now(UTC):%Y-%m-%d}, {full_processor_name()}: of {len(rows)} planted "
        f"troubles {first} are found first or second; of {len(healthy)} healthy recipes {none} have no finding above a "
        "note. Models and data are small (`tests/helpers/families.py`), faults of code are in "
        "`tests/doctor/plants.py`. "
        f"The last {len(MISSED)} were missed once (`tests/doctor/missed.py`). Seconds are of the processor.",
        "",
        "| planted | finding | rank | number | besides | seconds |",
        "|---|---|---|---|---|---|",
        *(row for row, _ in rows),
        "",
        "| healthy | changed sections | findings above a note |",
        "|---|---|---|",
        *(row for row, _ in healthy),
    ]
    PAGE.write_text("\n".join([*lines, "", "".join(later).rstrip()]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
