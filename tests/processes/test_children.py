"""Child processes: what they tell, how they end, and that none outlives its parent."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.sleeping import together
from unpad import errors
from unpad.errors import DiskError, LostProcessError, RecipeError, UnpadError


def fails(where: str) -> None:
    raise DiskError("no room", where=where, fix="free some", details=["a", "b"])


def squared(number: int) -> int:
    return number**2


class OddError(Exception):
    """It cannot be made of its arguments."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def ends(how: str) -> str:
    if how == "lost":
        raise LostProcessError("another is gone")
    if how == "fails":
        fails("/data")
    if how == "asks":
        raise RecipeError("no such field")
    if how == "lacks memory":
        raise MemoryError
    if how == "odd":
        raise OddError(1, 2)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "sleeps":
        time.sleep(600)
    return how


def is_there(pid: int) -> bool:
    """True if a process runs; one that has ended and waits to be fetched does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pid: int) -> None:
    until = time.monotonic() + 60
    while is_there(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_there(pid)


def said(told: Path) -> list[str]:
    """Words of `sleeps`, once it has told them."""
    until = time.monotonic() + 60
    while not (told.is_file() and len(told.read_text().split()) == 4):
        assert time.monotonic() < until
        time.sleep(0.02)
    return told.read_text().split()


PARENT = """
import sys
from pathlib import Path
from tests.helpers.sleeping import sleeps, together
if __name__ == "__main__":
    try:
        together(sleeps, [(Path(sys.argv[1]),)])
    except KeyboardInterrupt:
        print("stopped")
"""


@pytest.mark.promise("cli.children")
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_without_a_word_when_their_parent_is_stopped_or_killed(tmp_path, number):
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OF_THE_PARENT": "yes"}
    command = [sys.executable, "-c", PARENT, str(tmp_path / "told")]
    parent = subprocess.Popen(
        command, env=variables, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    grandchild, *others = said(tmp_path / "told")
    assert others == [str(tmp_path), "yes", "True"], "its folder and environment, and a group that it leads"
    if number == signal.SIGINT:
        os.killpg(parent.pid, number)  # as a terminal does
    else:
        parent.kill()
    out, err = parent.communicate(timeout=60)
    assert (out.decode(), err.decode()) == ("stopped\n" if number == signal.SIGINT else "", "")
    wait_until_gone(int(grandchild))


IMPORTS = """
import time
from pathlib import Path
Path("importing").touch()
while not Path("go").exists():
    time.sleep(0.02)
"""
PARENT_OF_IMPORTS = """
import sys
from unpad.processes.children import run_all
if __name__ == "__main__":
    try:
        run_all(print, [()], modules=["slow_to_import"])
    except KeyboardInterrupt:
        print("stopped")
"""


@pytest.mark.promise("cli.children")
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="others import in the child")
def test_a_stop_while_the_modules_are_imported_shows_no_traceback(tmp_path):
    (tmp_path / "slow_to_import.py").write_text(IMPORTS)
    variables = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"}
    command = [sys.executable, "-c", PARENT_OF_IMPORTS]
    parent = subprocess.Popen(
        command, env=variables, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    while not (tmp_path / "importing").exists():
        assert parent.poll() is None
        time.sleep(0.02)
    os.killpg(parent.pid, signal.SIGINT)
    (tmp_path / "go").touch()
    out, err = parent.communicate(timeout=60)
    assert (out.decode(), err.decode()) == ("stopped\n", "")


def test_results_come_in_the_order_of_the_calls():
    assert together(squared, [(3,), (1,), (2,)]) == [9, 1, 4]
    assert together(ends, [("x" * 1_000_000,)]) == ["x" * 1_000_000], "more than a pipe holds"


@pytest.mark.skipif(sys.platform != "linux", reason="others start new processes alone")
def test_processes_are_forked_from_one_that_has_the_modules():
    one, other = together(os.getppid, [(), ()])
    assert one == other != os.getpid()


@pytest.mark.promise("cli.children")
def test_a_killed_process_is_named_and_not_one_that_lost_it():
    with pytest.raises(LostProcessError, match=f"process 1 ended with exit code {-signal.SIGKILL}"):
        together(ends, [("lost",), ("killed",)], grace=60.0)


@pytest.mark.promise("cli.children")
def test_the_error_of_the_first_call_that_has_one_is_raised_and_not_what_it_caused_in_others(capfd):
    with pytest.raises(DiskError, match="no room") as caught:
        together(ends, [("lost",), ("fine",), ("fails",), ("asks",)], grace=60.0)
    assert (caught.value.where, caught.value.details) == ("/data", ("a", "b"))
    with pytest.raises(RecipeError, match="no such field"):
        together(ends, [("sleeps",), ("asks",)])
    assert capfd.readouterr() == ("", "")


def test_an_unforeseen_exception_is_raised_with_its_traceback(capfd):
    with pytest.raises(MemoryError) as caught:
        together(ends, [("lost",), ("lacks memory",)], grace=60.0)
    assert "in ends\n    raise MemoryError" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="OddError: 1 and 2"):
        together(ends, [("odd",)])
    assert capfd.readouterr() == ("", "")


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, UnpadError)]


@pytest.mark.promise("cli.children")
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_every_kind_crosses_as_json(kind):
    error = kind("was", where="a.json:1", fix="mend it", details=("one", "两"))
    other = UnpadError.from_json(json.loads(json.dumps(error.to_json())))
    assert (type(other), str(other), other.exit_code) == (kind, str(error), kind.exit_code)
