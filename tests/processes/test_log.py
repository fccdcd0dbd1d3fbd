"""Logs of the processes of a run that are not its first."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A process of the given rank: prints, does what the rest says, and ends as the program does.
PROGRAM = """
import os, sys
from pathlib import Path
from unpad.errors import DiskError, LostProcessError
from unpad.processes import worker
from unpad.processes.worker import leave_to_launcher, run_as_worker

def fail(error):
    print(error, file=sys.stderr)
    raise SystemExit(error.exit_code) from error

def agreed():
    error = DiskError("full")
    error.is_agreed = True
    return error

def work():
    folder = Path(sys.argv[1])
    print("early")
    print("also early", file=sys.stderr)
"""


def run(folder: Path, rank: int, *lines: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run PROGRAM, with `lines` as the rest of its work."""
    source = PROGRAM + "".join(f"    {line}\n" for line in lines) + "run_as_worker(work)\n"
    return subprocess.run(
        [sys.executable, "-S", "-c", source, str(folder)],
        env={"PYTHONPATH": os.pathsep.join(sys.path), "RANK": str(rank), "TMPDIR": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_kept_log_has_all_that_the_process_printed_and_later_processes_add_to_it(tmp_path):
    for _ in range(2):
        done = run(tmp_path, 1, "worker.keep_log(folder, private=False)", "print('late')", "os.write(2, b'C code\\n')")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    lines = (tmp_path / "processes" / "1.log").read_text().splitlines()
    assert lines == ["early", "also early", "late", "C code"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["processes"]


@pytest.mark.promise("processes.endings")
def test_a_process_is_not_ended_by_a_thread_that_outlives_its_modules(tmp_path):
    source = """
import atexit, os, sys
from unpad.__main__ import main
class Late:
    def __del__(self, abort=os.abort):
        abort()
late = Late()
atexit.register(print, "at the exit")
sys.argv = ["unpad", "--version"]
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout.splitlines()[1:]) == (0, ["at the exit"])


def test_the_first_process_keeps_the_terminal(tmp_path):
    done = run(tmp_path, 0, "worker.keep_log(folder, private=False)")
    assert (done.stdout, done.stderr) == ("early\n", "also early\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("end", "code"), [("fail(DiskError('full'))", 6), ("1 / 0", 1)])
def test_a_process_that_fails_before_its_log_is_kept_shows_it(tmp_path, end, code):
    done = run(tmp_path, 1, end)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("process 1:\nearly\nalso early\n")
    assert ("DiskError: full" in done.stderr) == (code == 6)
    assert ("ZeroDivisionError" in done.stderr) == (code == 1)
    assert not list(tmp_path.iterdir())
