"""What an extra brings: without matplotlib and TensorBoard every verb works, and a run says what it leaves out."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.helpers.toy import write_toy

ROOT = Path(__file__).parents[1]
# `unpad` where neither library is installed: commands in forked children, and what each printed.
WITHOUT = """
import json, os, sys, tempfile

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("matplotlib", "tensorboard"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from unpad.__main__ import main
import unpad.training.loop

printed = []
for words in json.loads(sys.argv[1]):
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            os.dup2(output.fileno(), 1)
            sys.argv = ["unpad", *words]
            main()
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, words
        output.seek(0)
        printed.append(output.read().decode())
print(json.dumps(printed))
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder in which commands ran without the two libraries and without an error: a run, another that asks for no
    log of TensorBoard, and the drawing of a plan; and what they printed."""
    folder = tmp_path_factory.mktemp("without")
    recipe = str(write_toy(folder / "toy"))
    commands = [
        ["train", recipe, "--out", "run", "train.max_steps=3"],
        ["train", recipe, "--out", "other", "train.max_steps=1", "log.to=[]"],
        ["plan", recipe, "--plot", "plan.svg"],
    ]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "UNPAD_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WITHOUT, json.dumps(commands)]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Traceback" not in done.stderr, done.stderr
    return folder, json.loads(done.stdout)


@pytest.mark.promise("install.packages")
@pytest.mark.nightly
def test_without_matplotlib_and_tensorboard_a_run_keeps_its_other_curves_and_says_so_once(ran):
    folder, (shown, told, _) = ran
    assert shown.count("TensorBoard") == 1
    assert "pip install 'unpad[tensorboard]'" in shown
    log = [json.loads(line) for line in (folder / "run/log.jsonl").read_text("utf-8").splitlines()]
    assert [entry["message"] for entry in log if entry["kind"] == "warning"] == [
        "TensorBoard is not installed, so the run has no files of it: pip install 'unpad[tensorboard]', "
        "or leave it out of log.to"
    ]
    assert not (folder / "run/tensorboard").exists()
    assert (folder / "run/metrics.jsonl").read_text("utf-8").count('"kind": "train"') == 3
    assert (folder / "run/metrics.csv").read_text("utf-8").startswith("step,")
    assert (folder / "run/report.html").read_text("utf-8").count("<figure") >= 4
    assert "TensorBoard" not in told, "it was not asked for"


@pytest.mark.promise("install.packages")
@pytest.mark.nightly
def test_without_matplotlib_a_plan_is_drawn(ran):
    assert (ran[0] / "plan.svg").read_text("utf-8").startswith("<svg")


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def names(requirements: list[str]) -> set[str]:
    """Names of distributions as an index writes them, without this project's own extras."""
    found = {re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-") for requirement in requirements}
    return found - {"unpad"}


@pytest.mark.promise("install.packages")
def test_few_packages_are_required_and_each_direct_one_is_pinned():
    required, extras = project()["dependencies"], project()["optional-dependencies"]
    assert len(required) <= 11
    assert not names(required) & {"matplotlib", "tensorboard"}
    assert {"plots", "tensorboard"} <= set(
        re.findall(r"\w+", " ".join(r for r in extras["dev"] if r.startswith("unpad[")))
    )
    pins = [line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if not line.startswith("#")]
    assert names(pins) == names([*required, *(one for extra in extras.values() for one in extra)])
    assert all("==" in pin for pin in pins)


def test_every_extra_for_users_is_on_the_page_of_the_installation():
    page = (ROOT / "docs/installing.md").read_text("utf-8")
    missing = [name for name in project()["optional-dependencies"] if name != "dev" and f"`{name}`" not in page]
    assert not missing
