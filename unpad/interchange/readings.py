"""Groups of fields in config.json, and the equivalent fields of a decoder."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unpad.errors import CheckpointError
from unpad.interchange.folder import Fields, NotCovered, check_covered, refuse, shown
from unpad.models.decoder import Config

GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu_new": "geglu_tanh"}
PLAIN = {
    "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
LLAMA3 = {
    "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
}  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """A group of fields on both sides: `here` converts config.json to fields of `Config`, `there` the other way
    round."""

    here: Callable[[Fields], Fields]
    there: Callable[[Config], Fields]


def activation(name: str, kinds: Mapping[str, str]) -> Reading:
    """The activation under this name; `kinds` are theirs -> ours."""

    def here(fields: Fields) -> Fields:
        if fields[name] not in kinds:
            raise refuse(name, fields[name], " or ".join(map(repr, kinds)))
        return {"activation": kinds[fields[name]]}

    def there(config: Config) -> Fields:
        theirs = {ours: kind for kind, ours in reversed(list(kinds.items()))}
        if config.activation not in theirs:
            what = f"activation is {config.activation!r}; the family has {' or '.join(map(repr, theirs))}"
            raise CheckpointError(what, where="model.activation", fix="export to another family with --family")
        return {name: theirs[config.activation]}

    return Reading(here, there)


def _heads_here(fields: Fields) -> Fields:
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    head_dim = fields.get("head_dim") or width // heads
    kv_heads = fields.get("num_key_value_heads") or heads
    return {
        "heads": heads,
        "kv_heads": None if kv_heads == heads else kv_heads,
        "head_width": None if head_dim * heads == width else head_dim,
    }


HEADS = Reading(
    _heads_here,
    lambda config: {
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
    },
)


def _angles(given: Fields, name: str) -> Fields:
    """Fields of `Config` for one section of rotary parameters."""
    kind = given.get("rope_type", given.get("type", "default"))
    rules: list[tuple[str, object, list[object]]] = [
        (f"{name}.rope_type", kind, ["default", "linear", "llama3"]),
        (f"{name}.partial_rotary_factor", given.get("partial_rotary_factor", 1.0), [1.0]),
    ]
    check_covered(rules)
    found: Fields = {"rope_theta": given["rope_theta"]}
    if kind == "linear":
        found |= {"context_method": "linear", "context_factor": given["factor"]}
    if kind == "llama3":
        found["rope_scaling"] = {ours: given[theirs] for ours, theirs in LLAMA3.items()}
    return found


def _rotary_here(fields: Fields) -> Fields:
    """Angles and context; `rope_parameters` of versions from 5, or `rope_theta` and `rope_scaling` before."""
    given = fields.get("rope_parameters")
    if not given:
        given = {**(fields.get("rope_scaling") or {}), "rope_theta": fields["rope_theta"]}
    if not isinstance(given, dict) or any(isinstance(part, dict) for part in given.values()):
        raise refuse("rope_parameters", given, "the parameters of one kind of block")
    found = _angles({"rope_theta": fields.get("rope_theta"), **given}, "rope_parameters")
    return found | _context_here(fields, found)


def _context_here(fields: Fields, found: Fields) -> Fields:
    """Trained context: linear factors count from it, and max_position_embeddings is the extended one."""
    return {"context": max(1, int(fields["max_position_embeddings"] / found.get("context_factor", 1)))}


def _angles_there(config: Config) -> Fields:
    given: Fields = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        scaling = vars(config.rope_scaling)
        given |= {"rope_type": "llama3", **{theirs: scaling[ours] for ours, theirs in LLAMA3.items()}}
    elif config.context_method == "linear":
        given |= {"rope_type": "linear", "factor": config.context_factor}
    return given


def _rotary_there(config: Config) -> Fields:
    given = _angles_there(config)
    scaled = given["rope_type"] != "default"
    return {
        "max_position_embeddings": config.longest,
        "rope_theta": config.rope_theta,
        "rope_scaling": {key: value for key, value in given.items() if key != "rope_theta"} if scaled else None,
        "rope_parameters": given,
    }


ROTARY = Reading(_rotary_here, _rotary_there)


def _two_rotaries_here(fields: Fields) -> Fields:
    """Angles of Gemma 3: one base for blocks with a window and another for the others."""
    given = fields.get("rope_parameters")
    if given and FULL in given:
        whole, local = given[FULL], given.get(SLIDING) or {}
    else:
        whole = {**(fields.get("rope_scaling") or {}), **(given or {})}
        local = {}
    found = _angles({"rope_theta": fields["rope_theta"], **whole}, f"rope_parameters.{FULL}")
    there = {"rope_theta": fields["rope_local_base_freq"], **local}
    check_covered([(f"rope_parameters.{SLIDING}.rope_type", there.get("rope_type", "default"), ["default"])])
    return found | {"sliding_rope_theta": there["rope_theta"]} | _context_here(fields, found)


def _two_rotaries_there(config: Config) -> Fields:
    fields, local = _rotary_there(config), config.sliding_rope_theta or config.rope_theta
    both = {FULL: fields["rope_parameters"], SLIDING: {"rope_type": "default", "rope_theta": local}}
    return {**fields, "rope_local_base_freq": local, "rope_parameters": both}


TWO_ROTARIES = Reading(_two_rotaries_here, _two_rotaries_there)


WINDOW = Reading(
    lambda fields: {"sliding_window": fields.get("sliding_window")},
    lambda config: {"sliding_window": config.sliding_window},
)


def _some_windows_here(fields: Fields) -> Fields:
    """Windows of some blocks, by `layer_types` or by `max_window_layers` of older versions."""
    if not fields.get("use_sliding_window") or not fields.get("sliding_window"):
        return {}
    blocks = fields["num_hidden_layers"]
    kinds = fields.get("layer_types") or [
        SLIDING if index >= fields["max_window_layers"] else FULL for index in range(blocks)
    ]
    return {"sliding_window": fields["sliding_window"], "sliding_blocks": _places(kinds, "layer_types", SLIDING, FULL)}


def _some_windows_there(config: Config) -> Fields:
    slides = any(map(config.slides, range(config.blocks)))
    window = config.sliding_window if slides else None
    return {"use_sliding_window": slides, "sliding_window": window, "layer_types": _layer_types(config)}


SOME_WINDOWS = Reading(_some_windows_here, _some_windows_there)


def _gemma_windows_here(fields: Fields) -> Fields:
    pattern, blocks = fields["sliding_window_pattern"], fields["num_hidden_layers"]
    kinds = fields.get("layer_types") or [SLIDING if (index + 1) % pattern else FULL for index in range(blocks)]
    places = _places(kinds, "layer_types", SLIDING, FULL)
    return {"sliding_window": fields["sliding_window"], "sliding_blocks": places}


GEMMA_WINDOWS = Reading(
    _gemma_windows_here,
    lambda config: {"sliding_window": config.sliding_window or config.longest, "layer_types": _layer_types(config)},
)


def _layer_types(config: Config) -> list[str]:
    return [SLIDING if config.slides(index) else FULL for index in range(config.blocks)]


def _places(kinds: Any, name: str, wanted: object, other: object) -> list[int]:
    """Blocks of one of two kinds."""
    if not isinstance(kinds, list) or not all(kind in (wanted, other) for kind in kinds):
        raise refuse(name, kinds, f"a list of {wanted!r} and {other!r}")
    return [index for index, kind in enumerate(kinds) if kind == wanted]


def _unrotated_here(fields: Fields) -> Fields:
    every, blocks = fields["no_rope_layer_interval"], fields["num_hidden_layers"]
    turns = fields.get("no_rope_layers") or [int((index + 1) % every != 0) for index in range(blocks)]
    return {"no_rope_blocks": _places(turns, "no_rope_layers", 0, 1)}


UNROTATED = Reading(
    _unrotated_here,
    lambda config: {"no_rope_layers": [int(index not in config.no_rope_blocks) for index in range(config.blocks)]},
)
BIASES = Reading(
    lambda fields: {"bias": _both_biases(fields)},
    lambda config: {"attention_bias": config.bias, "mlp_bias": config.bias},
)
ROOT_SCALE = Reading(lambda fields: {"embed_scale": math.sqrt(fields["hidden_size"])}, lambda config: {})


def _both_biases(fields: Fields) -> object:
    """The value of the two fields of biases, which must be equal; the error otherwise names the true one first."""
    given = sorted(((name, fields.get(name)) for name in ("attention_bias", "mlp_bias")), key=lambda one: not one[1])
    (name, value), (other, without) = given
    if value != without:
        what = f"{name} is {shown(value)} and {other} {shown(without)}, which is not covered; expected equal values"
        raise NotCovered(what)
    return value


INNER = Reading(
    lambda fields: {"hidden": fields.get("n_inner") or 4 * fields["n_embd"]}, lambda config: {"n_inner": config.hidden}
)


def _same_embedding_here(fields: Fields) -> Fields:
    check_covered([("word_embed_proj_dim", fields.get("word_embed_proj_dim"), [fields["hidden_size"], None])])
    return {}


SAME_EMBEDDING = Reading(_same_embedding_here, lambda config: {"word_embed_proj_dim": config.width})
