"""One process has a run directory."""

import errno
import fcntl
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from unpad.errors import DiskError, RunInUseError
from unpad.storage import RunLock


def test_of_two_that_come_at_once_exactly_one_gets_the_directory(tmp_path):
    begun, ended = threading.Barrier(2), threading.Barrier(2)

    def ask(number: int) -> bool:
        begun.wait()
        try:
            with RunLock(tmp_path):  # the kernel tells open files apart, not processes
                ended.wait()
                return True
        except RunInUseError:
            ended.wait()
            return False

    with ThreadPoolExecutor(2) as pool:
        for _ in range(8):
            assert sorted(pool.map(ask, range(2))) == [False, True]


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


@pytest.mark.promise("input.disk")
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_is_named_as_the_cause(tmp_path, monkeypatch, number):
    def refuse(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(DiskError, match="the file system has no locks") as caught, RunLock(tmp_path):
        pass
    assert "another disk" in caught.value.fix


def test_a_holder_that_has_not_written_its_name_yet_is_waited_for(tmp_path, monkeypatch):
    holder = os.open(tmp_path / "run.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    waits = []

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            os.write(holder, b'{"pid": 12345, "host": "node7", "started": "today"}')

    monkeypatch.setattr(time, "sleep", wait)
    with pytest.raises(RunInUseError, match="pid 12345 on host node7 since today"), RunLock(tmp_path):
        pass
    assert len(waits) == 3
    os.ftruncate(holder, 0)
    with pytest.raises(RunInUseError, match="pid unknown"), RunLock(tmp_path):
        pass
    assert 1 < sum(waits) < 10, "it is not waited for for ever"
    os.close(holder)
