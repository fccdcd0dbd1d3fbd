"""Hugging Face LLaVA checkpoints, folders of config.json and safetensors, with equal logits.

Supported is `LlavaForConditionalGeneration` with a CLIP vision tower and a Llama, as in LLaVA 1.5 (Liu et al. 2023,
arXiv 2310.03744). Versions of transformers name tensors differently: all with or without the prefix `model.`, the head
inside or outside the language model, the tower with or without `vision_model`. All of them are read; written are the
names of versions up to 4.51, which later versions convert. The language model is a family of decoders, as in a folder
of its own (`decoders.py`); here are the tower and the projector.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from unpad.errors import CheckpointError
from unpad.interchange import folder as hf_folder
from unpad.interchange.decoders import LLAMA, DecoderFamily
from unpad.models import decoder
from unpad.models.contract import Model, ModelConfig
from unpad.models.vision_language.model import Config, Projector, VisionLanguage
from unpad.models.vision_language.tower import Tower, TowerConfig

COVERED = "use a LLaVA 1.5 checkpoint: a CLIP vision tower, two linear layers and a Llama"
LIKE_LLAVA = "build the model like LLaVA 1.5, or keep it as a checkpoint of unpad"

# Values of the fields that config.json omits.
LLAVA: hf_folder.Fields = {
    "model_type": "llava", "image_token_index": 32000, "projector_hidden_act": "gelu", "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default", "multimodal_projector_bias": True, "tie_word_embeddings": False,
    "quantization_config": None,
}  # fmt: skip
CLIP: hf_folder.Fields = {
    "model_type": "clip_vision_model", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_channels": 3, "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5, "attention_dropout": 0.0,
}  # fmt: skip
LARGE_CLIP: hf_folder.Fields = {  # if all of vision_config is omitted
    **CLIP, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 336, "patch_size": 14,
}  # fmt: skip
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
# Fields of the tower's config and of the whole config -> fields of config.json with equal values.
VISION_NAMES = {
    "width": "hidden_size", "hidden": "intermediate_size", "blocks": "num_hidden_layers",
    "heads": "num_attention_heads", "eps": "layer_norm_eps", "activation": "hidden_act",
    "attention_dropout": "attention_dropout", "patch": "patch_size",
}  # fmt: skip
TOP_NAMES = {
    "image_id": "image_token_index", "projector_activation": "projector_hidden_act",
    "projector_bias": "multimodal_projector_bias",
}  # fmt: skip
VISION_FIXED: hf_folder.Fields = {
    "positions": "learned",
    "pre_norm": True,
    "norm": "layernorm",
    "bias": True,
    "causal": False,
}

PLAIN = ("relu", "gelu", "quick_gelu")  # activations with equal names in both
# Layers here -> layers of transformers; one of a block may stack several.
TOWER = {
    "class_token": "embeddings.class_embedding", "patch_embed.weight": "embeddings.patch_embedding.weight",
    "positions.weight": "embeddings.position_embedding.weight", "pre_norm.weight": "pre_layrnorm.weight",
    "pre_norm.bias": "pre_layrnorm.bias",
}  # fmt: skip
TOWER_BLOCKS = {
    "norm_1": ("layer_norm1",), "norm_2": ("layer_norm2",),
    "attention.to_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.to_out": ("self_attn.out_proj",), "feed_forward.up": ("mlp.fc1",), "feed_forward.down": ("mlp.fc2",),
}  # fmt: skip
PROJECTOR = {"first": "linear_1", "second": "linear_2"}
HEAD = "lm_head.weight"
INSIDE = {"language_model.": "model.", "vision_tower.": "vision_model."}  # models in which tensors of a file may stand
POST_NORM = "vision_tower.post_layernorm"  # of CLIP's class token, which LLaVA never reads


LANGUAGE = replace(
    LLAMA,
    defaults={
        **LLAMA.defaults, "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
    },
    covered={"model_type": ("llama",)},
    prefix="language_model.",
    top={"embed": "language_model.embed_tokens", "norm": "language_model.norm", "head": "lm_head"},
)  # fmt: skip


@dataclass(frozen=True)
class Llava(hf_folder.Architecture):
    """The family of LLaVA."""

    text: DecoderFamily = LANGUAGE
    architecture: str = "LlavaForConditionalGeneration"
    embedding: str = "decoder.embed.weight"

    kind: str = "vision_language"

    def config(self, given: hf_folder.Fields) -> tuple[Config, int]:
        top = hf_folder.with_defaults(LLAVA, given, "the file")
        large = top.get("vision_config") is None
        vision = hf_folder.with_defaults(LARGE_CLIP if large else CLIP, top.get("vision_config") or {}, "vision_config")
        _check_sizes(top, vision)
        _check_covered(top, vision)
        language, vocab_size = self._language(top)
        top = {**top, "image_token_index": top.get("image_token_id", top["image_token_index"])}
        try:
            tower = TowerConfig(
                **{ours: vision[theirs] for ours, theirs in VISION_NAMES.items()}, **VISION_FIXED,
                side=vision["image_size"] // vision["patch_size"], feature_layer=top["vision_feature_layer"],
            )  # fmt: skip
            fields = {ours: top[theirs] for ours, theirs in TOP_NAMES.items()}
            return Config(vision=tower, language=language, **fields), vocab_size
        except ValidationError as error:
            first = error.errors()[0]
            what = f"{'.'.join(map(str, first['loc'])) or error.title}: {first['msg'].removeprefix('Value error, ')}"
            raise CheckpointError(what, fix=hf_folder.ANOTHER_COPY) from None

    def _language(self, top: hf_folder.Fields) -> tuple[decoder.Config, int]:
        """Config of the language model and its vocabulary size, by the section `text_config`."""
        section = hf_folder.with_defaults({}, top.get("text_config") or {}, "text_config")
        tied = bool(top["tie_word_embeddings"] or section.get("tie_word_embeddings"))
        try:
            config, vocab_size = self.text.config({**section, "tie_word_embeddings": tied})
        except CheckpointError as error:
            fix = COVERED if isinstance(error, hf_folder.NotCovered) else ""
            raise type(error)(f"text_config.{error.what}", fix=fix) from None
        # As the file says it, also where it equals the number of heads: recipes of runs from such a folder have it so.
        return config.model_copy(update={"kv_heads": section.get("num_key_value_heads")}), vocab_size

    def fields(self, model: Model, given: hf_folder.Fields) -> hf_folder.Fields:
        assert isinstance(model, VisionLanguage), "a family of models that read images"
        _check_expressible(model.config)
        try:
            language = self.text.fields(model.decoder, {})
        except CheckpointError as error:
            where = f"model.language{error.where.removeprefix('model')}"
            raise CheckpointError(f"language.{error.what}", where=where, fix=LIKE_LLAVA) from None
        spare = ("architectures", "torch_dtype")  # said at the top of the file
        section = {name: value for name, value in language.items() if name not in spare}
        return hf_folder.merged(given, {**_config_fields(model), "text_config": section})

    def table(self, config: ModelConfig, vocab_size: int, fields: hf_folder.Fields) -> hf_folder.Table:
        assert isinstance(config, Config), "a family of models that read images"
        language = self.text.table(config.language, vocab_size, fields.get("text_config") or {})
        return _vision_table(config) | {f"decoder.{ours}": parts for ours, parts in language.items()}

    def canonical(self, name: str) -> str:
        name = name.removeprefix("model.")
        for outer, inner in INSIDE.items():
            if name.startswith(outer + inner):
                return outer + name.removeprefix(outer + inner)
        return HEAD if name == f"language_model.{HEAD}" else name

    def written(self, name: str) -> str:
        if name == HEAD:
            return f"language_model.{HEAD}"
        outer = name.partition(".")[0] + "."
        return outer + INSIDE[outer] + name.removeprefix(outer) if outer in INSIDE else name

    def unused(self, name: str) -> bool:
        return name.startswith(POST_NORM)

    def constants(self, model: Model) -> dict[str, Tensor]:
        """CLIP's last norm does not exist here and is written as the identity."""
        assert isinstance(model, VisionLanguage), "a family of models that read images"
        ones = torch.ones(model.config.vision.width, dtype=model.embed.weight.dtype)
        return {f"{POST_NORM}.weight": ones, f"{POST_NORM}.bias": torch.zeros_like(ones)}


# --------------------------------------------------------------------------- names and shapes


def _vision_table(config: Config) -> hf_folder.Table:
    """Tensors of the tower and the projector, with their names of transformers without the prefix `model.`."""
    with torch.device("meta"):
        tower, projector = Tower(config.vision), Projector(config)
    table = {f"tower.{ours}": _tower_parts(ours, shape, config.vision) for ours, shape in _shapes(tower).items()}
    for ours, shape in _shapes(projector).items():
        layer, kind = ours.split(".")
        name = f"multi_modal_projector.{PROJECTOR[layer]}.{kind}"
        table[f"projector.{ours}"] = (hf_folder.TensorPart(name, shape[0], shape),)
    return table


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


def _tower_parts(ours: str, shape: tuple[int, ...], config: TowerConfig) -> tuple[hf_folder.TensorPart, ...]:
    """Tensors that a parameter of the tower stacks."""
    if ours.startswith("blocks."):
        _, index, inner = ours.split(".", 2)
        layer, kind = inner.rsplit(".", 1)
        names = [f"encoder.layers.{index}.{name}.{kind}" for name in TOWER_BLOCKS[layer]]
    else:
        names = [TOWER[ours]]
    rows = shape[0] // len(names)
    # Patches are embedded by a convolution in transformers: by channel, row and column.
    columns = (3, config.patch, config.patch) if ours == "patch_embed.weight" else shape[1:]
    return tuple(hf_folder.TensorPart(f"vision_tower.{name}", rows, (rows, *columns)) for name in names)


# --------------------------------------------------------------------------- config.json


def _config_fields(model: VisionLanguage) -> hf_folder.Fields:
    """Fields of config.json that describe a model, besides its language model."""
    config, vision = model.config, model.config.vision
    return {
        **{theirs: getattr(config, ours) for ours, theirs in TOP_NAMES.items()},
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_seq_length": vision.side**2,
        "vision_feature_layer": vision.feature_layer, "vision_feature_select_strategy": "default",
        "tie_word_embeddings": config.language.tied,
        "torch_dtype": hf_folder.dtype_name(model),  # the name that all versions read
        "vision_config": {
            **{theirs: getattr(vision, ours) for ours, theirs in VISION_NAMES.items()},
            "model_type": "clip_vision_model", "num_channels": 3, "image_size": vision.side * vision.patch,
        },
    }  # fmt: skip


def _check_sizes(top: hf_folder.Fields, vision: hf_folder.Fields) -> None:
    """Raise CheckpointError if a size is not a positive integer, such as a list of sizes."""
    for name in SIZES:
        if type(vision[name]) is not int or not 1 <= vision[name] <= hf_folder.largest(name):
            expected = f"a positive integer of at most {hf_folder.largest(name):,}"
            raise hf_folder.refuse(f"vision_config.{name}", vision[name], expected, COVERED)
    for name in ("vision_feature_layer", "image_token_index"):
        if type(top[name]) is not int:
            raise hf_folder.refuse(name, top[name], "one integer", COVERED)
    if vision["image_size"] % vision["patch_size"]:
        multiple = f"a multiple of {vision['patch_size']}"
        raise hf_folder.refuse("vision_config.image_size", vision["image_size"], multiple, COVERED)


def _check_covered(top: hf_folder.Fields, vision: hf_folder.Fields) -> None:
    """Raise CheckpointError if the file requires a feature that models here lack."""
    rules: list[tuple[str, object, Sequence[object]]] = [
        ("model_type", top["model_type"], ["llava"]),
        ("quantization_config", top["quantization_config"], [None]),
        ("vision_feature_select_strategy", top["vision_feature_select_strategy"], ["default"]),
        ("projector_hidden_act", top["projector_hidden_act"], PLAIN),
        ("vision_config.model_type", vision["model_type"], ["clip_vision_model"]),
        ("vision_config.num_channels", vision["num_channels"], [3]),
        ("vision_config.hidden_act", vision["hidden_act"], PLAIN),
    ]
    hf_folder.check_covered(rules, COVERED)


def _check_expressible(config: Config) -> None:
    """Raise CheckpointError if config.json cannot describe a part of the model besides its language model."""
    vision = config.vision
    rules: list[tuple[str, object, Sequence[object]]] = [
        *((f"vision.{name}", getattr(vision, name), [value]) for name, value in VISION_FIXED.items()),
        ("vision.activation", vision.activation, PLAIN),
        ("vision.kv_heads", vision.num_kv_heads, [vision.heads]),
    ]
    for field, value, allowed in rules:
        if value not in allowed:
            what = f"{field} is {value!r}; a LLaVA checkpoint knows {' or '.join(map(repr, allowed))} alone"
            raise CheckpointError(what, where=f"model.{field}", fix=LIKE_LLAVA)
    if config.image_id is None:
        raise CheckpointError(
            "image_id is not set, and a LLaVA checkpoint needs it", where="model.image_id", fix="set it"
        )
