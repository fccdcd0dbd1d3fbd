"""Hugging Face LLaVA checkpoints, folders of config.json and safetensors, with equal logits.

Supported is `LlavaForConditionalGeneration` with a CLIP vision tower and a Llama, as in LLaVA 1.5 (Liu et al. 2023,
arXiv 2310.03744). Versions of transformers name tensors differently: all with or without the prefix `model.`, the head
inside or outside the language model, the tower with or without `vision_model`. `load_llava` reads all of them;
`save_llava` writes the names of versions up to 4.51, which later versions convert. Rotary positions rotate the same
pairs of channels in both, so rows keep their order; here one matrix stacks queries, keys and values, and another gate
and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from unpad.errors import CheckpointError
from unpad.interchange.folder import (
    ANOTHER_COPY,
    CONFIG,
    Fields,
    Part,
    Table,
    check_covered,
    dtype_name,
    largest,
    load_model,
    merged,
    read_json_files,
    refuse,
    save_model,
    with_defaults,
)
from unpad.models import decoder
from unpad.models.contract import Model, ModelConfig
from unpad.models.vision_language.model import Config, VisionLanguage
from unpad.models.vision_language.tower import TowerConfig
from unpad.nn.block import BlockConfig

Shapes = dict[str, tuple[int, ...]]
COVERED = "use a LLaVA 1.5 checkpoint: a CLIP vision tower, two linear layers and a Llama"

# Values of the fields that config.json omits.
LLAVA: Fields = {
    "model_type": "llava", "image_token_index": 32000, "projector_hidden_act": "gelu", "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default", "multimodal_projector_bias": True, "tie_word_embeddings": False,
    "quantization_config": None,
}  # fmt: skip
CLIP: Fields = {
    "model_type": "clip_vision_model", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_channels": 3, "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5, "attention_dropout": 0.0,
}  # fmt: skip
LARGE_CLIP: Fields = {  # if all of vision_config is omitted
    **CLIP, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 336, "patch_size": 14,
}  # fmt: skip
LLAMA: Fields = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "attention_dropout": 0.0, "attention_bias": False, "mlp_bias": False, "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}  # fmt: skip
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

PLAIN = ("relu", "gelu", "quick_gelu")  # activations with equal names in both
GATED = {"silu": "swiglu", "gelu": "geglu"}
# Layers of a block besides to_qkv: ours, and the transformers layers that it stacks, the gate first.
CLIP_LAYERS = {
    "norm_1": ["layer_norm1"], "norm_2": ["layer_norm2"], "attention.to_out": ["self_attn.out_proj"],
    "feed_forward.up": ["mlp.fc1"], "feed_forward.down": ["mlp.fc2"],
}  # fmt: skip
LLAMA_LAYERS = {
    "norm_1": ["input_layernorm"], "norm_2": ["post_attention_layernorm"], "attention.to_out": ["self_attn.o_proj"],
    "feed_forward.up": ["mlp.gate_proj", "mlp.up_proj"], "feed_forward.down": ["mlp.down_proj"],
}  # fmt: skip
HEAD, EMBED = "lm_head.weight", "language_model.embed_tokens.weight"
POST_NORM = "vision_tower.post_layernorm"  # of CLIP's class token, which LLaVA never reads


def load_llava(folder: str | Path) -> tuple[VisionLanguage, Fields]:
    """Load a model from a folder, saved in any precision.

    Returns:
        The model, in fp32 and in evaluation mode; and the contents of the folder's JSON files by file name: config.json
        and the files of the tokenizer and the image processor.

    Raises:
        CheckpointError: a file is missing or damaged, a field of config.json is not covered, or a tensor is missing,
            unknown or of another shape; names the file and the field or tensor.
    """
    files = read_json_files(Path(folder))
    model = load_model(Path(folder), Llava(), files[CONFIG])
    assert isinstance(model, VisionLanguage), "as its config says"
    return model, files


def save_llava(model: VisionLanguage, folder: str | Path, files: Mapping[str, Any] | None = None) -> None:
    """Save a model so that transformers loads it with the same logits.

    CLIP's last norm does not exist here and is written as the identity.

    Args:
        folder: created; an existing one must be empty.
        files: the JSON files that `load_llava` returned, to be written again: those of tokenizer and image processor,
            and the fields of config.json that do not describe the model.

    Raises:
        CheckpointError: the model has a part that such a checkpoint cannot describe; names the field.
        DiskError: the folder cannot be written, or holds other contents.
    """
    save_model(model, Path(folder), Llava(), files)


class Llava:
    """The family of LLaVA; a `Family` of `folder.py`."""

    architecture = "LlavaForConditionalGeneration"
    model_type = "llava"
    embedding = "decoder.embed.weight"

    def holds(self, kind: str) -> bool:
        return kind == "vision_language"

    def config(self, given: Fields) -> tuple[Config, int]:
        return _read_config(given)

    def fields(self, model: Model, given: Fields) -> Fields:
        assert isinstance(model, VisionLanguage), "a family of models that read images"
        _check_expressible(model.config)
        return merged(given, _config_fields(model))

    def table(self, config: ModelConfig, vocab_size: int, fields: Fields) -> Table:
        assert isinstance(config, Config), "a family of models that read images"
        return {
            ours: tuple(Part(name, shape[0], shape) for name, shape in parts.items())
            for ours, parts in _table(config, vocab_size).items()
        }

    def canonical(self, name: str) -> str:
        return _in_memory(name)

    def written(self, name: str) -> str:
        return _in_file(name)

    def unused(self, name: str) -> bool:
        return name.startswith(POST_NORM)

    def constants(self, model: Model) -> dict[str, Tensor]:
        """CLIP's last norm does not exist here and is written as the identity."""
        assert isinstance(model, VisionLanguage), "a family of models that read images"
        width, dtype = model.config.vision.width, model.embed.weight.dtype
        return {
            f"{POST_NORM}.weight": torch.ones(width, dtype=dtype),
            f"{POST_NORM}.bias": torch.zeros(width, dtype=dtype),
        }

    def weights(self, model: Model) -> Mapping[str, Tensor]:
        weights: Mapping[str, Tensor] = model.state_dict()
        return weights


# --------------------------------------------------------------------------- names and shapes


def _table(config: Config, vocab_size: int) -> dict[str, Shapes]:
    """Map every parameter of a model to the tensors that it stacks, with their shapes.

    Tensors have their names of transformers without the prefix `model.`.
    """
    vision, language = config.vision, config.language
    patch = (vision.width, 3, vision.patch, vision.patch)  # a convolution in transformers, by channel, row and column
    table: dict[str, Shapes] = {
        "tower.class_token": {"vision_tower.embeddings.class_embedding": (vision.width,)},
        "tower.patch_embed.weight": {"vision_tower.embeddings.patch_embedding.weight": patch},
        "tower.positions.weight": {
            "vision_tower.embeddings.position_embedding.weight": (1 + vision.side**2, vision.width)
        },
        "tower.pre_norm.weight": {"vision_tower.pre_layrnorm.weight": (vision.width,)},
        "tower.pre_norm.bias": {"vision_tower.pre_layrnorm.bias": (vision.width,)},
        "decoder.embed.weight": {EMBED: (vocab_size, language.width)},
        "decoder.norm.weight": {"language_model.norm.weight": (language.width,)},
    }
    for ours, theirs, columns in (("first", "linear_1", vision.width), ("second", "linear_2", language.width)):
        name = f"multi_modal_projector.{theirs}"
        table |= _linear(f"projector.{ours}", {name: language.width}, columns, config.projector_bias)
    for index in range(vision.blocks):
        table |= _block(f"tower.blocks.{index}", f"vision_tower.encoder.layers.{index}", vision, CLIP_LAYERS)
    for index in range(language.blocks):
        table |= _block(f"decoder.blocks.{index}", f"language_model.layers.{index}", language, LLAMA_LAYERS)
    if not language.tied:
        table["decoder.head.weight"] = {HEAD: (vocab_size, language.width)}
    return table


def _linear(ours: str, rows: dict[str, int], columns: int, bias: bool) -> dict[str, Shapes]:
    """Entries of a linear layer that stacks `rows` rows of each of theirs."""
    table: dict[str, Shapes] = {
        f"{ours}.weight": {f"{name}.weight": (height, columns) for name, height in rows.items()}
    }
    if bias:
        table[f"{ours}.bias"] = {f"{name}.bias": (height,) for name, height in rows.items()}
    return table


def _block(ours: str, theirs: str, config: BlockConfig, layers: dict[str, list[str]]) -> dict[str, Shapes]:
    heights = {"attention.to_out": config.width, "feed_forward.up": config.hidden, "feed_forward.down": config.width}
    num_heads = {"q": config.heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    qkv = {f"{theirs}.self_attn.{part}_proj": num * config.head_dim for part, num in num_heads.items()}
    table = _linear(f"{ours}.attention.to_qkv", qkv, config.width, config.bias)
    for layer, height in heights.items():
        rows = {f"{theirs}.{name}": height for name in layers[layer]}
        columns = config.hidden if layer == "feed_forward.down" else config.width
        table |= _linear(f"{ours}.{layer}", rows, columns, config.bias)
    for norm in ("norm_1", "norm_2"):
        for kind in ("weight", "bias") if config.norm == "layernorm" else ("weight",):
            table[f"{ours}.{norm}.{kind}"] = {f"{theirs}.{layers[norm][0]}.{kind}": (config.width,)}
    return table


def _in_memory(name: str) -> str:
    """Name in `_table` of a tensor of any version."""
    name = name.removeprefix("model.")
    for outer, inner in (("language_model.", "model."), ("vision_tower.", "vision_model.")):
        if name.startswith(outer + inner):
            return outer + name.removeprefix(outer + inner)
    return HEAD if name == f"language_model.{HEAD}" else name


def _in_file(name: str) -> str:
    """Name in the file, given the name in `_table`."""
    if name == HEAD:
        return f"language_model.{HEAD}"
    for outer, inner in (("language_model.", "model."), ("vision_tower.", "vision_model.")):
        if name.startswith(outer):
            return outer + inner + name.removeprefix(outer)
    return name


# --------------------------------------------------------------------------- config.json


def _read_config(given: Fields) -> tuple[Config, int]:
    """Return the model's config and its vocabulary size.

    Raises:
        CheckpointError: a field is not supported.
    """
    top = with_defaults(LLAVA, given, "the file")
    large = top.get("vision_config") is None
    vision = with_defaults(LARGE_CLIP if large else CLIP, top.get("vision_config") or {}, "vision_config")
    text = with_defaults(LLAMA, top.get("text_config") or {}, "text_config")
    _check_sizes(top, vision, text)
    _check_covered(top, vision, text)
    try:
        tower = TowerConfig(
            **_sizes(vision),
            eps=vision["layer_norm_eps"],
            activation=vision["hidden_act"],
            attention_dropout=vision["attention_dropout"],
            patch=vision["patch_size"],
            positions="learned",
            side=vision["image_size"] // vision["patch_size"],
            pre_norm=True,
            feature_layer=top["vision_feature_layer"],
        )
        language = decoder.Config(
            **_sizes(text),
            kv_heads=text.get("num_key_value_heads"),
            eps=text["rms_norm_eps"],
            activation=GATED[text["hidden_act"]],
            attention_dropout=text["attention_dropout"],
            bias=text["attention_bias"],
            context=text["max_position_embeddings"],
            rope_theta=_rope_theta(text),
            tied=bool(top["tie_word_embeddings"] or text["tie_word_embeddings"]),
            vocab_size=text["vocab_size"],
        )
        config = Config(
            vision=tower,
            language=language,
            image_id=top.get("image_token_id", top["image_token_index"]),
            projector_activation=top["projector_hidden_act"],
            projector_bias=top["multimodal_projector_bias"],
        )
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, first['loc'])) or error.title}: {first['msg'].removeprefix('Value error, ')}"
        raise CheckpointError(what, fix=ANOTHER_COPY) from None
    return config, text["vocab_size"]


def _config_fields(model: VisionLanguage) -> Fields:
    """Fields of config.json that describe a model."""
    config, vision, language = model.config, model.config.vision, model.config.language
    gates = {ours: theirs for theirs, ours in GATED.items()}
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": config.image_id,
        "image_seq_length": vision.side**2,
        "projector_hidden_act": config.projector_activation,
        "multimodal_projector_bias": config.projector_bias,
        "vision_feature_layer": vision.feature_layer,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": language.tied,
        "torch_dtype": dtype_name(model),  # the name that all versions read
        "vision_config": {
            **_their_sizes(vision), "model_type": "clip_vision_model", "num_channels": 3, "patch_size": vision.patch,
            "image_size": vision.side * vision.patch, "hidden_act": vision.activation, "layer_norm_eps": vision.eps,
            "attention_dropout": vision.attention_dropout,
        },
        "text_config": {
            **_their_sizes(language), "model_type": "llama", "vocab_size": model.vocab_size,
            "num_key_value_heads": language.num_kv_heads, "head_dim": language.head_dim,
            "hidden_act": gates[language.activation], "rms_norm_eps": language.eps, "attention_bias": language.bias,
            "mlp_bias": language.bias, "attention_dropout": language.attention_dropout,
            "max_position_embeddings": language.context, "tie_word_embeddings": language.tied,
            # Versions before 5 read the first, later ones the second.
            "rope_theta": language.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": language.rope_theta},
        },
    }  # fmt: skip


def _sizes(section: Fields) -> Fields:
    width, hidden, blocks, heads = (section[name] for name in SIZES)
    return {"width": width, "hidden": hidden, "blocks": blocks, "heads": heads}


def _their_sizes(config: BlockConfig) -> Fields:
    return dict(zip(SIZES, (config.width, config.hidden, config.blocks, config.heads), strict=True))


def _rope_theta(text: Fields) -> Any:
    given = text.get("rope_parameters", {})
    if not isinstance(given, dict):
        raise refuse("text_config.rope_parameters", given, "a JSON object", COVERED)
    return given.get("rope_theta", text["rope_theta"])


def _check_sizes(top: Fields, vision: Fields, text: Fields) -> None:
    """Raise CheckpointError if a size is not a positive integer, such as a list of sizes."""
    needed = {
        "vision_config": (vision, (*SIZES, "image_size", "patch_size")),
        "text_config": (text, (*SIZES, "vocab_size", "max_position_embeddings")),
    }
    for section, (fields, names) in needed.items():
        for name in names:
            if type(fields[name]) is not int or not 1 <= fields[name] <= largest(name):
                raise refuse(
                    f"{section}.{name}", fields[name], f"a positive integer of at most {largest(name):,}", COVERED
                )
    for name in ("vision_feature_layer", "image_token_index"):
        if type(top[name]) is not int:
            raise refuse(name, top[name], "one integer", COVERED)
    if vision["image_size"] % vision["patch_size"]:
        multiple = f"a multiple of {vision['patch_size']}"
        raise refuse("vision_config.image_size", vision["image_size"], multiple, COVERED)


def _check_covered(top: Fields, vision: Fields, text: Fields) -> None:
    """Raise CheckpointError if the file requires a feature that models here lack."""
    head_dim = text["hidden_size"] // text["num_attention_heads"]
    rules: list[tuple[str, Any, Sequence[Any]]] = [
        ("model_type", top["model_type"], ["llava"]),
        ("quantization_config", top["quantization_config"], [None]),
        ("vision_feature_select_strategy", top["vision_feature_select_strategy"], ["default"]),
        ("projector_hidden_act", top["projector_hidden_act"], PLAIN),
        ("vision_config.model_type", vision["model_type"], ["clip_vision_model"]),
        ("vision_config.num_channels", vision["num_channels"], [3]),
        ("vision_config.hidden_act", vision["hidden_act"], PLAIN),
        ("text_config.model_type", text["model_type"], ["llama"]),
        ("text_config.hidden_act", text["hidden_act"], list(GATED)),
        ("text_config.head_dim", text.get("head_dim", head_dim), [head_dim]),
        ("text_config.mlp_bias", text["mlp_bias"], [text["attention_bias"]]),
    ]
    for name in ("rope_scaling", "rope_parameters"):
        rope = with_defaults({}, text.get(name, {}), f"text_config.{name}")
        kind = rope.get("rope_type", rope.get("type", "default"))
        rules.append((f"text_config.{name}.rope_type", kind, ["default"]))
        rules.append((f"text_config.{name}.partial_rotary_factor", rope.get("partial_rotary_factor", 1), [1]))
        rules.append((f"text_config.{name}", [key for key, part in rope.items() if isinstance(part, dict)], [[]]))
    check_covered(rules, COVERED)


def _check_expressible(config: Config) -> None:
    """Raise CheckpointError if config.json cannot describe a part of the model."""
    vision, language = config.vision, config.language
    rules: list[tuple[str, Any, Sequence[Any]]] = [
        ("vision.positions", vision.positions, ["learned"]),
        ("vision.pre_norm", vision.pre_norm, [True]),
        ("vision.norm", vision.norm, ["layernorm"]),
        ("vision.activation", vision.activation, PLAIN),
        ("vision.bias", vision.bias, [True]),
        ("vision.causal", vision.causal, [False]),
        ("vision.kv_heads", vision.num_kv_heads, [vision.heads]),
        ("language.norm", language.norm, ["rmsnorm"]),
        ("language.activation", language.activation, list(GATED.values())),
        ("language.positions", language.positions, ["rotary"]),
        ("language.context_method", language.context_method, ["none"]),
        ("language.causal", language.causal, [True]),
    ]
    for field, value, allowed in rules:
        if value not in allowed:
            raise CheckpointError(
                f"{field} is {value!r}; a LLaVA checkpoint knows {' or '.join(map(repr, allowed))} alone",
                where=f"model.{field}",
                fix="build the model like LLaVA 1.5, or keep it as a checkpoint of unpad",
            )
    if config.image_id is None:
        raise CheckpointError(
            "image_id is not set, and a LLaVA checkpoint needs it", where="model.image_id", fix="set it"
        )
