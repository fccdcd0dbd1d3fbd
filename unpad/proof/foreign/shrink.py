"""Small models with the architecture of a transformers configuration.

A small configuration keeps what makes a difference between architectures: one block of each type, in their order,
grouped heads, a head size unlike width / heads, windows, soft caps, sinks, rotary kinds and parts, multipliers, tied
embeddings, experts and mixers. It lowers the sizes and turns off randomness in training.

Tables and patterns cover the names of all families; a field in none keeps its value.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cache

from unpad.proof.foreign.lengths import row_limit

Fields = dict[str, object]

HEADS, HEAD_SIZE = 4, 16  # of a block of 64 numbers per token
VOCABULARY = 128  # ids; special ones are 0, 1, 2 and the last
ORDINARY = range(3, 112)  # ids without a special meaning in a small configuration
CONTEXT = 512  # positions, more than all sequences of the proof have


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Most of a size, by the first pattern that its name has; a size is never raised.
SIZES: tuple[tuple[int, str], ...] = (
    (CONTEXT, r"max_source_positions|original_max_position_embeddings"),
    (48, r"(moe|experts?|shared)_(\w+_)?intermediate|expert_ffn"),
    (96, r"intermediate_size|ffn|^d_(ff|inner)$|^dff$|dim_ff|n_inner|feed_forward"),
    (8, r"qk_rope_head_dim|rotary_dim|d_state|state_size|rel_extent|per_layer_input|time_step_rank|dt_rank"),
    (8, r"(mamba_|^)chunk_size|(index_|^)block_size"),
    (1, r"topk_group|n(um)?_shared_experts|(^|mamba_)n_?groups|nextn_predict"),
    (2, r"experts_per_tok|moe_top_?k$|moe_k$|top_k_experts|n_group$|num_expert_group|linear_num_key_heads|o_groups"),
    (2, r"compress_ratio|heads_per_ngram|ngram_parts"),
    (4, r"num_(local_)?experts$|n_routed_experts|zero_expert_num|patch_size|ngram_size"),
    (32, r"[qo]_lora_rank|mamba_(d_head|head_dim)|attn_chunk_length|laurel_rank"),
    (16, r"kv_lora_rank|(nope|v|index|indexer|linear|linear_key|linear_value)_head_dim|^d_(kv|head|rel)$|dim_head"),
    (16, r"attention_head_size|kv_channels|norm_rank|adapter_rank|router_hidden|image_size|mel_bins|indexer_budget"),
    # A key that no head of an indexer scores above zero ties with others, which happens to few heads alone.
    (16, r"index(er)?_n_heads"),
    (64, r"hidden_size|d_model|n_embd|(emb|embed|embedding)_(proj_)?(dim|size)|lru_width|(in|out)put_size"),
    (64, r"adapter_(in|out)_dim|lowrank"),
)


@cache
def _most(name: str) -> int | None:
    return next((most for most, pattern in SIZES if re.search(pattern, name)), None)


# Fields that are raised as well: the sequences of the proof must fit.
POSITIONS = _names(
    "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length model_max_length seq_length "
    "max_target_positions context_length"
)

# Windows, in positions: shorter than the sequences of the proof, so that what they hide shows.
WINDOW = 8
WINDOWS = _names(
    "sliding_window sliding_window_size window_size attention_window_size local_attention attention_chunk_size "
    "keep_window_size index_topk floor_scale"
)

# The field above which rotary positions of a kind depend on the length of the row; lowered like a window.
LIMITS = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}

# The first that a configuration has counts its blocks.
STACKS = _names(
    "num_hidden_layers n_layer n_layers num_layers num_blocks decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_layers_per_stack"
)
QUERY_HEADS = _names(
    "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads attention_heads swa_num_attention_heads "
    "linear_num_heads linear_num_value_heads mamba_n_heads mamba_num_heads n_mamba_heads "
    "num_attention_heads_per_layer"
)
KEY_HEADS = _names(
    "num_key_value_heads num_kv_heads swa_num_key_value_heads num_query_groups kv_n_heads num_global_key_value_heads"
)
HEAD_SIZES = _names("head_dim swa_head_dim global_head_dim attention_head_dim mamba_headdim")
WIDTHS = ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim")

# Fields for differing blocks: lists of block numbers, first blocks, and intervals between blocks.
BLOCK_LISTS = _names(
    "full_attn_idxs moe_layers mlp_only_layers cross_attention_layers hybrid_layer_ids ple_layer_ids attn_layer_indices"
)
FIRST_BLOCKS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "max_window_layers")
PERIODS = _names(
    "attn_layer_period expert_layer_period decoder_sparse_step interleave_moe_layer_step full_attention_interval "
    "sliding_window_pattern global_attn_every_n_layers no_rope_layer_interval layer_group_size moe_layer_interval "
    "n_layers_per_attn_res_block"
)
OFFSETS = _names("attn_layer_offset expert_layer_offset prefix_dense_sliding_window_pattern")
BLOCK_TYPES = ("layer_types", "layers_block_type")  # lists that count the blocks where no field does
CYCLES = ("block_types",)  # lists that repeat over the blocks

# Fields with the same value in every small model. Trainers compute without a cache, and the loss of a router is a mean
# over the tokens of a batch, which depends on batching by definition.
FIXED: Fields = {
    "per_layer_config": {},
    "use_cache": False,
    "is_decoder": True,
    "dtype": "float32",
    "output_router_logits": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "decoder_start_token_id": 1,
    "eos_token_id": 2,
    "forced_eos_token_id": 2,
}
LEFT_OUT = _names(
    "quantization_config auto_map transformers_version torch_dtype id2label label2id num_labels architectures "
    "tokenizer_class"
)
# Parts of names of what is random in training, or a loss beside the next token's.
SILENCED = ("drop", "jitter", "aux_loss", "z_loss", "moe_loss", "mask_time_prob", "mask_feature_prob")

# A field that is the product of others, or their sum, where it is so in the whole configuration.
PRODUCTS = (("mamba_d_ssm", ("mamba_n_heads", "mamba_d_head")), ("d_model", ("n_head", "d_head")))
SUMS = (
    ("qk_head_dim", ("qk_nope_head_dim", "qk_rope_head_dim")),
    ("head_dim", ("qk_nope_head_dim", "qk_rope_head_dim")),
    ("head_dim", ("qk_rope_head_dim",)),
)

MOST_BLOCKS = 6


@dataclass(frozen=True)
class _Stack:
    """Blocks of a model, and the numbers of those that a small model keeps; `num` is 0 if no field counts them."""

    num: int
    kept: tuple[int, ...]


@dataclass(frozen=True)
class _Whole:
    """Sizes of the whole model that others are relative to.

    Args:
        heads: heads of queries; head_size: width / heads. 0 where a configuration has none.
    """

    stack: _Stack
    heads: int
    head_size: float


def shrink(full: Fields, outer: _Whole | None = None) -> Fields:
    """The fields of a small configuration.

    Args:
        full: fields of a configuration as its `to_dict` gives them, of the model and of its parts.
        outer: sizes of the model that it is a part of; None for the model itself.
    """
    whole = _measure(full, outer)
    small = {name: _field(name, value, whole) for name, value in full.items() if name not in LEFT_OUT}
    _derive(full, small)
    if isinstance(rope := small.get("rope_parameters"), dict):
        small["rope_parameters"] = made = _rope(rope, small)
        name = LIMITS.get(limit.kind) if (limit := row_limit(small)) else None
        for part in (small, made, *made.values()):
            if isinstance(part, dict) and name in part:
                part[name] = WINDOW
    return small


def _measure(full: Fields, outer: _Whole | None) -> _Whole:
    heads = _first_count(full, QUERY_HEADS)
    if not heads and outer is not None:
        return _Whole(_Stack(0, ()), outer.heads, outer.head_size)
    return _Whole(_stack(full), heads, _first_count(full, WIDTHS) / heads if heads else 0.0)


def _first_count(full: Fields, names: Iterable[str]) -> int:
    return next((value for name in names if (value := _count(full, name)) is not None), 0)


def _count(full: Fields, name: str) -> int | None:
    """A field that counts something; True and False count nothing."""
    value = full.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# --------------------------------------------------------------------------- blocks


def _stack(full: Fields) -> _Stack:
    """Choose the first block of each type; types differ in any field that tells blocks apart."""
    named = (len(value) for name in BLOCK_TYPES if isinstance(value := full.get(name), list))
    num = _first_count(full, STACKS) or next(named, 0)
    types = [_type(full, num, index) for index in range(num)]
    kept: list[int] = []
    for index, kind in enumerate(types):
        if kind not in [types[other] for other in kept]:
            kept.append(index)
    kept = kept[:MOST_BLOCKS]
    cycles = [len(value) for name in CYCLES if isinstance(value := full.get(name), list)]
    kept += [index for index in range(num) if index not in kept][: max(max(2, *cycles, 0) - len(kept), 0)]
    return _Stack(num, tuple(sorted(kept)))


def _type(full: Fields, num: int, index: int) -> tuple[object, ...]:
    """The marks of a block among others: its entries of lists, whether lists name it, and whether it is a first one."""
    entries = [
        str(value[index]) if name not in BLOCK_LISTS else index in value
        for name, value in full.items()
        if isinstance(value, list) and (len(value) == num or name in BLOCK_LISTS)
    ]
    first = [index >= limit for name in FIRST_BLOCKS if (limit := _count(full, name)) is not None]
    return (*entries, *first)


# --------------------------------------------------------------------------- fields


def _field(name: str, value: object, whole: _Whole) -> object:
    if name in FIXED:
        return FIXED[name] if value is not None or name in ("pad_token_id", "is_decoder") else None
    if isinstance(value, list):
        return _list(name, value, whole)
    if isinstance(value, dict):
        return value if name in ("rope_parameters", "rope_scaling") else shrink(value, whole)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if any(part in name for part in SILENCED):
        return value * 0
    return value if isinstance(value, float) else _number(name, value, whole)


def _list(name: str, values: list[object], whole: _Whole) -> list[object]:
    stack = whole.stack
    if name in BLOCK_LISTS:
        return [stack.kept.index(index) for index in values if isinstance(index, int) and index in stack.kept]
    if len(values) == stack.num and name not in CYCLES:
        return [_field(name, values[index], whole) for index in stack.kept]
    return values


def _number(name: str, value: int, whole: _Whole) -> int:
    for names, rule in _RULES:
        if name in names:
            return rule(value, whole)
    most = VOCABULARY if "vocab" in name else _most(name)
    return value if most is None else min(value, most)


def _blocks(value: int, whole: _Whole) -> int:
    return len(whole.stack.kept) if value == whole.stack.num else min(value, 2)


def _head_size(value: int, whole: _Whole) -> int:
    """Width / heads stays that; a larger size stays larger, and a smaller one smaller."""
    own = HEAD_SIZE if value == whole.head_size or not whole.heads else 0
    return min(value, own or (2 * HEAD_SIZE if value > whole.head_size else HEAD_SIZE // 2))


def _few_heads(num: int) -> int:
    """A power of two, since heads divide the width."""
    return 1 << (min(max(num, 1), HEADS).bit_length() - 1)


def _key_heads(num: int, whole: _Whole) -> int:
    """One per head of queries, one in all, or half as many: groups stay groups."""
    few = _few_heads(whole.heads)
    return few if num == whole.heads else 1 if num == 1 else max(few // 2, 1)


# The first rule that names a field is its own; other fields have the sizes of `SIZES`.
_RULES: tuple[tuple[Collection[str], Callable[[int, _Whole], int]], ...] = (
    (POSITIONS, lambda value, whole: CONTEXT),
    (("vocab_size",), lambda value, whole: VOCABULARY),
    (STACKS, _blocks),
    (FIRST_BLOCKS, lambda value, whole: sum(index < value for index in whole.stack.kept)),
    (PERIODS, lambda value, whole: min(value, 2)),
    (OFFSETS, lambda value, whole: min(value, 1)),
    (KEY_HEADS, _key_heads),
    (QUERY_HEADS, lambda value, whole: _few_heads(value)),
    (HEAD_SIZES, _head_size),
    (WINDOWS, lambda value, whole: min(value, WINDOW)),
)


def _derive(full: Fields, small: Fields) -> None:
    """Keep the relations between fields that hold in the whole configuration."""
    for name, parts, combine in [(*one, sum) for one in SUMS] + [(*one, math.prod) for one in PRODUCTS]:
        wholes = [_count(full, part) for part in parts]
        smalls = [_count(small, part) for part in parts]
        if name not in small or None in (*wholes, *smalls):
            continue
        if full[name] == combine(number for number in wholes if number is not None):
            small[name] = combine(number for number in smalls if number is not None)


# --------------------------------------------------------------------------- rotary embedding


def _rope(rope: Fields, small: Fields) -> Fields:
    """Rotary fields with lists as long as the small head's rotated half; one set of them, or one per type of block."""
    if rope and all(isinstance(part, dict) for part in rope.values()):
        return {name: _rope(part, small) for name, part in rope.items() if isinstance(part, dict)}
    heads, width = _first_count(small, QUERY_HEADS), _first_count(small, WIDTHS)
    sized = _first_count(small, ("qk_rope_head_dim", "head_dim")) or width // max(heads, 1)
    factor = rope.get("partial_rotary_factor") or small.get("partial_rotary_factor") or 1
    half = int(sized * factor) // 2 if isinstance(factor, int | float) else sized // 2
    made = dict(rope)
    for name, value in rope.items():
        if isinstance(value, list) and name.endswith("_factor"):
            made[name] = (value * half)[:half]
        elif isinstance(value, list) and name == "mrope_section":
            made[name] = [half // len(value) + (place < half % len(value)) for place in range(len(value))]
        elif isinstance(value, int) and (most := _most(name)) is not None:
            made[name] = min(value, most)
    return made
