"""The scripts of examples/hf: two lines make a trainer correct, and loops learn the same on one and two processes."""

import importlib.util
import os
import runpy
import shutil
import sys
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file

from tests.helpers.ranks import run_processes
from tests.hf import families  # noqa: F401 - imports transformers without its warnings
from unpad import prove_loop, prove_trainer
from unpad.proof.foreign.certificate import ForeignCertificate

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "hf"
pytestmark = pytest.mark.filterwarnings("default")


def make(folder: Path, model_type: str) -> None:
    spec = importlib.util.spec_from_file_location("tiny", FOLDER / "tiny.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    module.make(folder, model_type, conversations=36)


def run(script: Path, folder: Path) -> dict[str, Any]:
    """The names of a script at its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), str(folder)])
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        datasets.disable_progress_bars()
        torch.manual_seed(0)
        return runpy.run_path(str(script))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "model_type", "fault"), [("trainer", "llama", "padding"), ("sft", "gpt_oss", "isolation")]
)
def test_two_lines_make_a_script_correct(name, model_type, fault, tmp_path):
    make(tmp_path, model_type)
    script = (FOLDER / f"{name}.py").read_text()
    lines = [line for line in script.splitlines() if "unpad.hf" not in line]
    assert len(lines) == len(script.splitlines()) - 2
    (tmp_path / "before.py").write_text("\n".join(lines))
    before, after = (run(path, tmp_path)["trainer"] for path in (tmp_path / "before.py", FOLDER / f"{name}.py"))
    certificate = prove_trainer(before)
    assert not certificate.passed
    assert fault in {finding.kind for finding in certificate.failed}
    certificate = prove_trainer(after)
    assert certificate.passed, str(certificate)
    losses = []
    for most in (8, 64, 4096):
        after.attachment.tokens_per_eval = most
        losses.append(after.evaluate()["eval_loss"])
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-6)


LOOPS = {"plain_loop": "loop", "accelerate_loop": "accelerate", "lightning_module": "lightning", "trainer": "attach"}


def proof_of(made: dict[str, Any]) -> ForeignCertificate:
    """The proof of the first update of a script that has run, in one process."""
    if "loader" in made:
        return prove_loop(made["step"], list(islice(made["loader"], 4)), precision="fp32")
    if "trainer" in made:
        return prove_trainer(made["trainer"])
    module = made["module"]

    def step(batch: dict[str, Any]) -> None:
        (module.training_step(batch, 0) / 4).backward()

    return prove_loop(step, list(islice(module.train_dataloader(), 4)))


@pytest.mark.promise("hf.loops")
@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_an_example_of_a_loop_is_proved_and_learns_on_two_processes_what_it_learns_on_one(name, tmp_path):
    make(tmp_path, "llama")
    weights = [load_file(tmp_path / "model.safetensors")]

    def work() -> str:
        for state in (AcceleratorState, GradientState, PartialState):  # of the process this one was forked from
            state._shared_state.clear()
        is_one = os.environ["WORLD_SIZE"] == "1"
        made = run(FOLDER / f"{name}.py", tmp_path)
        return proof_of(made).verdict if is_one else "sound"

    for size in (1, 2):
        assert run_processes(tmp_path / f"values{size}", size, work) == ["sound"] * size
        weights.append(load_file(tmp_path / name / "model.safetensors"))
        shutil.rmtree(tmp_path / name)
    moved, apart = (
        sum(float((one[key] - other[key]).square().sum()) for key in one) ** 0.5 for one, other in pairwise(weights)
    )
    assert apart < 1e-3 * moved


@pytest.mark.parametrize(("name", "page"), LOOPS.items())
def test_an_example_of_a_loop_has_at_most_forty_lines_with_which_its_page_begins(name, page):
    script = (FOLDER / f"{name}.py").read_text()
    assert len(script.splitlines()) <= 40
    assert (ROOT / "docs" / f"hf_{page}.md").read_text().split("```")[1] == f"python\n{script}"


@pytest.mark.parametrize(
    ("script", "missing"), [("sft.py", "trl"), ("trainer.py", "datasets"), ("tiny.py", "transformers")]
)
def test_a_script_says_what_to_install(script, missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(FOLDER / script))
    assert f"{missing} is missing" in str(caught.value.code)
    assert "pip install 'unpad[hf]'" in str(caught.value.code)
