"""The table of bad inputs: every kind has its code, its place, its exit code, and rows that add up."""

import re
from pathlib import Path

import pytest

from tests.data.bad_inputs.case import UNKNOWN
from tests.data.bad_inputs.columns import COLUMNS
from tests.data.bad_inputs.histories import HISTORIES
from tests.data.bad_inputs.lines import LINES
from tests.data.bad_inputs.pictures import PICTURES
from tests.data.bad_inputs.recipes import RECIPES
from tests.data.bad_inputs.talks import TALKS
from unpad.data.sources import images, vqa
from unpad.data.sources.bad_rows import apply_policy
from unpad.data.sources.example import BadRow, count_bad
from unpad.data.sources.files import expand
from unpad.data.sources.reader import TEXT_KINDS, read_file
from unpad.errors import SourceError
from unpad.recipes.data import DataSettings, Source

pytestmark = pytest.mark.promise("input.kinds")

CASES = [*LINES, *TALKS, *PICTURES, *HISTORIES, *COLUMNS, *RECIPES]
KINDS = {"J": 42, "T": 12, "I": 20, "V": 14, "EV": 20, "P": 12, "K": 9}
ABSENT = {"T-10": "no format holds ids of tokens", "T-11": "no format holds weights of tokens"}
COUNTS = re.compile(r"rows read (\d+) = rows used (\d+) \+ bad rows (\d+)")
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def test_the_table_has_every_kind():
    wanted = {f"{letter}-{number:02d}" for letter, most in KINDS.items() for number in range(1, most + 1)}
    found = {case.kind.split()[0] for case in CASES}
    assert wanted - found == set(ABSENT)
    assert found < wanted
    said = f"{len(found)} of {len(wanted)} kinds of bad input"  # docs/internals/features.md counts them
    assert said in (Path(__file__).parents[2] / "docs/internals/features.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES, ids=[case.kind for case in CASES])
def test_bad_input_has_its_code_its_place_and_rows_that_add_up(case, unpad, tmp_path, monkeypatch):
    root = tmp_path / "input"
    root.mkdir()
    monkeypatch.chdir(root)
    path = case.write(root)
    if case.reads == "train":
        done = unpad("train", path, "--out", "run")
    else:
        done = unpad("data", "check", path, *(() if case.reads == "recipe" else ("--kind", case.reads)))
    shown = done.out + done.err
    assert done.code == case.exit_code, shown
    assert "Traceback" not in shown
    assert not CONTROL.search(shown)
    if case.code:
        assert case.code in shown
        first = next(line for line in shown.splitlines() if case.place in line)
        assert re.search(re.escape(case.place) + r"(:|$| )", first), shown
    read, used, bad = map(int, found.groups()) if (found := COUNTS.search(shown)) else (0, 0, 0)
    assert read == used + bad
    if case.used != UNKNOWN:
        assert (used, bad) == (case.used, 1 if case.bad == UNKNOWN else case.bad), shown
    assert ("an unknown number of rows" in shown) == (case.bad == UNKNOWN != case.used)
    assert not [name for name in ("run", "made") if (root / name).exists()]


READ = [case for case in CASES if case.reads in (*TEXT_KINDS, "images", "vqa")]


@pytest.mark.parametrize("case", READ, ids=[case.kind for case in READ])
def test_training_reads_what_the_check_has_read(case, tmp_path):
    used, bad = _read(case.reads, case.write(tmp_path))
    assert (used, count_bad(bad)) == (case.used, 1 if case.bad == UNKNOWN else case.bad)
    if case.bad:
        assert bad[0].code == case.code
        assert bad[0].where.endswith(case.place)
        with pytest.raises(SourceError, match=case.code):
            apply_policy(bad, used + count_bad(bad), DataSettings())
    if case.bad == UNKNOWN:
        with pytest.raises(SourceError, match="how many rows follow is unknown"):
            apply_policy(bad, 10_000, DataSettings(on_bad_row="quarantine", max_bad=0.9))


def _read(kind: str, path: Path) -> tuple[int, list[BadRow]]:
    """Number of usable rows of the files of a path, and the others."""
    used, bad = 0, list[BadRow]()
    for file in (images.expand if kind == "images" else expand)([Source(path=str(path))], Path):
        readers = {"images": images.read_all, "vqa": vqa.read_all}
        found = readers[kind](file, DataSettings()) if kind in readers else read_file(kind, file, DataSettings())
        rows, others = found[0], found[-1]
        used, bad = used + len(rows), [*bad, *others]
    return used, bad
