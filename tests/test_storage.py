"""What is written survives a kill, a full disk and a curious hand."""

import errno
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.processes import in_child
from unpad import storage
from unpad.errors import CheckpointError, DiskError, RunInUseError
from unpad.storage import LineLog, RunLock

pytestmark = pytest.mark.slow

FILES = {"a.bin": b"alpha" * 50, "b.json": b"{}\n", "empty": b""}


def operations(work: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the storage operations that `work` does."""
    names: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(storage, "_operation", lambda name, path: names.append(name))
        work()
    return names


def at_operation(number: int, act: Callable[[], None]) -> Callable[[str, Path], None]:
    """A hook that acts at one operation, counted from 0."""
    seen = iter(range(10**6))
    return lambda name, path: act() if next(seen) == number else None


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --------------------------------------------------------------------------- one file


def test_a_killed_write_leaves_the_old_file_or_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "recipe.yaml"
    count = len(operations(lambda: storage.write_atomic(path, "old"), monkeypatch))
    assert count == 4  # write, fsync, rename, fsync of the folder
    found = set()
    for number in range(count):
        storage.write_atomic(path, "old")

        def killed(number: int = number) -> None:
            storage._operation = at_operation(number, kill)
            storage.write_atomic(path, "新" * 1000)

        assert in_child(killed) == -signal.SIGKILL
        found.add(path.read_text())
        storage.clean_leftovers(tmp_path)
        assert names_in(tmp_path) == ["recipe.yaml"]
    assert found == {"old", "新" * 1000}


def test_a_failed_write_names_path_and_bytes_and_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "file"
    storage.write_atomic(path, b"old")
    for number in range(3):
        monkeypatch.setattr(storage, "_operation", at_operation(number, fail_full))
        with pytest.raises(DiskError) as caught:
            storage.write_atomic(path, b"x" * 1234)
        assert str(path) in str(caught.value)
        assert "1,234 bytes" in str(caught.value)
        assert "are free" in str(caught.value)
        assert caught.value.exit_code == 6
        assert names_in(tmp_path) == ["file"]
        assert path.read_bytes() == b"old"


def test_a_file_size_limit_is_a_disk_error_in_the_same_words(tmp_path):
    path = tmp_path / "file"
    storage.write_atomic(path, b"old")

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(DiskError, match="File too large: needs 5,000 bytes"):
            storage.write_atomic(path, b"x" * 5000)

    assert in_child(limited) == 0
    assert path.read_bytes() == b"old"
    assert names_in(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path / "missing" / "file", "No such file or directory"),
        (lambda path: path / ("x" * 300), "File name too long"),
    ],
)
def test_a_place_that_cannot_be_written_is_named(tmp_path, make, reason):
    with pytest.raises(DiskError, match=reason) as caught:
        storage.write_atomic(make(tmp_path), b"x")
    assert caught.value.where == str(make(tmp_path))
    assert names_in(tmp_path) == []


def test_any_name_the_system_allows_can_be_written(tmp_path):
    for name in ("x" * 255, "有 空格", "emoji 🙂", "line\nbreak"):
        storage.write_atomic(tmp_path / name, name)
        assert (tmp_path / name).read_text() == name


def test_folders_are_made_with_their_parents(tmp_path):
    storage.make_folder(tmp_path / "a/b/c")
    storage.make_folder(tmp_path / "a/b/c")
    assert (tmp_path / "a/b/c").is_dir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DiskError, match="Not a directory"):
            storage.make_folder(path)


def test_the_name_of_a_new_folder_is_flushed(tmp_path, monkeypatch):
    flushed, flush = [], os.fsync

    def fsync(descriptor: int) -> None:
        flush(descriptor)
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", fsync)
    storage.make_folder(tmp_path / "a/b")
    assert flushed == [str(tmp_path), str(tmp_path / "a")]


def flushed_by(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what `work` really flushes and renames, in order; temporary names are all `temporary`."""
    done, flush, rename = list[str](), os.fsync, os.rename

    def name_of(path: str | Path) -> str:
        return "temporary" if Path(path).name.startswith(".tmp-") else Path(path).name

    def fsync(descriptor: int) -> None:
        flush(descriptor)
        done.append(f"flush {name_of(os.readlink(f'/proc/self/fd/{descriptor}'))}")

    def renamed(source: Path, target: Path) -> None:
        rename(source, target)
        done.append(f"rename {name_of(source)} to {name_of(target)}")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "rename", renamed)
        work()
    return done


def test_contents_are_on_the_device_before_the_name_and_the_name_before_the_call_returns(tmp_path, monkeypatch):
    parent, path = f"flush {tmp_path.name}", tmp_path / "best"
    file = ["flush temporary", "rename temporary to file", parent]
    assert flushed_by(lambda: storage.write_atomic(tmp_path / "file", b"x"), monkeypatch) == file
    contents = [f"flush {name}" for name in (*FILES, "MANIFEST.json", "temporary")]
    written = [*contents, "rename temporary to best", parent]
    assert flushed_by(lambda: storage.write_folder(path, FILES), monkeypatch) == written
    aside, gone = "rename best to .old-best", ["rename .old-best to temporary", parent]
    replaced = [*contents, aside, "rename temporary to best", parent, *gone]
    assert flushed_by(lambda: storage.replace_folder(path, FILES), monkeypatch) == replaced
    removed = ["rename best to temporary", parent]
    assert flushed_by(lambda: storage.remove_folder(path), monkeypatch) == removed
    log = LineLog(tmp_path / "log.jsonl")
    assert flushed_by(log.sync, monkeypatch) == ["flush log.jsonl"]
    log.close()


def test_a_private_folder_and_what_is_in_it_are_for_the_owner(tmp_path):
    tmp_path.chmod(0o755)
    before = os.umask(0o022)
    try:
        storage.make_folder(tmp_path / "open")
        storage.write_atomic(tmp_path / "open/file", "x")
        storage.write_atomic(tmp_path / "open/secret", "x", private=True)
        storage.make_folder(tmp_path / "closed/below", private=True)
        storage.write_atomic(tmp_path / "closed/below/file", "x")
        storage.write_folder(tmp_path / "closed/folder", FILES)
        storage.make_folder(tmp_path / "closed/later")
        LineLog(tmp_path / "closed/log.jsonl").close()
        with RunLock(tmp_path / "closed"):
            pass
        modes = {str(path.relative_to(tmp_path)): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    finally:
        os.umask(before)
    assert [modes.pop(name) for name in ("open", "open/file", "open/secret")] == [0o755, 0o644, 0o600]
    assert {name: oct(mode) for name, mode in modes.items() if mode & 0o077} == {}
    storage.make_private(tmp_path / "open")
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o700


def test_space_is_checked_before_writing(tmp_path):
    storage.check_space(tmp_path / "not/yet/made", 1)
    with pytest.raises(DiskError, match=r"needs 1,000,000,000,000,000,000 bytes, [\d,]+ are free"):
        storage.check_space(tmp_path / "not/yet/made", 10**18)


# --------------------------------------------------------------------------- a folder with a manifest


def test_a_folder_reads_back_and_verifies(tmp_path):
    storage.write_folder(tmp_path / "cache", FILES)
    storage.verify_folder(tmp_path / "cache")
    assert storage.read_folder(tmp_path / "cache") == FILES
    assert storage.read_folder(tmp_path / "cache", ["b.json"]) == {"b.json": b"{}\n"}
    assert storage.sha256_file(tmp_path / "cache/a.bin") == storage.sha256(FILES["a.bin"])
    assert names_in(tmp_path) == ["cache"]


def test_a_folder_is_written_once(tmp_path):
    storage.write_folder(tmp_path / "cache", FILES)
    storage.write_folder(tmp_path / "cache", FILES)
    with pytest.raises(DiskError, match="exists with other contents"):
        storage.write_folder(tmp_path / "cache", {**FILES, "empty": b"no"})
    assert storage.read_folder(tmp_path / "cache") == FILES
    assert names_in(tmp_path) == ["cache"]


@pytest.mark.parametrize("write", [storage.write_folder, storage.replace_folder])
def test_a_folder_killed_while_it_is_written_is_absent_or_complete(tmp_path, monkeypatch, write):
    count = len(operations(lambda: write(tmp_path / "count", FILES), monkeypatch))
    for number in range(count):
        parent = tmp_path / str(number)
        parent.mkdir()

        def killed(number: int = number, parent: Path = parent) -> None:
            storage._operation = at_operation(number, kill)
            write(parent / "cache", FILES)

        assert in_child(killed) == -signal.SIGKILL
        storage.clean_leftovers(parent)
        assert names_in(parent) in ([], ["cache"])
        if names_in(parent):
            assert storage.read_folder(parent / "cache") == FILES
        write(parent / "cache", FILES)
        assert storage.read_folder(parent / "cache") == FILES


def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    count = len(operations(lambda: storage.write_folder(tmp_path / "count", FILES), monkeypatch))
    for number in range(count - 1):  # the last is the flush of a name that already stands
        with monkeypatch.context() as patch:
            patch.setattr(storage, "_operation", at_operation(number, fail_full))
            with pytest.raises(DiskError):
                storage.write_folder(tmp_path / "cache", FILES)
        assert names_in(tmp_path) == ["count"]


def test_a_folder_whose_replacement_fails_is_put_back(tmp_path, monkeypatch):
    path = tmp_path / "best"
    storage.write_folder(path, FILES)
    fails = iter([True])

    def hook(name: str, place: Path) -> None:
        if name == "rename" and place == path and next(fails, False):
            fail_full()

    monkeypatch.setattr(storage, "_operation", hook)
    with pytest.raises(DiskError):
        storage.replace_folder(path, {"a.bin": b"new"})
    assert names_in(tmp_path) == ["best"]
    assert storage.read_folder(path) == FILES


def to_link(path: Path, outside: Path) -> None:
    path.rename(outside)
    path.symlink_to(outside)


DAMAGES: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    "flip": ("a.bin sha256 mismatch", lambda path, _: path.write_bytes(b"b" + FILES["a.bin"][1:])),
    "shorten": ("a.bin has size 249, expected 250", lambda path, _: path.write_bytes(FILES["a.bin"][:-1])),
    "grow": ("a.bin has size 251, expected 250", lambda path, _: path.write_bytes(FILES["a.bin"] + b"\0")),
    "delete": ("a.bin is missing", lambda path, _: path.unlink()),
    "link": ("a.bin is a link", to_link),
    "pipe": ("a.bin is not a plain file", lambda path, _: path.unlink() or os.mkfifo(path)),
    "folder": ("a.bin cannot be read: Is a directory", lambda path, _: path.unlink() or path.mkdir()),
    "no manifest": ("MANIFEST.json is missing", lambda path, _: path.with_name("MANIFEST.json").unlink()),
    "manifest link": (
        "MANIFEST.json is a link",
        lambda path, outside: to_link(path.with_name("MANIFEST.json"), outside),
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_found_and_named(tmp_path, what):
    message, spoil = DAMAGES[what]
    folder = tmp_path / "cache"
    storage.write_folder(folder, FILES)
    spoil(folder / "a.bin", tmp_path / "outside")
    for read in (storage.verify_folder, storage.read_folder):
        with pytest.raises(CheckpointError, match=message) as caught:
            read(folder)
        assert caught.value.where == str(folder)


ENTRY = {"size": 0, "sha256": storage.sha256(b"")}


@pytest.mark.parametrize(
    "text",
    [
        *(
            json.dumps({"files": {name: ENTRY}, "format": 1})
            for name in (
                "../secret",
                "/etc/passwd",
                "..",
                ".",
                "",
                "a/b",
                ".hidden",
                "a\0b",
                "MANIFEST.json",
                "x" * 300,
            )
        ),
        *(
            json.dumps({"files": {"a": entry}, "format": 1})
            for entry in ({}, [], None, {**ENTRY, "size": -1}, {**ENTRY, "size": True}, {**ENTRY, "sha256": "0"})
        ),
        '{"files": {"a": {"size": ' + "9" * 5000 + ', "sha256": "' + "0" * 64 + '"}}, "format": 1}',
        '{"files": {"a": {"size": NaN, "sha256": "' + "0" * 64 + '"}}, "format": 1}',
        "[" * 200_000,
        '{"a":' * 200_000,
        "[]",
        "{}",
        '{"files": [], "format": 1}',
        '{"files": {}, "format": 2}',
        "",
        "\udcff",
    ],
    ids=range(26),
)
def test_a_hostile_manifest_is_refused(tmp_path, text):
    (tmp_path / "secret").write_bytes(b"")
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "MANIFEST.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError):
        storage.read_folder(folder)


def test_a_manifest_of_the_largest_size_is_read_and_a_larger_one_is_not(tmp_path, monkeypatch):
    storage.write_folder(tmp_path / "cache", FILES)
    size = (tmp_path / "cache/MANIFEST.json").stat().st_size
    monkeypatch.setattr(storage, "MAX_MANIFEST_BYTES", size)
    assert storage.read_folder(tmp_path / "cache") == FILES
    monkeypatch.setattr(storage, "MAX_MANIFEST_BYTES", size - 1)
    with pytest.raises(CheckpointError, match="is larger than"):
        storage.read_folder(tmp_path / "cache")


def test_files_outside_the_manifest_are_never_opened(tmp_path, monkeypatch):
    storage.write_folder(tmp_path / "cache", FILES)
    (tmp_path / "cache/planted.pt").write_bytes(b"x")
    opened: list[str] = []
    real = os.open

    def recorded(path: object, *rest: int, **more: int) -> int:
        opened.append(str(path))
        return real(path, *rest, **more)

    monkeypatch.setattr(storage.os, "open", recorded)
    storage.verify_folder(tmp_path / "cache")
    assert storage.read_folder(tmp_path / "cache") == FILES
    assert set(opened) == {str(tmp_path / "cache"), "MANIFEST.json", *FILES}


def test_removing_never_leaves_half_a_folder_under_its_name(tmp_path, monkeypatch):
    storage.write_folder(tmp_path / "count", FILES)
    count = len(operations(lambda: storage.remove_folder(tmp_path / "count"), monkeypatch))
    for number in range(count):
        storage.write_folder(tmp_path / "cache", FILES)

        def killed(number: int = number) -> None:
            storage._operation = at_operation(number, kill)
            storage.remove_folder(tmp_path / "cache")

        assert in_child(killed) == -signal.SIGKILL
        storage.clean_leftovers(tmp_path)
        assert names_in(tmp_path) in ([], ["cache"])
        if names_in(tmp_path):
            storage.verify_folder(tmp_path / "cache")


def test_removing_never_follows_a_link(tmp_path):
    storage.write_folder(tmp_path / "kept", FILES)
    storage.write_folder(tmp_path / "cache", FILES)
    (tmp_path / "cache/link").symlink_to(tmp_path / "kept")
    (tmp_path / "alias").symlink_to(tmp_path / "kept")
    storage.remove_folder(tmp_path / "cache")
    storage.remove_folder(tmp_path / "alias")
    assert names_in(tmp_path) == ["kept"]
    storage.verify_folder(tmp_path / "kept")


def test_cleaning_touches_only_what_dead_processes_of_ours_left(tmp_path):
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    os.waitpid(dead, 0)
    ours = [f".tmp-{dead}-0123abcd-0", f".tmp-{os.getpid()}-00000000-7"]  # the second: a pid that came round again
    others = [
        f".tmp-{os.getppid()}-0123abcd-0",
        f".tmp-{os.getpid()}-{storage._PROCESS}-0",
        ".tmp-notes",
        f".tmp-{dead}",
        f".tmp-{dead}-0123abcd-0.txt",
        ".old-best",
        "step-00000001",
    ]
    for name in (*ours, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    storage.clean_leftovers(tmp_path)
    assert names_in(tmp_path) == sorted(others)


# --------------------------------------------------------------------------- a log of JSON lines


def test_a_record_is_one_line_of_strict_json_written_at_once(tmp_path, monkeypatch):
    log = LineLog(tmp_path / "metrics.jsonl")
    record = {"step": 1, "loss": 0.1 + 0.2, "word": "你好\u2028", "bad": [float("nan"), float("-inf")], "a": None}
    assert operations(lambda: log.append(record), monkeypatch) == ["write"]
    log.sync()
    text = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    assert text == (
        '{"step": 1, "loss": 0.30000000000000004, "word": "你好\u2028", "bad": ["nan", "-inf"], "a": null}\n'
    )
    log.close()


def test_truncating_keeps_chosen_records_to_the_byte_and_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = LineLog(path)
    for step in range(10):
        log.append({"step": step, "loss": 1 / (step + 1)})
    before = path.read_bytes()
    log.truncate(lambda record: record["step"] < 5)
    assert path.read_bytes() == b"".join(before.splitlines(keepends=True)[:5])
    for step in range(5, 10):
        log.append({"step": step, "loss": 1 / (step + 1)})
    log.close()
    assert path.read_bytes() == before
    assert names_in(tmp_path) == ["metrics.jsonl"]


def test_a_log_of_which_all_is_kept_is_not_written_again(tmp_path, monkeypatch):
    log = LineLog(tmp_path / "metrics.jsonl")
    log.append({"step": 0})
    assert operations(lambda: log.truncate(lambda record: True), monkeypatch) == []
    assert operations(lambda: log.truncate(lambda record: False), monkeypatch) != []
    log.append({"step": 1})
    log.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n'


@pytest.mark.parametrize(
    "tail", [b'{"step": 2, "lo', b"\0" * 100, b'{"step": 2}', b'{"st\n', b"\0\0\n\xff\xfe\n[1]\n3"]
)
def test_a_torn_tail_is_dropped(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    good = b'{"step": 0}\n{"step": 1}\n'
    path.write_bytes(good + tail)
    log = LineLog(path)
    log.truncate(lambda record: True)
    assert path.read_bytes() == good
    log.append({"step": 2})
    log.close()
    assert path.read_bytes() == good + b'{"step": 2}\n'


def test_a_record_never_joins_a_torn_line(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2')
    log = LineLog(path)
    log.append({"a": 3})
    log.close()
    assert path.read_bytes() == b'{"a": 1}\n{"a": 3}\n'


def test_a_damaged_line_before_a_kept_record_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    data = b'{"step": 0}\n{"st\n{"step": 2}\n'
    path.write_bytes(data)
    log = LineLog(path)
    with pytest.raises(CheckpointError) as caught:
        log.truncate(lambda record: True)
    assert caught.value.where == f"{path}:2"
    assert path.read_bytes() == data
    log.truncate(lambda record: record["step"] < 1)
    assert path.read_bytes() == b'{"step": 0}\n'
    log.close()


def test_a_killed_truncation_leaves_the_old_log_or_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    old = b"".join(b'{"step": %d}\n' % step for step in range(4))
    new = old[: len(old) // 2]
    path.write_bytes(old)

    def truncate() -> None:
        log = LineLog(path)
        log.truncate(lambda record: record["step"] < 2)
        log.close()

    for number in range(len(operations(truncate, monkeypatch))):
        path.write_bytes(old)

        def killed(number: int = number) -> None:
            storage._operation = at_operation(number, kill)
            truncate()

        assert in_child(killed) == -signal.SIGKILL
        assert path.read_bytes() in (old, new)


def test_a_record_that_does_not_fit_leaves_no_part(tmp_path):
    path = tmp_path / "metrics.jsonl"

    def limited() -> None:
        log = LineLog(path)
        log.append({"step": 0})
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.RLIM_INFINITY))
        with pytest.raises(DiskError, match="File too large"):
            log.append({"step": 1, "text": "x" * 100})
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        log.append({"step": 2})

    assert in_child(limited) == 0
    assert path.read_bytes() == b'{"step": 0}\n{"step": 2}\n'


# --------------------------------------------------------------------------- one run per directory


def test_of_two_processes_exactly_one_gets_the_directory(tmp_path):
    for _ in range(20):
        start, begin = os.pipe()
        results, report = os.pipe()
        end, release = os.pipe()
        children = []
        for _ in range(2):
            pid = os.fork()
            if pid == 0:
                for descriptor in (begin, release, results):
                    os.close(descriptor)
                os.read(start, 1)
                try:
                    with RunLock(tmp_path):
                        os.write(report, b"W")
                        os.read(end, 1)
                except RunInUseError as error:
                    os.write(report, b"L" if f"pid {os.getpid()}" not in error.what else b"?")
                os._exit(0)
            children.append(pid)
        os.close(begin)  # both wake at once
        outcome = os.read(results, 1) + os.read(results, 1)
        os.close(release)
        for pid in children:
            os.waitpid(pid, 0)
        for descriptor in (start, results, report, end):
            os.close(descriptor)
        assert sorted(outcome) == sorted(b"WL")


def test_the_second_run_is_told_who_has_the_directory(tmp_path):
    with RunLock(tmp_path):
        holder = json.loads((tmp_path / "run.lock").read_text())
        assert holder["pid"] == os.getpid()
        assert set(holder) == {"pid", "host", "boot_id", "started", "command"}
        with pytest.raises(RunInUseError) as caught, RunLock(tmp_path):
            pass
        assert caught.value.exit_code == 5
        assert caught.value.what == (
            f"run {tmp_path} is in use by pid {os.getpid()} on host {holder['host']} since {holder['started']}"
        )
        assert json.loads((tmp_path / "run.lock").read_text()) == holder  # the loser changed nothing
    with RunLock(tmp_path):
        pass


@pytest.mark.parametrize("with_worker", [False, True])
def test_the_lock_of_a_killed_run_is_taken_over(tmp_path, with_worker):
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        with RunLock(tmp_path):
            if with_worker and os.fork() == 0:  # a forked loader that outlives its trainer
                os.write(tell, b"%9d" % os.getpid())
                time.sleep(60)
                os._exit(0)
            if not with_worker:
                os.write(tell, b"        0")
            time.sleep(60)
        os._exit(0)
    worker = int(os.read(ready, 9))
    with pytest.raises(RunInUseError, match=f"pid {pid} "), RunLock(tmp_path):
        pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with RunLock(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    if worker:
        os.kill(worker, signal.SIGKILL)


def test_a_lock_that_is_a_link_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("data")
    (tmp_path / "run.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(DiskError), RunLock(tmp_path):
        pass
    assert (tmp_path / "precious").read_text() == "data"


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNPAD_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert storage.cache_folder() == Path("/home/someone/.cache/unpad")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/tmp/x")
    assert storage.cache_folder() == Path("/var/tmp/x/unpad")
    monkeypatch.setenv("UNPAD_CACHE", "/fast/cache")
    assert storage.cache_folder() == Path("/fast/cache")
