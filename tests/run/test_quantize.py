"""`unpad export --int8`: runs of every family with such weights, what opens them and what refuses them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.helpers.families import FAMILIES, SHORT, STEPS
from tests.helpers.toy import run
from unpad.errors import CheckpointError
from unpad.evaluation.run import evaluate_run
from unpad.inference.loaded import load
from unpad.nn.native.quantized import QuantizedWeight
from unpad.run import checkpoint
from unpad.run.base import quantize_run, run_weights

pytestmark = [pytest.mark.slow, pytest.mark.promise("models.quantized")]
WIDE: dict[str, dict[str, Any]] = {  # models with layers of 32 inputs and more
    "conversations": {"width": 64, "hidden": 96}, "pairs": {"width": 64, "hidden": 96},
    "images": {"width": 32, "hidden": 64}, "patients": {"width": 32, "hidden": 64},
    "questions": {"vision": {"patch": 8, "width": 32, "blocks": 1, "heads": 2, "hidden": 64, "feature_layer": -1}},
    "cnn": {"kind": "cnn", "patch": 32},
}  # fmt: skip


class Runs:
    """Trained runs by family, each made when it is asked for first."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(self, family: str) -> Path:
        """The run of a family of `WIDE`."""
        folder = self.root / family
        if not (folder / "run").exists():
            make = FAMILIES["images" if family == "cnn" else family]
            model = WIDE[family]
            if family == "cnn":
                recipe = make(folder, **{**SHORT, "model": None, "images": {"size": "square", "square": 32}})
                recipe = with_model(recipe, model)
            else:
                recipe = make(folder, **{**SHORT, "model": model})
            run(recipe, folder / "run", *([] if family == "pairs" else [f"train.max_steps={STEPS}"]))
        return folder / "run"


def with_model(recipe: Path, model: dict[str, Any]) -> Path:
    values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    recipe.write_text(json.dumps({**values, "model": model}), encoding="utf-8")
    return recipe


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("trained"))


@pytest.mark.parametrize("family", WIDE)
def test_every_family_is_quantized_and_evaluated(family, trained, tmp_path, unpad):
    original = trained(family)
    unpad("export", original, "shrunk", "--int8", code=0)
    weights = dict(load("shrunk").model.named_parameters())
    assert any(isinstance(weight, QuantizedWeight) for weight in weights.values())
    before, after = run_weights(original)[0], run_weights(Path("shrunk"))[0]
    assert before.keys() == after.keys()
    for name, weight in weights.items():
        assert torch.equal(weight + 0, after[name])
        if isinstance(weight, QuantizedWeight):
            assert float((after[name] - before[name]).norm() / before[name].norm()) < 0.02
        else:
            assert torch.equal(after[name], before[name]), name
    metrics, _ = evaluate_run("shrunk")
    assert metrics["divergence"].value < 0.05
    assert metrics["likeliest_kept"].value > 0.8
    if "perplexity" in metrics:
        expected = evaluate_run(str(original))[0]["perplexity"].value
        assert metrics["original_perplexity"].value == pytest.approx(expected, rel=1e-6)
        assert abs(metrics["perplexity"].value / metrics["original_perplexity"].value - 1) < 0.1


def test_a_quantized_run_is_used_and_trained_no_further(trained, unpad):
    original = trained("conversations")
    quantize_run(str(original), Path("runs/shrunk"))
    assert unpad("generate", "shrunk", "--prompt", "你好").code == 0
    assert unpad("chat", "shrunk", stdin="你好\n").code == 0
    assert unpad("eval", "shrunk", "--json").code == 0
    assert unpad("prove", "shrunk").code == 0
    assert unpad("runs", "shrunk").code == 0
    assert "--int8" in unpad("runs").out
    there = f"train.init_from={original.resolve()}"
    for words, code in (
        (["train", original.parent / "toy.yaml", "train.init_from=runs/shrunk", "--out", "x"], 2),
        (["train", original.parent / "toy.yaml", "train.init_from=runs/shrunk", "lora.r=2", "--out", "y"], 2),
        (["train", "--resume", "shrunk"], 2),
    ):
        refused = unpad(*words)
        assert (refused.code, there in refused.err) == (code, True), (words, refused.err)
    twice = unpad("export", "shrunk", "z", "--int8")
    assert (twice.code, f"the original: {original.resolve()}" in twice.err) == (2, True)
    assert unpad("export", original, "runs/shrunk", "--int8").code == 2
    assert unpad("export", original, "z", "--int8", "--merge").code == 2


def test_weights_of_4_bits_of_an_earlier_version_are_refused_in_one_sentence(trained, unpad):
    original = trained("conversations")
    quantize_run(str(original), Path("runs/four"))
    best = Path("runs/four/checkpoints")
    state = checkpoint.load(best / "best")
    values = {**state.values, "quantized": {**state.values["quantized"], "weights": "int4"}}
    checkpoint.save_named(best, "best", checkpoint.State(state.step, state.tensors, values))
    for words in (("eval", "four"), ("generate", "four", "--prompt", "x"), ("export", "four", "z", "--int8")):
        refused = unpad(*words)
        assert "its weights are int4, which no verb reads" in refused.err, words
        assert f"export {original.resolve()} again, with --int8 or as a file .gguf with --type q4_0" in refused.err
        assert refused.code == 4


def test_a_damaged_scale_or_number_is_refused_by_name(trained, tmp_path):
    folder = tmp_path / "shrunk"
    quantize_run(str(trained("images")), folder)
    state = checkpoint.load(folder / "checkpoints/best")
    scale = next(name for name in state.tensors if name.endswith(".scale") and "blocks" in name)
    numbers = scale.removesuffix("scale") + "int8"

    def refused(name: str, value: torch.Tensor | None) -> str:
        tensors = {key: tensor for key, tensor in state.tensors.items() if key != name}
        changed = checkpoint.State(state.step, tensors | ({} if value is None else {name: value}), state.values)
        checkpoint.save_named(folder / "checkpoints", "best", changed)
        with pytest.raises(CheckpointError) as caught:
            load(folder)
        return caught.value.what

    was = state.tensors[scale]
    shown = scale.removeprefix("model.")
    assert refused(scale, None) == f"{shown} is missing"
    assert refused(scale, was[:-1]).startswith(f"{shown} is {was.dtype} of shape")
    assert refused(scale, was.double()).startswith(f"{shown} is torch.float64")
    assert refused(scale, -was) == f"{shown} holds NaN, infinite or negative values"
    assert "holds numbers below -127" in refused(numbers, torch.full_like(state.tensors[numbers], -128))
    assert numbers.removeprefix("model.") in refused(numbers, state.tensors[numbers].float())
    with pytest.MonkeyPatch.context() as patch:  # a file that this program does not write
        patch.setattr(torch, "isfinite", lambda tensor: torch.ones_like(tensor, dtype=torch.bool))
        checkpoint.save_named(
            folder / "checkpoints", "best",
            checkpoint.State(state.step, {**state.tensors, scale: was * torch.nan}, state.values),
        )  # fmt: skip
    with pytest.raises(CheckpointError, match="holds NaN, infinite or negative values"):
        load(folder)
    for record in (None, {}, {"weights": 8, "original": "", "sha256": ""}):
        values = {**state.values, "quantized": record}
        checkpoint.save_named(folder / "checkpoints", "best", checkpoint.State(state.step, state.tensors, values))
        with pytest.raises(CheckpointError, match="record of its quantized weights is damaged"):
            load(folder)
