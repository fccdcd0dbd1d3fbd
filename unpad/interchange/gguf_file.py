"""GGUF files, as llama.cpp reads them: the weights, sizes and tokenizer of a decoder in one file.

Tensors have the names and the order of rows that llama.cpp's own converter gives them: of its architecture `llama` the
rows of queries and keys are sorted so that neighbouring channels turn together, where Hugging Face turns the halves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from unpad import storage
from unpad.data.tokens.tokenizer import LibraryTokenizer, Tokenizer
from unpad.errors import CheckpointError, RecipeError, nearest
from unpad.interchange.folder import Family, Fields, check_covered, their_tensors
from unpad.models.contract import Model
from unpad.models.decoder import Config, Decoder

if TYPE_CHECKING:
    from gguf import GGUFWriter

# model_type -> name of the architecture in llama.cpp.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
TYPES = ("f32", "f16", "q8_0")
BLOCK = 32  # numbers of a row that q8_0 scales together
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens
_SPLIT_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Patterns of byte-level tokenizers that llama.cpp knows -> its names of them; "" is GPT-2's, which is built in.
PATTERNS = {"": "gpt-2", _SPLIT_QWEN: "qwen2", _SPLIT_QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1): "llama-bpe"}


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens in order of their ids, their types, merges, and llama.cpp's name of the pattern that cuts texts."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    pattern: str


def save_gguf(model: Model, family: Family, fields: Fields, tokenizer: Tokenizer, out: Path, kind: str) -> list[str]:
    """Write a model and its tokenizer.

    Args:
        family, fields: of the folder that would hold the model.
        kind: one of `TYPES`, of matrices; norms and biases stay in fp32, as do rows that q8_0 cannot cut.

    Returns:
        Lines on what was written.

    Raises:
        RecipeError: `kind` is unknown, or the package gguf is not installed.
        CheckpointError: llama.cpp does not know the family, a field of it or the tokenizer; names it.
        DiskError: the file cannot be written.
    """
    if kind not in TYPES:
        raise RecipeError(f'there is no type "{kind}"', where="--type", fix=nearest(kind, list(TYPES)))
    try:
        import gguf
    except ImportError:
        what = "GGUF files need the package gguf, which is not installed"
        raise RecipeError(what, where=str(out), fix="pip install unpad[gguf]") from None
    model_type = str(fields["model_type"])
    if model_type not in ARCHITECTURES:
        what = f"a GGUF file of model_type {model_type} is not covered; expected " + " or ".join(ARCHITECTURES)
        raise CheckpointError(what, where=str(out), fix="export a folder, and convert it with llama.cpp's own script")
    assert isinstance(model, Decoder), "families of decoders"
    _check_covered(model.config, out)
    vocabulary = _vocabulary(tokenizer, model.vocab_size, out)
    name = ARCHITECTURES[model_type]
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, model.config.blocks)
    with TemporaryDirectory(prefix="unpad-gguf-") as folder:
        path = Path(folder) / "model.gguf"
        writer = gguf.GGUFWriter(str(path), name)
        writer.add_name(name)  # not Mistral's: readers that know that name look for an architecture of it
        _write_sizes(writer, model.config, model.vocab_size)
        writer.add_file_type({"f32": 0, "f16": 1, "q8_0": 7}[kind])
        _write_tokenizer(writer, tokenizer, vocabulary)
        for theirs, tensor in their_tensors(model, family, fields).items():
            there = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
            assert there is not None, f"a tensor of the family, {theirs}, has no name"
            values = _sorted_rows(theirs, tensor, model.config) if name == "llama" else tensor
            numbers: Any = values.float().numpy()
            own = _type_of(numbers, kind)
            if own == "q8_0":
                quantised = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.Q8_0)
                writer.add_tensor(there, quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            else:
                writer.add_tensor(there, numbers.astype(np.float16 if own == "f16" else np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        data = path.read_bytes()
    storage.make_folder(out.parent)
    storage.write_atomic(out, data)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return [f"{name}, {kind}: {parameters:,} parameters, {len(data):,} bytes", f"written to {out}"]


def _check_covered(config: Config, out: Path) -> None:
    """Raise CheckpointError if llama.cpp computes something else for these fields."""
    slides = any(map(config.slides, range(config.blocks)))
    try:
        check_covered([
            ("activation", config.activation, ["swiglu"]),
            ("bias", config.bias, [False]),
            ("sliding_window", config.sliding_window if slides else None, [None]),
            ("rope_scaling", config.rope_scaling, [None]),
            ("context_method", config.context_method, ["none"]),
        ])  # fmt: skip
    except CheckpointError as error:
        fix = "export a folder, and convert it with llama.cpp's own script"
        raise CheckpointError(error.what, where=str(out), fix=fix) from None


def _type_of(numbers: np.ndarray, kind: str) -> str:
    """Type of one tensor in a file of `kind`."""
    if numbers.ndim < 2:
        return "f32"
    return "f16" if kind == "q8_0" and numbers.shape[1] % BLOCK else kind


def _sorted_rows(name: str, tensor: Tensor, config: Config) -> Tensor:
    """Rows of queries or keys with the two halves of every head interleaved."""
    heads = {".q_proj.": config.heads, ".k_proj.": config.num_kv_heads}
    for part, num in heads.items():
        if part in name:
            halves: Tensor = tensor.unflatten(0, (num, 2, -1))  # (heads, 2, head_dim / 2, width)
            return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor


def _write_sizes(writer: GGUFWriter, config: Config, vocab_size: int) -> None:
    writer.add_context_length(config.longest)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.blocks)
    writer.add_feed_forward_length(config.hidden)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_vocab_size(vocab_size)


def _write_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pattern)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(tokenizer.bos_id)
    writer.add_eos_token_id(tokenizer.eos_id)
    writer.add_pad_token_id(tokenizer.pad_id)
    writer.add_add_bos_token(tokenizer.chat is None)  # a chat template writes its own
    if tokenizer.chat is not None:
        writer.add_chat_template(tokenizer.chat.source)


def _vocabulary(tokenizer: Tokenizer, rows: int, out: Path) -> _Vocabulary:
    """The vocabulary of a byte-level tokenizer, filled up to the rows of the model.

    Raises:
        CheckpointError: llama.cpp does not know such a tokenizer; names what it has.
    """
    fix = "train with tokenizer.kind=bpe, or export a folder"
    if not isinstance(tokenizer, LibraryTokenizer):
        what = f"a tokenizer of kind {tokenizer.kind} is unpad's own, and llama.cpp does not know it"
        raise CheckpointError(what, where=str(out), fix=fix)
    fields = json.loads(tokenizer.plain_bytes())
    model, kind = fields["model"], fields["model"].get("type")
    expression = _pattern(fields.get("pre_tokenizer"))
    pattern = None if expression is None else PATTERNS.get(expression)
    if kind != "BPE" or pattern is None or tokenizer.pieces is None:
        what = f"a tokenizer of type {kind} that cuts texts in another way than " + ", ".join(PATTERNS.values())
        raise CheckpointError(f"{what} is not covered", where=str(out), fix=fix)
    if fields.get("normalizer") not in (None, {"type": "NFC"}):
        what = f"the tokenizer's normalizer {fields['normalizer']['type']} is not covered; expected none or NFC"
        raise CheckpointError(what, where=str(out), fix=fix)
    tokens, types = [f"<unused{id}>" for id in range(rows)], [UNUSED] * rows
    for token, id in model["vocab"].items():
        tokens[id], types[id] = token, NORMAL
    for added in fields.get("added_tokens") or []:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return _Vocabulary(tokens, types, merges, pattern)


def _pattern(given: Mapping[str, Any] | None) -> str | None:
    """The expression that cuts texts before byte-level merges; "" for GPT-2's, None for none or another way."""
    if given is None:
        return None
    if given["type"] == "ByteLevel":
        plain = given.get("use_regex", True) and not given.get("add_prefix_space")
        return "" if plain else None
    if given["type"] != "Sequence" or len(given["pretokenizers"]) != 2:
        return None
    split, bytes_ = given["pretokenizers"]
    fits = split["type"] == "Split" and split.get("behavior") == "Isolated" and not split.get("invert")
    fits = fits and bytes_["type"] == "ByteLevel" and not bytes_.get("use_regex", True)
    expression: str | None = split["pattern"].get("Regex") if fits else None
    return expression
