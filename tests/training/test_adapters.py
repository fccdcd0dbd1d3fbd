"""A run with adapters keeps the adapters alone, resumes to the bit, knows its base, and becomes a plain run."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.toy import rows, run, same_tensors, weights, write_toy
from unpad.errors import CheckpointError, RecipeError, ResumeError
from unpad.inference.loaded import load
from unpad.models.adapters import ADAPTER, adapt, adapter_names
from unpad.models.contract import Model
from unpad.proof import certificate
from unpad.proof.recipe import prove_recipe
from unpad.recipes.training import LoraSettings
from unpad.run import checkpoint
from unpad.run.base import merge_run
from unpad.run.compare import summarize

pytestmark = pytest.mark.slow

TEXT = "小猫喜欢"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, its data, and a run `base`."""
    folder = tmp_path_factory.mktemp("adapters")
    run(
        recipe := write_toy(folder, data={"chat": []}, stages=[], optim={"lr": 0.01, "schedule": "constant"}),
        folder / "base",
        END,
    )
    run(recipe, folder / "tuned", *tuning(folder), END)
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """A copy of the two runs, away from the place that the tuned one names as its base's."""
    for name in ("base", "tuned"):
        shutil.copytree(made / name, tmp_path / name)
    return tmp_path


END = "train.max_steps=7"


def tuning(folder: Path, *more: str) -> list[str]:
    return [f"train.init_from={folder / 'base'}", "lora.r=3", "lora.dropout=0.1", "train.weights=last", *more]


def change_weights(folder: Path) -> None:
    """Give a run other weights."""
    best = checkpoint.load(folder / "checkpoints/best")
    best.tensors["model.norm.weight"] += 1.0
    checkpoint.save_named(folder / "checkpoints", "best", best)


def answers(folder: Path) -> torch.Tensor:
    """Logits after a text, (vocab_size,)."""
    from unpad.batching.batch import from_prompts

    loaded = load(folder)
    with torch.no_grad():
        return loaded.generator.logits(loaded.generator.last_hidden(from_prompts([loaded.prompt_ids(TEXT)])))[0]


@pytest.mark.promise("adapters.run")
@pytest.mark.parametrize("more", [["precision=fp32"], ["precision=bf16", "lora.dora=true"]], ids=["fp32", "bf16-dora"])
def test_a_resumed_run_equals_a_whole_one_and_evaluates_as_it_trained(made, tmp_path, more):
    recipe, whole, cut = made / "toy.yaml", tmp_path / "whole", tmp_path / "cut"
    run(recipe, whole, *tuning(made, *more), "train.max_steps=14")
    run(recipe, cut, *tuning(made, *more), "train.max_steps=8")
    run(recipe, cut, "train.max_steps=14", resume=True)
    assert same_tensors(weights(whole), weights(cut))
    assert rows(whole, "train") == rows(cut, "train")
    assert all(ADAPTER in name for name in weights(whole))

    from unpad.evaluation.run import evaluate_run

    found = evaluate_run(str(whole), 0, None)[0]["loss"].value
    assert found == pytest.approx(rows(whole, "eval")[-1]["loss"], rel=1e-6)


@pytest.mark.promise("adapters.certificate")
def test_the_recipe_with_adapters_is_proved_with_adapters_that_have_an_effect(made, monkeypatch):
    proved = []
    certify = certificate.certify
    monkeypatch.setattr(
        "unpad.proof.recipe.certify",
        lambda model, *args, **named: proved.append(model) or certify(model, *args, **named),
    )
    found = prove_recipe(str(made / "toy.yaml"), tuning(made, END))
    assert found.passed, found.lines
    [model] = proved
    assert all(bool(model.get_parameter(name).any()) for name in adapter_names(model))


def test_adapters_that_mix_tokens_fail_the_proof_of_the_recipe(made, monkeypatch):
    def adapt_wrongly(model: Model, settings: LoraSettings) -> None:
        adapt(model, settings)
        for name, module in model.named_modules():
            if name.endswith("lora_A.default"):
                module.register_forward_pre_hook(lambda _, given: (given[0].roll(1, 0),))

    monkeypatch.setattr("unpad.training.setup.adapt", adapt_wrongly)
    assert not prove_recipe(str(made / "toy.yaml"), tuning(made, END)).passed


@pytest.mark.promise("adapters.merge")
def test_a_merged_run_computes_the_same_without_the_base_and_every_verb_takes_it(copied, made, unpad):
    wanted = answers(copied / "tuned")
    assert float((wanted - answers(copied / "base")).abs().max()) > 1e-3
    merged = copied / "merged"
    shown = unpad("export", str(copied / "tuned"), str(merged), "--merge", code=0)
    assert f"unpad eval {merged}" in shown.out
    shutil.rmtree(copied / "base")
    torch.testing.assert_close(answers(merged), wanted, rtol=1e-5, atol=1e-5)
    assert weights(merged).keys() == weights(made / "base").keys()
    evaluated = [json.loads(unpad("eval", str(one), "--json").out)["loss"] for one in (made / "tuned", merged)]
    assert evaluated[0] == evaluated[1]
    assert unpad("runs", str(merged)).code == 0
    assert summarize(merged).command == f"unpad export {copied / 'tuned'} --merge"
    assert unpad("generate", str(merged), TEXT).out == unpad("generate", str(made / "tuned"), TEXT).out
    with pytest.raises(ResumeError, match="has no training to continue") as caught:
        run(made / "toy.yaml", merged, "train.max_steps=9", resume=True)
    assert caught.value.fix.endswith(f"train.init_from={merged}")
    run(made / "toy.yaml", copied / "next", f"train.init_from={merged}", "train.max_steps=1")


def test_merging_refuses_a_run_without_adapters_and_a_directory_in_use(made, tmp_path):
    with pytest.raises(RecipeError, match="has no adapters"):
        merge_run(made / "base", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(RecipeError, match="holds a run already"):
        merge_run(made / "tuned", made / "base")


def test_what_is_private_stays_private_when_merged(copied):
    (copied / "tuned").chmod(0o700)
    merged = merge_run(copied / "tuned", copied / "merged")
    assert merged.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in merged.rglob("*") if path.is_file())


@pytest.mark.promise("adapters.run")
def test_the_base_is_found_beside_the_run_and_refused_when_it_is_gone_or_changed(copied, made, tmp_path):
    state = checkpoint.load(copied / "tuned/checkpoints/best")
    assert state.values["base"]["run"] == str(made / "base")
    state.values["base"]["run"] = str(copied / "elsewhere/base")
    checkpoint.save_named(copied / "tuned/checkpoints", "best", state)
    torch.testing.assert_close(answers(copied / "tuned"), answers(made / "tuned"), rtol=0, atol=0)
    change_weights(copied / "base")
    with pytest.raises(CheckpointError, match="are not those that the adapters were trained on") as caught:
        load(copied / "tuned")
    assert caught.value.exit_code == 4
    shutil.rmtree(copied / "base")
    with pytest.raises(CheckpointError, match="which is gone"):
        load(copied / "tuned")


@pytest.mark.promise("adapters.run")
def test_a_run_whose_base_changed_is_not_resumed(made, copied):
    recipe = made / "toy.yaml"
    run(recipe, copied / "run", *tuning(copied), "train.max_steps=3")
    change_weights(copied / "base")
    with pytest.raises(ResumeError, match="are not those that the adapters were trained on"):
        run(recipe, copied / "run", "train.max_steps=5", resume=True)


@pytest.mark.promise("adapters.merge")
def test_peft_opens_the_folder_of_the_run(made):
    from peft import PeftModel

    from unpad.batching.batch import from_prompts

    base = load(made / "base")
    batch = from_prompts([base.prompt_ids(TEXT)])
    opened = PeftModel.from_pretrained(base.model, str(made / "tuned/adapter")).eval()
    with torch.no_grad():
        found = opened(batch)
    torch.testing.assert_close(found, load(made / "tuned").model(batch), rtol=1e-5, atol=1e-5)
