"""File systems are told apart by the table of mounts."""

from __future__ import annotations

from pathlib import Path

import pytest

from unpad.drill import mounts
from unpad.drill.mounts import check_mount, is_in_memory, mount_of

TABLE = """\
22 1 0:21 / / rw,relatime - {root} /dev/sda1 rw{options}
30 22 0:30 / /data\\040disk rw - xfs /dev/sdb rw
31 22 0:31 / /data\\040disk/fast rw - tmpfs tmpfs rw,size=1g
32 22 0:32 / /mnt rw - nfs4 server:/home rw,hard
33 22 0:33 / /mnt rw shared:1 master:2 - nfs4 other:/home rw,soft,local_lock=all
broken line
"""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mountinfo"
    monkeypatch.setattr(mounts, "MOUNTS", path)
    path.write_text(TABLE.format(root="ext4", options=""))
    return path


@pytest.mark.parametrize(
    ("folder", "kind", "verdict", "says"),
    [
        ("/", "ext4 at /", "ok", "a disk of this machine"),
        ("/database", "ext4 at /", "ok", "a disk of this machine"),
        ("/data disk/runs", "xfs at /data disk", "ok", "a disk of this machine"),
        ("/data disk/fast/runs", "tmpfs at /data disk/fast", "warning", "gone after a reboot"),
        ("/mnt/runs", "nfs4 at /mnt", "warning", "local_lock=all: locks hold on this host alone"),
    ],
)
def test_the_innermost_mount_is_told_and_a_later_one_hides_an_earlier(
    table: Path, folder: str, kind: str, verdict: str, says: str
) -> None:
    found = check_mount(Path(folder))
    assert (found.values["measured"], found.severity) == (kind, verdict)
    assert says in found.values["meaning"]
    assert is_in_memory(Path(folder)) is ("tmpfs" in kind)


@pytest.mark.promise("drill.file-systems")
@pytest.mark.parametrize(
    ("root", "options", "verdict", "says"),
    [
        ("overlay", ",lowerdir=a", "warning", "gone with its container"),
        ("overlay", ",volatile", "warning", "a power cut takes all"),
        ("nfs", ",hard", "ok", "a network disk"),
        ("9p", ",trans=virtio", "warning", "other guests may not see its locks"),
        ("fuse.sshfs", "", "warning", "one training at a time"),
        ("fuse.s3fs", "", "warning", "a bucket"),
        ("vfat", "", "warning", "a power cut may damage it"),
        ("ext4", ",barrier=0", "warning", "a power cut may take a checkpoint"),
        ("ext4", ",volatile", "ok", "a disk of this machine"),
        ("lustre", ",localflock", "warning", "this host alone"),
        ("of-tomorrow", "", "warning", "not known here"),
    ],
)
def test_what_kinds_and_options_mean(table: Path, root: str, options: str, verdict: str, says: str) -> None:
    table.write_text(TABLE.format(root=root, options=options))
    found = check_mount(Path("/home"))
    assert found.severity == verdict
    assert says in found.values["meaning"]


def test_a_system_without_the_table_is_a_warning(table: Path) -> None:
    table.unlink()
    assert mount_of(Path("/")) is None
    assert check_mount(Path("/")).severity == "warning"
    assert not is_in_memory(Path("/"))
