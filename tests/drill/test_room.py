"""Room and memory: what a run needs is compared with what is free and allowed."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unpad.drill import mounts
from unpad.drill.measure import check_memory
from unpad.drill.mounts import GIB, MIB, Needs, check_room, check_space, folder_bytes, reserve, size_text
from unpad.machine.memory import MemoryLimit
from unpad.storage import disk

Patch = pytest.MonkeyPatch
NEEDS = Needs(
    checkpoint_bytes=24 * MIB, weights_bytes=8 * MIB, largest_file=16 * MIB, keep=2, bests=2, steps=1000, open_files=12
)


def verdicts(folder: Path, used: int = 0) -> dict[str, str]:
    return {one.code: one.severity for one in check_room(folder, NEEDS, used)}


def test_a_run_needs_one_checkpoint_and_one_best_more_than_it_keeps() -> None:
    assert NEEDS.disk_bytes == 3 * 24 * MIB + 3 * 8 * MIB + 1000 * mounts.BYTES_PER_STEP + mounts.OTHER_BYTES
    assert size_text(NEEDS.disk_bytes) == "115 MiB"
    assert size_text(12 * GIB) == "12.0 GiB"


def test_room_enough_passes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    assert set(verdicts(tmp_path).values()) == {"ok"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.promise("drill.space")
@pytest.mark.parametrize(
    ("free", "used", "verdict"),
    [(100 * MIB, 0, "fault"), (130 * MIB, 0, "warning"), (300 * MIB, 0, "ok"), (100 * MIB, 80 * MIB, "ok")],
)
def test_a_disk_that_fills_during_the_run_is_found(
    tmp_path: Path, monkeypatch: Patch, free: int, used: int, verdict: str
) -> None:
    """Bytes that the run has already are not needed once more."""
    monkeypatch.setattr(disk, "free_bytes", lambda folder: free)
    assert check_space(tmp_path, NEEDS, used).severity == verdict


@pytest.mark.promise("drill.space")
@pytest.mark.parametrize(("number", "verdict"), [(errno.EDQUOT, "fault"), (errno.EOPNOTSUPP, "ok"), (0, "ok")])
def test_a_quota_below_the_free_space_is_found(tmp_path: Path, monkeypatch: Patch, number: int, verdict: str) -> None:
    monkeypatch.setattr(mounts, "_fallocate", lambda descriptor, num_bytes: number)
    found = check_space(tmp_path, NEEDS)
    assert found.severity == verdict
    assert ("quota" in found.values["meaning"]) is (verdict == "fault")


def test_bytes_are_reserved_without_writing_them(tmp_path: Path) -> None:
    assert reserve(tmp_path / "reserved", 1 << 20)
    assert not reserve(tmp_path / "reserved", 1 << 60), "more than any file may have"
    assert list(tmp_path.iterdir()) == []


def test_limits_of_the_process_are_found(tmp_path: Path, monkeypatch: Patch) -> None:
    limits = {resource.RLIMIT_FSIZE: MIB, resource.RLIMIT_NOFILE: 70}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))
    found = {one.code: one for one in check_room(tmp_path, NEEDS, 0)}
    assert (found["space"].severity, found["open files"].severity) == ("fault", "fault")
    assert "ulimit -f" in found["space"].values["meaning"]
    assert "ulimit -n" in found["open files"].values["meaning"]


@pytest.mark.parametrize(("files", "free", "verdict"), [(1000, 20, "fault"), (1000, 900, "ok"), (0, 0, "ok")])
def test_a_disk_without_inodes_is_found(
    tmp_path: Path, monkeypatch: Patch, files: int, free: int, verdict: str
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda place: SimpleNamespace(f_files=files, f_favail=free))
    assert mounts.check_inodes(tmp_path, NEEDS).severity == verdict


def test_space_that_cannot_be_told_is_a_fault(tmp_path: Path, monkeypatch: Patch) -> None:
    def refused(*_: object) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "statvfs", refused)
    assert verdicts(tmp_path) == {"space": "fault", "files": "fault", "open files": "ok"}


def test_the_size_of_a_folder_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"x" * 1000)
    assert 1000 <= folder_bytes(tmp_path) <= 1000 + 2 * 65536
    assert folder_bytes(tmp_path / "absent") == 0


# --------------------------------------------------------------------------- memory


@pytest.mark.parametrize(("needed", "verdict"), [(7 * GIB, "ok"), (9 * GIB, "warning"), (11 * GIB, "fault")])
def test_a_step_that_does_not_fit_into_memory_is_found(needed: int, verdict: str) -> None:
    found = check_memory(needed, "a step", MemoryLimit(10 * GIB, "free"))
    assert found.severity == verdict
    assert ("plan.tokens_per_micro" in found.values["meaning"]) is (verdict != "ok")
