"""`unpad doctor --machine`: six checks of a folder's disk and of the memory, before a training into that folder.

The checks of the disk work in a new folder there, which is removed, and go through `unpad/storage/`, as a run does.
"""

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

from unpad import storage
from unpad.doctor.finding import Finding, Found, Language, Severity, Words, finding, listed, ranked, serious
from unpad.errors import RunInUseError
from unpad.interchange.origin import open_recipe
from unpad.machine import MemoryLimit, memory_limit, process_memory
from unpad.models.adapters import kept_weights
from unpad.run.folder import RUNS, as_run, run_recipe
from unpad.storage import disk
from unpad.terminal.progress import progress
from unpad.terminal.table import wrapped
from unpad.training.auto_size import StageMemory
from unpad.training.parallel.divisions import alone
from unpad.training.setup import check_stages, prepare_setup
from unpad.training.stage import epoch_plan, prepare_model, run_length

CHECKS = ("file_system", "lock", "flush", "rename", "room", "memory")
GIB = 2**30
MOUNTS = Path("/proc/self/mountinfo")
MEMORY = ("tmpfs", "ramfs", "devtmpfs")
KINDS: dict[str, Words] = {
    **dict.fromkeys(MEMORY, ("it is in memory, and gone after a reboot", "它在内存里，重启后就没有了")),
    "overlay": ("it is a container's, and gone with it", "它属于容器，随容器一起消失"),
    **dict.fromkeys(
        ("cifs", "smb3", "9p", "virtiofs", "vboxsf", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone"),
        ("another machine decides what its locks, flushes and renames do", "锁、刷盘和重命名由另一台机器决定"),
    ),
}
OPTIONS: dict[str, Words] = {  # patterns of mount options
    r"volatile|nobarrier|barrier=0": ("flushes do not reach the device", "刷盘到不了设备"),
    r"nolock|local_lock=(?:all|flock)|localflock|noflock|nobrl": ("locks hold on this host alone", "锁只在本机有效"),
    r"soft|softerr": ("a slow server fails writes", "服务器一慢，写入就失败"),
}
HOLD = "import sys; from pathlib import Path; from unpad.storage import RunLock\nwith RunLock(Path(sys.argv[1])): print(flush=True); sys.stdin.read()"  # noqa: E501
FREED_WITHIN = 5.0  # seconds after a SIGKILL
PAGE, BLOCK, WRITES, RENAMES = 4096, 8 << 20, 12, 300
BYTES_PER_STEP, OTHER_DISK = 3_000, 16 << 20  # of logs; of the page, vocabularies and samples
OTHER_MEMORY = 160 << 20  # of evaluation, logs and the page


def mount_of(folder: Path) -> tuple[str, list[str]]:
    """Kind and options of the file system that holds a folder; empty where the system does not list them."""
    best, kind, options = "", "", list[str]()
    with suppress(OSError):
        for line in MOUNTS.read_text("utf-8", "surrogateescape").splitlines():
            before, _, after = line.partition(" - ")
            fields, more = before.split(" "), after.split(" ")
            point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
            if folder.resolve().is_relative_to(point) and len(point) >= len(best):
                best, kind, options = point, more[0], [*fields[5].split(","), *more[2].split(",")]
    return kind, options


@finding("file_system",
    en=("The file system of {where} is {kind}: {what}.", "name a local disk with --at, and train there with --out"),
    zh=("{where} 的文件系统是 {kind}：{what}。", "用 --at 指定一个本地磁盘，并用 --out 在那里训练"))  # fmt: skip
def check_mount(where: Path, place: Path) -> Found | None:
    """Kind and options of the file system."""
    kind, options = mount_of(place)
    for pattern, what in OPTIONS.items():
        if set_option := next((option for option in options if re.fullmatch(pattern, option)), None):
            return Found(0, str(where), where=str(where), kind=f"{kind} ({set_option})", what=what)
    if kind not in KINDS:
        return None
    severity: Severity | None = None if kind in MEMORY else "note"
    return Found(0, str(where), where=str(where), kind=kind, what=KINDS[kind], severity=severity)


@finding("lock", "fault",
    en=("Locks in {where} do not hold: {what}.", "choose another disk: two trainings could write one run"),
    zh=("{where} 里的锁无效：{what}。", "换一个磁盘：两次训练可能写进同一个运行目录"))  # fmt: skip
def check_lock(where: Path, place: Path) -> Found | None:
    """A lock that another process holds is refused, and free once that process is killed."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        if not holder.stdout.readline():
            return Found(0, str(where), where=str(where), what=("a second process gets none", "第二个进程拿不到锁"))
        with suppress(RunInUseError), storage.RunLock(place):
            return Found(0, str(where), where=str(where), what=("two processes get one", "两个进程同时拿到锁"))
    finally:
        holder.kill()
        holder.communicate()
    killed = time.monotonic()
    while time.monotonic() - killed < FREED_WITHIN:
        with suppress(RunInUseError), storage.RunLock(place):
            return None
        time.sleep(0.1)
    return Found(0, str(where), where=str(where), what=("a killed process keeps it", "进程被杀后锁不释放"))


def flush_seconds(place: Path) -> tuple[float, float]:
    """Upper quartile of small writes with a flush, and lower quartile of writes through (O_SYNC): both wait for the
    device where flushes are not dropped on the way to it."""
    through = os.open(place / "through", os.O_WRONLY | os.O_CREAT | disk.BINARY | getattr(os, "O_SYNC", 0), 0o600)
    flushed = os.open(place / "flushed", os.O_WRONLY | os.O_CREAT | disk.BINARY, 0o600)
    times: tuple[list[float], list[float]] = ([], [])
    try:
        for _ in range(WRITES):
            for descriptor in (flushed, through):
                os.lseek(descriptor, 0, os.SEEK_SET)
            began = time.perf_counter()
            os.write(flushed, os.urandom(PAGE))
            os.fsync(flushed)
            middle = time.perf_counter()
            os.write(through, os.urandom(PAGE))
            times[0].append(middle - began)
            times[1].append(time.perf_counter() - middle)
    finally:
        os.close(through)
        os.close(flushed)
    return quantiles(times[0], n=4)[2], quantiles(times[1], n=4)[0]


@finding("flush",
    en=("Flushes in {where}: {what} ({number:.1f} ms for a small file).", "choose another disk, or look for eatmydata"),
    zh=("{where} 的刷盘：{what}（小文件 {number:.1f} 毫秒）。", "换一个磁盘，或检查是否用了 eatmydata"))  # fmt: skip
def check_flush(where: Path, place: Path) -> Found | None:
    """What is flushed can be read back; a flush is neither very slow nor far faster than a write through."""
    data = os.urandom(BLOCK)
    disk.write_file(place / "block", data)
    disk.sync_folder(place)
    slow, fast = flush_seconds(place)

    def said(what: Words, **more: Any) -> Found:
        return Found(1000 * slow, str(where), where=str(where), what=what, **more)

    if (place / "block").read_bytes() != data:
        return said(("what is read is not what was written", "读出的不是写入的"), severity="fault")
    if slow > 0.5:
        return said(("slow, so save seldom, as by checkpoint.every_seconds=600", "很慢，请少保存检查点"))
    if slow * 20 < fast and mount_of(place)[0] not in MEMORY:
        return said(("something drops them, and a power cut may take a run", "被某个程序丢弃，断电可能丢失运行"))
    return None


@finding("rename", "fault",
    en=("Renames in {where} are not whole: {what}.", "choose another disk: a kill could leave half a checkpoint"),
    zh=("{where} 里的重命名不完整：{what}。", "换一个磁盘：被杀时可能只留下半个检查点"))  # fmt: skip
def check_rename(where: Path, place: Path) -> Found | None:
    """A file that is replaced is never seen gone or mixed, and a folder with files is not replaced."""
    target, over, broken = place / "target", threading.Event(), list[Words]()

    def watch() -> None:
        while not over.is_set() and not broken:
            try:
                seen = target.read_bytes()
                if len(seen) != PAGE or len(set(seen)) != 1:
                    broken.append(("a file was seen mixed", "文件内容混在一起"))
            except OSError:
                broken.append(("a file was gone for a moment", "文件一时消失"))

    target.write_bytes(bytes(PAGE))
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for number in range(RENAMES):
            (place / "new").write_bytes(bytes([number % 256]) * PAGE)
            disk.rename(place / "new", target)
    finally:
        over.set()
        watcher.join()
    for name in ("a", "b"):
        (place / name).mkdir()
        (place / name / "file").touch()
    with suppress(OSError):
        disk.rename(place / "a", place / "b")
        broken.append(("a full folder was replaced", "有内容的目录被替换"))
    return Found(0, str(where), where=str(where), what=broken[0]) if broken else None


@dataclass(frozen=True)
class RunNeeds:
    """What a training of a recipe takes, in bytes: its folder at most, and memory."""

    disk: int
    memory: int


def needs_of(subject: str, overrides: Sequence[str]) -> RunNeeds:
    """Read a recipe's data, build its model, and predict its needs from small passes.

    Raises:
        UnpadError: it cannot be trained.
    """
    run = as_run(subject)
    recipe = alone(open_recipe(subject, overrides) if run is None else run_recipe(run, overrides))
    setup = prepare_setup(recipe, Path(), None)
    check_stages(setup)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in kept_weights(setup.model).values())
    trained = peak = 0
    for stage in setup.stages:
        if stage.train_ids.size:
            prepare_model(setup.model, stage)
            trained = max(trained, sum(p.numel() for p in setup.model.parameters() if p.requires_grad))
            memory = StageMemory.measured(stage, setup.model, setup.device, setup.precision)
            peak = max(peak, memory.needed(epoch_plan(stage, 0)))
    saved, keep, bests = weights + 8 * trained, recipe.checkpoint.keep, len(setup.stages)
    folder = (keep + 1) * saved + (bests + 1) * weights + run_length(setup.stages).last(0, 0).step * BYTES_PER_STEP
    copies = 2 * saved  # of weights and moments, while they are saved
    in_memory = (process_memory() if setup.device.type == "cpu" else 0) + max(peak, copies) + OTHER_MEMORY
    return RunNeeds(folder + OTHER_DISK, in_memory)


@finding("room", "fault",
    en=("{name} needs {number:.2f} GiB in {where}; {free:.2f} GiB are free.", "lower checkpoint.keep, or free some"),
    zh=("{name} 在 {where} 需要 {number:.2f} GiB，而只剩 {free:.2f} GiB。",
        "调低 checkpoint.keep，或腾出空间"))  # fmt: skip
def check_room(where: Path, place: Path, name: str, needs: RunNeeds) -> Found | None:
    """Free space against what the run's folder takes at most; a note where another such run would not fit."""
    free = disk.free_bytes(place)
    if 2 * needs.disk <= free:
        return None
    severity: Severity | None = "note" if needs.disk <= free else None
    size, field = needs.disk / GIB, "checkpoint.keep"
    return Found(size, field, severity=severity, name=name, where=str(where), free=free / GIB)


@finding("memory", "fault",
    en=("{name} needs about {number:.2f} GiB of memory, and {free:.2f} GiB are {why}.", "lower plan.tokens_per_micro"),
    zh=("{name} 约需 {number:.2f} GiB 内存，而可用的是 {free:.2f} GiB（{why}）。",
        "调低 plan.tokens_per_micro"))  # fmt: skip
def check_memory(name: str, needs: RunNeeds, limit: MemoryLimit) -> Found | None:
    """The predicted peak of a training against what is free, the container's limit and `ulimit`."""
    if needs.memory <= 0.8 * limit.num_bytes:
        return None
    severity: Severity = "fault" if needs.memory > limit.num_bytes else "warning"
    free, field = limit.num_bytes / GIB, "plan.tokens_per_micro"
    return Found(needs.memory / GIB, field, severity=severity, name=name, free=free, why=limit.reason)


@dataclass(frozen=True)
class CheckedMachine:
    """Findings about a folder and this machine, and what a training of `name` needs."""

    name: str
    where: Path
    findings: list[Finding]
    needs: RunNeeds
    seconds: float

    @property
    def troubles(self) -> list[Finding]:
        """Findings above a note."""
        return serious(self.findings)

    def lines(self, language: Language) -> list[str]:
        """What was checked and what is needed, then the findings."""
        num, needed, space = len(self.troubles), self.needs.memory / GIB, self.needs.disk / GIB
        head = (
            f"{self.name} in {self.where}: {num} of {len(CHECKS)} checks ({', '.join(CHECKS)}) found trouble, "
            f"{self.seconds:.0f} s; it needs {space:.2f} GiB of disk and about {needed:.2f} GiB of memory",
            f"{self.where} 里的 {self.name}：{len(CHECKS)} 项检查（{', '.join(CHECKS)}）中 {num} 项有问题，"
            f"{self.seconds:.0f} 秒；需要 {space:.2f} GiB 磁盘和约 {needed:.2f} GiB 内存",
        )[language == "zh"]
        return [*wrapped(head), *listed(self.findings, language)]

    def to_json(self, language: Language) -> dict[str, Any]:
        findings = [item.to_json(language) for item in self.findings]
        about = {"name": self.name, "where": str(self.where), "seconds": self.seconds}
        return {**about, "findings": findings, "needs": vars(self.needs)}


def examine_machine(name: str, overrides: Sequence[str] = (), where: Path | None = None) -> CheckedMachine:
    """Check a disk, and what a training of a recipe or run needs.

    Args:
        where: a folder on the disk, which need not exist; default that of the run, or runs/.

    Raises:
        UnpadError: the recipe or its data cannot be trained, or no folder can be made there.
    """
    began, where = time.perf_counter(), where or as_run(name) or RUNS
    limit = memory_limit(of_new_process=True)
    parent = next(folder for folder in (where.absolute(), *where.absolute().parents) if folder.is_dir())
    with progress("reading the data"):
        needs = needs_of(name, overrides)
    findings = list[Finding]()
    with storage.disk_errors(parent), tempfile.TemporaryDirectory(prefix=".unpad-doctor-", dir=parent) as folder:
        for check in (check_mount, check_lock, check_flush, check_rename):
            with progress("checking the disk"):
                place = Path(folder) / check.__name__
                place.mkdir()
                findings += check(where, place)
        findings += check_room(where, Path(folder), name, needs)
    findings += check_memory(name, needs, limit)
    return CheckedMachine(name, where, ranked(findings), needs, time.perf_counter() - began)
