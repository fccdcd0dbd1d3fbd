"""Processes of a drill: what they say, and that none outlives it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from unpad.drill import child
from unpad.drill.child import started
from unpad.errors import DiskError


def sleeps(told: Path) -> None:
    """Tell the process and its folder, and go on for long, with a process of its own that does, too."""
    os.environ["OF_THE_CHILD"] = "1"
    grandchild = os.fork()
    if grandchild:
        told.write_text(f"{grandchild} {os.getcwd()} {os.environ['OF_THE_PARENT']} {os.getpgid(0) == os.getpid()}")
    time.sleep(600)


def fails(where: str) -> None:
    raise DiskError("no room", where=where, fix="free some")


def breaks(word: str) -> None:
    print("one\n\ntwo")
    raise ValueError(word)


@pytest.fixture(autouse=True)
def _light(monkeypatch: pytest.MonkeyPatch) -> None:
    """These processes do not train."""
    monkeypatch.setattr(child, "MODULES", ["unpad.drill.child"])


def is_there(pid: int) -> bool:
    """True if a process runs; one that has ended and waits to be fetched does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_process_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "told"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_PARENT", "yes")
    with started(tmp_path, sleeps, told) as one:
        while not (told.is_file() and len(told.read_text().split()) == 4):
            assert one.wait(0.02) is None, one.last_words()
        pid, folder, variable, leads = told.read_text().split()
        assert (folder, variable, leads) == (str(tmp_path), "yes", "True")
    assert one.process.exitcode == -signal.SIGKILL
    until = time.monotonic() + 60
    while is_there(int(pid)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_there(int(pid))
    assert [path.name for path in tmp_path.iterdir()] == ["told"]
    assert "OF_THE_CHILD" not in os.environ


def test_an_error_of_a_user_comes_back_as_it_was(tmp_path: Path) -> None:
    with started(tmp_path, fails, "/data") as one:
        assert one.wait(60) == DiskError.exit_code
        error = one.user_error()
        assert isinstance(error, DiskError)
        assert (error.what, error.where, error.fix) == ("no room", "/data", "free some")
        assert one.last_words() == "DiskError: no room"


def test_another_error_is_told_by_the_last_lines(tmp_path: Path) -> None:
    with started(tmp_path, breaks, "of this kind") as one:
        assert one.wait(60) == 1
        assert one.user_error() is None
        assert "ValueError: of this kind" in one.last_words()
