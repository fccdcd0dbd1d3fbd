"""Runs that start from a LLaVA folder: heads that prune and mergers learn, while all that was imported stays."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.helpers.chat_folder import byte_level
from tests.helpers.pictures import write_folder
from tests.interchange.theirs import load as load_folder
from unpad.inference.loaded import load

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
PRUNE = {"layers": [0], "inner": 8, "heads": 2, "keep": 0.5}


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A random LLaVA of 2 x 2 patches, with a tokenizer that has its placeholder."""
    folder = tmp_path / "llava"
    library = byte_level(["is it dark or light?", "USER: ASSISTANT: dark light"])
    library.add_special_tokens(["<image>"])
    ids = {name: library.token_to_id(name) for name in ("<image>", "<|endoftext|>", "<|im_end|>")}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token="<s>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SIZES, image_size=16, patch_size=8),
        text_config=transformers.LlamaConfig(**SIZES, vocab_size=320, max_position_embeddings=128),
        image_token_index=ids["<image>"],
    )
    torch.manual_seed(0)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    colours = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
    (folder / "preprocessor_config.json").write_text(json.dumps(colours))
    return folder


def write_tuning(tmp_path: Path, start: str, **model: Any) -> str:
    folder = write_folder(tmp_path / "pictures")
    rows = [
        {"image": str(path.relative_to(folder)), "question": "is it dark or light?", "answer": path.parent.name}
        for path in sorted(folder.rglob("*.png"))
    ]
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "data": {
            "vqa": str(questions), "holdout": 0.25, "template": {"user": "USER: ", "assistant": " ASSISTANT: "},
        },
        "model": {"from": start, **model}, "precision": "fp32", "plan": {"tokens_per_step": 256, "overflow": "error"},
        "train": {"max_epochs": 1, "freeze": ["tower.*", "projector.*", "decoder.*"]},
    }  # fmt: skip
    (tmp_path / "tune.yaml").write_text(yaml.safe_dump(recipe))
    return "tune.yaml"


@pytest.mark.nightly
@pytest.mark.promise("vqa.prune-llava")
@pytest.mark.parametrize(
    ("added", "learns"),
    [
        ({"prune": PRUNE}, "pruners."),
        ({"merge": {"variant": "question", "ratio": 0.5, "inner": 8, "heads": 2}}, "merger."),
    ],
    ids=["prune", "merge"],
)
def test_heads_and_mergers_learn_on_an_imported_llava_and_nothing_else_moves(added, learns, theirs, tmp_path, unpad):
    recipe = write_tuning(tmp_path, str(theirs), **added)
    unpad("train", recipe, "--out", "runs/tuned", code=0)
    run = load("tuned")
    assert (run.recipe.images.size, run.recipe.images.square) == ("square", 16)
    assert run.recipe.images.mean == (0.48, 0.46, 0.41)
    before, after = load_folder(theirs).state_dict(), run.model.state_dict()
    for name, value in before.items():
        if name != "temperature":
            assert torch.equal(after[name], value), name
    new = after.keys() - before.keys() - {"temperature"}
    assert new
    assert all(name.startswith(learns) for name in new)
    assert json.loads(unpad("prove", recipe, "--json").out)["passed"]
    assert "accuracy" in unpad("eval", "tuned").out


@pytest.mark.promise("vqa.prune-llava")
def test_the_packaged_recipe_prunes_an_imported_run_and_names_it_where_it_is_missing(theirs, tmp_path, unpad):
    assert unpad("import", str(theirs), "--out", "runs/llava").code == 0
    write_tuning(tmp_path, "llava")
    questions = f"data.vqa={tmp_path}/pictures/questions.jsonl"
    assert "train.init_from=RUN" in unpad("train", "llava_prune", questions, code=2).err
    small = ["model.prune.layers=[0]", "model.prune.inner=8", "model.prune.heads=2", "precision=fp32"]
    short = ["stages.heads.train.max_epochs=1", "stages.hard.train.max_epochs=1"]
    start = ["train", "llava_prune", "train.init_from=llava", questions, *small]
    few = unpad(*start, "train.max_steps=1", "--out", "runs/few").out
    assert "fewer than train.min_steps=300" in " ".join(few.split())
    unpad(*start, *short, "--out", "runs/pruned", code=0)
    before, after = load("llava").model.state_dict(), load("pruned").model.state_dict()
    kept = [name for name in before if name.startswith(("tower.", "decoder."))]
    assert kept
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert any(name.startswith("pruners.") for name in after)
