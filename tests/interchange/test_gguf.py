"""GGUF files: equal logits and ids when transformers reads them back; what llama.cpp does not know is named."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from tests.conftest import random_sequences
from tests.helpers.chat_folder import CHATML
from tests.helpers.llama_cpp import File, apart, llama_server
from tests.helpers.models import random_model
from unpad.batching.batch import from_sequences
from unpad.data.tokens.tokenizer import load_tokenizer, with_import
from unpad.data.tokens.words import WordTokenizer, train_words
from unpad.errors import CheckpointError, RecipeError
from unpad.interchange.gguf_file import DIGITS, save_gguf
from unpad.models.decoder import Decoder

pytestmark = pytest.mark.promise("models.gguf")

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

TOLERANCES = {"f32": 1e-5, "f16": 2e-3, "q8_0": 5e-2, "q4_0": 0.5}
ROWS = 320  # of the model; the tokenizer has fewer
TEXTS = ["hello world, hello there 2024", "你好 世界", "it's   fine\n\nthen"]


def byte_level(pattern: str = "") -> Tokenizer:
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern == DIGITS:
        library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), library.pre_tokenizer])
    elif pattern:
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


SIZES = {"width": 32, "blocks": 2, "heads": 4, "hidden": 64, "context": 64, "vocab_size": ROWS}


def make(**fields: Any) -> Decoder:
    return random_model({**SIZES, **fields}, ROWS).eval()


@torch.no_grad()
def error(ours: Decoder, theirs: torch.nn.Module) -> float:
    worst = 0.0
    for ids in random_sequences([5, 1, 23]):
        expected: Tensor = ours.logits(ours(from_sequences([[*ids, 0]])))
        got = theirs(input_ids=torch.tensor([ids])).logits[0]
        worst = max(worst, float((got - expected).norm() / expected.norm()))
    return worst


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 16}
GPT2 = {"norm": "layernorm", "positions": "learned", "bias": True, "activation": "gelu_tanh", "eps": 1e-5}
GEMMA = {"activation": "geglu_tanh", "embed_scale": 32**0.5}
GEMMA3 = {**GEMMA, "qk_norm": True, "branch_norms": True, "head_width": 16, "kv_heads": 2}
WINDOWS = {"sliding_window": 5, "sliding_blocks": [0, 2], "blocks": 3}
# Name -> the architecture that computes such a model, and fields of the model.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"kv_heads": 2, "tied": False}),
    "llama 3": ("llama", {"kv_heads": 2, "rope_theta": 500.0, "rope_scaling": LLAMA3}),
    "llama, biases": ("llama", {"bias": True, "head_width": 12}),
    "llama, linear": ("llama", {"context_method": "linear", "context_factor": 2.0}),
    "llama, ntk": ("llama", {"context_method": "ntk", "context_factor": 2.0}),
    "mistral": ("llama", {"kv_heads": 1, "rope_theta": 500.0, "sliding_window": 64}),
    "granite": ("llama", {"embed_scale": 12.0}),
    "granite, untied": ("llama", {"embed_scale": 12.0, "tied": False}),
    "qwen2": ("qwen2", {"qkv_bias": True, "kv_heads": 2}),
    "qwen2, wide heads": ("llama", {"qkv_bias": True, "head_width": 16}),
    "qwen3": ("qwen3", {"qk_norm": True, "head_width": 128, "heads": 2, "kv_heads": 1, "tied": False}),
    "smollm3": ("smollm3", {"blocks": 5, "no_rope_blocks": [3], "kv_heads": 2}),
    "gemma": ("gemma", {**GEMMA, "head_width": 16, "kv_heads": 1}),
    "gemma, unscaled": ("gemma", {"activation": "geglu_tanh"}),
    "gemma 3": ("gemma3", {**GEMMA3, **WINDOWS, "sliding_rope_theta": 100.0}),
    "gemma 3, one base": ("gemma3", {**GEMMA3, **WINDOWS, "context_method": "ntk", "context_factor": 2.0}),
    "gemma 3, two bases": (
        "gemma3", {**GEMMA3, **WINDOWS, "sliding_rope_theta": 100.0, "context_method": "linear", "context_factor": 8.0},
    ),
    "gemma 3, no windows": ("gemma3", {**GEMMA3, "tied": False}),
    "gemma 3 of 62 blocks": ("gemma3", {**GEMMA3, "blocks": 62, "width": 24, "head_width": 8, "hidden": 8}),
    "gpt2": ("gpt2", GPT2),
    "gpt2, groups": ("gpt2", {**GPT2, "kv_heads": 2, "tied": False, "embed_scale": 3.0}),
    "gpt2, no biases": ("gpt2", {**GPT2, "bias": False, "positions": "sinusoidal", "embed_scale": 3.0}),
    "gpt2, biases of queries": ("gpt2", {**GPT2, "bias": False, "qkv_bias": True}),
}  # fmt: skip


def saved(model: Decoder, out: Path, precision: str = "f32", **others: Any) -> list[str]:
    return save_gguf(model, imported(byte_level()), out, precision, **others)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_gives_the_log_probabilities_and_the_tokens(name, tmp_path):
    architecture, fields = MODELS[name]
    model, path = make(**fields), tmp_path / "m.gguf"
    assert saved(model, path) == [
        f"{architecture}, f32: {sum(map(torch.numel, model.parameters())):,} parameters, {path.stat().st_size:,} bytes",
        f"written to {path}",
    ]
    with llama_server(path) as asked:
        most = 5e-3 if architecture in ("gemma", "gemma3", "gpt2") else 1e-5  # GELU is read from a table in fp16
        assert apart(model, asked, random_sequences([1, 23, 40, 31, 9])) < most
        for text in TEXTS:
            assert asked("/tokenize", content=text, parse_special=False)["tokens"] == byte_level().encode(text).ids


@pytest.mark.parametrize("name", MODELS)
def test_names_and_types_of_tensors_are_those_of_the_architecture(name, tmp_path):
    architecture, fields = MODELS[name]
    saved(make(**fields), tmp_path / "m.gguf", "f16")
    file = File(tmp_path / "m.gguf")
    assert (file.architecture, file.fields[f"{architecture}.vocab_size"]) == (architecture, ROWS)
    known = gguf.MODEL_TENSORS[next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)]
    names = {gguf.TENSOR_NAMES[key].replace("{bid}", r"N") for key in known}
    for tensor, stored in file.types.items():
        base, kind = re.sub(r"^blk\.\d+", "blk.N", tensor).rsplit(".", 1)
        assert base in names
        plain = kind == "bias" or "norm" in base or base in ("rope_freqs", "position_embd")
        assert stored == ("F32" if plain else "F16")


@pytest.mark.parametrize("name", ["llama", "qwen3", "smollm3", "gpt2"])
def test_matrices_of_blocks_are_q4_0_and_those_around_them_q8_0(name, tmp_path):
    model = make(**MODELS[name][1])
    saved(model, tmp_path / "4.gguf", "q4_0")
    saved(model, tmp_path / "32.gguf", "f32")
    four, whole = (File(tmp_path / f"{bits}.gguf") for bits in (4, 32))
    types = {tensor: kind for tensor, kind in four.types.items() if kind != "F32"}
    outer = {"token_embd.weight", "output.weight"} & types.keys()
    assert set(types.values()) == {"Q4_0", "Q8_0"}
    assert {tensor for tensor, kind in types.items() if kind == "Q8_0"} == outer
    assert len(types) >= 4 * len(model.blocks)
    for tensor, exact in whole.tensors.items():
        away, blocks = (x.reshape(-1, min(32, x.shape[-1])) for x in (four.tensors[tensor] - exact, exact))
        steps = {"F32": 0, "Q8_0": 0.55 / 127, "Q4_0": 1.01 / 8}[four.types[tensor]]  # of a block's largest number
        assert (away.abs() <= steps * blocks.abs().amax(1, keepdim=True) + 1e-6).all(), tensor


def test_llama_cpp_reads_words_as_they_are_read_here(tmp_path):
    chinese = ["上面积了一层雪，上面积有多大？", "李白写了《静夜思》。a\\b 2024\n"]
    tokenizer = load_tokenizer(train_words(chinese * 3, 600, 1, ["<|user|>"]))
    model = random_model({**SIZES, **GPT2, "vocab_size": 700}, 700).eval()
    save_gguf(model, tokenizer, tmp_path / "m.gguf", "f32")
    with llama_server(tmp_path / "m.gguf") as asked:
        for text in [*chinese, *TEXTS, "上面积" * 40, "é😀\x7f\t", "用户"]:
            assert asked("/tokenize", content=text)["tokens"] == tokenizer.encode_batch([text])[0]
        marked = asked("/tokenize", content="<|user|>上面")["tokens"]
        assert marked == [*tokenizer.encode_batch(["<|user|>"])[0], *tokenizer.encode_batch(["上面"])[0]]
        assert asked("/detokenize", tokens=tokenizer.encode_batch(chinese)[1])["content"] == chinese[1]


READ_BACK = ("llama", "llama 3", "mistral", "qwen2", "qwen3")


@pytest.mark.slow
@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("name", READ_BACK)
def test_logits_and_ids_read_back_are_equal(name, precision, tmp_path):
    architecture, fields = MODELS[name]
    model, library = make(**fields), byte_level()
    said = saved(model, tmp_path / "m.gguf", precision)
    assert f", {precision}: " in said[0]
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    assert back.config.model_type == architecture
    if "rope_scaling" not in fields:  # that reader leaves the divisors out
        assert error(model, back) < TOLERANCES[precision]
    if precision == "f32":
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
        for text in TEXTS:
            assert tokenizer(text, add_special_tokens=False)["input_ids"] == library.encode(text).ids
        assert tokenizer.chat_template == CHATML


# Fields of a model, the sentence on it, and the fields that make it one that llama.cpp computes.
REFUSED: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"activation": "geglu", "tied": False}, "activation is 'geglu' (not in llama); tied is False (not in gemma)",
     {"activation": "swiglu"}),
    ({"activation": "relu", **{key: GPT2[key] for key in ("norm", "positions", "bias")}},
     "activation is 'relu' (not in gpt2)", {"activation": "gelu_tanh"}),
    ({"sliding_window": 8}, "sliding_window is 8 (not in llama)", {"sliding_window": None}),
    ({"sliding_window": 64, "sliding_rope_theta": 50.0}, "sliding_window is 64 (not in llama)",
     {"sliding_window": None, "sliding_rope_theta": None}),
    ({"qk_norm": True, "rope_scaling": LLAMA3}, "qk_norm is True (not in llama); rope_scaling is set (not in qwen3)",
     {"qk_norm": False}),
    ({"no_rope_blocks": [0], "blocks": 4},
     "no_rope_blocks is [0] (not in llama); no_rope_blocks is [0] (not in smollm3)",
     {"no_rope_blocks": [3]}),
    ({"branch_norms": True}, "branch_norms is True (not in llama)", {"branch_norms": False}),
    ({"causal": False}, "causal is False (not in llama)", {"causal": True}),
    ({**GEMMA3, **WINDOWS, "context_method": "linear", "context_factor": 2.0},
     "context_method is 'linear' (not in gemma3)", {"context_method": "none"}),
    ({**GPT2, "head_width": 12}, "head_width is 12 (not in gpt2)", {"head_width": None}),
    ({**GPT2, "qk_norm": True}, "qk_norm is True (not in gpt2)", {"qk_norm": False}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message", "instead"), REFUSED)
def test_what_llama_cpp_computes_otherwise_is_refused_with_the_fields_that_it_computes(
    fields, message, instead, tmp_path
):
    with pytest.raises(CheckpointError) as caught:
        saved(make(**fields), tmp_path / "m.gguf")
    assert caught.value.what == f"llama.cpp has no architecture that computes this model: {message}"
    advice = re.findall(r"model\.(\w+)=(.*?)(?=[ ;,](?:model|$| or))", caught.value.fix or "")
    advised = [(name, yaml.safe_load(value)) for name, value in advice]
    assert all(item in advised for item in instead.items() if item[0] != "sliding_rope_theta")
    assert not list(tmp_path.iterdir())
    saved(make(**{**fields, **instead}), tmp_path / "m.gguf")


def test_other_tokenizers_are_refused_by_name(tmp_path):
    model, out = make(), tmp_path / "m.gguf"
    with pytest.raises(CheckpointError, match="words that are cut as earlier versions did"):
        save_gguf(model, WordTokenizer(["a"]), out, "f16")
    with pytest.raises(CheckpointError, match="cuts texts in another way than gpt-2, qwen2, llama-bpe, smollm"):
        save_gguf(model, imported(byte_level(r"\p{N}")), out, "f16")
    changed = json.loads(byte_level(DIGITS).to_str())
    changed["pre_tokenizer"]["pretokenizers"][0]["individual_digits"] = False
    with pytest.raises(CheckpointError, match="cuts texts in another way"):
        save_gguf(model, imported(Tokenizer.from_str(json.dumps(changed))), out, "f16")
    changed = json.loads(byte_level().to_str())
    changed["normalizer"] = {"type": "Lowercase"}
    with pytest.raises(CheckpointError, match="normalizer Lowercase is not covered"):
        save_gguf(model, imported(Tokenizer.from_str(json.dumps(changed))), out, "f16")
    with pytest.raises(RecipeError, match='no type "q4"'):
        save_gguf(model, imported(byte_level()), out, "q4")
