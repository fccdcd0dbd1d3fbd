"""The scripts of examples/hf: two added lines make each correct, and it computes no more than its own tokens."""

import difflib
import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from tests.hf import families  # noqa: F401 - imports transformers without its warnings
from unpad import prove_trainer

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
    module.make(folder, model_type, conversations=30)


def run(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of a script at its end."""
    monkeypatch.setattr(sys, "argv", [script, str(folder)])
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    torch.manual_seed(0)
    return runpy.run_path(str(FOLDER / script))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "model_type", "fault"), [("trainer", "llama", "padding"), ("sft", "gpt_oss", "isolation")]
)
def test_two_lines_make_a_script_correct(name, model_type, fault, tmp_path, monkeypatch):
    datasets.disable_progress_bars()
    make(tmp_path, model_type)
    before, after = (run(f"{name}_{when}.py", tmp_path, monkeypatch)["trainer"] for when in ("before", "after"))
    certificate = prove_trainer(before)
    assert not certificate.passed
    assert fault in {finding.kind for finding in certificate.failed}
    certificate = prove_trainer(after)
    assert certificate.passed, str(certificate)
    cells = [sum(batch["input_ids"].numel() for batch in one.get_train_dataloader()) for one in (before, after)]
    tokens = int(after.attachment.examples_of(after.train_dataset).lengths.sum())
    assert cells[1] == tokens <= cells[0]
    losses = []
    for most in (8, 64, 4096):
        after.attachment.tokens_per_eval = most
        losses.append(after.evaluate()["eval_loss"])
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-6)


@pytest.mark.parametrize("name", ["trainer", "sft"])
def test_the_scripts_differ_by_an_import_and_a_call(name):
    before, after = ((FOLDER / f"{name}_{when}.py").read_text().splitlines()[1:] for when in ("before", "after"))
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and line[2:].strip()]
    assert len(changes) == 2
    assert changes[0] == "+ import unpad.hf"
    assert changes[1].startswith("+ unpad.hf.attach(trainer, ")
    assert len([line for line in after if line]) <= 31


@pytest.mark.parametrize(
    ("script", "missing"),
    [
        ("sft_before.py", "trl"),
        ("sft_after.py", "datasets"),
        ("trainer_before.py", "datasets"),
        ("tiny.py", "transformers"),
    ],
)
def test_a_script_says_what_to_install(script, missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(FOLDER / script))
    assert f"{missing} is missing" in str(caught.value.code)
    assert "pip install 'unpad[hf]'" in str(caught.value.code)
