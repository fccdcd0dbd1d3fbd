"""Processes under the launcher: their exit codes, signals to them, and what is said of their ends."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from unpad.processes import launch
from unpad.processes.launch import Ended, run_processes

START = "import os, signal, sys, time; rank = int(os.environ['RANK']); folder = sys.argv[1]\n"


def run(source: str, folder: Path) -> Ended:
    return run_processes(2, [sys.executable, "-S", "-c", START + source, str(folder)])


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ({}, 0),
        ({0: 3, 1: 3}, 3),
        ({0: 3, 1: -signal.SIGTERM}, 3),
        ({0: 10, 1: 1}, 1),  # the first has only lost the other
        ({0: 10, 1: -signal.SIGKILL}, 10),
        ({0: -signal.SIGKILL, 1: 10}, 10),
        ({0: 10, 1: 10}, 10),
    ],
)
def test_the_lowest_rank_whose_code_is_not_that_of_a_lost_process_decides(codes, code):
    assert Ended(codes, first=min(codes, default=None)).code() == code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_decides_unless_a_process_has_an_error_of_its_own(number):
    assert Ended({0: -number, 1: -number}, signal=number).code() == 128 + number
    assert Ended({0: 128 + number, 1: 128 + number}, signal=number).code() == 128 + number
    assert Ended({0: 6, 1: 6}, signal=number).code() == 6  # the disk was full when they saved
    assert Ended({0: 1, 1: 128 + number}, signal=number).code() == 128 + number  # Python itself was half started
    assert Ended({0: 1, 1: 6}, signal=number).code() == 6
    assert Ended({0: 6, 1: -9}, signal=number, at_once=True).code() == 128 + number


def test_the_launcher_names_a_killed_process_and_its_log_in_three_lines(tmp_path):
    log = tmp_path / "processes" / "1.log"
    log.parent.mkdir()
    log.touch()
    lines = Ended({0: 10, 1: -signal.SIGKILL}, first=1).error(tmp_path, "lost", 2).splitlines()
    assert lines[0] == "LostProcessError: process 1 was killed by SIGKILL"
    assert lines[1] == f"  at: {log}"
    assert len(lines) == 3
    assert "--resume" in lines[2]


def test_a_killed_process_ends_the_others_and_is_named(tmp_path):
    ended = run("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(60)", tmp_path)
    assert (ended.codes[1], ended.first, ended.silent, ended.code()) == (-signal.SIGKILL, 1, [], 10)


@pytest.mark.promise("processes.ctrl-c")
def test_ctrl_c_waits_for_a_process_that_is_starting(tmp_path, capfd):
    source = """
open(f'{folder}/{rank}', 'w').close()
while signal.SIGINT not in signal.sigpending():  # it comes before the process can answer
    time.sleep(0.01)
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
"""

    def interrupt() -> None:
        while not all((tmp_path / rank).exists() for rank in "01"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    ended = run(source, tmp_path)
    thread.join()
    assert (ended.codes, ended.code()) == ({0: 130, 1: 130}, 130)
    assert "Traceback" not in capfd.readouterr().err
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_process_that_does_not_end_after_the_failure_of_another_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "PATIENCE_S", 0.5)
    source = """
def stopped():
    if not os.path.exists(f'{folder}/pid'):
        return False
    pid = open(f'{folder}/pid').read()
    return bool(pid) and open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0] == 'T'

if rank == 1:
    open(f'{folder}/pid', 'w').write(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
while not stopped():
    time.sleep(0.01)
sys.exit(10)
"""
    ended = run(source, tmp_path)
    assert (ended.codes, ended.first, ended.silent, ended.code()) == ({0: 10, 1: -signal.SIGKILL}, 0, [1], 10)


@pytest.mark.slow
@pytest.mark.promise("cli.exit-codes")
@pytest.mark.parametrize(
    ("number", "num", "codes"),
    [(signal.SIGINT, 1, [7, 7]), (signal.SIGINT, 2, [-signal.SIGKILL, -signal.SIGKILL]), (signal.SIGHUP, 1, [7, 7])],
)
def test_a_first_signal_is_passed_on_and_a_second_one_kills(tmp_path, number, num, codes):
    """The processes end at a first one with a code of their own, if they are given the time."""
    source = f"signal.signal({int(number)}, lambda *_: sys.exit(7) if {num} == 1 else open(f'{{folder}}/got', 'w'))\n"
    source += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"  # of the launcher, once the other has ended
    source += "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})\n"  # as `unpad.__main__` does
    source += "open(f'{folder}/{rank}', 'w').close()\ntime.sleep(60)\nwhile True: time.sleep(60)"

    def interrupt() -> None:
        for wanted in (("0", "1"), ("got",))[:num]:
            while not all((tmp_path / name).exists() for name in wanted):
                time.sleep(0.01)
            os.kill(os.getpid(), number)
            if number == signal.SIGHUP:  # as of the shell, and of the terminal itself
                os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in numbers]
    ended = run(source, tmp_path)
    thread.join()
    assert [signal.getsignal(number) for number in numbers] == before
    assert ([code for _, code in sorted(ended.codes.items())], ended.signal) == (codes, number)
    assert ended.at_once == (num == 2)
