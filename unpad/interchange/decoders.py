"""Decoders as models of Hugging Face, by the declarative description of a family, such as that of Llama."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from pydantic import ValidationError
from torch import Tensor

from unpad.errors import CheckpointError
from unpad.interchange import folder
from unpad.interchange.readings import BIASES, GATED, HEADS, ROTARY, Reading, activation
from unpad.models.contract import Model, ModelConfig
from unpad.models.decoder import Config, Decoder
from unpad.nn.rope import sinusoidal_table

SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "vocab_size", "sliding_window", "sliding_window_pattern", "no_rope_layer_interval",
    "n_embd", "n_layer", "n_head", "n_inner", "n_positions", "ffn_dim", "word_embed_proj_dim",
)  # fmt: skip
FACTORS = (
    "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "embedding_multiplier", "attention_multiplier",
    "residual_multiplier", "logits_scaling",
)  # fmt: skip
HEAD = "lm_head."
CORRECT = "correct it, or use another copy"


@dataclass(frozen=True)
class DecoderFamily(folder.Architecture):
    """A family of decoders.

    Args:
        architecture: class in transformers.
        model_type: in config.json.
        names: fields of `Config` -> fields of config.json with equal values.
        readings: fields that are not simply equal.
        fixed: fields of `Config` that all models of the family share.
        defaults: values of the fields that config.json omits.
        covered: other fields of config.json, and the values that can be expressed here.
        prefix: prefix of all tensor names except the head's; a folder may omit its first part.
        top, blocks: layers here -> layers there; one here may stack several.
        layers: name of the list of blocks, after the prefix.
        change: changes to the tensors of a layer there.
    """

    architecture: str
    model_type: str
    names: Mapping[str, str]
    readings: tuple[Reading, ...]
    fixed: folder.Fields
    defaults: folder.Fields
    top: Mapping[str, str]
    blocks: Mapping[str, tuple[str, ...]]
    prefix: str = "model."
    layers: str = "layers"
    covered: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    change: Callable[[str, folder.Fields], folder.Change] = lambda name, fields: folder.Change()
    embedding: str = "embed.weight"
    kind: str = "decoder"

    # ----------------------------------------------------------------------- config.json

    def config(self, given: folder.Fields) -> tuple[Config, int]:
        fields = folder.with_defaults(self.defaults, given, "the file")
        quantised = fields.get("quantization_config")
        folder.check_covered([("quantization_config", quantised, [None])], "use weights that are not quantised")
        folder.check_covered([(name, fields.get(name, values[0]), values) for name, values in self.covered.items()])
        _check_numbers(fields)
        ours = dict(self.fixed)
        for here, there in self.names.items():
            if there not in fields:
                raise CheckpointError(f"there is no field {there}")
            ours[here] = fields[there]
        try:
            for reading in self.readings:
                ours |= reading.here(fields)
            config = Config(**{**ours, "vocab_size": fields["vocab_size"]})
        except KeyError as error:
            raise CheckpointError(f"there is no field {error.args[0]}") from None
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            message = first["msg"].removeprefix("Value error, ")
            raise CheckpointError(f"{self.names.get(name, name) or 'sizes'}: {message}") from None
        return config, config.vocab_size or 0

    def fields(self, model: Model, given: folder.Fields) -> folder.Fields:
        assert isinstance(model, Decoder), "a family of decoders"
        config = self._as_family(model.config)
        fields = {
            **{there: config.__dict__[here] for here, there in self.names.items()},
            **{key: value for reading in self.readings for key, value in reading.there(config).items()},
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": model.vocab_size,
            "torch_dtype": folder.dtype_name(model),  # the name that all versions read
        }
        old = given if given.get("model_type") == self.model_type else {}
        whole = folder.merged(old, fields)
        held, wanted = _meaning(self.config(whole)[0]), _meaning(config)
        for name, value in wanted.items():
            if held[name] != value:
                what = f"{name} is {_shown(value)}, and a model of type {self.model_type} has {_shown(held[name])}"
                fix = "export to another family with --family, or keep the run"
                raise CheckpointError(what, where=f"model.{name}", fix=fix)
        return whole

    def _as_family(self, config: Config) -> Config:
        """The config with sinusoidal positions as learned ones, if the family has learned positions."""
        if config.positions == "sinusoidal" and self.fixed["positions"] == "learned":
            return config.model_copy(update={"positions": "learned"})
        return config

    # ----------------------------------------------------------------------- tensors

    def table(self, config: ModelConfig, vocab_size: int, fields: folder.Fields) -> folder.Table:
        assert isinstance(config, Config), "a family of decoders"
        complete = folder.with_defaults(self.defaults, fields, "the file")
        with torch.device("meta"):
            shapes = {name: tuple(value.shape) for name, value in Decoder(config, vocab_size).state_dict().items()}
        return {ours: tuple(self._parts(ours, shape, config, complete)) for ours, shape in shapes.items()}

    def _parts(
        self, ours: str, shape: tuple[int, ...], config: Config, fields: folder.Fields
    ) -> list[folder.TensorPart]:
        """Tensors that a parameter stacks."""
        layer, kind = ours.rsplit(".", 1)
        if layer.startswith("blocks."):
            _, index, inner = layer.split(".", 2)
            names = [f"{self.prefix}{self.layers}.{index}.{name}.{kind}" for name in self.blocks[inner]]
        else:
            inner = layer
            names = [f"{self.top[layer]}.{kind}"]
        heights = [shape[0]]
        if len(names) > 1:
            kv_rows = config.num_kv_heads * config.head_dim
            stacked = {"attention.to_qkv": [config.heads * config.head_dim, kv_rows, kv_rows]}
            heights = stacked.get(inner, [config.hidden] * len(names))
        changes = [self.change(name, fields) for name in names]
        return [
            folder.TensorPart(name, rows, change.shape_there((rows, *shape[1:])), change)
            for name, rows, change in zip(names, heights, changes, strict=True)
        ]

    def canonical(self, name: str) -> str:
        if name.startswith((self.prefix, HEAD)):
            return name
        rest = self.prefix.partition(".")[2]
        missing = self.prefix.removesuffix(rest) if rest and name.startswith(rest) else self.prefix
        return missing + name

    def weights(self, model: Model) -> Mapping[str, Tensor]:
        assert isinstance(model, Decoder), "a family of decoders"
        state = model.state_dict()
        if self._as_family(model.config) is not model.config:
            table = sinusoidal_table(model.config.context, model.config.width)
            state["position_embed.weight"] = (0.02 * table).to(model.embed.weight.dtype)
        return state


def _check_numbers(fields: folder.Fields) -> None:
    """Raise CheckpointError if a size is not a positive integer that a model can have, or a factor no positive
    number."""
    for names, kinds, expected in ((SIZES, (int,), "a positive integer"), (FACTORS, (int, float), "a positive number")):
        for name in names:
            value = fields.get(name)
            if value is not None and (type(value) not in kinds or not value > 0):
                raise folder.refuse(name, value, expected, CORRECT)
            if names is SIZES and value is not None and value > folder.largest(name):
                raise folder.refuse(name, value, f"at most {folder.largest(name):,}", CORRECT)
    full = fields.get("max_window_layers")
    if full is not None and (type(full) is not int or full < 0):
        raise folder.refuse("max_window_layers", full, "a number of blocks", CORRECT)


def _meaning(config: Config) -> dict[str, object]:
    """The settings that determine outputs, with defaults resolved, so that equal models have equal values."""
    rotary = config.positions == "rotary"
    local = config.sliding_rope_theta if any(map(config.slides, range(config.blocks))) else None
    return {
        **{name: config.__dict__[name] for name in ("width", "hidden", "blocks", "norm", "eps", "activation", "bias")},
        **{name: config.__dict__[name] for name in ("positions", "tied", "embed_scale", "branch_norms")},
        "heads": (config.heads, config.num_kv_heads, config.head_dim),
        "attention": [
            {**vars(config.attention_of(index)), "dropout": 0.0, "angles": None} for index in range(config.blocks)
        ],
        "rope_theta": config.rope_theta if rotary else None,
        "sliding_rope_theta": None if local == config.rope_theta and config.context_method == "none" else local,
        "no_rope_blocks": sorted(config.no_rope_blocks),
        "rope_scaling": config.rope_scaling,
        "context_method": (config.context_method, config.context_factor if config.context_method != "none" else 1.0),
    }


def _shown(value: object) -> str:
    return repr(value) if not isinstance(value, list) else "another one in some blocks"


NAMES = {
    "width": "hidden_size", "hidden": "intermediate_size", "blocks": "num_hidden_layers", "eps": "rms_norm_eps",
    "tied": "tie_word_embeddings", "attention_dropout": "attention_dropout",
}  # fmt: skip
FIXED: folder.Fields = {"norm": "rmsnorm", "positions": "rotary"}
DEFAULTS: folder.Fields = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_dropout": 0.0, "attention_bias": False, "mlp_bias": False,
    "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
TOP = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
ATTENTION = {
    "attention.to_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.to_out": ("self_attn.o_proj",),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
}
FEED_FORWARD = {"feed_forward.up": ("mlp.gate_proj", "mlp.up_proj"), "feed_forward.down": ("mlp.down_proj",)}
NORMS = {"norm_1": ("input_layernorm",), "norm_2": ("post_attention_layernorm",)}
BLOCKS = {**NORMS, **ATTENTION, **FEED_FORWARD}
SILU = activation("hidden_act", GATED)

LLAMA = DecoderFamily(
    "LlamaForCausalLM", "llama", NAMES, (SILU, HEADS, ROTARY, BIASES), FIXED, DEFAULTS, TOP, BLOCKS
)  # fmt: skip
