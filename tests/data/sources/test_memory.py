"""Memory of reading does not grow with the file."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROW = "学习效率的提升依赖于专注力的培养，而不是单纯增加时间投入。" * 3
# Resident memory is measured in a forked child for each pair of files, because a process's peak never falls.
CHILD = """
import os, resource, sys
from pathlib import Path
from unpad.data.check import check
for pair in zip(sys.argv[1::2], sys.argv[2::2]):
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        continue
    for path in pair:  # the smaller first
        report = check(Path(path), "text")
        assert report.passed
        print(report.num_used, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    sys.stdout.flush()
    os._exit(0)
"""
pytestmark = pytest.mark.slow
FORMS = {
    "a.txt": ("", "%d " + ROW + "\n\n", "end"),
    "a.jsonl": ("", '{"text": "%d ' + ROW + '"}\n', '{"text": "end"}'),
    "a.csv": ("text,n\n", '"%d ' + ROW + '\n",1\n', "end,1\n"),
}


def write(path: Path, mebibytes: int) -> int:
    """Write a file of about this size; return its rows."""
    begin, row, end = FORMS[path.name]
    count = (mebibytes << 20) // len(row.encode())
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8") as handle:
        handle.write(begin)
        handle.writelines(row % number for number in range(count))
        handle.write(end)
    return count + 1


Told = dict[str, tuple[list[int], list[str]]]  # rows of the two files that were written, and what was told of them


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Rows and memory by form."""
    folder = tmp_path_factory.mktemp("forms")
    pairs = {name: [folder / size / name for size in ("small", "large")] for name in FORMS}
    counts = {name: [write(path, size) for path, size in zip(pairs[name], (4, 32), strict=True)] for name in FORMS}
    command = [sys.executable, "-c", CHILD, *(str(path) for pair in pairs.values() for path in pair)]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    shutil.rmtree(folder)
    return {name: (counts[name], words[4 * number : 4 * number + 4]) for number, name in enumerate(FORMS)}


@pytest.mark.nightly
@pytest.mark.promise("llm.windows")
@pytest.mark.parametrize("name", FORMS)
def test_memory_of_reading_does_not_grow_with_the_file(told: Told, name: str) -> None:
    counts, words = told[name]
    assert [int(count) for count in words[::2]] == counts
    small, large = (int(kibibytes) / 1024 for kibibytes in words[1::2])
    assert large < small + 30  # hashes and lengths of 120,000 rows take 10; the file alone takes 32
