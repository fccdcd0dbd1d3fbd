"""Every ending has an exit code of its own, and docs/run_directory.md lists them all."""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.endings import ENDINGS, run_command
from tests.helpers.shell import Shell
from tests.helpers.toy import quiet, run, write_toy
from tests.helpers.verbs import refused_calls
from unpad import errors, storage
from unpad.errors import Stopped, UnpadError
from unpad.nn import attention
from unpad.nn.attend import Attend
from unpad.nn.native import library
from unpad.training.loop import train

pytestmark = pytest.mark.promise("cli.exit-codes")

PAGE = Path(__file__).parents[1] / "docs" / "run_directory.md"
OF_TRAINING = {
    7: "loss that is not finite in one process", 8: "no memory in one process", 11: "collapse", 130: "Ctrl-C",
    143: "SIGTERM", 129: "SIGHUP of a closed terminal",
}  # fmt: skip
ELSEWHERE = {  # code: the file of the test that runs this ending
    15: "tests/doctor/test_verb.py",
    16: "tests/receipts/test_replay.py",
}


def documented() -> dict[int, str]:
    """Meanings of exit codes, of the table of the page."""
    table = PAGE.read_text(encoding="utf-8").split("| exit code | meaning |")[1].split("\n\n")[0]
    return {int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| (.+) \|$", table, re.M)}


class Endings:
    """Endings of commands in an empty directory; each method returns the exit code of one that the page lists."""

    def __init__(self, unpad: Shell, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.unpad, self.patch, self.folder = unpad, patch, folder
        self.recipe = write_toy(folder / "toy", stages=[], train={"threads": 1, "max_steps": 4})

    def finished(self) -> Path:
        """A directory with a finished run of two steps."""
        run(self.recipe, self.folder / "run", "train.max_steps=2")
        return self.folder / "run"

    def code_0(self) -> int:
        return self.unpad("runs").code

    def code_1(self) -> int:
        def fails(*_: Any) -> None:
            raise ZeroDivisionError

        self.patch.setattr("unpad.run.compare.describe_runs", fails)
        return self.unpad("runs").code

    def code_2(self) -> int:
        return self.unpad("train", "absent").code

    def code_3(self) -> int:
        (self.folder / "bad.jsonl").write_text("{\n")
        return self.unpad("data", "check", "bad.jsonl").code

    def code_4(self) -> int:
        folder = self.finished()
        (folder / "run.json").write_text("[]")
        return self.unpad("train", self.recipe, "--out", folder, "--resume").code

    def code_5(self) -> int:
        folder = self.finished()
        with storage.RunLock(folder):
            return self.unpad("train", self.recipe, "--out", folder, "--resume").code

    def code_6(self) -> int:
        (self.folder / "file").touch()
        return self.unpad("recipes", "copy", "zh_chat", self.folder / "file" / "copy.yaml").code

    def code_9(self) -> int:
        return self.unpad("train", self.recipe, "optim.lr=9", "--out", self.finished(), "--resume").code

    def code_10(self) -> int:
        [ending] = [one for one in ENDINGS if one.name == "SIGKILL of the last process"]
        arguments = ["train", str(self.recipe), "--out", "run", "plan.tokens_per_micro=40"]
        return run_command(arguments, 2, self.folder / "outputs", ending.fault).codes[0]

    def code_12(self) -> int:
        right = attention._group_attention

        def without_mask(q: Any, k: Any, v: Any, group: Any, kernel: Any, how: Attend) -> Any:
            return right(q, k, v, group, kernel, replace(how, causal=False))

        self.patch.setattr(library, "enabled", lambda: False)
        self.patch.setattr(attention, "_group_attention", without_mask)
        return self.unpad("prove", self.recipe).code

    def code_13(self) -> int:
        with pytest.raises(Stopped) as caught:
            train(str(self.recipe), self.folder / "run", console=quiet(), after_evaluation=lambda *_: True)
        return caught.value.exit_code

    def code_141(self) -> int:
        command = [sys.executable, "-m", "unpad", "recipes"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdout.close()
            assert process.stderr.read() == b""
        return process.returncode


@pytest.mark.parametrize("code", [code for code in documented() if code not in ELSEWHERE])
def test_an_ending_has_the_code_that_the_page_says(code, unpad, tmp_path, monkeypatch):
    endings = Endings(unpad, monkeypatch, tmp_path)
    if code in OF_TRAINING:
        [ending] = [one for one in ENDINGS if one.name == OF_TRAINING[code]]
        arguments = ["train", str(endings.recipe), "--out", "run"]
        ended = run_command(arguments, 1, tmp_path / "outputs", ending.fault)
        assert (ended.codes, "Traceback" in ended.error) == ([code], False)
    else:
        method: Callable[[], int] = getattr(endings, f"code_{code}")
        assert method() == code


def test_every_code_of_an_error_is_on_the_page_and_of_one_kind_alone():
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, UnpadError)]
    own = [kind for kind in kinds if "exit_code" in vars(kind)]
    own.remove(errors.RunFileError)  # what is damaged of a run, as CheckpointError
    assert errors.RunFileError.exit_code == errors.CheckpointError.exit_code
    assert len({kind.exit_code for kind in own}) == len(own)
    assert {kind.exit_code for kind in own} <= documented().keys()
    assert {code for code, _ in refused_calls()} <= documented().keys()
    assert all((Path(__file__).parents[1] / test).is_file() for test in ELSEWHERE.values())


def test_the_page_lists_the_codes_of_verdicts():
    verdicts = [
        errors.UNFORESEEN, errors.NOT_PROVED, errors.DOCTOR_FOUND_TROUBLE, errors.REPLAY_DIFFERS,
    ]  # fmt: skip
    assert len(set(verdicts)) == len(verdicts)
    assert set(verdicts) <= documented().keys()
