"""Folders of Hugging Face as runs: everything that reads a run reads them, and what is trained goes back."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from tests.helpers.llama_cpp import File, apart, llama_server
from tests.interchange.theirs import text_of, their_reply
from unpad.batching.batch import from_sequences
from unpad.inference.loaded import load
from unpad.interchange.gguf_file import missing_bos

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")


@pytest.mark.nightly
@pytest.mark.promise("models.imported")
def test_an_imported_model_replies_as_transformers_does_and_goes_out_as_it_came(theirs, unpad):
    assert "with its chat template" in unpad("import", str(theirs), "--out", "runs/qwen").out
    for question in ("what is 1 and 1?", "你好", "<|im_end|>"):
        expected = text_of(theirs, their_reply(theirs, question)) if "<" not in question else None
        said = load("qwen").generate([question], max_new_tokens=12, precision="fp32")[0]
        assert expected in (None, said)
    listed = unpad("runs").out
    assert "imported" in listed
    assert "Qwen3ForCausalLM" in listed
    for verb, code, do in (
        ("runs qwen", 4, "unpad train runs/qwen/recipe.yaml"), ("compare qwen qwen", 4, "unpad train"),
        ("doctor qwen", 3, "unpad doctor qwen data.KIND=FILE"), ("eval qwen", 3, "unpad eval qwen --data FILE"),
        ("replay qwen", 2, "was trained"), ("trace qwen :1", 2, "was trained"),
        ("doctor qwen --machine", 3, "data"), ("export qwen runs/m --merge", 2, "use it as it is"),
    ):  # fmt: skip
        done = unpad(*verb.split())
        assert (done.code, do in done.err) == (code, True), (verb, done.err)
    assert unpad("chat", "qwen", stdin="what is 1 and 1?\n").code == 0
    with_system = unpad("generate", "qwen", "--prompt", "你好", "--system", "be short", "--json")
    assert json.loads(with_system.out)[0]["prompt_tokens"] > len(load("qwen").prompt_ids("你好"))
    unpad("export", "qwen", "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (Path("out") / name).exists() == (theirs / name).exists()
    assert "qwen3, q8_0" in unpad("export", "qwen", "out.gguf", "--type", "q8_0").out
    assert Path("out.gguf").read_bytes()[:4] == b"GGUF"
    assert their_reply(Path("out"), "what is 2 and 2?") == their_reply(theirs, "what is 2 and 2?")


def test_templates_without_a_default_and_a_base_models_end_are_named(theirs, talks, unpad):
    config, template = theirs / "tokenizer_config.json", (theirs / "chat_template.jinja").read_text()
    (theirs / "chat_template.jinja").unlink()
    about = json.loads(config.read_text())
    for changed, message in (
        ({"chat_template": [{"name": "tool_use", "template": template}]}, "names its templates tool_use, and none"),
        ({"chat_template": template.replace("<|im_end|>", "<|eot|>")}, "set eos_token to <|eot|>"),
    ):
        config.write_text(json.dumps(about | changed))
        assert message in unpad("import", str(theirs), "--out", f"runs/{len(message)}").out
        refused = unpad("train", f"runs/{len(message)}/recipe.yaml", f"data.chat={talks}")
        assert (refused.code, message in refused.err) == (3, True), refused.err


@pytest.mark.promise("models.imported")
def test_a_recipe_trains_from_a_folder_or_a_run_and_both_begin_alike(theirs, talks, unpad):
    Path("tune.yaml").write_text(yaml.safe_dump({
        "data": {"chat": str(talks), "holdout": 0.2}, "model": {"from": str(theirs), "dropout": 0.1},
        "plan": {"tokens_per_step": 128}, "train": {"max_epochs": 3}, "optim": {"lr": 2e-5}, "precision": "fp32",
    }))  # fmt: skip
    unpad("import", str(theirs), "--out", "runs/qwen")
    assert "vocabulary" in unpad("plan", "tune.yaml").out
    assert json.loads(unpad("prove", "tune.yaml", "--json").out)["passed"]
    unpad("train", "tune.yaml", "--out", "runs/one")
    unpad("train", "tune.yaml", "model.from=qwen", "--out", "runs/two")
    unpad("train", "runs/qwen/recipe.yaml", f"data.chat={talks}", "model.dropout=0.1", "data.holdout=0.2",
          "plan.tokens_per_step=128", "precision=fp32", "--out", "runs/three")  # fmt: skip
    weights = [load(name).model.state_dict() for name in ("one", "two", "three")]
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name])
        assert torch.equal(value, weights[2][name])
    assert "loss" in unpad("eval", "one").out
    assert "loss" in unpad("eval", "qwen", "--data", str(talks)).out
    assert unpad("runs", "one").out
    shutil.rmtree(theirs)  # a run goes on without the folder that it began from
    unpad("train", "tune.yaml", "train.max_epochs=4", "--out", "runs/one", "--resume", code=0)
    unpad("export", "one", "tuned")
    assert (
        text_of(Path("tuned"), their_reply(Path("tuned"), "what is 3 and 3?"))
        == load("one").generate(["what is 3 and 3?"], max_new_tokens=12, precision="fp32")[0]
    )


# --------------------------------------------------------------------------- runs that were trained here


SMALL = ["model.width=32", "model.hidden=64", "model.blocks=2", "model.heads=4", "model.kv_heads=4"]


@pytest.mark.promise("models.exported")
@pytest.mark.promise("models.gguf")
@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [("zh_chat", ["model.activation=gelu_tanh"]), ("chat", []), ("llm", ["tokenizer.vocab_size=300"]), ("small", [])],
)
def test_what_packaged_recipes_of_texts_train_is_read_by_transformers_and_by_llama_cpp(recipe, overrides, unpad):
    unpad("train", recipe, *SMALL, "train.max_steps=2", *overrides, "--out", "runs/own")
    assert "its tokenizer, of " in unpad("export", "own", "out").out
    said = unpad("export", "own", "own.gguf", "--type", "f32").out
    assert ("model.activation=geglu_tanh trains that" in said) == (recipe != "zh_chat")
    ours, theirs = load("own"), transformers.AutoModelForCausalLM.from_pretrained("out").eval()
    text = "李白写了什么？When are you open?"
    ids = ours.prompt_ids(text)
    with torch.no_grad():
        got = ours.generator.logits(ours.model(from_sequences([[*ids, 0]])))
        expected = theirs(input_ids=torch.tensor([ids])).logits[0]
    assert float((got - expected).norm() / expected.norm()) < 1e-5
    library, file = transformers.AutoTokenizer.from_pretrained("out"), File(Path("own.gguf")).fields
    assert (library.bos_token_id, library.eos_token_id) == (ours.tokenizer.bos_id, ours.tokenizer.eos_id)
    asked = [{"role": "user", "content": text}]
    with llama_server(Path("own.gguf")) as ask:
        assert apart(ours.generator, ask, [ids, ids[:9]]) < 2e-3
        if ours.recipe.data.converses:
            assert library.apply_chat_template(asked, add_generation_prompt=True)["input_ids"] == ids
            written = ask("/apply-template", messages=asked)["prompt"]
            assert ask("/tokenize", content=written)["tokens"] == ids
            assert f'TEMPLATE """{{{{ "{library.bos_token}" }}}}' in Path("own.Modelfile").read_text()
        else:
            assert library(text, add_special_tokens=False)["input_ids"] == ids[1:]
            bos = missing_bos(ours.tokenizer, converses=False)
            assert ask("/tokenize", content=bos + text, add_special=True)["tokens"] == ids
            assert ("prompts have to" in said, bool(bos)) == (recipe == "small",) * 2
    assert file["tokenizer.ggml.add_bos_token"] is not ours.recipe.data.converses
    for words in (["again.gguf", "--family", "llama"], ["x.onnx"]):
        assert (unpad("export", "own", *words).code, Path(words[0]).exists()) == (2, False)
