"""Families of models that folders may hold, by `model_type` of config.json."""

import math
from dataclasses import replace
from pathlib import Path

from unpad.errors import CheckpointError
from unpad.interchange.decoders import (
    ATTENTION,
    BLOCKS,
    DEFAULTS,
    FEED_FORWARD,
    FIXED,
    LLAMA,
    NAMES,
    SILU,
    TOP,
    DecoderFamily,
)
from unpad.interchange.folder import Architecture, Change, Fields, shown
from unpad.interchange.llava import Llava
from unpad.interchange.readings import (
    BIASES,
    GATED,
    GEMMA_WINDOWS,
    HEADS,
    INNER,
    PLAIN,
    ROOT_SCALE,
    ROTARY,
    SAME_EMBEDDING,
    SOME_WINDOWS,
    TWO_ROTARIES,
    UNROTATED,
    WINDOW,
    activation,
)

MISTRAL = DecoderFamily(
    "MistralForCausalLM", "mistral", NAMES, (SILU, HEADS, ROTARY, WINDOW), FIXED,
    {**DEFAULTS, "sliding_window": 4096}, TOP, BLOCKS,
)  # fmt: skip
QWEN2 = DecoderFamily(
    "Qwen2ForCausalLM", "qwen2", NAMES, (SILU, HEADS, ROTARY, SOME_WINDOWS),
    {**FIXED, "qkv_bias": True}, {**DEFAULTS, "max_window_layers": 28}, TOP, BLOCKS,
)  # fmt: skip
QWEN3 = DecoderFamily(
    "Qwen3ForCausalLM", "qwen3", NAMES, (SILU, HEADS, ROTARY, SOME_WINDOWS),
    {**FIXED, "qk_norm": True}, {**DEFAULTS, "head_dim": 128, "max_window_layers": 28}, TOP, BLOCKS,
    covered={"attention_bias": (False,)},
)  # fmt: skip

MINIMIND = replace(
    QWEN3,
    covered={**QWEN3.covered, "use_moe": (False,), "inference_rope_scaling": (False,)},
    defaults={**QWEN3.defaults, "head_dim": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True},
)
SMOLLM3 = DecoderFamily(
    "SmolLM3ForCausalLM", "smollm3", NAMES, (SILU, HEADS, ROTARY, SOME_WINDOWS, BIASES, UNROTATED), FIXED,
    {
        **DEFAULTS, "rope_theta": 2e6, "tie_word_embeddings": True, "max_window_layers": 28,
        "no_rope_layer_interval": 4,
    },
    TOP, BLOCKS,
)  # fmt: skip


def _granite(name: str, fields: Fields) -> Change:
    """Multipliers of branches, scores and logits, which are folded into the weights here."""
    if ".o_proj." in name or ".down_proj." in name:
        return Change(scale=fields["residual_multiplier"])
    if ".q_proj." in name:
        head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
        return Change(scale=fields["attention_multiplier"] * math.sqrt(head_dim))
    return Change(scale=1 / fields["logits_scaling"]) if name.startswith("model.norm.") else Change()


GRANITE = DecoderFamily(
    "GraniteForCausalLM", "granite", {**NAMES, "embed_scale": "embedding_multiplier"}, (SILU, HEADS, ROTARY, BIASES),
    FIXED,
    {
        **DEFAULTS, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
    TOP, BLOCKS, change=_granite,
)  # fmt: skip


def _plus_one(name: str, fields: Fields) -> Change:
    """Norms that multiply by 1 + weight."""
    return Change(shift=1.0) if "norm" in name else Change()


def _gemma3(name: str, fields: Fields) -> Change:
    """Like Gemma's; the scale of the scores is folded into the norm of the queries here."""
    if ".q_norm." in name:
        scale = math.sqrt(fields["head_dim"] / fields["query_pre_attn_scalar"])
        return Change(scale=scale, shift=scale)
    return _plus_one(name, fields)


GEMMA = DecoderFamily(
    "GemmaForCausalLM", "gemma", NAMES, (SILU, HEADS, ROTARY, ROOT_SCALE), FIXED,
    {**DEFAULTS, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}, TOP, BLOCKS,
    covered={"attention_bias": (False,), "use_bidirectional_attention": (None, False), "hidden_activation": (
        None, "gelu_pytorch_tanh",
    )},
    change=_plus_one,
)  # fmt: skip
GEMMA3 = DecoderFamily(
    "Gemma3ForCausalLM", "gemma3_text", NAMES,
    (activation("hidden_activation", GATED), HEADS, TWO_ROTARIES, GEMMA_WINDOWS, ROOT_SCALE),
    {**FIXED, "qk_norm": True, "branch_norms": True},
    {
        **DEFAULTS, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
        "rope_theta": 1e6, "rope_local_base_freq": 10000.0, "sliding_window": 4096, "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
    },
    TOP,
    {
        **ATTENTION, **FEED_FORWARD, "norm_1": ("input_layernorm",), "attention_norm": ("post_attention_layernorm",),
        "norm_2": ("pre_feedforward_layernorm",), "feed_forward_norm": ("post_feedforward_layernorm",),
    },
    covered={
        "attention_bias": (False,), "use_bidirectional_attention": (None, False), "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
    },
    change=_gemma3,
)  # fmt: skip


GPT2 = DecoderFamily(
    "GPT2LMHeadModel", "gpt2",
    {
        "width": "n_embd", "blocks": "n_layer", "heads": "n_head", "eps": "layer_norm_epsilon",
        "context": "n_positions", "tied": "tie_word_embeddings", "dropout": "resid_pdrop",
        "attention_dropout": "attn_pdrop",
        "embed_dropout": "embd_pdrop",
    },
    (activation("activation_function", PLAIN), INNER), {"norm": "layernorm", "positions": "learned", "bias": True},
    {
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_positions": 1024, "resid_pdrop": 0.1,
        "attn_pdrop": 0.1, "embd_pdrop": 0.1, "tie_word_embeddings": True,
    },
    {"embed": "transformer.wte", "position_embed": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"},
    {
        "norm_1": ("ln_1",), "norm_2": ("ln_2",), "attention.to_qkv": ("attn.c_attn",),
        "attention.to_out": ("attn.c_proj",), "feed_forward.up": ("mlp.c_fc",), "feed_forward.down": ("mlp.c_proj",),
    },
    "transformer.", "h",
    covered={
        "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
    },
    change=lambda name, _: Change(transposed=name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))),
)  # fmt: skip


OPT = DecoderFamily(
    "OPTForCausalLM", "opt",
    {
        "width": "hidden_size", "hidden": "ffn_dim", "blocks": "num_hidden_layers", "heads": "num_attention_heads",
        "context": "max_position_embeddings", "tied": "tie_word_embeddings", "dropout": "dropout",
        "attention_dropout": "attention_dropout",
    },
    (activation("activation_function", PLAIN), SAME_EMBEDDING),
    {"norm": "layernorm", "positions": "learned", "bias": True, "eps": 1e-5},
    {
        "activation_function": "relu", "dropout": 0.1, "attention_dropout": 0.0, "tie_word_embeddings": True,
    },
    {
        "embed": "model.decoder.embed_tokens", "position_embed": "model.decoder.embed_positions",
        "norm": "model.decoder.final_layer_norm", "head": "lm_head",
    },
    {
        **ATTENTION, "attention.to_out": ("self_attn.out_proj",), "norm_1": ("self_attn_layer_norm",),
        "norm_2": ("final_layer_norm",), "feed_forward.up": ("fc1",), "feed_forward.down": ("fc2",),
    },
    "model.decoder.",
    covered={
        "do_layer_norm_before": (True,), "_remove_final_layer_norm": (False,), "enable_bias": (True,),
        "layer_norm_elementwise_affine": (True,),
    },
    change=lambda name, _: Change(skip_rows=2 if "embed_positions" in name else 0),
)  # fmt: skip

DECODERS = {
    family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, GRANITE, GEMMA, GEMMA3, GPT2, OPT)
}
FAMILIES: dict[str, Architecture] = {**DECODERS, "minimind": MINIMIND, "llava": Llava()}


def family_of(given: Fields, where: Path) -> Architecture:
    """The family that config.json names.

    Raises:
        CheckpointError: no family has this `model_type`.
    """
    kind = given.get("model_type") if isinstance(given, dict) else None
    if isinstance(kind, str) and kind in FAMILIES:
        return FAMILIES[kind]
    fix = f"known: {', '.join(FAMILIES)}; others train under transformers, where unpad.hf.attach removes the padding"
    raise CheckpointError(f"model_type is {shown(kind)}, which is not covered", where=str(where), fix=fix)
