"""Start of the program: `python -m unpad`, and Ctrl-C while modules are imported."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from unpad import __main__
from unpad.errors import Interrupted, OutOfMemoryError
from unpad.processes.worker import LAUNCHER

# Starts the program as the command does. Ctrl-C comes when `module` is looked for; an exception would pass through the
# compiled code that imports it, which aborts.
INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
module = sys.argv.pop(1)

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == module:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                os.abort()

sys.meta_path.insert(0, Finder)
from unpad.__main__ import main
main()
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_the_package_runs_as_a_module_and_names_itself_as_the_command_does():
    done = run("-m", "unpad", "recipes", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: unpad recipes" in done.stdout


@pytest.mark.parametrize("module", ["typer", "pydantic"])
def test_ctrl_c_while_a_module_is_imported_is_one_line_and_code_130(module):
    done = run("-c", INTERRUPTED, module, "recipes")
    assert (done.returncode, done.stdout) == (Interrupted.exit_code, "")
    assert done.stderr == "Interrupted: stopped by Ctrl-C\n"


@pytest.mark.promise("cli.utf-8")
def test_names_and_texts_are_utf8_whatever_the_locale(tmp_path):
    (tmp_path / "中文.jsonl").write_text('{"text": "a b c"}\n', encoding="utf-8")
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    # The finder of an editable installation holds the checkout as a text, which Python cannot encode there.
    ascii_alone["PYTHONPATH"] = str(Path(__file__).parents[1])
    command = [sys.executable, "-m", "unpad", "data", "check", "中文.jsonl", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **ascii_alone}, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().count("中文.jsonl: text, 1 of 1 row usable") >= 1


@pytest.mark.promise("processes.ctrl-c")
def test_ctrl_c_that_the_launcher_held_back_is_one_line_and_code_130():
    assert __main__.LAUNCHER == LAUNCHER
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with subprocess.Popen(
            [sys.executable, "-m", "unpad", "recipes"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, LAUNCHER: str(os.getpid())},
        ) as started:
            started.send_signal(signal.SIGINT)  # before the interpreter has begun
            said = started.communicate()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert (started.returncode, *said) == (Interrupted.exit_code, "", "Interrupted: stopped by Ctrl-C\n")


@pytest.mark.promise("input.addresses")
def test_a_limit_of_addresses_that_libraries_do_not_fit_into_is_named_before_they_load():
    """With 650 MB torch ends by a signal, with 800 MB tokenizers aborts."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (650 << 20, 650 << 20))

    for arguments, code in (("recipes",), 0), (("prove", "zh_chat"), OutOfMemoryError.exit_code):
        command = [sys.executable, "-m", "unpad", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)
        assert done.returncode == code
        assert done.stderr.startswith("OutOfMemoryError: the libraries take about") == (code != 0)
        assert ("the limit is 681 MB\n  at: ulimit -v\n  do: raise it" in done.stderr) == (code != 0)


@pytest.mark.parametrize(
    ("load", "verb", "policy"), [(99.0, "train", "PASSIVE"), (0.0, "train", None), (0.0, "serve", "PASSIVE")]
)
def test_waiting_threads_sleep_on_busy_cores_and_in_a_server(load, verb, policy, monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(sys, "argv", ["unpad", verb])
    __main__._choose_waiting()
    assert os.environ.get("OMP_WAIT_POLICY") == policy
