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
report = check(Path(sys.argv[1]), "text")
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


def peak_of(path: Path, mebibytes: int) -> tuple[int, float]:
    """Rows of a made-up file, and peak memory of a process that checks it, in MiB."""
    begin, row, end = FORMS[path.name]
    count = (mebibytes << 20) // len(row.encode())
    with path.open("w", encoding="utf-8") as handle:
        handle.write(begin)
        handle.writelines(row % number for number in range(count))
        handle.write(end)
    done = subprocess.run([sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, check=True)
    num_used, kibibytes = map(int, done.stdout.split())
    assert num_used == count + 1
    return num_used, kibibytes / 1024


@pytest.mark.parametrize("name", FORMS)
def test_memory_of_reading_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    small, large = (peak_of(tmp_path / name, mebibytes)[1] for mebibytes in (4, 32))
    assert large < small + 30  # hashes and lengths of 120,000 rows take 10; the file alone takes 32
