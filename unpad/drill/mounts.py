"""The disk of a run: its file system, names and permissions, and the space that the run will need."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unpad.drill.findings import attempt, finding
from unpad.machine.files import limit_of
from unpad.storage import disk
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


NEEDED_BYTES = 100  # of a name: `best-STAGE` of 40 letters, and temporary names
LENGTHS = (255, 143, NEEDED_BYTES)  # of most file systems, of encrypted folders, and needed
CHINESE = "语料-模型 é"


MEANING = "such names cannot be written: choose another disk by --out"


def check_names(folder: Path, stages: Sequence[str]) -> Finding:
    """Check lengths of names, capitals and Chinese.

    Args:
        stages: names of the recipe's stages, used as folder names.
    """
    place = folder / "names"
    place.mkdir()
    return attempt("names", lambda: _names(place, stages), MEANING)


def check_permissions(folder: Path, *, private: bool) -> Finding:
    """Check that a file can be restricted to its owner.

    Args:
        private: whether the data is about people, so that only the owner may read the run.
    """
    place = folder / "permissions"
    place.mkdir()
    return attempt("permissions", lambda: _permissions(place, private), MEANING)


def _names(folder: Path, stages: Sequence[str]) -> Finding:
    longest = next((length for length in LENGTHS if _can_make(folder / ("n" * length))), 0)
    if longest < NEEDED_BYTES:
        told = f"none of {NEEDED_BYTES} bytes"
        return finding("names", "fault", told, "checkpoints cannot be written: choose another disk by --out")
    (folder / "Case").touch()
    tells_case = not (folder / "case").exists()
    alike = [one for one in stages if sum(one.lower() == other.lower() for other in stages) > 1]
    keeps_chinese = _can_make(folder / CHINESE) and CHINESE in os.listdir(folder)
    measured = f"to {longest} bytes; capitals {'differ' if tells_case else 'do not count'}"
    measured += "; Chinese is kept" if keeps_chinese else "; Chinese is changed"
    if alike and not tells_case:
        told = f"the stages {', '.join(alike)} would share a checkpoint: rename one"
        return finding("names", "fault", measured, told)
    if not keeps_chinese:
        return finding("names", "warning", measured, "name runs and files in Latin letters")
    return finding("names", "ok", measured, "all that a run makes")


def _can_make(path: Path) -> bool:
    try:
        path.touch()
    except (OSError, UnicodeError):
        return False
    return True


def _permissions(folder: Path, private: bool) -> Finding:
    path = folder / "private"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    mode = stat.S_IMODE(path.stat().st_mode)
    inner = folder / "inner"
    inner.mkdir(0o700)
    inner_mode = stat.S_IMODE(inner.stat().st_mode)
    measured = f"a private file {mode:03o}, folder {inner_mode:03o}"
    if not (mode | inner_mode) & 0o077:
        return finding("permissions", "ok", measured, "private data stays its owner's")
    if private:
        return finding("permissions", "fault", measured, "others can read this run about people: choose another disk")
    return finding("permissions", "warning", measured, "others can read whatever is written here")


BYTES_PER_STEP = 3_000  # of metrics, timing, log and TensorBoard
OTHER_BYTES = 16 << 20  # the page, vocabularies, samples
OTHER_FILES = 100
FILES_PER_CHECKPOINT = 5
MARGIN = 64  # open files beyond those during a step
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Needs:
    """Needs of a run on its disk.

    Args:
        checkpoint_bytes: of weights and optimizer, as saved.
        weights_bytes: size of the weights alone, as in `best`.
        largest_file: bytes of the larger of a checkpoint's two files.
        keep: checkpoints kept; bests: folders of best weights, one per stage.
        steps: of the whole run.
        open_files: of the process while it trains.
    """

    checkpoint_bytes: int
    weights_bytes: int
    largest_file: int
    keep: int
    bests: int
    steps: int
    open_files: int

    @property
    def disk_bytes(self) -> int:
        """Largest size of the run's folder: during replacement it holds one more checkpoint and one more best than are
        kept."""
        checkpoints = (self.keep + 1) * self.checkpoint_bytes + (self.bests + 1) * self.weights_bytes
        return checkpoints + self.steps * BYTES_PER_STEP + OTHER_BYTES

    @property
    def files(self) -> int:
        return (self.keep + self.bests + 2) * FILES_PER_CHECKPOINT + OTHER_FILES


def size_text(num_bytes: int) -> str:
    """A size in words: MiB below 10 GiB."""
    return f"{num_bytes / MIB:,.0f} MiB" if num_bytes < 10 * GIB else f"{num_bytes / GIB:,.1f} GiB"


def folder_bytes(folder: Path) -> int:
    """Bytes that the files of a folder take; 0 if there is none."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # a run that trains removes its own
            total += path.lstat().st_size
    return total


def check_room(folder: Path, needs: Needs, used_bytes: int) -> Iterator[Finding]:
    """Check space, files and open files.

    Args:
        folder: on the disk in question.
        used_bytes: already used by the run.
    """
    meaning = "it cannot be told how much room there is"
    yield attempt("space", lambda: check_space(folder, needs, used_bytes), meaning)
    yield attempt("files", lambda: check_inodes(folder, needs), meaning)
    yield check_open_files(needs)


def check_space(folder: Path, needs: Needs, used_bytes: int = 0) -> Finding:
    """Compare the bytes that a run needs with the free and allowed ones, and reserve them for an instant."""
    missing = max(needs.disk_bytes - used_bytes, needs.checkpoint_bytes)
    free = disk.free_bytes(folder)
    measured = f"{size_text(missing)} needed, {size_text(free)} free"
    limit = limit_of("FSIZE")
    fix = "free some, lower checkpoint.keep, or choose another disk by --out"
    if missing > free:
        return finding("space", "fault", measured, f"the disk fills during the run: {fix}")
    if limit is not None and limit < needs.largest_file:
        told = f"a file of {size_text(needs.largest_file)} needed, {size_text(limit)} allowed"
        return finding("space", "fault", told, "checkpoints cannot be written: raise `ulimit -f`")
    if missing <= free // 2 and not is_in_memory(folder) and not reserve(folder / "reserved", missing):
        told = f"{size_text(missing)} needed, and refused"
        return finding("space", "fault", told, "your quota is smaller than what is free: see `quota -s`")
    if missing > free // 2:
        return finding("space", "warning", measured, "enough, if nothing else is written meanwhile")
    return finding(
        "space", "ok", measured, f"{needs.keep} checkpoints of {size_text(needs.checkpoint_bytes)} and the best"
    )


def reserve(path: Path, num_bytes: int) -> bool:
    """Reserve bytes for a new file, and give them back; False if the file system or a quota refuses them.

    True for a file system that cannot reserve bytes: nothing is written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        code = _fallocate(descriptor, num_bytes)
    finally:
        os.close(descriptor)
        os.unlink(path)
    return code not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _fallocate(descriptor: int, num_bytes: int) -> int:
    """Linux's fallocate, returning its errno: `os.posix_fallocate` would write the bytes where it cannot reserve
    them."""
    if sys.platform != "linux":
        return errno.ENOTSUP
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if call is None:
        return errno.ENOTSUP
    done = call(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes))
    return ctypes.get_errno() if done else 0


def check_inodes(folder: Path, needs: Needs) -> Finding:
    """Compare the number of files that a run makes with what the file system has left."""
    status = os.statvfs(folder)
    if status.f_files == 0:
        return finding("files", "ok", "as many as there is space for", "no limit of their own")
    measured = f"{needs.files} needed, {status.f_favail:,} free"
    if status.f_favail < needs.files:
        return finding("files", "fault", measured, "no inode is left: remove small files, or choose another disk")
    return finding("files", "ok", measured, "inodes of the disk")


def check_open_files(needs: Needs) -> Finding:
    """Compare the open files of a training with the limit of a process."""
    limit = limit_of("NOFILE")
    allowed = "no limit" if limit is None else f"{limit:,} allowed"
    measured = f"{needs.open_files} in a step, {allowed}"
    if limit is not None and limit < needs.open_files + MARGIN:
        return finding("open files", "fault", measured, "too few: raise `ulimit -n` to 1024")
    return finding("open files", "ok", measured, "files and pipes of the process")
