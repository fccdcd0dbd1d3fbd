"""GGUF files: equal logits and ids when transformers reads them back; what llama.cpp does not know is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from tests.conftest import random_sequences, tiny_model
from tests.helpers.chat_folder import CHATML
from unpad.batching.batch import from_sequences
from unpad.data.tokens.tokenizer import load_tokenizer, with_import
from unpad.data.tokens.words import train_words
from unpad.errors import CheckpointError, RecipeError
from unpad.interchange.families import FAMILIES
from unpad.interchange.gguf_file import ARCHITECTURES, PATTERNS, save_gguf
from unpad.models import build_model, model_config
from unpad.models.decoder import Decoder

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

TOLERANCES = {"f32": 1e-5, "f16": 2e-3, "q8_0": 5e-2}
ROWS = 320  # of the model; the tokenizer has fewer
TEXTS = ["hello world, hello there 2024", "你好 世界", "it's   fine\n\nthen"]


def byte_level(pattern: str = "") -> Tokenizer:
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>", "<|im_end|>"], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(TEXTS * 5, trainer)
    return library


def imported(library: Tokenizer) -> Any:
    own = {"pad": "<|endoftext|>", "bos": "<|endoftext|>", "eos": "<|im_end|>", "stops": ["<|im_end|>"]}
    return load_tokenizer(with_import(library.to_str().encode(), {**own, "chat_template": CHATML, "names": {}}))


def make(**fields: Any) -> Decoder:
    torch.manual_seed(0)
    sizes = {"width": 32, "blocks": 2, "heads": 4, "hidden": 64, "context": 64, "vocab_size": ROWS, **fields}
    model = build_model(model_config(sizes), ROWS)
    assert isinstance(model, Decoder)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@torch.no_grad()
def error(ours: Decoder, theirs: torch.nn.Module) -> float:
    worst = 0.0
    for ids in random_sequences([5, 1, 23]):
        expected: Tensor = ours.logits(ours(from_sequences([[*ids, 0]])))
        got = theirs(input_ids=torch.tensor([ids])).logits[0]
        worst = max(worst, float((got - expected).norm() / expected.norm()))
    return worst


KINDS: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 2, "tied": False},
    "mistral": {"kv_heads": 1, "tied": True, "rope_theta": 500.0},
    "qwen2": {"qkv_bias": True, "kv_heads": 2},
    "qwen3": {"qk_norm": True, "head_width": 128, "heads": 2, "kv_heads": 1, "tied": False},
}


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_ids_read_back_are_equal(kind: str, precision: str, tmp_path: Path) -> None:
    model, library, family = make(**KINDS[kind]), byte_level(), FAMILIES[kind]
    said = save_gguf(model, family, family.fields(model, {}), imported(library), tmp_path / "m.gguf", precision)
    assert f", {precision}: " in said[0]
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    assert back.config.model_type == ARCHITECTURES[kind]
    assert error(model, back) < TOLERANCES[precision]
    if precision == "f32":
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
        for text in TEXTS:
            assert tokenizer(text, add_special_tokens=False)["input_ids"] == library.encode(text).ids
        assert tokenizer.chat_template == CHATML


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_pattern_of_the_tokenizer_is_named_as_llama_cpp_names_it(pattern: str, tmp_path: Path) -> None:
    model, family = make(), FAMILIES["llama"]
    save_gguf(model, family, family.fields(model, {}), imported(byte_level(pattern)), tmp_path / "m.gguf", "f16")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.fields["tokenizer.ggml.pre"].contents() == PATTERNS[pattern]
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    assert (types[0], types[5], types[-1], len(types)) == (3, 1, 5, ROWS)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"activation": "geglu"}, "activation is 'geglu', which is not covered"),
    ("llama", {"bias": True}, "bias is True"),
    ("mistral", {"sliding_window": 8}, "sliding_window is 8"),
    ("llama", {"context_method": "linear", "context_factor": 2.0}, "context_method is 'linear'"),
    ("gpt2", {"norm": "layernorm", "positions": "learned", "bias": True, "activation": "gelu"}, "model_type gpt2"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), REFUSED)
def test_what_llama_cpp_computes_otherwise_is_refused_by_name(
    kind: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model, family = make(**fields), FAMILIES[kind]
    with pytest.raises(CheckpointError, match=message):
        save_gguf(model, family, family.fields(model, {}), imported(byte_level()), tmp_path / "m.gguf", "f16")
    assert not list(tmp_path.iterdir())


def test_other_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    model, family = make(), FAMILIES["llama"]
    fields, out = family.fields(model, {}), tmp_path / "m.gguf"
    with pytest.raises(CheckpointError, match="a tokenizer of kind words is unpad's own"):
        save_gguf(model, family, fields, train_words(["a"], 300, 1, []), out, "f16")
    with pytest.raises(CheckpointError, match="cuts texts in another way than gpt-2, qwen2, llama-bpe"):
        save_gguf(model, family, fields, imported(byte_level(r"\p{N}")), out, "f16")
    changed = json.loads(byte_level().to_str())
    changed["normalizer"] = {"type": "Lowercase"}
    with pytest.raises(CheckpointError, match="normalizer Lowercase is not covered"):
        save_gguf(model, family, fields, imported(Tokenizer.from_str(json.dumps(changed))), out, "f16")
    with pytest.raises(RecipeError, match='no type "q4"'):
        save_gguf(model, family, fields, imported(byte_level()), out, "q4")


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    model, family = tiny_model(torch.float32), FAMILIES["llama"]
    with pytest.raises(RecipeError, match="need the package gguf") as caught:
        save_gguf(model, family, family.fields(model, {}), imported(byte_level()), tmp_path / "m.gguf", "f16")
    assert caught.value.fix == "pip install unpad[gguf]"
