"""GGUF files, as llama.cpp reads them: the weights, sizes and tokenizer of a decoder in one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from unpad import storage
from unpad.data.tokens.tokenizer import LibraryTokenizer, Tokenizer
from unpad.errors import CheckpointError, RecipeError, nearest
from unpad.interchange.gguf_model import approximation, architecture_of, fields_of, tensors_of
from unpad.models.contract import Model
from unpad.models.decoder import Decoder

if TYPE_CHECKING:
    from gguf import GGUFWriter

TYPES = ("f32", "f16", "q8_0")
OWN_SCRIPT = "export a folder, and convert it with llama.cpp's own script"
Q8_BLOCK = 32  # block size of q8_0: numbers that share a scale
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens
_SPLIT_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = "digits"  # every digit by itself, and GPT-2's pattern between them
# Patterns of byte-level tokenizers that llama.cpp knows -> its names of them; "" is GPT-2's, which is built in.
PATTERNS = {
    "": "gpt-2", _SPLIT_QWEN: "qwen2", _SPLIT_QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1): "llama-bpe", DIGITS: "smollm",
}  # fmt: skip


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens in order of their ids, their types, merges, and llama.cpp's name of the pattern that cuts texts."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    pattern: str


def save_gguf(model: Model, tokenizer: Tokenizer, out: Path, kind: str, template: str | None = None) -> list[str]:
    """Write a model and its tokenizer.

    Args:
        kind: one of `TYPES`, of matrices; norms, biases and tables of positions stay in fp32, as do rows that q8_0
            cannot divide into blocks.
        template: of conversations, in Jinja; None: the tokenizer's, if it has one.

    Returns:
        Lines on what was written.

    Raises:
        RecipeError: `kind` is unknown, or the package gguf is not installed.
        CheckpointError: llama.cpp does not compute the model, or does not know its tokenizer; names the fields.
        DiskError: the file cannot be written.
    """
    if kind not in TYPES:
        raise RecipeError(f'there is no type "{kind}"', where="--type", fix=nearest(kind, list(TYPES)))
    try:
        import gguf
    except ImportError:
        what = "GGUF files need the package gguf, which is not installed"
        raise RecipeError(what, where=str(out), fix="pip install unpad[gguf]") from None
    if not isinstance(model, Decoder):
        what = f"a GGUF file of a model of kind {model.config.kind} is not covered; expected kind decoder"
        raise CheckpointError(what, where=str(out), fix="export a folder")
    name = architecture_of(model.config, str(out))
    vocabulary = _vocabulary(tokenizer, model.vocab_size, out)
    with TemporaryDirectory(prefix="unpad-gguf-") as folder:
        path = Path(folder) / "model.gguf"
        writer = gguf.GGUFWriter(str(path), name)
        writer.add_name(name)  # not Mistral's: readers that know that name look for an architecture of it
        _write_fields(writer, name, {**fields_of(model.config, name), "vocab_size": model.vocab_size})
        writer.add_file_type({"f32": 0, "f16": 1, "q8_0": 7}[kind])
        _write_tokenizer(writer, tokenizer, vocabulary, template)
        for there, tensor in tensors_of(model, name):
            numbers: Any = tensor.numpy()
            own = _type_of(there, numbers, kind)
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
    remark = approximation(model.config)
    return [
        f"{name}, {kind}: {parameters:,} parameters, {len(data):,} bytes",
        *([remark] if remark else []),
        f"written to {out}",
    ]


def _type_of(name: str, numbers: np.ndarray, kind: str) -> str:
    """Type of one tensor in a file of `kind`."""
    if numbers.ndim < 2 or name == "position_embd.weight":
        return "f32"
    return "f16" if kind == "q8_0" and numbers.shape[1] % Q8_BLOCK else kind


def _write_fields(writer: GGUFWriter, architecture: str, fields: Mapping[str, int | float | str | list[bool]]) -> None:
    for name, value in fields.items():
        key = f"{architecture}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)


def _write_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer, vocabulary: _Vocabulary, template: str | None) -> None:
    if template is None and tokenizer.chat is not None:
        template = tokenizer.chat.source
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pattern)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(tokenizer.bos_id)
    writer.add_eos_token_id(tokenizer.eos_id)
    writer.add_pad_token_id(tokenizer.pad_id)
    writer.add_add_bos_token(template is None)  # a chat template writes its own
    if template is not None:
        writer.add_chat_template(template)


def _vocabulary(tokenizer: Tokenizer, rows: int, out: Path) -> _Vocabulary:
    """The vocabulary of a byte-level tokenizer, filled up to the rows of the model.

    Raises:
        CheckpointError: llama.cpp does not know such a tokenizer; names its features.
    """
    if not isinstance(tokenizer, LibraryTokenizer):
        what = f"a tokenizer of kind {tokenizer.kind} is unpad's own, and llama.cpp does not know it"
        raise CheckpointError(what, where=str(out), fix="train with tokenizer.kind=bpe, or export a folder")
    fields = json.loads(tokenizer.plain_bytes())
    model, kind = fields["model"], fields["model"].get("type")
    expression = _pattern(fields.get("pre_tokenizer"))
    pattern = None if expression is None else PATTERNS.get(expression)
    if kind != "BPE" or pattern is None or tokenizer.pieces is None:
        what = f"a tokenizer of type {kind} that cuts texts in another way than " + ", ".join(PATTERNS.values())
        raise CheckpointError(f"{what} is not covered", where=str(out), fix=OWN_SCRIPT)
    if fields.get("normalizer") not in (None, {"type": "NFC"}):
        what = f"the tokenizer's normalizer {fields['normalizer']['type']} is not covered; expected none or NFC"
        raise CheckpointError(what, where=str(out), fix=OWN_SCRIPT)
    tokens, types = [f"<unused{id}>" for id in range(rows)], [UNUSED] * rows
    for token, id in model["vocab"].items():
        tokens[id], types[id] = token, NORMAL
    for added in fields.get("added_tokens") or []:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return _Vocabulary(tokens, types, merges, pattern)


def _pattern(given: Mapping[str, Any] | None) -> str | None:
    """The expression that splits texts before byte-level merges, a key of `PATTERNS`; None without one or for another
    method."""
    if given is None:
        return None
    if given["type"] == "ByteLevel":
        plain = given.get("use_regex", True) and not given.get("add_prefix_space")
        return "" if plain else None
    if given["type"] != "Sequence" or len(given["pretokenizers"]) != 2:
        return None
    split, bytes_ = given["pretokenizers"]
    if split["type"] == "Digits" and split.get("individual_digits"):
        return DIGITS if _pattern(bytes_) == "" else None
    fits = split["type"] == "Split" and split.get("behavior") == "Isolated" and not split.get("invert")
    fits = fits and bytes_["type"] == "ByteLevel" and not bytes_.get("use_regex", True)
    expression: str | None = split["pattern"].get("Regex") if fits else None
    return expression
