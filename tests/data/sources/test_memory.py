"""Memory of reading does not grow with the file."""

import subprocess
import sys
from pathlib import Path

import pytest

ROW = "学习效率的提升依赖于专注力的培养，而不是单纯增加时间投入。" * 3
# Resident memory is measured in a child, because a process's peak never falls.
CHILD = """
import resource, sys
from pathlib import Path
from unpad.data.check import check
for path in sys.argv[1:]:  # the smaller first
    report = check(Path(path), "text")
    assert report.passed
    print(report.num_used, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
pytestmark = pytest.mark.slow
FORMS = {
    "a.json": ("[", '{"text": "%d ' + ROW + '"},\n', '"end"]'),
    "a.txt": ("", "%d " + ROW + "\n\n", "end"),
    "a.jsonl": ("", '{"text": "%d ' + ROW + '"}\n', '{"text": "end"}'),
    "a.csv": ("text,n\n", '"%d ' + ROW + '\n",1\n', "end,1\n"),
}


def write(path: Path, mebibytes: int) -> int:
    """Write a file of about this size; return its rows."""
    begin, row, end = FORMS[path.name]
    count = (mebibytes << 20) // len(row.encode())
    path.parent.mkdir()
    with path.open("w", encoding="utf-8") as handle:
        handle.write(begin)
        handle.writelines(row % number for number in range(count))
        handle.write(end)
    return count + 1


@pytest.mark.promise("llm.windows")
@pytest.mark.parametrize("name", FORMS)
def test_memory_of_reading_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    paths = [tmp_path / folder / name for folder in ("small", "large")]
    counts = [write(path, mebibytes) for path, mebibytes in zip(paths, (4, 32), strict=True)]
    command = [sys.executable, "-c", CHILD, *map(str, paths)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert [int(count) for count in told[::2]] == counts
    small, large = (int(kibibytes) / 1024 for kibibytes in told[1::2])
    assert large < small + 30  # hashes and lengths of 120,000 rows take 10; the file alone takes 32
