"""The family of Llama, and the fields and layers that other families share with it."""

from __future__ import annotations

from unpad.interchange.decoders import DecoderFamily
from unpad.interchange.folder import Fields
from unpad.interchange.readings import BIASES, GATED, HEADS, ROTARY, activation

NAMES = {
    "width": "hidden_size", "hidden": "intermediate_size", "blocks": "num_hidden_layers", "eps": "rms_norm_eps",
    "tied": "tie_word_embeddings", "attention_dropout": "attention_dropout",
}  # fmt: skip
FIXED: Fields = {"norm": "rmsnorm", "positions": "rotary"}
DEFAULTS: Fields = {
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
