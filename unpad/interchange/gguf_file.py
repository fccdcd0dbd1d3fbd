"""GGUF files, as llama.cpp reads them: architecture, sizes, weights and tokenizer of a decoder in one file.

An architecture of llama.cpp is one computation with sizes. A decoder fits an architecture that computes the same; a
factor that the architecture fixes differently is folded into weights, which changes no logit. Tensors have the names
and the row order of llama.cpp's own converter.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unpad import storage
from unpad.data.tokens.tokenizer import LibraryTokenizer, Tokenizer
from unpad.data.tokens.words import BYTES
from unpad.errors import CheckpointError, RecipeError, nearest
from unpad.models.contract import Model
from unpad.models.decoder import Config, Decoder
from unpad.nn.activation import GATED
from unpad.nn.rope import position_table, rotary_frequencies

if TYPE_CHECKING:
    from gguf import GGUFWriter

MOST_NEAR = 2  # number of fitting changes that a refusal names
# Exact GELU -> its tanh approximation, the only GELU of llama.cpp's decoders; they differ by at most 5e-4.
APPROXIMATED = {"gelu": "gelu_tanh", "geglu": "geglu_tanh"}
# Architectures that rotate pairs of neighbouring channels, where this project pairs the halves of a head.
NEIGHBOURS = ("llama", "smollm3")
ROOT_SCALED = ("gemma", "gemma3")  # multiply embeddings by the root of their width
# Number of blocks of the Gemma 3 that divides scores by sqrt(width / heads) instead of sqrt(head_dim).
BLOCKS_OF_27B = 62

TOP = {"embed": "token_embd", "position_embed": "position_embd", "norm": "output_norm", "head": "output"}
BLOCK = {
    "norm_1": ("attn_norm",), "attention.to_qkv": ("attn_q", "attn_k", "attn_v"), "attention.to_out": ("attn_output",),
    "attention.q_norm": ("attn_q_norm",), "attention.k_norm": ("attn_k_norm",),
    "attention_norm": ("post_attention_norm",), "norm_2": ("ffn_norm",), "feed_forward.up": ("ffn_gate", "ffn_up"),
    "feed_forward.down": ("ffn_down",), "feed_forward_norm": ("post_ffw_norm",),
}  # fmt: skip

# Fields of `Config` -> the values that an architecture computes; a field that is missing may have any.
Covered = Mapping[str, tuple[object, ...]]
_BASE: Covered = {
    "causal": (True,), "norm": ("rmsnorm",), "positions": ("rotary",), "activation": ("swiglu",), "bias": (False,),
    "qkv_bias": (False,), "qk_norm": (False,), "branch_norms": (False,), "sliding_window": (None,),
    "rope_scaling": (None,), "no_rope_blocks": ([],),
}  # fmt: skip


def _architectures(config: Config) -> dict[str, Covered]:
    """The fields that each architecture computes, in the order in which they are tried."""
    gemma = {**_BASE, "activation": ("geglu_tanh", "geglu")}
    # Sliding blocks have a base of their own there, and no factor.
    factors = ("none", "ntk") if config.sliding_rope_theta is None and _slides(config) else ("none", "ntk", "linear")
    return {
        "qwen2": {**_BASE, "qkv_bias": (True,), "head_width": (None,)},
        "llama": _without(_BASE, "bias", "qkv_bias", "rope_scaling"),
        "qwen3": {**_BASE, "qk_norm": (True,)},
        "smollm3": {**_BASE, "no_rope_blocks": (list(range(3, config.blocks, 4)),)},
        "gemma": {**gemma, "tied": (True,)},
        "gemma3": {
            **_without(gemma, "sliding_window"), "qk_norm": (True,), "branch_norms": (True,), "context_method": factors,
        },
        "gpt2": {
            **_without(_BASE, "bias", "qkv_bias"), "norm": ("layernorm",), "positions": ("learned", "sinusoidal"),
            "activation": ("gelu_tanh", "gelu"), "head_width": (None,),
        },
    }  # fmt: skip


def _without(covered: Covered, *names: str) -> Covered:
    return {name: values for name, values in covered.items() if name not in names}


def _slides(config: Config) -> bool:
    return any(map(config.slides, range(config.blocks)))


def _facts(config: Config) -> dict[str, object]:
    """Fields of a config, with defaults resolved, and without those that change nothing."""
    same_angles = config.sliding_rope_theta is None or (
        config.sliding_rope_theta == config.rope_theta and config.context_method == "none"
    )
    narrow = config.sliding_window is not None and (config.sliding_window < config.longest or not same_angles)
    return {
        **{name: config.__dict__[name] for name in _BASE}, "tied": config.tied,
        "qkv_bias": config.attention_of(0).qkv_bias,
        "sliding_window": config.sliding_window if _slides(config) and narrow else None,
        "no_rope_blocks": sorted(set(config.no_rope_blocks)), "context_method": config.context_method,
        "head_width": None if config.head_dim * config.heads == config.width else config.head_dim,
    }  # fmt: skip


def architecture_of(config: Config, out: str) -> str:
    """The first architecture of llama.cpp that computes the same as a config.

    Args:
        out: the file to write.

    Raises:
        CheckpointError: there is none; names the fields in which the nearest ones differ, and their values there.
    """
    facts = _facts(config)
    wrong = {
        name: {field: values for field, values in covered.items() if facts[field] not in values}
        for name, covered in _architectures(config).items()
    }
    fewest = min(map(len, wrong.values()))
    near = [name for name, fields in wrong.items() if len(fields) == fewest]
    if fewest == 0:
        return near[0]
    reasons: dict[str, str] = {}  # advice -> what keeps the model from it
    for name in near:
        advice = " ".join(f"model.{field}={_written(values[0])}" for field, values in wrong[name].items())
        reason = ", ".join(f"{field} is {_shown(facts[field])}" for field in wrong[name])
        reasons.setdefault(advice, f"{reason} (not in {name})")
    shown = list(reasons.items())[:MOST_NEAR]
    what = f"llama.cpp has no architecture that computes this model: {'; '.join(reason for _, reason in shown)}"
    fix = f"unpad train RECIPE {', or '.join(advice for advice, _ in shown)}; or export a folder"
    raise CheckpointError(what, where=out, fix=fix)


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str | int | list | None) else "set"


def _written(value: object) -> str:
    """A value as an override on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def approximation(config: Config) -> str:
    """A line on approximations in llama.cpp, "" without any."""
    if config.activation not in APPROXIMATED:
        return ""
    other = APPROXIMATED[config.activation]
    return f"note: llama.cpp computes GELU by tanh, up to 5e-4 from this model's; model.activation={other} trains that"


def _rotary(config: Config) -> tuple[float, float]:
    """Base of the rotary frequencies, and their divisor, of all blocks but those of another base."""
    if config.context_method == "ntk" and config.head_dim > 2:
        return float(config.rope_theta * config.context_factor ** (config.head_dim / (config.head_dim - 2))), 1.0
    return float(config.rope_theta), config.context_factor if config.context_method == "linear" else 1.0


def fields_of(config: Config, architecture: str) -> dict[str, int | float | str | list[bool]]:
    """Metadata of a model, by the names that follow the architecture's."""
    fields: dict[str, int | float | str | list[bool]] = {
        "context_length": config.longest,
        "embedding_length": config.width,
        "block_count": config.blocks,
        "feed_forward_length": config.hidden,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.num_kv_heads,
    }
    if architecture == "gpt2":
        return {**fields, "attention.layer_norm_epsilon": config.eps}
    base, divisor = _rotary(config)
    fields |= {
        "attention.layer_norm_rms_epsilon": config.eps,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": base,
    }
    if divisor != 1.0:
        fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(divisor)}
    if architecture == "gemma3" and _slides(config):
        assert config.sliding_window is not None, "blocks slide"
        fields |= {
            "attention.sliding_window": config.sliding_window,
            "attention.sliding_window_pattern": [config.slides(index) for index in range(config.blocks)],
            "rope.freq_base_swa": float(config.sliding_rope_theta or base),
        }
    return fields


def tensors_of(model: Decoder, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """Names and values of the tensors of a file, fp32."""
    config = model.config
    factor = config.embed_scale / (math.sqrt(config.width) if architecture in ROOT_SCALED else 1.0)
    if (turns := rotary_divisors(config)) is not None:
        yield "rope_freqs.weight", turns
    if config.positions == "sinusoidal":
        table = position_table(config.context, config.width, 0.02, torch.float32, torch.device("cpu"))
        yield "position_embd.weight", table
    for name, tensor in model.state_dict().items():
        values = tensor.detach().cpu().double()
        layer, kind = name.rsplit(".", 1)
        if layer in TOP:
            if factor != 1.0 and layer == "embed":
                values = values * factor
            if factor != 1.0 and layer == "norm" and config.tied:
                values = values / factor  # the head shares the scaled embedding
            yield f"{TOP[layer]}.{kind}", values.float()
        else:
            _, index, inner = layer.split(".", 2)
            if inner == "attention.q_norm" and architecture == "gemma3" and config.blocks == BLOCKS_OF_27B:
                values = values * math.sqrt((config.width // config.heads) / config.head_dim)
            for part, rows in _parts(inner, values, config, architecture):
                yield f"blk.{index}.{part}.{kind}", rows.float()
    if architecture == "gpt2":
        yield from _no_biases(config)


def _parts(inner: str, values: Tensor, config: Config, architecture: str) -> list[tuple[str, Tensor]]:
    """Tensors there that one of a block here stacks."""
    if inner == "attention.to_qkv":
        if architecture == "gpt2":
            return [("attn_qkv", values)]
        num = (config.heads, config.num_kv_heads, config.num_kv_heads)
        q, k, v = values.split([heads * config.head_dim for heads in num])
        if architecture in NEIGHBOURS:
            q, k = _interleaved(q, num[0]), _interleaved(k, num[1])
        return list(zip(BLOCK[inner], (q, k, v), strict=True))
    if inner == "feed_forward.up":
        if config.activation not in GATED:
            return [("ffn_up", values)]
        return list(zip(BLOCK[inner], values.chunk(2), strict=True))
    return [(BLOCK[inner][0], values)]


def _interleaved(rows: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys with the two halves of every head interleaved."""
    halves = rows.unflatten(0, (heads, 2, -1))  # (heads, 2, head_dim / 2, width), without the width for biases
    return halves.transpose(1, 2).reshape(rows.shape)


def _no_biases(config: Config) -> Iterator[tuple[str, Tensor]]:
    """Zeros for biases that the architecture requires and a model lacks."""
    sizes = {"attn_output": config.width, "ffn_up": config.hidden, "ffn_down": config.width} if not config.bias else {}
    if not config.attention_of(0).qkv_bias:
        sizes["attn_qkv"] = (config.heads + 2 * config.num_kv_heads) * config.head_dim
    for index in range(config.blocks):
        for part, size in sizes.items():
            yield f"blk.{index}.{part}.bias", torch.zeros(size)


def rotary_divisors(config: Config) -> Tensor | None:
    """Divisors of the rotary frequencies by Llama 3.1's rule, (head_dim / 2,) fp32; None without `rope_scaling`."""
    if config.rope_scaling is None:
        return None
    plain = rotary_frequencies(config.head_dim, config.rope_theta, "none", 1.0)
    return (plain / config.rope_scaling.scaled(plain)).float()


TYPES = ("f32", "f16", "q8_0", "q4_0")
OWN_SCRIPT = "export a folder, and convert it with llama.cpp's own script"
BLOCK_TYPES, BLOCK_NUMBERS = ("q8_0", "q4_0"), 32  # numbers of a block share a scale
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens
_SPLIT_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = "digits"  # every digit by itself, and GPT-2's pattern between them
# Patterns of byte-level tokenizers that llama.cpp knows -> its names of them; "" is GPT-2's, which is built in.
PATTERNS = {
    "": "gpt-2", _SPLIT_QWEN: "qwen2", _SPLIT_QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1): "llama-bpe", DIGITS: "smollm",
}  # fmt: skip


def save_gguf(model: Model, tokenizer: Tokenizer, out: Path, kind: str, template: str | None = None) -> list[str]:
    """Write a model and its tokenizer.

    Args:
        kind: one of `TYPES`, of matrices; norms, biases and tables of positions stay in fp32, and rows that are not
            divided into blocks in fp16, beside q4_0 in fp32. Beside q4_0 embedding and head are q8_0.
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
    assert isinstance(model, Decoder), "a model of texts"
    name = architecture_of(model.config, str(out))
    with TemporaryDirectory(prefix="unpad-gguf-") as folder:
        path = Path(folder) / "model.gguf"
        writer = gguf.GGUFWriter(str(path), name)
        writer.add_name(name)  # not Mistral's: readers that know that name look for an architecture of it
        for field, value in {**fields_of(model.config, name), "vocab_size": model.vocab_size}.items():
            of_value = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
            writer.add_key_value(f"{name}.{field}", value, of_value)
        writer.add_file_type({"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7}[kind])
        _write_tokenizer(writer, tokenizer, model.vocab_size, template, out)
        for there, tensor in tensors_of(model, name):
            stored = _type_of(there, tensor, kind)
            number_type = gguf.GGMLQuantizationType[stored.upper()]
            numbers: Any = gguf.quants.quantize(tensor.numpy(), number_type)  # blocks as bytes
            writer.add_tensor(there, numbers, raw_dtype=number_type if stored in BLOCK_TYPES else None)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        data = path.read_bytes()
    storage.make_folder(out.parent)
    storage.write_atomic(out, data)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    bos = missing_bos(tokenizer, converses=template is not None)
    begin = f"note: llama.cpp begins no text with {bos}: prompts have to" if bos else ""
    return [
        f"{name}, {kind}: {parameters:,} parameters, {len(data):,} bytes",
        *filter(None, (approximation(model.config), begin)),
        f"written to {out}",
    ]


def _type_of(name: str, tensor: Tensor, kind: str) -> str:
    """Type of one tensor in a file of `kind`."""
    if tensor.dim() < 2 or name == "position_embd.weight":
        return "f32"
    if kind in BLOCK_TYPES and tensor.shape[1] % BLOCK_NUMBERS:
        return "f16" if kind == "q8_0" else "f32"
    return "q8_0" if kind == "q4_0" and name in ("token_embd.weight", "output.weight") else kind


def _write_tokenizer(writer: "GGUFWriter", tokenizer: Tokenizer, rows: int, template: str | None, out: Path) -> None:
    """Write a tokenizer of bytes, with a vocabulary filled up to the rows of the model.

    Words, encoded by the longest match over bytes, are what llama.cpp calls "rwkv". It also matches marks of roles that
    a user types.

    Raises:
        CheckpointError: llama.cpp does not know such a tokenizer; names its features.
    """
    if not isinstance(tokenizer, LibraryTokenizer):
        what = "words that are cut as earlier versions did are not written for llama.cpp"
        raise CheckpointError(what, where=str(out), fix="train again, or export a folder")
    fields = json.loads(tokenizer.plain_bytes())
    added = {one["id"]: one for one in fields.get("added_tokens") or []}
    tokens, types = [f"<unused{id}>" for id in range(rows)], [UNUSED] * rows
    for token, id in fields["model"]["vocab"].items():
        tokens[id], types[id] = token, NORMAL
    for id, one in added.items():
        tokens[id], types[id] = one["content"], CONTROL if one["special"] else USER_DEFINED
    if tokenizer.kind == "words":
        tokens = [_escaped(token) if kind == NORMAL else token for token, kind in zip(tokens, types, strict=True)]
        writer.add_tokenizer_model("rwkv")
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_known_pattern(fields, tokenizer, out))
        merges = fields["model"]["merges"]
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    if template is None and tokenizer.chat is not None:
        template = tokenizer.chat.source
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(tokenizer.bos_id)
    writer.add_eos_token_id(tokenizer.eos_id)
    writer.add_pad_token_id(tokenizer.pad_id)
    writer.add_add_bos_token(template is None)  # a chat template writes its own
    if template is not None:
        writer.add_chat_template(template)


def missing_bos(tokenizer: Tokenizer, *, converses: bool) -> str:
    """The text of BOS where llama.cpp does not put it before a text, as it does not before words; "" elsewhere."""
    if converses or not isinstance(tokenizer, LibraryTokenizer) or tokenizer.kind != "words":
        return ""
    return tokenizer.special_names()["bos_token"]


def _escaped(token: str) -> str:
    r"""A token in letters that stand for bytes, as `\xNN` of what is not printable ASCII."""
    values = (BYTES[letter] for letter in token)
    return "".join(chr(byte) if 33 <= byte < 127 and byte != 92 else rf"\x{byte:02x}" for byte in values)


def _known_pattern(fields: Mapping[str, Any], tokenizer: LibraryTokenizer, out: Path) -> str:
    """llama.cpp's name of the pattern by which a byte-level tokenizer cuts texts.

    Raises:
        CheckpointError: it knows none, or the tokenizer is of another type; names its features.
    """
    kind, normalizer = fields["model"].get("type"), fields.get("normalizer")
    expression = _pattern(fields.get("pre_tokenizer"))
    pattern = None if expression is None else PATTERNS.get(expression)
    if kind != "BPE" or pattern is None or tokenizer.pieces is None:
        what = f"a tokenizer of type {kind} that cuts texts in another way than " + ", ".join(PATTERNS.values())
        raise CheckpointError(f"{what} is not covered", where=str(out), fix=OWN_SCRIPT)
    if normalizer not in (None, {"type": "NFC"}):
        what = f"the tokenizer's normalizer {normalizer['type']} is not covered; expected none or NFC"
        raise CheckpointError(what, where=str(out), fix=OWN_SCRIPT)
    return pattern


def _pattern(given: Mapping[str, Any] | None) -> str | None:
    """The expression that splits texts before byte-level merges, a key of `PATTERNS`; None without one or for another
    method."""
    if given is None:
        return None
    if given["type"] == "ByteLevel":
        return "" if given.get("use_regex", True) and not given.get("add_prefix_space") else None
    if given["type"] != "Sequence" or len(given["pretokenizers"]) != 2:
        return None
    split, bytes_ = given["pretokenizers"]
    if split["type"] == "Digits" and split.get("individual_digits"):
        return DIGITS if _pattern(bytes_) == "" else None
    fits = split["type"] == "Split" and split.get("behavior") == "Isolated" and not split.get("invert")
    fits = fits and bytes_["type"] == "ByteLevel" and not bytes_.get("use_regex", True)
    return split["pattern"].get("Regex") if fits else None
