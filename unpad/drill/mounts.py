"""File systems: the one that holds a folder, its mount options, and the consequences for a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unpad.drill.findings import finding
from unpad.terminal.finding import Finding, Severity

MOUNTS = Path("/proc/self/mountinfo")
CHECK = "file system"
Meaning = tuple[Severity, str]

_MEMORY: Meaning = ("warning", "in memory: gone after a reboot, and it takes memory; name a disk by --out")
_LOCAL: Meaning = ("ok", "a disk of this machine")
_NETWORK: Meaning = ("ok", "a network disk; hosts share its locks if its server keeps them")
_CLUSTER: Meaning = ("ok", "a cluster file system; hosts share its locks")
_SHARED: Meaning = ("warning", "a folder of the virtual machine's host; other guests may not see its locks")
_PLAIN: Meaning = ("warning", "no journal and no permissions: a power cut may damage it; prefer ext4 or xfs")
_SMB: Meaning = ("warning", "SMB: locks and flushes are as its server wants; prefer NFS")
_OBJECTS: Meaning = (
    "warning",
    "a bucket, not a disk: renames and locks are as its program wants; prefer a disk",
)
MEANINGS: dict[str, Meaning] = {
    **dict.fromkeys(("tmpfs", "ramfs", "devtmpfs"), _MEMORY),
    **dict.fromkeys(("ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs", "nilfs2"), _LOCAL),
    "ext2": ("warning", "no journal: after a power cut it needs a repair; prefer ext4 or xfs"),
    "overlay": ("warning", "gone with its container: mount a volume, and name it by --out"),
    **dict.fromkeys(("nfs", "nfs4"), _NETWORK),
    **dict.fromkeys(("cifs", "smb3", "smbfs"), _SMB),
    **dict.fromkeys(("lustre", "ceph", "gpfs", "beegfs", "ocfs2", "gfs2", "glusterfs", "fuse.glusterfs"), _CLUSTER),
    **dict.fromkeys(("9p", "virtiofs", "vboxsf", "fuse.vmhgfs-fuse", "drvfs"), _SHARED),
    **dict.fromkeys(("vfat", "msdos", "exfat", "ntfs", "ntfs3", "fuseblk", "hfs", "hfsplus"), _PLAIN),
    **dict.fromkeys(("fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.goofys", "fuse.mount-s3"), _OBJECTS),
    "fuse.sshfs": ("warning", "over SSH: no lock reaches other hosts; one training at a time"),
}  # fmt: skip
UNKNOWN: Meaning = ("warning", "of a kind that is not known here; the checks below tell what it does")

# Options that break what a run relies on: the file systems concerned (empty: all), and the consequence.
OPTIONS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (r"volatile", ("overlay",), "nothing is ever flushed: a power cut takes all"),
    (r"nobarrier|barrier=0", (), "flushes stop at the disk's cache: a power cut may take a checkpoint"),
    (r"nolock|local_lock=(?:all|flock)", ("nfs", "nfs4"), "locks hold on this host alone: one training at a time"),
    (r"localflock|noflock", ("lustre",), "locks hold on this host alone: one training at a time"),
    (r"nobrl", ("cifs", "smb3"), "locks hold on this host alone: one training at a time"),
    (r"soft|softerr", ("nfs", "nfs4"), "a slow server fails writes; mount it hard"),
)


@dataclass(frozen=True)
class Mount:
    """A mounted file system.

    Args:
        point: mount point; kind: such as ext4; source: device or server.
        options: options of the mount and of the file system.
    """

    point: str
    kind: str
    source: str
    options: tuple[str, ...]


def mounts() -> list[Mount]:
    """All mounts in order, later ones over earlier ones; empty if the system does not list them."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, more = before.split(" "), after.split(" ")
        if len(fields) >= 6 and len(more) >= 3:
            options = tuple(dict.fromkeys([*fields[5].split(","), *more[2].split(",")]))
            found.append(Mount(_unescaped(fields[4]), more[0], _unescaped(more[1]), options))
    return found


def _unescaped(text: str) -> str:
    """A field of the mount table, with its octal escapes decoded."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def mount_of(folder: Path, among: Sequence[Mount] | None = None) -> Mount | None:
    """The mount that a folder is on; None if the system does not list mounts."""
    real = folder.resolve()
    best: Mount | None = None
    for mount in mounts() if among is None else among:
        if real.is_relative_to(mount.point) and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def is_in_memory(folder: Path) -> bool:
    """True if a folder's files are held in memory."""
    mount = mount_of(folder)
    return mount is not None and MEANINGS.get(mount.kind) == _MEMORY


def check_mount(folder: Path) -> Finding:
    """Check the file system of a folder."""
    mount = mount_of(folder)
    if mount is None:
        return finding(CHECK, "warning", "this system does not tell", UNKNOWN[1])
    verdict, meaning = MEANINGS.get(mount.kind, UNKNOWN)
    lacks = [
        f"{option}: {told}"
        for pattern, kinds, told in OPTIONS
        for option in mount.options
        if re.fullmatch(pattern, option) and (not kinds or mount.kind in kinds)
    ]
    return finding(
        CHECK, "warning" if lacks else verdict, f"{mount.kind} at {mount.point}", "; ".join([meaning, *lacks])
    )
