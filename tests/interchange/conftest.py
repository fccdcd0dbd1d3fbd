"""A folder of transformers and conversations, as fixtures."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.chat_folder import CHATML, byte_level

TALKS = [(f"what is {i} and {i}?", f"it is {2 * i}.") for i in range(12)]
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with a byte-level tokenizer, ChatML, two stop ids and more rows than ids."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("theirs")
    library = byte_level([text for talk in TALKS for text in talk])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    ids = {name: library.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>")}
    torch.manual_seed(1)
    config = transformers.Qwen3Config(**SIZES, vocab_size=320, eos_token_id=ids["<|im_end|>"], bos_token_id=None)
    model = transformers.Qwen3ForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.eos_token_id = list(ids.values())
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def theirs(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "theirs")
    return tmp_path / "theirs"


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    rows = [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in TALKS]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
