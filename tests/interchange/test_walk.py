"""A folder of Hugging Face becomes a run, learns conversations by adapters, is killed and resumed, merged, and goes out
again: transformers gives the same reply."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from tests.helpers.processes import in_child
from tests.helpers.toy import LOOP, rows, same_tensors, weights
from tests.interchange.theirs import text_of, their_reply
from unpad.inference.loaded import load
from unpad.training.loop import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft asks for it
]

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")

KILLED_AT = 5
QUESTION = "what is 3 and 3?"


@pytest.mark.nightly
@pytest.mark.promise("adapters.round-trip")
def test_adapters_on_an_imported_model_survive_a_kill_and_go_out_merged(theirs, talks, unpad, monkeypatch):
    unpad("import", str(theirs), "--out", "runs/qwen")
    before = load("qwen").generate([QUESTION], max_new_tokens=12, precision="fp32")[0]
    recipe = "runs/qwen/recipe.yaml"
    overrides = [
        f"data.chat={talks}", "lora.r=8", "optim.lr=3e-2", "train.max_epochs=3", "plan.tokens_per_step=128",
        "checkpoint.every=2", "data.holdout=0.2", "precision=fp32", "train.threads=1",
    ]  # fmt: skip
    assert unpad("train", recipe, *overrides, "--out", "runs/whole").code == 0

    def killed() -> None:
        real = LOOP.train_step
        steps = iter(range(1, 1000))

        def step(*arguments: object, **named: object) -> object:
            if next(steps) == KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        monkeypatch.setattr(LOOP, "train_step", step)
        train(recipe, Path("runs/tuned"), overrides)

    assert in_child(killed) == -signal.SIGKILL
    assert unpad("train", recipe, "--resume", "--out", "runs/tuned").code == 0
    assert rows(Path("runs/tuned"))[: KILLED_AT - 1] == rows(Path("runs/whole"))[: KILLED_AT - 1]
    assert (Path("runs/tuned/metrics.jsonl")).read_bytes() == Path("runs/whole/metrics.jsonl").read_bytes()
    assert same_tensors(weights(Path("runs/tuned")), weights(Path("runs/whole")))

    assert unpad("export", "tuned", "runs/merged", "--merge").code == 0
    assert unpad("export", "merged", "out").code == 0
    assert unpad("export", "tuned", "straight").code == 0  # merged on the way
    assert Path("straight/model.safetensors").read_bytes() == Path("out/model.safetensors").read_bytes()
    said = load("merged").generate([QUESTION], max_new_tokens=12, precision="fp32")[0]
    assert said != before
    assert said == load("tuned").generate([QUESTION], max_new_tokens=12, precision="fp32")[0]
    assert said == text_of(Path("out"), their_reply(Path("out"), QUESTION))
    assert json.loads((Path("out") / "config.json").read_text())["model_type"] == "qwen3"

    assert unpad("export", "tuned", "adapter", "--adapter").code == 0
    assert json.loads((Path("adapter") / "adapter_config.json").read_text())["base_model_name_or_path"] == str(theirs)
    opened = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(theirs), "adapter").eval()
    exported = transformers.AutoModelForCausalLM.from_pretrained("out").eval()
    ids = torch.tensor([load("merged").prompt_ids(QUESTION)])
    with torch.no_grad():
        torch.testing.assert_close(opened(input_ids=ids).logits, exported(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    assert "has no adapters" in unpad("export", "merged", "none", "--adapter", code=2).err
