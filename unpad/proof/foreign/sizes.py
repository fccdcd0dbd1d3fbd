"""Sizes of small models: fields of transformers configurations by what they count, and the upper limit of each.

Tables cover the names of all families; a field in no table keeps its value.
"""

from __future__ import annotations

Fields = dict[str, object]

HEADS, HEAD_SIZE = 4, 16  # of a block of 64 numbers per token
VOCABULARY = 128  # ids; special ones are 0, 1, 2 and the last
ORDINARY = range(3, 112)  # ids without a special meaning in a small configuration
CONTEXT = 512  # positions, more than all sequences of the proof have


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _most(sizes: dict[int, str]) -> dict[str, int]:
    return {name: most for most, names in sizes.items() for name in _names(names)}


# A size is never raised.
MOST = _most(
    {
        CONTEXT: "max_source_positions original_max_position_embeddings",
        96: "intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim d_ff dff dim_ff d_inner "
        "ffn_hidden_size feed_forward_size intermediate_size_mlp dense_intermediate_size",
        64: "hidden_size d_model n_embd emb_dim embed_dim embedding_dim embedding_size word_embed_proj_dim lru_width "
        "attention_hidden_size input_embedding_size output_embedding_size hidden_size_global backbone_hidden_size "
        "adapter_in_dim adapter_input_size adapter_out_dim input_size pronunciation_embed_dim "
        "shape_embed_dim hc_lowrank ple_embed_dim",
        48: "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
        "moe_shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size",
        32: "q_lora_rank o_lora_rank mamba_d_head mamba_head_dim lsh_attn_chunk_length local_attn_chunk_length "
        "laurel_rank",
        16: "kv_lora_rank qk_nope_head_dim v_head_dim swa_v_head_dim index_head_dim indexer_head_dim linear_head_dim "
        "linear_key_head_dim linear_value_head_dim d_kv attention_head_size dim_head d_head kv_channels d_rel "
        "gated_norm_rank adapter_rank router_hidden_size image_size num_mel_bins indexer_budget "
        # A key that no head of an indexer scores above zero ties with others, which happens to few heads alone.
        "index_n_heads indexer_n_heads",
        8: "qk_rope_head_dim rotary_dim mamba_d_state state_size ssm_state_size mamba_chunk_size chunk_size "
        "hidden_size_per_layer_input time_step_rank mamba_dt_rank rel_extent index_block_size block_size",
        4: "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num patch_size ngram_size",
        2: "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts n_group num_expert_group "
        "linear_num_key_heads o_groups indexer_compress_ratio heads_per_ngram split_ngram_parts",
        1: "topk_group n_shared_experts num_shared_experts moe_num_shared_experts n_groups mamba_n_groups "
        "mamba_ngroups num_nextn_predict_layers",
    }
)

# Fields that are raised as well: the sequences of the proof must fit.
POSITIONS = _names(
    "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length model_max_length seq_length "
    "max_target_positions context_length"
)
VOCABULARIES = ("vocab_size",)

# Windows, in positions: shorter than the sequences of the proof, so that what they hide shows.
WINDOW = 8
WINDOWS = _names(
    "sliding_window sliding_window_size window_size attention_window_size local_attention attention_chunk_size "
    "keep_window_size index_topk"
)

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

# Fields for differing blocks: lists of block numbers, first blocks, last blocks, and intervals between blocks.
BLOCK_LISTS = _names(
    "full_attn_idxs moe_layers mlp_only_layers cross_attention_layers hybrid_layer_ids ple_layer_ids attn_layer_indices"
)
FIRST_BLOCKS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "max_window_layers")
LAST_BLOCKS = ("num_kv_shared_layers",)
END_BLOCKS = ("moe_layer_end_index",)
PERIODS = _names(
    "attn_layer_period expert_layer_period decoder_sparse_step interleave_moe_layer_step full_attention_interval "
    "sliding_window_pattern global_attn_every_n_layers no_rope_layer_interval layer_group_size moe_layer_interval "
    "n_layers_per_attn_res_block"
)
OFFSETS = _names("attn_layer_offset expert_layer_offset prefix_dense_sliding_window_pattern")
BLOCK_TYPES = ("layer_types", "layers_block_type")  # lists that count the blocks where no field does
CYCLES = ("block_types",)  # lists that repeat over the blocks
SHARING = ("hybrid",)  # types whose blocks share weights: two of them are kept

# Fields with the same value in every small model. Trainers compute without a cache, and the loss of a router is a mean
# over the tokens of a batch, which depends on batching by definition.
FIXED: Fields = {
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
PRODUCTS = (("mamba_d_ssm", ("mamba_n_heads", "mamba_d_head")),)
SUMS = (
    ("qk_head_dim", ("qk_nope_head_dim", "qk_rope_head_dim")),
    ("head_dim", ("qk_nope_head_dim", "qk_rope_head_dim")),
    ("head_dim", ("qk_rope_head_dim",)),
)

# Families with sizes that depend on each other in ways of their own.
FAMILIES: dict[str, Fields] = {
    "cpmant": {"prompt_length": 4},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "mamba2": {"head_dim": 32, "num_heads": 4, "time_step_rank": 4},
    "musicgen_decoder": {"num_codebooks": 1},
    "reformer": {"axial_pos_embds": False},
    "roc_bert": {"pronunciation_embed_dim": 32, "shape_embed_dim": 32},
    "xlm": {"causal": True},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, "mamba_dt_rank": 4},
    "zamba2": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_headdim": 32,
        "kv_channels": 16,
        "num_query_groups": 4,
    },
}
