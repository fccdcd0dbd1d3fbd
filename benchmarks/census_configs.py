"""Fields of released models that the default configuration of their class lacks, or leaves without a type of block."""

from __future__ import annotations

RELEASED: dict[str, dict[str, object]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "cohere_compass_text": {
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 10,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "dbrx": {"attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000.0}},
    "deepseek_v2": {
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
    },
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "granitemoehybrid": {"layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 3 + ["mamba"] * 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8},
    "lfm2": {"layer_types": (["conv"] * 2 + ["full_attention"]) * 10 + ["conv"] * 2},
    "lfm2_moe": {"layer_types": (["conv"] * 2 + ["full_attention"]) * 10 + ["conv"] * 2},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "qwen4_exp_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 16,
    },
    "xmod": {"default_language": "en_XX"},
}
RELEASED["qwen4_exp"] = {"text_config": RELEASED["qwen4_exp_text"]}
