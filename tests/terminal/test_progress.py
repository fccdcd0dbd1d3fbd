"""Progress of long work: one line on a terminal, nothing elsewhere, and a clean line after Ctrl-C."""

import os
import pty
import re
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib import import_module

import pytest

from tests.helpers.processes import forked
from tests.helpers.toy import write_toy
from unpad.__main__ import _interrupt, main
from unpad.terminal import progress

pytestmark = pytest.mark.slow


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is written to a terminal of 60 columns, at every call."""
    seen: list[str] = []
    monkeypatch.setattr(progress, "_output", lambda: "terminal")
    monkeypatch.setattr(progress, "_write", lambda data: seen.append(data.decode()))
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0)
    monkeypatch.setenv("COLUMNS", "60")
    yield seen
    assert progress._shown == []


def test_work_inside_of_work_is_shown_after_it_and_erased(written):
    with progress.progress("trial", 2) as trials:
        assert list(progress.counted("ab", "reading", unit="rows")) == ["a", "b"]
        trials.advance()
    lines = [text.removeprefix("\r\x1b[K") for text in written]
    assert lines == [
        "trial 0/2", "trial 0/2 · reading", "trial 0/2 · reading 1 rows", "trial 0/2 · reading 2 rows", "",
        "trial 0/2", "trial 1/2", "",
    ]  # fmt: skip


def test_a_line_fits_the_terminal_and_obeys_no_name(written):
    with progress.progress("reading " + "很长" * 40 + "\x1b[2J"):
        pass
    assert "\x1b[2J" not in "".join(written).replace("\r\x1b[K", "")
    assert len(written[0].removeprefix("\r\x1b[K")) < 40


@pytest.mark.parametrize(("columns", "cells"), [(60, 59), (21, 20), (11, 10), (5, 10)])
def test_a_line_leaves_the_last_column_of_the_terminal_free(written, monkeypatch, columns, cells):
    monkeypatch.setenv("COLUMNS", str(columns))
    for text, shown in (("x" * 200, "x" * cells), ("很" * 200, "很" * (cells // 2)), ("short", "short")):
        with progress.progress(text):
            pass
        assert written[-2].removeprefix("\r\x1b[K") == shown


def test_the_time_left_is_told_after_a_while_and_where_the_total_is_known(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(progress, "perf_counter", lambda: clock[0])
    bar, unknown = progress.ProgressBar("reading", 4000, "rows"), progress.ProgressBar("reading", None, "rows")
    for one in (bar, unknown):
        one.advance(1000)
    clock[0] += progress.LEFT_AFTER_SECONDS - 0.01
    assert [one.text() for one in (bar, unknown)] == ["reading 1,000/4,000 rows", "reading 1,000 rows"]
    for seconds, left in ((20, "1m00s"), (19.6, "59s")):
        clock[0] = 100 + seconds
        assert bar.text() == f"reading 1,000/4,000 rows, left {left}"


def test_the_line_is_erased_when_work_fails(written):
    with pytest.raises(KeyboardInterrupt), progress.progress("work"):
        raise KeyboardInterrupt
    assert written[-1] == "\r\x1b[K"


def test_nothing_is_shown_beside_a_bar_of_another_kind(written):
    with progress.held():
        assert list(progress.counted("ab", "reading")) == ["a", "b"]
    assert written == []


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock for lines of progress, where there is no terminal and no thread that waits."""
    made = Clock()
    monkeypatch.setattr(progress, "perf_counter", made)
    monkeypatch.setattr(progress, "_ended", float("-inf"))
    monkeypatch.setattr(progress, "_drawn_at", 0.0)
    monkeypatch.setattr(progress.threading.Thread, "start", lambda thread: None)
    monkeypatch.setenv("UNPAD_PROGRESS", "1")
    monkeypatch.delenv("RANK", raising=False)
    return made


def test_without_a_terminal_work_below_30_s_writes_nothing(clock, capfd):
    for _ in range(3):
        for _ in progress.counted("abc", "reading"):
            clock.now += 9.9
        clock.now += progress.PAUSE_SECONDS + 0.1  # what follows is other work
    assert capfd.readouterr() == ("", "")


@pytest.mark.promise("cli.no-terminal")
def test_without_a_terminal_a_plain_line_on_standard_error_tells_every_30_s_what_is_done_and_how_far(clock, capfd):
    with progress.progress("trial", 2) as bar:
        for _ in progress.counted(range(80), "reading\x1b[2J", 80, "rows"):
            clock.now += 1
        bar.advance()
        for _ in range(4):  # work that ends and begins again, each piece below 30 s
            with progress.progress("evaluating"):
                clock.now += 8
    assert capfd.readouterr() == (
        "",
        "after 30s: trial 0/2 · reading\\x1b[2J 30/80 rows, left 50s\n"
        "after 1m00s: trial 0/2 · reading\\x1b[2J 60/80 rows, left 20s\n"
        "after 1m36s: trial 1/2, left 1m36s\n",
    )


@pytest.mark.promise("cli.no-terminal")
def test_without_a_terminal_work_may_ask_for_its_first_line_sooner(clock, capfd):
    for _ in range(2):
        with progress.progress("proving", 100, "tokens", sooner=25) as bar:
            for _ in range(40):
                clock.now += 1
                bar.advance()
        clock.now += progress.PAUSE_SECONDS + 0.1
    lines = "after 5s: proving 5/100 tokens, left 1m35s\nafter 35s: proving 35/100 tokens, left 1m05s\n"
    assert capfd.readouterr().err == 2 * lines


@pytest.mark.promise("cli.no-terminal")
def test_work_that_counts_nothing_is_told_by_a_thread_until_it_ends(clock, capfd):
    waits = list[float]()

    def wait(seconds: float) -> None:
        waits.append(seconds)
        clock.now += seconds
        if len(waits) == 3:
            progress._shown.clear()

    with progress.progress("proving"):
        bars = list(progress._shown)
        progress._watch(wait)
        progress._shown.extend(bars)
    assert capfd.readouterr().err == "after 30s: proving\nafter 1m00s: proving\n"
    assert waits == pytest.approx([30.01] * 3)


@pytest.mark.promise("cli.no-terminal")
def test_the_thread_that_tells_finds_the_work_that_it_was_started_for(monkeypatch):
    seen, written = list[str](), threading.Event()

    def write(data: bytes) -> None:
        if data:
            seen.append(data.decode())
            written.set()

    monkeypatch.setattr(progress, "_output", lambda: "lines")
    monkeypatch.setattr(progress, "_write", write)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    monkeypatch.setattr(progress, "_ended", float("-inf"))
    for _ in range(5):  # a thread that starts before the work is noted ends at once, most times
        written.clear()
        with progress.progress("measuring"):
            assert written.wait(5), "nothing but the thread can tell of work without units"
        progress._watcher.join(5)
    assert all(re.fullmatch(r"after \d+s: measuring\n", line) for line in seen)


def test_a_line_printed_elsewhere_counts(clock, capfd):
    with progress.progress("training", 9, "steps") as bar:
        for _ in range(2):
            clock.now += 29
            progress.told()
            bar.advance()
        assert capfd.readouterr().err == ""
        clock.now += 30
        bar.advance()
        assert capfd.readouterr().err == "after 1m28s: training 3/9 steps, left 2m56s\n"


@pytest.mark.promise("cli.no-terminal")
@pytest.mark.parametrize("variables", [{"UNPAD_PROGRESS": "0"}, {"RANK": "1"}])
def test_progress_can_be_silenced_and_one_process_of_several_tells(clock, monkeypatch, capfd, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for _ in progress.counted("abc", "reading"):
        clock.now += 100
    assert capfd.readouterr() == ("", "")


def test_a_notebook_has_a_live_line(clock, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    monkeypatch.setenv("COLUMNS", "20")
    for _ in progress.counted("ab", "reading", 2):
        clock.now += 2
    blank = "\r" + " " * 19 + "\r"
    assert capsys.readouterr().err == f"{blank}reading 0/2{blank}reading 1/2, left 2{blank}reading 2/2, left 0{blank}"


# --------------------------------------------------------------------------- verbs


def on_terminal(folder, *words, start=main, stop_at="", term="xterm", no_color=""):
    """Run a verb, or other code, in a forked child with standard error on a terminal; Ctrl-C when `stop_at` is shown.

    Returns:
        Exit code, output, terminal.
    """
    ours, theirs = pty.openpty()
    with tempfile.TemporaryFile() as out:
        variables = {"TERM": term, "NO_COLOR": no_color}
        child = forked(lambda: _start(folder, start, words, out.fileno(), theirs, variables, stop_at))
        os.close(theirs)
        shown, stopped = b"", False
        while True:
            ready, _, _ = select.select([ours], [], [], 60)
            assert ready, shown
            try:
                data = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            shown += data
            if stop_at and not stopped and stop_at in shown.decode(errors="replace"):
                stopped = True
                os.kill(child, signal.SIGINT)
        out.seek(0)
        os.close(ours)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), out.read().decode(), shown.decode()


def _start(folder, start, words, out, terminal, variables, wait_at):
    """Run `start` in this process, a child; it waits for Ctrl-C at `wait_at`."""
    write = progress._write

    def write_and_wait(data: bytes) -> None:
        write(data)
        if wait_at and wait_at in data.decode():
            time.sleep(60)  # else work that is short may end before a busy machine sends the signal

    progress._write = write_and_wait
    os.dup2(out, 1)
    os.dup2(terminal, 2)
    os.close(terminal)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
    os.chdir(folder)
    os.environ.update(variables, UNPAD_CACHE=str(folder / "cache"), UNPAD_PROGRESS="1")
    sys.argv = ["unpad", *words]
    start()


VERBS = {
    "plan": (["reading texts.jsonl", "building the vocabulary", "encoding", "trying a step of pack"], ["plan"]),
    "check": (["reading texts.jsonl"], ["data", "check"]),
    "prove": (["comparing"], ["prove"]),
}


@pytest.mark.promise("cli.long-work")
@pytest.mark.parametrize("verb", VERBS)
def test_long_work_is_shown_on_a_terminal_without_colour_and_erased(tmp_path, verb):
    recipe = write_toy(tmp_path / "toy")
    named, words = VERBS[verb]
    place = str(tmp_path / "toy/texts.jsonl") if verb == "check" else str(recipe)
    code, out, shown = on_terminal(tmp_path, *words, place)
    assert code == 0, shown
    for name in named:
        assert name in shown
    assert shown.endswith("\r\x1b[K")
    assert not re.search(r"\x1b\[[\d;]*m", shown)
    assert "\x1b" not in out


@pytest.mark.nightly
@pytest.mark.parametrize("given", [{"term": "dumb"}, {"no_color": "1"}])
def test_a_terminal_without_control_sequences_is_left_alone(tmp_path, given):
    code, _, shown = on_terminal(tmp_path, "plan", str(write_toy(tmp_path / "toy")), **given)
    assert (code, shown) == (0, "")


@pytest.mark.promise("cli.long-work")
@pytest.mark.parametrize("where", ["reading texts.jsonl", "trying a step of"])
def test_ctrl_c_ends_with_one_line(tmp_path, where):
    code, _, shown = on_terminal(tmp_path, "plan", str(write_toy(tmp_path / "toy")), stop_at=where)
    assert code == 130
    assert shown.split("\x1b[K")[-1].strip() == "Interrupted: stopped by Ctrl-C"
    assert "Traceback" not in shown


class Finder:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        signal.raise_signal(signal.SIGINT)


def interrupted_import() -> None:
    signal.signal(signal.SIGINT, _interrupt)
    sys.meta_path.insert(0, Finder)
    with progress.progress("reading"):
        import_module("nothing")


def test_ctrl_c_during_an_import_in_the_middle_of_work_erases_its_line(tmp_path):
    code, _, shown = on_terminal(tmp_path, start=interrupted_import)
    assert code == 130
    assert "reading" in shown
    assert shown.split("\x1b[K")[-1].strip() == "Interrupted: stopped by Ctrl-C"
