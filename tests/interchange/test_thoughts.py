"""A reasoning model from its folder through training to a chat: thoughts are learned where the model says them."""

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.chat_folder import byte_level
from tests.helpers.thinking import FAMILIES, trl_template
from unpad.data.sources.example import Turn
from unpad.data.tokens.encode import encode_prompt
from unpad.inference.loaded import load

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

TALKS = [
    (f"what is {i} and {i}?", f"<think>\n{i} and {i}, so twice {i}.\n</think>\n\nit is {2 * i}.") for i in range(9)
]
ROWS = [
    [("user", question), ("assistant", reply), ("user", "sure?"), ("assistant", "<think>\nI am.\n</think>\n\nyes")]
    for question, reply in TALKS
]


def folder_with(template: str, folder: Path) -> Path:
    """A random Qwen3 whose tokenizer has the marks of thoughts."""
    library = byte_level([text for talk in TALKS for text in talk], 400)
    library.add_tokens(["<think>", "</think>"])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token="<s>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=256, tie_word_embeddings=True, vocab_size=library.get_vocab_size(),
        eos_token_id=library.token_to_id("<|im_end|>"), bos_token_id=None,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.promise("models.reasoning")
@pytest.mark.parametrize("kind", ["qwen3 of trl", *FAMILIES])
def test_a_reasoning_model_is_tuned_and_asked(kind, tmp_path, unpad):
    template = trl_template("qwen3") if kind == "qwen3 of trl" else FAMILIES[kind]
    theirs = folder_with(template, tmp_path / "theirs")
    rows = [{"messages": [{"role": role, "content": content} for role, content in row]} for row in ROWS]
    Path("talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert unpad("data", "check", "talks.jsonl").code == 0
    unpad("import", str(theirs), "--out", "runs/base")
    unpad("train", "runs/base/recipe.yaml", "data.chat=talks.jsonl", "data.holdout=0.2", "train.max_steps=3",
                 "plan.tokens_per_step=256", "precision=fp32", "--out", "runs/tuned", code=0)  # fmt: skip

    run = load("tuned")
    assert run.tokenizer.stop_ids == {run.tokenizer.eos_id}
    turns = [Turn(role, content) for role, content in ROWS[0]]
    prompt = encode_prompt(turns[:-1], run.tokenizer, run.recipe.data.template)
    asked = transformers.AutoTokenizer.from_pretrained(theirs).apply_chat_template(
        rows[0]["messages"][:-1], add_generation_prompt=True, return_dict=True
    )
    assert prompt == asked["input_ids"]
    assert unpad("chat", "tuned", stdin="what is 1 and 1?\n").code == 0
    assert unpad("generate", "tuned", "--prompt", "what is 1 and 1?").code == 0
    assert unpad("eval", "tuned").code == 0
