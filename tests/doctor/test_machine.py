"""`unpad doctor --machine` finds nothing on a sound disk, and each planted trouble."""

import errno
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.families import text
from unpad.doctor import machine
from unpad.doctor.finding import Finding
from unpad.errors import DOCTOR_FOUND_TROUBLE
from unpad.machine import MemoryLimit
from unpad.storage import disk

NEEDS = machine.RunNeeds(disk=machine.GIB, memory=machine.GIB)
DISK = {"lock": machine.check_lock, "flush": machine.check_flush, "rename": machine.check_rename}


def said(findings: list[Finding]) -> str:
    return " ".join(f"{item.severity} {item.sentences('en')[0]}" for item in findings)


def found_on(folder: Path, check: str) -> str:
    return said(DISK[check](folder, folder))


def test_a_sound_disk_and_enough_room_have_no_finding(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 3 * machine.GIB)
    places = [tmp_path / name for name in DISK]
    for place in places:
        place.mkdir()
    assert [found_on(place, place.name) for place in places if place.name != "flush"] == ["", ""]
    assert "fault" not in found_on(tmp_path / "flush", "flush")  # a virtual disk may drop flushes
    assert machine.check_room(tmp_path, tmp_path, "x", NEEDS) == []
    assert machine.check_memory("x", NEEDS, MemoryLimit(2 * machine.GIB, "free")) == []


def lock_for_all(*_: object) -> None:
    """Stands for flock: everybody gets the lock."""


def lock_for_none(*_: object) -> None:
    """Stands for flock: nobody gets the lock."""
    raise OSError(errno.EWOULDBLOCK, "busy")


def torn_rename(source: Any, target: Any) -> None:
    """Stands for rename: the target is gone for a moment."""
    if os.path.isfile(target):
        os.unlink(target)
        time.sleep(0.01)
    os.replace(source, target)


def mixing_rename(source: Any, target: Any) -> None:
    """Stands for rename: the target is written over in two parts."""
    if os.path.isdir(source):
        os.replace(source, target)
        return
    data = Path(source).read_bytes()
    with open(target, "r+b") as file:
        for half in (data[:2048], data[2048:]):
            file.write(half)
            file.flush()
            time.sleep(0.005)
    os.unlink(source)


def replacing_rename(source: Any, target: Any) -> None:
    """Stands for rename: a full folder is replaced."""
    if os.path.isdir(target):
        for name in os.listdir(target):
            os.unlink(os.path.join(target, name))
    os.replace(source, target)


def lost_write(descriptor: int, path: Path, data: bytes) -> None:
    """Stands for a write: other bytes reach the disk."""
    os.write(descriptor, data[::-1])


@pytest.mark.promise("doctor.disk")
@pytest.mark.parametrize(
    ("module", "name", "stand_in", "check", "says"),
    [
        (fcntl, "flock", lock_for_all, "lock", "two processes get one"),
        (fcntl, "flock", lock_for_none, "lock", "a killed process keeps it"),
        (machine, "HOLD", "raise SystemExit(1)", "lock", "a second process gets none"),
        (disk, "write_all", lost_write, "flush", "what is read is not what was written"),
        (os, "rename", torn_rename, "rename", "gone for a moment"),
        (os, "rename", mixing_rename, "rename", "seen mixed"),
        (os, "rename", replacing_rename, "rename", "a full folder was replaced"),
    ],
)
def test_a_disk_that_lies_is_a_fault(tmp_path, monkeypatch, module, name, stand_in, check, says):
    monkeypatch.setattr(machine, "FREED_WITHIN", 0.2)
    monkeypatch.setattr(module, name, stand_in)
    found = found_on(tmp_path, check)
    assert found.startswith("fault")
    assert says in found


@pytest.mark.promise("doctor.disk")
@pytest.mark.parametrize(("seconds", "says"), [((1e-5, 4e-3), "dropped"), ((0.7, 0.7), "slow"), ((2e-3, 4e-3), "")])
def test_flushes_that_are_dropped_or_slow_are_a_warning(tmp_path, monkeypatch, seconds, says):
    monkeypatch.setattr(machine, "flush_seconds", lambda place: seconds)
    monkeypatch.setattr(machine, "mount_of", lambda place: ("ext4", []))
    found = found_on(tmp_path, "flush")
    assert found.startswith("warning") is bool(says)
    assert says in found


TABLE = "22 1 0:21 / / rw,relatime - ext4 /dev/sda1 rw\n31 22 0:31 / /data\\040disk rw{options} - {kind} a rw\n"


@pytest.mark.promise("doctor.disk")
@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("xfs", "", ""),
        ("nfs4", ",hard", ""),
        ("nfs4", ",local_lock=all", "warning The file system of /data disk/runs is nfs4 (local_lock=all): locks hold"),
        ("ext4", ",barrier=0", "warning The file system of /data disk/runs is ext4 (barrier=0): flushes do not"),
        ("tmpfs", "", "warning The file system of /data disk/runs is tmpfs: it is in memory, and gone"),
        ("overlay", "", "note The file system of /data disk/runs is overlay: it is a container's"),
        ("fuse.s3fs", "", "note The file system of /data disk/runs is fuse.s3fs: another machine"),
    ],
)
def test_what_kinds_and_options_of_file_systems_mean(tmp_path, monkeypatch, kind, options, says):
    monkeypatch.setattr(machine, "MOUNTS", tmp_path / "mountinfo")
    (tmp_path / "mountinfo").write_text(TABLE.format(kind=kind, options=options))
    place = Path("/data disk/runs")
    assert said(machine.check_mount(place, place))[: len(says) or None] == says
    assert machine.check_mount(Path("/home"), Path("/home")) == []


@pytest.mark.promise("doctor.disk")
def test_a_disk_or_memory_that_is_too_small_is_found(tmp_path, monkeypatch):
    def room(free: int) -> str:
        monkeypatch.setattr(disk, "free_bytes", lambda folder: free)
        return said(machine.check_room(tmp_path, tmp_path, "x", NEEDS))

    assert room(machine.GIB // 2).startswith(f"fault x needs 1.00 GiB in {tmp_path}; 0.50 GiB are free")
    assert room(3 * machine.GIB // 2).startswith("note")
    assert said(machine.check_memory("x", NEEDS, MemoryLimit(machine.GIB // 2, "free"))).startswith(
        "fault x needs about 1.00 GiB"
    )
    assert said(machine.check_memory("x", NEEDS, MemoryLimit(machine.GIB, "left to the container"))).startswith(
        "warning"
    )


@pytest.mark.nightly
@pytest.mark.promise("doctor.disk")
def test_the_verb_tells_writes_and_leaves_nothing_behind(unpad, tmp_path, monkeypatch, tmp_path_factory):
    monkeypatch.setattr(machine, "mount_of", lambda place: ("tmpfs", []))
    recipe, at = text(tmp_path / "toy"), tmp_path_factory.mktemp("disk")
    words = ["--machine", "--at", at / "runs", "--lang", "zh", "--json", "found.json"]
    assert "文件系统是 tmpfs" in unpad("doctor", recipe, *words, code=DOCTOR_FOUND_TROUBLE).out
    written = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert written["findings"][0]["code"] == "file_system"
    assert written["needs"]["memory"] > written["needs"]["disk"] > 0
    assert list(at.iterdir()) == []
    for words in (
        ("doctor", "--lang", "en"),
        ("doctor", recipe, "--at", at),
        ("doctor", "--machine", "--out", "a.svg"),
    ):
        assert unpad(*words).code == 2
